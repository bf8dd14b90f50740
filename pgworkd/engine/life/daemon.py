"""The daemon: puts the engine's parts together, starts them in order and stops them in order.

Start: reach the database (waiting for it as long as it takes), check the schema, register, renew the lease,
listen, then claim. Stop: claim nothing more, give back what has not begun, wait for what runs, cancel the
rest, settle everything, sign off.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pgworkd.database.listener import NotificationListener
from pgworkd.database.store import Rescued, Store
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.claim.pool import Pool
from pgworkd.engine.life.maintenance import Maintenance
from pgworkd.engine.life.notifications import Notifications
from pgworkd.engine.life.options import Options, Part
from pgworkd.engine.life.queues import QueueSet
from pgworkd.engine.life.recurring import Recurring
from pgworkd.engine.life.startup import Startup
from pgworkd.engine.life.worker import WorkerLife
from pgworkd.engine.registry import App, DeadJob
from pgworkd.engine.run.runner import Runner
from pgworkd.engine.settle.hooks import Hooks
from pgworkd.engine.settle.reporter import Reporter
from pgworkd.engine.settle.settler import Settler
from pgworkd.engine.wake.poller import Poller
from pgworkd.errors import InvalidPayload, PgworkdError, SchemaError, UsageError
from pgworkd.words import events
from pgworkd.words.events import Events
from pgworkd.words.job import Ending, Outcome, Reason
from pgworkd.words.payload import decode
from pgworkd.words.validation import counted

FLUSH_GRACE_S = 10.0
"""How long a stop waits for the database to take the last outcomes."""
CUT_S = 0.5
"""How long it waits for handlers whose clean-up has been cut off."""


__all__ = ["CUT_S", "FLUSH_GRACE_S", "Daemon", "Options", "Part"]


class Daemon:
    """One worker process: an app's handlers, run for some queues of one database.

    `end_process` ends the process, with a reason, where handlers would outlive the lease of their jobs
    (`lease.end_process`). Without it the daemon stops instead, and `run` returns 1: the process is its host's.
    Threads that do not end are then left behind, and others may run their jobs at the same time; an `async def` that
    swallows its cancellation for ever keeps `run` from returning.
    """

    def __init__(
        self,
        app: App,
        options: Options,
        *,
        queues: Mapping[str, int | None] | None = None,
        parts: tuple[Part, ...] = (),
        events_: Events | None = None,
        end_process: Callable[[str], None] | None = None,
    ) -> None:
        """`queues`: which, with how many slots (None: as the app says); None: all of the app's.

        Raises UsageError for an app without handlers or a queue that no handler serves.
        """
        self.app = app
        self.options = options
        self.events = events_ or Events()
        self.ready = anyio.Event()
        self.stop_requested = anyio.Event()
        self._stop_now = anyio.Event()
        self._parts = parts
        self._end_process = end_process
        self._tasks: TaskGroup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._startup = Startup(options.connection, self.events)
        self._in_flight = InFlight()
        self._store = store = Store(options.connection, lambda: len(self.pools), options.transactions_max)
        self.worker = WorkerLife(
            store,
            self._in_flight,
            self.events,
            name=options.worker_name,
            kinds=app.handlers,
            queues={handler.queue for handler in app.handlers.values()},
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            end_process=end_process or self._give_up_lease,
        )
        self._recurring = Recurring(store, self.events)
        self._reporter = Reporter(store, self.events, self._in_flight, app, options.slow_min_s, options.slow_factor)
        self._hooks = Hooks(app, self.events)
        live = self.worker.live
        self._queues = QueueSet(app, live, self._in_flight, self.events, make=self._pool, drop=self._drop_pool)
        self.pools = live.pools = self._queues.pools
        self._settler = self._make_settler()
        self._runner = Runner(
            app, store, self._recurring, self.events, options.worker_name, live.backoffs, options.grace_s
        )
        self._maintenance = Maintenance(
            *(store, self._recurring, self._in_flight, self.worker, self.events, options.periods),
            on_dead=self._died_elsewhere,
            command_timeout_s=options.connection.command_timeout_s,
            queues=lambda: list(self.pools),
        )
        self._queues.serve(queues)

    def _make_settler(self) -> Settler:
        return Settler(
            self._store,
            self._in_flight,
            self.events,
            self._recurring,
            on_completed=self._completed,
            on_settled=self._settled,
            on_capacity=self._queues.claim_soon,
        )

    def _pool(self, queue: str, slots: int) -> Pool:
        parts = (self._store, self._runner, self._settler, self._in_flight, self.events)
        return Pool(queue, slots, self.app, self.worker, *parts)

    async def _drop_pool(self, queue: str) -> None:
        await self._store.drop_pool(self.worker_id, queue)

    # What others see and ask.

    @property
    def worker_id(self) -> int:
        """The id under which it claims now; it changes when the worker was lost."""
        return self.worker.worker_id

    @property
    def running(self) -> int:
        """Handlers that have been called and have not come back."""
        return self.worker.still_running()

    def healthy(self) -> bool:
        """False when a restart would help: the heartbeat is stuck."""
        return self.worker.lease is None or self.worker.healthy()

    def status(self) -> str:
        """One line for people."""
        if self.stop_requested.is_set():
            return f"stopping, {self.running} running"
        if not self.ready.is_set():
            return f"waiting for {self._startup.waits_for}"
        if self.worker.outdated:
            state = "claims nothing: the schema is newer, upgrade pgworkd"
        else:
            state = "working" if self.worker.may_claim else "fenced: no lease"
        return f"{state}, {self.running} running, queues: {', '.join(self.pools)}"

    def request_stop(self, *, now: bool = False) -> None:
        """Asks for a stop: gracefully, or at once. May be called again to change from the first to the second."""
        self.stop_requested.set()
        self.worker.stopping = True
        if now:
            self._stop_now.set()

    def add_queue(self, queue: str, slots: int | None = None) -> None:
        """Serves one more queue, or one that is served already with other slots (None: as the app says).

        A row of `queues` wins over that. Raises UsageError for a queue that no handler serves, and during a stop.
        """
        if self.stop_requested.is_set():
            raise UsageError(f"the daemon stops: it does not take on queue {queue!r}")
        self._queues.add(queue, slots)

    async def remove_queue(self, queue: str) -> None:
        """Serves a queue no more: gives back what has not begun, and returns when what runs has come out.

        Returns early if the queue is added again meanwhile, or the daemon ends. The last queue may go, too; then the
        daemon waits for another. Raises UsageError for a queue that is not served.
        """
        await self._queues.close(queue).wait()

    def serve(self, queues: Mapping[str, int | None] | None) -> None:
        """Serves exactly these queues from now on (None: all of the app's); the others drain by themselves.

        Raises UsageError, and changes nothing, for a queue that no handler serves.
        """
        if not self.stop_requested.is_set():
            self._queues.serve(queues)

    # Life.

    async def run(self) -> int:
        """Works until asked to stop; the exit code: 0 when nothing was left behind, else 1.

        Raises SchemaError or UsageError when the database can never work as it is (a newer schema, refused
        login); waits for one that is merely away, and for `pgworkd migrate`.
        """
        self._loop = asyncio.get_running_loop()
        self.events.emit(events.DAEMON_STARTING, queues=self._queues.slots, worker=self.options.worker_name)
        exit_code, problem = 1, None
        try:
            async with self._runner.processes, anyio.create_task_group() as tasks:
                for part in self._parts:
                    tasks.start_soon(part.run, self, name=type(part).__name__)
                try:
                    exit_code = await self._live(tasks)
                except PgworkdError as error:
                    problem = error  # kept out of the task group, which would wrap it
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self.worker.stop()
                await self._store.close()
            if isinstance(problem, (SchemaError, UsageError)):
                exit_code = 2  # as the process ends by it
            self.events.emit(events.DAEMON_STOPPED, exit_code=exit_code)
        if problem is not None:
            raise problem
        return exit_code

    async def _live(self, tasks: TaskGroup) -> int:
        began_s: float | None = None
        with anyio.CancelScope() as contact:
            tasks.start_soon(self._cancel_on_stop, contact)
            began_s = await self._startup.made(self._register, self.stop_requested)
        if began_s is None:
            return 0
        self._tasks = tasks
        await self._start(tasks, began_s)
        await self.stop_requested.wait()
        return await self._shut_down()

    async def _cancel_on_stop(self, contact: anyio.CancelScope) -> None:
        """A stop does not wait for a connection that hangs."""
        await self.stop_requested.wait()
        contact.cancel()

    async def _register(self) -> float:
        """Declares schedules, registers: when the lease began."""
        await self._store.ensure_partitions()
        await self._recurring.declare(self.app)
        return await self.worker.register()

    async def _start(self, tasks: TaskGroup, began_s: float) -> None:
        self.worker.start(began_s)
        for task in (self._settler.run, self._reporter.run, self.worker.run):
            tasks.start_soon(task)
        listening = anyio.Event()
        hearing = Notifications(self.pools, self.worker, self._maintenance)
        tasks.start_soon(
            NotificationListener(self._store.listener, hearing, self.events).run, listening.set, name="wake"
        )
        with anyio.move_on_after(self.options.connection.connect_timeout_s):
            await listening.wait()  # a hint only: without it the pools poll
            await self.worker.live.first.wait()  # until then they may not claim
        tasks.start_soon(self._store.tend_connections, self.worker_id, name="connections")
        tasks.start_soon(self._maintenance.run, name="chores")
        look = Poller(self._store, self.pools, self.worker, self.events, self.options.poll_s)
        tasks.start_soon(look.run, name="look")
        self._queues.start(tasks)
        self.ready.set()
        self.events.emit(events.DAEMON_READY, worker_id=self.worker_id, queues=self._queues.slots)

    async def _shut_down(self) -> int:
        if self.worker.lease is not None:
            self.worker.lease.state = "stopping"
        self.events.emit(events.DAEMON_STOPPING, running=self.running, shutdown_s=self.options.shutdown_s)
        for pool in self.pools.values():
            pool.release_unstarted(Reason.SHUTDOWN)
        if not self._stop_now.is_set():
            with anyio.move_on_after(self.options.shutdown_s):
                await self._wait_for_handlers(hurry=True)
        self._in_flight.stop_all(Reason.SHUTDOWN)
        with anyio.move_on_after(self.options.cancel_grace_s + CUT_S):
            await self._wait_for_handlers(hurry=False)
        until = anyio.current_time() + FLUSH_GRACE_S
        with anyio.CancelScope(deadline=until):
            await self._settler.drained()
        reason = f"{counted(len(self._in_flight), 'outcome')} not stored" if len(self._in_flight) else None
        if self.running:
            # Threads, and handlers that swallow their cancellation: they must not outlive the lease of their jobs.
            reason = f"{counted(self.running, 'handler')} would not stop"
            if self._end_process is not None:
                self.events.emit(events.SHUTDOWN_INCOMPLETE, reason=reason)
                self.events.emit(events.DAEMON_STOPPED, exit_code=1, still_running=self.running)
                self._end_process(reason)
        await self.worker.stop()  # first: a heartbeat that finds the worker signed off takes it for lost
        left = await self.worker.sign_off(until, self._maintenance.release_orphans)
        if reason := reason or left:
            self.events.emit(events.SHUTDOWN_INCOMPLETE, reason=reason)
        return 1 if reason else 0

    def _give_up_lease(self, reason: str) -> None:
        """In place of ending the process, which is not ours. Called from the lease's thread, perhaps more than once."""
        if not self.stop_requested.is_set() and self._loop is not None:
            self._loop.call_soon_threadsafe(functools.partial(self._stop_because, reason))

    def _stop_because(self, reason: str) -> None:
        if not self.stop_requested.is_set():
            self.events.emit(events.SHUTDOWN_INCOMPLETE, reason=reason)
            self.request_stop(now=True)

    async def _wait_for_handlers(self, *, hurry: bool) -> None:
        """Waits until no handler runs and no claim is on its way, or, if `hurry`, until a stop at once is asked for."""
        while not self._queues.quiet and not (hurry and self._stop_now.is_set()):
            await anyio.sleep(0.02)

    # What became of jobs.

    def _completed(self, batch: list[Attempt]) -> None:
        self._reporter.completed(batch)
        if any(attempt.claimed.is_suspect or attempt.claimed.serialize_key for attempt in batch):
            self._queues.claim_soon()  # the next suspect, or the next in line, may run
        else:
            self._queues.ended({attempt.queue for attempt in batch})

    def _settled(self, attempt: Attempt, outcome: Outcome, status: str | None) -> None:
        if status == "completed":
            self._completed([attempt])
            return
        self._reporter.settled(attempt, outcome, status)
        if status == "expired":
            self._maintenance.schedules_changed()  # it was skipped: the next one of its schedule is wanted now
        if attempt.claimed.is_suspect or attempt.claimed.serialize_key:
            self._queues.claim_soon()  # as above
        if status == "dead":
            payload: Mapping[str, Any] | None = None
            with contextlib.suppress(InvalidPayload):
                payload = decode(attempt.claimed.payload or "")
            job = attempt.claimed
            dead = DeadJob(str(job.id), attempt.queue, job.kind, job.attempt, outcome.message or "", payload)
            self._died(dead)
        elif outcome.ending is Ending.RELEASED or status == "failed":
            pool = self.pools.get(attempt.queue)
            if pool is not None and not self.stop_requested.is_set():
                pool.expect_also(outcome.delay_s or 0.0)

    def _died_elsewhere(self, rescued: Rescued) -> None:
        self._reporter.died(rescued)
        self._died(DeadJob(str(rescued.id), rescued.queue, rescued.kind, rescued.attempt, rescued.error, None))

    def _died(self, dead: DeadJob) -> None:
        if self._tasks is not None:
            self._hooks.died(dead, self._tasks)
