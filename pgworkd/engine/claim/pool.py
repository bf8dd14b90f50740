"""One daemon's slots for one queue: claims as many jobs as it has capacity for.

The loop body (`_iteration`) returns how long to sleep. `ClaimCursor` says where a claim begins, `Prefetch` how many
jobs to claim ahead, `PollMode` whether to poll or to wait for a notification; `Executor` runs what was claimed.
"""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple, Protocol

import anyio
from anyio.abc import TaskGroup

from pgworkd.database.reconnect import Outage
from pgworkd.database.store import ClaimOrder, Claims, Store
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.claim.claim_cursor import ClaimCursor
from pgworkd.engine.claim.poll_mode import PollMode
from pgworkd.engine.claim.prefetch import Prefetch
from pgworkd.engine.registry import MAX_ATTEMPTS_DEFAULT, App
from pgworkd.engine.run.executor import Executor
from pgworkd.engine.run.large_payloads import Payloads
from pgworkd.engine.run.runner import Runner
from pgworkd.engine.settle.settler import Settler
from pgworkd.engine.tallies import Tallies
from pgworkd.errors import PgworkdError, WorkerLost
from pgworkd.words.events import Events
from pgworkd.words.job import Reason, stopped

CLAIM_MAX = 1_000
"""Jobs per claim."""
CLAIM_SOCKET_MAX = 500
"""A claim that returns this many counts as full: over a Unix socket, whose buffer holds no more, none returns more."""
BOUND_S = 0.1
"""After a limit was reached, nothing is claimed ahead for this many seconds."""
STALL_S = 0.05
"""While attempts wait for a slot, the pool checks this often how many have begun."""
STALLS_MAX = 20
"""Attempts that would wait for more than this many such intervals are released: another daemon may have slots."""


class ClaimingWorker(Protocol):
    """The worker that a pool claims for. `worker_id`: the id to claim under; `stopping`: the daemon stops."""

    worker_id: int
    stopping: bool

    @property
    def may_claim(self) -> bool:
        """False while the lease is in doubt or the daemon stops."""

    @property
    def lease_holds(self) -> bool:
        """False once the lease may have expired, read from the clock: a process that was frozen learns it at once."""

    def renew_now(self) -> None:
        """Sends a heartbeat: the database says that our lease has run out, and only a heartbeat can confirm that."""


class SentClaim(NamedTuple):
    """A claim under way, and when it was sent, on the loop's clock."""

    order: ClaimOrder
    at: float
    notified_ago_s: float | None
    """How long before that the notification came that it follows; None: there was none."""


class Pool:
    """Slots, and a claim loop that keeps them filled."""

    def __init__(
        self,
        queue: str,
        concurrency: int,
        app: App,
        worker: ClaimingWorker,
        store: Store,
        runner: Runner,
        settler: Settler,
        in_flight: InFlight,
        events_: Events,
        tallies: Tallies,
    ) -> None:
        self.queue = queue
        self._tallies = tallies
        self._notified_at: float | None = None  # of the first notification since the last claim was sent
        self.paused = self.closed = False
        self.limited = False
        """The queue has fleet-wide limits: where one is reached, jobs claimed ahead would count and not run."""
        self.rewound = True
        """Jobs that became due long ago may wait: the next poll begins at the head, and sets this to False."""
        self.sleeps_until = 0.0
        """When the next iteration begins at the latest, on the loop's clock. Infinite only while inserts notify us."""
        self.code_concurrency, self.code_source = concurrency, "default"
        """Concurrency where no row of `queues` overrides it, and its source: code, settings or default."""
        payloads = Payloads(store, queue, events_)
        self._executor = Executor(
            *(queue, concurrency, runner, settler, events_, payloads),
            on_low=self.claim_soon,
            may_start=self._may_start,
        )
        self._cursor, self._prefetch, self._poll_mode = ClaimCursor(), Prefetch(), PollMode()
        self._forgotten = 0  # how often the announcement was forgotten
        self._due_at: float | None = None  # on the loop's clock: when the next waiting job is due, as far as we know
        self._worker, self._store, self._settler, self._in_flight = worker, store, settler, in_flight
        self._outage = Outage(f"claim {queue}", events_)
        special = {h.kind: h.max_attempts for h in app.handlers.values() if h.max_attempts != MAX_ATTEMPTS_DEFAULT}
        self._kinds, self._budgets = list(special), list(special.values())
        self._unknown, self._left_out = runner.unknown, list[str]()
        self._begun, self._begun_at = 0, 0.0  # runs begun at that time; attempts have been waiting here ever since
        self._wanted, self._woken, self._claiming = False, anyio.Event(), False
        self._bound_until = -math.inf  # a limit was reached; until then nothing is claimed ahead
        self._more = False  # the last claim was full: there may be more

    # Called by others, in the daemon's loop.

    @property
    def concurrency(self) -> int:
        """How many jobs may run at once; may be set at any time."""
        return self._executor.concurrency

    @concurrency.setter
    def concurrency(self, slots: int) -> None:
        self._executor.concurrency = slots

    def claim_soon(self) -> None:
        """Wakes the claim loop: something may have changed."""
        if not self._wanted:
            self._wanted, self.sleeps_until = True, 0.0
            self._woken.set()

    def notified(self, run_at: float | None) -> None:
        """A notification named this queue; `run_at`: of a job, due long ago, that can be claimed again."""
        now = anyio.current_time()
        self._poll_mode.notified(now)
        if self._notified_at is None:
            self._notified_at = now
        if run_at is not None:
            self._cursor.rewind(run_at)
            self.rewound = True
        self.claim_soon()

    def expect(self, due_in_s: float | None) -> None:
        """The next waiting job is due in this many seconds; None: no job waits."""
        if due_in_s is not None and due_in_s <= 0:
            self._cursor.recheck_head(anyio.current_time())
        self._due_at = None if due_in_s is None else anyio.current_time() + due_in_s
        self._woken.set()

    def expect_also(self, due_in_s: float) -> None:
        """One more job will be due in this many seconds."""
        due_at = anyio.current_time() + due_in_s
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at
            self._woken.set()

    def forget_announcement(self) -> None:
        """Announces again: the database may have lost the last one (it crashed, or our worker id is new)."""
        self._poll_mode.announced = None
        self._forgotten += 1
        self._cursor, self.rewound = ClaimCursor(), True
        self.claim_soon()

    @property
    def priorities(self) -> list[int]:
        """Priorities, descending, in which there may be index entries of finished jobs."""
        return self._cursor.priorities()

    @property
    def is_idle(self) -> bool:
        """True while the pool is announced as idle: inserts notify it, so it does not poll."""
        return self._poll_mode.announced is True

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
        if self._worker.lease_holds:
            return True
        self.release_unstarted(Reason.FENCE)
        return False

    # The claim loop.

    async def run(self, tasks: TaskGroup) -> None:
        """Claims until cancelled or closed; runner tasks are started in `tasks`."""
        self._executor.start(tasks)
        while not self.closed:
            self._wanted, self.sleeps_until = False, 0.0
            delay_s = self._poll_mode.sleep_s(await self._iteration())
            self.sleeps_until = anyio.current_time() + delay_s
            await self._sleep()
        self.sleeps_until = 0.0  # if it is opened again, `run` is called again, and iterates at once

    async def _sleep(self) -> None:
        """Until `sleeps_until`, or a job is due, or `claim_soon`."""
        executor = self._executor
        while not self._wanted:
            now = anyio.current_time()
            if executor.waiting and now >= self._begun_at + STALL_S:
                self._stop_hoarding(executor.begun - self._begun, now - self._begun_at)
                self._begun, self._begun_at = executor.begun, now
            due_at = math.inf if self._due_at is None or not self._may_claim() else self._due_at
            wait_s = min(self.sleeps_until, due_at) - now
            if wait_s <= 0:
                return
            self._woken = anyio.Event()
            with anyio.move_on_after(min(wait_s, self._begun_at + STALL_S - now) if executor.waiting else wait_s):
                await self._woken.wait()

    def _stop_hoarding(self, begun: int, in_s: float) -> None:
        """`begun` attempts have begun in `in_s` seconds while others waited: releases those that would wait long."""
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
        """One claim, if there is capacity. Seconds to sleep; infinite: until woken."""
        self._executor.wake()
        if not self._may_claim():
            self._executor.call_when_low(self._low)
            return math.inf
        try:
            if self._poll_mode.announced is None:
                await self._announce(idle=True)
            self._claiming = True
            await self._unknown.refresh(self.queue, self._worker.worker_id)
            if not self._may_claim():  # paused meanwhile, or the settler has filled up
                return 0.0
            sent = self._prepare()
            claimed = await self._store.claim(sent.order)
            took_s, dry = anyio.current_time() - sent.at, not self._executor.waiting
            self._tallies.claimed(self.queue, len(claimed), took_s, sent.notified_ago_s)
            self._take(sent, claimed)
            if dry and len(claimed) < min(sent.order.limit, CLAIM_SOCKET_MAX):
                await asyncio.sleep(0)  # runner tasks first, unless there is more: then the next claim comes first
            self._learn(sent, claimed, took_s, dry=dry)
            announce = self._poll_mode.after_claim(len(claimed), anyio.current_time(), full=self._more)
            if announce is not None:
                await self._announce(idle=announce)
            self._outage.passed()
        except PgworkdError as error:
            self._poll_mode.announced = None  # the announcement may have been stored: announce again
            if isinstance(error, WorkerLost):
                self._worker.renew_now()
            self._tallies.claims[self.queue, "failed"] += 1
            return self._outage.failed(error)
        finally:
            self._claiming = False
        return self._poll_mode.next_claim_s(anyio.current_time())

    def _forget_due(self) -> None:
        """Jobs due by now are taken by this claim: no wake-up is needed for them."""
        if self._due_at is not None and self._due_at <= anyio.current_time():
            self._due_at = None

    @property
    def _low(self) -> int:
        """When no more than this many attempts wait, it is time for the next claim: not after every single start."""
        return self._ahead * 3 // 4

    @property
    def _ahead(self) -> int:
        return 0 if self.limited and not self._more else self._prefetch.ahead

    def _prepare(self) -> SentClaim:
        now = anyio.current_time()
        self._forget_due()
        fixed = (self._worker.worker_id, self.queue, self._capacity(), self._kinds, self._budgets)
        was, self._left_out = self._left_out, self._unknown.left_out(self.queue)
        if set(was) - set(self._left_out):
            self._cursor.rewind(0.0)  # we have passed over jobs that we may claim now
        start, keyed = self._cursor.start(now), self._cursor.keyed()
        order = ClaimOrder(*fixed, *start, self._left_out)
        order = order._replace(places=keyed.places, reach_s=keyed.reach_s, since=keyed.since, renew=keyed.renew)
        notified_at, self._notified_at = self._notified_at, None
        return SentClaim(order, now, None if notified_at is None else now - notified_at)

    def _take(self, sent: SentClaim, claimed: Claims) -> None:
        """Submits the claimed attempts, or releases them where the pool may no longer run them."""
        executor, worker_id = self._executor, sent.order.worker_id
        if not executor.waiting:
            self._begun, self._begun_at = executor.begun, anyio.current_time()
        executor.submit(new for row in claimed if self._in_flight.add(new := Attempt(row, self.queue, worker_id)))
        if not self._worker.may_claim:
            # The daemon began to stop, or was fenced, while the claim was under way.
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
        if claimed.again_s is not None:
            self.expect_also(claimed.again_s)
        # Under a limit a claim may stop short of the last due job, whatever number it was asked for.
        self._cursor.claimed(claimed, now, took_s, full=full or self.limited, places=claimed.places)
        self._cursor.passed(claimed.passed)
        executor = self._executor
        self._prefetch.claimed(took_s, executor.finished, executor.run_s, self.concurrency, dry=dry)

    async def _announce(self, *, idle: bool) -> None:
        code, forgotten = (self.code_concurrency, self.code_source), self._forgotten
        await self._store.set_pool(self._worker.worker_id, self.queue, self.concurrency, idle=idle, code=code)
        if forgotten == self._forgotten:  # else it is outdated by now, and announced again
            self._poll_mode.record_announcement(anyio.current_time(), idle=idle)
