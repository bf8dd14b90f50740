"""The claims of one queue for all remote workers that wait for its jobs: one claim at a time, first come, first served.

A claim is made only when it may find something: while the queue is known to be empty, those that come just wait. So the
database sees as many claims as a daemon would make, however many workers wait.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import UUID, uuid4

import anyio

from pgworkd.core.claims import ClaimedJob, ClaimOrder, Claims
from pgworkd.core.events import Events
from pgworkd.core.fence import Fence
from pgworkd.core.job import Reason
from pgworkd.core.registration import Registration
from pgworkd.database import remote_store
from pgworkd.database.remote_store import NotClaimed, RemoteStore
from pgworkd.database.store import Store
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.claim.claim_loop import ClaimingWorker, ClaimLoop
from pgworkd.engine.counters import Counters
from pgworkd.errors import PgworkdError, WorkerLost
from pgworkd.gateway.workers.workers import RemoteWorker, RemoteWorkers

CLAIM_MAX = 200
"""Jobs of one claim: while its answers are written, the database makes the next one."""
IDLE_S = 60.0
"""A pool for which nobody has waited for this long is closed."""


Budgets = Sequence[tuple[str, int]]
"""(kind, max_attempts) for jobs that have none of their own, by kind."""


class Given(NamedTuple):
    """An attempt that was claimed for a worker, with the fence that it settles by."""

    attempt: Attempt
    held: Fence


class Waiter:
    """One request that waits for jobs, in the pools of its queues."""

    def __init__(
        self,
        worker: RemoteWorker,
        most: int,
        lease_s: float | None,
        *,
        waits: bool,
        budgets: Budgets = (),
        claim_id: int | None = None,
    ) -> None:
        """`lease_s`: of each attempt, None: they are leased with the worker; `waits` False: only what is due now.

        `claim_id`: the worker's number for this claim.
        """
        self.worker, self.most, self.lease_s, self._waits = worker, most, lease_s, waits
        self.budgets, self.claim_id = budgets, claim_id
        self.pool: RemotePool | None = None
        """The pool that claims for it now."""
        self.given: list[Given] = []
        self.error: PgworkdError | None = None
        self.answered = asyncio.Event()
        self._returned: asyncio.Event | None = None
        self.is_leaving = self.is_gone = False
        """The request waits no longer, but takes what a claim under way gives; nobody will take that."""
        self.pools: list[RemotePool] = []
        self._unasked: set[RemotePool] = set()

    def wait_in(self, pools: list[RemotePool]) -> None:
        """Waits in these pools; the first that has a job answers."""
        self.pools, self._unasked = pools, set(pools)
        for pool in pools:
            pool.add(self)

    async def wait(self, for_s: float) -> None:
        """Waits for an answer, for `for_s` seconds at most."""
        timer = asyncio.get_running_loop().call_later(for_s, self.answered.set)
        try:
            await self.answered.wait()
        finally:
            timer.cancel()

    def claimed_by(self, pool: RemotePool | None) -> None:
        """That pool claims for it now; None: none any more."""
        self.pool = pool
        if pool is None and self._returned is not None:
            self._returned.set()

    async def until_returned(self) -> None:
        """Waits until no pool claims for this request."""
        while self.pool is not None:
            self._returned = asyncio.Event()
            await self._returned.wait()

    def leave(self) -> None:
        """Waits no longer."""
        for pool in self.pools:
            pool.remove(self)

    @property
    def is_open(self) -> bool:
        """True if a pool may claim for it."""
        return self.pool is None and not self.is_leaving and not self.is_gone and not self.answered.is_set()

    def refuse(self, pool: RemotePool) -> None:
        """That pool has nothing for it."""
        self._unasked.discard(pool)
        if not self._unasked and not self._waits:
            self.answered.set()

    def fail(self, error: PgworkdError) -> None:
        """Answers the request with an error."""
        self.error = error
        self.answered.set()


class RemotePool(ClaimLoop):
    """The waiters of one queue. In the database it is a pool without slots, which inserts notify while it is idle."""

    def __init__(
        self,
        queue: str,
        owner: ClaimingWorker,
        store: Store,
        remote: RemoteStore,
        workers: RemoteWorkers,
        events_: Events,
        counters: Counters,
        *,
        release: Callable[[list[Fence]], None],
    ) -> None:
        """`owner`: this gateway as a worker; `release`: gives back what was claimed for somebody who has gone."""
        super().__init__(queue, owner, events_, counters)
        self.concurrency = 0
        """The concurrency of `queues`, which no worker exceeds; 0: none is set."""
        self._store, self._remote, self._workers, self._release = store, remote, workers, release
        self._waiting: dict[Waiter, None] = {}
        self._may_find = True  # a claim may find something: False only while inserts notify us
        self._in_vain_for: Budgets | None = None  # the last claim was for these, and found nothing
        self.left_at = anyio.current_time()
        """When the last waiter left."""

    def release_unstarted(self, reason: Reason, *, keep: int = 0) -> None:
        """Releases nothing: no job is claimed ahead of a request."""

    def claim_soon(self) -> None:
        """A claim may find something."""
        self._may_find = True
        super().claim_soon()

    def slot_freed(self) -> None:
        """A worker may take more jobs of this queue."""
        if self._waiting and self.may_find_more:
            self.claim_soon()

    async def run(self) -> None:
        """Claims until cancelled or closed."""
        await self._loop()

    # Waiters.

    @property
    def is_claiming(self) -> bool:
        """True while a claim is under way."""
        return self._claiming

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def add(self, waiter: Waiter) -> None:
        """One more waits."""
        self._waiting[waiter] = None
        is_due = self._due_at is not None and self._due_at <= anyio.current_time()
        worker = waiter.worker
        if self.paused or worker.requested is not None or not worker.free(self.queue, self.concurrency):
            waiter.refuse(self)
        elif self._may_find or not self.is_idle or is_due:
            self.claim_soon()
        else:
            waiter.refuse(self)

    def remove(self, waiter: Waiter) -> None:
        """Removes a request that waits no longer."""
        self._waiting.pop(waiter, None)
        if not self._waiting:
            self.left_at = anyio.current_time()

    def _next(self) -> list[tuple[Waiter, int]]:
        """For whom to claim now, and how many for each: one request of each worker, all with the same budgets."""
        left, chosen = self._care.most(CLAIM_MAX), dict[int, tuple[Waiter, int]]()
        budgets: Budgets | None = None
        waiting = list(self._waiting)
        if self._in_vain_for is not None:  # a suspect may be left, which only others may take
            waiting.sort(key=lambda waiter: waiter.budgets == self._in_vain_for)
        for waiter in waiting:
            if waiter.worker.id not in chosen and budgets in (None, waiter.budgets) and self._may_serve(waiter):
                most = min(waiter.most, waiter.worker.free(self.queue, self.concurrency), left)
                budgets = waiter.budgets
                chosen[waiter.worker.id] = (waiter, most)
                left -= most
                if left == 0:
                    break
        return list(chosen.values())

    # The claim loop.

    def _may_claim(self) -> bool:
        may = not self.paused and not self.closed and self._worker.may_claim
        return may and any(self._may_serve(waiter) for waiter in self._waiting)

    def _may_serve(self, waiter: Waiter) -> bool:
        worker = waiter.worker
        may = waiter.is_open and not worker.is_lost and worker.requested is None
        return may and worker.free(self.queue, self.concurrency) > 0

    async def _claim(self) -> Claims | None:
        standing, nonce = await self._workers.standing(), uuid4()
        chosen = self._next()
        if not chosen or self.paused or self.closed or not self._worker.may_claim:
            return None
        wanted = [remote_store.ClaimWaiter(w.worker.id, most, w.lease_s, w.claim_id) for w, most in chosen]
        limit, self._may_find = sum(each.limit for each in wanted), False
        start, keyed, sent_at, notified_ago_s = self._leave()
        kinds, budgets = zip(*chosen[0][0].budgets, strict=True) if chosen[0][0].budgets else ((), ())
        order = ClaimOrder(0, self.queue, limit, kinds, budgets, *start)
        order = order._replace(
            places=keyed.places, reach_s=keyed.reach_s, since=keyed.since, renew=keyed.renew, careful=self._care.on
        )
        self._sent = order._replace(worker_id=wanted[0].worker_id)
        self._reserve(chosen, 1)
        answered = False
        try:
            found = await self._remote.claim_for(wanted, order, standing, nonce)
            answered = True
        finally:
            self._reserve(chosen, -1)
            if not answered:
                self._may_find = True
        now = anyio.current_time()
        took_s = now - sent_at
        self._counters.claimed(self.queue, len(found.claims), took_s, notified_ago_s)
        self._more = len(found.claims) >= limit
        self._in_vain_for = None if found.claims else chosen[0][0].budgets
        self._may_find = self._may_find or self._more or self._poll_mode.polls_on(now)
        self._arrive(found.claims, now, took_s, full=self._more)
        by_worker: dict[int, Waiter] = {waiter.worker.id: waiter for waiter, _ in chosen}
        given: defaultdict[int, list[Given]] = defaultdict(list)
        for claimed, worker_id in zip(found.claims, found.workers, strict=True):
            given[worker_id].append(self._given(by_worker[worker_id], claimed, standing, nonce))
        for waiter, _ in chosen:
            self._give(waiter, given[waiter.worker.id])
        for worker_id in found.lost:
            self._workers.lose(worker_id)
        for waiter, _ in chosen:
            if waiter.worker.is_lost and not waiter.given:
                waiter.fail(WorkerLost(f"worker {waiter.worker.id} is presumed dead"))
        return found.claims

    async def claim_one(self, waiter: Waiter, job_id: UUID) -> NotClaimed | None:
        """Claims that job for a request, if there is a slot for it; None: it has it, or the worker is to claim nothing.

        Those that wait here are not before it.
        """
        worker, self.left_at = waiter.worker, anyio.current_time()
        if not worker.may_claim:
            return None
        if not worker.free(self.queue, self.concurrency):
            await self._workers.recount(worker)
        if not worker.free(self.queue, self.concurrency):
            return NotClaimed("slots")
        standing, nonce = await self._workers.standing(), uuid4()
        order = ClaimOrder(worker.id, self.queue, 1, *(zip(*waiter.budgets, strict=True) if waiter.budgets else ()))
        wanted = remote_store.ClaimWaiter(worker.id, 1, waiter.lease_s, waiter.claim_id)
        self._reserve([(waiter, 1)], 1)
        try:
            found = await self._remote.claim_one(wanted, order, job_id, standing, nonce)
        except WorkerLost:
            self._workers.lose(worker.id)
            raise
        finally:
            self._reserve([(waiter, 1)], -1)
        if isinstance(found, NotClaimed):
            return found
        self._counters.claimed(self.queue, 1, anyio.current_time() - self.left_at, None)
        self._give(waiter, [self._given(waiter, found, standing, nonce)])
        return None

    def _given(self, waiter: Waiter, claimed: ClaimedJob, standing: Registration, nonce: UUID) -> Given:
        holder, own = (waiter.worker.id, None) if waiter.lease_s is None else (standing, nonce)
        held = Fence(claimed.id, claimed.attempt, holder, holder.token, own)
        return Given(Attempt(claimed, self.queue, holder), held)

    def _reserve(self, chosen: list[tuple[Waiter, int]], sign: int) -> None:
        """Takes the slots that a claim may fill, and gives them back."""
        for waiter, most in chosen:
            waiter.worker.reserved[self.queue] += sign * most
            waiter.claimed_by(self if sign > 0 else None)

    def _give(self, waiter: Waiter, given: list[Given]) -> None:
        if waiter.is_gone:
            self._release([each.held for each in given])
        elif given:
            now = anyio.current_time()
            for attempt, _ in given:
                attempt.started = now
                if waiter.lease_s is None:
                    waiter.worker.held[attempt.claimed.id] = attempt
            self._counters.begun([attempt for attempt, _ in given])
            waiter.given = given
            waiter.answered.set()
        else:
            waiter.refuse(self)
            for pool in waiter.pools:
                if pool is not self and pool.may_find_more:
                    pool.claim_soon()  # it passed over this one, for whom we were claiming

    @property
    def may_find_more(self) -> bool:
        """True unless the queue is known to be empty."""
        return self._may_find or not self.is_idle

    def _failed(self, error: PgworkdError) -> float:
        for waiter in list(self._waiting):
            if waiter.is_open:
                waiter.fail(error)
        return super()._failed(error)

    async def _refuse(self, order: ClaimOrder, error: PgworkdError | None) -> int | None:
        return await self._store.refuse_claims(order, error)

    async def _store_announcement(self, *, idle: bool) -> None:
        await self._store.set_pool(self._worker.worker_id, self.queue, 0, idle=idle)
