"""Running the client's statements on whatever connection the caller has: asyncpg, psycopg, SQLAlchemy, Django.

No driver is imported: who holds a connection has done that.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache, partial
from re import sub
from typing import Any, NamedTuple, TypeAlias, TypeVar

import anyio

from .errors import UsageError
from .new_job import KEYED_JOB_FIELDS, NEW_JOB_FIELDS, Waits

_STATEMENT_ROWS, _STATEMENT_CHARS = 5_000, 8 * 1024 * 1024  # more is no faster, but costs the server memory
_ROLLBACK_S = 5.0
_WITH_KEYS = 1 + NEW_JOB_FIELDS  # fields of a row and its id from which on it has keys


Item = TypeVar("Item")


class Statement(NamedTuple):
    """A statement in each style of parameters; each of them occurs once, in order."""

    numbered: str
    format: str
    named: str


Step: TypeAlias = Callable[[], tuple[Statement, Sequence[Any]]]
"""A statement to run with its parameters, which are made when its turn has come."""


AFTER_MAX = 10_000
"""Dependencies in one call of depend()."""


def styles(sql: str) -> Statement:
    """A statement whose parameters $1, $2, ... occur once each, in order."""
    return Statement(sql, sub(r"\$\d+", "%s", sql), sub(r"\$(\d+)", r":p\1", sql))


# Ids are drawn by the client: RETURNING promises no order, and a server without OpenSSL opens /dev/urandom for each.
# Everything travels as text or number, so that no codec or adapter that the caller has set for jsonb or uuid comes
# between. Columns that few jobs have make up a statement of their own: each array costs, full of NULLs or not.
_INSERT = styles("""
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
SELECT count(*) FROM stored""")
_INSERT_WITH_KEYS = styles("""
WITH stored AS (
    INSERT INTO pgworkd.jobs
           (id, queue, kind, payload, priority, run_at, expires_at, max_attempts, timeout_s, dedupe_key, meta,
            serialize_key, limit_key, yields, dedupe_until)
    SELECT CAST(id AS uuid), queue, kind, CAST(payload AS jsonb), priority,
           coalesce(CAST(run_at AS timestamptz), pgworkd.clock() + make_interval(secs => coalesce(delay_s, 0))),
           CAST(expires_at AS timestamptz), max_attempts, timeout_s, dedupe_key, CAST(meta AS jsonb),
           serialize_key, limit_key, coalesce(on_retry = 'yield', false),
           coalesce(CAST(dedupe_until AS timestamptz), pgworkd.clock() + make_interval(secs => dedupe_for_s))
    FROM unnest(CAST($1 AS text[]), CAST($2 AS text[]), CAST($3 AS text[]), CAST($4 AS text[]), CAST($5 AS int[]),
                CAST($6 AS text[]), CAST($7 AS float8[]), CAST($8 AS text[]), CAST($9 AS int[]), CAST($10 AS float8[]),
                CAST($11 AS text[]), CAST($12 AS text[]), CAST($13 AS text[]), CAST($14 AS text[]),
                CAST($15 AS text[]), CAST($16 AS text[]), CAST($17 AS float8[])) AS new
        (id, queue, kind, payload, priority, run_at, delay_s, expires_at, max_attempts, timeout_s, dedupe_key, meta,
         serialize_key, limit_key, on_retry, dedupe_until, dedupe_for_s)
    RETURNING 1
)
SELECT count(*) FROM stored""")
_ENQUEUE = styles("""
SELECT CAST(id AS text), created, changed
FROM pgworkd.enqueue(
    CAST($1 AS text), p_kind => CAST($2 AS text), p_payload => CAST(CAST($3 AS text) AS jsonb),
    p_priority => CAST($4 AS int), p_run_at => CAST(CAST($5 AS text) AS timestamptz), p_delay_s => CAST($6 AS float8),
    p_expires_at => CAST(CAST($7 AS text) AS timestamptz), p_max_attempts => CAST($8 AS int),
    p_timeout_s => CAST($9 AS float8), p_dedupe_key => CAST($10 AS text), p_meta => CAST(CAST($11 AS text) AS jsonb),
    p_serialize_key => CAST($12 AS text), p_limit_key => CAST($13 AS text),
    p_on_retry => coalesce(CAST($14 AS text), 'hold'), p_dedupe_until => CAST(CAST($15 AS text) AS timestamptz),
    p_dedupe_for_s => CAST($16 AS float8), p_on_duplicate => CAST($17 AS text))""")

_DEPEND = styles("""
SELECT sum(pgworkd.depend(CAST(job AS uuid), CAST(after AS uuid[]), unless))
FROM unnest(CAST($1 AS text[]), CAST($2 AS text[]), CAST($3 AS text[])) AS new (job, after, unless)""")


def inserts(ids: Iterable[int], rows: Sequence[Any]) -> list[Step]:
    """The statements that store these rows of `new_job` under these ids; without rows, none."""
    all_rows = ((f"{job_id:032x}", *fields) for job_id, fields in zip(ids, rows, strict=True))
    return [partial(_insert, part) for part in parts(all_rows, lambda row: len(row[3]) + len(row[11] or ""))]


def depends(ids: Sequence[int], waits: Iterable[Waits]) -> list[Step]:
    """The statements that let those of the new jobs wait for others."""
    edges = (
        (f"{ids[number]:032x}", "{" + ",".join(map(str, after[at : at + AFTER_MAX])) + "}", unless)
        for number, after, unless in waits
        for at in range(0, len(after), AFTER_MAX)
    )
    return [partial(_depend, part) for part in parts(edges, lambda edge: len(edge[1]))]


def _depend(part: Sequence[tuple[str, str, str]]) -> tuple[Statement, Sequence[Any]]:
    return _DEPEND, [*map(list, zip(*part, strict=True))]


def parts(items: Iterable[Item], chars: Callable[[Item], int]) -> list[list[Item]]:
    """The items, in lists that are each fit for one statement."""
    lists, sum_chars = list[list[Item]](), 0
    for item in items:
        size = chars(item)
        if not lists or len(lists[-1]) == _STATEMENT_ROWS or sum_chars + size > _STATEMENT_CHARS:
            lists.append([])
            sum_chars = 0
        lists[-1].append(item)
        sum_chars += size
    return lists


def answered(found: Any, answer: Callable[[list[Any]], Any]) -> Any:
    """What `answer` makes of the rows that a way has found, or of those that are to be awaited."""
    return answer(found) if isinstance(found, list) else _answered_async(found, answer)


async def _answered_async(found: Coroutine[Any, Any, list[Any]], answer: Callable[[list[Any]], Any]) -> Any:
    return answer(await found)


def enqueues(row: tuple[Any, ...], on_duplicate: str) -> list[Step]:
    """The statement that stores this row or does with the holder of its key what is said: (id, created, changed)."""
    return [lambda: (_ENQUEUE, [*_with_keys(row, KEYED_JOB_FIELDS), on_duplicate])]


def way(conn: object) -> Callable[[Any, Sequence[Step]], Any]:
    """How to run steps on a connection of this type, all or none: the rows of the last, to be awaited if it is async.

    UsageError for a type that we do not know.
    """
    for cls in type(conn).__mro__:
        if found := _WAYS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}"):
            return found
    raise UsageError(f"cannot enqueue on a {type(conn).__qualname__}: pass one of {', '.join(_WAYS)}")


def _insert(part: list[Any]) -> tuple[Statement, Sequence[Any]]:
    statement = _INSERT
    if max(map(len, part)) > _WITH_KEYS:
        statement, part = _INSERT_WITH_KEYS, [_with_keys(row, 1 + KEYED_JOB_FIELDS) for row in part]
    return statement, [*map(list, zip(*part, strict=True))]


def _with_keys(row: tuple[Any, ...], fields: int) -> tuple[Any, ...]:
    return row + (None,) * (fields - len(row))


def _run(driver: Any, conn: Any, steps: Sequence[Step]) -> list[Any]:
    run, block = driver(conn, len(steps))
    rows: list[Any] = []
    with block() if len(steps) > 1 else nullcontext():
        for step in steps:
            rows = run(*step())
    return rows


async def _run_async(driver: Any, conn: Any, steps: Sequence[Step]) -> list[Any]:
    run, block = await driver(conn, len(steps))
    rows: list[Any] = []
    try:
        async with _whole(block()) if len(steps) > 1 else nullcontext():
            for step in steps:
                rows = await run(*step())
    except asyncio.CancelledError as error:
        error.add_note("pgworkd was cancelled in a statement: unless in your transaction, it may have taken effect")
        raise
    return rows


@asynccontextmanager
async def _whole(block: Any) -> AsyncIterator[None]:
    """The block, rolled back also when cancelled by anyio: that cancels each await, the one of ROLLBACK, too."""
    await block.__aenter__()
    try:
        yield
    except BaseException as error:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_ROLLBACK_S):
            await block.__aexit__(type(error), error, error.__traceback__)
        raise
    await block.__aexit__(None, None, None)


# The drivers. Each answers with a function that runs a statement, and with one that opens a block around several,
# which undoes them also when cancelled between them.


async def _asyncpg(conn: Any, _: int) -> Any:
    _refuse_foreign_loop(conn)
    return lambda statement, values: conn.fetch(statement.numbered, *values), conn.transaction


async def _asyncpg_pool(pool: Any, steps: Sequence[Step]) -> list[Any]:
    _refuse_foreign_loop(pool)
    async with pool.acquire() as conn:
        return await _run_async(_asyncpg, conn, steps)


def _refuse_foreign_loop(conn: Any) -> None:
    """asyncpg would send the statement, and only then find that it cannot wait for the answer here."""
    if getattr(conn, "_loop", None) not in (None, asyncio.get_running_loop()):
        raise UsageError("this connection was opened in another event loop: open one in each thread and process")


def _psycopg(conn: Any, statements: int) -> Any:
    cursor = conn.cursor(row_factory=lambda _: tuple)
    style = _psycopg_style(cursor)
    if statements > 1 and not conn.autocommit:
        cursor.execute("SELECT")  # begins the caller's transaction: a block outside of one would commit
    return lambda statement, values: cursor.execute(style(statement), values).fetchall(), conn.transaction


async def _psycopg_async(conn: Any, statements: int) -> Any:
    async def run(statement: Statement, values: Sequence[Any]) -> Any:
        return await (await cursor.execute(style(statement), values)).fetchall()

    cursor = conn.cursor(row_factory=lambda _: tuple)
    style = _psycopg_style(cursor)
    if statements > 1 and not conn.autocommit:
        await cursor.execute("SELECT")  # as above
    return run, conn.transaction


def _psycopg_style(cursor: Any) -> Callable[[Statement], str]:
    return (lambda s: s.numbered) if "RawCursor" in str(type(cursor).__mro__) else (lambda s: s.format)


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


@cache  # parsing it takes 50 us
def _sqlalchemy_text(sql: str) -> Any:
    return sys.modules["sqlalchemy"].text(sql)


def _sqlalchemy(conn: Any, _: int) -> Any:
    def run(statement: Statement, values: Sequence[Any]) -> Any:
        # Streams are off: a cursor takes no INSERT.
        named = {f"p{i}": value for i, value in enumerate(values, 1)}
        return conn.execute(_sqlalchemy_text(statement.named), named, execution_options={"stream_results": False}).all()

    # Sessions have a method `connection`, connections a property.
    conn = conn.connection() if callable(type(conn).connection) else conn
    dbapi = conn.connection.dbapi_connection
    return run, partial(_out_of_autocommit, conn, dbapi) if dbapi.autocommit else conn.begin_nested


async def _sqlalchemy_async(conn: Any, steps: Sequence[Step]) -> Any:
    conn = await conn.connection() if callable(type(conn).connection) else conn
    return await conn.run_sync(partial(_run, _sqlalchemy), steps)


def _django(conn: Any, statements: int) -> Any:
    cursor, block = conn.cursor(), partial(sys.modules["django.db.transaction"].atomic, using=conn.alias)
    if statements > 1:
        cursor.execute("SELECT")  # fails in an aborted transaction, before atomic() would leave it in disorder
    return lambda statement, values: (cursor.execute(statement.format, values), cursor.fetchall())[1], block


_SQLALCHEMY = ("sqlalchemy.Connection", "sqlalchemy.Session", "sqlalchemy.scoped_session")
_SQLALCHEMY_ASYNC = ("sqlalchemy.AsyncConnection", "sqlalchemy.AsyncSession", "sqlalchemy.async_scoped_session")
_WAYS: dict[str, Callable[[Any, Sequence[Step]], Any]] = {
    **dict.fromkeys(("asyncpg.Connection", "asyncpg.PoolConnectionProxy"), partial(_run_async, _asyncpg)),
    "asyncpg.Pool": _asyncpg_pool,
    "psycopg.Connection": partial(_run, _psycopg),
    "psycopg.AsyncConnection": partial(_run_async, _psycopg_async),
    **dict.fromkeys(_SQLALCHEMY, partial(_run, _sqlalchemy)),
    **dict.fromkeys(_SQLALCHEMY_ASYNC, _sqlalchemy_async),
    **dict.fromkeys(("django.BaseDatabaseWrapper", "django.ConnectionProxy"), partial(_run, _django)),
}
