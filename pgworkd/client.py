"""Enqueueing from application code: on the caller's own connection, in the caller's own transaction.

    job_id = await enqueue(conn, "embedding", {"note": 7}, delay=60)       # asyncpg, or anything else async
    job_ids = enqueue_many(conn, [NewJob("ocr", {"page": 1}), {"queue": "ocr", "payload": {"page": 2}}])

The jobs exist when the caller's transaction commits, never when it rolls back, and at once in autocommit. `conn` is of
asyncpg (Connection, Pool), psycopg (Connection, AsyncConnection), SQLAlchemy (Connection, Session, their async kin and
scoped sessions) or Django (`connection`, `connections[alias]`). What the driver raises passes through as it is.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from re import sub
from typing import Any, Protocol, TypedDict, Unpack, overload
from uuid import UUID

from .errors import UsageError, delay_seconds
from .payload import encode

NAME_CHARS_MAX, KEY_CHARS_MAX, ATTEMPTS_MAX, PRIORITY_MAX = 200, 512, 1000, 2**31 - 1
FIRST_INSTANT, END_OF_INSTANTS = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_STATEMENT_ROWS, _STATEMENT_CHARS = 5_000, 8 * 1024 * 1024  # more is no faster, but costs the server memory

# Ids are drawn here: RETURNING promises no order, and a server without OpenSSL opens /dev/urandom for each. Everything
# travels as text or number, so that no codec or adapter that the caller has set for jsonb or uuid comes between.
_INSERT = """
WITH stored AS (
    INSERT INTO pgworkd.jobs
           (id, queue, kind, payload, priority, run_at, expires_at, max_attempts, timeout_s, dedupe_key, meta)
    SELECT CAST(id AS uuid), queue, kind, CAST(payload AS jsonb), priority,
           coalesce(CAST(run_at AS timestamptz), pgworkd.clock() + make_interval(secs => coalesce(delay_s, 0))),
           CAST(expires_at AS timestamptz), max_attempts, timeout_s, dedupe_key, CAST(meta AS jsonb)
    FROM unnest(CAST($1 AS text[]), CAST($2 AS text[]), CAST($3 AS text[]), CAST($4 AS text[]), CAST($5 AS int[]),
                CAST($6 AS text[]), CAST($7 AS float8[]), CAST($8 AS text[]), CAST($9 AS int[]), CAST($10 AS float8[]),
                CAST($11 AS text[]), CAST($12 AS text[])) AS new
        (id, queue, kind, payload, priority, run_at, delay_s, expires_at, max_attempts, timeout_s, dedupe_key, meta)
    RETURNING 1
)
SELECT count(*) FROM stored"""
# The same in the other styles of parameters; each of them occurs once, in order.
_INSERT_FORMAT, _INSERT_NAMED = sub(r"\$\d+", "%s", _INSERT), sub(r"\$(\d+)", r":p\1", _INSERT)
_Jobs = Iterable["NewJob | Mapping[str, Any]"]


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


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be, the arguments of `enqueue`. None leaves a thing to the database or the handler.

    queue, kind: 1 to 200 characters. payload, meta (tags, trace context): a dict of JSON values, a dataclass or a
    pydantic model, up to 1 MiB as JSON. priority: higher first, an int4. It starts at `run_at` (with a time zone, 1970
    to 2199), or after `delay` (seconds by the database's clock, 0 to 366 days), and not from `expires_at` on.
    max_attempts: 1 to 1000. timeout_s: per attempt, above 0, up to 366 days. dedupe_key: 1 to 512 characters, compared
    bytewise; a queue takes one job per key until that is over or dead.
    """

    queue: str
    payload: object = None
    _: KW_ONLY
    kind: str | None = None
    priority: int = 0
    run_at: datetime | None = None
    delay: float | timedelta | None = None
    expires_at: datetime | None = None
    max_attempts: int | None = None
    timeout_s: float | timedelta | None = None
    dedupe_key: str | None = None
    meta: object = None


@overload
def enqueue(conn: _Sync, queue: str, payload: object = None, **options: Unpack[_Options]) -> UUID: ...
@overload
def enqueue(
    conn: _Async | _Asyncpg, queue: str, payload: object = None, **options: Unpack[_Options]
) -> Coroutine[Any, Any, UUID]: ...
def enqueue(conn: Any, queue: str, payload: object = None, **options: Unpack[_Options]) -> Any:
    """Inserts one job, whose arguments are those of NewJob; its id, to be awaited if `conn` is async.

    Raises at the call UsageError (InvalidPayload is one) for a value out of bounds or a connection of unknown type.
    """
    stored = _way(conn)(conn, [_row(NewJob(queue, payload, **options), "")])
    return stored[0] if isinstance(stored, list) else _first(stored)


@overload
def enqueue_many(conn: _Sync, jobs: _Jobs) -> list[UUID]: ...
@overload
def enqueue_many(conn: _Async | _Asyncpg, jobs: _Jobs) -> Coroutine[Any, Any, list[UUID]]: ...
def enqueue_many(conn: Any, jobs: _Jobs) -> Any:
    """Inserts all jobs or none; their ids in the order of the jobs, to be awaited if `conn` is async.

    A mapping has NewJob's arguments as keys. Errors as of `enqueue`, with the index: "jobs[17].payload.items[3] ...".
    All jobs are checked and encoded in the call itself, some 5 us each. More than 5,000 (or 8 MiB) take several
    statements, in a savepoint or, in autocommit, a transaction of their own. So it depends on their number whether the
    caller's transaction could go on after an error of the driver: roll it back.
    """
    return _way(conn)(conn, [_checked(job, i) for i, job in enumerate(jobs)])


def _checked(job: Any, index: int) -> tuple[Any, ...]:
    try:
        return _row(job if type(job) is NewJob else _new_job(job, ""), "")
    except UsageError:  # once more, for the message to say which
        return _row(_new_job(job, f"jobs[{index}]"), f"jobs[{index}].")


def _new_job(job: Any, what: str) -> NewJob:
    try:
        return job if isinstance(job, NewJob) else NewJob(**job)
    except TypeError as error:  # it says which key is unknown or missing, or that this is no mapping
        raise UsageError(f"{what} is not a job: {error}") from None


def _row(job: NewJob, at: str) -> tuple[Any, ...]:
    if job.run_at is not None and job.delay is not None:
        raise UsageError(f"{at}run_at and delay are both given: pass one of them")
    if job.timeout_s is not None and job.timeout_s in (0, timedelta(0)):
        raise UsageError(f"{at}timeout_s is 0: pass more, or None for the handler's own")
    return (
        _text(job.queue, f"{at}queue", NAME_CHARS_MAX),
        None if job.kind is None else _text(job.kind, f"{at}kind", NAME_CHARS_MAX),
        "{}" if job.payload is None else encode(job.payload, f"{at}payload"),
        _whole(job.priority, f"{at}priority", -PRIORITY_MAX - 1, PRIORITY_MAX),
        None if job.run_at is None else _instant(job.run_at, f"{at}run_at"),
        None if job.delay is None else delay_seconds(job.delay, f"{at}delay"),
        None if job.expires_at is None else _instant(job.expires_at, f"{at}expires_at"),
        None if job.max_attempts is None else _whole(job.max_attempts, f"{at}max_attempts", 1, ATTEMPTS_MAX),
        None if job.timeout_s is None else max(delay_seconds(job.timeout_s, f"{at}timeout_s"), 1e-6),  # not 0 as real
        None if job.dedupe_key is None else _text(job.dedupe_key, f"{at}dedupe_key", KEY_CHARS_MAX),
        None if job.meta is None else encode(job.meta, f"{at}meta"),
    )


def _text(value: object, what: str, chars_max: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= chars_max:
        raise UsageError(f"{what} must be text of 1 to {chars_max} characters")
    if not value.isprintable():  # neither is NUL or a lone surrogate: encode() refuses those in its words
        encode(value, what, object_only=False)
    return value


def _whole(value: object, what: str, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{what} must be an int from {low} to {high}")
    return int(value)  # of an enum: psycopg takes no list of mixed types


def _instant(value: object, what: str) -> str:
    if not isinstance(value, datetime) or value.utcoffset() is None or not FIRST_INSTANT <= value < END_OF_INSTANTS:
        raise UsageError(f"{what} must be a datetime from 1970 to 2199 with a time zone: without one it is a guess")
    return value.astimezone(UTC).isoformat()


def _way(conn: object) -> Callable[[Any, Sequence[Any]], Any]:
    for cls in type(conn).__mro__:
        if way := _WAYS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}"):
            return way
    raise UsageError(f"cannot enqueue on a {type(conn).__qualname__}: pass one of {', '.join(_WAYS)}")


def _parts(ids: Iterable[int], rows: Sequence[Any]) -> list[list[Any]]:
    parts, chars = list[list[Any]](), 0
    for job_id, fields in zip(ids, rows, strict=True):
        row = (f"{job_id:032x}", *fields)
        size = len(row[3]) + len(row[11] or "")
        if not parts or len(parts[-1]) == _STATEMENT_ROWS or chars + size > _STATEMENT_CHARS:
            parts.append([])
            chars = 0
        parts[-1].append(row)
        chars += size
    return parts


def _new_ids(count: int) -> range:
    """Version 7 UUIDs (RFC 9562) as integers: this millisecond, 12 random bits, and on from a random start."""
    low = 0b10 << 62 | secrets.randbits(61)  # the variant; room above for the count
    first = time.time_ns() // 1_000_000 << 80 | 7 << 76 | secrets.randbits(12) << 64 | low
    return range(first, first + count)


async def _first(ids: Coroutine[Any, Any, list[UUID]]) -> UUID:
    return (await ids)[0]


def _store(driver: Any, conn: Any, rows: Sequence[Any]) -> list[UUID]:
    ids = _new_ids(len(rows))
    parts = _parts(ids, rows)
    run, block = driver(conn, len(parts))
    with block() if len(parts) > 1 else nullcontext():
        for part in parts:
            run(*map(list, zip(*part, strict=True)))
    return [UUID(int=i) for i in ids]


async def _store_async(driver: Any, conn: Any, rows: Sequence[Any]) -> list[UUID]:
    ids = _new_ids(len(rows))
    parts = _parts(ids, rows)
    run, block = await driver(conn, len(parts))
    async with block() if len(parts) > 1 else nullcontext():
        for part in parts:
            await run(*map(list, zip(*part, strict=True)))
    return [UUID(int=i) for i in ids]


# The drivers. None is imported: who holds a connection has done that. Each answers with a function that runs the
# statement, and with one that opens a block around several, which undoes them also when cancelled between them.


async def _asyncpg(conn: Any, _: int) -> Any:
    return partial(conn.fetch, _INSERT), conn.transaction


async def _asyncpg_pool(pool: Any, rows: Sequence[Any]) -> list[UUID]:
    async with pool.acquire() as conn:
        return await _store_async(_asyncpg, conn, rows)


def _psycopg(conn: Any, statements: int) -> Any:
    cursor = conn.cursor(row_factory=lambda _: tuple)
    sql = _INSERT if "RawCursor" in str(type(cursor).__mro__) else _INSERT_FORMAT
    if statements > 1 and not conn.autocommit:
        cursor.execute("SELECT")  # begins the caller's transaction: a block outside of one would commit
    return lambda *columns: cursor.execute(sql, columns).fetchall(), conn.transaction


async def _psycopg_async(conn: Any, statements: int) -> Any:
    async def run(*columns: Any) -> Any:
        return await (await cursor.execute(sql, columns)).fetchall()

    cursor = conn.cursor(row_factory=lambda _: tuple)
    sql = _INSERT if "RawCursor" in str(type(cursor).__mro__) else _INSERT_FORMAT
    if statements > 1 and not conn.autocommit:
        await cursor.execute("SELECT")  # as above
    return run, conn.transaction


@contextmanager
def _out_of_autocommit(conn: Any, dbapi: Any) -> Iterator[None]:
    set_level = partial(conn.dialect.set_isolation_level, dbapi)  # asyncpg's ignores `dbapi.autocommit = False`
    set_level(conn.default_isolation_level)
    try:
        yield
        dbapi.commit()
    finally:
        with suppress(Exception):  # a lost connection: what is raised already says so
            dbapi.rollback()  # after a commit there is nothing to roll back
            set_level("AUTOCOMMIT")


_sqlalchemy_insert = cache(lambda: sys.modules["sqlalchemy"].text(_INSERT_NAMED))  # parsing it takes 50 us


def _sqlalchemy(conn: Any, _: int) -> Any:
    # Sessions have a method `connection`, connections a property. Streams are off: a cursor takes no INSERT.
    conn = conn.connection() if callable(type(conn).connection) else conn
    dbapi = conn.connection.dbapi_connection
    execute = partial(conn.execute, _sqlalchemy_insert(), execution_options={"stream_results": False})
    block = partial(_out_of_autocommit, conn, dbapi) if dbapi.autocommit else conn.begin_nested
    return lambda *columns: execute({f"p{i}": c for i, c in enumerate(columns, 1)}).all(), block


async def _sqlalchemy_async(conn: Any, rows: Sequence[Any]) -> Any:
    conn = await conn.connection() if callable(type(conn).connection) else conn
    return await conn.run_sync(partial(_store, _sqlalchemy), rows)


def _django(conn: Any, statements: int) -> Any:
    cursor, block = conn.cursor(), partial(sys.modules["django.db.transaction"].atomic, using=conn.alias)
    if statements > 1:
        cursor.execute("SELECT")  # fails in an aborted transaction, before atomic() would leave it in disorder
    return lambda *columns: (cursor.execute(_INSERT_FORMAT, columns), cursor.fetchall())[1], block


_SQLALCHEMY = ("sqlalchemy.Connection", "sqlalchemy.Session", "sqlalchemy.scoped_session")
_SQLALCHEMY_ASYNC = ("sqlalchemy.AsyncConnection", "sqlalchemy.AsyncSession", "sqlalchemy.async_scoped_session")
_WAYS: dict[str, Callable[[Any, Sequence[Any]], Any]] = {
    **dict.fromkeys(("asyncpg.Connection", "asyncpg.PoolConnectionProxy"), partial(_store_async, _asyncpg)),
    "asyncpg.Pool": _asyncpg_pool,
    "psycopg.Connection": partial(_store, _psycopg),
    "psycopg.AsyncConnection": partial(_store_async, _psycopg_async),
    **dict.fromkeys(_SQLALCHEMY, partial(_store, _sqlalchemy)),
    **dict.fromkeys(_SQLALCHEMY_ASYNC, _sqlalchemy_async),
    **dict.fromkeys(("django.BaseDatabaseWrapper", "django.ConnectionProxy"), partial(_store, _django)),
}
