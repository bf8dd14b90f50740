"""job.transaction() on a silently dead connection: it is replaced, and a cancelled handler returns at once."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.transactions import TransactionPool
from pgworkd.errors import DatabaseUnavailable
from tests.kits.daemon import insert, running, status, until, waits_for_status
from tests.kits.proxy import Message, Proxy
from tests.kits.server import set_read_only

pytestmark = pytest.mark.slow("daemons under faults")

SLOTS = 3
OUT_S_MAX = 2.5
"""Time limit for getting out of a dead connection; by their own timeouts, statements on it would take a minute."""


async def _dead_lines(proxy: Proxy, transactions: TransactionPool) -> None:
    """Fills the pool, and lets all its connections die silently; new ones work."""
    contexts = [transactions.begin() for _ in range(SLOTS)]
    for context in contexts:
        await context.__aenter__()
    for context in contexts:
        await context.__aexit__(None, None, None)
    assert proxy.connections == SLOTS
    proxy.mode = "blackhole"
    proxy.mode = "pass"


async def test_dead_idle_connections_are_all_replaced_after_one_timeout(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.database.transactions.PROBE_TIMEOUT_S", 0.3)
    async with Proxy(dsn) as proxy:
        transactions = TransactionPool(ConnectionOptions(proxy.dsn), SLOTS)
        await _dead_lines(proxy, transactions)
        with anyio.fail_after(OUT_S_MAX):
            async with transactions.begin() as one:
                assert await one.fetchval("SELECT 1") == 1
        monkeypatch.setattr("pgworkd.database.transactions.PROBE_TIMEOUT_S", 60.0)
        with anyio.fail_after(OUT_S_MAX):  # none of these uses a dead connection again
            async with transactions.begin() as one, transactions.begin() as two, transactions.begin() as three:
                assert [await each.fetchval("SELECT 1") for each in (one, two, three)] == [1, 1, 1]
                # A graceful close of the dead ones would hang, in a task of the driver whose failure nobody sees.
                assert [task for task in asyncio.all_tasks() if "Connection.close" in str(task)] == []
        await transactions.close()


async def test_if_new_connections_are_dead_too_the_handler_gets_database_unavailable(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.database.transactions.PROBE_TIMEOUT_S", 0.3)
    async with Proxy(dsn) as proxy:
        transactions = TransactionPool(ConnectionOptions(proxy.dsn, connect_timeout_s=0.5), SLOTS)
        await _dead_lines(proxy, transactions)
        proxy.mode = "blackhole"
        with anyio.fail_after(OUT_S_MAX), pytest.raises(DatabaseUnavailable, match="did not answer in time"):
            async with transactions.begin():
                pass
        await transactions.close()


@pytest.mark.parametrize("where", ["at the BEGIN", "in a statement", "between statements"])
async def test_a_handler_cancelled_on_a_dead_connection_returns_at_once(
    dsn: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.database.transactions.PROBE_TIMEOUT_S", 1.0)
    monkeypatch.setattr("pgworkd.database.transactions.CUT_AFTER_S", 0.1)
    async with Proxy(dsn) as proxy:
        transactions = TransactionPool(ConnectionOptions(proxy.dsn), SLOTS)
        if where == "at the BEGIN":
            await _dead_lines(proxy, transactions)
        inside = anyio.Event()

        async def work() -> None:
            async with transactions.begin() as connection:
                proxy.mode = "blackhole"
                inside.set()
                if where == "in a statement":
                    await connection.execute("SELECT 1")
                await anyio.sleep_forever()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            if where == "at the BEGIN":
                await anyio.sleep(0.05)
                assert not inside.is_set()
            else:
                await inside.wait()
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
            began = anyio.current_time()
        assert anyio.current_time() - began < OUT_S_MAX
        proxy.mode = "pass"
        with anyio.fail_after(OUT_S_MAX):
            async with transactions.begin() as connection:
                assert await connection.fetchval("SELECT 1") == 1
        await transactions.close()


async def test_a_stop_during_a_transaction_on_a_dead_connection_releases_the_job(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q")
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            proxy.mode = "blackhole"  # for the existing connections
            proxy.mode = "pass"
            await connection.execute("SELECT 1")

    async with Proxy(dsn) as proxy:
        options = {"shutdown_s": 0.05, "cancel_grace_s": OUT_S_MAX, "connection": ConnectionOptions(proxy.dsn, 1, 1)}
        async with running(app, proxy.dsn, end_process=pytest.fail, **options) as (daemon, seen):
            job_id = await insert(db, "q")
            await seen.wait(events.JOB_STARTED, job_id=str(job_id))
            await anyio.sleep(0.05)
            daemon.request_stop()
            await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert await status(db, job_id) == "pending"


async def test_a_stop_waits_briefly_for_a_commit_and_then_checks_the_table(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """The reply to the COMMIT is lost but the COMMIT is not: the job is completed, and the daemon finds out."""
    app, written, go_on = App(), anyio.Event(), anyio.Event()

    @app.handler("q")
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("SELECT 1")
            written.set()
            await go_on.wait()

    def lose_the_answer_to_the_commit(message: Message) -> bool:
        if go_on.is_set() and message.side == "client" and message.kind == "Q":
            proxy.mode = "halfopen"
        return True

    async with Proxy(dsn) as proxy:
        proxy.on_message = lose_the_answer_to_the_commit
        options = {"shutdown_s": 0.05, "cancel_grace_s": OUT_S_MAX}
        async with running(app, dsn, end_process=pytest.fail, **options) as (daemon, seen):
            daemon._store.transactions = TransactionPool(ConnectionOptions(proxy.dsn), SLOTS)
            job_id = await insert(db, "q")
            await written.wait()
            go_on.set()
            await until(waits_for_status(db, job_id, "completed"))
            assert seen.all(events.JOB_COMPLETED) == []
            daemon.request_stop()
            await seen.wait(events.DAEMON_STOPPED, exit_code=0)
            assert len(seen.all(events.JOB_COMPLETED)) == 1


async def test_a_read_only_server_is_rejected_for_job_transactions(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await set_read_only(dsn, db, "on")
    transactions = TransactionPool(ConnectionOptions(dsn), SLOTS)
    with pytest.raises(DatabaseUnavailable, match="only reads"):
        async with transactions.begin():
            pass
    await set_read_only(dsn, db, "off")
    async with transactions.begin() as connection:
        assert await connection.fetchval("SHOW transaction_read_only") == "off"
    await transactions.close()
