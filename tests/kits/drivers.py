"""Connections of an application with each driver, and the jobs that are stored then."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import django.db  # type: ignore[import-untyped]
import psycopg
import pytest
import sqlalchemy
from django.conf import settings as django_settings  # type: ignore[import-untyped]
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy import orm

from pgworkd.client import NewJob, enqueue, enqueue_many
from pgworkd.errors import UsageError


@dataclasses.dataclass
class Caller:
    """An application's connection: in a transaction that `commit` or `rollback` ends, or in autocommit."""

    conn: Any
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    execute: Callable[[str], Any]


def nothing() -> None:
    pass


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def asyncpg_connection(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    conn = await asyncpg.connect(dsn)
    try:
        if autocommit:
            yield Caller(conn, nothing, nothing, conn.execute)
        else:
            transaction = conn.transaction()
            await transaction.start()
            yield Caller(conn, transaction.commit, transaction.rollback, conn.execute)
    finally:
        conn.terminate()


@asynccontextmanager
async def asyncpg_proxy(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire() as conn:
        if autocommit:
            yield Caller(conn, nothing, nothing, conn.execute)
            return
        transaction = conn.transaction()
        await transaction.start()
        yield Caller(conn, transaction.commit, transaction.rollback, conn.execute)
        if conn.is_in_transaction():  # an aborted transaction that the test left open
            await transaction.rollback()


@asynccontextmanager
async def asyncpg_pool(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    assert autocommit
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        yield Caller(pool, nothing, nothing, pool.execute)


@asynccontextmanager
async def psycopg_sync(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    with psycopg.connect(dsn, autocommit=autocommit) as conn:
        yield Caller(conn, conn.commit, conn.rollback, conn.execute)


@asynccontextmanager
async def psycopg_unusual(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    """With dict rows and $1 parameters."""
    with psycopg.connect(dsn, autocommit=autocommit, row_factory=dict_row, cursor_factory=psycopg.RawCursor) as conn:
        yield Caller(conn, conn.commit, conn.rollback, conn.execute)


@asynccontextmanager
async def psycopg_async(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=autocommit) as conn:
        yield Caller(conn, conn.commit, conn.rollback, conn.execute)


@asynccontextmanager
async def sqlalchemy_connection(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    with sqlalchemy_engine(dsn, autocommit).connect() as conn:
        yield Caller(conn, conn.commit, conn.rollback, lambda sql: conn.execute(sqlalchemy.text(sql)))
    conn.engine.dispose()


@asynccontextmanager
async def sqlalchemy_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    engine = sqlalchemy_engine(dsn, autocommit)
    with orm.Session(engine) as session:
        yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))
    engine.dispose()


@asynccontextmanager
async def sqlalchemy_scoped_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    engine = sqlalchemy_engine(dsn, autocommit)
    session = orm.scoped_session(orm.sessionmaker(engine))
    yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))
    session.remove()
    engine.dispose()


def sqlalchemy_engine(dsn: str, autocommit: bool) -> sqlalchemy.Engine:
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    return sqlalchemy.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn), **options)


@asynccontextmanager
async def sqlalchemy_async_engine(dsn: str, autocommit: bool, driver: str) -> AsyncIterator[Any]:
    pytest.importorskip("greenlet", reason="SQLAlchemy's async side needs sqlalchemy[asyncio]")
    from sqlalchemy.ext.asyncio import create_async_engine

    connect: Any = asyncpg.connect if driver == "asyncpg" else psycopg.AsyncConnection.connect
    options: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    engine = create_async_engine(f"postgresql+{driver}://", async_creator=lambda: connect(dsn), **options)
    yield engine
    await engine.dispose()


@asynccontextmanager
async def sqlalchemy_async_connection(dsn: str, autocommit: bool, driver: str = "asyncpg") -> AsyncIterator[Caller]:
    async with sqlalchemy_async_engine(dsn, autocommit, driver) as engine, engine.connect() as conn:
        yield Caller(conn, conn.commit, conn.rollback, lambda sql: conn.execute(sqlalchemy.text(sql)))


@asynccontextmanager
async def sqlalchemy_async_psycopg(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with sqlalchemy_async_connection(dsn, autocommit, "psycopg") as caller:
        yield caller


@asynccontextmanager
async def sqlalchemy_async_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with sqlalchemy_async_engine(dsn, autocommit, "asyncpg") as engine:
        from sqlalchemy.ext.asyncio import AsyncSession

        async with AsyncSession(engine) as session:
            yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))


@asynccontextmanager
async def sqlalchemy_async_scoped_session(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with sqlalchemy_async_engine(dsn, autocommit, "asyncpg") as engine:
        from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker

        session = async_scoped_session(async_sessionmaker(engine), asyncio.current_task)
        yield Caller(session, session.commit, session.rollback, lambda sql: session.execute(sqlalchemy.text(sql)))
        await session.remove()


@asynccontextmanager
async def django_proxy(dsn: str, autocommit: bool, *, proxy: bool = True) -> AsyncIterator[Caller]:
    """Django's `connection`, in an atomic block unless autocommit."""
    if not django_settings.configured:
        engine = {"ENGINE": "django.db.backends.postgresql", "TEST": {}}
        django_settings.configure(DATABASES={"default": engine}, USE_TZ=True)
        django.setup()
    parts = conninfo_to_dict(dsn)
    django.db.connections.settings["default"].update(
        NAME=parts["dbname"],
        HOST=parts.get("host", ""),
        PORT=parts.get("port", ""),
        USER=parts.get("user", ""),
        PASSWORD=parts.get("password", ""),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")  # nothing else runs in the test's event loop
        conn: Any = django.db.connection if proxy else django.db.connections["default"]
        conn.connect()
        conn.set_autocommit(autocommit)
        try:
            yield Caller(conn, conn.commit, conn.rollback, lambda sql: conn.cursor().execute(sql))
        finally:
            conn.close()


@asynccontextmanager
async def django_wrapper(dsn: str, autocommit: bool) -> AsyncIterator[Caller]:
    async with django_proxy(dsn, autocommit, proxy=False) as caller:
        yield caller


TRANSACTIONAL = [
    asyncpg_connection,
    asyncpg_proxy,
    psycopg_sync,
    psycopg_unusual,
    psycopg_async,
    sqlalchemy_connection,
    sqlalchemy_session,
    sqlalchemy_scoped_session,
    sqlalchemy_async_connection,
    sqlalchemy_async_psycopg,
    sqlalchemy_async_session,
    sqlalchemy_async_scoped_session,
    django_proxy,
    django_wrapper,
]
in_a_transaction = pytest.mark.parametrize("opener", TRANSACTIONAL)
in_autocommit = pytest.mark.parametrize("opener", [*TRANSACTIONAL, asyncpg_pool])


def numbered(count: int, **last: Any) -> list[NewJob]:
    """Jobs with payloads {"n": 0}, {"n": 1} ...; the last one also has the given fields."""
    jobs = [NewJob("q", {"n": n}) for n in range(count)]
    jobs[-1] = dataclasses.replace(jobs[-1], **last)
    return jobs


async def stored(db: asyncpg.Connection[Any]) -> dict[UUID, Any]:
    """The payloads that another connection sees, by id."""
    return {row[0]: json.loads(row[1]) for row in await db.fetch("SELECT id, payload FROM pgworkd.jobs")}


class Untouchable:
    """Looks like a connection of asyncpg, but must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a round trip began: {name}")


Untouchable.__module__, Untouchable.__name__ = "asyncpg.connection", "Connection"


def refused_at_the_call(fields: dict[str, Any], message: str) -> UsageError:
    """Both calls refuse a job with these fields and a message that starts with `message`; the error of `enqueue`."""
    arguments = {"queue": "q", **fields}
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        enqueue(Untouchable(), **arguments)
    for bad in (arguments, NewJob(**arguments)):
        with pytest.raises(UsageError, match=rf"^jobs\[1\]\.{message}"):
            enqueue_many(Untouchable(), [NewJob("q"), bad, {"queue": ""}])
    return caught.value
