"""Application code enqueues on its own connection: each driver, each error, all or nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_type
from uuid import UUID

import asyncpg
import django.db  # type: ignore[import-untyped]
import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm

from pgworkd.client import NewJob, columns, enqueue, enqueue_many
from tests.kits.drivers import (
    asyncpg_connection,
    django_proxy,
    in_a_transaction,
    in_autocommit,
    numbered,
    psycopg_async,
    psycopg_sync,
    settled,
    sqlalchemy_async_session,
    sqlalchemy_connection,
    sqlalchemy_engine,
    stored,
)

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession


@pytest.fixture(params=[5_000, 2], ids=["one-statement", "several-statements"])
def statement_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", request.param)
    return int(request.param)


@pytest.fixture
def several_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 2)


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of the driver's exception, or of the one that SQLAlchemy or Django wrapped."""
    inner: Any = getattr(error, "orig", None) or error.__cause__ or error
    return getattr(error, "sqlstate", None) or getattr(inner, "sqlstate", None)


@in_a_transaction
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_jobs_commit_and_roll_back_with_the_callers_transaction(
    opener: Any, end: str, statement_rows: int, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        single = await settled(enqueue(caller.conn, "q", {"n": "single"}))
        many = await settled(enqueue_many(caller.conn, numbered(7)))
        assert await stored(db) == {}

        await settled(getattr(caller, end)())
        assert isinstance(single, UUID)
        in_order = {single: {"n": "single"}, **{job_id: {"n": n} for n, job_id in enumerate(many)}}
        assert await stored(db) == (in_order if end == "commit" else {})


@in_a_transaction
async def test_a_large_call_may_be_the_first_of_a_transaction(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        await settled(enqueue_many(caller.conn, numbered(7)))
        assert await stored(db) == {}
        await settled(caller.rollback())
        assert await stored(db) == {}


@in_autocommit
async def test_jobs_are_committed_at_once_in_autocommit(
    opener: Any, statement_rows: int, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=True) as caller:
        single = await settled(enqueue(caller.conn, "q", {"n": "single"}))
        assert await stored(db) == {single: {"n": "single"}}
        many = await settled(enqueue_many(caller.conn, iter(numbered(7))))
        assert await stored(db) == {single: {"n": "single"}, **{job_id: {"n": n} for n, job_id in enumerate(many)}}


@in_autocommit
async def test_a_late_conflict_in_autocommit_leaves_nothing_behind(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=True) as caller:
        first = await settled(enqueue(caller.conn, "q", {"n": "first"}, dedupe_key="taken"))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            await settled(enqueue_many(caller.conn, numbered(7, dedupe_key="taken")))
        assert sqlstate(caught.value) == "23505"
        assert await stored(db) == {first: {"n": "first"}}

        # It is still in autocommit.
        second = await settled(enqueue(caller.conn, "q", {"n": "second"}))
        assert await stored(db) == {first: {"n": "first"}, second: {"n": "second"}}


@in_a_transaction
async def test_a_failed_call_leaves_nothing_even_if_the_caller_commits(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        first = await settled(enqueue(caller.conn, "q", {"n": "first"}, dedupe_key="taken"))
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            await settled(enqueue_many(caller.conn, numbered(7, dedupe_key="taken")))
        assert sqlstate(caught.value) == "23505"
        await settled(caller.commit())
        assert await stored(db) == {first: {"n": "first"}}


DRIVERS_OWN = {
    asyncpg_connection: asyncpg.UniqueViolationError,
    psycopg_sync: psycopg.errors.UniqueViolation,
    psycopg_async: psycopg.errors.UniqueViolation,
    sqlalchemy_connection: sqlalchemy.exc.IntegrityError,
    sqlalchemy_async_session: sqlalchemy.exc.IntegrityError,
    django_proxy: django.db.IntegrityError,
}


@pytest.mark.parametrize("opener", DRIVERS_OWN)
async def test_a_taken_dedupe_key_raises_the_drivers_own_error(opener: Any, statement_rows: int, dsn: str) -> None:
    async with opener(dsn, autocommit=False) as caller:
        with pytest.raises(DRIVERS_OWN[opener]):
            await settled(enqueue_many(caller.conn, [NewJob("q", dedupe_key="a"), *numbered(3, dedupe_key="a")]))


@in_a_transaction
async def test_an_aborted_transaction_passes_the_drivers_error(
    opener: Any, statement_rows: int, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=False) as caller:
        with pytest.raises(Exception, match="division by zero"):
            await settled(caller.execute("SELECT 1 / 0"))
        calls: list[Callable[[], Any]] = [
            lambda: enqueue(caller.conn, "q"),
            lambda: enqueue_many(caller.conn, numbered(7)),
        ]
        for call in calls:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
                await settled(call())
            assert sqlstate(caught.value) == "25P02"
        await settled(caller.rollback())
        assert await stored(db) == {}


@in_a_transaction
async def test_a_lost_connection_passes_the_drivers_error(
    opener: Any, several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with opener(dsn, autocommit=True) as caller:
        await settled(enqueue_many(caller.conn, numbered(7)))
        await db.fetch(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        with pytest.raises(Exception) as caught:  # noqa: PT011 - each driver has its own
            await settled(enqueue_many(caller.conn, numbered(7)))
        library = opener.__name__.partition("_")[0]
        assert type(caught.value).__module__.partition(".")[0] == library
    assert len(await stored(db)) == 7


async def test_a_call_cancelled_between_statements_leaves_nothing(
    several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    class Cancelled(asyncpg.Connection):
        calls = 0

        async def fetch(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            if self.calls == 3:
                raise asyncio.CancelledError
            return await super().fetch(*args, **kwargs)

    conn = await asyncpg.connect(dsn, connection_class=Cancelled)
    async with conn.transaction():
        with pytest.raises(asyncio.CancelledError):
            await enqueue_many(conn, numbered(7))
    await conn.close()
    assert await stored(db) == {}


async def test_an_interrupt_between_statements_leaves_nothing(
    several_statements: None, dsn: str, db: asyncpg.Connection[Any]
) -> None:
    class Interrupted(psycopg.Cursor[Any]):
        calls = 0

        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += "INSERT" in query
            if self.calls == 3:
                raise KeyboardInterrupt
            return super().execute(query, *args, **kwargs)

    with psycopg.connect(dsn, cursor_factory=Interrupted) as conn:
        with pytest.raises(KeyboardInterrupt):
            enqueue_many(conn, numbered(7))
        conn.commit()
    assert Interrupted.calls == 3
    assert await stored(db) == {}


async def test_jobs_follow_the_callers_savepoints(statement_rows: int, dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Rolling back a savepoint of the caller removes its jobs, and no others."""
    with psycopg.connect(dsn) as conn, conn.transaction():
        kept = enqueue_many(conn, numbered(3))
        with conn.transaction(force_rollback=True):
            enqueue_many(conn, numbered(3))
    assert set(await stored(db)) == set(kept)

    async with django_proxy(dsn, autocommit=True) as caller:
        with django.db.transaction.atomic():
            kept += enqueue_many(caller.conn, numbered(3))
            with django.db.transaction.atomic():
                enqueue_many(caller.conn, numbered(3))
                caller.conn.set_rollback(True)
            assert len(await stored(db)) == 3
        assert set(await stored(db)) == set(kept)

    engine = sqlalchemy_engine(dsn, autocommit=False)
    with orm.Session(engine) as session, session.begin():
        kept += enqueue_many(session, numbered(3))
        with session.begin_nested() as nested:
            enqueue_many(session, numbered(3))
            nested.rollback()
    engine.dispose()
    assert set(await stored(db)) == set(kept)


# Requirements on the application


def test_the_client_imports_no_driver() -> None:
    program = (
        "import sys, pgworkd.client; print(sorted({'asyncpg', 'psycopg', 'sqlalchemy', 'django'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def types_as_mypy_sees_them(  # never called
    connection: asyncpg.Connection[Any],
    proxy: PoolConnectionProxy[Any],
    pool: asyncpg.Pool[Any],
    sync: psycopg.Connection[Any],
    asynchronous: psycopg.AsyncConnection[Any],
    sa_sync: sqlalchemy.Connection,
    sa_session: orm.Session,
    sa_scoped: orm.scoped_session[orm.Session],
    sa_async: AsyncConnection,
    sa_async_session: AsyncSession,
) -> None:
    assert_type(await enqueue(connection, "q", {}, delay=1), UUID)
    assert_type(await enqueue(proxy, "q"), UUID)
    assert_type(await enqueue(pool, "q"), UUID)
    assert_type(enqueue(sync, "q"), UUID)
    assert_type(await enqueue(asynchronous, "q"), UUID)
    assert_type(enqueue(sa_sync, "q"), UUID)
    assert_type(enqueue(sa_session, "q"), UUID)
    assert_type(enqueue(sa_scoped, "q"), UUID)
    assert_type(await enqueue(sa_async, "q"), UUID)
    assert_type(await enqueue(sa_async_session, "q"), UUID)
    assert_type(await enqueue_many(pool, [NewJob("q"), {"queue": "q"}]), list[UUID])
    assert_type(enqueue_many(sync, [NewJob("q"), {"queue": "q"}]), list[UUID])
