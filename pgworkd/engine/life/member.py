"""A process as a member of the fleet: beside its own work it is notified, polls, and takes part in maintenance.

A daemon is a member with queues and handlers, a gateway one with callers that wait for jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from pgworkd.database.listener import NotificationListener
from pgworkd.database.signal_store import AlertRule
from pgworkd.database.store import Rescued, Store
from pgworkd.engine.claim.claim_loop import ClaimLoop
from pgworkd.engine.life.maintenance import Maintenance
from pgworkd.engine.life.options import DaemonOptions
from pgworkd.engine.life.recurring import Recurring
from pgworkd.engine.life.signals import Signals
from pgworkd.engine.life.startup import Startup
from pgworkd.engine.life.worker import ServedQueues, WorkerLife
from pgworkd.engine.registry import Registry
from pgworkd.engine.settle.loop import Planner
from pgworkd.engine.shared import Shared
from pgworkd.engine.wake.poller import Poller
from pgworkd.errors import PgworkdError


class MemberQueues(ServedQueues, Protocol):
    """The queues that a member serves, each with its pool."""

    @property
    def pools(self) -> Mapping[str, ClaimLoop]:
        """The pools by queue, those that drain included."""


class Membership(Protocol):
    """The membership of a daemon, in the fleet of a database or of a gateway."""

    @property
    def startup(self) -> Startup:
        """The wait until the daemon can register."""

    @property
    def worker(self) -> WorkerLife:
        """The registration and the lease of the daemon."""

    @property
    def planner(self) -> Planner:
        """The planner, which knows the following occurrences of schedules."""

    @property
    def listening(self) -> bool:
        """True while news arrives at once; else the pools only poll."""

    async def register(self, app: Registry) -> float:
        """Declares schedules and alerts, and registers; returns when the lease began. Raises PgworkdError."""

    async def attend(self, tasks: TaskGroup) -> None:
        """Starts what wakes the pools, and maintenance; returns when they may claim, or after a while."""

    def schedules_changed(self) -> None:
        """Notes that an occurrence was skipped: the next one of its schedule is needed now."""

    async def sign_off(self, until: float) -> str | None:
        """Ends the lease and the registration, until `until` at most; None, or what is left of us and why."""

    async def close(self) -> None:
        """Ends what is left, and closes all connections."""


class Member:
    """A member of the fleet of one database: `Membership`."""

    def __init__(
        self,
        store: Store,
        queues: MemberQueues,
        worker: WorkerLife,
        shared: Shared,
        options: DaemonOptions,
        *,
        on_dead: Callable[[Rescued], None],
        rules: Collection[AlertRule] = (),
        sessions: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`rules`: alert rules to declare. `sessions`: opens the sessions without which the member does not start."""
        self._store, self._queues, self._options, self._sessions = store, queues, options, sessions
        self.worker = worker
        self.startup = Startup(store.verify, shared.events)
        self.planner = self.recurring = Recurring(store, shared.events)
        self.signals = Signals(
            store.signals,
            shared,
            options.worker_name,
            options.periods.keep_dead_days,
            rules,
            clock_ahead_s=lambda: worker.clock_ahead_s,
            statistics=options.statistics,
            queues=shared.counters.declared and queues.pools,
        )
        self.maintenance = Maintenance(
            store,
            self.recurring,
            self.signals,
            worker,
            shared,
            periods=options.periods,
            command_timeout_s=options.connection.command_timeout_s,
            on_dead=on_dead,
        )
        self._listener = NotificationListener(store.listener, self, shared.events)
        self._poller = Poller(store, queues.pools, worker, shared.events, options.poll_s, shared.counters.refusals)

    @property
    def listening(self) -> bool:
        """True while notifications arrive."""
        return self._listener.listening

    async def register(self, app: Registry | None = None) -> float:
        """Declares the app's schedules and alerts, and registers; returns when the lease began. Raises PgworkdError."""
        if self._sessions is not None:
            await self._sessions()
        await self._store.ensure_today()
        if app is not None:
            await self.recurring.declare(app)
        await self.signals.begin()
        return await self.worker.register()

    async def attend(self, tasks: TaskGroup) -> None:
        """Starts listener, poller and maintenance; returns when the pools may claim, or after a while."""
        listening = anyio.Event()
        tasks.start_soon(self._listener.run, listening.set, name="listener")
        tasks.start_soon(self.signals.tick, name="signals")
        with anyio.move_on_after(self._options.connection.connect_timeout_s):
            await listening.wait()  # not required: without notifications the pools poll
            await self._queues.overrides.first.wait()  # until then they may not claim
        tasks.start_soon(self._store.tend_connections, self.worker.worker_id, name="connections")
        tasks.start_soon(self.maintenance.run, name="maintenance")
        tasks.start_soon(self._poller.run, name="poller")

    def schedules_changed(self) -> None:
        """Reads the schedules now."""
        self.maintenance.schedules_changed()

    async def sign_off(self, until: float) -> str | None:
        """Ends the lease and the registration, and writes the last statistics; None, or what is left of us and why."""
        await self.worker.stop()  # first: a heartbeat after the end of the registration would find the worker lost
        left = await self.worker.sign_off(until, self.maintenance.release_orphans)
        if left is None:
            with contextlib.suppress(PgworkdError):  # statistics only
                await self.signals.write_last()
        return left

    async def close(self) -> None:
        """Ends the lease, and closes all connections."""
        await self.worker.stop()
        await self._store.close()

    # Called by the listener, in the loop: `database.listener.NotificationHandler`.

    def on_queue(self, queue: str, run_at: float | None) -> None:
        """Wakes the pool of a queue; `run_at`: of a job there, due long ago, that can be claimed again."""
        if (pool := self._queues.pools.get(queue)) is not None:
            pool.notified(run_at)

    def on_schedules(self) -> None:
        """Reads the schedules: one was inserted, changed or deleted."""
        self.maintenance.schedules_changed()

    def on_effects(self) -> None:
        """Applies an effect that was deferred, because a row was locked."""
        self.maintenance.effects_deferred()

    def on_operations(self) -> None:
        """Begins an operation that an operator has started."""
        self.maintenance.operation_started()

    def on_worker_ended(self) -> None:
        """Rescues the jobs of a worker whose process has ended."""
        self.maintenance.worker_ended()

    def on_settings(self) -> None:
        """Asks for the rows of `queues`: one was inserted, changed or deleted."""
        self.worker.renew_now()

    def on_worker(self, worker_id: int) -> None:
        """Asks for the instructions that the database has, if they are for this worker."""
        if worker_id == self.worker.worker_id:
            self.worker.renew_now()

    def on_reconnect(self) -> None:
        """Announces all pools again: the server may have crashed, and lost the unlogged table `pools`."""
        self._queues.forget_announcements()
        self.maintenance.schedules_changed()
        self.maintenance.effects_deferred()
        self.maintenance.operation_started()
        self.worker.renew_now()
