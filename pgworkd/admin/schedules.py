"""What operators do to schedules."""

from __future__ import annotations

from uuid import UUID

from pgworkd.database.connection import Connection
from pgworkd.words import validation


class ScheduleActs:
    """The part of `Admin` that is about schedules. Raises what that raises; DatabaseError for one that is not there."""

    _connection: Connection

    async def enable_schedule(self, name: str, *, enabled: bool) -> bool:
        """Enables or disables it; False if it was so before."""
        name = validation.text(name, "name", 200)
        return bool(await self._connection.value("SELECT pgworkd.enable_schedule($1, $2)", name, enabled))

    async def remove_schedule(self, name: str) -> None:
        """Deletes it; refused while it stands in the code of a living worker, which would enter it again."""
        await self._connection.value("SELECT pgworkd.remove_schedule($1)", validation.text(name, "name", 200))

    async def run_schedule(self, name: str) -> UUID:
        """Inserts a job as it would, due now, besides its occurrences; the job's id."""
        found: UUID = await self._connection.value(
            "SELECT pgworkd.run_schedule($1)", validation.text(name, "name", 200)
        )
        return found
