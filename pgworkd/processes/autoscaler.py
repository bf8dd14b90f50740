"""Scales the number of workers by the depth of a queue: starts some, stops some, restarts those that die.

`Policy` decides, without I/O; `Autoscaler` carries the decisions out. Workers are numbered 1 to `most`, and a number
never has two workers: so there are never more than `most`, not even while some are still stopping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import anyio

from pgworkd.admin.admin import Admin
from pgworkd.database.reconnect import Outage
from pgworkd.errors import AccessRefused, DatabaseUnavailable, PgworkdError, SchemaAwaited
from pgworkd.log import logger as _logger
from pgworkd.metrics import ReportingProcess
from pgworkd.processes.process_keeper import ProcessKeeper
from pgworkd.processes.workers import WorkerProcesses

DEPTH_MOST = 10_000
"""The depth is counted up to this, or to up_at if that is larger."""
NOW_S = 20.0
"""How long, in seconds, a worker may take to stop at once: the time in which `pgworkd run` releases its jobs."""


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
    """Which workers there should be. Pure: depths and times are passed in."""

    def __init__(self, rules: Rules, began_s: Mapping[int, float]) -> None:
        """`began_s`: when each running worker, wanted or not, was started; the caller keeps it up to date."""
        self.rules = rules
        self.wanted = set(began_s)
        self._began_s = began_s
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

    def _grow_to(self, count: int) -> None:
        """Adds numbers, those without a worker first: one that is still stopping must end before it starts again."""
        free = set(range(1, self.rules.most + 1)) - self.wanted
        ranked = sorted(free, key=lambda number: (number in self._began_s, number))
        self.wanted.update(ranked[: max(0, count - len(self.wanted))])

    def _shrink_to(self, count: int) -> None:
        """Drops workers that wait for their restart first, then the newest."""
        ranked = sorted(self.wanted, key=lambda number: (self._began_s.get(number, math.inf), number))
        self.wanted.difference_update(ranked[count:])


@dataclass(eq=False)
class Autoscaler:
    """Runs the workers that the policy wants, until it is asked to stop or a worker exits with 2 (configuration)."""

    admin: Admin
    queue: str
    rules: Rules
    workers: WorkerProcesses
    outage: Outage
    every_s: float
    stop_timeout_s: float

    def __post_init__(self) -> None:
        self._beginning = anyio.CancelScope()
        self._keeper = ProcessKeeper(
            "worker",
            self.workers.name,
            self.workers.start,
            self.request_stop,
            note={"note": "wrong configuration: autoscale stops"},
            kill_after_s=(self.stop_timeout_s, NOW_S),
        )
        self._stop_requested = self._keeper.stop_requested

    async def run(self) -> int:
        """Runs until stopped; the exit code. Raises PgworkdError if it cannot start; waits for the database."""
        rules, keeper = self.rules, self._keeper
        try:
            with self._beginning:
                try:
                    await self.admin.verify()
                except (DatabaseUnavailable, SchemaAwaited, AccessRefused) as error:
                    self.outage.failed(error)  # the workers wait, too
                self._policy = Policy(rules, keeper.began_s)
                keeper.want(self._policy.wanted)
            if self._stop_requested.is_set():
                return 0
            workers = len(self._policy.wanted)
            _logger().info("autoscale.started", queue=self.queue, workers=workers, least=rules.least, most=rules.most)
            async with anyio.create_task_group() as polling:
                polling.start_soon(self._poll)
                await keeper.run(rules.most)
                await self.admin.close()  # ends a query in progress, for which a cancellation would wait
                polling.cancel_scope.cancel()
        finally:
            await self.admin.close()
        _logger().info("autoscale.stopped", queue=self.queue, exit_code=keeper.exit_code)
        return keeper.exit_code

    def request_stop(self, urgency: int = 1) -> None:
        """Stops all workers: 1: gracefully; 2: at once; 3: they are killed."""
        self._keeper.request_stop(urgency)
        self._beginning.cancel()

    def members(self, report_to: Callable[[int], str]) -> dict[str, ReportingProcess]:
        """The workers, by name, and where they report their metrics. May be called from any thread."""
        wanted = self._keeper.wanted
        numbers = sorted(wanted.union(list(self._keeper.began_s)))
        return {self.workers.name(number): ReportingProcess(report_to(number), number in wanted) for number in numbers}

    async def _poll(self) -> None:
        while True:
            depth, wait_s = None, self.every_s
            try:
                depth = await self.admin.queues.depth(self.queue, max(self.rules.up_at, DEPTH_MOST))
            except PgworkdError as error:
                if self._stop_requested.is_set():
                    return
                wait_s = self.outage.failed(error)
            else:
                self.outage.passed()
            decision = None if self._stop_requested.is_set() else self._policy.decide(depth, anyio.current_time())
            if decision is not None:
                _logger().info("autoscale.decided", queue=self.queue, **decision._asdict())
                self._keeper.want(self._policy.wanted)
            await anyio.sleep(wait_s)
