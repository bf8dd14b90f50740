"""A daemon's calls about schedules and their occurrences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from pgworkd.core.source import Occurrence
from pgworkd.database.connection import Connection

_SCHEDULES = """SELECT e.name, e.cron, e.every_s, e.timezone, e.missed, e.revision, e.last_occurrence, e.at, e.broken,
        s.missed_grace_s, s.in_force_since
    FROM pgworkd.ensure_schedules() e JOIN pgworkd.schedules s ON s.name = e.name"""


class ScheduleRow(NamedTuple):
    """An enabled schedule. `broken`: it has no live occurrence; `at`: the database's time."""

    name: str
    cron: str | None
    every_s: int | None
    timezone: str
    missed: str
    revision: int
    last_occurrence: datetime | None
    at: datetime
    broken: bool
    missed_grace_s: float = 60.0
    in_force_since: datetime | None = None


class Undeclared(NamedTuple):
    """A schedule that is not as this worker declares it.

    `rule`: what is in force instead, by the columns of `schedules`, and `worker`, who declares that (None: the row is
    locked); `rule` None: no worker declares the schedule, but it is enabled.
    """

    name: str
    rule: dict[str, Any] | None
    worker: str | None


def columns(occurrences: Sequence[Occurrence]) -> tuple[list[str], list[datetime], list[int]]:
    """Occurrences as the three parallel arrays that the settle functions take."""
    return [o.schedule for o in occurrences], [o.at for o in occurrences], [o.revision for o in occurrences]


class ScheduleStore:
    """The part of `Store` for schedules. All methods raise PgworkdError."""

    _maintenance: Connection

    async def declare_rules(self, worker_id: int | None, rules: Mapping[str, Mapping[str, Any]]) -> list[Undeclared]:
        """Declares the schedules of this worker's code, with their rules; returns what is not as declared.

        `rules`: by name, the columns of `schedules`; `worker_id` is None before the registration.
        """
        sql = "SELECT name, rule::text, worker FROM pgworkd.declare_rules($1, $2::text::jsonb)"
        rows = await self._maintenance.fetch(sql, worker_id, json.dumps(rules))
        return [Undeclared(row[0], None if row[1] is None else json.loads(row[1]), row[2]) for row in rows]

    async def schedules(self) -> list[ScheduleRow]:
        """All enabled schedules."""
        return [ScheduleRow(*row) for row in await self._maintenance.fetch(_SCHEDULES)]

    async def add_occurrences(self, occurrences: Sequence[Occurrence]) -> list[str]:
        """Inserts occurrences of schedules that have none; returns the names that got one."""
        return list(
            await self._maintenance.value("SELECT pgworkd.restore_occurrences($1, $2, $3)", *columns(occurrences))
        )

    async def fail_schedule(self, name: str, revision: int, error: str) -> bool:
        """Stores why a schedule has no next occurrence; True if that was not stored before."""
        return bool(await self._maintenance.value("SELECT pgworkd.fail_schedule($1, $2, $3)", name, revision, error))

    async def retire_schedules(self, names: Sequence[str]) -> list[str]:
        """Disables the schedules among these that no worker declares; returns their names."""
        return list(await self._maintenance.value("SELECT pgworkd.retire_schedules($1)", names))

    async def missed_since(self, job_id: UUID, attempt: int) -> datetime | None:
        """Since when workers serve the queue of this occurrence, if it was missed and must be skipped; else None."""
        found: datetime | None = await self._maintenance.value("SELECT pgworkd.missed_since($1, $2)", job_id, attempt)
        return found
