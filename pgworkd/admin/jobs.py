"""Operations on jobs: by id, or on all jobs that match a filter.

Each call is one short statement in a transaction of its own. The database writes an entry to `audit` in the same
transaction, under the name in ConnectionOptions.by.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Unpack
from uuid import UUID

from pgworkd.admin import explained, refusals, stacks
from pgworkd.admin import queries as sql
from pgworkd.admin.listing import Listed, Page, page
from pgworkd.admin.queries import EnqueuedJob, JobDetails, JobRow, Jobs, RowHolder
from pgworkd.admin.refusals import Refused
from pgworkd.admin.stacks import Stack
from pgworkd.client import sent
from pgworkd.client.new_job import PRIORITY, QUEUE, JobOptions, NewJob, OnDuplicate, check_on_duplicate, row
from pgworkd.client.statements import ENQUEUE
from pgworkd.client.tracing import first_id, ran, traced
from pgworkd.core import validation
from pgworkd.core.job import ENDED, IN_HISTORY, Status
from pgworkd.core.json_text import JsonText
from pgworkd.core.payload import encode
from pgworkd.core.validation import ROWS_MAX
from pgworkd.database.connection import Connection
from pgworkd.errors import DatabaseError, UsageError, delay_seconds

MATCHED_MAX = 10_000
"""Ids per result of `matching`."""
OPERATIONS = {
    "cancel": ("pending", "blocked", "failed", "running"),
    "retry": ("dead", "failed"),
    "discard": ("dead",),
}
"""The operations on all jobs that match, and the statuses of the jobs to which each applies."""
PRIORITIES = (-(2**31), 2**31 - 1)
_UNIQUE_VIOLATION = "23505"


class JobSelection(NamedTuple):
    """Selects the jobs that match every field that is not None; `key` is any of a job's three keys.

    `group`: the number of a group of errors, as `DeadGroup` has it, of which they died.
    A filter without queue, kind, key, batch and group selects nothing unless `all_queues` is True. A `status` of None
    means the waiting and running jobs for cancel, the dead ones for retry and discard.
    """

    queue: str | None = None
    kind: str | None = None
    key: str | None = None
    batch: UUID | None = None
    status: str | None = None
    all_queues: bool = False
    group: int | None = None

    @property
    def narrow(self) -> bool:
        """True if it names a queue, kind, key, batch or group."""
        return (self.queue, self.kind, self.key, self.batch, self.group) != (None,) * 5


class Matched(NamedTuple):
    """Ids in ascending order; `last` is where the next page starts, None on the last page."""

    ids: Sequence[UUID]
    last: UUID | None


class Retried(NamedTuple):
    """`changed` will run again; `key_taken` cannot, because another live job has their dedupe key."""

    changed: list[UUID]
    key_taken: list[UUID]


class JobOperations:
    """`admin.jobs`. Raises the errors of `Admin`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(
        self,
        queue: str | None = None,
        kind: str | None = None,
        status: str | None = None,
        limit: int = 20,
    ) -> Jobs:
        """The newest jobs, at most `limit` (1 to ROWS_MAX), that match every argument that is not None.

        Searches all live jobs, and the newest sql.HISTORY_ROWS_MAX finished ones.
        """
        validation.bounded(limit)
        validation.one_of(status, "status", tuple(Status))
        wanted = (validation.name(queue), validation.name(kind), status, limit)
        found = () if status == "discarded" else await self._connection.fetch(sql.LIVE_JOBS, *wanted)
        live = [sql.read(JobRow, each) for each in found]
        if status not in (None, *IN_HISTORY):
            return Jobs(live, complete=True)
        finished = await self._connection.fetch(sql.FINISHED_JOBS, *wanted, sql.HISTORY_ROWS_MAX)
        old = [sql.read(JobRow, each) for each in finished]
        once = {each.id: each for each in [*live, *old]}  # a job that finished between the two statements is in both
        rows = sorted(once.values(), key=lambda each: each.id, reverse=True)[:limit]
        filtered = (queue, kind, status) != (None, None, None)
        cut = (
            len(rows) < limit
            and filtered
            and bool(await self._connection.value(sql.MORE_FINISHED_JOBS, sql.HISTORY_ROWS_MAX))
        )
        return Jobs(rows, complete=not cut)

    async def page(self, which: Listed, before: UUID | None = None, limit: int = 100) -> Page:
        """A page of a list, the newest jobs first: those with ids below `before`, at most `limit` (1 to ROWS_MAX).

        Looks at listing.WALK_ROWS live and as many finished jobs: a page with few rows, or none, may have a next one.
        """
        return await page(self._connection, which, before, limit)

    async def get(self, job_id: UUID) -> JobDetails | None:
        """One job with all its fields, live or finished; None if it does not exist, or its history has been deleted.

        A standby returns it without its progress.
        """
        standby = await self._connection.value(sql.IS_STANDBY)
        rows = await self._connection.fetch(sql.ONE_JOB_ON_STANDBY if standby else sql.ONE_JOB, job_id)
        return sql.read(JobDetails, rows[0]) if rows else None

    async def explain(self, job_id: UUID) -> list[explained.Explanation]:
        """Why a job does not run, each reason with what ends it; none: the next claim takes it, or it is unknown.

        A job that runs or has ended has one that says so. A standby knows of no workers. A job that a handler with
        transaction=True runs looks as if the next claim took it.
        """
        return await explained.explain(self._connection, job_id)

    async def first_waiting(self, queue: str) -> UUID | None:
        """The job that is first in its queue: of those that are due if there are any, or waits for all others."""
        return await explained.first_waiting(self._connection, queue)

    async def ask_stack(self, job_id: UUID) -> None:
        """Asks the worker of a running job where in its code that is; `stack` returns the answer, after a heartbeat.

        NoStack for a job that does not run, and for one of a remote worker or an endpoint, which cannot be asked.
        """
        await stacks.ask(self._connection, job_id)

    async def stack(self, job_id: UUID) -> Stack | None:
        """The stack that was asked for last, within the last hour; None: none was. A standby has none."""
        return await stacks.stack(self._connection, job_id)

    async def hold(self, job_id: UUID) -> None:
        """Locks the job, if it is live, until the end of the transaction: nobody changes it meanwhile."""
        await self._connection.fetch("SELECT FROM pgworkd.jobs WHERE id = $1 FOR NO KEY UPDATE", job_id)

    async def queues(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The queue of each of these jobs (at most ROWS_MAX) that exists."""
        validation.bounded(len(ids))
        return {each[0]: each[1] for each in await self._connection.fetch(sql.QUEUES_OF, ids)}

    async def holders(self, ids: Sequence[UUID]) -> list[RowHolder]:
        """Which session has locked the rows of these jobs (at most ROWS_MAX); none of a row that several have."""
        validation.bounded(len(ids))
        return [RowHolder(*each) for each in await self._connection.fetch(sql.HOLDERS, ids)]

    async def statuses(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The status of each of these jobs (at most ROWS_MAX) that exists."""
        validation.bounded(len(ids))
        return {each[0]: each[1] for each in await self._connection.fetch(sql.STATUSES, ids)}

    async def enqueue(
        self,
        queue: str,
        payload_text: str = "{}",
        *,
        on_duplicate: OnDuplicate = "skip",
        **options: Unpack[JobOptions],
    ) -> EnqueuedJob:
        """Inserts a job whose payload is the JSON object `payload_text`, stored as it is written.

        The options are those of `NewJob`. `on_duplicate` is what happens if the dedupe key is taken; see
        pgworkd.enqueue() in the schema. UsageError (InvalidPayload is one) for an invalid value.
        """
        check_payload(payload_text)
        job = NewJob(queue, **options)
        fields = row(job, payload=payload_text)
        if "priority" not in options:  # then "reschedule" does not change it
            fields[PRIORITY] = None
        if job.dedupe_key is None and job.dedupe_by is None:
            on_duplicate = "raise"
        else:
            check_on_duplicate(on_duplicate, job)
        span = traced(fields)
        rows = await ran(_enqueue, self._connection, [*fields, on_duplicate], span, first_id)
        job_id, created, changed = rows[0]
        return EnqueuedJob(UUID(job_id), created, changed)

    async def replay(self, ended: JobDetails, *, keep_expires_at: bool = False) -> EnqueuedJob:
        """Inserts a new job with the payload, meta, kind, priority, limits and keys of one that has ended.

        It has no dedupe key. It never expires, unless `keep_expires_at`: then at the same instant as the ended one, at
        once if that is over. UsageError for a job that has not ended.
        """
        if ended.status not in ENDED:
            raise UsageError(f"job {ended.id} is {ended.status}: it has not ended")
        return await self.enqueue(
            ended.queue,
            ended.payload,
            kind=ended.kind,
            meta=None if ended.meta is None else JsonText(ended.meta),
            priority=ended.priority,
            max_attempts=ended.max_attempts,
            serialize_key=ended.serialize_key,
            limit_key=ended.limit_key,
            expires_at=ended.expires_at if keep_expires_at else None,
        )

    async def matching(
        self, operation: str, which: JobSelection, after: UUID | None = None, limit: int = ROWS_MAX
    ) -> Matched:
        """The next jobs, at most `limit` (1 to MATCHED_MAX), that match and to which the operation applies."""
        validation.whole(limit, "limit", 1, MATCHED_MAX)
        if which.status not in (None, *OPERATIONS[operation]):
            allowed = _either(OPERATIONS[operation])
            raise UsageError(f"cannot {operation} a job whose status is {which.status}: give status {allowed}")
        if not (which.narrow or which.all_queues):
            raise UsageError(f"no filter for the jobs to {operation}: give a queue, kind, key or batch, or all_queues")
        key = None if which.key is None else validation.text(which.key, "key", 512)
        wanted = (validation.name(which.queue), validation.name(which.kind), key, which.batch, which.status)
        page_of = (after, limit, which.all_queues, which.group)
        found = await self._connection.fetch(sql.MATCHING, operation, *wanted, *page_of)
        return Matched(*found[0])

    async def count(self, operation: str, which: JobSelection) -> int:
        """The number of jobs that match now and to which the operation applies."""
        found = await self.matching(operation, which, limit=MATCHED_MAX)
        total = len(found.ids)
        while found.last is not None:
            found = await self.matching(operation, which, found.last, MATCHED_MAX)
            total += len(found.ids)
        return total

    async def retry(self, ids: Sequence[UUID], *, call_back: bool = False) -> Retried:
        """Makes dead jobs run again with failures reset, and waiting retries run now.

        At most ROWS_MAX ids; jobs of any other status are left unchanged. A finished batch is reopened with its dead
        jobs. When it finishes again, it inserts the job of `on_complete` or `on_failure`, unless it already has;
        `call_back`: even if it has.
        """
        validation.bounded(len(ids))
        try:
            changed = await self._connection.value("SELECT pgworkd.retry($1, NULL, $2)", ids, call_back)
            return Retried(list(changed), [])
        except DatabaseError as error:
            if error.sqlstate != _UNIQUE_VIOLATION:
                raise
            if len(ids) == 1:
                return Retried([], list(ids))
        # The key of one of them is taken: find out of which by bisection.
        middle = len(ids) // 2
        halves = [await self.retry(some, call_back=call_back) for some in (ids[:middle], ids[middle:])]
        return Retried([i for half in halves for i in half.changed], [i for half in halves for i in half.key_taken])

    async def cancel(self, ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """Cancels waiting jobs ('cancelled') and asks workers to stop running ones ('requested').

        At most ROWS_MAX ids. Jobs that are dead, finished or unknown are missing from the result; `refusals` says why.
        """
        validation.bounded(len(ids))
        rows = await self._connection.fetch("SELECT id, outcome FROM pgworkd.cancel($1)", ids)
        return {each[0]: each[1] for each in rows}

    async def discard(self, ids: Sequence[UUID]) -> int:
        """Moves dead jobs to the history; the number moved. At most ROWS_MAX ids; others are left unchanged."""
        validation.bounded(len(ids))
        return int(await self._connection.value("SELECT pgworkd.discard($1)", ids))

    async def refusals(self, operation: str, ids: Sequence[UUID]) -> dict[UUID, Refused]:
        """Why the operation does not apply to each of these jobs, as they are now: for those it left unchanged.

        At most ROWS_MAX ids; `refusals.grouped` counts the reasons of many.
        """
        if operation not in OPERATIONS:
            raise UsageError(f"operation {operation!r}: give {_either(tuple(OPERATIONS))}")
        validation.bounded(len(ids))
        return refusals.reasons(operation, await self._connection.fetch(refusals.SQL, ids))

    async def undepend(self, ids: Sequence[UUID]) -> set[UUID]:
        """Drops the dependencies of blocked jobs; the ids of those that had any. At most ROWS_MAX ids."""
        validation.bounded(len(ids))
        return set(await self._connection.value("SELECT pgworkd.undepend($1)", ids))

    async def prioritize(self, ids: Sequence[UUID], priority: int) -> set[UUID]:
        """Gives waiting jobs a priority, an int4; the ids of those that wait, and have it now. At most ROWS_MAX ids."""
        validation.bounded(len(ids))
        wanted = validation.whole(priority, "priority", *PRIORITIES)
        return {row[0] for row in await self._connection.fetch(sql.PRIORITIZE, ids, wanted)}

    async def edit(
        self,
        job_id: UUID,
        payload_text: str | None = None,
        *,
        run_at: datetime | None = None,
        delay_s: float | None = None,
        priority: int | None = None,
    ) -> list[str]:
        """Changes the given fields of a waiting job; the names of those that differ now. NotWaiting if it is not.

        The payload is a JSON object, stored as it is written. `run_at` (with a time zone, 1970 to 2199), or `delay_s`
        seconds from now (0 to 366 days).
        """
        if run_at is not None and delay_s is not None:
            raise UsageError("run_at and delay_s are both given: pass one of them")
        if (payload_text, run_at, delay_s, priority) == (None,) * 4:
            raise UsageError("nothing to edit: give a payload, run_at, delay_s or priority")
        if payload_text is not None:
            check_payload(payload_text)
        answer = await self._connection.value(
            sql.EDIT,
            job_id,
            payload_text,
            None if run_at is None else validation.instant(run_at, "run_at"),
            None if delay_s is None else delay_seconds(delay_s, "delay_s"),
            None if priority is None else validation.whole(priority, "priority", *PRIORITIES),
        )
        return list(answer)


def check_payload(text: str) -> None:
    """Raises InvalidPayload, with the reason, for text that is not a JSON object, cannot be stored, or is too large."""
    encode(JsonText(text))


def _enqueue(connection: Connection, values: Sequence[object]) -> Coroutine[Any, Any, list[Any]]:
    sent.count(str(values[QUEUE]))
    return connection.fetch(ENQUEUE.numbered, *values)


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
