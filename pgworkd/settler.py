"""Settling in natural batches: while one flush is on its way, the next gathers.

A quiet daemon settles each job at once; a busy one by the thousand, without a timer. What was put here is
kept until the database has taken it, through any outage; when too much waits, pools stop claiming.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol
from uuid import UUID

import anyio

from . import events
from .errors import DatabaseError, OutcomeUnknown, PgworkdError
from .events import Events
from .held import Held, Holdings
from .job import Ending, Outcome
from .outage import Outage
from .registration import token_of
from .schedule_store import Occurrence
from .store import Claims, FailedAttempt, Store

FLUSH_MAX = 1_000
CAPACITY = 10_000
FLUSH_BYTES = 1024 * 1024
"""A flush of more than one job has no more to store: a slow connection, or a server that compresses each result and
copies each payload to the history, would need longer for it than a statement may take."""
CAPACITY_BYTES = 32 * 1024 * 1024
"""When so much waits, no handler is called and no job claimed. What runs comes on top: slots x size."""
ABOUT_THE_DATA = ("22", "23", "54", "P0")
"""Classes of SQLSTATE that speak of what is stored, not of the server: data, constraint, limit, a trigger's RAISE."""

Item = tuple[Held, Outcome]
Statuses = dict[UUID, str] | str
"""What became of the items of a flush: one status for all, or each by job id; a missing one is not ours any more."""

Verb = Callable[["Settler", Sequence[Item]], Awaitable[Statuses]]


class Planner(Protocol):
    """Knows the next occurrence of a recurring job."""

    def following(self, held: Held) -> Occurrence | None:
        """The occurrence to insert when this one is settled."""

    async def missed(self, held: Held) -> str | None:
        """Why this occurrence is not to run but to be skipped; None: it is to run. Raises PgworkdError."""


class Claimer(Protocol):
    """A pool, as far as a settle can take its next claim along. An `Asked` is its own affair, but for the order."""

    def ask_along(self, ended: int, *, next_in_line: bool) -> Any:
        """An `Asked`, whose `answered` must follow; None: nothing to claim now.

        `ended`: so many of its queue are settled. `next_in_line`: that frees a serialize_key.
        """

    def answered(self, asked: Any, claimed: Claims | None) -> None:
        """What was claimed; None: the call failed, and nothing was."""

    @property
    def along_max(self) -> int:
        """A settle of more jobs than that goes alone."""


class Settler:
    """The only way out of `running` for what the daemon holds (but for `job.transaction()`)."""

    def __init__(
        self,
        store: Store,
        holdings: Holdings,
        events_: Events,
        planner: Planner,
        *,
        claimers: Mapping[str, Claimer],
        on_completed: Callable[[list[Held]], None],
        on_settled: Callable[[Held, Outcome, str | None], None],
        on_room: Callable[[], None],
    ) -> None:
        """`claimers`: by queue, whose claims may go along.

        `on_completed` hears of flushes that went as nearly all do, `on_settled` of every other item with the job's
        new status, or None when the attempt was not ours any more.
        """
        self._store = store
        self._holdings = holdings
        self._events = events_
        self._planner = planner
        self._claimers = claimers
        self._on_completed = on_completed
        self._on_settled = on_settled
        self._on_room = on_room
        self._waiting: deque[Item] = deque()
        self._waiting_bytes = 0
        self._arrived = anyio.Event()
        self._empty = anyio.Event()
        self._empty.set()
        self._outage = Outage("settler", events_)

    def put(self, held: Held, outcome: Outcome) -> None:
        """Takes over an ended attempt. Never blocks."""
        if not self._waiting:
            self._arrived.set()
            if self._empty.is_set():
                self._empty = anyio.Event()
        item = (held, outcome)
        self._waiting.append(item)
        self._waiting_bytes += _size(item)

    @property
    def room(self) -> int:
        """How many more may be put here; beyond that, claiming would only make the pile higher."""
        return 0 if self.full else CAPACITY - len(self._waiting)

    @property
    def full(self) -> bool:
        """True when there is no room."""
        return len(self._waiting) >= CAPACITY or self._waiting_bytes >= CAPACITY_BYTES

    @property
    def idle(self) -> bool:
        """True when everything put so far is settled."""
        return self._empty.is_set()

    async def drained(self) -> None:
        """Waits until everything put so far is settled."""
        await self._empty.wait()

    async def run(self) -> None:
        """Flushes until cancelled."""
        while True:
            await self._arrived.wait()
            was_full = self.full
            await self._flush(self._next_batch())
            if not self._waiting:
                self._arrived = anyio.Event()
                self._empty.set()
            if was_full and not self.full:
                self._on_room()

    def _next_batch(self) -> list[Item]:
        """What comes first, bounded in jobs and bytes, but at least one."""
        batch, batch_bytes = list[Item](), 0
        while self._waiting and len(batch) < FLUSH_MAX:
            size = _size(self._waiting[0])
            if batch and batch_bytes + size > FLUSH_BYTES:
                break
            batch.append(self._waiting.popleft())
            batch_bytes += size
        self._waiting_bytes -= batch_bytes
        return batch

    async def _flush(self, batch: Sequence[Item]) -> None:
        groups: dict[tuple[Ending, UUID | None], list[Item]] = {}
        for item in batch:
            groups.setdefault((item[1].ending, token_of(item[0].worker_id)), []).append(item)
        for (ending, _), items in groups.items():
            if ending is Ending.SETTLED:
                self._report(items, "completed")
                continue
            done = await self._complete_and_claim(items) if ending is Ending.COMPLETED else False
            if not done:
                unheard = done is None or any(held.unheard for held, _ in items)
                await self._settle(self._verbs[ending], items, unheard=unheard)

    async def _complete_and_claim(self, items: Sequence[Item]) -> bool | None:
        """Settles with a claim along, for a pool that wants one; False: not done, None: perhaps."""
        claimer = self._claimers.get(items[0][0].queue)
        if claimer is None or len(items) > claimer.along_max:
            return False
        if any(held.claimed.schedule is not None for held, _ in items):
            return False
        ended = sum(held.queue == items[0][0].queue for held, _ in items)
        asked = claimer.ask_along(ended, next_in_line=any(held.claimed.serialize_key for held, _ in items))
        if asked is None:
            return False
        if token_of(asked.order.worker_id) != token_of(_worker(items)):  # registered anew since these were claimed
            claimer.answered(asked, None)
            return False
        claimed = None
        try:
            won, claimed = await self._store.settle_and_claim(*_keys(items), [o.result for _, o in items], asked.order)
        except OutcomeUnknown:
            return None
        except PgworkdError:
            return False  # whatever it was, the two go on by themselves, and know what to do about it
        finally:
            claimer.answered(asked, claimed)
        self._report(items, "completed" if len(won) == len(items) else dict.fromkeys(won, "completed"))
        return True

    async def _settle(self, verb: Verb, items: Sequence[Item], *, unheard: bool = False) -> None:
        """Settles items of one ending, again and again until the database has answered.

        `unheard`: an earlier try, whose answer was lost, may have done it.
        """
        while True:
            try:
                statuses = await verb(self, items)
                if unheard and not isinstance(statuses, str):
                    # What is missing may be ours all the same: hooks that wait for a death must hear of it.
                    statuses = await self._store.settled(*_keys(items), _worker(items)) | statuses
            except PgworkdError as error:
                unheard = unheard or isinstance(error, OutcomeUnknown)
                if isinstance(error, DatabaseError) and error.sqlstate[:2] in ABOUT_THE_DATA:
                    await self._isolate(verb, items, error)
                    return
                # The schema is missing or the login refused, for now: nothing is thrown away for that.
                await self._outage.wait(error)
            else:
                self._outage.passed()
                self._report(items, statuses)
                return

    async def _isolate(self, verb: Verb, items: Sequence[Item], error: DatabaseError) -> None:
        """One item that the database refuses must not hold up the others: each is tried alone, the bad one fails."""
        if len(items) > 1:
            for item in items:
                await self._settle(verb, [item])
            return
        held, outcome = items[0]
        if outcome.ending is Ending.FAILED:
            # Even a plain failure is refused: someone has changed the table. The job stays running under our lease
            # and is given back as a stray; everything else goes on.
            self._holdings.remove(held)
            self._events.emit(events.SETTLE_REFUSED, **held.facts(), error=str(error))
            return
        message = f"the outcome {outcome.ending.value!r} could not be stored: {error.sqlstate or type(error).__name__}"
        refused = Outcome(
            Ending.FAILED, delay_s=60.0, message=message, error={"type": "unstorable", "message": message}
        )
        await self._settle(Settler._fail, [(held, refused)])

    def _report(self, items: Sequence[Item], statuses: Statuses) -> None:
        for held, _ in items:
            self._holdings.remove(held)
        if statuses == "completed":
            self._on_completed([held for held, _ in items])
            return
        latest: dict[UUID, int] = {}  # of two attempts of one job only the later can have been the running one
        for held, _ in items:
            latest[held.claimed.id] = max(held.claimed.attempt, latest.get(held.claimed.id, 0))
        for held, outcome in items:
            is_latest = held.claimed.attempt == latest[held.claimed.id]
            status = statuses if isinstance(statuses, str) else statuses.get(held.claimed.id) if is_latest else None
            if status is None:
                self._events.emit(events.JOB_STALE, **held.facts(), outcome=outcome.ending.value)
            self._on_settled(held, outcome, status)

    def _following(self, items: Sequence[Item]) -> list[Occurrence]:
        recurring = [held for held, _ in items if held.claimed.schedule is not None]
        return [occurrence for held in recurring if (occurrence := self._planner.following(held)) is not None]

    # One method per ending: items in, what became of them out.

    async def _complete(self, items: Sequence[Item]) -> Statuses:
        ids, attempts = _keys(items)
        results, following = [o.result for _, o in items], self._following(items)
        won = await self._store.settle_completed(ids, attempts, results, following, _worker(items))
        return "completed" if len(won) == len(items) else dict.fromkeys(won, "completed")

    async def _fail(self, items: Sequence[Item]) -> Statuses:
        failed = [
            FailedAttempt(
                held.claimed.id,
                held.claimed.attempt,
                outcome.delay_s or 0.0,
                outcome.permanent,
                outcome.message or "",
                json.dumps(outcome.error),
            )
            for held, outcome in items
        ]
        return await self._store.settle_failed(failed, self._following(items), _worker(items))

    async def _release(self, items: Sequence[Item]) -> Statuses:
        ids, attempts = _keys(items)
        delays, messages = [o.delay_s for _, o in items], [o.message for _, o in items]
        won = await self._store.settle_released(ids, attempts, delays, messages, _worker(items))
        return dict.fromkeys(won, "pending")

    async def _cancel(self, items: Sequence[Item]) -> Statuses:
        ids, attempts = _keys(items)
        statuses, messages = [o.ending.value for _, o in items], [o.message for _, o in items]
        won = await self._store.settle_ended(ids, attempts, statuses, messages, _worker(items))
        ended = {held.claimed.id: outcome.ending.value for held, outcome in items}
        return {job_id: ended[job_id] for job_id in won}

    _verbs: ClassVar[dict[Ending, Verb]] = {
        Ending.COMPLETED: _complete,
        Ending.FAILED: _fail,
        Ending.RELEASED: _release,
        Ending.CANCELLED: _cancel,
        Ending.EXPIRED: _cancel,
    }


def _size(item: Item) -> int:
    """About how many bytes travel or are copied when it is settled, most of which have been kept here since it ran."""
    held, outcome = item
    size = len(held.claimed.payload or "") + len(outcome.result or "")
    return size if outcome.error is None else size + len(str(outcome.error.get("traceback", "")))


def _keys(items: Sequence[Item]) -> tuple[list[Any], list[int]]:
    return [held.claimed.id for held, _ in items], [held.claimed.attempt for held, _ in items]


def _worker(items: Sequence[Item]) -> int | None:
    """Under whose id these were claimed: those of a flush have one in common."""
    return items[0][0].worker_id
