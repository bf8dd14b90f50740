"""The daemon of `pgworkd run --remote`: the same App, handlers and stops, without access to the database."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from pgworkd.core.events import Events
from pgworkd.core.job import Reason
from pgworkd.core.source import Instructions, WorkSource
from pgworkd.database.reconnect import Outage
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.kill_timer import KillTimer
from pgworkd.engine.life.member import Membership
from pgworkd.engine.life.queues import QueueSet
from pgworkd.engine.life.recurring import rules_of
from pgworkd.engine.life.startup import Startup
from pgworkd.engine.life.worker import WorkerLife
from pgworkd.engine.registry import Registry
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.remote.client import GatewayAddress
from pgworkd.remote.heartbeats import RemoteInstructions
from pgworkd.remote.pool import LongPollPool
from pgworkd.remote.store import GatewayStore

NO_DATABASE = "needs the database, and this daemon works through a gateway: serve its queue with a daemon that has one"


class RemoteLife(WorkerLife):
    """This process as a worker of the gateway."""

    quiet = False
    """An operator wants it to claim nothing more."""
    obey: Callable[[RemoteInstructions], None]

    @property
    def may_claim(self) -> bool:
        """True while there is a lease, no stop, and no objection of an operator."""
        return super().may_claim and not self.quiet

    def on_instructions(self, instructions: Instructions) -> None:
        """Does what a beat's answer says; stops what is not ours any more."""
        super().on_instructions(instructions)
        if isinstance(instructions, RemoteInstructions):
            self.obey(instructions)


class RemoteMember:
    """A member of a gateway's fleet. The gateway does for all workers what a member does beside its own work."""

    def __init__(
        self, store: GatewayStore, queues: QueueSet, worker: RemoteLife, events_: Events, wait_s: float
    ) -> None:
        """`wait_s`: how long a start waits for the settings of its queues."""
        self._store, self._queues, self._events, self._wait_s = store, queues, events_, wait_s
        self.worker = worker
        self.startup = Startup(anyio.lowlevel.checkpoint, events_, "the gateway")
        self.planner = _NoPlanner()
        self._changed = anyio.Event()

    @property
    def listening(self) -> bool:
        """True while the gateway answers: claims wait in it."""
        return self.worker.database_answers

    async def register(self, app: Registry) -> float:
        """Declares the schedules of the code, and registers; see `Membership`."""
        await self._store.declare(rules_of(app))
        return await self.worker.register()

    async def attend(self, tasks: TaskGroup) -> None:
        """Starts telling the gateway which queues are served; see `Membership`."""
        tasks.start_soon(self._tell_queues, name="queues")
        with anyio.move_on_after(self._wait_s):
            await self._queues.overrides.first.wait()

    def schedules_changed(self) -> None:
        """Does nothing: the gateway knows the schedules."""

    async def sign_off(self, until: float) -> str | None:
        """Ends the registration; see `Membership`."""
        await self.worker.stop()
        return await self.worker.sign_off(until)

    async def close(self) -> None:
        """Ends the heartbeat and the connections."""
        await self.worker.stop()
        await self._store.close()

    def queues_changed(self) -> None:
        """Other queues are served, or with other slots."""
        self._changed.set()

    async def _tell_queues(self) -> None:
        """Tells the gateway whenever they have changed."""
        outage = Outage("queues", self._events)
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            while not self._store.is_served:
                try:
                    await self._store.serve(self.worker.worker_id)
                except PgworkdError as error:
                    await outage.wait(error)
                else:
                    outage.passed()


class _NoPlanner:
    """The gateway knows the schedules, and hands out no occurrence that was missed."""

    def following(self, attempt: Attempt) -> None:
        """None is inserted here."""

    async def missed(self, attempt: Attempt) -> None:
        """None is skipped here."""


class RemoteDaemon(Daemon):
    """A daemon that works through a gateway. Of the options, those for its database have no effect."""

    def __init__(self, app: Registry, options: DaemonOptions, gateway: GatewayAddress, **more: Any) -> None:
        """`more`: as for `Daemon`. Raises UsageError for an app with alerts, or handlers with transaction=True."""
        if app.alert_rules:
            raise UsageError(f"app.alert {NO_DATABASE}")
        for handler in app.handlers.values():
            if handler.transaction:
                raise UsageError(f"transaction=True of handler {handler.kind!r} {NO_DATABASE}")
        self._gateway = gateway
        super().__init__(app, options, **more)

    def request_stop(self, *, now: bool = False) -> None:
        """Requests a stop; the gateway answers claims that wait as soon as it knows."""
        super().request_stop(now=now)
        if self.worker.heartbeat is not None:
            self.worker.heartbeat.state = "stopping"
            self.worker.renew_now()

    def _make_store(self) -> WorkSource:
        self._remote = GatewayStore(self._gateway, self._slots, self._told)
        return self._remote

    def _make_member(self, end_process: Callable[[str], None], kill_timer: KillTimer | None) -> Membership:
        self._life = self._make_worker(RemoteLife, end_process, kill_timer)
        self._life.obey = self._obeyed
        wait_s = self.options.connection.connect_timeout_s
        self._membership = RemoteMember(self._remote, self._queues, self._life, self.events, wait_s)
        return self._membership

    def _make_pool(self, queue: str, slots: int) -> LongPollPool:
        parts = (self._store, self._runner, self._settler, self._shared)
        return LongPollPool(queue, slots, self.app, self.worker, *parts, on_change=self._membership.queues_changed)

    def _slots(self) -> dict[str, int]:
        return {queue: pool.concurrency for queue, pool in self.pools.items() if not pool.closed}

    def _told(self, state: str, cancels: Collection[tuple[UUID, int]]) -> None:
        self._obey(state)
        self._stop_attempts(cancels, Reason.CANCEL)

    def _obeyed(self, instructions: RemoteInstructions) -> None:
        self._obey(instructions.state)
        self._stop_attempts(instructions.gone, Reason.FENCE)

    def _obey(self, state: str) -> None:
        """An operator asks for this: run, quiet (claim nothing more), stop."""
        was, self._life.quiet = self._life.quiet, state != "run"
        if self._life.quiet and not was:
            self._queues.release_unstarted(Reason.ELSEWHERE)
        elif was and not self._life.quiet:
            self._queues.claim_soon()
        if state == "stop" and not self.stop_requested.is_set():
            self.request_stop()

    def _stop_attempts(self, attempts: Collection[tuple[UUID, int]], reason: Reason) -> None:
        for job_id, attempt in attempts:
            if (found := self.in_flight.find(job_id, attempt)) is not None:
                found.stop(reason)
