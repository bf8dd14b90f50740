"""Periodic maintenance, by any daemon for the whole fleet: rescue, expire, unblock, restore schedules, prune.

Each task is idempotent and may run at any time in any number of daemons; the database admits one at a time. A task's
method returns the seconds until it is next due.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import anyio

from pgworkd.core import events
from pgworkd.core.fence import Fence, Settlement
from pgworkd.core.job import Ending, Outcome
from pgworkd.database.reconnect import Outage
from pgworkd.database.store import Rescued, Store
from pgworkd.engine.life.recurring import Recurring
from pgworkd.engine.life.signals import FIRST_S, Signals
from pgworkd.engine.shared import Shared
from pgworkd.errors import DatabaseBusy, DatabaseUnavailable, PgworkdError

RESCUE_MAX = EXPIRE_MAX = EFFECTS_MAX = 1_000
OPERATION_MAX, PRUNE_MAX = 500, 5_000
"""Rows per step of a task."""
ORPHAN_AGE_FACTOR = 3
"""An attempt may be an orphan after this many command time-outs: then no claim that took it can still be answered."""
ORPHANS_COST_SHARE = 0.0002
"""Share of the time for full searches: while vacuum is held back they read the index entries of all that we ran."""
ORPHANS_PAUSE_S_MAX = 600.0
"""Maximum pause between two full searches; only they find what a failover has brought back, however old."""
ORPHANS_OVERLAP_S = 10.0
"""Searches for young orphans overlap by this much: an attempt's time is its transaction's begin, and clocks are set."""
OVERDUE_COST_SHARE, OVERDUE_PAUSE_S_MAX = 0.01, 600.0
"""Share of the time and maximum pause for full searches for overdue attempts: they read all that had a deadline."""
OVERDUE_OVERLAP_S = 120.0
"""Other searches for overdue attempts overlap by this much: only some time after a lease a gateway is known present."""
AGAIN_FIRST_S, AGAIN_CAP_S = 0.2, 2.0
"""Delays before locked rows are tried again; they double up to the cap."""
REFUSED_PAUSE_S = 10.0
"""Pause after an error other than a lock or a time-out."""
EXPIRED_S = 10.0
"""How long a job that has expired may hold up those behind it in the line of its serialize_key, once one is known."""
DROP_PAUSE_S = 0.1
"""Pause between dropping two partitions of the history: each drop blocks all settles until its commit."""


@dataclass(frozen=True, slots=True)
class Periods:
    """How often each task runs, in seconds, and how long history is kept, in days."""

    rescue_s: float = 8.0
    expire_s: float = 60.0
    schedules_s: float = 30.0
    orphans_s: float = 30.0
    partitions_s: float = 3600.0
    prune_s: float = 600.0
    keep_days: int = 7
    keep_dead_days: int = 30

    def of(self, name: str) -> float:
        """The period of a task, in seconds."""
        return {
            "rescue": self.rescue_s,
            "schedules": self.schedules_s,
            "orphans": self.orphans_s,
            "partitions": self.partitions_s,
            "prune": self.prune_s,
        }.get(name, self.expire_s)


class Owner(Protocol):
    """The worker on whose behalf maintenance runs."""

    @property
    def worker_id(self) -> int:
        """The id to rescue under."""

    @property
    def may_claim(self) -> bool:
        """False while the lease is in doubt."""

    @property
    def queues(self) -> Collection[str]:
        """The queues that the worker serves."""


class Maintenance:
    """Runs each maintenance task in an asyncio task of its own."""

    def __init__(
        self,
        store: Store,
        recurring: Recurring,
        signals: Signals,
        owner: Owner,
        shared: Shared,
        *,
        periods: Periods,
        command_timeout_s: float,
        on_dead: Callable[[Rescued], None],
    ) -> None:
        self._store = store
        self._recurring = recurring
        self._owner = owner
        self._in_flight, self._events, self._counters = shared.in_flight, shared.events, shared.counters
        self._periods = periods
        self._on_dead = on_dead
        self._answer_s = command_timeout_s  # by then each claim that was under way has been answered, or given up
        self._orphan_age_s = ORPHAN_AGE_FACTOR * command_timeout_s
        self._signals = signals
        self._orphans_at: float | None = None  # when the last search began
        self._orphans_all_at = 0.0  # when the next full search is due
        self._orphans_took_s = 0.0  # duration of the last full search
        self._overdue_at: float | None = None  # the same for attempts that are overdue
        self._overdue_all_at = self._overdue_took_s = 0.0
        self._schedules_changed, self._effects_deferred = anyio.Event(), anyio.Event()
        self._worker_ended, self._operation_started = anyio.Event(), anyio.Event()
        self._effects_again_s = self._schedules_again_s = AGAIN_FIRST_S
        self._shares: dict[str, float] = {}  # by task, of the usual rows per step: less after a step that failed
        self._cuts: set[tuple[str, int]] = set()

    def effects_deferred(self) -> None:
        """Applies effects now: some were deferred."""
        self._effects_again_s = AGAIN_FIRST_S
        self._effects_deferred.set()

    def operation_started(self) -> None:
        """Does the first step of an operation now."""
        self._operation_started.set()

    def worker_ended(self) -> None:
        """Rescues jobs now, before the lease of their worker expires: its process has ended."""
        self._worker_ended.set()

    def schedules_changed(self) -> None:
        """Reads the schedules now: one was changed, or needs its next occurrence."""
        self._schedules_changed.set()

    async def run(self) -> None:
        """Runs all tasks until cancelled."""
        async with anyio.create_task_group() as tasks:
            soon = (self._rescue, self._schedules, self._effects, self._operations)
            later = (self._expire, self._unblock, self._orphans, self._partitions, self._prune, self._refused)
            for task in (*soon, *later, *self._signals.tasks):
                tasks.start_soon(self._repeat, task, name=f"maintenance {task.__name__.strip('_')}")

    async def release_orphans(self, age_s: float, age_max_s: float | None = None) -> None:
        """Releases orphaned attempts: running under our id, and not in flight here, as the claim's answer was lost.

        `age_s`: minimum age in seconds since the claim, so that no answer is under way; 0: no claim is. `age_max_s`:
        maximum age, where older ones of our queues have been searched already. Raises PgworkdError.
        """
        worker_id = self._owner.worker_id
        queues = None if age_max_s is None else list(self._owner.queues)
        orphans = self._not_in_flight(await self._store.running_of(worker_id, age_s, age_max_s, queues))
        if orphans and age_s > 0:
            # The age is by the database's clock, which may have been set forward while a claim's answer was under way.
            await anyio.sleep(self._answer_s)
            orphans = self._not_in_flight(orphans)
        if orphans:
            ours = [Settlement(Fence.of(*orphan, worker_id), Outcome(Ending.RELEASED)) for orphan in orphans]
            released = await self._store.settle(Ending.RELEASED, ours)
            if released:  # else they have been settled meanwhile
                self._events.emit(events.ORPHANS_RELEASED, count=len(released))

    def _not_in_flight(self, running: Sequence[tuple[UUID, int]]) -> list[tuple[UUID, int]]:
        return [(job_id, attempt) for job_id, attempt in running if self._in_flight.find(job_id, attempt) is None]

    async def _repeat(self, task: Callable[[], Awaitable[float]]) -> None:
        name = task.__name__.strip("_")
        outage, delay_s = Outage(name, self._events), FIRST_S.get(name, 0.0)
        while True:
            with anyio.move_on_after(delay_s):
                await self._woken(name).wait()
            began, answers = anyio.current_time(), self._store.answers
            try:
                delay_s = await task()
                self._counters.maintenance_s[name].observe(anyio.current_time() - began)
                if self._store.answers != answers:  # else there was nothing to ask, or no lease to ask under
                    outage.passed()
                self._shares[name] = min(1.0, 2 * self._shares.get(name, 1.0))
            except DatabaseUnavailable as error:
                if not isinstance(error, DatabaseBusy):
                    await outage.wait(error)
                    delay_s = 0.0
                    continue
                delay_s = self._retry_delay_s(name, error)
            except PgworkdError as error:
                self._halve_step(name)
                self._events.emit(events.MAINTENANCE_FAILED, task=name, error=str(error))
                delay_s = REFUSED_PAUSE_S

    def _woken(self, name: str) -> anyio.Event:
        """Set when the task is due before its time; each run of the task begins with a new one."""
        events_ = {
            "schedules": self._schedules_changed,
            "effects": self._effects_deferred,
            "operations": self._operation_started,
            "rescue": self._worker_ended,
            "deaths": self._counters.died,
            "sample": self._signals.sample_due,
        }
        return events_.get(name) or anyio.Event()

    def _retry_delay_s(self, name: str, error: DatabaseBusy) -> float:
        """Seconds until a step is tried again that met a lock (soon), or timed out (after its period)."""
        delay_s = self._periods.of(name)
        if error.locked:
            delay_s = min(delay_s, AGAIN_CAP_S)
        else:
            self._halve_step(name)
        self._events.emit(events.STATEMENT_FAILED, part=name, error=str(error), retry_in_s=delay_s)
        return delay_s

    def _halve_step(self, name: str) -> None:
        """Makes the next step of a task take half as many rows."""
        self._shares[name] = self._shares.get(name, 1.0) / 2

    def _step(self, name: str, most: int) -> int:
        return max(1, int(most * self._shares.get(name, 1.0)))

    async def _effects(self) -> float:
        """Applies effects that were deferred (locked, or too many for one transaction) until none is left."""
        self._effects_deferred = anyio.Event()
        left = await self._store.apply_effects(self._step("effects", EFFECTS_MAX))
        if left == 0:
            self._effects_again_s = AGAIN_FIRST_S
            return self._periods.expire_s
        if left is not None and left < 0:
            return 0.0  # the next page
        delay_s, self._effects_again_s = self._effects_again_s, min(AGAIN_CAP_S, 2 * self._effects_again_s)
        return delay_s

    async def _operations(self) -> float:
        """Does a step of what operators have started in the background."""
        self._operation_started = anyio.Event()
        due_s = await self._store.advance_operations(self._step("operations", OPERATION_MAX))
        return self._periods.prune_s if due_s is None else due_s  # who starts one notifies

    async def _rescue(self) -> float:
        self._worker_ended = anyio.Event()
        if not self._owner.may_claim:
            return self._periods.rescue_s
        limit = self._step("rescue", RESCUE_MAX)
        began = anyio.current_time()
        overdue_s_max = None
        if self._overdue_at is not None and began < self._overdue_all_at:
            overdue_s_max = began - self._overdue_at + OVERDUE_OVERLAP_S
        rescued = await self._store.rescue(self._owner.worker_id, limit, overdue_s_max)
        if overdue_s_max is None:
            last_s, self._overdue_took_s = self._overdue_took_s, anyio.current_time() - began
            pause_s = min(last_s, self._overdue_took_s) / OVERDUE_COST_SHARE
            self._overdue_all_at = began + min(pause_s, OVERDUE_PAUSE_S_MAX)
        self._overdue_at = began
        for job in rescued:
            if job.overdue:
                self._counters.failed_for(job.queue, job.kind, job.status)
                self._report(events.JOB_LEASE_PASSED, job, error=job.error)
            else:
                self.report_lost(job)
        return 0.0 if rescued else self._periods.rescue_s  # a step may be short because rejected rows were passed over

    def report_lost(self, job: Rescued) -> None:
        """Counts and reports a job that was taken back from its worker."""
        self._counters.taken_back(job.queue, job.kind, job.status)
        self._report(events.JOB_LOST, job)

    def _report(self, event: str, job: Rescued, **more: str) -> None:
        self._events.emit(event, **job.facts(), worker=job.worker, worker_id=job.worker_id, status=job.status, **more)
        if job.status == "dead":
            self._on_dead(job)

    async def _expire(self) -> float:
        limit = self._step("expire", EXPIRE_MAX)
        jobs = keys = 0
        longest_s = self._periods.expire_s
        for queue, kind, count, example in await self._store.expire(limit):
            if queue is None:
                keys = max(keys, count)
                longest_s = longest_s if count else min(longest_s, EXPIRED_S)
                continue
            jobs += count
            self._counters.expired(queue, kind, count)
            self._events.emit(events.JOBS_EXPIRED, queue=queue, kind=kind, count=count, job_id=str(example))
        return 0.0 if max(jobs, keys) >= limit else longest_s

    async def _unblock(self) -> float:
        """Promotes next jobs of freed keys whose rows were locked when the key was freed, or were changed by hand."""
        await self._store.unblock()
        return self._periods.expire_s

    async def _schedules(self) -> float:
        self._schedules_changed = anyio.Event()
        if await self._recurring.refresh(self._owner.worker_id):
            self._schedules_again_s = AGAIN_FIRST_S
            return self._periods.schedules_s
        self._schedules_again_s = min(self._periods.schedules_s, 2 * self._schedules_again_s)
        return self._schedules_again_s

    async def _orphans(self) -> float:
        if not self._owner.may_claim:
            return self._periods.orphans_s
        began = anyio.current_time()
        # What was old enough at the last search was examined then.
        if self._orphans_at is not None and began < self._orphans_all_at:
            since_s = began - self._orphans_at + ORPHANS_OVERLAP_S
            await self.release_orphans(self._orphan_age_s, self._orphan_age_s + since_s)
        else:
            try:
                await self.release_orphans(self._orphan_age_s)
            finally:
                # One may have waited behind another task: a full search is expensive only if two in a row took long.
                last_s, self._orphans_took_s = self._orphans_took_s, anyio.current_time() - began
                pause_s = min(last_s, self._orphans_took_s) / ORPHANS_COST_SHARE
                self._orphans_all_at = began + min(pause_s, ORPHANS_PAUSE_S_MAX)
        self._orphans_at = began
        return self._periods.orphans_s

    async def _refused(self) -> float:
        for what, sqlstate, count, key, error in await self._store.report_refused():
            self._events.emit(events.ROWS_REJECTED, what=what, sqlstate=sqlstate, count=count, key=key, error=error)
        return self._periods.expire_s

    async def _partitions(self) -> float:
        await self._store.ensure_partitions()
        return self._periods.partitions_s

    async def _prune(self) -> float:
        keep_days = self._periods.keep_days
        await self._warn_of_cuts(keep_days)
        while await self._store.drop_partition(keep_days):
            await anyio.sleep(DROP_PAUSE_S)
        limit = self._step("prune", PRUNE_MAX)
        rows, dead = await self._store.prune(keep_days, self._periods.keep_dead_days, limit)
        return 1.0 if rows + dead >= limit else self._periods.prune_s

    async def _warn_of_cuts(self, keep_days: int) -> None:
        """Warns once for each value: a queue's keep_s can shorten what the history keeps, not lengthen it."""
        cuts = set(await self._store.kept_longer(keep_days))
        for queue, keep_s in sorted(cuts - self._cuts):
            self._events.emit(events.RETENTION_CUT, queue=queue, keep_s=keep_s, keep_days=keep_days)
        self._cuts = cuts
