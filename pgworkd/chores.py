"""What any daemon does now and then for all: rescue, expire, unblock, restore schedules, forget.

Each chore is safe to run at any time in any number of daemons; the database lets one at a time do it. A
chore's body returns when it is next due.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import anyio

from . import events
from .errors import DatabaseUnavailable, PgworkdError
from .events import Events
from .held import Holdings
from .outage import Outage
from .recurring import Recurring
from .store import Rescued, Store

RESCUE_MAX = EXPIRE_MAX = 1_000
STRAY_AGE_FACTOR = 3
STRAYS_COST_SHARE = 0.001
"""Of the time at most: while vacuum is held back, the entries of all jobs that we have ever run are read."""
STRAYS_PAUSE_S_MAX = 300.0
DROP_PAUSE_S = 0.1
"""Between two partitions of the history: each drop holds up all settles until its commit."""


@dataclass(frozen=True, slots=True)
class Periods:
    """How often, in seconds, and what to keep, in days."""

    rescue_s: float = 8.0
    expire_s: float = 60.0
    schedules_s: float = 30.0
    strays_s: float = 30.0
    partitions_s: float = 3600.0
    prune_s: float = 600.0
    keep_days: int = 7
    keep_dead_days: int = 30


class Owner(Protocol):
    """What chores ask of their daemon."""

    @property
    def worker_id(self) -> int:
        """The id in whose name to rescue."""

    @property
    def may_claim(self) -> bool:
        """False while the lease is in doubt."""


class Chores:
    """Runs each chore in its own task."""

    def __init__(
        self,
        store: Store,
        recurring: Recurring,
        holdings: Holdings,
        owner: Owner,
        events_: Events,
        periods: Periods,
        *,
        on_dead: Callable[[Rescued], None],
        command_timeout_s: float,
    ) -> None:
        self._store = store
        self._recurring = recurring
        self._holdings = holdings
        self._owner = owner
        self._events = events_
        self._periods = periods
        self._on_dead = on_dead
        # A claim whose answer was lost has ended on the server by then, one way or the other.
        self._stray_age_s = STRAY_AGE_FACTOR * command_timeout_s
        self._strays_took_s = 0.0  # the last time
        self._schedules_changed = anyio.Event()
        self._cuts: set[tuple[str, int]] = set()

    def schedules_changed(self) -> None:
        """Look at the schedules now."""
        self._schedules_changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with anyio.create_task_group() as tasks:
            cleaning = (self._expire, self._unblock, self._strays, self._partitions, self._prune)
            for chore in (self._rescue, self._schedules, *cleaning):
                tasks.start_soon(self._repeat, chore, name=f"chore {chore.__name__.strip('_')}")

    async def give_back_strays(self, age_s: float) -> None:
        """Gives back attempts that the database holds for us and we do not: the claim's answer was lost.

        `age_s`: since they were claimed, so that no answer is on its way. Raises PgworkdError.
        """
        worker_id = self._owner.worker_id
        running = await self._store.running_of(worker_id, age_s)
        strays = [(i, a) for i, a in running if self._holdings.find(i, a) is None]
        if strays:
            ids, attempts = [i for i, _ in strays], [a for _, a in strays]
            none = [None] * len(ids)
            released = await self._store.settle_released(ids, attempts, none, none, worker_id)
            self._events.emit(events.STRAYS_RELEASED, count=len(released))

    async def _repeat(self, chore: Callable[[], Awaitable[float]]) -> None:
        outage = Outage(chore.__name__.strip("_"), self._events)
        while True:
            try:
                delay_s = await chore()
                outage.passed()
            except DatabaseUnavailable as error:
                await outage.wait(error)
                continue
            except PgworkdError as error:
                self._events.emit(events.CHORE_FAILED, chore=chore.__name__.strip("_"), error=str(error))
                delay_s = 10.0
            if chore == self._schedules:
                with anyio.move_on_after(delay_s):
                    await self._schedules_changed.wait()
            else:
                await anyio.sleep(delay_s)

    async def _rescue(self) -> float:
        if not self._owner.may_claim:
            return self._periods.rescue_s
        rescued = await self._store.rescue(self._owner.worker_id, RESCUE_MAX)
        for job in rescued:
            self._events.emit(
                events.JOB_LOST,
                job_id=str(job.id),
                queue=job.queue,
                kind=job.kind,
                attempt=job.attempt,
                worker=job.worker,
                worker_id=job.worker_id,
                status=job.status,
            )
            if job.status == "dead":
                self._on_dead(job)
        return 0.0 if len(rescued) == RESCUE_MAX else self._periods.rescue_s

    async def _expire(self) -> float:
        return 0.0 if await self._store.expire(EXPIRE_MAX) == EXPIRE_MAX else self._periods.expire_s

    async def _unblock(self) -> float:
        """Who frees a serialize_key promotes the next in line; this is for rows that were locked or changed by hand."""
        await self._store.unblock()
        return self._periods.expire_s

    async def _schedules(self) -> float:
        self._schedules_changed = anyio.Event()
        await self._recurring.look(self._owner.worker_id)
        return self._periods.schedules_s

    async def _strays(self) -> float:
        began = anyio.current_time()
        if self._owner.may_claim:
            await self.give_back_strays(self._stray_age_s)
        # One that took long may have waited behind another chore: only two in a row say that it is expensive.
        last_s, self._strays_took_s = self._strays_took_s, anyio.current_time() - began
        cost_s = min(last_s, self._strays_took_s, STRAYS_PAUSE_S_MAX * STRAYS_COST_SHARE)
        return max(self._periods.strays_s, cost_s / STRAYS_COST_SHARE)

    async def _partitions(self) -> float:
        await self._store.ensure_partitions()
        return self._periods.partitions_s

    async def _prune(self) -> float:
        keep_days = self._periods.keep_days
        await self._warn_of_cuts(keep_days)
        while await self._store.drop_partition(keep_days):
            await anyio.sleep(DROP_PAUSE_S)
        rows, dead = await self._store.prune(keep_days, self._periods.keep_dead_days)
        return 1.0 if rows + dead >= 5_000 else self._periods.prune_s

    async def _warn_of_cuts(self, keep_days: int) -> None:
        """Once for each value: a queue's keep_s shortens what the history keeps, it cannot lengthen it."""
        cuts = set(await self._store.kept_longer(keep_days))
        for queue, keep_s in sorted(cuts - self._cuts):
            self._events.emit(events.RETENTION_CUT, queue=queue, keep_s=keep_s, keep_days=keep_days)
        self._cuts = cuts
