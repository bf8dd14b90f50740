"""A simulated event loop: its clock is virtual, and a seeded random generator chooses the order of ready callbacks.

asyncio runs ready callbacks in the order in which they became ready. Correct code does not depend on that order, and
this loop breaks it: each time, it runs one of the first `window` ready callbacks (steps of tasks, callbacks of
futures, timers that are due; all alike). Seeds with a window of 1 keep asyncio's order. What asyncio guarantees
still holds: callbacks run one at a time, none before its time, and a task never has more than one step waiting.

The clock stands still while a callback runs, advances by STEP_S after it, and jumps to the next timer when nothing is
ready. Tasks and anyio's cancel scopes hash by number here: their sets would otherwise be walked in order of address.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from anyio._backends._asyncio import CancelScope

STEP_S = 0.000_005
BEGAN_S = 1000.0
"""The initial time of the clock."""
WINDOWS = (1, 2, 3, 8, 1_000_000)
STEPS_MAX = 400_000
STEPS_OF_AN_END_MAX = 20_000
READINGS_MAX = 5_000
"""How often one callback may read the time: the clock stands still, so a callback that busy-waits never ends."""
T = TypeVar("T")


class SimulationFailed(Exception):  # noqa: N818 - reads as what happened
    """The simulation is stuck, or an invariant does not hold."""


class Deadlock(SimulationFailed):
    """Nothing is ready, no timer is set, and the main task is not done."""


class Runaway(SimulationFailed):
    """More steps than any schedule needs, or a step that does not end."""


class SimulationTask(asyncio.Task[Any]):
    """A task whose hash is its number."""

    _number: int

    def __init__(self, coroutine: Any, *, number: int, **options: Any) -> None:
        self._number = number  # set first: the task is added to a set at once
        super().__init__(coroutine, **{"name": f"task {number}", **options})

    def set_name(self, name: object) -> None:
        """Some loops (Python 3.13.0) name an unnamed task "None"."""
        if name is not None:
            super().set_name(name)

    def __hash__(self) -> int:
        return self._number


class SimulationLoop(asyncio.BaseEventLoop):
    """One run. `random` is its only source of randomness."""

    def __init__(self, seed: int, *, steps_max: int = STEPS_MAX, keeps_trace: bool = False) -> None:
        super().__init__()
        self.random = random.Random(f"schedule {seed}")  # noqa: S311 - repeatable
        self.window = self.random.choice(WINDOWS)
        self.steps = 0
        self.failure: SimulationFailed | None = None
        """Set by a check that finds a violation: the run ends with it, after the current callback."""
        self.errors: list[str] = []
        """Unhandled exceptions."""
        self.trace: list[str] | None = [] if keeps_trace else None
        self._now = BEGAN_S
        self._readings = 0
        self._steps_max = steps_max
        self._hash = hashlib.sha256(b"")
        numbers = itertools.count()
        self.set_task_factory(
            lambda loop, coroutine, **options: SimulationTask(coroutine, loop=loop, number=next(numbers), **options)
        )
        self.set_exception_handler(lambda _, context: self.errors.append(_described(context)))

    def time(self) -> float:
        self._readings += 1
        if self._readings > READINGS_MAX and self.failure is None:
            self.failure = Runaway(f"a step that never ends; these are there:\n{self.waiting()}")
            raise self.failure
        return self._now

    def burn(self, for_s: float) -> None:
        """Advances the clock while nothing else runs, like a callback that blocks the loop."""
        self._now += for_s

    def note(self, text: str) -> None:
        """A line of the trace."""
        line = f"{self._now:.6f} {self.steps} {text}"
        self._hash.update(line.encode())
        if self.trace is not None:
            self.trace.append(line)

    @property
    def trace_hash(self) -> str:
        """A digest of all lines so far, kept or not."""
        return self._hash.hexdigest()

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and (timers[0]._cancelled or timers[0]._when <= self._now or not ready):
            timer = heapq.heappop(timers)
            timer._scheduled = False
            if not timer._cancelled:
                self._now = max(self._now, timer._when)
                ready.append(timer)
        if not ready:
            raise Deadlock("nothing is ready and no timer is set; these wait:\n" + self.waiting())
        if self.window == 1 or len(ready) == 1:
            handle = ready.popleft()
        else:
            at = int(self.random.random() * min(self.window, len(ready)))
            handle = ready[at]
            del ready[at]
        if handle._cancelled:
            return
        self.steps += 1
        self._readings = 0
        if self.steps > self._steps_max:
            raise Runaway(f"more than {self._steps_max} steps; these are there:\n" + self.waiting())
        handle._run()
        self._now += STEP_S
        if self.failure is not None:
            raise self.failure

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers are dropped when they fall due."""

    def waiting(self) -> str:
        """Which tasks wait where, a line each."""
        tasks = sorted(asyncio.all_tasks(self), key=hash)
        return "\n".join(f"  {task.get_name()}: {_where(task)}" for task in tasks)

    # Operations that would leave the simulation.

    def call_soon_threadsafe(self, *_: Any, **__: Any) -> NoReturn:
        raise SimulationFailed("call_soon_threadsafe: there is no other thread in a simulation")

    def run_in_executor(self, *_: Any) -> NoReturn:
        raise SimulationFailed("run_in_executor: there are no threads in a simulation")

    # Shutdown.

    def end(self) -> None:
        """Cancels leftover tasks, gives them some steps to finish, and closes."""
        self.failure = None
        self._steps_max = self.steps + STEPS_OF_AN_END_MAX
        left = sorted(asyncio.all_tasks(self), key=hash)
        for task in left:
            task.cancel()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        if left:
            try:
                self.run_until_complete(asyncio.wait(left))
            except SimulationFailed:
                self.errors.append("tasks would not come out at the end:\n" + self.waiting())
        self.close()


def simulate(seed: int, main: Callable[[SimulationLoop], Coroutine[Any, Any, T]], **options: Any) -> T:
    """Runs `main(loop)` to its end in a simulation with that seed. Raises what it raises, and SimulationFailed."""
    loop = SimulationLoop(seed, **options)
    with _numbered_scopes():
        try:
            return loop.run_until_complete(main(loop))
        finally:
            loop.end()


@contextmanager
def _numbered_scopes() -> Iterator[None]:
    """anyio keeps child scopes in a set; while one is in there, its host is known."""
    original = CancelScope.__hash__
    CancelScope.__hash__ = lambda scope: hash(scope._host_task)  # type: ignore[method-assign]
    try:
        yield
    finally:
        CancelScope.__hash__ = original  # type: ignore[method-assign]


def _described(context: dict[str, Any]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost frame in which a task waits."""
    awaited: Any = task.get_coro()
    place = "done" if task.done() else "not begun"
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None and frame.f_lasti >= 0:
            place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rsplit('/', 2)[-1]}:{frame.f_lineno})"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return place
