"""Enqueueing from application code: on the caller's own connection, in the caller's own transaction.

    job_id = await enqueue(conn, "embedding", {"note": 7}, delay=60)       # asyncpg, or anything else async
    job_ids = enqueue_many(conn, [NewJob("ocr", {"page": 1}), {"queue": "ocr", "payload": {"page": 2}}])
    job_id, created, changed = enqueue(conn, "mail", {"to": 7}, dedupe_key="welcome-7", on_duplicate="skip")

The jobs exist when the caller's transaction commits, never when it rolls back, and at once in autocommit. `conn` is of
asyncpg (Connection, Pool), psycopg (Connection, AsyncConnection), SQLAlchemy (Connection, Session, their async kin and
scoped sessions) or Django (`connection`, `connections[alias]`). What the driver raises passes through as it is.

Where that is no answer of the server (the connection is lost, the time is up) the jobs may exist all the same, in
autocommit; in a transaction they do not, unless it is the COMMIT that was not answered. A dedupe_key and
on_duplicate="skip" make it safe to enqueue again.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, get_args, overload
from uuid import UUID

from pgworkd.client.batches import Batch, Progress, batch
from pgworkd.client.columns import ManyJobs
from pgworkd.client.connections import answered, depends, enqueues, inserts, inserts_many, way
from pgworkd.client.new_job import NewJob, OnFailedDependency, new_ids, row, waits
from pgworkd.client.workflow import Workflow
from pgworkd.errors import UsageError

__all__ = ["Batch", "Enqueued", "NewJob", "OnDuplicate", "Progress", "Workflow", "batch", "enqueue", "enqueue_many"]

OnDuplicate = Literal["raise", "skip", "replace", "reschedule"]
_Jobs = Iterable["NewJob | Mapping[str, Any]"]


class Enqueued(NamedTuple):
    """The job's id, and whether it is new. Not `created`: it holds the dedupe key; `changed`: as was asked for."""

    id: UUID
    created: bool
    changed: bool


class _Sync(Protocol):  # what every sync connection has and no async one
    def commit(self) -> None: ...


class _Async(Protocol):  # what psycopg's and SQLAlchemy's async ones have
    def commit(self) -> Coroutine[Any, Any, None]: ...


class _Asyncpg(Protocol):  # what only asyncpg's connections and pools have
    def fetchval(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]: ...


class _Options(TypedDict, total=False):
    kind: str | None
    priority: int
    run_at: datetime | None
    delay: float | timedelta | None
    expires_at: datetime | None
    max_attempts: int | None
    timeout_s: float | timedelta | None
    dedupe_key: str | None
    meta: object
    serialize_key: str | None
    limit_key: str | None
    on_retry: Literal["hold", "yield"]
    dedupe_until: datetime | None
    dedupe_for: float | timedelta | None
    after: Iterable[UUID]
    on_failed_dependency: OnFailedDependency


@overload
def enqueue(
    conn: _Sync, queue: str, payload: object = None, *, on_duplicate: None = None, **options: Unpack[_Options]
) -> UUID: ...
@overload
def enqueue(
    conn: _Sync, queue: str, payload: object = None, *, on_duplicate: OnDuplicate, **options: Unpack[_Options]
) -> Enqueued: ...
@overload
def enqueue(
    conn: _Async | _Asyncpg,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: None = None,
    **options: Unpack[_Options],
) -> Coroutine[Any, Any, UUID]: ...
@overload
def enqueue(
    conn: _Async | _Asyncpg,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: OnDuplicate,
    **options: Unpack[_Options],
) -> Coroutine[Any, Any, Enqueued]: ...
def enqueue(
    conn: Any,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: OnDuplicate | None = None,
    **options: Unpack[_Options],
) -> Any:
    """Inserts one job, whose arguments are those of NewJob; its id, to be awaited if `conn` is async.

    Where its dedupe_key is taken the driver raises SQLSTATE 23505. `on_duplicate` makes the answer an Enqueued: "skip"
    leaves the job that holds the key as it is. "replace" gives it the new payload, kind, priority, times, limits and
    meta; "reschedule" only the new run_at, and priority if one is given: both if it waits; if it runs, or is over and
    keeps the key, it is left alone.

    What `after` names and can no longer complete, or does not exist, makes the driver raise SQLSTATE PW004.

    Raises at the call UsageError (InvalidPayload is one) for a value out of bounds or a connection of unknown type.
    """
    run = way(conn)
    job = NewJob(queue, payload, **options)
    fields = row(job)
    if on_duplicate is None:
        ids = new_ids(1)
        steps = inserts(ids, [fields]) + (depends(ids, [waits(job)]) if job.after else [])
        return answered(run(conn, steps), lambda _: UUID(int=ids[0]))
    if job.after:
        raise UsageError("after does not go with on_duplicate: a job that is there already would wait for others, too")
    if on_duplicate not in get_args(OnDuplicate):
        raise UsageError(f"on_duplicate must be one of {', '.join(get_args(OnDuplicate))}")
    if options.get("dedupe_key") is None:
        raise UsageError("on_duplicate needs a dedupe_key: without one there are no duplicates")
    if "priority" not in options:  # then "reschedule" leaves it
        fields = (*fields[:3], None, *fields[4:])
    return answered(run(conn, enqueues(fields, on_duplicate)), lambda found: Enqueued(UUID(found[0][0]), *found[0][1:]))


@overload
def enqueue_many(conn: _Sync, jobs: _Jobs) -> list[UUID]: ...
@overload
def enqueue_many(conn: _Async | _Asyncpg, jobs: _Jobs) -> Coroutine[Any, Any, list[UUID]]: ...
def enqueue_many(conn: Any, jobs: _Jobs) -> Any:
    """Inserts all jobs or none; their ids in the order of the jobs, to be awaited if `conn` is async.

    A mapping has NewJob's arguments as keys. Errors as of `enqueue`, with the index: "jobs[17].payload.items[3] ...".
    Up to 5,000 jobs (or 8 MiB) are checked in the call itself and take one statement. More take several, in a
    savepoint or, in autocommit, a transaction of their own; they are drawn from `jobs` as it goes on (also while the
    database stores those before, if `conn` is async), so that a generator is never held as a whole: only the ids are,
    100 bytes each. A job that is wrong, or an error in the generator, undoes those before it. It depends on the number
    of jobs whether the caller's transaction could go on after an error of the driver: roll it back. Cancelled or cut
    off in autocommit, the jobs are there all or none; give them a dedupe_key to call again.
    """
    run = way(conn)
    many = ManyJobs(jobs)
    steps = inserts_many(many)
    return answered(run(conn, steps), lambda _: many.ids)
