"""The daemon: puts the engine's parts together, starts them in order and stops them in order.

Start: reach the database (waiting for it as long as it takes), check the schema, register, renew the lease,
listen, then claim. Stop: claim nothing more, give back what has not begun, wait for what runs, cancel the
rest, settle everything, sign off.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Protocol

import anyio
from anyio.abc import TaskGroup

from . import events, schema
from .app import App, DeadJob
from .chores import Chores, Periods
from .errors import DatabaseUnavailable, InvalidPayload, PgworkdError, UsageError
from .events import Events
from .held import Held, Holdings
from .job import Ending, Outcome, Reason
from .lease import Lease, boot_time_s, end_process
from .link import LinkOptions
from .outage import Outage
from .payload import decode
from .pool import Pool
from .recurring import Recurring
from .reporter import Reporter
from .runner import Runner
from .settler import Settler
from .store import HeartbeatAnswer, Rescued, Store
from .wake import Wake

CANCEL_GRACE_S = 5.0
"""How long a cancelled handler may take to come out at a stop."""
FLUSH_GRACE_S = 10.0
"""How long a stop waits for the database to take the last outcomes."""
HOOK_LIMIT_S = 30.0


class Part(Protocol):
    """An optional companion that lives as long as the daemon (metrics, HTTP, sd_notify)."""

    async def run(self, daemon: Daemon) -> None:
        """Runs until cancelled; must not raise."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a daemon needs to know. Times in seconds."""

    link: LinkOptions
    worker_name: str = "worker"
    lease_s: float = 30.0
    heartbeat_s: float = 10.0
    poll_s: float = 1.0
    shutdown_s: float = 30.0
    transactions_max: int = 10
    slow_min_s: float = 1.0
    slow_factor: float = 5.0
    periods: Periods = field(default_factory=Periods)


class Daemon:
    """One worker process: an app's handlers, run for some queues of one database."""

    def __init__(
        self,
        app: App,
        options: Options,
        *,
        queues: Mapping[str, int | None] | None = None,
        parts: tuple[Part, ...] = (),
        events_: Events | None = None,
        end_process: Callable[[str], None] = end_process,
    ) -> None:
        """`queues`: which, with how many slots (None: as the app says); None: all of the app's.

        Raises UsageError for an app without handlers or a queue that no handler serves.
        """
        self.app = app
        self.options = options
        self.events = events_ or Events()
        self.worker_id = 0
        self.ready = anyio.Event()
        self._slots = _slots(app, queues)
        self._parts = parts
        self._end_process = end_process
        self._holdings = Holdings()
        self._store = Store(options.link, transactions_max=options.transactions_max)
        self._recurring = Recurring(self._store, self.events)
        self._reporter = Reporter(self.events, self._holdings, app, options.slow_min_s, options.slow_factor)
        self._settler = Settler(
            self._store,
            self._holdings,
            self.events,
            self._recurring,
            on_settled=self._settled,
            on_room=self._look_everywhere,
        )
        self._runner = Runner(app, self._store, self._recurring, options.worker_name)
        self._chores = Chores(
            self._store,
            self._recurring,
            self._holdings,
            self,
            self.events,
            options.periods,
            command_timeout_s=options.link.command_timeout_s,
        )
        self.pools = {queue: self._pool(queue, slots) for queue, slots in self._slots.items()}
        self.lease: Lease | None = None
        self._tasks: TaskGroup | None = None
        self._fenced = False
        self._lost = anyio.Event()
        self._stop = anyio.Event()
        self._stop_now = anyio.Event()
        self._lease_outage = Outage("lease", self.events)

    def _pool(self, queue: str, slots: int) -> Pool:
        return Pool(
            queue, slots, self.app, self, self._store, self._runner, self._settler, self._holdings, self.events
        )

    # What others see and ask.

    @property
    def may_claim(self) -> bool:
        """True while the lease is sound and the daemon is not stopping."""
        return not self._fenced and not self._stop.is_set() and self.lease is not None and self.lease.fresh

    @property
    def running(self) -> int:
        """Handlers that have been called and have not come back."""
        return sum(pool.running for pool in self.pools.values())

    @property
    def stopping(self) -> bool:
        """True from the first request to stop."""
        return self._stop.is_set()

    def request_stop(self, *, now: bool = False) -> None:
        """Asks for a stop: gracefully, or at once. May be called again to change from the first to the second."""
        self._stop.set()
        if now:
            self._stop_now.set()

    # Life.

    async def run(self) -> int:
        """Works until asked to stop; the exit code: 0 when nothing was left behind, else 1.

        Raises SchemaError or UsageError when the database can never work as it is (no or newer schema, refused
        login); waits for one that is merely away.
        """
        self.events.emit(events.DAEMON_STARTING, queues=dict(self._slots), worker=self.options.worker_name)
        exit_code = 1
        try:
            if not await self._first_contact():
                exit_code = 0
                return exit_code
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                await self._start(tasks)
                await self._stop.wait()
                exit_code = await self._wind_down(tasks)
        finally:
            with anyio.CancelScope(shield=True):
                if self.lease is not None:
                    await self.lease.stop()
                await self._store.close()
            self.events.emit(events.DAEMON_STOPPED, exit_code=exit_code)
        return exit_code

    async def _first_contact(self) -> bool:
        """Checks the schema and registers. False if asked to stop before the database was there."""
        outage = Outage("start", self.events)
        while not self._stop.is_set():
            try:
                await schema.verify(self.options.link)
                await self._register()
                await self._store.ensure_partitions()
                await self._recurring.declare(self.app)
            except DatabaseUnavailable as error:
                with anyio.move_on_after(outage.failed(error)):
                    await self._stop.wait()
            else:
                outage.passed()
                return True
        return False

    async def _register(self) -> float:
        """Enters this worker under a new id; when the lease began, on the boot clock."""
        began_s = boot_time_s()
        options = self.options
        if self.worker_id == 0 or self._lost.is_set():
            self.worker_id = await self._store.register(
                options.worker_name, os.getpid(), version("pgworkd"), options.lease_s
            )
        return began_s

    async def _start(self, tasks: TaskGroup) -> None:
        options = self.options
        self.lease = Lease(
            options.link,
            self.worker_id,
            self,
            lease_s=options.lease_s,
            heartbeat_s=options.heartbeat_s,
            end_process=self._end_process,
        )
        self.lease.start()
        tasks.start_soon(self._settler.run, name="settler")
        tasks.start_soon(self._reporter.run, name="reporter")
        listening = anyio.Event()
        tasks.start_soon(Wake(self._store.listener, self, self.events).run, listening.set, name="wake")
        with anyio.move_on_after(options.link.connect_timeout_s):
            await listening.wait()  # a hint only: without it the pools poll
        for task in (self._chores.run, self._watch_due, self._replace_lost):
            tasks.start_soon(task, name=task.__name__.strip("_"))
        for pool in self.pools.values():
            tasks.start_soon(pool.run, tasks, name=f"pool {pool.queue}")
        for part in self._parts:
            tasks.start_soon(part.run, self, name=type(part).__name__)
        self.ready.set()
        self.events.emit(events.DAEMON_READY, worker_id=self.worker_id, queues=dict(self._slots))

    async def _wind_down(self, tasks: TaskGroup) -> int:
        options = self.options
        assert self.lease is not None  # noqa: S101 - started before
        self.lease.state = "stopping"
        self.events.emit(events.DAEMON_STOPPING, running=self.running, shutdown_s=options.shutdown_s)
        for pool in self.pools.values():
            pool.give_back()
        if not self._stop_now.is_set():
            with anyio.move_on_after(options.shutdown_s):
                await self._come_out()
        self._holdings.stop_all(Reason.SHUTDOWN)
        with anyio.move_on_after(CANCEL_GRACE_S):
            await self._come_out(hurry=False)
        with anyio.move_on_after(FLUSH_GRACE_S):
            await self._settler.drained()
        left = len(self._holdings)
        tasks.cancel_scope.cancel()
        await self.lease.stop()
        signed_off = False
        with anyio.CancelScope(shield=True), contextlib.suppress(PgworkdError):
            signed_off = await self._store.sign_off(self.worker_id)
        return 0 if left == 0 and signed_off else 1

    async def _come_out(self, *, hurry: bool = True) -> None:
        """Waits until no handler runs and no claim is on its way, or, if `hurry`, until a stop at once is asked for."""
        while not all(pool.quiet for pool in self.pools.values()) and not (hurry and self._stop_now.is_set()):
            await anyio.sleep(0.02)

    # Repeated looks.

    async def _watch_due(self) -> None:
        """One query a second for all sleeping pools: what is due, or will be. Covers lost notifications."""
        outage = Outage("look", self.events)
        while True:
            delay_s = self.options.poll_s
            sleepers = [p for p in self.pools.values() if p.asleep and not p.paused]
            if sleepers and self.may_claim:
                try:
                    due = await self._store.next_due([p.queue for p in sleepers])
                except PgworkdError as error:
                    delay_s = outage.failed(error)
                else:
                    outage.passed()
                    now = anyio.current_time()
                    for pool in sleepers:
                        due_in_s = due.get(pool.queue)
                        pool.due_at = None if due_in_s is None else now + due_in_s
                        if due_in_s is not None and due_in_s <= self.options.poll_s:
                            pool.look()
            await anyio.sleep(delay_s)

    async def _replace_lost(self) -> None:
        """After the worker was lost: registers anew, once everything that ran under the old id has come out."""
        outage = Outage("register", self.events)
        while True:
            await self._lost.wait()
            while self.running:
                await anyio.sleep(0.02)
            try:
                began_s = await self._register()
            except PgworkdError as error:
                await anyio.sleep(outage.failed(error))
                continue
            outage.passed()
            self._lost = anyio.Event()
            if self.lease is not None:
                self.lease.adopt(self.worker_id, began_s)
            self._unfence()

    # What the lease says.

    def lease_renewed(self, answer: HeartbeatAnswer) -> None:
        """Lifts a fence, ends what is to be cancelled, follows the settings in `queues`."""
        self._lease_outage.passed()
        if self._fenced and not self._lost.is_set():
            self._unfence()
        for job_id, attempt in answer.cancels:
            if (held := self._holdings.find(job_id, attempt)) is not None:
                held.stop(Reason.CANCEL)
        for queue, pool in self.pools.items():
            row = answer.queues.get(queue, {})
            concurrency, paused = row.get("concurrency") or self._slots[queue], bool(row.get("paused"))
            if (concurrency, paused) != (pool.concurrency, pool.paused):
                pool.concurrency, pool.paused = concurrency, paused
                pool.forget_announcement()
                self.events.emit(events.QUEUE_SETTINGS, queue=queue, concurrency=concurrency, paused=paused)

    def lease_trouble(self, error: Exception) -> None:
        """A renewal failed; the thread goes on trying."""
        self._lease_outage.failed(error)

    def lease_fenced(self, since_s: float) -> None:
        """Ends everything that runs: others may soon take it over."""
        if not self._fenced:
            self._fenced = True
            self.events.emit(events.LEASE_FENCED, since_s=round(since_s, 3), running=self.running)
            self._holdings.stop_all(Reason.FENCE)
            for pool in self.pools.values():
                pool.give_back()

    def worker_lost(self) -> None:
        """Our jobs belong to others: ends everything, then a new id."""
        if not self._lost.is_set():
            self.events.emit(events.LEASE_LOST, worker_id=self.worker_id)
            self.lease_fenced(0.0)
            self._lost.set()

    def still_running(self) -> int:
        """Handlers that have not come back (read by the lease's thread)."""
        return self.running

    def _unfence(self) -> None:
        self._fenced = False
        self.events.emit(events.LEASE_RENEWED, worker_id=self.worker_id)
        for pool in self.pools.values():
            pool.forget_announcement()

    # What the wake line says.

    def heard_queue(self, queue: str) -> None:
        """There may be work in this queue."""
        if (pool := self.pools.get(queue)) is not None:
            pool.heard()

    def heard_schedules(self) -> None:
        """A schedule was entered, changed or deleted."""
        self._chores.schedules_changed()

    def heard_worker(self, worker_id: int) -> None:
        """This worker should ask what is wanted of it."""
        if worker_id == self.worker_id and self.lease is not None:
            self.lease.poke()

    def heard_anything(self) -> None:
        """The line was down; the server may have been, too, and with it the unlogged table `pools`."""
        for pool in self.pools.values():
            pool.forget_announcement()
        self._chores.schedules_changed()

    def _look_everywhere(self) -> None:
        for pool in self.pools.values():
            pool.look()

    # What became of jobs.

    def _settled(self, held: Held, outcome: Outcome, status: str | None) -> None:
        self._reporter.settled(held, outcome, status)
        if status == "dead":
            payload: Mapping[str, Any] | None = None
            with contextlib.suppress(InvalidPayload):
                payload = decode(held.claimed.payload)
            claimed = held.claimed
            self._mourn(
                DeadJob(str(claimed.id), held.queue, claimed.kind, claimed.attempt, outcome.message or "", payload)
            )
        elif outcome.ending is Ending.RELEASED or status == "failed":
            self._note_due(held.queue, outcome.delay_s or 0.0)

    def _note_due(self, queue: str, delay_s: float) -> None:
        """A job of ours will be due again: no need to wait for the next look to know."""
        pool = self.pools.get(queue)
        if pool is not None and not self._stop.is_set():
            due_at = anyio.current_time() + delay_s
            if pool.due_at is None or due_at < pool.due_at:
                pool.due_at = due_at
                pool.look()

    def died(self, rescued: Rescued) -> None:
        """A job was found dead with its worker."""
        self._reporter.died(rescued)
        self._mourn(
            DeadJob(str(rescued.id), rescued.queue, rescued.kind, rescued.attempt, rescued.error, None)
        )

    def _mourn(self, dead: DeadJob) -> None:
        for hook in self.app.dead_hooks:
            if self._tasks is not None:
                self._tasks.start_soon(self._call_hook, hook, dead, name="on_dead")

    async def _call_hook(self, hook: Callable[[DeadJob], Any], dead: DeadJob) -> None:
        try:
            with anyio.fail_after(HOOK_LIMIT_S):
                answer = hook(dead)
                if inspect.isawaitable(answer):
                    await answer
        except Exception as error:  # noqa: BLE001 - the user's code; the job is dead whatever it does
            name = getattr(hook, "__qualname__", repr(hook))
            self.events.emit(events.HOOK_FAILED, hook=name, error=f"{type(error).__name__}: {error}")


def _slots(app: App, queues: Mapping[str, int | None] | None) -> dict[str, int]:
    known = app.queues()
    if not known:
        raise UsageError("the app has no handlers: register one with @app.handler(...)")
    if queues is None:
        return known
    for queue in queues:
        if queue not in known:
            raise UsageError(f"no handler serves queue {queue!r}; the app knows: {', '.join(sorted(known))}")
    return {queue: slots or known[queue] for queue, slots in queues.items()}
