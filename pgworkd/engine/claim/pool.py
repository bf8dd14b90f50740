"""One daemon's slots for one queue: claims as many jobs as there is room for.

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
from pgworkd.errors import PgworkdError, WorkerLost
from pgworkd.words.events import Events
from pgworkd.words.job import Reason, stopped

CLAIM_MAX = 1_000
CLAIM_SOCKET_MAX = 500
"""With so many a claim may be answered in full: over a Unix socket, whose buffer holds no more, it gives no more."""
BOUND_S = 0.1
"""So long after a limit was reached, nothing is claimed ahead."""
STALL_S = 0.05
"""So often, while jobs wait here for a slot, it is asked how many have begun."""
STALLS_MAX = 20
"""What would wait here for more than so many times that is given back: another daemon may have slots."""


class ClaimingWorker(Protocol):
    """What a pool asks of its daemon. `worker_id`: under which to claim."""

    worker_id: int
    stopping: bool

    @property
    def may_claim(self) -> bool:
        """False while the lease is in doubt or the daemon stops."""

    def renew_now(self) -> None:
        """The database says that our lease has run out: only a heartbeat can tell whether it is gone."""


class Asked(NamedTuple):
    """A claim under way, and when it was made, on the loop's clock."""

    order: ClaimOrder
    at: float


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
    ) -> None:
        self.queue = queue
        self.paused = self.closed = False
        self.limited = False
        """The queue has limits over the fleet: where one is reached, what is claimed ahead would count and not run."""
        self.rewound = True
        """What became due long ago may wait: so the next look begins at the head, and says False."""
        self.sleeps_until = 0.0
        """On the loop's clock: the next iteration at the latest. Finite unless inserts notify us."""
        self.code_concurrency, self.code_source = concurrency, "default"
        """What holds where no row of `queues` says otherwise, and who says it: code, settings or default."""
        self._executor = Executor(
            queue, concurrency, runner, settler, events_, self.claim_soon, Payloads(store, queue, events_)
        )
        self._cursor, self._prefetch, self._poll_mode = ClaimCursor(), Prefetch(), PollMode()
        self._forgotten = 0
        self._due_at: float | None = None  # on the loop's clock: when the next waiting job is due, as far as we know
        self._worker, self._store, self._settler, self._in_flight = worker, store, settler, in_flight
        self._outage = Outage(f"claim {queue}", events_)
        special = {h.kind: h.max_attempts for h in app.handlers.values() if h.max_attempts != MAX_ATTEMPTS_DEFAULT}
        self._kinds, self._budgets = list(special), list(special.values())
        self._unknown, self._left_out = runner.unknown, list[str]()
        self._begun, self._begun_at = 0, 0.0  # so many runs had begun then; since then jobs have been waiting here
        self._tasks: TaskGroup | None = None
        self._wanted, self._woken, self._claiming = False, anyio.Event(), False
        self._bound_until = -math.inf  # a limit was reached; until then nothing is claimed ahead
        self._more = False  # the last claim was answered in full: there may be more

    # What others call, in the daemon's loop.

    @property
    def concurrency(self) -> int:
        """How many jobs may run at once; may be set at any time."""
        return self._executor.concurrency

    @concurrency.setter
    def concurrency(self, slots: int) -> None:
        self._executor.concurrency = slots

    def claim_soon(self) -> None:
        """Something may have changed: claim soon."""
        if not self._wanted:
            self._wanted, self.sleeps_until = True, 0.0
            self._woken.set()

    def notified(self, run_at: float | None) -> None:
        """A notification named this queue; `run_at`: of a row, due long ago, that can be claimed again."""
        self._poll_mode.notified(anyio.current_time())
        if run_at is not None:
            self._cursor.rewind(run_at)
            self.rewound = True
        self.claim_soon()

    def expect(self, due_in_s: float | None) -> None:
        """The next waiting job is due then; None: there is none."""
        if due_in_s is not None and due_in_s <= 0:
            self._cursor.doubt(anyio.current_time())
        self._due_at = None if due_in_s is None else anyio.current_time() + due_in_s
        self._woken.set()

    def expect_also(self, due_in_s: float) -> None:
        """One more job will be due then."""
        due_at = anyio.current_time() + due_in_s
        if self._due_at is None or due_at < self._due_at:
            self._due_at = due_at
            self._woken.set()

    def forget_announcement(self) -> None:
        """The database may have forgotten us (it crashed, or our worker id is new): announce again."""
        self._poll_mode.announced = None
        self._forgotten += 1
        self._cursor, self.rewound = ClaimCursor(), True
        self.claim_soon()

    @property
    def priorities(self) -> list[int]:
        """Those in which there may be jobs that are over, descending."""
        return self._cursor.priorities()

    @property
    def is_idle(self) -> bool:
        """True when inserts notify us, so nobody needs to poll."""
        return self._poll_mode.announced is True

    @property
    def running(self) -> int:
        """Handlers that have been called and have not come back."""
        return self._executor.busy

    @property
    def quiet(self) -> bool:
        """True when no handler runs and no claim is on its way."""
        return self._executor.busy == 0 and not self._claiming

    def close(self) -> None:
        """Claims no more and gives back what has not begun; `run` ends. What runs goes on."""
        self.closed = True
        self.release_unstarted(Reason.ELSEWHERE)
        self.claim_soon()

    def release_unstarted(self, reason: Reason, *, keep: int = 0) -> None:
        """Releases what was claimed and has not begun, but for so many that come first; in a stop also what is read."""
        if self.closed or reason is not Reason.ELSEWHERE:
            self._executor.payloads.stop(reason)
        while len(self._executor.work) > keep:
            attempt = self._executor.work.pop()
            attempt.reason = attempt.reason or reason
            self._cursor.rewind(attempt.claimed.run_at)
            self._settler.put(attempt, stopped(attempt.reason))

    # The claim loop.

    async def run(self, tasks: TaskGroup) -> None:
        """Claims until cancelled or closed; runner tasks are started in `tasks`."""
        self._tasks = tasks
        while not self.closed:
            self._wanted, self.sleeps_until = False, 0.0
            delay_s = self._poll_mode.sleep_s(await self._iteration())
            self.sleeps_until = anyio.current_time() + delay_s
            await self._sleep()

    async def _sleep(self) -> None:
        """Sleeps until then, or a job is due, or someone wants a look."""
        slots = self._executor
        while not self._wanted:
            now = anyio.current_time()
            if slots.work and now >= self._begun_at + STALL_S:
                self._stop_hoarding(slots.begun - self._begun, now - self._begun_at)
                self._begun, self._begun_at = slots.begun, now
            due_at = math.inf if self._due_at is None or not self._may_claim() else self._due_at
            wait_s = min(self.sleeps_until, due_at) - now
            if wait_s <= 0:
                return
            self._woken = anyio.Event()
            with anyio.move_on_after(min(wait_s, self._begun_at + STALL_S - now) if slots.work else wait_s):
                await self._woken.wait()

    def _stop_hoarding(self, begun: int, in_s: float) -> None:
        """So many jobs have begun in that time, while others waited: not all of those may be ours for long."""
        if len(self._executor.work) > STALLS_MAX * begun:
            self._prefetch.stalled(in_s * self.concurrency / max(begun, 1))
            self.release_unstarted(Reason.ELSEWHERE, keep=begun)

    def _capacity_left(self) -> int:
        if self.paused or self.closed or not self._worker.may_claim:
            return 0
        return min(CLAIM_MAX, self._executor.free + self._ahead, self._settler.room - len(self._executor.work))

    def _may_claim(self) -> bool:
        return (self._executor.free > 0 or len(self._executor.work) <= self._low) and self._capacity_left() > 0

    async def _iteration(self) -> float:
        """One claim, if there is room. Seconds to sleep; infinite: until woken."""
        self._fill()
        if not self._may_claim():
            self._executor.ask_below = self._low
            return math.inf
        try:
            if self._poll_mode.announced is None:
                await self._announce(idle=True)
            self._claiming = True
            await self._unknown.refresh(self.queue, self._worker.worker_id)
            asked = self._ask()
            claimed = await self._store.claim(asked.order)
            took_s, dry = anyio.current_time() - asked.at, not self._executor.work
            self._hand_over(asked, claimed)
            if dry and len(claimed) < min(asked.order.limit, CLAIM_SOCKET_MAX):
                await asyncio.sleep(0)  # who waits for work goes first; but for the next claim, where there is more
            self._learn(asked, claimed, took_s, dry=dry)
            announce = self._poll_mode.after_claim(len(claimed), anyio.current_time(), full=self._more)
            if announce is not None:
                await self._announce(idle=announce)
            self._outage.passed()
        except PgworkdError as error:
            self._poll_mode.announced = None  # what we wanted to announce may be done: announce again
            if isinstance(error, WorkerLost):
                self._worker.renew_now()
            return self._outage.failed(error)
        finally:
            self._claiming = False
        return self._poll_mode.next_claim_s(anyio.current_time())

    def _forget_due(self) -> None:
        """What is due by now, the claim that comes takes: no one need be woken for it."""
        if self._due_at is not None and self._due_at <= anyio.current_time():
            self._due_at = None

    @property
    def _low(self) -> int:
        """With so many jobs waiting here it is time for the next claim: not for each single one of them."""
        return self._ahead * 3 // 4

    @property
    def _ahead(self) -> int:
        return 0 if self.limited and not self._more else self._prefetch.ahead

    def _ask(self) -> Asked:
        now = anyio.current_time()
        self._forget_due()
        fixed = (self._worker.worker_id, self.queue, self._capacity_left(), self._kinds, self._budgets)
        was, self._left_out = self._left_out, self._unknown.left_out(self.queue)
        if set(was) - set(self._left_out):
            self._cursor.rewind(0.0)  # we have passed over jobs that may be ours now
        start, keyed = self._cursor.start(now), self._cursor.keyed()
        order = ClaimOrder(*fixed, *start, self._left_out)
        return Asked(
            order._replace(places=keyed.places, reach_s=keyed.reach_s, since=keyed.since, renew=keyed.renew), now
        )

    def _hand_over(self, asked: Asked, claimed: Claims) -> None:
        if not self._executor.work:
            self._begun, self._begun_at = self._executor.begun, anyio.current_time()
        new = (
            attempt
            for row in claimed
            if self._in_flight.add(attempt := Attempt(row, self.queue, asked.order.worker_id))
        )
        self._executor.work.extend(new)
        if not self._worker.may_claim:
            # The daemon began to stop, or was fenced, while the claim was on its way.
            self.release_unstarted(Reason.SHUTDOWN if self._worker.stopping else Reason.FENCE)
        elif self.closed:
            self.release_unstarted(Reason.ELSEWHERE)
        self._fill()

    def _learn(self, asked: Asked, claimed: Claims, took_s: float, *, dry: bool) -> None:
        now = anyio.current_time()
        full = len(claimed) >= min(asked.order.limit, CLAIM_SOCKET_MAX)
        if self.limited and not full:
            self._bound_until = now + BOUND_S
        self._more = full and (now >= self._bound_until or asked.order.limit == CLAIM_MAX)
        if claimed.again_s is not None:
            self.expect_also(claimed.again_s)
        # Under a limit a claim may stop short of the last due job whatever it was asked for.
        self._cursor.claimed(claimed, now, took_s, full=full or self.limited, places=claimed.places)
        self._cursor.passed(claimed.passed)
        self._prefetch.claimed(took_s, self._executor.finished, self._executor.run_s, self.concurrency, dry=dry)

    def _fill(self) -> None:
        if self._tasks is not None:
            self._executor.fill(self._tasks)

    async def _announce(self, *, idle: bool) -> None:
        code, forgotten = (self.code_concurrency, self.code_source), self._forgotten
        await self._store.set_pool(self._worker.worker_id, self.queue, self.concurrency, idle=idle, code=code)
        if forgotten == self._forgotten:  # else there is something else to say by now
            self._poll_mode.announce_done(anyio.current_time(), idle=idle)
