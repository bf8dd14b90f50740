"""Claims of remote workers: what a request is given, and what becomes of it if the request goes away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from uuid import UUID

import anyio

from pgworkd.core.assignment import sealed
from pgworkd.core.claims import ClaimedJob
from pgworkd.core.fence import Fence
from pgworkd.core.job import Reason
from pgworkd.database.remote_store import NotClaimed, RemoteStore
from pgworkd.database.store import Store
from pgworkd.engine.attempts import Attempt
from pgworkd.errors import DatabaseError, WorkerLost
from pgworkd.gateway.workers.pool import Budgets, Given, RemotePool, Waiter
from pgworkd.gateway.workers.settles import Settles
from pgworkd.gateway.workers.workers import RemoteWorker, RemoteWorkers

ANSWER_BYTES_MAX = 16 * 1024 * 1024
"""Payloads of one answer; what does not fit is given back."""
READ_BYTES = 1024 * 1024
KEPT_CHARS = 500
"""Larger payloads are not kept while their jobs run: each claim costs more than they then."""
NOW_S = 30.0
"""A request that does not wait for jobs is answered after this time at the latest."""


class Assigned(NamedTuple):
    """One attempt as it is given to a worker; `assignment`: what it settles by."""

    assignment: str
    claimed: ClaimedJob
    queue: str
    held: Fence


class RemoteClaims:
    """Claims for all workers that ask."""

    def __init__(
        self,
        store: Store,
        remote: RemoteStore,
        workers: RemoteWorkers,
        settles: Settles,
        pool: Callable[[str], RemotePool],
        missed: Callable[[Attempt], Awaitable[str | None]],
    ) -> None:
        """`pool` returns that of a queue; `missed`: why an occurrence must be skipped."""
        self._store, self._remote, self._workers, self._settles = store, remote, workers, settles
        self._pool, self._missed = pool, missed

    async def claim(
        self,
        worker: RemoteWorker,
        queues: Sequence[str],
        most: int,
        wait_s: float,
        lease_s: float | None = None,
        budgets: Budgets = (),
        claim_id: int | None = None,
    ) -> list[Assigned]:
        """Up to `most` jobs of the first queue that has any; waits for one, for `wait_s` at most.

        Returns early, with nothing, when there is news for the worker. lease_s: each attempt is leased by itself.
        Whoever cancels the call gets nothing, and what was claimed for it is given back. Raises WorkerLost, or the
        database's errors: then nothing is claimed, as far as is known.
        """
        waiter = Waiter(worker, most, lease_s, waits=wait_s > 0, budgets=budgets, claim_id=claim_id)
        worker.on_news.add(waiter.answered.set)
        try:
            if not any(worker.free(queue) for queue in queues):
                await self._workers.recount(worker)
            if worker.has_news or worker.is_stopping:
                waiter.answered.set()
            waiter.wait_in([self._pool(queue) for queue in dict.fromkeys(queues)])
            await waiter.wait(wait_s or NOW_S)
            waiter.is_leaving = True
            await waiter.until_returned()
            if waiter.error is not None:
                raise waiter.error
            if worker.is_lost and not waiter.given:
                raise WorkerLost(f"worker {worker.id} is presumed dead, or has signed off")
            taken, waiter.given = waiter.given, []
            return await self._prepared(taken)
        finally:
            waiter.is_gone = True
            waiter.leave()
            worker.on_news.discard(waiter.answered.set)
            self.give_back([each.held for each in waiter.given])

    async def claim_one(
        self,
        worker: RemoteWorker,
        queue: str,
        job_id: UUID,
        lease_s: float | None = None,
        budgets: Budgets = (),
        claim_id: int | None = None,
    ) -> list[Assigned] | NotClaimed:
        """That job of the queue; nothing if the worker is told to claim nothing, or the job has ended meanwhile.

        For all else, see `claim`.
        """
        waiter = Waiter(worker, 1, lease_s, waits=False, budgets=budgets, claim_id=claim_id)
        try:
            with anyio.CancelScope(shield=True):  # what has been claimed must be known, to be given back
                refused = await self._pool(queue).claim_one(waiter, job_id)
            if refused is not None:
                return refused
            taken, waiter.given = waiter.given, []
            return await self._prepared(taken)
        finally:
            self.give_back([each.held for each in waiter.given])

    def give_back(self, held: Sequence[Fence]) -> None:
        """Releases, without a failure, what could not be handed over."""
        self._settles.release(held)

    async def _prepared(self, given: list[Given]) -> list[Assigned]:
        """Reads large payloads, and leaves out occurrences that were missed."""
        left = {each.held.job_id: each for each in given}
        try:
            for each in given:
                why = None if each.attempt.claimed.schedule is None else await self._missed(each.attempt)
                if why is not None:
                    self._settles.expire(each.held, why)
                    del left[each.held.job_id]
            await self._read(left)
        except BaseException:
            self.give_back([each.held for each in left.values()])
            raise
        found, size = list[Assigned](), 0
        for attempt, held in left.values():
            claimed = attempt.claimed
            size += len(claimed.payload or "")
            if claimed.payload is None or (found and size > ANSWER_BYTES_MAX):
                self.give_back([held])
                continue
            text = sealed(held)
            self._workers.remember(text, held)
            found.append(Assigned(text, claimed, attempt.queue, held))
            if len(claimed.payload) + len(claimed.meta or "") > KEPT_CHARS:
                attempt.claimed = claimed._replace(payload="", meta=None)  # not needed here any more
        return found

    async def _read(self, given: dict[UUID, Given]) -> None:
        """Reads the payloads that the claim has left out.

        A job whose row is damaged fails, one that has expired ends; both are left out.
        """
        wanted = [each for each in given.values() if each.attempt.claimed.payload is None]
        size, some = 0, len(wanted)
        while wanted and size < ANSWER_BYTES_MAX:
            ids, attempts = [e.held.job_id for e in wanted[:some]], [e.held.attempt for e in wanted[:some]]
            try:
                rows = await self._store.payloads(ids, attempts, READ_BYTES)
            except DatabaseError as error:
                if some == 1:
                    self._settles.fail(wanted[0].held, error)
                    del given[wanted.pop(0).held.job_id]
                some = 1  # alone, each shows whether it is the damaged one
                continue
            for (attempt, held), (_, payload, meta, expired) in zip(wanted, rows, strict=False):
                attempt.claimed = attempt.claimed._replace(payload=payload, meta=meta)
                size += len(payload or "")
                if expired:
                    self._settles.expire(held, Reason.EXPIRED.value)
                    del given[held.job_id]
            wanted = wanted[max(1, len(rows)) :]
