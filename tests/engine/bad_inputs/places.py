"""Bad inputs 36 to 39: the client is called where or when it cannot work, or is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from uuid import UUID

import anyio
import anyio.to_thread
import asyncpg
import psycopg
import pytest

from pgworkd.client import enqueue, enqueue_many
from pgworkd.errors import UsageError
from pgworkd.results import Results
from tests.engine.bad_inputs import Case, Check
from tests.kits.daemon import insert, until
from tests.kits.drivers import numbered, settled, stored
from tests.kits.verbs import Db

ELSEWHERE = "in another event loop: open one in each thread and process"


def raises(error: type[BaseException], message: str, call: Callable[[str, Db], Coroutine[Any, Any, Any]]) -> Check:
    """The call raises exactly this error, and nothing is stored."""

    async def check(dsn: str, db: Db) -> None:
        with pytest.raises(error, match=message) as caught:
            await call(dsn, db)
        assert caught.type is error
        async with opened(dsn) as fresh:
            assert await stored(fresh) == {}

    return check


@contextlib.asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[Db]:
    """A connection besides the test's own."""
    connection = await asyncpg.connect(dsn)
    yield connection
    connection.terminate()


# 36, 37: connections in a state that allows no call


async def aborted(dsn: str, db: Db) -> None:
    for call in (lambda: enqueue(db, "q"), lambda: enqueue_many(db, numbered(5_001))):
        transaction = db.transaction()
        await transaction.start()
        with contextlib.suppress(asyncpg.DivisionByZeroError):
            await db.execute("SELECT 1/0")
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await call()
        await transaction.rollback()
    with psycopg.connect(dsn) as connection:
        with contextlib.suppress(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1/0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            enqueue(connection, "q")
        connection.rollback()
    assert await stored(db) == {}


async def on_a_closed_connection(dsn: str, db: Db) -> None:
    await db.close()
    await enqueue(db, "q")


async def on_a_closed_pool(dsn: str, _: Db) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        pass
    await enqueue(pool, "q")


async def on_a_closed_psycopg(dsn: str, _: Db) -> None:
    with psycopg.connect(dsn) as connection:
        pass
    enqueue(connection, "q")


async def results_not_open(dsn: str, _: Db) -> None:
    await Results(dsn).result(UUID(int=1))


async def results_closed(dsn: str, _: Db) -> None:
    async with Results(dsn) as results:
        pass
    await results.result(UUID(int=1))


async def results_closed_meanwhile(dsn: str, db: Db) -> None:
    job_id = await insert(db, "unserved")
    told: list[str] = []

    async def wait(results: Results) -> None:
        with pytest.raises(UsageError) as caught:
            await results.result(job_id)
        told.append(str(caught.value))

    async with anyio.create_task_group() as tasks, Results(dsn) as results:
        tasks.start_soon(wait, results)
        await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.result_waiters)"))
    assert told == [f"Results was closed before job {job_id} finished: keep it open until then"]


# 38: calls from another thread or process


def elsewhere(call: Callable[[Any], Coroutine[Any, Any, Any]], kind: Callable[[str], Any]) -> Check:
    """An object opened here is used from the event loop of another thread; it remains usable here."""

    async def soon(thing: Any) -> None:
        with anyio.fail_after(5):
            await call(thing)

    async def check(dsn: str, db: Db) -> None:
        async with kind(dsn) as thing:
            with pytest.raises(UsageError, match=ELSEWHERE):
                await anyio.to_thread.run_sync(lambda: asyncio.run(soon(thing)))
            if not isinstance(thing, Results):
                await call(thing)
        assert len(await stored(db)) == (kind is not Results)

    return check


def _pool(dsn: str) -> Any:
    return asyncpg.create_pool(dsn, min_size=1, max_size=1)


FORKED = """
import asyncio, os, sys, uuid
import asyncpg
from pgworkd.client import enqueue
from pgworkd.errors import UsageError
from pgworkd.results import Results

async def ask(connection, results):
    for call in (enqueue(connection, "q"), results.result(uuid.UUID(int=1)), anext(results.of_batch(uuid.UUID(int=1)))):
        try:
            await call
        except UsageError as error:
            print(error, flush=True)

async def main():
    connection = await asyncpg.connect(sys.argv[1])
    async with Results(sys.argv[1]) as results:
        if os.fork() == 0:
            asyncio.run(ask(connection, results))
            os._exit(0)
        os.wait()
        print(type(await enqueue(connection, "q")).__name__)

asyncio.run(main())
"""


async def forked(dsn: str, db: Db) -> None:
    done = await anyio.run_process([sys.executable, "-c", FORKED, dsn], stderr=subprocess.STDOUT)
    *refusals, last = done.stdout.decode().splitlines()
    assert sum(ELSEWHERE in line for line in refusals) == 3, (
        refusals
    )  # asyncio tells of a connection that is none there
    assert last == "UUID"
    assert len(await stored(db)) == 1


# 39: the outcome of the transaction is unknown

SLOW_COMMIT = """
    CREATE FUNCTION sleep_long() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NULL; END';
    CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON pgworkd.jobs DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.priority = 7) EXECUTE FUNCTION sleep_long()"""
COMMITS = "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'COMMIT%' AND pid <> pg_backend_pid()"


def terminate(_: asyncio.Task[None], db: Db, pid: int) -> Any:
    return db.execute("SELECT pg_terminate_backend($1)", pid)


def in_a_slow_commit(then: Callable[[asyncio.Task[None], Db, int], Any], check_error: Callable[[Any], None]) -> Check:
    """The client is committing a transaction of its own when `then` is called; all or none of the jobs are stored."""

    async def check(dsn: str, db: Db) -> None:
        await db.execute(SLOW_COMMIT)
        errors: list[BaseException] = []

        async def call(connection: Db) -> None:
            with pytest.raises(BaseException) as caught:  # noqa: PT011 - checked below
                await enqueue_many(connection, numbered(5_001, priority=7))
            errors.append(caught.value)

        async with opened(dsn) as connection:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(call(connection))
                await settled(then(task, db, await until(lambda: db.fetchval(COMMITS))))
            check_error(errors[0])
            assert await stored(db) == {}, "here, none"
            if not connection.is_closed():
                await enqueue(connection, "q")
                assert len(await stored(db)) == 1

    return check


def is_noted(error: BaseException) -> None:
    """Cancelled as usual, with a note that the outcome is unknown."""
    assert type(error) is asyncio.CancelledError
    assert error.__notes__ == [
        "pgworkd was cancelled in a statement: outside your transaction it may have taken effect"
    ]


def is_the_drivers(error: BaseException) -> None:
    assert isinstance(error, (asyncpg.AdminShutdownError, asyncpg.ConnectionDoesNotExistError)), error


async def cancelled_by_a_scope(dsn: str, db: Db) -> None:
    """A scope cancels each await, including that of ROLLBACK: the connection must not stay in a transaction."""
    transaction = db.transaction()
    await transaction.start()
    await db.execute("LOCK TABLE pgworkd.jobs IN EXCLUSIVE MODE")
    async with opened(dsn) as connection, opened(dsn) as third:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(enqueue_many, connection, numbered(5_001))
            await until(lambda: third.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"))
            tasks.cancel_scope.cancel()
        await transaction.rollback()
        assert not connection.is_in_transaction()
        job_id = await enqueue(connection, "q")
        assert set(await stored(third)) == {job_id}


async def cancelled_in_the_only_statement(dsn: str, db: Db) -> None:
    await db.execute("BEGIN; LOCK TABLE pgworkd.jobs IN EXCLUSIVE MODE")
    async with opened(dsn) as connection:
        with anyio.CancelScope() as scope:
            scope.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await enqueue(connection, "q")
        is_noted(caught.value)
    await db.execute("ROLLBACK")


CASES = [
    Case(36, "an aborted transaction", aborted),
    Case(37, "a closed connection", raises(asyncpg.InterfaceError, "connection is closed", on_a_closed_connection)),
    Case(37, "a closed pool", raises(asyncpg.InterfaceError, "pool is closed", on_a_closed_pool)),
    Case(
        37,
        "a closed connection of psycopg",
        raises(psycopg.OperationalError, "connection is closed", on_a_closed_psycopg),
    ),
    Case(
        37,
        "Results before it is open",
        raises(UsageError, "Results is not open: use it within `async with", results_not_open),
    ),
    Case(
        37,
        "Results after it was closed",
        raises(UsageError, "Results is not open: use it within `async with", results_closed),
    ),
    Case(37, "Results closed while someone waits", results_closed_meanwhile),
    Case(38, "a connection in another thread", elsewhere(lambda conn: enqueue(conn, "q"), opened)),
    Case(38, "a pool in another thread", elsewhere(lambda pool: enqueue(pool, "q"), _pool)),
    Case(38, "Results in another thread", elsewhere(lambda results: results.result(UUID(int=1)), Results)),
    Case(38, "after a fork", forked),
    Case(39, "cancelled during COMMIT", in_a_slow_commit(lambda task, _, __: task.cancel(), is_noted)),
    Case(39, "cancelled by a scope of anyio", cancelled_by_a_scope),
    Case(39, "cancelled during the only statement", cancelled_in_the_only_statement),
    Case(39, "cut off during COMMIT", in_a_slow_commit(terminate, is_the_drivers)),
]
