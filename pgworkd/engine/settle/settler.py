"""Settles in natural batches: while one flush is under way, the next one gathers.

A quiet daemon settles each job at once; a busy one settles by the thousand, without a timer. An outcome is kept until
the database has stored it, through any outage; when too many wait, pools stop claiming.

A lost connection is waited for. A rejected flush is halved, and its halves again, until what cannot be stored is
isolated: one job's data must not hold up the others. An isolated one is retried without its effects on other rows (its
batch, its dependents, the next of its key), which maintenance then applies: one of those may be what is refused. A
flush that met a lock is retried with SKIP LOCKED. What is locked, or cannot be settled for now, stays in flight and is
retried after a delay of its own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Protocol
from uuid import UUID

import anyio

from pgworkd.database.reconnect import Outage
from pgworkd.database.schedule_store import Occurrence
from pgworkd.database.store import FailedAttempt, Store
from pgworkd.engine.attempts import Attempt, InFlight, began_ago_s
from pgworkd.engine.settle.delayed import Delayed, Item, fallback, is_last_resort, keys_of, size_of, worker_of
from pgworkd.engine.settle.flushes import FLUSH_BYTES, FLUSH_MAX, Flush, Flushes
from pgworkd.engine.tallies import Tallies
from pgworkd.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable, OutcomeUnknown, PgworkdError
from pgworkd.words import events
from pgworkd.words.events import Events
from pgworkd.words.job import Ending, Outcome
from pgworkd.words.registration import token_of

CAPACITY = 10_000
CAPACITY_BYTES = 32 * 1024 * 1024
"""When this much waits, no handler is called and no job claimed. What runs comes on top: slots x size."""
SKIP_S = 1.0
"""After a flush met a lock, flushes skip locked rows at once for this many seconds."""
FAILURES_SPARE = 2
"""Failures in a row, beyond those it takes to isolate one job, after which the rest of a flush is delayed."""
LOST_MAX = 3
"""A flush during which the connection was lost this often may be the cause: it is halved."""

Statuses = dict[UUID, str] | str
"""New statuses after a flush: one for all, or each by job id; a missing job is not ours any more."""

Verb = Callable[["Settler", Sequence[Item]], Awaitable[Statuses]]


class Planner(Protocol):
    """Computes occurrences of recurring jobs."""

    def following(self, attempt: Attempt) -> Occurrence | None:
        """The occurrence to insert when this attempt is settled."""

    async def missed(self, attempt: Attempt) -> str | None:
        """Why this occurrence must be skipped; None: run it. Raises PgworkdError."""


class Settler:
    """The only way out of `running` for attempts in flight (except `job.transaction()`)."""

    def __init__(
        self,
        store: Store,
        in_flight: InFlight,
        events_: Events,
        planner: Planner,
        tallies: Tallies,
        *,
        on_completed: Callable[[list[Attempt]], None],
        on_settled: Callable[[Attempt, Outcome, str | None], None],
        on_capacity: Callable[[], None],
    ) -> None:
        """`on_completed` gets flushes in which all were completed; `on_settled` gets every other attempt, with the
        job's new status, or None when the attempt was not ours any more; `on_capacity`: there is capacity again.
        """
        self._store = store
        self._in_flight = in_flight
        self._events = events_
        self._planner = planner
        self._settle_s = tallies.settle_s
        self._on_completed = on_completed
        self._on_settled = on_settled
        self._on_capacity = on_capacity
        self.full = False
        """True: call no handler and claim no job."""
        self._waiting = Flushes()
        self._delayed = Delayed()
        self._delayed_bytes = 0
        self._flush_max = FLUSH_MAX
        self._how: dict[str, bool] = {}
        self._skip_until = 0.0
        self._arrived = anyio.Event()
        self._empty = anyio.Event()
        self._empty.set()
        self._outage = Outage("settler", events_)

    def put(self, attempt: Attempt, outcome: Outcome) -> None:
        """Takes an attempt that has ended. Never blocks."""
        waiting = self._waiting
        if not waiting.count:
            self._arrived.set()
            if self._empty.is_set():
                self._empty = anyio.Event()
        waiting.put((attempt, outcome))
        if waiting.count >= CAPACITY or waiting.bytes >= CAPACITY_BYTES:
            self.full = True

    @property
    def capacity(self) -> int:
        """How many more outcomes it takes; beyond that, claiming would only add to the backlog."""
        return 0 if self.full else CAPACITY - self._waiting.count - len(self._delayed)

    def _update_full(self) -> None:
        was_full = self.full
        size = self._waiting.bytes + self._delayed_bytes
        self.full = self._waiting.count + len(self._delayed) >= CAPACITY or size >= CAPACITY_BYTES
        if was_full and not self.full:
            self._on_capacity()

    async def drained(self) -> None:
        """Waits until everything is settled."""
        await self._empty.wait()

    async def run(self) -> None:
        """Flushes until cancelled."""
        while True:
            await self._wait_for_items()
            await self._waiting.rest_of_burst(self._flush_max)
            await self._flush(self._waiting.take(self._flush_max))
            await self._flush(self._due())  # apart from the others, which must not fail with them
            if not self._waiting.count:
                self._arrived = anyio.Event()
                if not len(self._delayed):
                    self._empty.set()
            self._update_full()

    async def _wait_for_items(self) -> None:
        """Waits until an outcome has come, or a retry is due."""
        while not self._waiting.count:
            if not len(self._delayed):
                await self._arrived.wait()
            elif (wait_s := self._delayed.wait_s) > 0:
                with anyio.move_on_after(wait_s):
                    await self._arrived.wait()
            else:
                return

    def _due(self) -> list[Item]:
        """Delayed items whose retry is due, up to one flush."""
        due, due_bytes = list[Item](), 0
        while len(due) < self._flush_max and (item := self._delayed.due()) is not None:
            size = size_of(item)
            if due and due_bytes + size > FLUSH_BYTES:
                break
            due.append(self._delayed.pop())
            due_bytes += size
        self._delayed_bytes -= due_bytes
        return due

    def _delay(self, items: Sequence[Item], error: PgworkdError | None) -> None:
        """Retries these later; they stay in flight. `error` None: each of them is locked."""
        if not items:
            return
        reported = len(self._delayed) > 0
        locked = error is None or (isinstance(error, DatabaseBusy) and error.locked)
        self._delayed_bytes += sum(map(size_of, items))
        delay_s = min([self._delayed.put(item, locked=locked) for item in items])
        if not reported:
            text = "locked by another transaction" if error is None else str(error)
            self._events.emit(events.OUTCOMES_DELAYED, count=len(items), error=text, retry_in_s=round(delay_s, 3))

    async def _flush(self, batch: Sequence[Item]) -> None:
        """Settles items: those of each ending, and of each registration of this worker, in a call of their own."""
        groups: dict[tuple[Ending, UUID | None], list[Item]] = {}
        last_ending, last_worker, group = None, None, list[Item]()
        for item in batch:
            ending, worker_id = item[1].ending, item[0].worker_id
            if ending is not last_ending or worker_id is not last_worker:
                last_ending, last_worker = ending, worker_id
                group = groups.setdefault((ending, token_of(worker_id)), [])
            group.append(item)
        for (ending, _), items in groups.items():
            if ending is Ending.SETTLED:
                self._report(items, "completed")
            elif ending is Ending.HANDED_OVER:
                self._let_go(items)
            else:
                await self._settle(ending, items, Flush(len(items).bit_length() + FAILURES_SPARE))

    async def _settle(self, ending: Ending, items: Sequence[Item], flush: Flush, *, deferred: bool = False) -> None:
        """Settles items of one ending: all, or each half, or delays the rest when too many calls have failed."""
        if flush.error is not None and flush.failures > flush.failures_max:
            return self._delay(items, flush.error)
        try:
            statuses, locked = await self._execute(ending, items, deferred=deferred)
        except PgworkdError as error:
            flush.failures, flush.error = flush.failures + 1, error
            if isinstance(error, DatabaseBusy) and error.timed_out:
                self._flush_max = max(1, min(self._flush_max, len(items) // 2))
            if len(items) == 1 and not deferred and not isinstance(error, DatabaseUnavailable):
                await self._settle(ending, items, flush, deferred=True)
            elif len(items) == 1 and isinstance(error, DatabaseError):
                await self._rejected(items[0], error, flush)
            elif len(items) == 1:
                self._delay(items, error)
            else:
                half = len(items) // 2
                await self._settle(ending, items[:half], flush)
                await self._settle(ending, items[half:], flush)
        else:
            flush.failures = 0
            if len(items) >= self._flush_max:
                self._flush_max = min(FLUSH_MAX, 2 * self._flush_max)
            self._report([item for item in items if item[0].claimed.id not in locked] if locked else items, statuses)
            self._delay([item for item in items if item[0].claimed.id in locked], None)

    async def _execute(self, ending: Ending, items: Sequence[Item], *, deferred: bool) -> tuple[Statuses, set[UUID]]:
        """The new statuses, and which jobs are locked. Waits for a lost connection; raises the database's errors."""
        verb, lost = self._verbs[ending], 0
        while True:
            skip = anyio.current_time() < self._skip_until
            self._how = {name: True for name, on in (("skip_locked", skip), ("deferred", deferred)) if on}
            began = anyio.current_time()
            try:
                statuses = await verb(self, items)
                self._settle_s.observe(anyio.current_time() - began)
                locked: set[UUID] = set()
                if not isinstance(statuses, str):
                    locked = await self._locked(items, statuses)
                    if any(attempt.outcome_unknown for attempt, _ in items):
                        # A missing one may have been settled by the lost call: `on_dead` hooks depend on its status.
                        statuses = await self._store.settled(*keys_of(items), worker_of(items)) | statuses
            except (DatabaseBusy, DatabaseError) as error:
                self._outage.passed()
                if skip or not (isinstance(error, DatabaseBusy) and error.locked):
                    raise
                self._skip_until = anyio.current_time() + SKIP_S
            except DatabaseUnavailable as error:
                if isinstance(error, OutcomeUnknown):
                    lost += 1
                    for attempt, _ in items:
                        attempt.outcome_unknown = True
                await self._outage.wait(error)
                if lost >= LOST_MAX and len(items) > 1:
                    raise
            else:
                self._outage.passed()
                return statuses, locked

    async def _locked(self, items: Sequence[Item], statuses: dict[UUID, str]) -> set[UUID]:
        """The skipped ones: missing in the answer, and still running as these attempts."""
        missing = [attempt.claimed for attempt, _ in items if attempt.claimed.id not in statuses]
        if not missing or not self._how.get("skip_locked"):
            return set()
        locked = await self._store.still_running(
            [job.id for job in missing], [job.attempt for job in missing], worker_of(items)
        )
        if locked:
            self._skip_until = anyio.current_time() + SKIP_S
        return locked

    async def _rejected(self, item: Item, error: DatabaseError, flush: Flush) -> None:
        """Stores a fallback for an outcome whose data the database rejects: a failure with a plain text, or dead.

        If even that is rejected, the table has been altered: the attempt stays in flight, so that it runs only once.
        """
        attempt, outcome = item
        if is_last_resort(outcome):
            if attempt.delays == 0:
                self._events.emit(events.OUTCOME_REJECTED, **attempt.facts(), error=str(error))
            self._delay([item], error)
            return
        await self._settle(Ending.FAILED, [(attempt, fallback(outcome, error.sqlstate))], flush)

    def _let_go(self, items: Sequence[Item]) -> None:
        self._in_flight.remove(attempt for attempt, _ in items)
        for attempt, _ in items:
            self._events.emit(events.JOB_HANDED_OVER, **attempt.facts())

    def _report(self, items: Sequence[Item], statuses: Statuses) -> None:
        attempts = [attempt for attempt, _ in items]
        self._in_flight.remove(attempts)
        if statuses == "completed":
            self._on_completed(attempts)
            return
        latest: dict[UUID, int] = {}  # of two attempts of one job only the later one can have been running
        for attempt, _ in items:
            latest[attempt.claimed.id] = max(attempt.claimed.attempt, latest.get(attempt.claimed.id, 0))
        for attempt, outcome in items:
            is_latest = attempt.claimed.attempt == latest[attempt.claimed.id]
            status = statuses if isinstance(statuses, str) else statuses.get(attempt.claimed.id) if is_latest else None
            if status is None:
                self._events.emit(events.JOB_STALE, **attempt.facts(), outcome=outcome.ending.value)
            self._on_settled(attempt, outcome, status)

    def _following(self, items: Sequence[Item]) -> list[Occurrence]:
        recurring = [attempt for attempt, _ in items if attempt.claimed.schedule is not None]
        return [occurrence for attempt in recurring if (occurrence := self._planner.following(attempt)) is not None]

    # One method per ending: items in, new statuses out.

    async def _complete(self, items: Sequence[Item]) -> Statuses:
        ids, attempts = keys_of(items)
        results, following = [o.result for _, o in items], self._following(items)
        began = began_ago_s([attempt for attempt, _ in items])
        won = await self._store.settle_completed(
            ids, attempts, results, following, worker_of(items), began, **self._how
        )
        return "completed" if len(won) == len(items) else dict.fromkeys(won, "completed")

    async def _fail(self, items: Sequence[Item]) -> Statuses:
        failed = [
            FailedAttempt(
                attempt.claimed.id,
                attempt.claimed.attempt,
                outcome.delay_s or 0.0,
                outcome.permanent,
                outcome.message or "",
                json.dumps(outcome.error),
            )
            for attempt, outcome in items
        ]
        return await self._store.settle_failed(failed, self._following(items), worker_of(items), **self._how)

    async def _release(self, items: Sequence[Item]) -> Statuses:
        ids, attempts = keys_of(items)
        delays = [o.delay_s for _, o in items]
        messages = [o.message for _, o in items]
        begun = [attempt.started is not None for attempt, _ in items]
        won = await self._store.settle_released(ids, attempts, delays, messages, worker_of(items), begun, **self._how)
        return dict.fromkeys(won, "pending")

    async def _cancel(self, items: Sequence[Item]) -> Statuses:
        ids, attempts = keys_of(items)
        statuses = [o.ending.value for _, o in items]
        messages = [o.message for _, o in items]
        won = await self._store.settle_ended(ids, attempts, statuses, messages, worker_of(items), **self._how)
        ended = {attempt.claimed.id: outcome.ending.value for attempt, outcome in items}
        return {job_id: ended[job_id] for job_id in won}

    _verbs: ClassVar[dict[Ending, Verb]] = {
        Ending.COMPLETED: _complete,
        Ending.FAILED: _fail,
        Ending.RELEASED: _release,
        Ending.CANCELLED: _cancel,
        Ending.EXPIRED: _cancel,
    }
