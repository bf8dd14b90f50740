"""An idle daemon sends less than one query per second, regardless of its number of queues."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.database.connection import Connection, ConnectionOptions, Listener
from pgworkd.engine.life import signals
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from tests.kits.daemon import LIMIT_S, until

pytestmark = pytest.mark.slow("what an idle daemon does, for seconds")

QUEUES = [f"q{n}" for n in range(10)]
PER_S_MAX = 1.0
WINDOW_S = 2.2
FUTURE = """INSERT INTO pgworkd.jobs (queue, run_at, status)
    SELECT 'q' || n % 10, now() + interval '1 h', (CASE WHEN n < 50 THEN 'pending' ELSE 'dead' END)::pgworkd.job_status
    FROM generate_series(0, 99) n"""


class Loops:
    """The tasks that query the database or sleep: when they queried, and how long they sleep now."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.waits_s: dict[str, float] = {}

    @staticmethod
    def current() -> str:
        thread, task = threading.current_thread(), asyncio.current_task()
        name = task.get_name() if task is not None else "?"
        return name if thread is threading.main_thread() else f"{thread.name}: {name.partition('-')[0]}"

    def asks(self) -> None:
        self.asked.append((self.current(), anyio.current_time()))

    def waits(self, delay_s: float) -> None:
        self.waits_s[self.current()] = delay_s

    def since(self, time: float) -> list[str]:
        return [name for name, at in list(self.asked) if at >= time]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> Loops:
    """Records each call on every connection, each probe of the listening connection, and each sleep."""
    seen = Loops()
    call, listen, sleep, move_on_after = Connection._call, Listener.listen, anyio.sleep, anyio.move_on_after

    async def calling(connection: Connection, *args: Any) -> Any:
        seen.asks()
        return await call(connection, *args)

    @contextlib.asynccontextmanager
    async def listening(listener: Listener, *args: Any) -> AsyncIterator[Any]:
        async with listen(listener, *args) as probe:

            async def probing() -> None:
                seen.asks()
                await probe()

            yield probing

    async def sleeping(delay_s: float) -> None:
        seen.waits(delay_s)
        await sleep(delay_s)

    def moving_on_after(delay_s: float, *args: Any, **options: Any) -> Any:
        seen.waits(delay_s)
        return move_on_after(delay_s, *args, **options)

    for name in signals.FIRST_S:
        monkeypatch.setitem(signals.FIRST_S, name, 0.0)  # else they would begin in the window, or after it
    monkeypatch.setattr(Connection, "_call", calling)
    monkeypatch.setattr(Listener, "listen", listening)
    monkeypatch.setattr(anyio, "sleep", sleeping)
    monkeypatch.setattr(anyio, "move_on_after", moving_on_after)
    return seen


def app_of_ten_queues() -> App:
    app = App()
    for queue in QUEUES:
        app.handler(queue)(_handle)
    return app


async def _handle() -> None:
    return None


@pytest.mark.parametrize("jobs", ["none", "an hour away, and dead"])
async def test_ten_idle_queues_cost_less_than_a_query_per_second(
    dsn: str, db: asyncpg.Connection[Any], loops: Loops, jobs: str
) -> None:
    """With production settings. Loops slower than the window count with the time for which they sleep."""
    if jobs != "none":
        await db.execute(FUTURE)
    daemon = Daemon(app_of_ten_queues(), DaemonOptions(ConnectionOptions(dsn)))
    pools = [f"pool {queue}" for queue in QUEUES]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        with anyio.fail_after(LIMIT_S):
            await daemon.ready.wait()
        # After announcing that they are idle, pools poll for one more second and then wait for a notification.
        await until(lambda: all(loops.waits_s.get(name) == math.inf for name in pools), limit_s=3)
        assert all(pool.is_idle for pool in daemon.pools.values())
        quiet = anyio.current_time()
        while anyio.current_time() < quiet + WINDOW_S:
            await anyio.sleep(0.05)
        asked, periods_s = loops.since(quiet), dict(loops.waits_s)
        regular = {name for name, _ in loops.asked} | {"listener"}
        daemon.request_stop()
    assert not set(asked) & set(pools), "a pool asks without having been called"
    once = {name for name in regular if name not in periods_s} | {_starter(loops), "connections"}
    assert not set(asked) & once, "who asks and waits for no time asks once, at the start"
    regular -= {*pools, *once}
    assert len(regular) == 17, regular
    for name in regular:
        assert asked.count(name) <= WINDOW_S / periods_s[name] + 1, f"{name} asks more often than it says"
    assert sum(1 / periods_s[name] for name in regular) <= PER_S_MAX
    assert len(asked) <= WINDOW_S * PER_S_MAX + 2


def _starter(loops: Loops) -> str:
    """The task that started the daemon: it registers, and signs off at the end."""
    return loops.asked[0][0]


async def test_a_job_for_one_of_ten_idle_queues_causes_no_other_claims(
    dsn: str, db: asyncpg.Connection[Any], loops: Loops
) -> None:
    daemon = Daemon(app_of_ten_queues(), DaemonOptions(ConnectionOptions(dsn)))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        with anyio.fail_after(LIMIT_S):
            await daemon.ready.wait()
        await until(lambda: all(loops.waits_s.get(f"pool {queue}") == math.inf for queue in QUEUES), limit_s=3)
        quiet = anyio.current_time()
        await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q3')")
        await until(lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.finished_jobs)"), limit_s=1)
        await until(lambda: loops.waits_s["pool q3"] == math.inf, limit_s=1)
        asked = loops.since(quiet)
        daemon.request_stop()
    assert {name for name in asked if name.startswith("pool ")} == {"pool q3"}
    assert asked.count("pool q3") <= 2
