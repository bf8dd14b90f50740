"""The daemon: builds the engine's parts, starts them in order and stops them in order.

Start: connect to the database (waiting for it as long as it takes), check the schema, register, renew the lease,
listen, then claim. Stop: claim nothing more, release what has not begun, wait for what runs, cancel the rest, settle
everything, end the registration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

from pgworkd import log
from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import Ending, Outcome
from pgworkd.core.source import WorkSource
from pgworkd.database.store import Store
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.claim.own_pool import OwnPool
from pgworkd.engine.claim.pool import Pool
from pgworkd.engine.counters import Counters
from pgworkd.engine.life.heartbeat import LeaseOptions
from pgworkd.engine.life.host import uncut
from pgworkd.engine.life.kill_timer import KillTimer
from pgworkd.engine.life.loop_watch import LoopWatch
from pgworkd.engine.life.member import Member, Membership
from pgworkd.engine.life.options import DaemonOptions, Part
from pgworkd.engine.life.queues import QueueSet
from pgworkd.engine.life.shutdown import Shutdown
from pgworkd.engine.life.stack_answers import StackAnswers
from pgworkd.engine.life.worker import WorkerLife, WorkerProfile
from pgworkd.engine.registry import Registry
from pgworkd.engine.run.own_runner import OwnRunner
from pgworkd.engine.run.runner import Runner, RunnerParts
from pgworkd.engine.settle.job_events import JobEvents
from pgworkd.engine.settle.settler import Settler
from pgworkd.engine.shared import Shared
from pgworkd.errors import PgworkdError, SchemaError, UsageError

__all__ = ["Daemon", "DaemonOptions", "Part"]

Life = TypeVar("Life", bound=WorkerLife)


class Daemon:
    """One worker process: an app's handlers, run for some queues of one database.

    `end_process` is called with a reason, and must end the process, where handlers would outlive the lease of their
    jobs (`heartbeat.end_process`). Without it the daemon stops instead, and `run` returns 1, as the process belongs to
    its host. Threads that do not end are then left behind, and other workers may run their jobs at the same time; an
    `async def` handler that swallows its cancellation for ever keeps `run` from returning.
    """

    def __init__(
        self,
        app: Registry,
        options: DaemonOptions,
        *,
        queues: Mapping[str, int | None] | None = None,
        parts: tuple[Part, ...] = (),
        events_: Events | None = None,
        end_process: Callable[[str], None] | None = None,
        kill_timer: KillTimer | None = None,
    ) -> None:
        """`queues`: which to serve, and how many slots each has (None: as the app says); None: all of the app's.

        `kill_timer`: beside `end_process`, for where Python cannot run (`KillTimer.made()`). `events_`: with listeners;
        without any it logs by `logging`. `parts`: tasks that run as long as it does.
        Raises UsageError for an app without handlers or a queue that no handler serves.
        """
        self.app = app
        self.options = options
        self.events = events_ or Events()
        self.ready, self.stop_requested = anyio.Event(), anyio.Event()
        self._parts = parts
        self._loop: asyncio.AbstractEventLoop | None = None
        self.in_flight = InFlight()
        self.counters = Counters(self.events, app.handlers)
        self._shared = Shared(self.in_flight, self.events, self.counters)
        self._store = self._make_store()
        self._queues = self._make_queues()
        self._job_events = JobEvents(app, self._store, self._shared, options.slow_min_s, options.slow_factor)
        self.loop_watch = LoopWatch(self.events, options.loop_limit, end_process, self.in_flight)
        self._member = self._make_member(end_process or self._give_up_lease, kill_timer)
        self.worker = self._member.worker
        self._settler = self._make_settler()
        self._runner = self._make_runner()
        self._shutdown = Shutdown(options, self._queues, self._settler, self._member, self._shared, end_process)
        self._queues.serve(queues)  # makes the pools, which need all of the above

    def _make_store(self) -> WorkSource:
        options = self.options
        self._database = Store(
            options.connection, lambda: len(self.pools), options.transactions_max, options.environment
        )
        return self._database

    def _make_queues(self) -> QueueSet:
        return QueueSet(
            self.app,
            self.in_flight,
            self.events,
            make=self._make_pool,
            drop=lambda queue: self._store.drop_pool(self.worker_id, queue),
            refresh=lambda: self.worker.renew_now(),  # noqa: PLW0108 - it is made later
        )

    def _make_settler(self) -> Settler:
        return Settler(
            self._store,
            self._shared,
            self._member.planner,
            on_completed=self._completed,
            on_settled=self._settled,
            on_capacity=self._queues.claim_soon,
        )

    def _make_runner(self) -> Runner:
        self._runner_parts = parts = RunnerParts(
            self.app,
            self._store,
            self._member.planner,
            self.events,
            self.options.worker_name,
            self._queues.overrides.backoffs,
            self.options.grace_s,
        )
        return Runner(parts)

    def _make_member(self, end_process: Callable[[str], None], kill_timer: KillTimer | None) -> Membership:
        handlers = self.app.handlers
        queues = {handler.queue for handler in handlers.values()}
        known = {"kinds": handlers or None, "handled_queues": queues}
        connect, told = self._database.heartbeats, self.options.stacks
        stacks = StackAnswers(self.in_flight, self.loop_watch, connect, told=told)
        worker = self._make_worker(WorkerLife, end_process, kill_timer, stacks, **known)
        return Member(
            self._database,
            self._queues,
            worker,
            self._shared,
            self.options,
            on_dead=self._job_events.died_with_worker,
            rules=self.app.alert_rules.values(),
            sessions=self._database.open_sessions,
        )

    def _make_worker(
        self,
        make: type[Life],
        end_process: Callable[[str], None],
        kill_timer: KillTimer | None,
        stacks: StackAnswers | None = None,
        **known: Any,
    ) -> Life:
        """Makes the worker; `known`: the kinds and queues of its `WorkerProfile`."""
        options = self.options
        lease = LeaseOptions(options.lease_s, options.heartbeat_s, end_process, kill_timer, self.loop_watch, stacks)
        profile = WorkerProfile(options.worker_name, **known)
        return make(self._store, self._queues, self.in_flight, self.events, profile, lease)

    def _make_pool(self, queue: str, slots: int) -> Pool:
        if self.app.runs_in_claims(queue):
            own = OwnRunner(self._runner_parts, self._database, self.counters)
            parts = (self.app, self.worker, self._store, own, self._settler, self._shared)
            return OwnPool(queue, slots, *parts, database=self._database)
        return Pool(queue, slots, self.app, self.worker, self._store, self._runner, self._settler, self._shared)

    # State and commands, for its host.

    @property
    def pools(self) -> Mapping[str, Pool]:
        """The pools by queue, including those that drain."""
        return self._queues.pools

    @property
    def worker_id(self) -> int:
        """The id under which the daemon claims; it changes when the worker was presumed dead and registers anew."""
        return self.worker.worker_id

    @property
    def running(self) -> int:
        """Handlers that have been called and have not returned."""
        return self._queues.running

    @property
    def listening(self) -> bool:
        """True while notifications arrive; else the pools only poll."""
        return self._member.listening

    def healthy(self) -> bool:
        """Returns False when a restart would help: the heartbeat is stuck."""
        return self.worker.heartbeat is None or self.worker.healthy()

    def status(self) -> str:
        """The state of the daemon in one line, for people."""
        if self.stop_requested.is_set():
            return f"stopping, {self.running} running"
        if not self.ready.is_set():
            return f"waiting for {self._member.startup.waits_for}"
        state = (self.counters.refusals.text() or "working") if self.worker.may_claim else "fenced: no lease"
        if self.worker.outdated:
            state = "claims nothing: the schema is newer, upgrade pgworkd"
        return f"{state}, {self.running} running, queues: {', '.join(self.pools)}"

    def request_stop(self, *, now: bool = False) -> None:
        """Stops gracefully, or at once. May be called again to change from the first to the second."""
        self.stop_requested.set()
        self.worker.stopping = True
        if now:
            self._shutdown.now.set()

    def add_queue(self, queue: str, slots: int | None = None) -> None:
        """Adds a queue, or changes the slots of one that is served already (None: as the app says).

        A row of `queues` overrides that. Raises UsageError for a queue that no handler serves, and during a stop.
        """
        if self.stop_requested.is_set():
            raise UsageError(f"the daemon is stopping: cannot add queue {queue!r}")
        self._queues.add(queue, slots)

    async def remove_queue(self, queue: str) -> None:
        """Stops serving a queue: releases what has not begun, and returns when all that runs has ended.

        Returns early if the queue is added again meanwhile, or the daemon ends. The last queue may be removed, too;
        then the daemon waits for another. Raises UsageError for a queue that is not served.
        """
        await self._queues.close(queue).wait()

    def serve(self, queues: Mapping[str, int | None] | None) -> None:
        """Serves exactly these queues from now on (None: all of the app's); the others drain in the background.

        Raises UsageError, and changes nothing, for a queue that no handler serves.
        """
        if not self.stop_requested.is_set():
            self._queues.serve(queues)

    # Start and stop.

    async def run(self) -> int:
        """Works until asked to stop; returns the exit code: 0 when nothing was left behind, else 1.

        Raises SchemaError or UsageError for what only another start can put right (a newer schema, a wrong DSN); waits
        for a database that is unavailable or refuses us, and for `pgworkd migrate`. Cancelled, it gives its jobs back.
        """
        log.listen_for_host(self.events)
        return await uncut(self._run, lambda: self.request_stop(now=True))

    async def _run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self.events.emit(events.DAEMON_STARTING, queues=self._queues.slots, worker=self.options.worker_name)
        exit_code, problem = 1, None
        try:
            async with self._runner.processes, anyio.create_task_group() as tasks:
                tasks.start_soon(self.loop_watch.run)
                tasks.start_soon(self._runner.processes.tend)
                for part in self._parts:
                    tasks.start_soon(part.run, self, name=type(part).__name__)
                try:
                    exit_code = await self._work(tasks)
                except PgworkdError as error:
                    problem = error  # kept out of the task group, which would wrap it
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._member.close()
            if isinstance(problem, (SchemaError, UsageError)):
                exit_code = 2  # the exit code of the process
            self.events.emit(events.DAEMON_STOPPED, exit_code=exit_code)
        if problem is not None:
            raise problem
        return exit_code

    async def _work(self, tasks: TaskGroup) -> int:
        began_s = None
        with anyio.CancelScope() as startup:
            tasks.start_soon(self._cancel_on_stop, startup)
            register = partial(self._member.register, self.app)
            began_s = await self._member.startup.run(register, self.stop_requested)
        if began_s is None:
            return 0
        await self._start(tasks, began_s)
        await self.stop_requested.wait()
        return await self._shutdown.run()

    async def _cancel_on_stop(self, startup: anyio.CancelScope) -> None:
        """Cancels a connection attempt at a stop, which does not wait for one that hangs."""
        await self.stop_requested.wait()
        startup.cancel()

    async def _start(self, tasks: TaskGroup, began_s: float) -> None:
        self.worker.start(began_s)
        for task in (self._settler.run, self._job_events.run, self.worker.run):
            tasks.start_soon(task)
        await self._member.attend(tasks)
        self._queues.start(tasks)
        self.ready.set()
        self.events.emit(events.DAEMON_READY, worker_id=self.worker_id, queues=self._queues.slots)

    def _give_up_lease(self, reason: str) -> None:
        """Stops the daemon, as the process is its host's. Called from the heartbeat thread, maybe repeatedly."""
        if not self.stop_requested.is_set() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop_because, reason)

    def _stop_because(self, reason: str) -> None:
        if not self.stop_requested.is_set():
            self.events.emit(events.SHUTDOWN_INCOMPLETE, reason=reason)
            self._shutdown.unasked = True
            self.request_stop(now=True)

    # Called by the settler.

    def _completed(self, batch: Sequence[Attempt]) -> None:
        self._job_events.completed(batch)
        self._queues.completed(batch)

    def _settled(self, attempt: Attempt, outcome: Outcome, status: str | None) -> None:
        if status == "completed":
            self._completed([attempt])
            return
        self._job_events.settled(attempt, outcome, status)
        if status == "expired":
            self._member.schedules_changed()  # it was skipped: the next occurrence of its schedule is needed now
        if attempt.claimed.is_suspect or attempt.claimed.serialize_key:
            self._queues.claim_soon()  # the next suspect, or the next job of the key, may run
        if status == "failed" or (outcome.ending is Ending.RELEASED and status != "dead"):
            pool = self.pools.get(attempt.queue)
            if pool is not None and not self.stop_requested.is_set():
                pool.expect_also(outcome.delay_s or 0.0)
