"""Scales the number of workers by the depth of a queue: starts some, stops some, restarts those that die.

`Policy` decides, without I/O; `Autoscaler` carries the decisions out. Workers are numbered 1 to `most`, and a number
never has two workers: so there are never more than `most`, not even while some are still stopping.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import anyio
import structlog

from pgworkd.admin.admin import Admin
from pgworkd.database.reconnect import Outage
from pgworkd.errors import DatabaseUnavailable, PgworkdError
from pgworkd.fleet.restarts import Restarts, ended_by
from pgworkd.fleet.workers import Worker, WorkerBackend

DEPTH_MOST = 10_000
"""The depth is counted up to this, or to up_at if that is larger."""
NOW_S = 20.0
"""How long, in seconds, a worker may take to stop at once: the time in which `pgworkd run` releases its jobs."""
_CLEAN = (0, -signal.SIGTERM, -signal.SIGINT)
_logger = partial(structlog.get_logger, "pgworkd")  # a logger made before the configuration would not follow it


@dataclass(frozen=True, slots=True)
class Rules:
    """When to scale and how far. The caller ensures 1 <= least <= most, down_at < up_at and 1 <= step."""

    least: int
    most: int
    up_at: int
    down_at: int
    step: int
    cooldown_s: float


class Decision(NamedTuple):
    """Scales from `before` to `after` workers."""

    depth: int
    before: int
    after: int
    reason: str


class Policy:
    """Which workers there should be. Pure: events and their times are passed in."""

    def __init__(self, rules: Rules, alive: Collection[int] = ()) -> None:
        """`alive`: the workers that are already running."""
        self.rules = rules
        self.wanted: set[int] = set(alive)
        self._began_s = dict.fromkeys(alive, -math.inf)  # of running workers, wanted or not
        self._restarts = Restarts()
        self._decided_s = -math.inf
        self._grow_to(max(rules.least, len(self.wanted)))

    def decide(self, depth: int | None, now_s: float) -> Decision | None:
        """The decision for this depth of the queue (None: unknown); None to change nothing."""
        rules, before = self.rules, len(self.wanted)
        if depth is None or now_s < self._decided_s + rules.cooldown_s:
            return None
        after, reason = before, ""
        if depth >= rules.up_at:
            after, reason = min(before + rules.step, rules.most), f"depth {depth} >= up-at {rules.up_at}"
        elif depth <= rules.down_at:
            after, reason = max(before - rules.step, rules.least), f"depth {depth} <= down-at {rules.down_at}"
        if after == before:
            return None
        self._decided_s = now_s
        self._grow_to(after)
        self._shrink_to(after)
        return Decision(depth, before, after, reason)

    def began(self, number: int, now_s: float) -> None:
        """Records that the worker was started."""
        self._began_s[number] = now_s

    def ended(self, number: int, now_s: float, *, asked: bool) -> float:
        """Records that the worker ended, on request (`asked`) or not; seconds to wait before it may be restarted."""
        lived_s = now_s - self._began_s.pop(number)
        if asked:
            self._restarts.stopped(number)
            return 0.0
        return self._restarts.died(number, lived_s)

    def _grow_to(self, count: int) -> None:
        """Prefers numbers without a worker: one that is still stopping must end before it can be started again."""
        free = set(range(1, self.rules.most + 1)) - self.wanted
        ranked = sorted(free, key=lambda number: (number in self._began_s, number))
        self.wanted.update(ranked[: max(0, count - len(self.wanted))])

    def _shrink_to(self, count: int) -> None:
        """Drops workers that wait for their restart first, then the newest."""
        ranked = sorted(self.wanted, key=lambda number: (self._began_s.get(number, math.inf), number))
        self.wanted.difference_update(ranked[count:])


class Autoscaler:
    """Runs the workers that the policy wants, until it is asked to stop or a worker exits with 2 (configuration)."""

    def __init__(
        self,
        admin: Admin,
        queue: str,
        rules: Rules,
        backend: WorkerBackend,
        outage: Outage,
        *,
        every_s: float,
        stop_timeout_s: float,
    ) -> None:
        self._admin = admin
        self._queue = queue
        self._policy = Policy(rules)
        self._backend = backend
        self._outage = outage
        self._every_s = every_s
        self._stop_timeout_s = stop_timeout_s
        self._stops = [anyio.Event(), anyio.Event(), anyio.Event()]
        self._changed = anyio.Event()
        self._beginning = anyio.CancelScope()
        self._exit_code = 0

    async def run(self) -> int:
        """Runs until stopped; the exit code. Raises PgworkdError if it cannot start; waits for the database."""
        try:
            with self._beginning:
                try:
                    await self._admin.verify()
                except DatabaseUnavailable as error:
                    self._outage.failed(error)
                rules = self._policy.rules
                self._policy = Policy(rules, await self._backend.alive(rules.most))
            if self._stopping():
                return 0
            workers = len(self._policy.wanted)
            _logger().info("autoscale.started", queue=self._queue, workers=workers, least=rules.least, most=rules.most)
            async with anyio.create_task_group() as polling:
                polling.start_soon(self._poll)
                async with anyio.create_task_group() as working:
                    for number in range(1, rules.most + 1):
                        working.start_soon(self._keep, number)
                await self._admin.close()  # ends a query in progress, for which a cancellation would wait
                polling.cancel_scope.cancel()
        finally:
            await self._admin.close()
        _logger().info("autoscale.stopped", queue=self._queue, exit_code=self._exit_code)
        return self._exit_code

    def request_stop(self, urgency: int = 1) -> None:
        """1: all workers stop gracefully; 2: at once; 3: they are killed."""
        for stop in self._stops[:urgency]:
            stop.set()
        self._beginning.cancel()
        self._change()

    async def _poll(self) -> None:
        while True:
            depth, wait_s = None, self._every_s
            try:
                depth = await self._admin.queues.depth(self._queue, max(self._policy.rules.up_at, DEPTH_MOST))
            except PgworkdError as error:
                if self._stopping():
                    return
                wait_s = self._outage.failed(error)
            else:
                self._outage.passed()
            decision = None if self._stopping() else self._policy.decide(depth, anyio.current_time())
            if decision is not None:
                _logger().info("autoscale.decided", queue=self._queue, **decision._asdict())
                self._change()
            await anyio.sleep(wait_s)

    async def _keep(self, number: int) -> None:
        """Keeps a worker of this number running while it is wanted, restarting it whenever it ends by itself."""
        while True:
            await self._until(lambda: self._wants(number) or self._stopping())
            if self._stopping():
                return
            self._policy.began(number, anyio.current_time())
            code, asked, facts = await self._live(number)
            delay_s = self._policy.ended(number, anyio.current_time(), asked=asked)
            if asked:
                _logger().info("worker.ended", **facts)
                if self._stopping() and code not in _CLEAN:
                    self._exit_code = max(self._exit_code, 1)
            elif code == 2:
                _logger().error("worker.ended", **facts, note="wrong configuration: autoscale stops")
                self._exit_code = 2
                self.request_stop()
            else:
                _logger().warning("worker.ended", **facts, restart_in_s=round(delay_s, 3))
                with anyio.move_on_after(delay_s):
                    await self._until(lambda: not self._wants(number))

    async def _live(self, number: int) -> tuple[int, bool, dict[str, object]]:
        """One worker from start to end: its exit code, whether it was asked to stop, and facts for the log."""
        asked = anyio.Event()
        name = self._backend.name(number)
        try:
            async with self._backend.start(number) as worker, anyio.create_task_group() as tasks:
                _logger().info("worker.started", worker=name, **worker.facts)
                tasks.start_soon(self._end, number, worker, asked)
                code = await worker.wait()
                tasks.cancel_scope.cancel()
        except OSError as error:  # no memory, too many processes
            return 1, False, {"worker": name, "error": str(error)}
        return code, asked.is_set(), {"worker": name, **ended_by(code)}

    async def _end(self, number: int, worker: Worker, asked: anyio.Event) -> None:
        """Stops the worker when it is no longer wanted: gracefully, at once if requested, and finally with SIGKILL."""
        await self._until(lambda: not self._wants(number))
        asked.set()
        await worker.send(signal.SIGTERM)
        _, now, kill = self._stops
        with anyio.move_on_after(self._stop_timeout_s):
            await now.wait()
            await worker.send(signal.SIGINT)  # a second SIGTERM could coalesce with the first
            with anyio.move_on_after(NOW_S):
                await kill.wait()
        _logger().warning("worker.killed", worker=self._backend.name(number))
        await worker.send(signal.SIGKILL)

    def _wants(self, number: int) -> bool:
        return number in self._policy.wanted and not self._stopping()

    def _stopping(self) -> bool:
        return self._stops[0].is_set()

    def _change(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _until(self, fact: Callable[[], bool]) -> None:
        while not fact():
            await self._changed.wait()
