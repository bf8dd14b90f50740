"""The runner tasks of one pool: as many as it has slots, each running job after job."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from anyio.abc import TaskGroup

from pgworkd.engine.attempts import Attempt
from pgworkd.engine.run.large_payloads import Payloads
from pgworkd.engine.run.runner import Runner
from pgworkd.engine.runner_task import RunnerTask
from pgworkd.engine.settle.settler import Settler
from pgworkd.words import events
from pgworkd.words.events import Events

SLICE_S = 0.002
"""How long jobs that never wait for anything may follow each other before all other tasks get their turn."""


class Executor:
    """Takes claimed jobs from `work`, in order, and hands each with its outcome to the settler."""

    def __init__(
        self,
        queue: str,
        concurrency: int,
        runner: Runner,
        settler: Settler,
        events_: Events,
        on_low: Callable[[], None],
        payloads: Payloads,
    ) -> None:
        """`on_low` is called, once for each time `ask_below` is set, when no more than so many jobs wait."""
        self.concurrency = concurrency
        self.work: deque[Attempt] = deque()
        self.ask_below: int | None = None
        self.busy = 0
        """Handlers that have been called and have not come back."""
        self.begun = self.finished = 0
        """Runs, ever."""
        self.run_s = 0.0
        """How long the last run took."""
        self._name = f"runner {queue}"
        self._runner = runner
        self._settler = settler
        self._events = events_
        self._on_low = on_low
        self.payloads = payloads
        self._idle: list[asyncio.Future[None]] = []
        self._runners = 0
        self._tasks: TaskGroup | None = None
        self._yielding = False  # one of the tasks lets all others have their turn, and will go on

    @property
    def free(self) -> int:
        """Slots beyond those that the jobs here will take."""
        return self.concurrency - self.busy - len(self.work)

    def fill(self, tasks: TaskGroup) -> None:
        """There is work: calls the first tasks, which call others as they go."""
        self._tasks = tasks
        self._wake(2)

    def _wake(self, count: int) -> None:
        """Wakes or starts up to so many tasks, if there is work and are slots for them."""
        for _ in range(min(count, len(self.work), self.concurrency - self.busy)):
            if self._idle:
                wakeup = self._idle.pop()
                if not wakeup.done():
                    wakeup.set_result(None)
            elif self._runners < self.concurrency and self._tasks is not None:
                self._runners += 1
                self._tasks.start_soon(self._keep_running, name=self._name)

    async def _keep_running(self) -> None:
        """One kept task: runs jobs while there are any, waits when there is none, ends when there are too many of it.

        It also ends when a job did not leave it clean: another, if there is work, takes its place.
        """
        try:
            async with RunnerTask() as task:
                try:
                    await self._run_jobs(task)
                except asyncio.CancelledError as error:  # between two jobs: by a timer that some handler forgot
                    if await task.leave(error):
                        raise  # the daemon itself is being torn down
        finally:
            self._runners -= 1
            if self.work:
                self._on_low()

    async def _run_jobs(self, task: RunnerTask) -> None:
        while task.clean:
            if self.work and self.busy < self.concurrency and not self._yielding and not self._settler.full:
                await self._run_slice(task)
            elif self._runners > self.concurrency:
                return
            else:
                wakeup: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._idle.append(wakeup)
                await wakeup

    async def _run_slice(self, task: RunnerTask) -> None:
        """Runs jobs as long as there are any, in slices between which all other tasks get their turn.

        One task at a time does that with jobs that never wait for anything. When a job does wait, the next task goes
        on: each slice begins by calling two more, who find either that, or someone about to go on himself.
        """
        work, run, put = self.work, self._runner.run, self._settler.put
        slice_ends, has_listener = 0.0, False
        while True:
            attempt = work.popleft()
            self.begun += 1
            self.busy += 1
            if not work and self.ask_below is not None and self.busy < self.concurrency:
                # Tasks whose jobs ended have taken what was claimed for idle ones: no end may come for long.
                self.ask_below = None
                self._on_low()
            if not slice_ends:
                slice_ends = time.monotonic() + SLICE_S
                self._wake(2)
                has_listener = self._events.has_listener(events.JOB_STARTED)
            try:
                if attempt.claimed.payload is None:
                    await self.payloads.read(attempt, self.work)
                if has_listener:
                    self._events.emit(events.JOB_STARTED, **attempt.facts())
                outcome = await run(attempt, task)
            finally:
                self.busy -= 1
            self.finished += 1
            if attempt.started is not None:
                self.run_s = attempt.ended - attempt.started
            put(attempt, outcome)
            if self.ask_below is not None and len(work) <= self.ask_below:
                self.ask_below = None
                self._on_low()
                slice_ends = 0.0  # the next claim should be on its way before we go on
            if not task.clean:
                return
            if attempt.ended > slice_ends and not self._yielding:
                slice_ends = 0.0
                self._yielding = True
                try:
                    await asyncio.sleep(0)
                finally:
                    self._yielding = False
            if not work or self.busy >= self.concurrency or self._yielding or self._settler.full:
                return
