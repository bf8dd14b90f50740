"""As many workers as a queue needs: looks at its depth, starts some, stops some, replaces those that die.

`Policy` decides, and does nothing; `Autoscaler` does what it says. Workers have numbers, 1 to `most`, and one number
is never two workers: so there are never more than `most`, not even while some are still stopping.
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
from pgworkd.fleet.supervisor import STEADY_S, restart_delay_s
from pgworkd.fleet.workers import Worker, WorkerBackend

DEPTH_MOST = 10_000
"""A deeper queue is not counted to its end, unless up_at lies further."""
NOW_S = 20.0
"""A worker that is to stop at once gets so long: what `pgworkd run` allows itself to give its jobs back."""
_CLEAN = (0, -signal.SIGTERM, -signal.SIGINT)
_logger = partial(structlog.get_logger, "pgworkd")  # one made before the log is configured would log as before


@dataclass(frozen=True, slots=True)
class Rules:
    """When to scale and how far; 1 <= least <= most, down_at < up_at, 1 <= step. Whoever makes one sees to that."""

    least: int
    most: int
    up_at: int
    down_at: int
    step: int
    cooldown_s: float


class Decision(NamedTuple):
    """From now on there should be `after` workers, where there should have been `before`."""

    depth: int
    before: int
    after: int
    reason: str


class Policy:
    """Which workers there should be. Pure: it is told what happens, and when."""

    def __init__(self, rules: Rules, alive: Collection[int] = ()) -> None:
        """`alive` are there already."""
        self.rules = rules
        self.wanted: set[int] = set(alive)
        self._began_s = dict.fromkeys(alive, -math.inf)  # of those that are there, wanted or not
        self._deaths: dict[int, int] = {}
        self._decided_s = -math.inf
        self._grow_to(max(rules.least, len(self.wanted)))

    def look(self, depth: int | None, now_s: float) -> Decision | None:
        """What follows from the queue's depth; None: nothing. A depth of None is unknown."""
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
        """The worker has been started."""
        self._began_s[number] = now_s

    def ended(self, number: int, now_s: float, *, asked: bool) -> float:
        """The worker has ended, `asked` to or not; how long to wait before there may be another of its number."""
        lived_s = now_s - self._began_s.pop(number)
        if asked:
            self._deaths.pop(number, None)
            return 0.0
        self._deaths[number] = deaths = 1 if lived_s >= STEADY_S else self._deaths.get(number, 0) + 1
        return restart_delay_s(deaths)

    def _grow_to(self, count: int) -> None:
        """Those that are still stopping come last: they must end before they can begin."""
        free = set(range(1, self.rules.most + 1)) - self.wanted
        ranked = sorted(free, key=lambda number: (number in self._began_s, number))
        self.wanted.update(ranked[: max(0, count - len(self.wanted))])

    def _shrink_to(self, count: int) -> None:
        """Those that wait for their restart go first, then the newest."""
        ranked = sorted(self.wanted, key=lambda number: (self._began_s.get(number, math.inf), number))
        self.wanted.difference_update(ranked[count:])


class Autoscaler:
    """Keeps the workers that the policy wants, until it is asked to stop or one says that it can never work."""

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
        """The exit code. Raises PgworkdError when it cannot begin; a database that is away is waited for."""
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
            async with anyio.create_task_group() as looking:
                looking.start_soon(self._look)
                async with anyio.create_task_group() as working:
                    for number in range(1, rules.most + 1):
                        working.start_soon(self._keep, number)
                await self._admin.close()  # ends a question under way, which a cancellation would wait for
                looking.cancel_scope.cancel()
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

    async def _look(self) -> None:
        while True:
            depth, wait_s = None, self._every_s
            try:
                depth = await self._admin.depth(self._queue, max(self._policy.rules.up_at, DEPTH_MOST))
            except PgworkdError as error:
                if self._stopping():
                    return
                wait_s = self._outage.failed(error)
            else:
                self._outage.passed()
            decision = None if self._stopping() else self._policy.look(depth, anyio.current_time())
            if decision is not None:
                _logger().info("autoscale.decided", queue=self._queue, **decision._asdict())
                self._change()
            await anyio.sleep(wait_s)

    async def _keep(self, number: int) -> None:
        """One number: while it is wanted its worker, and the next one whenever that ends unasked."""
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
                _logger().error("worker.ended", **facts, note="its configuration is wrong: autoscale stops")
                self._exit_code = 2
                self.request_stop()
            else:
                _logger().warning("worker.ended", **facts, restart_in_s=round(delay_s, 3))
                with anyio.move_on_after(delay_s):
                    await self._until(lambda: not self._wants(number))

    async def _live(self, number: int) -> tuple[int, bool, dict[str, object]]:
        """One worker, from start to end: its exit code, whether it had been asked to end, and the facts."""
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
        how = {"signal": signal.Signals(-code).name} if -code in set(signal.Signals) else {"exit_code": code}
        return code, asked.is_set(), {"worker": name, **how}

    async def _end(self, number: int, worker: Worker, asked: anyio.Event) -> None:
        """Stops the worker when it is no longer wanted: gracefully, at once when that is asked for, or by force."""
        await self._until(lambda: not self._wants(number))
        asked.set()
        await worker.send(signal.SIGTERM)
        _, now, kill = self._stops
        with anyio.move_on_after(self._stop_timeout_s):
            await now.wait()
            await worker.send(signal.SIGINT)  # a second SIGTERM might be heard as one with the first
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
