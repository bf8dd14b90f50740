"""The runner tasks of one pool: one per slot at most, each running job after job."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from anyio.abc import TaskGroup

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.job import Outcome, Reason
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.run.large_payloads import Payloads
from pgworkd.engine.run.runner import Runner
from pgworkd.engine.runner_task import RunnerTask
from pgworkd.engine.settle.settler import Settler

SLICE_S = 0.002
"""Time slice: jobs that never await may run back to back for this long before all other tasks are scheduled."""


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of one queue in this process, and whom to ask about them."""

    queue: str
    concurrency: int
    on_low: Callable[[], None]
    """Called once after each `call_when_low`."""
    may_start: Callable[[], bool]
    """Called before each time slice; False: the waiting attempts must not begin, and it has withdrawn them."""


class Executor:
    """Runs submitted attempts in order, up to `concurrency` at once, and passes each with its outcome to the settler.

    `begun` and `finished` count runs since the start; `run_s` is the duration of the last run, in seconds.
    """

    def __init__(self, slots: Slots, runner: Runner, settler: Settler, events_: Events, payloads: Payloads) -> None:
        self.concurrency = slots.concurrency
        self.begun = self.finished = 0
        self.run_s = 0.0
        self.busy = 0
        """Slots in use: handlers that have been called and have not returned."""
        self._waiting: deque[Attempt] = deque()
        self._low_mark: int | None = None
        self._name = f"runner {slots.queue}"
        self._runner = runner
        self._settler = settler
        self._events = events_
        self._payloads = payloads
        self._on_low, self._may_start = slots.on_low, slots.may_start
        self._idle: list[asyncio.Future[None]] = []
        self._runners = 0
        self._tasks: TaskGroup | None = None
        self._yielding = False  # a task that has used up its slice lets all others run, and will continue

    @property
    def waiting(self) -> int:
        """Submitted attempts that have not begun."""
        return len(self._waiting)

    @property
    def free(self) -> int:
        """Free slots, less those that the waiting attempts will take."""
        return self.concurrency - self.busy - len(self._waiting)

    def start(self, tasks: TaskGroup) -> None:
        """Lets the executor start runner tasks, in `tasks`."""
        self._tasks = tasks

    def submit(self, attempts: Iterable[Attempt]) -> None:
        """Adds attempts behind those that wait. `wake` starts them."""
        self._waiting.extend(attempts)

    def withdraw(self, keep: int) -> Iterator[Attempt]:
        """Takes back waiting attempts, the last first, until at most `keep` are left."""
        while len(self._waiting) > keep:
            yield self._waiting.pop()

    def stop_reading(self, reason: Reason) -> None:
        """Ends, for this reason, the attempts whose large payload is being read: their handlers have not begun."""
        self._payloads.stop(reason)

    def call_when_low(self, count: int) -> None:
        """Calls `on_low` once, as soon as no more than `count` attempts wait."""
        self._low_mark = count

    def wake(self, count: int = 2) -> None:
        """Wakes or starts up to `count` tasks, if attempts wait and slots are free; those wake others in turn."""
        for _ in range(min(count, len(self._waiting), self.concurrency - self.busy)):
            if self._idle:
                wakeup = self._idle.pop()
                if not wakeup.done():
                    wakeup.set_result(None)
            elif self._runners < self.concurrency and self._tasks is not None:
                self._runners += 1
                self._tasks.start_soon(self._keep_running, name=self._name)

    async def _keep_running(self) -> None:
        """Runs jobs while there are any, sleeps when there are none, ends when there are too many runner tasks.

        It also ends when a job did not leave it clean: another, if there is work, takes its place.
        """
        try:
            async with RunnerTask() as task:
                try:
                    await self._run_jobs(task)
                except asyncio.CancelledError as error:  # between two jobs: by a timer that some handler left behind
                    if await task.leave(error):
                        raise  # the daemon itself is being torn down
        finally:
            self._runners -= 1
            if self._waiting:
                self._on_low()

    async def _run_jobs(self, task: RunnerTask) -> None:
        while task.clean:
            if self._waiting and self.busy < self.concurrency and not self._yielding and not self._settler.full:
                await self._run_slice(task)
            elif self._runners > self.concurrency:
                return
            else:
                wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(wakeup)
                await wakeup

    def _hooks(self) -> tuple[Callable[[Attempt], None] | None, Callable[[Attempt, Outcome], None]]:
        """The functions to call when an attempt begins (None: nothing) and has ended, looked up once per slice."""
        if self._events.tracer is not None:
            return self._begin_traced, self._put_traced
        return (self._report_start if self._events.has_listener(events.JOB_STARTED) else None), self._settler.put

    def _report_start(self, attempt: Attempt) -> None:
        self._events.emit(events.JOB_STARTED, **attempt.facts())

    def _begin_traced(self, attempt: Attempt) -> None:
        if self._events.tracer is not None:
            attempt.trace = self._events.tracer(attempt)
        self._report_start(attempt)

    def _put_traced(self, attempt: Attempt, outcome: Outcome) -> None:
        if attempt.trace is not None:
            attempt.trace.end(outcome)
        self._settler.put(attempt, outcome)

    async def _read_payload(self, attempt: Attempt) -> None:
        """Reads a payload that the claim has left out, which may take long: a job that can expire begins here."""
        await self._payloads.read(attempt, self._waiting)
        if attempt.reason is None and not self._may_start():
            attempt.reason = Reason.FENCE

    async def _run_slice(self, task: RunnerTask) -> None:
        """Runs jobs while there are any, in time slices between which all other tasks are scheduled.

        Jobs that never await are run by one task at a time. When a job does await, another task continues with the
        next: each slice begins by waking two more tasks, which find either that, or that the first is about to go on.
        """
        waiting, run = self._waiting, self._runner.run
        slice_ends, (begin, put) = 0.0, self._hooks()
        while True:
            if not slice_ends and not self._may_start():
                return
            attempt = waiting.popleft()
            self.begun += 1
            self.busy += 1
            if not waiting and self._low_mark is not None and self.busy < self.concurrency:
                # Tasks whose jobs ended took what was claimed for idle slots: the next job may take long to end.
                self._low_mark = None
                self._on_low()
            if not slice_ends:
                slice_ends = time.monotonic() + SLICE_S
                self.wake()
                begin, put = self._hooks()
            try:
                if attempt.claimed.payload is None and self._runner.knows(attempt):
                    await self._read_payload(attempt)
                if begin is not None:
                    begin(attempt)
                outcome = await run(attempt, task)
            finally:
                self.busy -= 1
            self.finished += 1
            if attempt.started is not None:
                self.run_s = attempt.ended - attempt.started
            put(attempt, outcome)
            if self._low_mark is not None and len(waiting) <= self._low_mark:
                self._low_mark = None
                self._on_low()
                slice_ends = 0.0  # yield, so that the next claim is sent before the next job
            if not task.clean:
                return
            if attempt.ended > slice_ends and not self._yielding:
                slice_ends = 0.0
                self._yielding = True
                try:
                    await asyncio.sleep(0)
                finally:
                    self._yielding = False
            if not waiting or self.busy >= self.concurrency or self._yielding or self._settler.full:
                return
