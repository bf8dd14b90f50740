"""Claims from one queue, again and again: when, and from where.

The loop body (`_iteration`) returns how long to sleep. `ClaimCursor` says where a claim begins, `PollMode` whether to
poll or to wait for a notification. For whom it claims, how many, and what becomes of them, a subclass says: `Pool` for
the slots of this process.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple, Protocol

import anyio

from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.database.reconnect import Outage
from pgworkd.engine.claim.care import Care
from pgworkd.engine.claim.claim_cursor import ClaimCursor, Keyed, Start
from pgworkd.engine.claim.poll_mode import PollMode
from pgworkd.engine.counters import Counters
from pgworkd.errors import PgworkdError, WorkerLost

CLAIM_MAX = 1_000
"""Jobs per claim."""
OTHERS_FIRST_S = 0.1
"""How long a job that could not run here is left to others once it is due again: who has given it back would be the
first to claim it each time, and a worker that could run it would never be."""
NEAR_S = 0.02
"""Two instants that are no further apart may be of one job."""
CLAIM_SOCKET_MAX = 500
"""A claim that returns this many counts as full: over a Unix socket, whose buffer holds no more, none returns more."""


class ClaimingWorker(Protocol):
    """The worker that a pool claims for. `worker_id`: the id to claim under; `stopping`: the daemon stops."""

    worker_id: int
    stopping: bool

    @property
    def may_claim(self) -> bool:
        """False while the lease is in doubt or the daemon stops."""

    def protects(self) -> bool:
        """Whether a handler may be called: not once the lease may have expired, read from the clock.

        From then on the process ends before the lease does.
        """

    def renew_now(self) -> None:
        """Sends a heartbeat: the database says that our lease has run out, and only a heartbeat can confirm that."""


class Places(NamedTuple):
    """Where a claim begins, and when it was sent, on the loop's clock."""

    start: Start
    keyed: Keyed
    at: float
    notified_ago_s: float | None
    """How long before that the notification came that it follows; None: there was none."""


class ClaimLoop(ABC):
    """The claims of one queue."""

    def __init__(self, queue: str, worker: ClaimingWorker, events_: Events, counters: Counters) -> None:
        self.queue = queue
        self._counters = counters
        self._notified_at: float | None = None  # of the first notification since the last claim was sent
        self.paused = self.closed = False
        self.limited = False
        """The queue has fleet-wide limits: where one is reached, jobs claimed ahead would count and not run."""
        self.rewound = True
        """Jobs that became due long ago may wait: the next poll begins at the head, and sets this to False."""
        self.sleeps_until = 0.0
        """When the next iteration begins at the latest, on the loop's clock. Infinite only while inserts notify us."""
        self.code_concurrency, self.code_source = 0, "default"
        """Concurrency where no row of `queues` overrides it, and its source: code, settings or default."""
        self._cursor, self._poll_mode = ClaimCursor(), PollMode()
        self._forgotten = 0  # how often the announcement was forgotten
        self._due_at: float | None = None  # on the loop's clock: when the next waiting job is due, as far as we know
        self._given_back = deque[float](maxlen=100)  # when jobs that could not run here are due; none is past
        self._worker = worker
        self._outage = Outage(f"claim {queue}", events_)
        self._care = Care(self._set_aside)
        self._sent: ClaimOrder | None = None  # the claim under way, or that failed
        self._wanted, self._woken, self._claiming = False, anyio.Event(), False
        self._more = False  # the last claim was full: there may be more

    # Called by others, in the daemon's loop.

    def claim_soon(self) -> None:
        """Wakes the claim loop: something may have changed."""
        if not self._wanted:
            self._wanted, self.sleeps_until = True, 0.0
            self._woken.set()

    def notified(self, run_at: float | None) -> None:
        """Notes a notification that named this queue; `run_at`: of a job, due long ago, that can be claimed again."""
        now = anyio.current_time()
        self._poll_mode.notified(now)
        if self._notified_at is None:
            self._notified_at = now
        if run_at is not None:
            self._cursor.rewind(run_at)
            self.rewound = True
        self.claim_soon()

    def expect(self, due_in_s: float | None) -> None:
        """Notes that the next waiting job is due in this many seconds; None: no job waits."""
        if due_in_s is not None and due_in_s <= 0:
            self._cursor.recheck_head(anyio.current_time())
        self._due_at = None if due_in_s is None else anyio.current_time() + due_in_s
        self._woken.set()

    def expect_also(self, due_in_s: float, *, others_first: bool = False) -> None:
        """Notes that one more job will be due in this many seconds. `others_first`: it could not run here."""
        due_at = anyio.current_time() + due_in_s
        if others_first:
            self._given_back.append(due_at)
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

    # What a subclass says.

    concurrency: int
    """How many jobs one worker may run at once; may be set at any time."""

    @abstractmethod
    def release_unstarted(self, reason: Reason, *, keep: int = 0) -> None:
        """Releases what was claimed and has not begun, except the first `keep`."""

    @abstractmethod
    def _may_claim(self) -> bool:
        """Whether it makes sense to claim now."""

    @abstractmethod
    async def _claim(self) -> Claims | None:
        """Claims once, from where `_leave` says, and tells `_arrive` the result; None: it may not claim any more."""

    @abstractmethod
    async def _refuse(self, order: ClaimOrder, error: PgworkdError | None) -> int | None:
        """Sets aside jobs that refuse this claim: see `Care`."""

    @abstractmethod
    async def _store_announcement(self, *, idle: bool) -> None:
        """Announces the pool in the database. `idle`: inserts must notify it."""

    # The claim loop.

    async def _loop(self) -> None:
        """Claims until cancelled or closed."""
        while not self.closed:
            self._wanted, self.sleeps_until = False, 0.0
            delay_s = self._poll_mode.sleep_s(await self._iteration())
            self.sleeps_until = anyio.current_time() + delay_s
            await self._sleep()
        self._counters.refusals.passed(self.queue)
        self.sleeps_until = 0.0  # if it is opened again, `run` is called again, and iterates at once

    async def _sleep(self) -> None:
        """Sleeps until `sleeps_until`, or a job is due, or `claim_soon`."""
        while not self._wanted and (wait_s := self._wake_at() - anyio.current_time()) > 0:
            self._woken = anyio.Event()
            with anyio.move_on_after(wait_s):
                await self._woken.wait()

    def _wake_at(self) -> float:
        due_at = math.inf if self._due_at is None or not self._may_claim() else self._due_at
        if any(abs(due_at - each) < NEAR_S for each in self._given_back):
            due_at += OTHERS_FIRST_S
        return min(self.sleeps_until, due_at)

    async def _iteration(self) -> float:
        """Claims once, if there is capacity. Seconds to sleep; infinite: until woken."""
        if not self._may_claim():
            if self.paused:
                self._counters.refusals.passed(self.queue)
            return math.inf
        self._sent, sent_at = None, time.monotonic()
        try:
            if self._poll_mode.announced is None:
                await self._announce(idle=True)
            self._claiming = True
            claimed = await self._claim()
            if claimed is None:
                return 0.0
            announce = self._poll_mode.after_claim(len(claimed), anyio.current_time(), full=self._more)
            if announce is not None:
                await self._announce(idle=announce)
            self._outage.passed()
            self._counters.refusals.passed(self.queue)
        except PgworkdError as error:
            self._counters.claim_failed(self.queue, time.monotonic() - sent_at)
            if not isinstance(error, WorkerLost):
                self._counters.refusals.failed(self.queue, error, sent_at)
            return await self._refused(error)
        finally:
            self._claiming = False
        return self._poll_mode.next_claim_s(anyio.current_time())

    async def _refused(self, error: PgworkdError) -> float:
        """Seconds to sleep after a call that failed: none if it was a claim, and another may succeed at once."""
        with contextlib.suppress(PgworkdError):  # what it raises is no better known
            if self._sent is not None and await self._care.refused(error):
                return 0.0
        return self._failed(error)

    async def _set_aside(self, error: PgworkdError | None) -> int | None:
        return 0 if self._sent is None else await self._refuse(self._sent, error)

    def _failed(self, error: PgworkdError) -> float:
        """Seconds to sleep after a call that failed."""
        self._poll_mode.announced = None  # the announcement may have been stored: announce again
        if isinstance(error, WorkerLost):
            self._worker.renew_now()
        return self._outage.failed(error)

    def _leave(self) -> Places:
        """Where a claim sent now begins."""
        now = anyio.current_time()
        if self._due_at is not None and self._due_at <= now:
            self._due_at = None  # jobs due by now are taken by this claim: no wake-up is needed for them
        if self._given_back:
            self._given_back = deque((each for each in self._given_back if each > now), maxlen=100)
        start, keyed = self._cursor.start(now), self._cursor.keyed()
        notified_at, self._notified_at = self._notified_at, None
        ago_s = None if notified_at is None else now - notified_at
        return Places(start, keyed, now, ago_s)

    def _arrive(self, claimed: Claims, now: float, took_s: float, *, full: bool) -> None:
        """Learns from the result of a claim; `full`: there may be more."""
        self._sent = None
        self._care.passed()
        if claimed.again_s is not None:
            self.expect_also(claimed.again_s)
        # Under a limit a claim may stop short of the last due job, whatever number it was asked for.
        self._cursor.claimed(claimed, now, took_s, full=full or self.limited, places=claimed.places)
        self._cursor.passed(claimed.passed)

    async def _announce(self, *, idle: bool) -> None:
        forgotten = self._forgotten
        await self._store_announcement(idle=idle)
        if forgotten == self._forgotten:  # else it is outdated by now, and announced again
            self._poll_mode.record_announcement(anyio.current_time(), idle=idle)
