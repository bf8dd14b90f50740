"""What operators ask of the database and do to it: one method per question or verb, no daemon needed.

Every call is one or a few short statements on one connection, each bounded by the link's time limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Self
from uuid import UUID

from pgworkd.admin import doctor_queries as health
from pgworkd.admin import queries as sql
from pgworkd.admin.batches import BatchActs
from pgworkd.admin.doctor_queries import Health
from pgworkd.admin.jobs import Acts, check_payload
from pgworkd.admin.keys import KeyActs
from pgworkd.admin.queries import Doctor, Enqueued, Job, JobRow, Jobs, QueueRow, ScheduleRow, Server, Stats, WorkerRow
from pgworkd.admin.queues import QueueActs
from pgworkd.admin.schedules import ScheduleActs
from pgworkd.database import schema
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.errors import SchemaError, UsageError, delay_seconds
from pgworkd.words import validation

STATUSES = ("pending", "running", "failed", "dead", "completed", "cancelled", "expired", "discarded", "blocked")
_FINISHED = ("completed", "cancelled", "expired", "discarded")
ON_DUPLICATE = ("raise", "skip", "replace", "reschedule")


class Admin(Acts, BatchActs, KeyActs, QueueActs, ScheduleActs):
    """The operator's way to the database, on one connection that is made when first needed.

    All methods raise DatabaseUnavailable (away, too slow), SchemaError (not installed), UsageError (a bad
    argument, a refused login) and DatabaseError (the rest).
    """

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(Connection(options, "admin"))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._connection.close()

    # Look

    async def queues(self) -> list[QueueRow]:
        """Every queue that has live jobs, a worker or settings. Reads all live jobs."""
        return [sql.read(QueueRow, row) for row in await self._connection.fetch(sql.QUEUES)]

    async def workers(self) -> list[WorkerRow]:
        """Every worker that has not signed off."""
        return [sql.read(WorkerRow, row) for row in await self._connection.fetch(sql.WORKERS)]

    async def jobs(
        self,
        queue: str | None = None,
        kind: str | None = None,
        status: str | None = None,
        limit: int = 20,
    ) -> Jobs:
        """The newest jobs, at most `limit` (1 to ROWS_MAX), of those that match everything that is not None.

        Live jobs are all looked at, finished ones back to the newest sql.HISTORY_ROWS_MAX.
        """
        validation.bounded(limit)
        if status is not None and status not in STATUSES:
            raise UsageError(f"status {status!r}: give one of {', '.join(STATUSES)}")
        wanted = (validation.name(queue), validation.name(kind), status, limit)
        found = () if status == "discarded" else await self._connection.fetch(sql.LIVE_JOBS, *wanted)
        live = [sql.read(JobRow, row) for row in found]
        if status not in (None, *_FINISHED):
            return Jobs(live, complete=True)
        old = [
            sql.read(JobRow, row)
            for row in await self._connection.fetch(sql.FINISHED_JOBS, *wanted, sql.HISTORY_ROWS_MAX)
        ]
        once = {row.id: row for row in [*live, *old]}  # one that ended between the two statements is in both
        rows = sorted(once.values(), key=lambda row: row.id, reverse=True)[:limit]
        filtered = (queue, kind, status) != (None, None, None)
        cut = (
            len(rows) < limit
            and filtered
            and bool(await self._connection.value(sql.MORE_FINISHED_JOBS, sql.HISTORY_ROWS_MAX))
        )
        return Jobs(rows, complete=not cut)

    async def job(self, job_id: UUID) -> Job | None:
        """One job whole, live or finished; None when there is none (or its history is forgotten).

        On a standby without its progress.
        """
        standby = await self._connection.value(sql.IS_STANDBY)
        rows = await self._connection.fetch(sql.ONE_JOB_ON_STANDBY if standby else sql.ONE_JOB, job_id)
        return sql.read(Job, rows[0]) if rows else None

    async def statuses(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The status of each of these jobs (at most ROWS_MAX) that exists."""
        validation.bounded(len(ids))
        return {row[0]: row[1] for row in await self._connection.fetch(sql.STATUSES, ids)}

    async def schedules(self) -> list[ScheduleRow]:
        """Every schedule."""
        return [sql.read(ScheduleRow, row) for row in await self._connection.fetch(sql.SCHEDULES)]

    async def stats(self, queue: str | None = None) -> Stats:
        """Counts over one queue or all; zeros for a queue that nobody knows."""
        return Stats(*(await self._connection.fetch(sql.STATS, validation.name(queue)))[0])

    async def depth(self, queue: str, most: int = 100_000) -> int:
        """How many jobs of the queue could run now; `most` stands for that many or more. Reads no others."""
        return int(await self._connection.value(sql.DEPTH, validation.name(queue), most))

    # Do

    async def enqueue(
        self,
        queue: str,
        payload_text: str = "{}",
        *,
        kind: str | None = None,
        priority: int | None = None,
        delay_s: float | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        timeout_s: float | None = None,
        dedupe_key: str | None = None,
        dedupe_for_s: float | None = None,
        serialize_key: str | None = None,
        limit_key: str | None = None,
        on_retry: str = "hold",
        on_duplicate: str = "skip",
    ) -> Enqueued:
        """Inserts a job whose payload is the JSON object `payload_text`, stored as it is written.

        Seconds: 0 to 366 days. Instants: with a time zone, 1970 to 2199. Without `delay_s` and `run_at` it is due
        now. `on_duplicate` says what to do where the dedupe key is taken; see pgworkd.enqueue() in the schema.
        UsageError (InvalidPayload is one) tells what is out of bounds.
        """
        check_payload(payload_text)
        _check_together(run_at, delay_s, dedupe_key, dedupe_for_s, serialize_key, on_retry, on_duplicate)
        args = (
            validation.text(queue, "queue", 200),
            None if kind is None else validation.text(kind, "kind", 200),
            payload_text,
            None if priority is None else validation.whole(priority, "priority", -(2**31), 2**31 - 1),
            None if run_at is None else validation.instant(run_at, "run_at"),
            None if delay_s is None else delay_seconds(delay_s, "delay_s"),
            None if expires_at is None else validation.instant(expires_at, "expires_at"),
            None if max_attempts is None else validation.whole(max_attempts, "max_attempts", 1, 1000),
            # The column is a real, which takes what is too small for 0.
            None if timeout_s is None else max(delay_seconds(timeout_s, "timeout_s"), 1e-6),
            None if dedupe_key is None else validation.text(dedupe_key, "dedupe_key", 512),
            None if dedupe_for_s is None else delay_seconds(dedupe_for_s, "dedupe_for_s"),
            None if serialize_key is None else validation.text(serialize_key, "serialize_key", 512),
            None if limit_key is None else validation.text(limit_key, "limit_key", 512),
            on_retry,
            "raise" if dedupe_key is None else on_duplicate,
        )
        return Enqueued(*(await self._connection.fetch(sql.ENQUEUE, *args))[0])

    async def known_queues(self) -> list[str]:
        """The queues that have a live job, a worker, settings or a schedule. Reads all live jobs."""
        return [row[0] for row in await self._connection.fetch(sql.KNOWN)]

    async def is_known(self, queue: str) -> bool:
        """True if the queue has a live job, a worker, settings or a schedule; a standby cannot tell: True."""
        if await self._connection.value(sql.IS_STANDBY):
            return True
        return bool(await self._connection.value(sql.IS_KNOWN, validation.name(queue)))

    async def is_served(self, queue: str) -> bool:
        """True if some worker serves the queue now."""
        return bool(await self._connection.value(sql.IS_SERVED, validation.name(queue)))

    # Examine

    async def server(self) -> Server:
        """Facts that need no schema."""
        return Server(*(await self._connection.fetch(sql.SERVER))[0])

    async def verify(self) -> None:
        """Raises SchemaError, with the remedy, unless the database has exactly our schema."""
        found = await schema.installed_version(self._connection)
        if found is None:
            raise SchemaError("this database has no pgworkd schema: run pgworkd migrate")
        if found != schema.VERSION:
            remedy = "run pgworkd migrate" if found < schema.VERSION else "upgrade pgworkd on this host"
            raise SchemaError(f"the schema is at version {found}, this program needs {schema.VERSION}: {remedy}")

    async def doctor(self) -> Doctor:
        """Facts that need the schema. Dead jobs are counted up to health.DEAD_MAX."""
        return Doctor(*(await self._connection.fetch(sql.DOCTOR, health.DEAD_MAX))[0])

    async def health(self, *, standby: bool = False) -> Health:
        """What keeps jobs from running, of at most health.QUEUES_MAX queues: at a cost that does not grow with jobs.

        Nothing of queues and kinds on a `standby`: it does not know who serves them.
        """
        fetch = self._connection.fetch
        queues, kinds = [], []
        if not standby:
            names = [row[0] for row in await fetch(health.QUEUES, health.QUEUES_MAX)]
            queues = await fetch(health.HEALTH, names, health.PRIORITIES_MAX)
            kinds = await fetch(health.UNKNOWN_KINDS, names, health.KINDS_ROWS)
        return Health(
            [health.QueueHealth(*row) for row in queues],
            [health.UnknownKind(*row) for row in kinds],
            [health.BrokenSchedule(*row) for row in await fetch(health.SCHEDULES)],
            [health.Behind(*row) for row in await fetch(health.BEHIND, health.DEAD_MAX)],
            health.PendingEffects(*(await fetch(health.EFFECTS, health.DEAD_MAX))[0]),
        )


def _check_together(
    run_at: datetime | None,
    delay_s: float | None,
    dedupe_key: str | None,
    dedupe_for_s: float | None,
    serialize_key: str | None,
    on_retry: str,
    on_duplicate: str,
) -> None:
    """Refuses what does not go together, before the database does so in its words."""
    if delay_s is not None and run_at is not None:
        raise UsageError("run_at and delay_s are both given: pass one of them")
    if dedupe_for_s is not None and dedupe_key is None:
        raise UsageError("dedupe_for_s needs a dedupe_key: it says for how long that is taken")
    if dedupe_for_s == 0:
        raise UsageError("dedupe_for_s is 0: pass more, or nothing to free the key when the job is over")
    if on_retry not in ("hold", "yield"):
        raise UsageError(f"on_retry {on_retry!r}: give hold or yield")
    if on_retry == "yield" and serialize_key is None:
        raise UsageError("on_retry yield needs a serialize_key: without one there is nothing to hold")
    if on_duplicate not in ON_DUPLICATE:
        raise UsageError(f"on_duplicate {on_duplicate!r}: give one of {', '.join(ON_DUPLICATE)}")
