"""Checks of every schedule, made as it runs: on the table, the handlers and the daemon's own events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import anyio

from pgworkd.core import events
from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.engine.claim.claim_cursor import LEVELS, PERIOD_FIRST_S
from pgworkd.engine.claim.poll_mode import SLEEP_S_MAX
from pgworkd.engine.claim.pool import Pool
from pgworkd.engine.claim.prefetch import AHEAD_MAX
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.settle import loop, settler

from .loop import SimulationFailed, SimulationLoop
from .network import Network
from .store import Watcher
from .table import Row, Table

Key = tuple[UUID, int]
REPORTS = {
    events.JOB_COMPLETED: ("completed",),
    events.JOB_FAILED: ("failed",),
    events.JOB_DEAD: ("dead",),
    events.JOB_RELEASED: ("pending", "cancelled"),
    events.JOB_CANCELLED: ("cancelled",),
    events.JOB_STALE: None,
}
"""Events that end an attempt, and the table's possible states after it; None: it was not ours any more."""
SAMPLE_S = 0.05
AFTER_TROUBLE_S = 11.0
"""The longest pause that slow calls cause (that of the poll), plus a call."""
IDLE_S = 1.0
"""Longest time that a due job waits beside an idle slot, beyond the poll period; claimed or not."""
HEAD_S = PERIOD_FIRST_S * 2 ** (LEVELS - 1)
"""Longest wait of a late commit behind the claim position for a sweep, while a pool is polling."""
HOARD_S = 3.0
"""Longest wait of a claimed job for a slot; then it is released."""


class Broken(SimulationFailed):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@dataclass(slots=True)
class Run:
    """One call of a handler; `how` it ended: returned, raised or cancelled."""

    queue: str
    ended: bool = False
    how: str = ""


class Watch(Watcher):
    """All checks. The first that fails ends the simulation."""

    def __init__(self, loop: SimulationLoop) -> None:
        self.loop = loop
        self.table: Table
        self.network: Network
        self.daemon: Daemon
        self.poll_s = 0.0
        self.stop_asked_at = math.inf
        self.runs: dict[Key, Run] = {}
        self._claims: set[Key] = set()
        self._settles: dict[Key, str] = {}
        self._rescued: set[Key] = set()
        self._reports: Counter[Key] = Counter()
        self._flushes = 0
        self._is_stopping = False
        self._since: dict[tuple[str, UUID, int], float] = {}

    def broken(self, invariant: str, text: str) -> None:
        if self.loop.failure is None:
            self.loop.failure = Broken(invariant, f"{text} (at {self.loop.time():.6f})")

    # Handlers

    def began(self, key: Key, queue: str) -> None:
        self.loop.note(f"begin {key[0].int}:{key[1]}")
        if key in self.runs:
            self.broken("settled_once", f"attempt {key} was run twice")
        self.runs[key] = Run(queue)
        running, slots = self.running(queue), self.daemon.pools[queue].concurrency
        if running > slots:
            self.broken("slots", f"{running} handlers of {queue} at once, and {slots} slots")
        if self._is_stopping:
            self.broken("stop", f"{key} was begun after the stop")

    def ended(self, key: Key, how: str) -> None:
        self.loop.note(f"end {key[0].int}:{key[1]} {how}")
        self.runs[key].ended, self.runs[key].how = True, how

    def running(self, queue: str) -> int:
        return sum(not run.ended and run.queue == queue for run in self.runs.values())

    # The store

    def ordered(self, order: ClaimOrder) -> None:
        pool = self.daemon.pools[order.queue]
        ahead, waiting = pool._prefetch.ahead, len(self._waiting(order.queue))
        free = pool.concurrency - self.running(order.queue) - waiting
        if not 1 <= order.limit <= max(0, free + ahead) or ahead > AHEAD_MAX:
            text = f"a claim of {order.limit} for {free} free slots and {ahead} ahead"
            self.broken("claims_bounded", text)
        unsettled = len(self.daemon.in_flight) - sum(
            pool.running + len(self._waiting(queue)) for queue, pool in self.daemon.pools.items()
        )
        if order.limit and unsettled + waiting + order.limit > settler.CAPACITY + loop.FLUSH_MAX:
            text = f"a claim of {order.limit} with {unsettled} to be settled and {waiting} not begun"
            self.broken("backlog", f"{text}; {settler.CAPACITY} at most, and {loop.FLUSH_MAX} under way")
        if order.limit and (pool.paused or pool.closed or not self.daemon.worker.may_claim):
            self.broken("claims_bounded", f"a claim of {order.limit} by a pool that may not")

    def _waiting(self, queue: str) -> list[Key]:
        """Jobs claimed for a slot and not started; released ones do not count."""
        held = [h for h in self.daemon.in_flight if h.queue == queue and h.started is None and h.reason is None]
        return [key for h in held if (key := (h.claimed.id, h.claimed.attempt)) not in self.runs]

    def claimed(self, claims: Claims) -> None:
        self._claims |= {(job.id, job.attempt) for job in claims}

    def settling(self, verb: str, count: int) -> None:
        if self._is_settler():
            self._flushes += 1
            if self._flushes > 1:
                self.broken("one_flush", f"{self._flushes} flushes at once")
            if not 0 < count <= loop.FLUSH_MAX:
                self.broken("one_flush", f"a flush of {count}, {loop.FLUSH_MAX} at most")

    def settled(self, verb: str, count: int) -> None:
        if self._is_settler():
            self._flushes -= 1

    @staticmethod
    def _is_settler() -> bool:
        """Maintenance settles as well, attempts that are not in flight here."""
        return "Settler" in (anyio.get_current_task().name or "")

    def settle(self, row: Row, status: str) -> None:
        """A settle takes effect."""
        key = (row.id, row.attempt)
        self.loop.note(f"settle {row.id.int}:{row.attempt} {status}")
        run = self.runs.get(key)
        if key in self._settles or key in self._rescued or key not in self._claims:
            self.broken("settled_once", f"{key} was settled again, as {status}")
        elif run is not None and not run.ended:
            self.broken("settled_once", f"{key} was settled as {status}, and it runs")
        elif (status == "completed") is not (run is not None and run.how == "returned"):
            self.broken("settled_once", f"{key} was settled as {status}; its run {run.how if run else 'never began'}")
        elif run is None and status not in ("pending", "cancelled"):
            self.broken("settled_once", f"{key} was settled as {status}, and never ran")
        self._settles[key] = status

    def rescue(self) -> None:
        for row in self.table.rescue():
            key = (row.id, row.attempt)
            self.loop.note(f"rescue {row.id.int}:{row.attempt}")
            self._rescued.add(key)
            if key in self.runs and not self.runs[key].ended:
                self.broken("lease", f"{key} runs on, and others have it")

    # Events

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        self.loop.note(f"event {name}")
        if name == events.DAEMON_STOPPING:
            self._is_stopping = True
        if name == events.QUEUE_REMOVED:
            left = [held.facts() for held in self.daemon.in_flight if held.queue == facts["queue"]]
            if left or self.running(facts["queue"]):
                self.broken("removal", f"{facts['queue']} was removed before {left}")
        if name not in REPORTS:
            return
        key = (UUID(facts["job_id"]), facts["attempt"])
        self._reports[key] += 1
        if self._reports[key] > 1:
            self.broken("reported_once", f"{key} was reported again, as {name}")
        settled, wanted = self._settles.get(key), REPORTS[name]
        if settled is None and key not in self._rescued:
            self.broken("reported_once", f"{key} was reported as {name}, and is not settled")
        if wanted is not None and settled not in wanted:
            self.broken("reported_once", f"{key} was reported as {name}; the table has {settled}")

    # Periodically

    def sample(self) -> None:
        self.rescue()
        now = self.loop.time()
        answers = now - self.network.bad_at > AFTER_TROUBLE_S
        waits: set[tuple[str, UUID, int]] = set()
        for queue, pool in self.daemon.pools.items():
            waiting = self._waiting(queue)
            if not pool.is_idle and pool.sleeps_until > now + SLEEP_S_MAX:
                self.broken("comes_back", f"{queue} is not announced as idle and rests until {pool.sleeps_until:.3f}")
            if answers:
                waits |= {("hoarded", *key) for key in waiting}
            if pool.concurrency > self.running(queue) and answers and self._may_claim(pool):
                waits |= {("idle", key[0], 0) for key in waiting}
                waits |= {("idle", row.id, 0) for row in self.table.due(queue) if row.losses <= 1}
        self._since = {each: self._since.get(each, now) for each in sorted(waits)}
        for (kind, job_id, attempt), since in self._since.items():
            sweep_s = HEAD_S if self.table.rows[job_id].late else 0.0
            if kind == "idle" and now - since > self.poll_s + IDLE_S + sweep_s:
                self.broken("idle_slot", f"{job_id} waits beside an idle slot for {now - since:.3f} s")
            if kind == "hoarded" and now - since > HOARD_S:
                self.broken("hoarding", f"{job_id} ({attempt}) waits here for {now - since:.3f} s")

    def _may_claim(self, pool: Pool) -> bool:
        row = self.table.queues.get(pool.queue)
        is_held = row is not None and (row.paused or row.max_running is not None)
        backlog = len(self.daemon.in_flight) >= settler.CAPACITY
        return not (is_held or backlog or pool.paused or pool.closed) and self.daemon.worker.may_claim

    # At the end

    def finish(self, exit_code: int, *, drained: bool) -> None:
        """The daemon has exited, by itself."""

        def check(fact: object, text: str) -> None:
            if not fact:
                self.broken("stop", text)

        worker_id = self.daemon.worker_id
        left = [row.id for row in self.table.running_of(worker_id)]
        check(exit_code in (0, 1), f"exit code {exit_code}")
        if exit_code == 0:
            worker = self.table.workers.get(worker_id)  # if it was presumed dead, the rescuer deletes its row
            check(not left and (worker is None or worker.lost), f"exit code 0, and {left} are left")
            # A claim's reply may arrive after its jobs have been released as orphaned attempts.
            outcomes = [held for held in self.daemon.in_flight if held.started is not None]
            check(not outcomes, "exit code 0, and an outcome is held")
            for key in sorted(self.runs):
                if self._reports[key] != 1:
                    self.broken("reported_once", f"{key} was run, and reported {self._reports[key]} times")
            for key in sorted(self._claims):
                if key not in self._settles and key not in self._rescued:
                    self.broken("settled_once", f"{key} was claimed, and neither settled nor given back")
        check(not drained or exit_code == 0, f"nothing was in its way, and the exit code is {exit_code}")
        check(all(run.ended for run in self.runs.values()), "the daemon ended before its handlers")
        if self.loop.errors:
            self.broken("no_errors", "; ".join(self.loop.errors))
