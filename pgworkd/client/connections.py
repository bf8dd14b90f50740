"""Running the client's statements on the caller's connection, of whatever driver: asyncpg, psycopg, SQLAlchemy, Django.

No driver is imported: a caller that has a connection has imported it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache, partial
from itertools import accumulate, chain
from typing import Any, Protocol, TypeAlias
from uuid import UUID

import anyio
import anyio.lowlevel

from pgworkd.client import sent
from pgworkd.client.columns import QUEUE_COLUMN, Columns, ManyJobs, of_rows, parts
from pgworkd.client.new_job import META, PAYLOAD, QUEUE, Waits
from pgworkd.client.statements import DEPEND, ENQUEUE, ENQUEUE_ONCE, INSERT, INSERT_ONE, Statement
from pgworkd.errors import UsageError

_ROLLBACK_S = 5.0


class CommittingConnection(Protocol):
    """A sync connection: no async one has a `commit` that returns at once."""

    def commit(self) -> None:
        """Commits the transaction."""


class ConnectionProxy(Protocol):
    """A connection as `django.db.connection` is one for a checker: a proxy, whose attributes are those of another.

    No other connection has both methods.
    """

    def __getattr__(self, item: str, /) -> Any:
        """Returns an attribute of the connection."""

    def __contains__(self, key: str, /) -> bool:
        """Returns whether the connection has the attribute."""


class AsyncConnection(Protocol):
    """An async connection of psycopg or SQLAlchemy."""

    def commit(self) -> Coroutine[Any, Any, None]:
        """Commits the transaction."""


class AsyncpgConnection(Protocol):
    """A connection or a pool of asyncpg, known by what only these have."""

    def fetchval(self, query: str, /, *args: Any) -> Coroutine[Any, Any, Any]:
        """Returns one value."""


SyncConnection: TypeAlias = CommittingConnection | ConnectionProxy
AnyAsyncConnection: TypeAlias = AsyncConnection | AsyncpgConnection

Step: TypeAlias = Callable[[], tuple[Statement, Sequence[Any]]]
"""A statement to run with its parameters, which are made right before it runs."""


Steps: TypeAlias = list[Step] | Iterator[Step | None]
"""Statements to run all or none: a list; or an iterator that makes each when drawn (None: not ready, draw again)."""

AFTER_MAX = 10_000
"""Dependencies in one call of depend()."""


def inserts(ids: range, rows: Sequence[Sequence[Any]]) -> list[Step]:
    """The statements that insert these rows of `new_job` under these ids; an empty list without rows."""
    lists = parts(rows, lambda row: len(row[PAYLOAD]) + len(row[META] or ""))
    ends = accumulate(map(len, lists))
    return [partial(_insert, of_rows(ids[end - len(part) : end], part)) for end, part in zip(ends, lists, strict=True)]


def inserts_many(many: ManyJobs) -> Steps:
    """The statements that insert jobs which are drawn meanwhile: a list, if one statement is enough for all of them."""
    if not many:
        return []
    steps = _further(many)
    while (first := next(steps)) is None:
        pass
    return chain([first], steps) if many else [first, *filter(None, steps)]


def _further(many: ManyJobs) -> Iterator[Step | None]:
    while many:
        columns = yield from many.columns()
        yield partial(_insert, columns)
    yield from depends(many.waiting_ids, many.waiting)


def depends(ids: Sequence[int] | Mapping[int, int], waits: Iterable[Waits]) -> list[Step]:
    """The statements that store the dependencies of the new jobs."""
    edges = (
        (f"{ids[number]:032x}", "{" + ",".join(map(str, after[at : at + AFTER_MAX])) + "}", rule)
        for number, after, rule in waits
        for at in range(0, len(after), AFTER_MAX)
    )
    return [partial(_depend, part) for part in parts(edges, lambda edge: len(edge[1]))]


def _depend(part: Sequence[tuple[str, str, str]]) -> tuple[Statement, Sequence[Any]]:
    return DEPEND, [*map(list, zip(*part, strict=True))]


def answered(found: Any, answer: Callable[[list[Any]], Any]) -> Any:
    """`answer` applied to the rows that a way returned; a coroutine of that if the way is async."""
    return answer(found) if isinstance(found, list) else _answered_async(found, answer)


async def _answered_async(found: Coroutine[Any, Any, list[Any]], answer: Callable[[list[Any]], Any]) -> Any:
    return answer(await found)


def enqueues(row: Sequence[Any], on_duplicate: str) -> list[Step]:
    """The statement that inserts this row, or applies `on_duplicate` to the job that has its key.

    It returns one row: (id, created, changed).
    """
    return [partial(_enqueue, row, on_duplicate)]


def enqueues_once(job_id: UUID, row: Sequence[Any]) -> list[Step]:
    """The statement that inserts this row under this id, unless that is there; it returns an `EnqueuedOnce`."""
    return [partial(_enqueue_once, job_id, row)]


def way(conn: object) -> Callable[[Any, Steps], Any]:
    """The function that runs steps on a connection of this type, all or none, and returns the rows of a list's.

    To be awaited if the connection is async. UsageError for an unsupported type.
    """
    for cls in type(conn).__mro__:
        if found := _WAYS.get(f"{cls.__module__.partition('.')[0]}.{cls.__name__}"):
            return found
    raise UsageError(f"cannot enqueue on a {type(conn).__qualname__}: pass one of {', '.join(_WAYS)}")


def _enqueue(row: Sequence[Any], on_duplicate: str) -> tuple[Statement, Sequence[Any]]:
    sent.count(row[QUEUE])
    return ENQUEUE, [*row, on_duplicate]


def _enqueue_once(job_id: UUID, row: Sequence[Any]) -> tuple[Statement, Sequence[Any]]:
    sent.count(row[QUEUE])
    return ENQUEUE_ONCE, [str(job_id), *row]


def _insert(columns: Columns) -> tuple[Statement, Sequence[Any]]:
    if varying := columns.varying[QUEUE_COLUMN]:
        sent.count_each(varying)
    else:
        sent.count(columns.alike[QUEUE_COLUMN], len(columns.ids))
    if len(columns.ids) == 1:
        return INSERT_ONE, [f"{columns.ids[0]:032x}", columns.payloads[0], *columns.alike]
    return INSERT, columns.values


def _run(driver: Any, conn: Any, steps: Steps) -> list[Any]:
    statements = len(steps) if isinstance(steps, list) else 2  # or more
    freed = [*steps] if _is_busy(conn) else _freed(conn, steps)
    run, block = driver(conn, statements)
    rows: list[Any] = []
    with block() if statements > 1 else nullcontext():
        for step in filter(None, freed):
            rows += run(*step())
    return rows


def _is_busy(conn: Any) -> bool:
    """Whether the connection's lock is taken, as by psycopg's Cursor.stream() for as long as it is read."""
    return bool(getattr(getattr(conn, "lock", None), "locked", bool)())


def _freed(conn: Any, steps: Iterable[Step | None]) -> Iterator[Step | None]:
    """The steps; all are made first if they read from this very connection, which would deadlock with the inserts."""
    rest = iter(steps)
    for step in rest:
        yield from [step, *rest] if _is_busy(conn) else [step]


async def _run_async(driver: Any, conn: Any, steps: Steps) -> list[Any]:
    statements = len(steps) if isinstance(steps, list) else 2  # or more
    run, block = await driver(conn, statements)
    rows: list[Any] = []
    try:
        async with _whole(block()) if statements > 1 else nullcontext():
            if isinstance(steps, list):
                for step in steps:
                    rows += await run(*step())
            else:
                await _overlapping(run, steps)
    except asyncio.CancelledError as error:
        error.add_note("pgworkd was cancelled in a statement: outside your transaction it may have taken effect")
        raise
    return rows


async def _overlapping(run: Callable[..., Any], steps: Iterator[Step | None]) -> None:
    """Runs the steps one after the other, and makes each while the previous one runs."""
    errors = list[BaseException]()

    async def ran(statement: Statement, values: Sequence[Any]) -> None:
        try:
            await run(statement, values)
        except BaseException as error:  # noqa: BLE001 - raised below, as the caller of any other call would get it
            errors.append(error)

    step, error = await _next(steps)
    while step is not None and not errors:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ran, *step())
            await anyio.lowlevel.checkpoint()  # lets it be sent
            step, error = await _next(steps)
    for failed in [*errors, *filter(None, [error])]:
        raise failed


async def _next(steps: Iterator[Step | None]) -> tuple[Step | None, Exception | None]:
    """The next step, or the error in making it, which must not cut off the statement that is running."""
    try:
        for step in steps:
            if step is not None:
                return step, None
            await anyio.lowlevel.checkpoint()
    except Exception as error:  # noqa: BLE001 - of the caller's jobs, or of the caller's iterator
        return None, error
    return None, None


@asynccontextmanager
async def _whole(block: Any) -> AsyncIterator[None]:
    """A block of statements, rolled back also when anyio cancels it, and with it every await, that of ROLLBACK too."""
    await block.__aenter__()
    try:
        yield
    except BaseException as error:
        with anyio.CancelScope(shield=True), anyio.move_on_after(_ROLLBACK_S):
            await block.__aexit__(type(error), error, error.__traceback__)
        raise
    await block.__aexit__(None, None, None)


# The drivers. Each returns a function that runs a statement, and one that opens a block around several statements,
# which rolls them back also when cancelled between them.


async def _asyncpg(conn: Any, _: int) -> Any:
    _refuse_foreign_loop(conn)
    return lambda statement, values: conn.fetch(statement.numbered, *values), conn.transaction


async def _asyncpg_pool(pool: Any, steps: Steps) -> list[Any]:
    _refuse_foreign_loop(pool)
    async with pool.acquire() as conn:
        return await _run_async(_asyncpg, conn, steps)


def _refuse_foreign_loop(conn: Any) -> None:
    """Raises UsageError in another loop than the connection's: asyncpg would send before it notices."""
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
        with suppress(Exception):  # a lost connection: the error being raised says so
            dbapi.rollback()  # after a commit there is nothing to roll back
            set_level("AUTOCOMMIT")


@cache  # parsing it takes 50 us
def _sqlalchemy_text(sql: str) -> Any:
    return sys.modules["sqlalchemy"].text(sql)


def _sqlalchemy(conn: Any, _: int) -> Any:
    def run(statement: Statement, values: Sequence[Any]) -> Any:
        # No streaming: DECLARE CURSOR takes no INSERT.
        named = {f"p{i}": value for i, value in enumerate(values, 1)}
        return conn.execute(_sqlalchemy_text(statement.named), named, execution_options={"stream_results": False}).all()

    # Sessions have a method `connection`, connections a property.
    conn = conn.connection() if callable(type(conn).connection) else conn
    dbapi = conn.connection.dbapi_connection
    return run, partial(_out_of_autocommit, conn, dbapi) if dbapi.autocommit else conn.begin_nested


async def _sqlalchemy_async(conn: Any, steps: Steps) -> Any:
    conn = await conn.connection() if callable(type(conn).connection) else conn
    return await conn.run_sync(partial(_run, _sqlalchemy), steps)


def _django(conn: Any, statements: int) -> Any:
    cursor, block = conn.cursor(), partial(sys.modules["django.db.transaction"].atomic, using=conn.alias)
    if statements > 1:
        cursor.execute("SELECT")  # fails in an aborted transaction before atomic() is entered, which could not recover
    return lambda statement, values: (cursor.execute(statement.format, values), cursor.fetchall())[1], block


_SQLALCHEMY = ("sqlalchemy.Connection", "sqlalchemy.Session", "sqlalchemy.scoped_session")
_SQLALCHEMY_ASYNC = ("sqlalchemy.AsyncConnection", "sqlalchemy.AsyncSession", "sqlalchemy.async_scoped_session")
_WAYS: dict[str, Callable[[Any, Steps], Any]] = {
    **dict.fromkeys(("asyncpg.Connection", "asyncpg.PoolConnectionProxy"), partial(_run_async, _asyncpg)),
    "asyncpg.Pool": _asyncpg_pool,
    "psycopg.Connection": partial(_run, _psycopg),
    "psycopg.AsyncConnection": partial(_run_async, _psycopg_async),
    **dict.fromkeys(_SQLALCHEMY, partial(_run, _sqlalchemy)),
    **dict.fromkeys(_SQLALCHEMY_ASYNC, _sqlalchemy_async),
    **dict.fromkeys(("django.BaseDatabaseWrapper", "django.ConnectionProxy"), partial(_run, _django)),
}
