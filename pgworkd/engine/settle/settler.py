"""A daemon's outcomes, kept until the database has stored them, through any outage.

When too many wait, pools stop claiming. What is locked, or cannot be settled for now, stays in flight and is retried
after a delay of its own; for what the database rejects something is stored that it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from uuid import UUID

import anyio

from pgworkd.core import events
from pgworkd.core.job import DONE, Ending, Outcome
from pgworkd.core.source import SettleSource
from pgworkd.database.reconnect import Outage
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.settle.delayed import CAP_S, LOCKED_CAP_S, fallback, is_last_resort
from pgworkd.engine.settle.item import size_of
from pgworkd.engine.settle.loop import Planner, SettleLoop, Statuses
from pgworkd.engine.shared import Shared
from pgworkd.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable, PgworkdError

CAPACITY = 10_000
CAPACITY_BYTES = 32 * 1024 * 1024
"""When this much waits, no handler is called and no job claimed. What runs comes on top: slots x size."""
_COMPLETED = (Ending.COMPLETED, Ending.SETTLED)


class Settler:
    """Settles all attempts in flight; the `SettlePolicy` of a daemon."""

    by_worker = True
    keeps = True
    failures_spare = 2.0

    def __init__(
        self,
        source: SettleSource,
        shared: Shared,
        planner: Planner,
        *,
        on_completed: Callable[[Sequence[Attempt]], None],
        on_settled: Callable[[Attempt, Outcome, str | None], None],
        on_capacity: Callable[[], None],
    ) -> None:
        """`on_completed` gets flushes in which all were completed; `on_settled` gets every other attempt, with the
        job's new status, or None when the attempt was not ours any more; `on_capacity`: there is capacity again.
        """
        self._in_flight, self._events = shared.in_flight, shared.events
        self._on_completed, self._on_settled, self._on_capacity = on_completed, on_settled, on_capacity
        self._loop = SettleLoop(source, planner, shared.counters.settle_s, self)
        self.full = False
        """True while no handler may be called and no job claimed."""
        self._empty = anyio.Event()
        self._empty.set()
        self._outage = Outage("settler", shared.events)

    def put(self, attempt: Attempt, outcome: Outcome) -> None:
        """Takes an attempt that has ended. Never blocks."""
        size = len(attempt.claimed.payload or "")  # this is on the hot path of every job
        if outcome is not DONE:
            if outcome.ending is Ending.HANDED_OVER:
                self._in_flight.remove([attempt])
                self._events.emit(events.JOB_HANDED_OVER, **attempt.facts())
                return
            if outcome.ending is Ending.RELEASED and attempt.started is None:
                outcome = outcome._replace(begun=False)
            size += size_of(outcome)
        if attempt.own is not None:
            self._report(attempt, outcome)
            return
        attempt.outcome, attempt.size, waiting = outcome, size, self._loop.waiting
        if not waiting.count:
            self._loop.wake()
            if self._empty.is_set():
                self._empty = anyio.Event()
        waiting.put(attempt)
        if waiting.count >= CAPACITY or waiting.bytes >= CAPACITY_BYTES:
            self.full = True

    def _report(self, attempt: Attempt, outcome: Outcome) -> None:
        """Reports an attempt that was settled where it was claimed; else its claim is undone, and nothing counted."""
        if attempt.own is not None:
            attempt.own.abandon()
        attempt.outcome = outcome
        status = attempt.status_after or ("pending" if outcome.ending is Ending.RELEASED else None)
        self.settled([attempt], {} if status is None else {attempt.job_id: status}, {})

    @property
    def capacity(self) -> int:
        """How many more outcomes the settler takes; beyond that, claiming would only add to the backlog."""
        return 0 if self.full else CAPACITY - self._loop.count

    async def run(self) -> None:
        """Settles until cancelled."""
        await self._loop.run()

    async def drained(self) -> None:
        """Waits until everything is settled."""
        await self._empty.wait()

    # Called by the loop.

    def attempts(self, items: Sequence[Attempt]) -> Sequence[Attempt]:
        """Returns the items, each of which is an attempt."""
        return items

    async def prepare(self, items: Sequence[Attempt]) -> None:
        """Does nothing: each attempt was claimed here."""

    async def unavailable(self, error: DatabaseUnavailable) -> None:
        """Waits for the database."""
        await self._outage.wait(error)

    def answered(self) -> None:
        """Ends the outage, if there is one."""
        self._outage.passed()

    def flushed(self) -> None:
        """Wakes whoever waits for capacity, or for the end."""
        loop = self._loop
        if not loop.count:
            self._empty.set()
        was_full = self.full
        self.full = loop.count >= CAPACITY or loop.bytes >= CAPACITY_BYTES
        if was_full and not self.full:
            self._on_capacity()

    def settled(self, items: Sequence[Attempt], statuses: Statuses, before: Statuses) -> None:
        """Reports attempts; hooks of dead jobs depend on the status even where only a lost answer told it."""
        self._in_flight.remove(items)
        if len(statuses) == len(items) and items[0].outcome.ending in _COMPLETED:
            self._on_completed(items)
            return
        latest: dict[UUID, int] = {}  # of two attempts of one job only the later one can have been running
        for attempt in items:
            latest[attempt.job_id] = max(attempt.number, latest.get(attempt.job_id, 0))
        for attempt in items:
            status = statuses.get(attempt.job_id) or before.get(attempt.job_id)
            if status is None or attempt.number != latest[attempt.job_id]:
                status = None
                self._events.emit(events.JOB_STALE, **attempt.facts(), outcome=attempt.outcome.ending.value)
            self._on_settled(attempt, attempt.outcome, status)

    def postpone(self, items: Sequence[Attempt], error: PgworkdError | None) -> None:
        """Retries attempts later; they stay in flight."""
        reported = len(self._loop.delayed) > 0
        locked = error is None or (isinstance(error, DatabaseBusy) and error.locked)
        delay_s = min([self._loop.delay(item, LOCKED_CAP_S if locked else CAP_S) for item in items])
        if not reported:
            text = "locked by another transaction" if error is None else str(error)
            self._events.emit(events.OUTCOMES_DELAYED, count=len(items), error=text, retry_in_s=round(delay_s, 3))

    def instead(self, item: Attempt, error: DatabaseError) -> Outcome | None:
        """A failure with a plain text in place of a rejected outcome, then a dead job.

        If even that is rejected, the table has been altered: the attempt stays in flight, so that it runs only once.
        """
        if not is_last_resort(item.outcome):
            return fallback(item.outcome, error.sqlstate)
        if item.delays == 0:
            self._events.emit(events.OUTCOME_REJECTED, **item.facts(), error=str(error))
        self.postpone([item], error)
        return None
