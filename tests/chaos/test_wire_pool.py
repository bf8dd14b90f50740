"""Known driver pitfalls: a pool that leaks cancelled or cut calls, and a listener connection that dies silently."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections import Counter
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd.core.events import Events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.listener import NotificationListener
from pgworkd.database.store import CHANNEL, Store
from pgworkd.errors import DatabaseUnavailable
from tests.engine.test_leaks import CONNECTIONS, open_files
from tests.kits.daemon import until
from tests.kits.proxy import Proxy

pytestmark = pytest.mark.slow("daemons under faults")

CALLS, CALLERS, TRANSACTIONS_MAX = 1_000, 10, 5
FAILED = (DatabaseUnavailable, OSError, asyncpg.PostgresError, asyncpg.InterfaceError)


class Calls:
    """Calls of a store, each cancelled, cut or left alone, and their outcomes."""

    def __init__(self, store: Store, proxy: Proxy) -> None:
        self.ends: Counter[str] = Counter()
        self._store = store
        self._proxy = proxy
        self._random = random.Random(20)  # noqa: S311 - the same fates each time

    async def make(self, count: int) -> None:
        for _ in range(count):
            fate = self._random.choice(["cancel", "cancel", "cut", "pass"])
            at_s = self._random.uniform(0, 0.004) if fate == "cancel" else 5.0
            with anyio.move_on_after(at_s) as limit:
                try:
                    if fate == "cut":
                        self._proxy.cut()
                    await self._random.choice([self._in_transaction, self._by_link])()
                    self.ends["passed"] += 1
                except FAILED:
                    self.ends["failed"] += 1
            self.ends["cancelled"] += limit.cancelled_caught

    async def _in_transaction(self) -> None:
        async with self._store.transactions.begin() as connection:
            await connection.execute("SELECT pg_sleep($1)", self._random.uniform(0, 0.003))

    async def _by_link(self) -> None:
        await self._store.schedules()


async def _in_all_slots(store: Store) -> None:
    """Every slot of the pool can be acquired at the same time: none has leaked."""
    async with contextlib.AsyncExitStack() as stack:
        with anyio.fail_after(4):
            for number in range(TRANSACTIONS_MAX):
                connection = await stack.enter_async_context(store.transactions.begin())
                assert await connection.fetchval("SELECT $1::int", number) == number


async def test_a_thousand_cancelled_or_cut_calls_leak_no_connection_task_or_file(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    async with Proxy(dsn) as proxy:
        tasks_before, files_before = len(asyncio.all_tasks()), open_files()
        store = Store(ConnectionOptions(proxy.dsn), transactions_max=TRANSACTIONS_MAX)
        await _in_all_slots(store)
        await store.schedules()
        connections = await db.fetchval(CONNECTIONS)
        calls = Calls(store, proxy)
        async with anyio.create_task_group() as tasks:
            for _ in range(CALLERS):
                tasks.start_soon(calls.make, CALLS // CALLERS)
        assert calls.ends.total() == CALLS
        assert min(calls.ends.values()) > CALLS // 20, calls.ends
        await _in_all_slots(store)
        await store.schedules()
        pool = store.transactions._pool
        assert pool is not None
        assert pool.get_size() == TRANSACTIONS_MAX
        await until(lambda: db.fetchval(f"SELECT ({CONNECTIONS}) <= {connections}"))
        assert proxy.connections == TRANSACTIONS_MAX + 1
        await store.close()
        await until(lambda: proxy.connections == 0)
        gc.collect()
        await until(lambda: len(asyncio.all_tasks()) <= tasks_before)
        assert open_files() == files_before
    await until(lambda: db.fetchval(f"SELECT ({CONNECTIONS}) = 1"))


class Notifications:
    """Receives notified queues and reconnects."""

    def __init__(self) -> None:
        self.queues: list[str] = []
        self.lines = 0

    def on_queue(self, queue: str, run_at: float | None) -> None:
        self.queues.append(queue)

    def on_schedules(self) -> None: ...

    def on_settings(self) -> None: ...

    def on_worker(self, worker_id: int) -> None: ...

    def on_effects(self) -> None: ...

    def on_operations(self) -> None: ...

    def on_worker_ended(self) -> None: ...

    def on_reconnect(self) -> None:
        self.lines += 1


async def _line_is_replaced(dsn: str, db: asyncpg.Connection[Any], fault: str, limit_s: float) -> float:
    """Seconds from the fault until the listener has reconnected, with the daemon's own settings, and receives again."""
    hearing = Notifications()
    async with Proxy(dsn) as proxy, anyio.create_task_group() as tasks:
        store = Store(ConnectionOptions(proxy.dsn))
        tasks.start_soon(NotificationListener(store.listener, hearing, Events()).run)
        await until(lambda: hearing.lines == 1)
        if fault == "cut":
            assert proxy.cut() == 1
        else:
            proxy.mode = "blackhole"
            proxy.mode = "pass"  # for new connections
        began = anyio.current_time()
        await until(lambda: hearing.lines == 2, limit_s)
        took_s = anyio.current_time() - began
        await db.execute("SELECT pg_notify($1, $2)", CHANNEL, json.dumps({"queue": "q"}))
        await until(lambda: hearing.queues == ["q"])
        tasks.cancel_scope.cancel()
    return took_s


async def test_a_reset_listener_connection_is_replaced_within_two_seconds(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    took_s = await _line_is_replaced(dsn, db, "cut", 4)
    assert took_s < 2 or await _line_is_replaced(dsn, db, "cut", 4) < 2, "a machine that stands still does so once"


async def test_a_silently_dead_listener_connection_is_replaced_within_15_seconds(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    took_s = await _line_is_replaced(dsn, db, "blackhole", 30)
    assert took_s < 15 or await _line_is_replaced(dsn, db, "blackhole", 30) < 15, "as above"
