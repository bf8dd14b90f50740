"""Enqueueing from application code: on the caller's own connection, in the caller's own transaction.

    job_id = await enqueue(conn, "embedding", {"note": 7}, delay=60)       # asyncpg, or anything else async
    job_ids = enqueue_many(conn, [NewJob("ocr", {"page": 1}), {"queue": "ocr", "payload": {"page": 2}}])

The jobs exist when the caller's transaction commits, and never did when it rolls back; outside a transaction
(autocommit) they exist at once. Nothing here commits, rolls back or ends what the caller began.

Known connections: see CONNECTIONS; with an async one the answer must be awaited. What is wrong with a job is
said at the call (UsageError, InvalidPayload), before the database hears of it. Whatever the driver raises
passes through as it is: a violation of unique (queue, dedupe_key), an aborted transaction, a closed connection.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import KW_ONLY, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Protocol, TypedDict, Unpack, overload
from uuid import UUID

from .errors import UsageError, delay_seconds
from .payload import encode

NAME_CHARS_MAX = 200
KEY_CHARS_MAX = 512
ATTEMPTS_MAX = 1000
FIRST_INSTANT = datetime(1970, 1, 1, tzinfo=UTC)
END_OF_INSTANTS = datetime(2200, 1, 1, tzinfo=UTC)

# One statement carries so much at most: larger ones are not faster, but cost the server memory.
_STATEMENT_ROWS = 5_000
_STATEMENT_CHARS = 8 * 1024 * 1024

# Ids are drawn before the insert, because RETURNING promises no order. Everything travels as text or number,
# so that no codec or adapter that the caller set for jsonb or timestamptz comes between.
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
# The same in the other styles of parameters; each occurs once, in order.
_INSERT_FORMAT = re.sub(r"\$\d+", "%s", _INSERT)
_INSERT_NAMED = re.sub(r"\$(\d+)", r":p\1", _INSERT)


class SyncConnection(Protocol):
    """What all known sync connections have and no async one has: it tells type checkers what is returned."""

    def commit(self) -> None:
        """Never called."""


class AsyncConnection(Protocol):
    """What psycopg's and SQLAlchemy's async connections have and no sync one has."""

    def commit(self) -> Coroutine[Any, Any, None]:
        """Never called."""


class AsyncpgConnection(Protocol):
    """What asyncpg's connections and pools have and no other connection has."""

    def fetchval(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]:
        """Never called."""


class JobOptions(TypedDict, total=False):
    """The keyword arguments of `enqueue`; see NewJob."""

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
    """A job to be enqueued. Nothing is checked before `enqueue_many` gets it."""

    queue: str
    """1 to 200 characters."""
    payload: object = None
    """A dict of JSON values, a dataclass or a pydantic model; at most 1 MiB as JSON. None: {}."""
    _: KW_ONLY
    kind: str | None = None
    """1 to 200 characters; None: the queue's own handler."""
    priority: int = 0
    """Higher first; 32 bits, signed."""
    run_at: datetime | None = None
    """Not before this instant, by the database's clock; with a time zone, from 1970 to 2199. None: now."""
    delay: float | timedelta | None = None
    """Instead of run_at: seconds (or a timedelta) from now by the database's clock, 0 to 366 days."""
    expires_at: datetime | None = None
    """A job that has not started by then ends as expired. As run_at."""
    max_attempts: int | None = None
    """1 to 1000; None: as the handler says, else 3."""
    timeout_s: float | timedelta | None = None
    """Seconds (or a timedelta) that one attempt may take, more than 0, at most 366 days; None: as the handler says."""
    dedupe_key: str | None = None
    """1 to 512 characters. Only one job of a queue may wait or run under a key; compared byte by byte."""
    meta: object = None
    """Trace context, tags; handed through. Like payload."""


_FIELDS = frozenset(field.name for field in fields(NewJob))


@overload
def enqueue(conn: SyncConnection, queue: str, payload: object = None, **options: Unpack[JobOptions]) -> UUID: ...
@overload
def enqueue(
    conn: AsyncConnection | AsyncpgConnection, queue: str, payload: object = None, **options: Unpack[JobOptions]
) -> Coroutine[Any, Any, UUID]: ...
def enqueue(
    conn: Any, queue: str, payload: object = None, **options: Unpack[JobOptions]
) -> UUID | Coroutine[Any, Any, UUID]:
    """Inserts one job on `conn`, in its transaction if it is in one; the job's id (awaited if `conn` is async).

    The arguments are the fields of NewJob. Raises at the call: UsageError (InvalidPayload is one) for an
    argument out of bounds or a connection of unknown type. The driver's own errors pass through.
    """
    is_async, opener = _way_to(conn)
    rows = [_row(NewJob(queue, payload, **options), "")]
    return _first(_store_async(opener, conn, rows)) if is_async else _store(opener, conn, rows)[0]


@overload
def enqueue_many(conn: SyncConnection, jobs: Iterable[NewJob | Mapping[str, Any]]) -> list[UUID]: ...
@overload
def enqueue_many(
    conn: AsyncConnection | AsyncpgConnection, jobs: Iterable[NewJob | Mapping[str, Any]]
) -> Coroutine[Any, Any, list[UUID]]: ...
def enqueue_many(
    conn: Any, jobs: Iterable[NewJob | Mapping[str, Any]]
) -> list[UUID] | Coroutine[Any, Any, list[UUID]]:
    """Inserts all of `jobs` or none; their ids in the same order (to be awaited if `conn` is async).

    A mapping has the fields of NewJob as its keys. Errors are those of `enqueue`; one about a job starts with
    its index: "jobs[17].payload.items[3] ...". All jobs are checked and encoded at the call, which takes the
    event loop some 3 us each. Large calls take several statements, under a savepoint of the caller's
    transaction, or in one of their own when the connection is in autocommit. After an error the transaction
    may be usable or aborted, depending on the number of jobs: roll it back, as after any failed statement.
    """
    is_async, opener = _way_to(conn)
    rows = [_row(_new_job(item, f"jobs[{index}]"), f"jobs[{index}].") for index, item in enumerate(jobs)]
    return _store_async(opener, conn, rows) if is_async else _store(opener, conn, rows)


# Checking


def _new_job(item: object, what: str) -> NewJob:
    if isinstance(item, NewJob):
        return item
    if not isinstance(item, Mapping):
        raise UsageError(f"{what} is a {type(item).__name__}: pass a NewJob or a mapping with its fields")
    if unknown := next((key for key in item if key not in _FIELDS), None):
        raise UsageError(f"{what} has the unknown key {unknown!r}: there are {', '.join(sorted(_FIELDS))}")
    if "queue" not in item:
        raise UsageError(f"{what} names no queue")
    return NewJob(**item)


def _row(job: NewJob, at: str) -> _Row:
    """The parameters of one job; `at` stands before the names in errors."""
    if job.run_at is not None and job.delay is not None:
        raise UsageError(f"{at}run_at and {at}delay are both given: pass one of them")
    limit, timeout = job.max_attempts, job.timeout_s
    return (
        _text(job.queue, f"{at}queue", NAME_CHARS_MAX),
        None if job.kind is None else _text(job.kind, f"{at}kind", NAME_CHARS_MAX),
        "{}" if job.payload is None else encode(job.payload, f"{at}payload"),
        _whole(job.priority, f"{at}priority", -(2**31), 2**31 - 1),
        None if job.run_at is None else _instant(job.run_at, f"{at}run_at"),
        None if job.delay is None else delay_seconds(job.delay, f"{at}delay"),
        None if job.expires_at is None else _instant(job.expires_at, f"{at}expires_at"),
        None if limit is None else _whole(limit, f"{at}max_attempts", 1, ATTEMPTS_MAX),
        None if timeout is None else _period(timeout, f"{at}timeout_s"),
        None if job.dedupe_key is None else _text(job.dedupe_key, f"{at}dedupe_key", KEY_CHARS_MAX),
        None if job.meta is None else encode(job.meta, f"{at}meta"),
    )


def _text(value: object, what: str, chars_max: int) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{what} is a {type(value).__name__}: pass text")
    if not 1 <= len(value) <= chars_max:
        raise UsageError(f"{what} has {len(value):,} characters: 1 to {chars_max} are allowed")
    if not value.isprintable():  # NUL and lone surrogates are not; encode() knows how to refuse them
        encode(value, what, object_only=False)
    return str.__str__(value)  # of an enum its value; psycopg takes no lists of mixed types


def _whole(value: object, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{what} is a {type(value).__name__}: pass an int")
    if not low <= value <= high:
        raise UsageError(f"{what} is out of bounds: {low} to {high} are allowed")
    return int(value)


def _instant(value: object, what: str) -> str:
    if not isinstance(value, datetime):
        raise UsageError(f"{what} is a {type(value).__name__}: pass a datetime with a time zone")
    if value.utcoffset() is None:
        raise UsageError(
            f"{what} has no time zone, so the instant it means would be a guess: "
            "pass datetime.now(UTC), or value.astimezone() if local time is meant"
        )
    if not FIRST_INSTANT <= value < END_OF_INSTANTS:
        raise UsageError(f"{what} is {value.isoformat()}: 1970 to 2199 are allowed")
    return value.astimezone(UTC).isoformat()


def _period(value: float | timedelta, what: str) -> float:
    seconds = delay_seconds(value, what)
    if seconds == 0:
        raise UsageError(f"{what} is 0: give more, or None for no limit of the job's own")
    return max(seconds, 1e-6)  # the column is a real, which refuses what it would round to 0


# Storing


def _statements(rows: Sequence[_Row]) -> Iterator[_Parameters]:
    """The rows as columns, one list of them per statement."""
    begin = chars = 0
    for index, row in enumerate(rows):
        size = len(row[2]) + len(row[10] or "")
        if index - begin == _STATEMENT_ROWS or (chars + size > _STATEMENT_CHARS and index > begin):
            yield [list(column) for column in zip(*rows[begin:index], strict=True)]
            begin, chars = index, 0
        chars += size
    if rows:
        yield [list(column) for column in zip(*rows[begin:], strict=True)]

