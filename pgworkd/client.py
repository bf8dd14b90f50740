"""Enqueueing from application code: on the caller's own connection, in the caller's own transaction.

    job_id = await enqueue(conn, "embedding", {"note": 7}, delay=60)       # asyncpg, or anything else async
    job_ids = enqueue_many(conn, [NewJob("ocr", {"page": 1}), {"queue": "ocr", "payload": {"page": 2}}])

The jobs exist when the caller's transaction commits and never did when it rolls back; in autocommit they exist
at once. Nothing here commits or ends what the caller began. `conn` is one of

    asyncpg       Connection (also from a pool), Pool (always autocommit)           await the answer
    psycopg       Connection; AsyncConnection                                       await the latter's
    SQLAlchemy    Connection, Session; AsyncConnection, AsyncSession; both scoped   await the latter's
    Django        django.db.connection, connections[alias]

A fault of a job is told at the call (UsageError, InvalidPayload), before the database hears of it. What the
driver raises passes through as it is: a taken dedupe_key, an aborted transaction, a closed connection.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from re import sub
from typing import Any, Protocol, TypedDict, Unpack, overload
from uuid import UUID

from .errors import UsageError, delay_seconds
from .payload import encode

FIRST_INSTANT, END_OF_INSTANTS = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
NAME_CHARS_MAX, KEY_CHARS_MAX, ATTEMPTS_MAX = 200, 512, 1000
# What one statement carries at most: more makes it no faster, but costs the server memory.
_STATEMENT_ROWS, _STATEMENT_CHARS = 5_000, 8 * 1024 * 1024

# Ids are drawn before the insert, because RETURNING promises no order. Everything travels as text or number, so
# that no codec or adapter for jsonb or timestamptz that the caller has set comes between.
_INSERT = """
WITH new AS MATERIALIZED (
    SELECT pgworkd.new_id() AS id, given.*
    FROM unnest(CAST($1 AS text[]), CAST($2 AS text[]), CAST($3 AS text[]), CAST($4 AS int[]), CAST($5 AS text[]),
                CAST($6 AS float8[]), CAST($7 AS text[]), CAST($8 AS int[]), CAST($9 AS float8[]),
                CAST($10 AS text[]), CAST($11 AS text[]))
         WITH ORDINALITY AS given (queue, kind, payload, priority, run_at, delay_s, expires_at, max_attempts,
                                   timeout_s, dedupe_key, meta, nr)
), stored AS (
    INSERT INTO pgworkd.jobs (id, queue, kind, payload, priority, run_at, expires_at, max_attempts, timeout_s,
                              dedupe_key, meta)
    SELECT id, queue, kind, CAST(payload AS jsonb), priority,
           coalesce(CAST(run_at AS timestamptz), pgworkd.clock() + make_interval(secs => coalesce(delay_s, 0))),
           CAST(expires_at AS timestamptz), max_attempts, timeout_s, dedupe_key, CAST(meta AS jsonb)
    FROM new ORDER BY nr
)
SELECT id FROM new ORDER BY nr
"""
# The same in the other styles of parameters: each of them occurs once, in order.
_INSERT_FORMAT, _INSERT_NAMED = sub(r"\$\d+", "%s", _INSERT), sub(r"\$(\d+)", r":p\1", _INSERT)

_Row = tuple[str, str | None, str, int, str | None, float | None, str | None, int | None, float | None, str | None, str | None]
_Way = Callable[[Any, Sequence[_Row]], Any]


class _Sync(Protocol):  # what every sync connection has and no async one
    def commit(self) -> None: ...


class _Async(Protocol):  # psycopg's and SQLAlchemy's
    def commit(self) -> Coroutine[Any, Any, None]: ...


class _Asyncpg(Protocol):  # connections and pools; no other connection has it
    def fetchval(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]: ...


class JobOptions(TypedDict, total=False):
    """The keyword arguments of `enqueue`; what they mean is said in NewJob."""

    kind: str | None
    priority: int
    run_at: datetime | None
    delay: float | timedelta | None
    expires_at: datetime | None
    max_attempts: int | None
    timeout_s: float | timedelta | None
    dedupe_key: str | None
    meta: object


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be; `enqueue_many` checks it."""

    queue: str
    """1 to 200 characters, as `kind`."""
    payload: object = None
    """A dict of JSON values, a dataclass or a pydantic model, at most 1 MiB as JSON; None means {}."""
    _: KW_ONLY
    kind: str | None = None
    """None: the queue's own handler."""
    priority: int = 0
    """Higher first, within int4."""
    run_at: datetime | None = None
    """Not to start before; with a time zone, 1970 to 2199. None: now, by the database's clock."""
    delay: float | timedelta | None = None
    """Instead of `run_at`: seconds from now by the database's clock, 0 to 366 days."""
    expires_at: datetime | None = None
    """Not to start from then on: it ends as expired. Bounds as `run_at`."""
    max_attempts: int | None = None
    """1 to 1000; None: as the handler says."""
    timeout_s: float | timedelta | None = None
    """Seconds for one attempt, above 0, at most 366 days; None: as the handler says."""
    dedupe_key: str | None = None
    """1 to 512 characters, compared bytewise: a queue holds one live (not dead) job per key."""
    meta: object = None
    """Trace context, tags: handed through to the handler. As `payload`."""


_FIELDS = {field.name: None for field in fields(NewJob)}


@overload
def enqueue(conn: _Sync, queue: str, payload: object = None, **options: Unpack[JobOptions]) -> UUID: ...
@overload
def enqueue(
    conn: _Async | _Asyncpg, queue: str, payload: object = None, **options: Unpack[JobOptions]
) -> Coroutine[Any, Any, UUID]: ...
def enqueue(conn: Any, queue: str, payload: object = None, **options: Unpack[JobOptions]) -> Any:
    """Inserts one job in the transaction of `conn`; its id, to be awaited if `conn` is async.

    All arguments are fields of NewJob. Raises at the call UsageError (InvalidPayload is one) for a value out of
    bounds or a connection of another type, TypeError for an unknown name; the driver's errors pass through.
    """
    stored = _way(conn)(conn, [_row(NewJob(queue, payload, **options), "")])
    return stored[0] if isinstance(stored, list) else _first(stored)


@overload
def enqueue_many(conn: _Sync, jobs: Iterable[NewJob | Mapping[str, Any]]) -> list[UUID]: ...
@overload
def enqueue_many(
    conn: _Async | _Asyncpg, jobs: Iterable[NewJob | Mapping[str, Any]]
) -> Coroutine[Any, Any, list[UUID]]: ...
def enqueue_many(conn: Any, jobs: Iterable[NewJob | Mapping[str, Any]]) -> Any:
    """Inserts all `jobs` or none; their ids in the order of the jobs, to be awaited if `conn` is async.

    The keys of a mapping are the fields of NewJob. Errors as in `enqueue`; those about a job begin with its
    index: "jobs[17].payload.items[3] ...". The call itself checks and encodes all jobs, some 5 us each. More than
    5,000 jobs or 8 MiB take several statements, inside a savepoint or, in autocommit, a transaction of their own.
    """
    way = _way(conn)
    return way(conn, [_row(_new_job(job, f"jobs[{i}]"), f"jobs[{i}].") for i, job in enumerate(jobs)])


# Checks


def _new_job(job: object, what: str) -> NewJob:
    if isinstance(job, NewJob):
        return job
    if not isinstance(job, Mapping):
        raise UsageError(f"{what} is a {type(job).__name__}: pass a NewJob, or a mapping with its fields")
    if unknown := [key for key in job if key not in _FIELDS]:
        raise UsageError(f"{what} has the unknown key {unknown[0]!r}: known are {', '.join(_FIELDS)}")
    if "queue" not in job:
        raise UsageError(f"{what}.queue is missing: name the queue")
    return NewJob(**job)


def _row(job: NewJob, at: str) -> _Row:
    if job.run_at is not None and job.delay is not None:
        raise UsageError(f"{at}run_at and delay are both given: pass one of them")
    limit, timeout_s = job.max_attempts, job.timeout_s
    return (
        _text(job.queue, f"{at}queue", NAME_CHARS_MAX),
        None if job.kind is None else _text(job.kind, f"{at}kind", NAME_CHARS_MAX),
        "{}" if job.payload is None else encode(job.payload, f"{at}payload"),
        _whole(job.priority, f"{at}priority", -(2**31), 2**31 - 1),
        None if job.run_at is None else _instant(job.run_at, f"{at}run_at"),
        None if job.delay is None else delay_seconds(job.delay, f"{at}delay"),
        None if job.expires_at is None else _instant(job.expires_at, f"{at}expires_at"),
        None if limit is None else _whole(limit, f"{at}max_attempts", 1, ATTEMPTS_MAX),
        None if timeout_s is None else _timeout(timeout_s, f"{at}timeout_s"),
        None if job.dedupe_key is None else _text(job.dedupe_key, f"{at}dedupe_key", KEY_CHARS_MAX),
        None if job.meta is None else encode(job.meta, f"{at}meta"),
    )


def _text(value: object, what: str, chars_max: int) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{what} is a {type(value).__name__}: pass text")
    if not 1 <= len(value) <= chars_max:
        raise UsageError(f"{what} has {len(value):,} characters: 1 to {chars_max} are allowed")
    if not value.isprintable():  # neither is NUL or a lone surrogate: encode() refuses those in its words
        encode(value, what, object_only=False)
    return str.__str__(value)  # of an enum the value; and psycopg takes no list of mixed types


def _whole(value: object, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what} is a {type(value).__name__}: pass an int")
    if not low <= value <= high:
        raise UsageError(f"{what} is out of bounds: pass {low} to {high}")
    return int(value)


def _instant(value: object, what: str) -> str:
    if not isinstance(value, datetime):
        raise UsageError(f"{what} is a {type(value).__name__}: pass a datetime with a time zone")
    if value.utcoffset() is None:
        remedy = "pass datetime.now(UTC) + ..., or value.astimezone() if it is this host's local time"
        raise UsageError(f"{what} has no time zone, which instant it means is a guess: {remedy}")
    if not FIRST_INSTANT <= value < END_OF_INSTANTS:
        raise UsageError(f"{what} is {value.isoformat()}: pass an instant from 1970 to 2199")
    return value.astimezone(UTC).isoformat()


def _timeout(value: float | timedelta, what: str) -> float:
    if not (seconds := delay_seconds(value, what)):
        raise UsageError(f"{what} is 0: pass more, or None for the handler's own")
    return max(seconds, 1e-6)  # the column is a real, which refuses what it cannot tell from 0


# Ways to the drivers. None is imported: whoever holds its connection has done that, and sys.modules has it.


def _way(conn: object) -> _Way:
    for cls in type(conn).__mro__:
        if way := _WAYS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}"):
            return way
    raise UsageError(f"cannot enqueue on a {type(conn).__module__}.{type(conn).__name__}: pass a {', '.join(_WAYS)}")


def _parts(rows: Sequence[_Row]) -> list[Sequence[_Row]]:
    """The rows of each statement."""
    starts, chars = [0], 0
    for index, row in enumerate(rows):
        size = len(row[2]) + len(row[10] or "")
        chars += size
        if index - starts[-1] == _STATEMENT_ROWS or (chars > _STATEMENT_CHARS and index > starts[-1]):
            starts.append(index)
            chars = size
    return [rows[start:end] for start, end in zip(starts, [*starts[1:], len(rows)], strict=True)]


def _columns(part: Sequence[_Row]) -> list[list[Any]]:
    return [list(column) for column in zip(*part, strict=True)]


def _ids(rows: Iterable[Sequence[Any]]) -> list[UUID]:
    return [row[0] if isinstance(row[0], UUID) else UUID(row[0]) for row in rows]  # some drivers give text


async def _first(ids: Coroutine[Any, Any, list[UUID]]) -> UUID:
    return (await ids)[0]


def _store(opener: Any, conn: Any, rows: Sequence[_Row]) -> list[UUID]:
    if not rows:
        return []
    parts = _parts(rows)
    with opener(conn, len(parts) > 1) as fetch:
        return [job_id for part in parts for job_id in _ids(fetch(_columns(part)))]


async def _store_async(opener: Any, conn: Any, rows: Sequence[_Row]) -> list[UUID]:
    if not rows:
        return []
    parts = _parts(rows)
    async with opener(conn, len(parts) > 1) as fetch:
        return [job_id for part in parts for job_id in _ids(await fetch(_columns(part)))]


# Openers: yield a function that executes the statement with its columns; if `several`, in a savepoint.
