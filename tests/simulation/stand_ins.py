"""Stand-ins of a simulated daemon for threads, clocks, randomness and the database."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import anyio

import pgworkd.engine.claim.claim_loop
import pgworkd.engine.claim.prefetch
import pgworkd.engine.counters
import pgworkd.engine.life.daemon
import pgworkd.engine.life.heartbeat
import pgworkd.engine.life.signals
import pgworkd.engine.life.worker
import pgworkd.engine.refusals
import pgworkd.engine.run.executor
import pgworkd.engine.run.runner
import pgworkd.engine.settle.job_events
import pgworkd.engine.settle.loop
import pgworkd.engine.settle.settler
import pgworkd.engine.wake.poller
from pgworkd.engine.life.heartbeat import Heartbeat
from pgworkd.engine.life.kill_timer import KillTimer
from pgworkd.engine.life.loop_watch import LoopWatch

from .loop import SimulationLoop
from .network import Network
from .store import SimulatedStore, Watcher

USERS_OF_TIME = (
    pgworkd.engine.claim.prefetch,
    pgworkd.engine.settle.job_events,
    pgworkd.engine.run.runner,
    pgworkd.engine.run.executor,
    pgworkd.engine.life.signals,
    pgworkd.engine.refusals,
    pgworkd.engine.counters,
    pgworkd.engine.claim.claim_loop,
    pgworkd.engine.wake.poller,
)


class SimulatedLease(Heartbeat):
    """The real heartbeat, as a task of the simulated loop in place of a thread."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._main(), name="lease")

    def renew_now(self) -> None:
        if self._renew_asked is not None:
            self._renew_asked.set()

    async def stop(self) -> None:
        self._stopping = True
        self.renew_now()
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            while self._task is not None and not self._task.done():
                await anyio.sleep(0.01)

    def _call_in_daemon(self, function: Callable[..., None], *args: object) -> None:
        self._daemon_loop.call_soon(function, *args)


class SimulatedTimer(KillTimer):
    """The kernel's timers on the simulated clock; they are found out, not fired."""

    def __init__(self, loop: SimulationLoop) -> None:
        self._loop = loop
        self.kills_at = math.inf

    def arm(self, dump_in_s: float, kill_in_s: float) -> None:
        self.armed, self.kills_at = True, self._loop.time() + kill_in_s

    def disarm(self) -> None:
        self.armed, self.kills_at = False, math.inf


class SimulatedWatch(LoopWatch):
    """Of a loop in which no real time passes."""

    async def run(self) -> None:
        await anyio.sleep_forever()


class SimulatedSignals:
    """Stands in for `SignalStore`: nothing is sampled, and no death is counted, as no job depends on that."""

    async def sample(self) -> float:
        return 60.0

    async def append(self, _worker: str, _period_s: float, _rows: object) -> None:
        pass

    async def roll_up(self, _keep_dead_days: int) -> bool:
        return False

    async def count_deaths(self) -> int:
        return 0

    async def next_alert_s(self) -> float | None:
        return None

    async def usual(self, _queues: object, _kinds: object) -> dict[tuple[str, str], list[int]]:
        return {}

    async def declare_alerts(self, _rules: object) -> list[str]:
        return []


@contextmanager
def stand_ins(loop: SimulationLoop, network: Network, watcher: Watcher, **bounds: int) -> Iterator[None]:
    """Installs all stand-ins for one daemon in this loop. `bounds`: FLUSH_MAX and CAPACITY of its settler."""
    changed: list[tuple[Any, str, Any]] = []

    def put(module: Any, name: str, value: Any) -> None:
        changed.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    chance = random.getstate()
    random.seed(loop.random.random())
    try:
        for module in USERS_OF_TIME:
            put(module, "time", SimpleNamespace(monotonic=loop.time, time=loop.time))
        for module in (pgworkd.engine.life.heartbeat, pgworkd.engine.life.worker):
            put(module, "boot_time_s", loop.time)
        put(pgworkd.engine.life.worker, "version", lambda _: "simulated")
        put(pgworkd.engine.life.worker, "Heartbeat", SimulatedLease)
        put(pgworkd.engine.life.daemon, "LoopWatch", SimulatedWatch)
        put(pgworkd.engine.life.daemon, "Store", lambda *_, **__: SimulatedStore(network, watcher, SimulatedSignals()))
        for name, bound in bounds.items():
            put(pgworkd.engine.settle.loop if name == "FLUSH_MAX" else pgworkd.engine.settle.settler, name, bound)
        yield
    finally:
        for module, name, value in reversed(changed):
            setattr(module, name, value)
        random.setstate(chance)
