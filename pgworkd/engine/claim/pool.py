"""One daemon's slots for one queue: claims as many jobs as it has capacity for.

The loop body (`_iteration`) returns how long to sleep. `ClaimCursor` says where a claim begins, `Prefetch` how many
jobs to claim ahead, `PollMode` whether to poll or to wait for a notification; `Executor` runs what was claimed.
"""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.core.job import Reason, stopped
from pgworkd.core.source import WorkSource
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.claim.claim_loop import CLAIM_MAX, CLAIM_SOCKET_MAX, ClaimingWorker, ClaimLoop
from pgworkd.engine.claim.prefetch import Prefetch
from pgworkd.engine.registry import MAX_ATTEMPTS_DEFAULT, Registry
from pgworkd.engine.run.executor import Executor, Slots
from pgworkd.engine.run.large_payloads import Payloads
from pgworkd.engine.run.runner import Runner
from pgworkd.engine.settle.settler import Settler
from pgworkd.engine.shared import Shared
from pgworkd.errors import PgworkdError

BOUND_S = 0.1
"""After a limit was reached, nothing is claimed ahead for this many seconds."""
STALL_S = 0.05
"""While attempts wait for a slot, the pool checks this often how many have begun."""
STALLS_MAX = 20
"""Attempts that would wait for more than this many such intervals are released: another daemon may have slots."""


class SentClaim(NamedTuple):
    """A claim under way, and when it was sent, on the loop's clock."""

    order: ClaimOrder
    at: float
    notified_ago_s: float | None
    """How long before that the notification came that it follows; None: there was none."""


class Pool(ClaimLoop):
    """The slots of one queue, and a claim loop that keeps them filled."""

    def __init__(
        self,
        queue: str,
        concurrency: int,
        app: Registry,
        worker: ClaimingWorker,
        store: WorkSource,
        runner: Runner,
        settler: Settler,
        shared: Shared,
    ) -> None:
        super().__init__(queue, worker, shared.events, shared.counters)
        self.code_concurrency = concurrency
        payloads = Payloads(store, queue, shared.events)
        slots = Slots(queue, concurrency, on_low=self.claim_soon, may_start=self._may_start)
        self._executor = Executor(slots, runner, settler, shared.events, payloads)
        self._prefetch = Prefetch()
        self._store, self._settler, self._in_flight = store, settler, shared.in_flight
        special = {h.kind: h.max_attempts for h in app.handlers.values() if h.max_attempts != MAX_ATTEMPTS_DEFAULT}
        self._kinds, self._budgets = list(special), list(special.values())
        self._unknown, self._left_out = runner.unknown, list[str]()
        self._begun, self._begun_at = 0, 0.0  # runs begun at that time; attempts have been waiting here ever since
        self._bound_until = -math.inf  # a limit was reached; until then nothing is claimed ahead

    # Called by others, in the daemon's loop.

    @property
    def concurrency(self) -> int:
        """How many jobs may run at once; may be set at any time."""
        return self._executor.concurrency

    @concurrency.setter
    def concurrency(self, slots: int) -> None:
        self._executor.concurrency = slots

    @property
    def running(self) -> int:
        """Handlers that have been called and have not returned."""
        return self._executor.busy

    @property
    def quiet(self) -> bool:
        """True when no handler runs and no claim is under way."""
        return self._executor.busy == 0 and not self._claiming

    def close(self) -> None:
        """Stops claiming and releases what has not begun; `run` ends. Jobs that run go on."""
        self.closed = True
        self.release_unstarted(Reason.ELSEWHERE)
        self.claim_soon()

    def release_unstarted(self, reason: Reason, *, keep: int = 0) -> None:
        """Releases what was claimed and has not begun, except the first `keep`; in a stop also those being read."""
        if self.closed or reason is not Reason.ELSEWHERE:
            self._executor.stop_reading(reason)
        for attempt in self._executor.withdraw(keep):
            attempt.reason = attempt.reason or reason
            self._cursor.rewind(attempt.claimed.run_at)
            self._settler.put(attempt, stopped(attempt.reason))

    def _may_start(self) -> bool:
        """Whether attempts may begin; after a freeze it is known here before the heartbeat thread has reported it."""
        if self._worker.protects():
            return True
        self.release_unstarted(Reason.FENCE)
        return False

    # The claim loop.

    async def run(self, tasks: TaskGroup) -> None:
        """Claims until cancelled or closed; runner tasks are started in `tasks`."""
        self._executor.start(tasks)
        await self._loop()

    async def _sleep(self) -> None:
        """Sleeps until `sleeps_until`, or a job is due, or `claim_soon`."""
        executor = self._executor
        while not self._wanted:
            now = anyio.current_time()
            if executor.waiting and now >= self._begun_at + STALL_S:
                self._stop_hoarding(executor.begun - self._begun, now - self._begun_at)
                self._begun, self._begun_at = executor.begun, now
            wait_s = self._wake_at() - now
            if wait_s <= 0:
                return
            self._woken = anyio.Event()
            with anyio.move_on_after(min(wait_s, self._begun_at + STALL_S - now) if executor.waiting else wait_s):
                await self._woken.wait()

    def _stop_hoarding(self, begun: int, in_s: float) -> None:
        """Releases attempts that would wait long, as only `begun` have begun in `in_s` seconds."""
        if self._executor.waiting > STALLS_MAX * begun:
            self._prefetch.stalled(in_s * self.concurrency / max(begun, 1))
            self.release_unstarted(Reason.ELSEWHERE, keep=begun)

    def _capacity(self) -> int:
        """How many jobs the next claim may ask for."""
        if self.paused or self.closed or not self._worker.may_claim:
            return 0
        executor = self._executor
        return min(CLAIM_MAX, executor.free + self._ahead, self._settler.capacity - executor.waiting)

    def _may_claim(self) -> bool:
        return (self._executor.free > 0 or self._executor.waiting <= self._low) and self._capacity() > 0

    async def _iteration(self) -> float:
        """Claims once, if there is capacity. Seconds to sleep; infinite: until woken."""
        self._executor.wake()
        if not self._may_claim():
            self._executor.call_when_low(self._low)
        return await super()._iteration()

    async def _claim(self) -> Claims | None:
        await self._unknown.refresh(self.queue, self._worker.worker_id)
        if not self._may_claim():  # paused meanwhile, or the settler has filled up
            return None
        sent = self._prepare()
        self._sent = sent.order
        claimed = await self._send(sent.order)
        took_s, dry = anyio.current_time() - sent.at, not self._executor.waiting
        self._counters.claimed(self.queue, len(claimed), took_s, sent.notified_ago_s)
        self._take(sent, claimed)
        if dry and len(claimed) < min(sent.order.limit, CLAIM_SOCKET_MAX):
            await asyncio.sleep(0)  # runner tasks first, unless there is more: then the next claim comes first
        self._learn(sent, claimed, took_s, dry=dry)
        return claimed

    async def _send(self, order: ClaimOrder) -> Claims:
        return await self._store.claim(order)

    @property
    def _low(self) -> int:
        """When no more than this many attempts wait, it is time for the next claim: not after every single start."""
        return self._ahead * 3 // 4

    @property
    def _ahead(self) -> int:
        return 0 if self.limited and not self._more else self._prefetch.ahead

    def _prepare(self) -> SentClaim:
        fixed = (self._worker.worker_id, self.queue, self._care.most(self._capacity()), self._kinds, self._budgets)
        was, self._left_out = self._left_out, self._unknown.left_out(self.queue)
        if set(was) - set(self._left_out):
            self._cursor.rewind(0.0)  # we have passed over jobs that we may claim now
        start, keyed, at, notified_ago_s = self._leave()
        order = ClaimOrder(*fixed, *start, self._left_out)
        order = order._replace(
            places=keyed.places, reach_s=keyed.reach_s, since=keyed.since, renew=keyed.renew, careful=self._care.on
        )
        return SentClaim(order, at, notified_ago_s)

    def _take(self, sent: SentClaim, claimed: Claims) -> None:
        """Submits the claimed attempts, or releases them where the pool may no longer run them."""
        executor, worker_id = self._executor, sent.order.worker_id
        if not executor.waiting:
            self._begun, self._begun_at = executor.begun, anyio.current_time()
        executor.submit(self._in_flight.add([Attempt(row, self.queue, worker_id, claimed.own) for row in claimed]))
        if not self._worker.may_claim or worker_id is not self._worker.worker_id:
            # The daemon began to stop, was fenced, or was presumed dead, while the claim was under way.
            self.release_unstarted(Reason.SHUTDOWN if self._worker.stopping else Reason.FENCE)
        elif self.closed:
            self.release_unstarted(Reason.ELSEWHERE)
        executor.wake()

    def _learn(self, sent: SentClaim, claimed: Claims, took_s: float, *, dry: bool) -> None:
        now = anyio.current_time()
        full = len(claimed) >= min(sent.order.limit, CLAIM_SOCKET_MAX)
        if self.limited and not full:
            self._bound_until = now + BOUND_S
        self._more = full and (now >= self._bound_until or sent.order.limit == CLAIM_MAX)
        self._arrive(claimed, now, took_s, full=full)
        executor = self._executor
        self._prefetch.claimed(took_s, executor.finished, executor.run_s, self.concurrency, dry=dry)

    async def _refuse(self, order: ClaimOrder, error: PgworkdError | None) -> int | None:
        return await self._store.refuse_claims(order, error)

    async def _store_announcement(self, *, idle: bool) -> None:
        code = (self.code_concurrency, self.code_source)
        await self._store.set_pool(self._worker.worker_id, self.queue, self.concurrency, idle=idle, code=code)
