"""The daemon of `pgworkd run --remote`: the same App, handlers and stops, without access to the database."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any
from uuid import UUID

import anyio
from anyio.abc import TaskGroup

from pgworkd.database.heartbeat_store import Instructions
from pgworkd.database.reconnect import Outage
from pgworkd.database.store import Store
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.kill_timer import KillTimer
from pgworkd.engine.life.startup import Startup
from pgworkd.engine.life.worker import WorkerLife
from pgworkd.engine.registry import App
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.remote_daemon.client import GatewayOptions
from pgworkd.remote_daemon.heartbeats import RemoteInstructions
from pgworkd.remote_daemon.pool import LongPollPool
from pgworkd.remote_daemon.store import GatewayStore
from pgworkd.words.job import Reason

NO_DATABASE = "needs the database, and this daemon works through a gateway: serve its queue with a daemon that has one"


class RemoteLife(WorkerLife):
    """This process as a worker of the gateway."""

    quiet = False
    """An operator wants it to claim nothing more."""
    obey: Callable[[RemoteInstructions], None]

    @property
    def may_claim(self) -> bool:
        """As `WorkerLife`, and while no operator objects."""
        return super().may_claim and not self.quiet

    def on_instructions(self, instructions: Instructions) -> None:
        """As `WorkerLife`; stops what is not ours any more, and does what an operator asks."""
        super().on_instructions(instructions)
        if isinstance(instructions, RemoteInstructions):
            self.obey(instructions)


class RemoteDaemon(Daemon):
    """A daemon that works through a gateway. Of the options, those for its database have no effect."""

    def __init__(self, app: App, options: DaemonOptions, gateway: GatewayOptions, **more: Any) -> None:
        """`more`: as for `Daemon`. Raises UsageError for an app with alerts."""
        if app.alert_rules:
            raise UsageError(f"app.alert {NO_DATABASE}")
        self._gateway = gateway
        self._changed = anyio.Event()
        super().__init__(app, dataclasses.replace(options, statistics=False), **more)  # the gateway's are for all

    @property
    def listening(self) -> bool:
        """True while the gateway answers: claims wait in it."""
        return self.worker.database_answers

    def request_stop(self, *, now: bool = False) -> None:
        """As `Daemon`; the gateway answers claims that wait as soon as it knows."""
        super().request_stop(now=now)
        if self.worker.heartbeat is not None:
            self.worker.heartbeat.state = "stopping"
            self.worker.renew_now()

    def _make_store(self) -> Store:
        self._remote = GatewayStore(self._gateway, self.options.connection, self._slots, self._told)
        return self._remote

    def _make_startup(self) -> Startup:
        return Startup(self._store.verify, self.events, "the gateway")

    def _make_worker(self, end_process: Callable[[str], None], kill_timer: KillTimer | None) -> WorkerLife:
        options = self.options
        self._life = RemoteLife(
            self._store,
            self._queues,
            self.in_flight,
            self.events,
            name=options.worker_name,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            end_process=end_process,
            kill_timer=kill_timer,
            loop_watch=self.loop_watch,
        )
        self._life.obey = self._obeyed
        return self._life

    def _make_pool(self, queue: str, slots: int) -> LongPollPool:
        parts = (self._store, self._runner, self._settler, self.in_flight, self.events, self.tallies)
        return LongPollPool(queue, slots, self.app, self.worker, *parts, on_change=self._note_change)

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

    async def _register(self) -> float:
        await self._recurring.declare(self.app)
        return await self.worker.register()

    def _note_change(self) -> None:
        self._changed.set()

    async def _tell_queues(self) -> None:
        """Tells the gateway whenever other queues are served, or with other slots."""
        outage = Outage("queues", self.events)
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            while not self._remote.is_served:
                try:
                    await self._remote.serve(self.worker_id)
                except PgworkdError as error:
                    await outage.wait(error)
                else:
                    outage.passed()

    async def _attend(self, tasks: TaskGroup) -> None:
        tasks.start_soon(self._tell_queues, name="queues")
        with anyio.move_on_after(self.options.connection.connect_timeout_s):
            await self._queues.overrides.first.wait()
