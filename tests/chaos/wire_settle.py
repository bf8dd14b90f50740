"""Every outcome of an attempt, through the settler, for the sweep."""

from __future__ import annotations

from typing import ClassVar

import anyio

from pgworkd.core.job import Ending, Outcome
from pgworkd.engine.counters import Counters
from pgworkd.engine.life.recurring import Recurring
from pgworkd.engine.settle.settler import Settler
from pgworkd.engine.shared import Shared
from tests.chaos.wire_engine import Engine, drop_schedule, occurrences_differ, put_schedule
from tests.chaos.wire_kit import Told, differs, rows_of

FAILURE = {"type": "ValueError", "message": "no", "traceback": "", "worker": "w"}


class Settle(Engine):
    """A settle through the settler, which retries by itself and must know the result in the end."""

    name = "settle: completed"
    cuts_min = (3, 4)
    outcome: ClassVar[Outcome] = Outcome(Ending.COMPLETED)
    becomes: ClassVar[str] = "completed"
    failures: ClassVar[int] = 0
    cold: ClassVar[bool] = False
    """Whether the connection is yet to be opened."""

    async def prepare(self) -> None:
        await super().prepare()
        self.held = await self.claim()
        self.recurring = Recurring(self.scene.aside, self.events)
        if not self.cold:
            await self.store.settle(Ending.COMPLETED, [])

    async def attempt(self) -> Told:
        self.said: list[str | None] = []
        settler = Settler(
            self.store,
            Shared(self.in_flight, self.events, Counters(self.events)),
            self.recurring,
            on_completed=lambda batch: self.said.extend("completed" for _ in batch),
            on_settled=lambda _held, _outcome, status: self.said.append(status),
            on_capacity=lambda: None,
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(settler.run)
            settler.put(self.held, self.outcome)
            await settler.drained()
            tasks.cancel_scope.cancel()
        return "done" if self.said == [self.becomes] else "unknown"

    async def done(self) -> bool:
        return await rows_of(self.db, self.job) == [(self.becomes, 1, self.failures)]

    async def carry_on(self) -> None:
        if self.becomes in ("failed", "pending"):
            await self.run_again()

    async def faults(self) -> list[str]:
        ends = [("completed", 2, self.failures)] if self.becomes in ("failed", "pending") else None
        return [
            *differs("what the daemon was told", self.said, [self.becomes]),
            *differs("rows", await rows_of(self.db, self.job), ends or [(self.becomes, 1, self.failures)]),
            *differs("jobs in our hands", len(self.in_flight), 0),
        ]


class SettleCold(Settle):
    """The same, starting with the connection itself."""

    name = "settle: completed, on a new connection"
    cuts_min = (8, 15)
    cold = True


class Fail(Settle):
    """Counts one failure, and the retry runs."""

    name = "settle: failed, to be retried"
    outcome = Outcome(Ending.FAILED, delay_s=0.0, message="no", error=FAILURE)
    becomes = "failed"
    failures = 1


class Die(Settle):
    """The job is dead, and the on_dead hooks are called."""

    name = "settle: failed for good"
    outcome = Outcome(Ending.FAILED, permanent=True, message="no", error=FAILURE)
    becomes = "dead"
    failures = 1


class Release(Settle):
    """The job is released without counting a failure."""

    name = "settle: given back"
    outcome = Outcome(Ending.RELEASED, delay_s=0.0)
    becomes = "pending"


class Cancel(Settle):
    """The job is cancelled on request."""

    name = "settle: cancelled"
    outcome = Outcome(Ending.CANCELLED, message="on request")
    becomes = "cancelled"


class SettleOccurrence(Settle):
    """An occurrence, whose successor is inserted with its completion."""

    name = "settle: an occurrence, with the next one"

    async def prepare(self) -> None:
        self.worker_id = await self.scene.aside.register("w", 1, "v", 30)
        await put_schedule(self.scene.aside, self.queue)
        self.recurring = Recurring(self.scene.aside, self.events)
        await self.recurring.refresh()
        sql = "UPDATE pgworkd.jobs SET run_at = pgworkd.clock() WHERE schedule = $1 RETURNING id"
        self.job = await self.db.fetchval(sql, self.queue)
        self.held = await self.claim()
        await self.store.settle(Ending.COMPLETED, [])

    async def faults(self) -> list[str]:
        return [*await super().faults(), *await occurrences_differ(self)]

    async def close(self) -> None:
        await super().close()
        await drop_schedule(self)
