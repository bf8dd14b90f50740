"""Settles of remote workers in natural batches: while one statement is under way, the next one gathers.

Unlike a daemon's own outcomes these are kept by the worker until it has an answer: so an outage is answered with an
error at once, and the worker sends the same again. A rejected batch is halved until what cannot be stored is alone; a
locked row is tried again for a while, and holds up no other.
"""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from pgworkd.database.remote_store import Held, RemoteStore
from pgworkd.database.schedule_store import Occurrence
from pgworkd.database.store import FailedAttempt
from pgworkd.engine.attempts import Attempt, began_ago_s
from pgworkd.engine.settle.settler import Planner
from pgworkd.engine.tallies import Tallies
from pgworkd.errors import DatabaseBusy, DatabaseError, DatabaseUnavailable, LeaseLost, PgworkdError
from pgworkd.remote.attempts import Attempts
from pgworkd.remote.workers import RemoteWorkers
from pgworkd.words.job import Ending, Outcome

FLUSH_MAX, FLUSH_BYTES = 1_000, 1024 * 1024
SKIP_S = 1.0
"""After a flush met a lock, flushes skip locked rows at once for this many seconds."""
LOCKED_S = 5.0
"""A locked row is tried again for this long; then the worker is told to do so."""
LOCKED_PAUSE_S = 0.25
OWN_PAUSE_S = 1.0
"""Releases of our own are repeated after this pause, whatever the error."""
_Attempts = Mapping[UUID, Attempt]
_STATUSES = {
    Ending.COMPLETED: {"completed"},
    Ending.FAILED: {"failed", "dead", "cancelled"},
    Ending.RELEASED: {"pending", "blocked", "cancelled"},
    Ending.CANCELLED: {"cancelled"},
    Ending.EXPIRED: {"expired"},
}


class Settled(enum.Enum):
    """What a settle did."""

    NOW = "now"
    BEFORE = "before"
    """The same had been settled already: a repetition."""


class Ended(NamedTuple):
    """An attempt that was settled. `attempt`: None if nothing is known of it; `status`: the job's new one."""

    attempt: Attempt | None
    outcome: Outcome
    status: str


class Answer(NamedTuple):
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
    """One settle. `call`: None if nobody waits for it."""

    __slots__ = ("answer", "bytes", "call", "held", "outcome")

    def __init__(self, held: Held, outcome: Outcome, call: _Call | None = None) -> None:
        self.held, self.outcome, self.call = held, outcome, call
        self.answer: Answer | PgworkdError | None = None
        self.bytes = len(outcome.result or "") + (len(json.dumps(outcome.error)) if outcome.error else 0)

    def end(self, answer: Answer | PgworkdError) -> None:
        """That became of it."""
        self.answer = answer
        if self.call is not None:
            self.call.left -= 1
            if self.call.left == 0:
                self.call.answered.set()


class Settles:
    """Sends them, each fenced by its own worker."""

    def __init__(
        self,
        store: RemoteStore,
        workers: RemoteWorkers,
        planner: Planner,
        tallies: Tallies,
        on_settled: Callable[[Sequence[Ended]], None],
    ) -> None:
        """`on_settled` gets those of each flush; `planner` knows which occurrences follow them."""
        self._store, self._workers, self._planner = store, workers, planner
        self._attempts = Attempts(store, workers)
        self._tallies, self._on_settled = tallies, on_settled
        self._waiting: list[_Item] = []
        self._arrived = anyio.Event()
        self._skip_until = 0.0
        self._tasks: TaskGroup | None = None

    async def settle(self, held: Held, outcome: Outcome, patience_s: float = LOCKED_S) -> Answer:
        """Settles one attempt; a locked row is tried again for `patience_s` seconds.

        Raises LeaseLost: it runs no more, and was not settled so; or the database's errors.
        """
        (answer,) = await self.settle_many([(held, outcome)], patience_s)
        if isinstance(answer, PgworkdError):
            raise answer
        return answer

    async def settle_many(
        self, settles: Sequence[tuple[Held, Outcome]], patience_s: float = LOCKED_S
    ) -> list[Answer | PgworkdError]:
        """The same for many at once, in their order, each for itself: its answer, or its error."""
        call = _Call(len(settles), patience_s)
        items = [_Item(held, outcome, call) for held, outcome in settles]
        if items:
            self._put(*items)
            await call.answered.wait()
        return [item.answer for item in items if item.answer is not None]

    async def complete_on(self, connection: Any, held: Held, result: str | None) -> Callable[[], Answer] | None:
        """Completes a job in the transaction of a connection of the driver; None if the attempt runs no more.

        What it returns is to be called when the transaction has committed.
        """
        attempts = await self._attempts.of([held])
        if not await self._store.complete_on(connection, held, result, self._following(attempts)):
            return None

        def committed() -> Answer:
            self._workers.ended(held)
            self._on_settled([Ended(attempts.get(held.job_id), Outcome(Ending.COMPLETED), "completed")])
            return Answer(Settled.NOW, "completed")

        return committed

    def release(self, held: Sequence[Held]) -> None:
        """Gives back, without a failure, what was claimed for somebody who has gone; repeated until it is done."""
        for each in held:
            self._put(_Item(each, Outcome(Ending.RELEASED, begun=False)))

    def expire(self, held: Held, message: str) -> None:
        """Ends an occurrence that was missed, or a job that has expired."""
        self._put(_Item(held, Outcome(Ending.EXPIRED, message=message)))

    def fail(self, held: Held, error: PgworkdError) -> None:
        """Fails an attempt whose row cannot be read."""
        said = f"its payload cannot be read: {error}"
        self._put(_Item(held, Outcome(Ending.FAILED, message=said, error={"type": "unreadable", "message": said})))

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def run(self) -> None:
        """Until cancelled; those that wait then are answered with an error."""
        try:
            async with anyio.create_task_group() as self._tasks:
                while True:
                    await self._arrived.wait()
                    await anyio.lowlevel.checkpoint()
                    await self._flush(self._take())
                    if not self._waiting:
                        self._arrived = anyio.Event()
        finally:
            for item in self._waiting:
                item.end(DatabaseUnavailable("the gateway stops"))

    def _put(self, *items: _Item) -> None:
        self._waiting += items
        self._arrived.set()

    def _take(self) -> list[_Item]:
        """The next flush: bounded in rows and bytes, of at least one."""
        size = count = 0
        for item in self._waiting[:FLUSH_MAX]:
            if count and size + item.bytes > FLUSH_BYTES:
                break
            size, count = size + item.bytes, count + 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _flush(self, batch: Sequence[_Item]) -> None:
        groups: dict[Ending, dict[UUID, _Item]] = {}
        for item in batch:
            group = groups.setdefault(item.outcome.ending, {})
            if group.setdefault(item.held.job_id, item) is not item:
                self._put(item)  # a second one for the job: it is judged after the first
        for ending, items in groups.items():
            await self._settle(ending, list(items.values()))

    async def _settle(self, ending: Ending, items: Sequence[_Item], *, deferred: bool = False) -> None:
        """Settles items of one ending: all, or each half; one alone at last without its effects, see `Settler`."""
        skip = anyio.current_time() < self._skip_until
        began = anyio.current_time()
        try:
            attempts = await self._attempts.of(_held(items))
            statuses = await self._verbs[ending](self, items, attempts, skip_locked=skip, deferred=deferred)
            self._tallies.settle_s.observe(anyio.current_time() - began)
            missing = [item.held for item in items if item.held.job_id not in statuses]
            locked = await self._store.running(missing) if missing else set()
            before = await self._store.settled([h for h in missing if h.job_id not in locked]) if missing else {}
        except PgworkdError as error:
            if isinstance(error, DatabaseBusy) and error.locked and not skip:
                self._skip_until = anyio.current_time() + SKIP_S
                await self._settle(ending, items, deferred=deferred)
            elif len(items) == 1 and not deferred and not isinstance(error, DatabaseUnavailable):
                await self._settle(ending, items, deferred=True)
            elif len(items) > 1 and isinstance(error, DatabaseBusy | DatabaseError):
                await self._settle(ending, items[: len(items) // 2])
                await self._settle(ending, items[len(items) // 2 :])
            else:
                for item in items:
                    self._failed(item, error)
            return
        won = [item for item in items if item.held.job_id in statuses]
        for item in won:
            self._workers.ended(item.held)
            item.end(Answer(Settled.NOW, statuses[item.held.job_id]))
        self._on_settled(
            [Ended(attempts.get(i.held.job_id), i.outcome, statuses[i.held.job_id]) for i in won],
        )
        for item in items if missing else ():
            job_id = item.held.job_id
            if job_id in locked:
                self._failed(item, DatabaseBusy("the job is locked by another transaction", sqlstate="55P03"))
            elif job_id not in statuses:
                self._judge(item, before.get(job_id))

    def _judge(self, item: _Item, status: str | None) -> None:
        """The attempt does not run: it was settled before, in the same way or not."""
        self._workers.ended(item.held)
        if status is not None and status in _STATUSES[item.outcome.ending]:
            item.end(Answer(Settled.BEFORE, status))
            return
        said = "that attempt has ended" if status is None else f"the job is {status}"
        item.end(LeaseLost(f"attempt {item.held.attempt} of job {item.held.job_id} runs no more here: {said}"))

    def _failed(self, item: _Item, error: PgworkdError) -> None:
        locked = isinstance(error, DatabaseBusy) and error.locked
        if item.call is None or (locked and time.monotonic() < item.call.deadline):
            if self._tasks is not None:
                self._tasks.start_soon(self._again, item, LOCKED_PAUSE_S if locked else OWN_PAUSE_S)
        else:
            item.end(error)

    async def _again(self, item: _Item, pause_s: float) -> None:
        try:
            await anyio.sleep(pause_s)
        finally:
            self._put(item)

    def _following(self, attempts: _Attempts) -> list[Occurrence]:
        recurring = [attempt for attempt in attempts.values() if attempt.claimed.schedule is not None]
        return [occurrence for attempt in recurring if (occurrence := self._planner.following(attempt)) is not None]

    # One method per ending: items and their attempts in, new statuses out.

    async def _complete(self, items: Sequence[_Item], attempts: _Attempts, **how: bool) -> dict[UUID, str]:
        results, following = [item.outcome.result for item in items], self._following(attempts)
        began = began_ago_s([attempts.get(item.held.job_id) for item in items])
        won = await self._store.settle_completed(_held(items), results, following, began, **how)
        return dict.fromkeys(won, "completed")

    async def _fail(self, items: Sequence[_Item], attempts: _Attempts, **how: bool) -> dict[UUID, str]:
        failed = [
            FailedAttempt(
                *(item.held.job_id, item.held.attempt, item.outcome.delay_s, item.outcome.permanent),
                *(item.outcome.message or "", json.dumps(item.outcome.error)),
            )
            for item in items
        ]
        return await self._store.settle_failed(_held(items), failed, self._following(attempts), **how)

    async def _release(self, items: Sequence[_Item], _: _Attempts, **how: bool) -> dict[UUID, str]:
        delays, messages = [i.outcome.delay_s for i in items], [i.outcome.message for i in items]
        begun = [item.outcome.begun for item in items]
        won = await self._store.settle_released(_held(items), delays, messages, begun, **how)
        return dict.fromkeys(won, "pending")

    async def _end(self, items: Sequence[_Item], _: _Attempts, **how: bool) -> dict[UUID, str]:
        statuses = [item.outcome.ending.value for item in items]
        messages = [item.outcome.message for item in items]
        won = await self._store.settle_ended(_held(items), statuses, messages, **how)
        ended = {item.held.job_id: item.outcome.ending.value for item in items}
        return {job_id: ended[job_id] for job_id in won}

    _verbs: dict[Ending, Callable[..., Awaitable[dict[UUID, str]]]] = {  # noqa: RUF012
        Ending.COMPLETED: _complete,
        Ending.FAILED: _fail,
        Ending.RELEASED: _release,
        Ending.CANCELLED: _end,
        Ending.EXPIRED: _end,
    }


def _held(items: Sequence[_Item]) -> list[Held]:
    return [item.held for item in items]
