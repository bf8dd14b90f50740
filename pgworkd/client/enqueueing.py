"""Enqueueing from application code: on the caller's own connection, in the caller's own transaction.

    job_id = await enqueue(conn, "embedding", {"note": 7}, delay=60)       # asyncpg, or anything else async
    job_ids = enqueue_many(conn, [NewJob("ocr", {"page": 1}), {"queue": "ocr", "payload": {"page": 2}}])
    job_id, created, changed = enqueue(conn, "mail", {"to": 7}, dedupe_key="welcome-7", on_duplicate="skip")

The jobs exist when the caller's transaction commits, never when it rolls back, and at once in autocommit. `conn` is of
asyncpg (Connection, Pool), psycopg (Connection, AsyncConnection), SQLAlchemy (Connection, Session, their async
counterparts and scoped sessions) or Django (`connection`, `connections[alias]`). Errors of the driver pass through.

If such an error is not an answer of the server (the connection was lost, a timeout expired), the jobs may exist
nevertheless in autocommit; in a transaction they do not, except if it was the COMMIT that got no answer. A dedupe_key
with on_duplicate="skip" makes it safe to enqueue again.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, NamedTuple, Unpack, overload
from uuid import UUID

from pgworkd.client.columns import ManyJobs
from pgworkd.client.connections import (
    AnyAsyncConnection,
    SyncConnection,
    answered,
    depends,
    enqueues,
    enqueues_once,
    inserts,
    inserts_many,
    way,
)
from pgworkd.client.new_job import (
    PRIORITY,
    EnqueueOptions,
    JobOptions,
    NewJob,
    OnDuplicate,
    check_on_duplicate,
    job_with,
    new_ids,
    row,
    waits,
)
from pgworkd.client.tracing import first_id, producing, ran, traced
from pgworkd.core.validation import identity
from pgworkd.errors import UsageError

_Jobs = Iterable["NewJob | Mapping[str, Any]"]


class Enqueued(NamedTuple):
    """The job's id: of a new one (`created`), or of the one with the same dedupe key, which may have been `changed`."""

    id: UUID
    created: bool
    changed: bool


class EnqueuedOnce(NamedTuple):
    """Whether the job was `created`; if not, whether the one of that id has the `same` queue, kind and payload.

    `same` None: only its dedupe key is left of it. `status` now. `keep_s`: seconds for which its queue keeps it after
    its end (None: as long as the history is kept).
    """

    created: bool
    same: bool | None
    status: str
    keep_s: int | None


@overload
def enqueue(
    conn: SyncConnection,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: None = None,
    **options: Unpack[EnqueueOptions],
) -> UUID: ...
@overload
def enqueue(
    conn: SyncConnection,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: OnDuplicate,
    **options: Unpack[EnqueueOptions],
) -> Enqueued: ...
@overload
def enqueue(
    conn: AnyAsyncConnection,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: None = None,
    **options: Unpack[EnqueueOptions],
) -> Coroutine[Any, Any, UUID]: ...
@overload
def enqueue(
    conn: AnyAsyncConnection,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: OnDuplicate,
    **options: Unpack[EnqueueOptions],
) -> Coroutine[Any, Any, Enqueued]: ...
def enqueue(
    conn: Any,
    queue: str,
    payload: object = None,
    *,
    on_duplicate: OnDuplicate | None = None,
    **options: Unpack[EnqueueOptions],
) -> Any:
    """Inserts one job, whose arguments are those of NewJob; returns its id (to be awaited if `conn` is async).

    If its dedupe_key is taken, the driver raises SQLSTATE 23505. With `on_duplicate` it returns an Enqueued instead:
    "skip" leaves the job that has the key unchanged; "replace" gives it the new payload, kind, priority, times, limits
    and meta; "reschedule" gives it the new run_at, and the priority if one is given. Both change waiting jobs only,
    not one that is running, or has finished and keeps the key. "raise" raises SQLSTATE 23505.

    If a job in `after` does not exist, or can no longer complete, the driver raises SQLSTATE PW004.

    Raises UsageError (InvalidPayload is one) at the call for an invalid value or an unsupported connection.
    """
    run = way(conn)
    job = job_with(queue, payload, options)
    fields = row(job)
    if on_duplicate is None:
        ids = new_ids(1)
        job_id = UUID(int=ids[0])
        dependencies = depends(ids, [waits(job)]) if job.after else []
        span = traced(fields, job_id)
        return answered(ran(run, conn, inserts(ids, [fields]) + dependencies, span), lambda _: job_id)
    if job.after:
        raise UsageError("after cannot be combined with on_duplicate: it would add dependencies to an existing job")
    check_on_duplicate(on_duplicate, job)
    if "priority" not in options:  # then "reschedule" does not change it
        fields[PRIORITY] = None
    span = traced(fields)
    steps = enqueues(fields, on_duplicate)
    return answered(ran(run, conn, steps, span, first_id), lambda rows: Enqueued(UUID(rows[0][0]), *rows[0][1:]))


@overload
def enqueue_once(
    conn: SyncConnection, job_id: UUID, queue: str, payload: object = None, **options: Unpack[JobOptions]
) -> EnqueuedOnce: ...
@overload
def enqueue_once(
    conn: AnyAsyncConnection, job_id: UUID, queue: str, payload: object = None, **options: Unpack[JobOptions]
) -> Coroutine[Any, Any, EnqueuedOnce]: ...
def enqueue_once(conn: Any, job_id: UUID, queue: str, payload: object = None, **options: Unpack[JobOptions]) -> Any:
    """Inserts one job under an id that the caller has made, unless that is there, live or finished.

    So it is safe to repeat, whatever became of the first call, for as long as the history is kept. The id should be a
    UUID of version 7: others are looked for in the whole history. Arguments and errors are those of `enqueue`; the
    transaction must be READ COMMITTED (SQLSTATE 22023).
    """
    run = way(conn)
    fields = row(job_with(queue, payload, options))
    steps = enqueues_once(identity(job_id, "job_id"), fields)
    span = traced(fields, job_id)
    return answered(ran(run, conn, steps, span), lambda rows: EnqueuedOnce(*rows[0]))


@overload
def enqueue_many(conn: SyncConnection, jobs: _Jobs) -> list[UUID]: ...
@overload
def enqueue_many(conn: AnyAsyncConnection, jobs: _Jobs) -> Coroutine[Any, Any, list[UUID]]: ...
def enqueue_many(conn: Any, jobs: _Jobs) -> Any:
    """Inserts all jobs or none; returns their ids in the order of the jobs (to be awaited if `conn` is async).

    A mapping has NewJob's arguments as keys. Raises the errors of `enqueue`, with the index: "jobs[17].payload ...".
    Up to 5,000 jobs (or 8 MiB) are checked in the call itself and take one statement. More take several, in a
    savepoint or, in autocommit, in a transaction of their own; they are drawn from `jobs` while inserting (also while
    the database stores the previous ones, if `conn` is async), so a generator is never materialised: only the ids are
    kept, 100 bytes each. An invalid job, or an error in the generator, rolls back the jobs before it. Whether the
    caller's transaction can continue after an error of the driver depends on the number of jobs: roll it back. After a
    cancellation or a lost connection in autocommit either all jobs exist or none; a dedupe_key makes it safe to retry.
    """
    run = way(conn)
    many = ManyJobs(jobs, producing(None))
    steps = inserts_many(many)
    return answered(ran(run, conn, steps, many.span), lambda _: many.ids)
