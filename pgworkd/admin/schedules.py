"""Operations on schedules."""

from __future__ import annotations

from uuid import UUID

from pgworkd.admin.queries import SCHEDULES, ScheduleRow, read
from pgworkd.database.connection import Connection
from pgworkd.words import validation


class ScheduleOperations:
    """`admin.schedules`. Raises the errors of `Admin`, and DatabaseError for a name that does not exist."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self) -> list[ScheduleRow]:
        """Every schedule, by name."""
        return [read(ScheduleRow, row) for row in await self._connection.fetch(SCHEDULES)]

    async def enable(self, name: str) -> bool:
        """Enables a schedule; False if it was enabled already."""
        return await self._enable(name, enabled=True)

    async def disable(self, name: str) -> bool:
        """Disables a schedule, which then gets no further occurrences; False if it was disabled already."""
        return await self._enable(name, enabled=False)

    async def remove(self, name: str) -> None:
        """Deletes a schedule. Refused while a live worker has it in its code: that would insert it again."""
        await self._connection.value("SELECT pgworkd.remove_schedule($1)", validation.text(name, "name", 200))

    async def run_now(self, name: str) -> UUID:
        """Inserts a job of the schedule that is due now, in addition to its occurrences; the job's id."""
        found: UUID = await self._connection.value(
            "SELECT pgworkd.run_schedule($1)", validation.text(name, "name", 200)
        )
        return found

    async def _enable(self, name: str, *, enabled: bool) -> bool:
        name = validation.text(name, "name", 200)
        return bool(await self._connection.value("SELECT pgworkd.enable_schedule($1, $2)", name, enabled))
