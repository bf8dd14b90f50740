"""Settles of remote workers, each of which waits for its answer.

Unlike a daemon's own outcomes these are kept by the worker until it has an answer: so an outage is answered with an
error at once, and the worker sends the same again. A locked row is tried again for a while.
"""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pgworkd.core.fence import Fence
from pgworkd.core.job import STATUSES_AFTER, Ending, Outcome
from pgworkd.database.remote_store import RemoteStore
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.counters import Counters
from pgworkd.engine.settle.delayed import LOCKED_CAP_S
from pgworkd.engine.settle.item import size_of
from pgworkd.engine.settle.loop import Planner, SettleLoop, Statuses
from pgworkd.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable, LeaseLost, PgworkdError
from pgworkd.gateway.workers.workers import RemoteWorkers

LOCKED_S = 5.0
"""A locked row is tried again for this long; then the worker is told to do so."""


class Settled(enum.Enum):
    """What a settle did."""

    NOW = "now"
    BEFORE = "before"
    """A repetition: the attempt had been settled so already."""


class EndedAttempt(NamedTuple):
    """An attempt that was settled. `attempt`: None if nothing is known of it; `status`: the job's new one."""

    attempt: Attempt | None
    outcome: Outcome
    status: str


class SettleAnswer(NamedTuple):
    """What became of a settle. `status`: the job's new one."""

    settled: Settled
    status: str


class _Call:
    """A caller that waits for this many answers. `deadline`: monotonic, for locked rows."""

    def __init__(self, items: int, patience_s: float) -> None:
        self.deadline = time.monotonic() + patience_s
        self.left = items
        self.answered = asyncio.Event()


class _Item:
    """One settle: an `Item`. `call`: None if nobody waits for it."""

    def __init__(self, fence: Fence, outcome: Outcome, attempt: Attempt | None, call: _Call | None = None) -> None:
        """`attempt`: what was claimed here as that attempt."""
        self.fence, self.outcome, self.attempt, self.call = fence, outcome, attempt, call
        self.job_id, self.number = fence.job_id, fence.attempt
        self.worker_id: int | None = fence.worker_id
        self.queue = "" if attempt is None else attempt.queue
        self.size = size_of(outcome)
        self.delays, self.outcome_unknown = 0, True  # the worker may have sent it before
        self.answer: SettleAnswer | PgworkdError | None = None

    @property
    def started(self) -> float | None:
        """When it was claimed, as far as is known."""
        return None if self.attempt is None else self.attempt.started

    def end(self, answer: SettleAnswer | PgworkdError) -> None:
        """Answers the caller."""
        self.answer = answer
        if self.call is not None:
            self.call.left -= 1
            if self.call.left == 0:
                self.call.answered.set()


class Settles:
    """Settles what remote workers have run; the `SettlePolicy` of a gateway."""

    by_worker = False
    keeps = False
    failures_spare = math.inf

    def __init__(
        self,
        store: RemoteStore,
        workers: RemoteWorkers,
        planner: Planner,
        counters: Counters,
        on_settled: Callable[[Sequence[EndedAttempt]], None],
    ) -> None:
        """`on_settled` gets those of each flush; `planner` knows which occurrences follow them."""
        self._store, self._workers = store, workers
        self._on_settled = on_settled
        self._loop = SettleLoop(store, planner, counters.settle_s, self)

    async def settle(self, fence: Fence, outcome: Outcome, patience_s: float = LOCKED_S) -> SettleAnswer:
        """Settles one attempt; a locked row is tried again for `patience_s` seconds.

        Raises LeaseLost: it runs no more, and was not settled so; or the database's errors.
        """
        (answer,) = await self.settle_many([(fence, outcome)], patience_s)
        if isinstance(answer, PgworkdError):
            raise answer
        return answer

    async def settle_many(
        self, settles: Sequence[tuple[Fence, Outcome]], patience_s: float = LOCKED_S
    ) -> list[SettleAnswer | PgworkdError]:
        """Settles many attempts at once, each for itself; the answer or the error of each, in order."""
        call = _Call(len(settles), patience_s)
        items = [self._put(fence, outcome, call) for fence, outcome in settles]
        if items:
            await call.answered.wait()
        return [item.answer for item in items if item.answer is not None]

    async def complete_on(self, connection: Any, fence: Fence, result: str | None) -> Callable[[], SettleAnswer] | None:
        """Completes a job in the transaction of a connection of the driver; None if the attempt runs no more.

        What it returns is to be called when the transaction has committed.
        """
        item = _Item(fence, Outcome(Ending.COMPLETED, result), self._workers.attempt(fence))
        await self.prepare([item])
        if not await self._store.complete_on(connection, item, self._loop.following([item])):
            return None

        def committed() -> SettleAnswer:
            self.settled([item], {fence.job_id: "completed"}, {})
            return SettleAnswer(Settled.NOW, "completed")

        return committed

    def release(self, fences: Sequence[Fence]) -> None:
        """Gives back, without a failure, what was claimed for somebody who has gone; repeated until it is done."""
        for each in fences:
            self._put(each, Outcome(Ending.RELEASED, begun=False))

    def expire(self, fence: Fence, message: str) -> None:
        """Ends an occurrence that was missed, or a job that has expired."""
        self._put(fence, Outcome(Ending.EXPIRED, message=message))

    def fail(self, fence: Fence, error: PgworkdError) -> None:
        """Fails an attempt whose row cannot be read."""
        said = f"its payload cannot be read: {error}"
        self._put(fence, Outcome(Ending.FAILED, message=said, error={"type": "unreadable", "message": said}))

    @property
    def waiting(self) -> int:
        """How many wait."""
        return self._loop.count

    async def run(self) -> None:
        """Settles until cancelled; callers that wait then get an error."""
        try:
            await self._loop.run()
        finally:
            for item in self._loop.abandoned():
                item.end(DatabaseUnavailable("the gateway stops"))

    def _put(self, fence: Fence, outcome: Outcome, call: _Call | None = None) -> _Item:
        item = _Item(fence, outcome, self._workers.attempt(fence), call)
        self._loop.put(item)
        return item

    # Called by the loop.

    def attempts(self, items: Sequence[_Item]) -> list[Attempt | None]:
        """What was claimed as each."""
        return [item.attempt for item in items]

    async def prepare(self, items: Sequence[_Item]) -> None:
        """Looks up those that were claimed through another gateway."""
        elsewhere = {item.job_id: item for item in items if item.attempt is None}
        if elsewhere:
            now = time.monotonic()
            for queue, age_s, claimed in await self._store.claimed([item.fence for item in elsewhere.values()]):
                item = elsewhere[claimed.id]
                attempt = Attempt(claimed, queue, item.fence.worker_id)
                attempt.started, attempt.start_counted = now - age_s, True  # there
                item.attempt = attempt

    async def unavailable(self, error: DatabaseUnavailable) -> None:
        """Does nothing: a gateway does not wait, and is never asked to."""

    def answered(self) -> None:
        """Does nothing: no outage is told here."""

    def flushed(self) -> None:
        """Does nothing: nobody waits for capacity."""

    def settled(self, items: Sequence[_Item], statuses: Statuses, before: Statuses) -> None:
        """Answers whoever waits for them."""
        ended = list[EndedAttempt]()
        for item in items:
            self._workers.ended(item.fence)
            if (status := statuses.get(item.job_id)) is not None:
                item.end(SettleAnswer(Settled.NOW, status))
                ended.append(EndedAttempt(item.attempt, item.outcome, status))
            else:
                item.end(_judged(item, before.get(item.job_id)))
        self._on_settled(ended)

    def postpone(self, items: Sequence[_Item], error: PgworkdError | None) -> None:
        """Tries what is locked again, and what nobody waits for; answers the others with the error."""
        found = error or DatabaseBusy("the job is locked by another transaction", sqlstate="55P03")
        locked = isinstance(found, DatabaseBusy) and found.locked
        for item in items:
            if item.call is None or (locked and time.monotonic() < item.call.deadline):
                self._loop.delay(item, LOCKED_CAP_S)
            else:
                item.end(found)

    def instead(self, item: _Item, error: DatabaseError) -> Outcome | None:
        """Stores nothing else: the sender learns why."""
        self.postpone([item], error)
        return None


def _judged(item: _Item, status: str | None) -> SettleAnswer | LeaseLost:
    """The answer for an attempt that does not run: it was settled before, in the same way or not."""
    if status is not None and status in STATUSES_AFTER[item.outcome.ending]:
        return SettleAnswer(Settled.BEFORE, status)
    said = "that attempt has ended" if status is None else f"the job is {status}"
    return LeaseLost(f"attempt {item.fence.attempt} of job {item.job_id} runs no more here: {said}")
