"""Operations on schedules."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from pgworkd.admin.queries import SCHEDULES, ListedSchedule, read
from pgworkd.client.new_job import FIELDS, NewJob, row
from pgworkd.core import validation
from pgworkd.core.json_text import JsonText
from pgworkd.core.payload import encode
from pgworkd.core.recurrence import Recurrence
from pgworkd.database.connection import Connection

_PUT = """INSERT INTO pgworkd.schedules AS s
        (name, queue, kind, payload, cron, every_s, timezone, missed, missed_grace_s, priority, max_attempts,
         timeout_s, enabled, waits_for_retries)
    SELECT $1::text, $2::text, $3::text, $4::text::jsonb, $5::text, $6::int, $7::text, $8::text, $9::real, $10::int,
           $11::int, $12::float8, $13::boolean, $14::boolean
    ON CONFLICT (name) DO UPDATE
    SET queue = excluded.queue, kind = excluded.kind, payload = excluded.payload, cron = excluded.cron,
        every_s = excluded.every_s, timezone = excluded.timezone, missed = excluded.missed,
        priority = excluded.priority, max_attempts = excluded.max_attempts, timeout_s = excluded.timeout_s,
        missed_grace_s = excluded.missed_grace_s, waits_for_retries = excluded.waits_for_retries,
        enabled = excluded.enabled, retired_at = NULL
    WHERE s.source = 'sql'
    RETURNING xmax = 0"""


_GET = """SELECT queue::text, kind::text, payload::text, cron, every_s, timezone, missed, missed_grace_s::float8,
        priority, max_attempts::int, timeout_s::float8, enabled, waits_for_retries
    FROM pgworkd.schedules WHERE name = $1"""
_ENABLE_ALL = """SELECT count(*) FILTER (WHERE pgworkd.enable_schedule(o.name, $1))
    FROM (SELECT s.name FROM pgworkd.schedules s ORDER BY s.name) o"""


@dataclass(frozen=True, slots=True)
class NewSchedule:
    """A schedule to store: its rule, and the job that is inserted for each occurrence."""

    queue: str
    rule: Recurrence
    kind: str | None = None
    payload_text: str = "{}"
    """The payload of each job: a JSON object."""
    priority: int = 0
    max_attempts: int | None = None
    timeout_s: float | None = None
    enabled: bool = True
    wait_for_retries: bool = False
    """No next occurrence is inserted while one is retried."""


class ScheduleOperations:
    """`admin.schedules`. Raises the errors of `Admin`, and DatabaseError for a name that does not exist."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self) -> list[ListedSchedule]:
        """Every schedule, by name."""
        return [read(ListedSchedule, each) for each in await self._connection.fetch(SCHEDULES)]

    async def get(self, name: str) -> NewSchedule | None:
        """A schedule as `put` takes it; None: there is none of that name."""
        rows = await self._connection.fetch(_GET, validation.text(name, "name", 200))
        if not rows:
            return None
        queue, kind, payload, *rule, priority, max_attempts, timeout_s, enabled, waits = rows[0]
        options = (kind, payload, priority, max_attempts, timeout_s, enabled, waits)
        return NewSchedule(queue, Recurrence(*rule), *options)

    async def put(self, name: str, schedule: NewSchedule) -> bool | None:
        """Inserts a schedule, or replaces the one of that name; whether it is new, None: code declares it.

        A daemon that serves the queue inserts its next occurrence, within a minute.
        """
        name, rule = validation.text(name, "name", 200), schedule.rule
        options = {each: getattr(schedule, each) for each in ("kind", "priority", "max_attempts", "timeout_s")}
        job = row(NewJob(schedule.queue, **options), payload=encode(JsonText(schedule.payload_text)))
        values = dict(zip((field.name for field in FIELDS), job, strict=True))
        found = await self._connection.fetch(
            _PUT,
            name,
            *(values[each] for each in ("queue", "kind", "payload")),
            rule.cron,
            rule.every_s,
            rule.timezone,
            rule.missed,
            rule.missed_grace_s,
            *(values[each] for each in ("priority", "max_attempts", "timeout_s")),
            schedule.enabled,
            schedule.wait_for_retries,
        )
        return bool(found[0][0]) if found else None

    async def enable(self, name: str) -> bool:
        """Enables a schedule; False if it was enabled already."""
        return await self._enable(name, enabled=True)

    async def disable(self, name: str) -> bool:
        """Disables a schedule, which then gets no further occurrences; False if it was disabled already."""
        return await self._enable(name, enabled=False)

    async def enable_all(self, *, enabled: bool) -> int:
        """Enables or disables every schedule; how many were not before."""
        return int(await self._connection.value(_ENABLE_ALL, enabled))

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
