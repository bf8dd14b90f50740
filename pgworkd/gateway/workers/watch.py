"""Compares, every few seconds, what workers say that they run with what the database says, and takes over their slots.

The answer to a claim may be lost with its connection, or with the gateway that was to give it: the worker does not know
of that attempt, and renews the lease that protects it. Workers therefore list what they hold in their beats; an attempt
that is missing in two lists, both of them later than it was first seen here, is released. (How old it is by the clock
of the database says nothing: that may have been set forward.) The answer may also arrive late, after that: so it
says for how long it is valid (VALID_S), which is less than the time that has to pass before a list counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from uuid import UUID

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.fence import Fence
from pgworkd.database.reconnect import Outage
from pgworkd.database.remote_store import RemoteStore
from pgworkd.errors import PgworkdError
from pgworkd.gateway.workers.claims import VALID_S
from pgworkd.gateway.workers.settles import Settles
from pgworkd.gateway.workers.workers import RemoteWorker, RemoteWorkers

PERIOD_S = 5.0
RECOUNT_PERIOD_S = 1.0
COST_SHARE, PAUSE_S_MAX = 0.002, 600.0
"""Maximum share of the time: while vacuum is held back, a search reads the entries of all that these workers ran."""
MARGIN_S = VALID_S + 1.0
"""An attempt must have been seen here this long before a list to be expected in it."""


_Row = tuple[int, UUID, int, str]
"""Of `RemoteStore.attempts_of`."""


class Watch:
    """Looks for attempts that nobody runs."""

    def __init__(
        self,
        store: RemoteStore,
        workers: RemoteWorkers,
        settles: Settles,
        events_: Events,
        on_free: Callable[[Collection[str]], None],
    ) -> None:
        """`on_free`: workers have slots of these queues again, whose jobs were settled through other gateways."""
        self._store, self._workers, self._settles, self._events = store, workers, settles, events_
        self._on_free = on_free
        self._outage = Outage("watch", events_)
        self._took_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
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
            for worker in known:
                if worker.slots is slots_before[worker.id]:  # else they have just been set here
                    worker.slots = slots.get(worker.id, worker.slots)
                self._workers.compare(worker, by_worker[worker.id], began)
                self._release_orphans(worker, by_worker[worker.id])

    def _release_orphans(self, worker: RemoteWorker, rows: list[_Row]) -> None:
        now, before = anyio.current_time(), worker.seen
        worker.seen = {(job_id, attempt): before.get((job_id, attempt), now) for _, job_id, attempt, _ in rows}
        if len(worker.lists) < 2:  # its two lists
            return
        (first_at, first), (_, second) = worker.lists
        orphans = [
            Fence(job_id, attempt, worker.id, worker.id.token)
            for (job_id, attempt), seen_at in worker.seen.items()
            if seen_at + MARGIN_S < first_at
            and (job_id, attempt) not in first
            and (job_id, attempt) not in second
            and job_id not in worker.unanswered
        ]
        if orphans:
            self._settles.release(orphans)
            self._events.emit(events.ORPHANS_RELEASED, count=len(orphans))


def _by_worker(rows: Sequence[_Row]) -> defaultdict[int, list[_Row]]:
    found: defaultdict[int, list[_Row]] = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return found
