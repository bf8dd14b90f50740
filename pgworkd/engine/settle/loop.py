"""Settles in natural batches: while one flush is under way, the next one gathers.

Whoever has little to settle settles it at once; whoever has much settles by the thousand, without a timer.

A rejected flush is halved, and its halves again, until what cannot be stored is isolated: one job's data must not hold
up the others. An isolated one is retried without its effects on other rows (its batch, its dependents, the next of its
key), which maintenance then applies: one of those may be what is refused. A flush that met a lock is retried with SKIP
LOCKED. Who waits for the rest, a daemon for its database or a caller for an answer, is a matter of the `SettlePolicy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Generic, Protocol, TypeVar
from uuid import UUID

import anyio

from pgworkd.core.histogram import Histogram
from pgworkd.core.job import Ending, Outcome
from pgworkd.core.registration import token_of
from pgworkd.core.source import Occurrence, SettleSource
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.settle.delayed import Delayed
from pgworkd.engine.settle.flushes import FLUSH_BYTES, FLUSH_MAX, Flush, Flushes
from pgworkd.engine.settle.item import Item
from pgworkd.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable, OutcomeUnknown, PgworkdError

SKIP_S = 1.0
"""After a flush met a lock, flushes skip locked rows at once for this many seconds."""
LOST_MAX = 3
"""A flush during which the connection was lost this often may be the cause: it is halved."""

Ended = TypeVar("Ended", bound=Item)
Ended_ = TypeVar("Ended_", bound=Item, contravariant=True)
Statuses = Mapping[UUID, str]
_NOTHING: frozenset[UUID] = frozenset()
_FOLLOWED = (Ending.COMPLETED, Ending.FAILED)


class Planner(Protocol):
    """Computes occurrences of recurring jobs."""

    def following(self, attempt: Attempt) -> Occurrence | None:
        """The occurrence to insert when this attempt is settled."""

    async def missed(self, attempt: Attempt) -> str | None:
        """Why the occurrence of this attempt must be skipped; None: run it. Raises PgworkdError."""


class SettlePolicy(Protocol[Ended_]):
    """A policy of settling: who waits for outcomes, and what becomes of those that cannot be stored."""

    by_worker: bool
    """True if a call has attempts of one worker's registration only."""
    failures_spare: float
    """Failures in a row, beyond those it takes to isolate one job, after which the rest of a flush is postponed."""
    keeps: bool
    """True if outcomes are kept until the database answers; else they are postponed at once."""

    def attempts(self, items: Sequence[Ended_]) -> Sequence[Attempt | None]:
        """The claimed attempts of these items; None: not known."""

    async def prepare(self, items: Sequence[Ended_]) -> None:
        """Prepares items that are about to be settled. Raises PgworkdError."""

    async def unavailable(self, error: DatabaseUnavailable) -> None:
        """Waits, as the database does not answer: returns when it may be asked again."""

    def answered(self) -> None:
        """Notes that the database has answered."""

    def settled(self, items: Sequence[Ended_], statuses: Statuses, before: Statuses) -> None:
        """Takes items that have ended: with a new status, with one they had `before`, or, in neither, elsewhere."""

    def postpone(self, items: Sequence[Ended_], error: PgworkdError | None) -> None:
        """Takes items that cannot be settled now. `error` None: each of them is locked."""

    def instead(self, item: Ended_, error: DatabaseError) -> Outcome | None:
        """Another outcome for one that the database rejects; None: nothing, it has been seen to."""

    def flushed(self) -> None:
        """Notes that a flush is done."""


class SettleLoop(Generic[Ended]):
    """The only way out of `running` for attempts that this process has claimed, but for a transaction of the caller."""

    def __init__(
        self, source: SettleSource, planner: Planner, settle_s: Histogram, policy: SettlePolicy[Ended]
    ) -> None:
        """`settle_s` gets the duration of each call."""
        self._source, self._planner, self._settle_s, self._policy = source, planner, settle_s, policy
        self.waiting = Flushes[Ended]()
        """Items that wait for a flush."""
        self.delayed = Delayed[Ended]()
        """Items that wait for their retry."""
        self._flush_max = FLUSH_MAX
        self._skip_until = 0.0
        self._arrived = anyio.Event()

    def put(self, item: Ended) -> None:
        """Takes an attempt that has ended. Never blocks."""
        self.waiting.put(item)
        self.wake()

    def wake(self) -> None:
        """Notes that there is an attempt in `waiting`."""
        self._arrived.set()

    def delay(self, item: Ended, cap_s: float) -> float:
        """Settles an item later; in how many seconds, which double up to `cap_s`."""
        return self.delayed.put(item, cap_s)

    @property
    def count(self) -> int:
        """How many items wait, for a flush or for their retry."""
        return self.waiting.count + len(self.delayed)

    @property
    def bytes(self) -> int:
        """About how many bytes all items have that wait."""
        return self.waiting.bytes + self.delayed.bytes

    def abandoned(self) -> list[Ended]:
        """All items that wait; to be called when `run` has ended."""
        items = list[Ended]()
        while self.waiting.count:
            items += self.waiting.take(FLUSH_MAX)
        while len(self.delayed):
            items.append(self.delayed.pop())
        return items

    async def run(self) -> None:
        """Flushes until cancelled."""
        while True:
            await self._wait_for_items()
            await self.waiting.rest_of_burst(self._flush_max)
            await self._flush(self.waiting.take(self._flush_max))
            await self._flush(self._due())  # apart from the others, which must not fail with them
            if not self.waiting.count:
                self._arrived = anyio.Event()
            self._policy.flushed()

    async def _wait_for_items(self) -> None:
        """Waits until an outcome has come, or a retry is due."""
        while not self.waiting.count:
            if not len(self.delayed):
                await self._arrived.wait()
            elif (wait_s := self.delayed.wait_s) > 0:
                with anyio.move_on_after(wait_s):
                    await self._arrived.wait()
            else:
                return

    def _due(self) -> list[Ended]:
        """Delayed items whose retry is due, up to one flush."""
        due, due_bytes = list[Ended](), 0
        while len(due) < self._flush_max and (item := self.delayed.due()) is not None:
            if due and due_bytes + item.size > FLUSH_BYTES:
                break
            due.append(self.delayed.pop())
            due_bytes += item.size
        return due

    async def _flush(self, batch: Sequence[Ended]) -> None:
        """Settles items: those of each ending, and where it matters of each registration, in a call of their own."""
        groups: dict[tuple[Ending, UUID | None], list[Ended]] = {}
        by_worker = self._policy.by_worker
        last_ending, last_worker, group = None, None, list[Ended]()
        for item in batch if by_worker else self._first_of_each(batch):
            ending, worker_id = item.outcome.ending, item.worker_id
            if ending is not last_ending or worker_id is not last_worker:
                last_ending, last_worker = ending, worker_id
                group = groups.setdefault((ending, token_of(worker_id) if by_worker else None), [])
            group.append(item)
        for (ending, _), items in groups.items():
            if ending is Ending.SETTLED:
                self._policy.settled(items, dict.fromkeys((each.job_id for each in items), "completed"), {})
            else:
                await self._settle(ending, items, Flush(len(items).bit_length() + self._policy.failures_spare))

    def _first_of_each(self, batch: Sequence[Ended]) -> list[Ended]:
        """The first item of each job: a second one is judged after it."""
        first: dict[UUID, Ended] = {}
        for item in batch:
            if first.setdefault(item.job_id, item) is not item:
                self.put(item)
        return list(first.values())

    async def _settle(self, ending: Ending, items: Sequence[Ended], flush: Flush, *, deferred: bool = False) -> None:
        """Settles items of one ending: all, or each half, or postpones the rest when too many calls have failed."""
        if flush.error is not None and flush.failures > flush.failures_max:
            return self._policy.postpone(items, flush.error)
        try:
            statuses, locked, before = await self._execute(ending, items, deferred=deferred)
        except PgworkdError as error:
            flush.failures, flush.error = flush.failures + 1, error
            away = isinstance(error, DatabaseUnavailable) and not isinstance(error, DatabaseBusy)
            if isinstance(error, DatabaseBusy) and error.timed_out:
                self._flush_max = max(1, min(self._flush_max, len(items) // 2))
            if len(items) == 1 and not deferred and not isinstance(error, DatabaseUnavailable):
                await self._settle(ending, items, flush, deferred=True)
            elif len(items) == 1 and isinstance(error, DatabaseError):
                await self._rejected(items[0], error, flush)
            elif len(items) == 1 or (away and not self._policy.keeps):
                self._policy.postpone(items, error)
            else:
                half = len(items) // 2
                await self._settle(ending, items[:half], flush)
                await self._settle(ending, items[half:], flush)
        else:
            flush.failures = 0
            if len(items) >= self._flush_max:
                self._flush_max = min(FLUSH_MAX, 2 * self._flush_max)
            done = [item for item in items if item.job_id not in locked] if locked else items
            if done:
                self._policy.settled(done, statuses, before)
            if locked:
                self._policy.postpone([item for item in items if item.job_id in locked], None)

    async def _execute(
        self, ending: Ending, items: Sequence[Ended], *, deferred: bool
    ) -> tuple[Statuses, Set[UUID], Statuses]:
        """The new statuses, which jobs are locked, and the statuses of those that were settled before.

        Raises the database's errors; waits for a lost connection if the policy does.
        """
        lost = 0
        while True:
            skip = anyio.current_time() < self._skip_until
            began = anyio.current_time()
            try:
                await self._policy.prepare(items)
                following = self.following(items) if ending in _FOLLOWED else []
                statuses = await self._source.settle(ending, items, following, skip_locked=skip, deferred=deferred)
                self._settle_s.observe(anyio.current_time() - began)
                missing = []
                if len(statuses) < len(items):
                    missing = [item for item in items if item.job_id not in statuses]
                locked = await self._locked(missing) if skip and missing else _NOTHING
                unsure = [item.fence for item in missing if item.outcome_unknown and item.job_id not in locked]
                before = await self._source.settled(unsure) if unsure else {}
            except (DatabaseBusy, DatabaseError) as error:
                self._policy.answered()
                if skip or not (isinstance(error, DatabaseBusy) and error.locked):
                    raise
                self._skip_until = anyio.current_time() + SKIP_S
            except DatabaseUnavailable as error:
                if isinstance(error, OutcomeUnknown):
                    lost += 1
                    for item in items:
                        item.outcome_unknown = True
                if not self._policy.keeps:
                    raise
                await self._policy.unavailable(error)
                if lost >= LOST_MAX and len(items) > 1:
                    raise
            else:
                self._policy.answered()
                return statuses, locked, before

    async def _locked(self, missing: Sequence[Ended]) -> set[UUID]:
        """The jobs that were skipped: missing in the answer, and still running as these attempts."""
        locked = await self._source.running([item.fence for item in missing])
        if locked:
            self._skip_until = anyio.current_time() + SKIP_S
        return locked

    async def _rejected(self, item: Ended, error: DatabaseError, flush: Flush) -> None:
        """Stores something else for an outcome whose data the database rejects, if there is anything."""
        if (instead := self._policy.instead(item, error)) is not None:
            item.outcome = instead
            await self._settle(instead.ending, [item], flush)

    def following(self, items: Sequence[Ended]) -> list[Occurrence]:
        """The next occurrences of the attempts that have a schedule."""
        found = self._policy.attempts(items)
        attempts = [attempt for attempt in found if attempt is not None and attempt.claimed.schedule is not None]
        return [occurrence for attempt in attempts if (occurrence := self._planner.following(attempt)) is not None]
