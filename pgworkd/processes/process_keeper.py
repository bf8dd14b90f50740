"""Keeps numbered processes running, for `--processes` and `autoscale`: starts, restarts and stops them.

A number never has two processes. One that ends by itself is restarted, at once or with a growing delay; one that exits
with 2 (wrong configuration) would do so again, so all are stopped.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from pgworkd.core.backoff import Backoff
from pgworkd.log import logger as _logger

STEADY_S = 60.0
"""A process that ran this long is restarted at once; one that died sooner with a growing delay."""
_BACKOFF = Backoff(base_s=1, factor=2, cap_s=24, jitter=0.25)  # at most 30 s
_CLEAN = (0, -signal.SIGTERM, -signal.SIGINT)  # signals kill only a process that has not installed its handlers yet


class Worker(Protocol):
    """A process that has been started, with facts for the log of its start and of its end."""

    facts: Mapping[str, object]
    end_facts: Mapping[str, object]

    async def wait(self) -> int:
        """Waits until it has ended; its exit code, or minus the signal that ended it."""

    async def send(self, number: signal.Signals) -> None:
        """Signals the process: SIGTERM: stop gracefully; SIGINT: at once; SIGKILL: kills it and its children."""


class Restarts:
    """The delay before each restart of one process. Pure."""

    _deaths = 0  # in a row

    def died(self, lived_s: float) -> float:
        """Seconds to wait after a death: 0 after the first, then up to 30."""
        self._deaths = 1 if lived_s >= STEADY_S else self._deaths + 1
        return 0.0 if self._deaths == 1 else _BACKOFF.delay_s(self._deaths - 1)


@dataclass(eq=False)
class ProcessKeeper:
    """Keeps those processes running that are wanted, until it is asked to stop all."""

    kind: str  # "process" or "worker": begins the names of log events
    name: Callable[[int], str]
    start: Callable[[int], AbstractAsyncContextManager[Worker]]  # may raise OSError
    stop_all: Callable[[], None]  # called once, after an exit with 2; leads to `request_stop`
    note: Mapping[str, object] = field(default_factory=dict)  # for the log, after an exit with 2
    kill_after_s: tuple[float, float] = (math.inf, math.inf)  # how long a stop may take, and one at once

    def __post_init__(self) -> None:
        self.exit_code = 0  # 2 after an exit with 2, otherwise 1 if a process failed while all were being stopped
        self.began_s: dict[int, float] = {}  # when each running process was started
        self.stop_requested, self._now, self._kill = self._stops = anyio.Event(), anyio.Event(), anyio.Event()
        self._wanted: set[int] = set()
        self._changed = anyio.Event()

    async def run(self, most: int) -> None:
        """Keeps processes from 1 to `most`; returns when a stop has been requested and the last one has ended."""
        async with anyio.create_task_group() as tasks:
            for number in range(1, most + 1):
                tasks.start_soon(self._keep, number)

    def request_stop(self, urgency: int = 1) -> None:
        """Stops all processes: 1: gracefully; 2: at once; 3: they are killed."""
        for stop in self._stops[:urgency]:
            stop.set()
        self.want(())

    def want(self, numbers: Iterable[int]) -> None:
        """Makes the processes of these numbers run, and no others."""
        self._wanted = set(numbers)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    @property
    def wanted(self) -> set[int]:
        """The numbers of the processes that are to run. May be read from any thread."""
        return set(self._wanted)

    async def _until(self, number: int, *, wanted: bool) -> bool:
        """Waits until a process is wanted, or is not; False once a stop has been requested."""
        while (number in self._wanted) is not wanted and not self.stop_requested.is_set():
            await self._changed.wait()
        return not self.stop_requested.is_set()

    async def _keep(self, number: int) -> None:
        """Keeps one process running while it is wanted, restarting it whenever it ends by itself."""
        restarts = Restarts()
        while await self._until(number, wanted=True):
            self.began_s[number] = anyio.current_time()
            code, asked, facts = await self._live(number)
            lived_s = anyio.current_time() - self.began_s.pop(number)
            stopping = self.stop_requested.is_set()
            if asked or stopping:
                restarts = Restarts()
                _logger().info(f"{self.kind}.ended", **facts)
                if stopping and code not in _CLEAN:
                    self.exit_code = max(self.exit_code, 1)
            elif code == 2:
                _logger().error(f"{self.kind}.ended", **facts, **self.note)  # it has reported the fault itself
                if self.exit_code != 2:
                    self.exit_code = 2
                    self.stop_all()
                await self.stop_requested.wait()
            else:
                delay_s = restarts.died(lived_s)
                _logger().warning(f"{self.kind}.ended", **facts, restart_in_s=round(delay_s, 3))
                with anyio.move_on_after(delay_s):
                    await self._until(number, wanted=False)

    async def _live(self, number: int) -> tuple[int, bool, dict[str, object]]:
        """Runs one process from start to end: its exit code, whether it was asked to stop, and facts for the log."""
        facts, asked = {"worker": self.name(number)}, anyio.Event()
        try:
            async with self.start(number) as worker, anyio.create_task_group() as tasks:
                _logger().info(f"{self.kind}.started", **facts, **worker.facts)
                tasks.start_soon(self._stop, number, worker, asked)
                code = await worker.wait()
                tasks.cancel_scope.cancel()
        except OSError as error:  # no memory, too many processes, a full disk
            return 1, False, {**facts, "error": str(error)}
        end = {"signal": signal.Signals(-code).name} if -code in set(signal.Signals) else {"exit_code": code}
        return code, asked.is_set(), {**facts, **worker.end_facts, **end}

    async def _stop(self, number: int, worker: Worker, asked: anyio.Event) -> None:
        """Stops a process when it is no longer wanted: gracefully, at once if requested, and finally with SIGKILL."""
        await self._until(number, wanted=False)
        asked.set()
        await worker.send(signal.SIGTERM)
        graceful_s, now_s = self.kill_after_s
        with anyio.move_on_after(graceful_s):
            await self._now.wait()
            await worker.send(signal.SIGINT)  # a second SIGTERM could coalesce with the first
            with anyio.move_on_after(now_s):
                await self._kill.wait()
        _logger().warning(f"{self.kind}.killed", worker=self.name(number))
        await worker.send(signal.SIGKILL)
