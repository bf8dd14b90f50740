"""One daemon's slots for one queue: claims as many jobs as there is room for, and runs them.

The loop's body (`_turn`) returns how long to sleep. A pool is *asleep* in the database's eyes unless it sees
heavy traffic: inserts into a sleeping pool's queue send a NOTIFY, which wakes it in a millisecond. Under heavy
traffic those would only hold up the commits that send them, so the pool marks itself awake and polls.
"""

from __future__ import annotations

import contextvars
import math
from collections import deque
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from . import events
from .app import MAX_ATTEMPTS_DEFAULT, App
from .errors import PgworkdError, WorkerLost
from .events import Events
from .held import Held, Holdings
from .job import Ending, Outcome, Reason
from .outage import Outage
from .runner import Runner
from .settler import Settler
from .store import Store

CLAIM_MAX = 1_000
NOTIFIED_PER_S_MAX = 100
"""More notifications than that and polling is the cheaper way to hear."""
BUSY_PER_S_LEAST = 100
"""Fewer jobs than that, in a second awake, and being notified is the faster way to hear."""
POLL_FIRST_S, POLL_CAP_S = 0.005, 0.05
"""Waits of an awake pool that found nothing: they double from the first to the cap."""
AWAKE_LEAST_S = 1.0
DROWSY_S = 1.0
"""How long a pool that fell asleep polls on: a transaction that inserted while the pool was awake sent no NOTIFY, and
commits unheard. One that stays open for longer is found by the daemon's look."""


class Fleet(Protocol):
    """What a pool asks of its daemon."""

    @property
    def worker_id(self) -> int:
        """The id under which to claim."""

    @property
    def may_claim(self) -> bool:
        """False while the lease is in doubt or the daemon stops."""

    def worker_lost(self) -> None:
        """The database says that our lease is gone."""


class Pool:
    """Slots, a claim loop, and the runner tasks that fill the slots."""

    def __init__(
        self,
        queue: str,
        concurrency: int,
        app: App,
        fleet: Fleet,
        store: Store,
        runner: Runner,
        settler: Settler,
        holdings: Holdings,
        events_: Events,
    ) -> None:
        self.queue = queue
        self.concurrency = concurrency
        self.paused = False
        self._due_at: float | None = None  # on the loop's clock: when the next waiting job is due, as far as we know
        self._fleet = fleet
        self._store = store
        self._runner = runner
        self._settler = settler
        self._holdings = holdings
        self._events = events_
        self._outage = Outage(f"claim {queue}", events_)
        special = {h.kind: h.max_attempts for h in app.handlers.values() if h.max_attempts != MAX_ATTEMPTS_DEFAULT}
        self._kinds, self._budgets = list(special), list(special.values())
        self._work: deque[Held] = deque()
        self._idle: list[anyio.Event] = []
        self._runners = 0
        self._busy = 0
        self._wanted = False
        self._woken = anyio.Event()
        self._claiming = False
        self._hungry = False  # more may be due than there was room for
        # The sleep protocol: what the database has been told, and since when.
        self._announced: bool | None = None
        self._awake_since = 0.0
        self._claimed_awake = 0
        self._drowsy_until = 0.0
        self._empty_claims = 0
        self._full_claims = 0
        self._heard_at: deque[float] = deque(maxlen=NOTIFIED_PER_S_MAX)

    # What others call, in the daemon's loop.

    def look(self) -> None:
        """Something may have changed: claim soon."""
        self._wanted = True
        self._woken.set()

    def heard(self) -> None:
        """A notification named this queue."""
        self._heard_at.append(anyio.current_time())
        self.look()

    def expect(self, due_in_s: float | None) -> None:
        """The next waiting job is due then; None: there is none."""
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
        self._announced = None
        self.look()

    @property
    def asleep(self) -> bool:
        """True when inserts notify us, so nobody needs to poll."""
        return self._announced is True

    @property
    def running(self) -> int:
        """Handlers that have been called and have not come back."""
        return self._busy

    @property
    def quiet(self) -> bool:
        """True when no handler runs and no claim is on its way."""
        return self._busy == 0 and not self._claiming

    def give_back(self) -> None:
        """Releases what was claimed and has not been started."""
        while self._work:
            held = self._work.popleft()
            held.reason = held.reason or Reason.SHUTDOWN
            self._settler.put(held, Outcome(Ending.RELEASED, reason=held.reason.value))

    # The claim loop.

    async def run(self, tasks: TaskGroup) -> None:
        """Claims until cancelled; runner tasks are started in `tasks`."""
        while True:
            self._wanted = False
            delay_s = await self._turn(tasks)
            await self._rest(math.inf if delay_s is None else anyio.current_time() + delay_s)

    async def _rest(self, until: float) -> None:
        """Sleeps until that time on the loop's clock, or a job is due, or someone wants a look."""
        while not self._wanted:
            due_at = math.inf if self._due_at is None or self._room() <= 0 else self._due_at
            wait_s = min(until, due_at) - anyio.current_time()
            if wait_s <= 0:
                return
            self._woken = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._woken.wait()

    def _room(self) -> int:
        if self.paused or self._settler.full or not self._fleet.may_claim:
            return 0
        return min(CLAIM_MAX, self.concurrency - self._busy - len(self._work))

    async def _turn(self, tasks: TaskGroup) -> float | None:
        """One claim, if there is room. Seconds to sleep; None: until woken."""
        self._start_runners(tasks)
        room = self._room()
        if room <= 0:
            self._hungry = True
            return None
        try:
            if self._announced is None:
                await self._announce(asleep=True)
            if self._due_at is not None and self._due_at <= anyio.current_time():
                self._due_at = None
            self._claiming = True
            claimed = await self._store.claim(self._fleet.worker_id, self.queue, room, self._kinds, self._budgets)
        except WorkerLost:
            self._fleet.worker_lost()
            return None
        except PgworkdError as error:
            return self._outage.failed(error)
        finally:
            self._claiming = False
        self._outage.passed()
        for row in claimed:
            held = Held(row, self.queue)
            self._holdings.add(held)
            self._work.append(held)
        if not self._fleet.may_claim:
            self.give_back()  # the daemon began to stop, or was fenced, while the claim was on its way
        self._start_runners(tasks)
        return await self._next_look(len(claimed), room)

    async def _next_look(self, claimed: int, room: int) -> float | None:
        """When to claim again, and whether to sleep or to stay awake meanwhile."""
        now = anyio.current_time()
        full = self._hungry = claimed == room
        self._full_claims = self._full_claims + 1 if full else 0
        self._empty_claims = 0 if claimed else self._empty_claims + 1
        self._claimed_awake += claimed
        flooded = len(self._heard_at) == NOTIFIED_PER_S_MAX and now - self._heard_at[0] < 1.0
        try:
            if self.asleep:
                if flooded or self._full_claims >= 2:
                    self._awake_since, self._claimed_awake = now, 0
                    await self._announce(asleep=False)
                return 0 if full else POLL_CAP_S if now < self._drowsy_until else None
            if full:
                return 0
            if now - self._awake_since >= AWAKE_LEAST_S:
                calm = self._claimed_awake < BUSY_PER_S_LEAST * (now - self._awake_since)
                self._awake_since, self._claimed_awake = now, 0
                if calm:
                    self._heard_at.clear()
                    await self._announce(asleep=True)
                    return 0  # once more: what was inserted before the announcement sent no NOTIFY
        except PgworkdError as error:
            return self._outage.failed(error)
        return float(min(POLL_CAP_S, POLL_FIRST_S * 2 ** min(self._empty_claims, 10)))

    async def _announce(self, *, asleep: bool) -> None:
        await self._store.set_pool(self._fleet.worker_id, self.queue, self.concurrency, asleep=asleep)
        self._announced = asleep
        self._drowsy_until = anyio.current_time() + DROWSY_S

    # The runner tasks.

    def _start_runners(self, tasks: TaskGroup) -> None:
        for _ in range(len(self._work)):
            if self._idle:
                self._idle.pop().set()
            elif self._runners < self.concurrency:
                self._runners += 1
                tasks.start_soon(self._keep_running, name=f"runner {self.queue}")

    async def _keep_running(self) -> None:
        """One kept task: runs job after job, waits when there is none, ends when there are more tasks than slots.

        It also ends when a handler has set context variables: the next job must not see them, and only a new task
        has a clean context.
        """
        clean = contextvars.copy_context()
        while True:
            if not self._work:
                if self._runners > self.concurrency:
                    break
                called = anyio.Event()
                self._idle.append(called)
                await called.wait()
                continue
            held = self._work.popleft()
            self._busy += 1
            try:
                self._events.emit(events.JOB_STARTED, **held.facts())
                outcome = await self._runner.run(held)
            finally:
                self._busy -= 1
            self._settler.put(held, outcome)
            if self._hungry and not self._work:
                self.look()
            if contextvars.copy_context() != clean:
                self.look()  # starts a new one, if there is work
                break
        self._runners -= 1
