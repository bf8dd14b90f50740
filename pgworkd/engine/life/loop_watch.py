"""Watches from a thread of its own whether the event loop runs, names what blocks it, and ends what never will.

While one callback or one step of a task runs, the loop runs nothing else: no other handler, no claim, no stop. The
lease is renewed all the same, by its own thread, so nobody else would ever run the jobs of a loop that is blocked for
good.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import Context
from types import FrameType
from typing import Any, NamedTuple

import anyio

from pgworkd import log
from pgworkd.core import events
from pgworkd.core.error_report import describe_stack
from pgworkd.core.events import Events
from pgworkd.engine.attempts import InFlight

TICK_S = 0.25
BLOCKED_S = 1.0
"""A loop that has not run for this long is blocked."""
SICK_SHARE = 1 / 3
"""Share of the limit from which on a restart is said to help."""
TOLD_S = 1.0
"""How long a listener of events is waited for: standard error may be what the loop is blocked by."""
KINDS_MAX = 10


class Blockage(NamedTuple):
    """A loop that does not run, and since when. `facts`: of the attempt whose handler blocks it, if it is one."""

    since: float
    facts: Mapping[str, Any]


class LoopWatch:
    """The watch of one loop. All attributes may be read from any thread.

    Events are emitted in a thread: loop.blocked after BLOCKED_S, loop.resumed at the end, loop.stuck at the limit, and
    process.stalled where no thread of the process has run for BLOCKED_S.
    """

    blocked: Blockage | None = None
    stuck = False
    """The loop has been blocked for longer than the limit: the process ends, or its lease is not renewed any more."""

    def __init__(
        self,
        events_: Events,
        limit_s: float,
        end_process: Callable[[str], None] | None = None,
        in_flight: InFlight | None = None,
    ) -> None:
        """`limit_s`: how long the loop may be blocked, in seconds; 0: for ever.

        `end_process` is called then, with a reason, and ends the process; None: it is the host's.
        """
        self.limit_s = limit_s
        self._events = events_
        self._end_process = end_process
        self._in_flight = in_flight
        self._asked_at: float | None = None
        """When the loop was asked to answer, on the monotonic clock; None: it has."""

    @property
    def lag_s(self) -> float:
        """For how long the loop has not run, in seconds."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else max(0.0, time.monotonic() - asked_at)

    @property
    def sick(self) -> bool:
        """True where a restart of the process would help."""
        return 0 < self.limit_s * SICK_SHARE <= self.lag_s

    def text(self) -> str:
        """How long the loop has been blocked, and by which kind of job."""
        facts = {} if (blocked := self.blocked) is None else blocked.facts
        by = f" by a job of kind {facts['kind']!r} in queue {facts['queue']!r}" if facts else ""
        return f"the event loop has been blocked for {self.lag_s:.1f} s{by}"

    async def run(self) -> None:
        """Watches the running loop, until cancelled."""
        self._loop, self._thread_id, over = asyncio.get_running_loop(), threading.get_ident(), threading.Event()
        self._asked_at, self.blocked, self.stuck = None, None, False
        threading.Thread(target=self._run, args=(over,), name="pgworkd loop watch", daemon=True).start()
        try:
            await anyio.sleep_forever()
        finally:
            over.set()

    def current(self) -> tuple[asyncio.Task[Any] | None, FrameType | None]:
        """The task that the loop runs now, and where; None: it waits. Called from any thread, after `run`."""
        while True:
            task = asyncio.current_task(self._loop)
            frame = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the only way
            if task is asyncio.current_task(self._loop):  # the frame is of that task
                return task, frame

    def tasks(self) -> set[asyncio.Task[Any]]:
        """The tasks of the loop that have not ended. Called from any thread, after `run`."""
        return asyncio.all_tasks(self._loop)

    # In the thread.

    def _run(self, over: threading.Event) -> None:
        slept_at = time.monotonic()
        while not over.wait(TICK_S):
            stalled_s = time.monotonic() - slept_at - TICK_S
            if stalled_s >= BLOCKED_S:
                self._stalled(stalled_s)
            elif self._asked_at is None:
                self._look_back()
                self._ask()
            elif self.lag_s >= BLOCKED_S:
                self._look()
            slept_at = time.monotonic()
        self._look_back()

    def _ask(self) -> None:
        self._asked_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._asked_at = None

    def _stalled(self, stalled_s: float) -> None:
        """Notes that no thread ran, not even this one: that says nothing about the loop, which may answer now."""
        if self._asked_at is not None and self.blocked is None:
            self._asked_at = time.monotonic()
        begun = [each for each in self._in_flight or () if each.started is not None]
        kinds = Counter(f"{each.queue}/{each.claimed.kind}" for each in begun)
        self._tell(events.PROCESS_STALLED, stalled_s=round(stalled_s, 3), jobs=dict(kinds.most_common(KINDS_MAX)))

    def _look(self) -> None:
        """Notes that the loop does not run."""
        if self.blocked is None:
            self.blocked = Blockage(time.monotonic() - self.lag_s, self._found())
            self._tell(events.LOOP_BLOCKED, **self._facts(), limit_s=self.limit_s)
        if 0 < self.limit_s <= self.lag_s and not self.stuck:
            self.stuck = True
            self._tell(events.LOOP_STUCK, **self._facts(), process_ends=self._end_process is not None)
            if self._end_process is not None and self._asked_at is not None:
                self._end_process(self.text())

    def _look_back(self) -> None:
        """Notes that the loop runs."""
        blocked, self.blocked, self.stuck = self.blocked, None, False
        if blocked is not None:
            self._tell(events.LOOP_RESUMED, **blocked.facts, blocked_s=round(time.monotonic() - blocked.since, 3))

    def _facts(self) -> Mapping[str, Any]:
        blocked, frame = self.blocked, sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the only way
        stack = "" if frame is None else describe_stack(frame)
        return {**({} if blocked is None else blocked.facts), "blocked_s": round(self.lag_s, 3), "stack": stack}

    def _found(self) -> Mapping[str, Any]:
        """The facts of the attempt that the current task of the loop runs, or was started by."""
        task = asyncio.current_task(self._loop)
        attempt = None if task is None else attempt_of(task)
        return {} if attempt is None else attempt.facts()

    def _tell(self, name: str, **facts: Any) -> None:
        """Emits an event, from a thread that may be left behind."""
        teller = threading.Thread(
            target=lambda: self._events.emit(name, **facts), name="pgworkd loop watch tells", daemon=True
        )
        teller.start()
        teller.join(TOLD_S)


def attempt_of(task: asyncio.Task[Any]) -> log.LoggedAttempt | None:
    """The attempt that a task runs, or was started by."""
    running = _context(task).get(log.RUNNING)
    return None if running is None else running.attempt


def _context(task: asyncio.Task[Any]) -> Mapping[Any, Any]:
    """The context variables of a task."""
    if sys.version_info >= (3, 12):
        return task.get_context()
    return next((each for each in gc.get_referents(task) if isinstance(each, Context)), Context())
