"""Compares, every few seconds, what workers say that they run with what the database says, and takes over their slots.

The answer to a claim may be lost with its connection, or with the gateway that was to give it: the worker does not know
of that attempt, and renews the lease that protects it. So a worker numbers its claims, and lists in each beat what it
holds, with the number up to which it has read or given up the answers. An attempt of such a claim that is not in the
list is taken back: uncounted if it was never listed, as a loss if it was. No clock takes part in this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.fence import Fence
from pgworkd.database.reconnect import Outage
from pgworkd.database.remote_store import RemoteStore, RunningAttempt
from pgworkd.database.store import Rescued
from pgworkd.errors import PgworkdError
from pgworkd.gateway.workers.workers import RemoteWorkers

PERIOD_S = 5.0
RECOUNT_PERIOD_S = 1.0
COST_SHARE, PAUSE_S_MAX = 0.01, 600.0
"""Maximum share of the time: while vacuum is held back, a search reads the entries of all that these workers ran."""


class Watch:
    """Looks for attempts that nobody runs."""

    def __init__(
        self,
        store: RemoteStore,
        workers: RemoteWorkers,
        events_: Events,
        on_free: Callable[[Collection[str]], None],
        on_lost: Callable[[Rescued], None],
    ) -> None:
        """`on_free`: workers have slots of these queues again, whose jobs were settled through other gateways.

        `on_lost` gets each job on which a loss was counted.
        """
        self._store, self._workers, self._events = store, workers, events_
        self._on_free, self._on_lost = on_free, on_lost
        self._outage = Outage("watch", events_)
        self._took_s = 0.0

    async def run(self) -> None:
        """Watches until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._compare_all)
            tasks.start_soon(self._recount_full)

    async def _recount_full(self) -> None:
        """Looks at those that wait and seem to have no slot left: all of them in one statement."""
        outage = Outage("recount", self._events)
        while True:
            await anyio.sleep(RECOUNT_PERIOD_S)
            full = [worker for worker in self._workers if worker.is_full]
            if not full:
                continue
            asked_at = anyio.current_time()
            try:
                rows = await self._store.attempts_of([worker.id for worker in full])
            except PgworkdError as error:
                await anyio.sleep(outage.failed(error))
                continue
            outage.passed()
            by_worker = _by_worker(rows)
            for worker in full:
                self._workers.compare(worker, by_worker[worker.id], asked_at)
                self._on_free([queue for queue in worker.slots if worker.free(queue)])

    async def _compare_all(self) -> None:
        while True:
            await anyio.sleep(max(PERIOD_S, min(self._took_s / COST_SHARE, PAUSE_S_MAX)))
            self._workers.forget_silent()
            known = list(self._workers)
            if not known:
                continue
            began, slots_before = anyio.current_time(), {worker.id: worker.slots for worker in known}
            try:
                slots, rows = await self._store.work_of([worker.id for worker in known])
            except PgworkdError as error:
                await anyio.sleep(self._outage.failed(error))
                continue
            self._outage.passed()
            # One may have waited behind another statement: it is expensive only if two in a row took long.
            took_s = anyio.current_time() - began
            self._took_s = min(took_s, self._took_s * 2 + PERIOD_S * COST_SHARE)
            by_worker = _by_worker(rows)
            dropped = list[Fence]()
            for worker in known:
                if worker.slots is slots_before[worker.id]:  # else they have just been set here
                    worker.slots = slots.get(worker.id, worker.slots)
                self._workers.compare(worker, by_worker[worker.id], began)
                dropped += worker.not_listed(by_worker[worker.id])
            if dropped:
                await self._take_back(dropped)

    async def _take_back(self, dropped: Sequence[Fence]) -> None:
        try:
            taken = await self._store.take_back(dropped)
        except PgworkdError as error:
            await anyio.sleep(self._outage.failed(error))
            return
        if given_back := sum(job.status == "pending" for job in taken):
            self._events.emit(events.ORPHANS_RELEASED, count=given_back)
        for job in taken:
            if job.status != "pending":
                self._on_lost(job)


def _by_worker(rows: Sequence[RunningAttempt]) -> defaultdict[int, list[RunningAttempt]]:
    found: defaultdict[int, list[RunningAttempt]] = defaultdict(list)
    for row in rows:
        found[row.worker_id].append(row)
    return found
