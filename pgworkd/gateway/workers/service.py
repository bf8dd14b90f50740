"""A gateway as a worker of the fleet: its registration and lease, maintenance, notifications, and remote workers.

It runs no job itself. Remote workers are judged only while a gateway has been there for the length of their lease, so
its lease is what their rescue depends on; and a site that has no daemon has its maintenance from here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

import anyio
from anyio.abc import TaskGroup

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import Ending, Outcome
from pgworkd.database.reconnect import Outage
from pgworkd.database.remote_store import RemoteStore
from pgworkd.database.store import Rescued, Store
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.counters import Counters
from pgworkd.engine.life.heartbeat import LeaseOptions
from pgworkd.engine.life.loop_watch import LoopWatch
from pgworkd.engine.life.member import Member
from pgworkd.engine.life.options import DaemonOptions
from pgworkd.engine.life.worker import WorkerLife, WorkerProfile
from pgworkd.engine.shared import Shared
from pgworkd.errors import DatabaseUnavailable, PgworkdError
from pgworkd.gateway.workers.beats import Beats
from pgworkd.gateway.workers.claims import RemoteClaims
from pgworkd.gateway.workers.pool import IDLE_S, RemotePool
from pgworkd.gateway.workers.queues import RemoteQueues
from pgworkd.gateway.workers.settles import EndedAttempt, Settles
from pgworkd.gateway.workers.watch import Watch
from pgworkd.gateway.workers.workers import RemoteWorker, RemoteWorkers

LEASE_S, HEARTBEAT_S = 10.0, 2.5
"""The gateway's own lease: as short as the shortest one of a worker, which else is judged with a delay (had_time()).
"""
AGAIN_S = 5.0
"""Before another start, after one that failed for a reason that waiting alone may not cure."""
STOP_S = 10.0
"""How long a stop waits for claims under way, and for what they have to give back."""


class RemoteService:
    """Serves remote workers within `run`."""

    stop_s = 2 * STOP_S
    """How long a stop may take: for claims under way, and for the sign-off."""

    def __init__(self, options: DaemonOptions, events_: Events, loop_watch: LoopWatch | None = None) -> None:
        """`options`: of the gateway as a member of the fleet; its lease is its own."""
        self.events = events_
        self.counters = Counters(events_)
        self.queues = RemoteQueues(events_)
        self._store = Store(options.connection, lambda: len(self.queues.pools), environment=options.environment)
        self.remote = RemoteStore(options.connection, lambda: len(self.queues.pools))
        self.workers = RemoteWorkers(self.remote)
        in_flight = InFlight()
        self.owner = self.queues.owner = WorkerLife(
            self._store,
            self.queues,
            in_flight,
            events_,
            WorkerProfile(options.worker_name, kind="gateway"),
            # Nothing runs here that could outlive a lease.
            LeaseOptions(LEASE_S, HEARTBEAT_S, end_process=lambda _: None, loop_watch=loop_watch),
        )
        shared = Shared(in_flight, events_, self.counters)
        self._member = _GatewayMember(self._store, self.queues, self.owner, shared, options, on_dead=self._died)
        self._member.service = self
        recurring = self._member.recurring
        self.settles = Settles(self.remote, self.workers, recurring, self.counters, self._settled)
        self.beats = Beats(self.remote, self.workers, events_)
        on_lost = self._member.maintenance.report_lost
        self.watch = Watch(self.remote, self.workers, events_, on_free=self._freed, on_lost=on_lost)
        self.claims = RemoteClaims(self._store, self.remote, self.workers, self.settles, self._pool, recurring.missed)
        self._tasks: TaskGroup | None = None
        self.stop_requested = anyio.Event()
        self.loop_watch = loop_watch or LoopWatch(events_, math.inf)
        self.ready = anyio.Event()
        """Set when it serves for the first time."""

    @property
    def worker(self) -> WorkerLife:
        """The registration and the lease of the gateway itself."""
        return self.owner

    @property
    def listening(self) -> bool:
        """True while notifications arrive."""
        return self._member.listening

    def status(self) -> str:
        """The state in one line, for people."""
        return "working" if self.ready.is_set() else f"waiting for {self._member.startup.waits_for}"

    def check(self) -> None:
        """Raises DatabaseUnavailable unless it serves: it has a lease, and the settings of its queues."""
        if not self.owner.lease_holds or self.owner.outdated or self._tasks is None:
            raise DatabaseUnavailable("this gateway is not registered in the database at the moment")

    async def run(self) -> None:
        """Serves until `request_stop`; starts again when the database is there."""
        try:
            while not self.stop_requested.is_set():
                try:
                    began_s = await self._member.startup.run(self._member.register, self.stop_requested)
                except PgworkdError as error:
                    self.events.emit(events.STATEMENT_FAILED, part="start", error=str(error), retry_in_s=AGAIN_S)
                    with anyio.move_on_after(AGAIN_S):
                        await self.stop_requested.wait()
                else:
                    if began_s is not None:
                        await self._work(began_s)
        finally:
            with anyio.CancelScope(shield=True):
                await self._member.close()
                await self.remote.close()

    def request_stop(self) -> None:
        """Ends `run`: no claim is made any more."""
        self.owner.stopping = True
        self.stop_requested.set()

    async def _work(self, began_s: float) -> None:
        async with anyio.create_task_group() as tasks:
            self.owner.start(began_s)
            for part in (self.owner, self.settles, self.beats, self.watch):
                tasks.start_soon(part.run, name=type(part).__name__)
            tasks.start_soon(self._member.attend, tasks)  # whoever calls need not wait for notifications
            tasks.start_soon(self.remote.close_idle)
            tasks.start_soon(self._close_idle_pools)
            self._tasks = tasks
            self.ready.set()
            await self.stop_requested.wait()
            with anyio.move_on_after(STOP_S):
                while any(pool.is_claiming for pool in self.queues.pools.values()) or self.settles.waiting:
                    await anyio.sleep(0.02)
            self._tasks = None
            await self._member.sign_off(anyio.current_time() + STOP_S)
            tasks.cancel_scope.cancel()

    def backoffs(self, worker: RemoteWorker) -> dict[str, dict[str, float]]:
        """What operators have set for those queues of a worker for whose jobs somebody waits here."""
        overrides, pools = self.queues.overrides, self.queues.pools
        known = [queue for queue in worker.slots if queue in pools] if overrides.known else []
        return {queue: dict(overrides.backoffs.get(queue, {})) for queue in known}

    # Pools.

    def _pool(self, queue: str) -> RemotePool:
        """The pool of a queue, which is opened when somebody first waits for it."""
        self.check()
        pool = self.queues.pools.get(queue)
        if pool is None and self._tasks is not None:
            parts = (self.owner, self._store, self.remote, self.workers, self.events, self.counters)
            pool = self.queues.pools[queue] = RemotePool(queue, *parts, release=self.settles.release)
            self.queues.overrides.apply(pool)
            self._tasks.start_soon(pool.run, name=f"pool {queue}")
        if pool is None:
            raise DatabaseUnavailable("this gateway stops")
        return pool

    async def _close_idle_pools(self) -> None:
        outage = Outage("close pools", self.events)
        while True:
            await anyio.sleep(IDLE_S / 4)
            for queue, pool in list(self.queues.pools.items()):
                if not pool.waiting and anyio.current_time() - pool.left_at > IDLE_S:
                    pool.closed = True
                    pool.claim_soon()
                    del self.queues.pools[queue]
                    self.queues.overrides.forget(queue)
                    try:
                        await self._store.drop_pool(self.owner.worker_id, queue)
                    except PgworkdError as error:  # rescue() deletes it with our registration
                        outage.failed(error)

    # What has ended.

    def _settled(self, ended: Sequence[EndedAttempt]) -> None:
        """Counts attempts that have ended, and wakes whoever may go on."""
        now = anyio.current_time()
        counted: defaultdict[str, list[Attempt]] = defaultdict(list)
        for attempt, outcome, status in ended:
            if attempt is None:  # nothing is known of it: anything may have been freed
                self.queues.claim_soon()
            else:
                attempt.ended = now
                counted["released" if status == "pending" else status].append(attempt)
                self._wake(attempt, outcome, status)
        for status, attempts in counted.items():
            self.counters.ended(status, attempts)

    def _wake(self, attempt: Attempt, outcome: Outcome, status: str) -> None:
        if attempt.claimed.schedule is not None and self._lacks_next(attempt, status):
            self._member.schedules_changed()
        pool = self.queues.pools.get(attempt.queue)
        if attempt.claimed.is_suspect or attempt.claimed.serialize_key or (pool is not None and pool.limited):
            self.queues.claim_soon()
        elif pool is not None:
            pool.slot_freed()
        released = outcome.ending is Ending.RELEASED
        if pool is not None and (status == "failed" or released):
            pool.expect_also(outcome.delay_s or 0.0, others_first=released and outcome.message is not None)

    def _freed(self, queues: Collection[str]) -> None:
        for queue in queues:
            if (pool := self.queues.pools.get(queue)) is not None:
                pool.slot_freed()

    def _lacks_next(self, attempt: Attempt, status: str) -> bool:
        """True if the settle of an occurrence could not insert the next one: it was skipped, or its rule is unknown."""
        return status not in ("completed", "failed", "dead") or self._member.recurring.following(attempt) is None

    def _died(self, rescued: Rescued) -> None:
        self.events.emit(events.JOB_DEAD, **rescued.facts(), duration_s=None, error=rescued.error)

    async def restore_slots(self) -> None:
        """Stores the slots of all workers known here again: a crash of the server has lost them."""
        for worker in self.workers:
            await self.remote.set_slots(worker.id, worker.slots)

    def news_of(self, worker_id: int) -> None:
        """The database has instructions for a remote worker."""
        self.beats.look(worker_id)

    def reconnected(self) -> None:
        """The server may have crashed: it has lost the pools of all workers."""
        self.workers.forget_standing()
        if self._tasks is not None:
            self._tasks.start_soon(self._restore)

    async def _restore(self) -> None:
        outage = Outage("restore slots", self.events)
        while True:
            try:
                return await self.restore_slots()
            except PgworkdError as error:
                await outage.wait(error)


class _GatewayMember(Member):
    """Passes on what concerns remote workers."""

    service: RemoteService

    def on_worker(self, worker_id: int) -> None:
        """Passes on the news of a remote worker."""
        super().on_worker(worker_id)
        if worker_id != self.worker.worker_id:
            self.service.news_of(worker_id)

    def on_reconnect(self) -> None:
        """Restores what the server may have lost of remote workers, too."""
        super().on_reconnect()
        self.service.reconnected()
