"""What operators ask of the database and do to it: one method per question or verb, no daemon needed.

Every call is one or a few short statements on one connection, each bounded by the link's time limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Self
from uuid import UUID

from . import admin_sql as sql
from . import schema
from .admin_sql import Doctor, Enqueued, Job, JobRow, Jobs, QueueRow, Retried, ScheduleRow, Server, Stats, WorkerRow
from .errors import DatabaseError, InvalidPayload, SchemaError, UsageError, delay_seconds
from .link import Link, LinkOptions
from .payload import BYTES_MAX, decode, encode

ROWS_MAX = 1000
STATUSES = ("pending", "running", "failed", "dead", "completed", "cancelled", "expired", "blocked")
_FINISHED = ("completed", "cancelled", "expired", "dead")
_UNIQUE_VIOLATION = "23505"
_FIRST, _END = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class Admin:
    """The operator's way to the database, on one connection that is made when first needed.

    All methods raise DatabaseUnavailable (away, too slow), SchemaError (not installed), UsageError (a bad
    argument, a refused login) and DatabaseError (the rest).
    """

    def __init__(self, options: LinkOptions) -> None:
        self._link = Link(options, "admin")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()

    # Look

    async def queues(self) -> list[QueueRow]:
        """Every queue that has live jobs, a worker or settings. Reads all live jobs."""
        return [sql.read(QueueRow, row) for row in await self._link.fetch(sql.QUEUES)]

    async def workers(self) -> list[WorkerRow]:
        """Every worker that has not signed off."""
        return [sql.read(WorkerRow, row) for row in await self._link.fetch(sql.WORKERS)]

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
        _bounded(limit)
        if status is not None and status not in STATUSES:
            raise UsageError(f"status {status!r}: give one of {', '.join(STATUSES)}")
        wanted = (_name(queue), _name(kind), status, limit)
        live = [sql.read(JobRow, row) for row in await self._link.fetch(sql.LIVE_JOBS, *wanted)]
        if status not in (None, *_FINISHED):
            return Jobs(live, complete=True)
        old = [
            sql.read(JobRow, row) for row in await self._link.fetch(sql.FINISHED_JOBS, *wanted, sql.HISTORY_ROWS_MAX)
        ]
        once = {row.id: row for row in [*live, *old]}  # one that ended between the two statements is in both
        rows = sorted(once.values(), key=lambda row: row.id, reverse=True)[:limit]
        filtered = (queue, kind, status) != (None, None, None)
        cut = (
            len(rows) < limit
            and filtered
            and bool(await self._link.value(sql.MORE_FINISHED_JOBS, sql.HISTORY_ROWS_MAX))
        )
        return Jobs(rows, complete=not cut)

    async def job(self, job_id: UUID) -> Job | None:
        """One job whole, live or finished; None when there is none (or its history is forgotten)."""
        rows = await self._link.fetch(sql.ONE_JOB, job_id)
        return sql.read(Job, rows[0]) if rows else None

    async def statuses(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The status of each of these jobs (at most ROWS_MAX) that exists."""
        _bounded(len(ids))
        return {row[0]: row[1] for row in await self._link.fetch(sql.STATUSES, ids)}

    async def schedules(self) -> list[ScheduleRow]:
        """Every schedule."""
        return [sql.read(ScheduleRow, row) for row in await self._link.fetch(sql.SCHEDULES)]

    async def stats(self, queue: str | None = None) -> Stats:
        """Counts over one queue or all; zeros for a queue that nobody knows."""
        return Stats(*(await self._link.fetch(sql.STATS, _name(queue)))[0])

    # Do

    async def enqueue(
        self,
        queue: str,
        payload_text: str = "{}",
        *,
        kind: str | None = None,
        priority: int = 0,
        delay_s: float | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        timeout_s: float | None = None,
        dedupe_key: str | None = None,
    ) -> Enqueued:
        """Inserts a job whose payload is the JSON object `payload_text`, stored as it is written.

        Seconds: 0 to 366 days. Instants: with a time zone, 1970 to 2199. Without `delay_s` and `run_at` it is due
        now. UsageError (InvalidPayload is one) tells what is out of bounds.
        """
        if len(payload_text.encode(errors="surrogatepass")) > BYTES_MAX:
            raise InvalidPayload("payload", f"takes more than the {BYTES_MAX:,} bytes that are allowed")
        encode(decode(payload_text))  # for its refusals
        if delay_s is not None and run_at is not None:
            raise UsageError("run_at and delay_s are both given: pass one of them")
        args = (
            _text(queue, "queue", 200),
            None if kind is None else _text(kind, "kind", 200),
            payload_text,
            _whole(priority, "priority", -(2**31), 2**31 - 1),
            None if run_at is None else _instant(run_at, "run_at"),
            None if delay_s is None else delay_seconds(delay_s, "delay_s"),
            None if expires_at is None else _instant(expires_at, "expires_at"),
            None if max_attempts is None else _whole(max_attempts, "max_attempts", 1, 1000),
            # The column is a real, which takes what is too small for 0.
            None if timeout_s is None else max(delay_seconds(timeout_s, "timeout_s"), 1e-6),
            None if dedupe_key is None else _text(dedupe_key, "dedupe_key", 512),
        )
        # A holder of the key that ends between the two statements leaves room for ours.
        for _attempt in range(3):
            if (made := await self._link.value(sql.ENQUEUE, *args)) is not None:
                return Enqueued(made, created=True)
            if (found := await self._link.value(sql.HOLDER, queue, dedupe_key)) is not None:
                return Enqueued(found, created=False)
        raise DatabaseError("jobs with this dedupe key come and go too fast: try again", sqlstate=_UNIQUE_VIOLATION)

    async def retry(self, ids: Sequence[UUID]) -> Retried:
        """Runs dead jobs again with a fresh budget and waiting retries now; at most ROWS_MAX, others are left alone."""
        _bounded(len(ids))
        try:
            changed = await self._link.value("SELECT pgworkd.retry($1)", ids)
            return Retried(list(changed), [])
        except DatabaseError as error:
            if error.sqlstate != _UNIQUE_VIOLATION:
                raise
            if len(ids) == 1:
                return Retried([], list(ids))
        # One of them cannot be: find out which, half by half.
        halves = [await self.retry(ids[: len(ids) // 2]), await self.retry(ids[len(ids) // 2 :])]
        return Retried([i for half in halves for i in half.changed], [i for half in halves for i in half.held_back])

    async def cancel(self, ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """Ends waiting and dead jobs ('cancelled') and has running ones ended ('requested'); at most ROWS_MAX.

        Jobs that are over or unknown are missing from the answer.
        """
        _bounded(len(ids))
        rows = await self._link.fetch("SELECT id, outcome FROM pgworkd.cancel($1)", ids)
        return {row[0]: row[1] for row in rows}

    async def discard(self, ids: Sequence[UUID]) -> int:
        """Moves dead jobs to the history; how many. At most ROWS_MAX, others are left alone."""
        _bounded(len(ids))
        return int(await self._link.value("SELECT pgworkd.discard($1)", ids))

    async def dead_ids(
        self, queue: str | None = None, kind: str | None = None, limit: int = ROWS_MAX, after: UUID | None = None
    ) -> list[UUID]:
        """Dead jobs that match, oldest first; `after` goes on behind the last id of the answer before."""
        _bounded(limit)
        return [row[0] for row in await self._link.fetch(sql.DEAD, _name(queue), _name(kind), after, limit)]

    async def pause(self, queue: str, for_s: float | None = None) -> None:
        """No daemon starts a job of this queue for `for_s` seconds; None: until `resume`."""
        if for_s is not None:
            for_s = delay_seconds(for_s, "the length of the pause")
        await self._link.value(sql.PAUSE, _name(queue), for_s)
        await self._link.fetch(sql.POKE, queue)

    async def resume(self, queue: str) -> bool:
        """Ends a pause; False if there was none."""
        if not await self._link.value(sql.RESUME, _name(queue)):
            return False
        await self._link.fetch(sql.POKE, queue)
        return True

    async def known_queues(self) -> list[str]:
        """The queues that have a live job, a worker, settings or a schedule. Reads all live jobs."""
        return [row[0] for row in await self._link.fetch(sql.KNOWN)]

    async def is_known(self, queue: str) -> bool:
        """True if the queue has a live job, a worker, settings or a schedule."""
        return bool(await self._link.value(sql.IS_KNOWN, _name(queue)))

    async def is_served(self, queue: str) -> bool:
        """True if some worker serves the queue now."""
        return bool(await self._link.value(sql.IS_SERVED, _name(queue)))

    # Examine

    async def server(self) -> Server:
        """Facts that need no schema."""
        return Server(*(await self._link.fetch(sql.SERVER))[0])

    async def verify(self) -> None:
        """Raises SchemaError, with the remedy, unless the database has exactly our schema."""
        found = await schema.installed_version(self._link)
        if found is None:
            raise SchemaError("this database has no pgworkd schema: run pgworkd migrate")
        if found != schema.VERSION:
            remedy = "run pgworkd migrate" if found < schema.VERSION else "upgrade pgworkd on this host"
            raise SchemaError(f"the schema is at version {found}, this program needs {schema.VERSION}: {remedy}")

    async def doctor(self) -> Doctor:
        """Facts that need the schema."""
        return Doctor(*(await self._link.fetch(sql.DOCTOR))[0])


def _bounded(count: int) -> None:
    if not 1 <= count <= ROWS_MAX:
        raise UsageError(f"{count:,} jobs at once: 1 to {ROWS_MAX:,} are allowed")


def _name(name: str | None) -> str | None:
    """A name to look for; UsageError for text that no name can be, before the driver stumbles over it."""
    if name is not None and ("\0" in name or name.encode("utf-8", "replace").decode() != name):
        raise UsageError(f"{name[:100]!a} is no name: it holds a NUL character or half a character")
    return name


def _text(text: str, what: str, chars_max: int) -> str:
    if not 1 <= len(text) <= chars_max:
        raise UsageError(f"{what} has {len(text):,} characters: 1 to {chars_max} are allowed")
    _name(text)
    return text


def _whole(number: int, what: str, low: int, high: int) -> int:
    if not low <= number <= high:
        raise UsageError(f"{what} is out of bounds: {low} to {high} are allowed")
    return number


def _instant(instant: datetime, what: str) -> str:
    if instant.utcoffset() is None:
        raise UsageError(f"{what} has no time zone: which instant it means would be a guess")
    if not _FIRST <= instant < _END:
        raise UsageError(f"{what} is {instant.isoformat()}: 1970 to 2199 are allowed")
    return instant.astimezone(UTC).isoformat()
