"""One schedule, run: a whole daemon on the simulated loop, its handlers, and all faults."""

from __future__ import annotations

import asyncio
import functools
import random
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import anyio

from pgworkd import App, Job
from pgworkd.core.events import Events
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.engine.life.shutdown import FLUSH_GRACE_S
from pgworkd.errors import PermanentError, RetryAfter, Snooze

from .loop import BEGAN_S, SimulationFailed, SimulationLoop, simulate
from .network import CALM, COMMAND_S, LINK, Network
from .plans import QUEUES, Doing, Plan, Profile, draw
from .stand_ins import SimulatedTimer, stand_ins
from .table import EPOCH_S, Row, Table
from .watch import SAMPLE_S, Watch

POLL_S = 0.5
CANCEL_GRACE_S = 0.5
DRAIN_S = 300.0
"""Seconds after the last fault within which every job has finished."""
STOP_MARGIN_S = 4 * COMMAND_S + 4
"""A stop may have to wait for calls in progress, for its own calls, and 2 s for the heartbeat."""
AFTER_ALL = Doing("ok", 0.001)
odd: ContextVar[int] = ContextVar("odd", default=0)


IN_SPITE = object()
"""Returned after a cancellation: no completion."""


class ProcessEnded(SimulationFailed):
    """The daemon ended its process because handlers ignored their cancellation: a valid end of a schedule."""


_playing: list[World] = []
"""The world whose jobs the handlers run: shared, as creating an app takes longer than a schedule."""


@functools.cache
def _app() -> App:
    async def handle(job: Job) -> Any:
        return await _playing[0].handle(job)

    app = App()
    for queue in QUEUES:
        app.handler(queue, backoff={"base_s": 0.05, "factor": 2, "cap_s": 0.5})(handle)
    return app


class World:
    """A plan while it runs."""

    def __init__(self, loop: SimulationLoop, plan: Plan) -> None:
        self.plan = plan
        self.loop = loop
        self.watch = Watch(loop)
        self.table = Table(loop.time, self._notify, self.watch.settle)
        self.network = Network(self.table, loop.random, loop.note, plan.weather)
        self.doings: dict[UUID, list[Doing]] = {}
        self._refuses = 0
        self._timer = SimulatedTimer(loop)
        self.watch.table, self.watch.network, self.watch.poll_s = self.table, self.network, POLL_S

    async def live(self) -> None:
        _playing[:] = [self]
        bounds = {"FLUSH_MAX": self.plan.flush_max, "CAPACITY": self.plan.capacity}
        with stand_ins(self.loop, self.network, self.watch, **bounds):
            events = Events()
            events.listen(self.watch)
            self.daemon = self.watch.daemon = self._daemon(events)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._sample, name="sampler")
                tasks.start_soon(self._play, tasks, name="player")
                exit_code = await self.daemon.run()
                tasks.cancel_scope.cancel()
            took_s = self.loop.time() - self.watch.stop_asked_at
            if took_s > self._stop_s_max:
                self.watch.broken("stop", f"it took {took_s:.3f} s, and {self._stop_s_max} s at most are due")
            self.watch.finish(exit_code, drained=not self.plan.stops)
        if self.loop.failure is not None:
            raise self.loop.failure

    @property
    def _stop_s_max(self) -> float:
        return self.plan.shutdown_s + CANCEL_GRACE_S + FLUSH_GRACE_S + STOP_MARGIN_S

    def _daemon(self, events: Events) -> Daemon:
        periods = Periods(orphans_s=1.0, rescue_s=60.0)
        options = DaemonOptions(
            LINK,
            lease_s=self.plan.lease_s,
            heartbeat_s=0.5,
            poll_s=POLL_S,
            shutdown_s=self.plan.shutdown_s,
            cancel_grace_s=CANCEL_GRACE_S,
            periods=periods,
        )
        ends = {"end_process": self._end_process, "kill_timer": self._timer}
        return Daemon(_app(), options, queues=self.plan.slots, events_=events, **ends)

    def _end_process(self, reason: str) -> None:
        if not self._refuses:
            self.watch.broken("stop", f"the process was ended, and no handler refused to stop: {reason}")
        if self.loop.failure is None:
            self.loop.failure = ProcessEnded(reason)

    # Handlers

    async def handle(self, job: Job) -> Any:
        key = (job.id, job.attempt)
        doings = self.doings[job.id]
        doing = doings[job.attempt - 1] if job.attempt <= len(doings) else AFTER_ALL
        self.watch.began(key, job.queue)
        lease = self.daemon.worker.heartbeat
        if lease is None or self._timer.kills_at >= lease.renewed_at_s + self.plan.lease_s:
            self.watch.broken("lease", "a handler is called, and the kernel would not end it with the lease")
        try:
            answer = await self._do(doing)
        except asyncio.CancelledError:
            self.watch.ended(key, "cancelled")
            raise
        except BaseException:
            self.watch.ended(key, "raised")
            raise
        self.watch.ended(key, "cancelled" if answer is IN_SPITE else "returned")
        return None if answer is IN_SPITE else answer

    async def _do(self, doing: Doing) -> Any:
        if doing.kind == "burn":
            self.loop.burn(min(0.02, doing.takes_s))
            return None
        if doing.kind == "stray_scope":
            anyio.CancelScope(deadline=self.loop.time() + 0.05).__enter__()
        if doing.kind == "self_cancel":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        try:
            await anyio.sleep(doing.takes_s)
        except asyncio.CancelledError:
            if doing.kind == "swallow":
                return IN_SPITE
            if doing.kind == "stubborn":
                self._refuses += 1
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(min(4.0, 4 * doing.takes_s))
                self._refuses -= 1
            raise
        return _come_out(doing.kind)

    # Faults

    def _notify(self, message: dict[str, object]) -> None:
        self.network.notify(message)

    async def _play(self, tasks: anyio.abc.TaskGroup) -> None:
        began = self.loop.time()
        await self.daemon.ready.wait()
        for act in self.plan.acts:
            await anyio.sleep_until(began + act.at_s)
            self.loop.note(f"act {act.name}")
            getattr(self, f"_{act.name}")(**act.arguments)
        await anyio.sleep_until(began + self.plan.lasts_s)
        if not self.plan.stops:
            await self._drain()
            self._stop(now=False)

    async def _drain(self) -> None:
        """Ends all faults and blockers; then the jobs finish."""
        self.network.weather, self.network.outage = CALM, False
        for queue in self.plan.slots:
            self.table.change(queue, paused=False, max_running=None)
            self._add(queue)
        with anyio.move_on_after(DRAIN_S):
            while not all(row.is_over for row in self.table.rows.values()):
                await anyio.sleep(SAMPLE_S)
            return
        left = [row for row in self.table.rows.values() if not row.is_over]
        self.watch.broken("all_end", f"{DRAIN_S} s after the last trouble there is still {left[0]}")

    async def _sample(self) -> None:
        while True:
            await anyio.sleep(SAMPLE_S)
            self.watch.sample()
            if self.loop.time() >= self._timer.kills_at:
                self.watch.broken("lease", "the kernel ends the process, and nobody held Python's lock")

    def _insert(self, queue: str, priority: int, due_in_s: float, jobs: list[dict[str, Any]]) -> None:
        rows = []
        for job in jobs:
            job_id = UUID(int=len(self.doings) + 1)
            self.doings[job_id] = job["doings"]
            run_at = EPOCH_S + self.loop.time() + due_in_s
            row = Row(job_id, queue, priority, run_at, max_attempts=3, timeout_s=job["timeout_s"], late=due_in_s < 0)
            rows.append(row)
        self.table.insert(rows)

    def _outage(self, for_s: float) -> None:
        self.network.outage = True
        self.network.cut()
        self.loop.call_later(for_s, self._back)

    def _back(self) -> None:
        self.network.outage = False
        self.network.bad_at = self.loop.time()

    def _set(self, queue: str, **settings: Any) -> None:
        self.table.change(queue, **settings)

    def _cancel(self, which: float) -> None:
        live = [row for row in self.table.rows.values() if not row.is_over]
        if live:
            self.table.cancel(live[int(which * len(live))])

    def _cut(self, which: float) -> None:
        self.network.cut()

    def _remove(self, queue: str) -> None:
        if queue in self.daemon.pools:
            self.daemon._queues.close(queue)

    def _add(self, queue: str) -> None:
        if not self.daemon.stop_requested.is_set():
            self.daemon.add_queue(queue)

    def _stop(self, *, now: bool) -> None:
        self.watch.stop_asked_at = self.loop.time()
        self.daemon.request_stop(now=now)


def _come_out(kind: str) -> Any:
    match kind:
        case "result":
            return {"found": 1}
        case "fail":
            raise ValueError("failed")
        case "permanent":
            raise PermanentError("no use")
        case "retry_after":
            raise RetryAfter(0.1)
        case "snooze":
            raise Snooze(0.05)
        case "context":
            odd.set(odd.get() + 1)
    return None


@dataclass(frozen=True)
class Played:
    """A schedule that ran to its end: steps of the loop, virtual seconds, and what happened."""

    steps: int
    virtual_s: float
    trace_hash: str
    trace: tuple[str, ...] = ()


def play(profile: Profile, seed: int, *, keeps_trace: bool = False) -> Played:
    """Runs the schedule of that seed and kind. Raises SimulationFailed, with the trace as a note if it is kept."""
    plan = draw(profile, random.Random(f"plan {seed}"))  # noqa: S311 - repeatable
    loops: list[SimulationLoop] = []

    async def live(loop: SimulationLoop) -> None:
        loops.append(loop)
        await World(loop, plan).live()

    try:
        simulate(seed, live, keeps_trace=keeps_trace)
    except ProcessEnded:
        pass
    except SimulationFailed as failure:
        failure.add_note("\n".join(loops[0].trace or ()))
        raise
    loop = loops[0]
    return Played(loop.steps, loop.time() - BEGAN_S, loop.trace_hash, tuple(loop.trace or ()))
