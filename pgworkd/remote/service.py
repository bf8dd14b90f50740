"""A gateway as a worker of the fleet: its registration and lease, maintenance, notifications, and remote workers.

It runs no job itself. Remote workers are judged only while a gateway has been there for the length of their lease, so
its lease is what their rescue depends on; and a site that has no daemon has its maintenance from here.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Sequence

import anyio
from anyio.abc import TaskGroup

from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.listener import NotificationListener
from pgworkd.database.reconnect import Outage
from pgworkd.database.remote_store import RemoteStore
from pgworkd.database.store import Rescued, Store
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.life.loop_watch import LoopWatch
from pgworkd.engine.life.maintenance import Maintenance, Periods
from pgworkd.engine.life.recurring import Recurring
from pgworkd.engine.life.signals import Signals
from pgworkd.engine.life.startup import Startup
from pgworkd.engine.life.worker import WorkerLife
from pgworkd.engine.tallies import Tallies
from pgworkd.engine.wake.poller import Poller
from pgworkd.errors import DatabaseUnavailable, PgworkdError
from pgworkd.remote.beats import Beats
from pgworkd.remote.claims import RemoteClaims
from pgworkd.remote.pool import IDLE_S, RemotePool
from pgworkd.remote.queues import RemoteQueues
from pgworkd.remote.settles import Ended, Settles
from pgworkd.remote.watch import Watch
from pgworkd.remote.workers import RemoteWorker, RemoteWorkers
from pgworkd.words import events
from pgworkd.words.events import Events
from pgworkd.words.job import Ending, Outcome

LEASE_S, HEARTBEAT_S = 10.0, 2.5
"""Of the gateway itself: as short as the shortest lease of a worker, which else is judged with a delay: see had_time().
"""
AGAIN_S = 5.0
"""Before another start, after one that failed for a reason that waiting alone may not cure."""
STOP_S = 10.0
"""How long a stop waits for claims under way, and for what they have to give back."""


class RemoteService:
    """Serves remote workers within `run`."""

    def __init__(
        self,
        options: ConnectionOptions,
        name: str,
        events_: Events,
        *,
        periods: Periods,
        poll_s: float,
        statistics: bool,
        environment: str | None,
        loop_watch: LoopWatch | None = None,
    ) -> None:
        """`name`: of this gateway, as `pgworkd workers` shows it; the others as in `DaemonOptions`."""
        self._loop_watch = loop_watch
        self.events, self.options, self._name = events_, options, name
        self._periods, self._poll_s, self._statistics = periods, poll_s, statistics
        self.tallies = Tallies(events_)
        self.queues = RemoteQueues(events_)
        self._store = Store(options, lambda: len(self.queues.pools), environment=environment)
        self.remote = RemoteStore(options, lambda: len(self.queues.pools))
        self.workers = RemoteWorkers(self.remote)
        self._in_flight = InFlight()
        self._recurring = Recurring(self._store, events_)
        self.owner = self.queues.owner = self._make_owner()
        self._signals = self._make_signals()
        self._maintenance = self._make_maintenance()
        self.settles = Settles(self.remote, self.workers, self._recurring, self.tallies, self._settled)
        self.beats = Beats(self.remote, self.workers, events_)
        self._watch = Watch(self.remote, self.workers, self.settles, events_, on_free=self._freed)
        self.claims = RemoteClaims(
            self._store, self.remote, self.workers, self.settles, self._pool, self._recurring.missed
        )
        self._tasks: TaskGroup | None = None
        self._stop = anyio.Event()
        self.ready = anyio.Event()
        """Set when it serves for the first time."""

    def _make_owner(self) -> WorkerLife:
        return WorkerLife(
            self._store,
            self.queues,
            self._in_flight,
            self.events,
            name=self._name,
            kind="gateway",
            lease_s=LEASE_S,
            heartbeat_s=HEARTBEAT_S,
            end_process=lambda _: None,  # nothing runs here that could outlive a lease
            loop_watch=self._loop_watch,
        )

    def _make_signals(self) -> Signals:
        return Signals(
            *(self._store.signals, self.tallies, self._name, self._periods.keep_dead_days),
            clock_ahead_s=lambda: self.owner.clock_ahead_s,
            statistics=self._statistics,
        )

    def _make_maintenance(self) -> Maintenance:
        return Maintenance(
            *(self._store, self._recurring, self._in_flight, self.owner, self.events, self._periods),
            on_dead=self._died,
            command_timeout_s=self.options.command_timeout_s,
            queues=lambda: list(self.queues.pools),
            tallies=self.tallies,
            signals=self._signals,
        )

    def check(self) -> None:
        """Raises DatabaseUnavailable unless it serves: it has a lease, and the settings of its queues."""
        if not self.owner.lease_holds or self.owner.outdated or self._tasks is None:
            raise DatabaseUnavailable("this gateway is not registered in the database at the moment")

    async def run(self) -> None:
        """Until `request_stop`; starts again when the database is there."""
        try:
            while not self._stop.is_set():
                try:
                    began_s = await Startup(self._store.verify, self.events).run(self._register, self._stop)
                except PgworkdError as error:
                    self.events.emit(events.STATEMENT_FAILED, part="start", error=str(error), retry_in_s=AGAIN_S)
                    with anyio.move_on_after(AGAIN_S):
                        await self._stop.wait()
                else:
                    if began_s is not None:
                        await self._work(began_s)
        finally:
            with anyio.CancelScope(shield=True):
                await self.owner.stop()
                await self.remote.close()
                await self._store.close()

    def request_stop(self) -> None:
        """Ends `run`: no claim is made any more."""
        self.owner.stopping = True
        self._stop.set()

    async def _register(self) -> float:
        await self._store.ensure_today()
        return await self.owner.register()

    async def _work(self, began_s: float) -> None:
        async with anyio.create_task_group() as tasks:
            self.owner.start(began_s)
            listener = NotificationListener(self._store.listener, _Notifications(self), self.events)
            poller = Poller(
                self._store, self.queues.pools, self.owner, self.events, self._poll_s, self.tallies.refusals
            )
            parts = (self.owner, self.settles, self.beats, self._watch, self._maintenance, listener, poller)
            for part in parts:
                tasks.start_soon(part.run, name=type(part).__name__)
            tasks.start_soon(self._signals.tick)
            tasks.start_soon(self._close_idle_pools)
            self._tasks = tasks
            self.ready.set()
            await self._stop.wait()
            with anyio.move_on_after(STOP_S):
                while any(pool.is_claiming for pool in self.queues.pools.values()) or self.settles.waiting:
                    await anyio.sleep(0.02)
            self._tasks = None
            await self._sign_off()
            tasks.cancel_scope.cancel()

    async def _sign_off(self) -> None:
        await self.owner.stop()  # first: a heartbeat after the end of the registration would find it lost
        with contextlib.suppress(PgworkdError), anyio.move_on_after(STOP_S):
            await self._store.sign_off(self.owner.worker_id)
            await self._signals.write_last()

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
            parts = (self.owner, self._store, self.remote, self.workers, self.events, self.tallies)
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

    def _settled(self, ended: Sequence[Ended]) -> None:
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
            self.tallies.ended(status, attempts)

    def _wake(self, attempt: Attempt, outcome: Outcome, status: str) -> None:
        if attempt.claimed.schedule is not None and self._lacks_next(attempt, status):
            self._maintenance.schedules_changed()
        pool = self.queues.pools.get(attempt.queue)
        if attempt.claimed.is_suspect or attempt.claimed.serialize_key or (pool is not None and pool.limited):
            self.queues.claim_soon()
        elif pool is not None:
            pool.slot_freed()
        if pool is not None and (status == "failed" or outcome.ending is Ending.RELEASED):
            pool.expect_also(outcome.delay_s or 0.0)

    def _freed(self, queues: Collection[str]) -> None:
        for queue in queues:
            if (pool := self.queues.pools.get(queue)) is not None:
                pool.slot_freed()

    def _lacks_next(self, attempt: Attempt, status: str) -> bool:
        """True if the settle of an occurrence could not insert the next one: it was skipped, or its rule is unknown."""
        return status not in ("completed", "failed", "dead") or self._recurring.following(attempt) is None

    def _died(self, rescued: Rescued) -> None:
        self.events.emit(events.JOB_DEAD, **rescued.facts(), duration_s=None, error=rescued.error)

    async def restore_slots(self) -> None:
        """Stores the slots of all workers known here again: a crash of the server has lost them."""
        for worker in self.workers:
            await self.remote.set_slots(worker.id, worker.slots)

    # Called by the listener.

    def reconnected(self) -> None:
        """The server may have crashed: it has lost the pools of all workers."""
        self.queues.forget_announcements()
        self._maintenance.schedules_changed()
        self._maintenance.effects_deferred()
        self.owner.renew_now()
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

    def maintenance_needed(self, what: str) -> None:
        """A notification for maintenance: schedules_changed, effects_deferred or worker_ended."""
        getattr(self._maintenance, what)()


class _Notifications:
    """`NotificationHandler` of a gateway."""

    def __init__(self, service: RemoteService) -> None:
        self._service = service

    def on_queue(self, queue: str, run_at: float | None) -> None:
        if (pool := self._service.queues.pools.get(queue)) is not None:
            pool.notified(run_at)

    def on_schedules(self) -> None:
        self._service.maintenance_needed("schedules_changed")

    def on_effects(self) -> None:
        self._service.maintenance_needed("effects_deferred")

    def on_worker_ended(self) -> None:
        self._service.maintenance_needed("worker_ended")

    def on_settings(self) -> None:
        self._service.owner.renew_now()

    def on_worker(self, worker_id: int) -> None:
        if worker_id == self._service.owner.worker_id:
            self._service.owner.renew_now()
        else:
            self._service.beats.look(worker_id)

    def on_reconnect(self) -> None:
        self._service.reconnected()
