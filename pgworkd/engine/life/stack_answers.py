"""Answers operators who ask where a running attempt is, by the heartbeat's thread: the daemon's loop may be blocked.

The heartbeat brings the requests, and does not wait: each is answered by a task of its own, within LIMIT_S, over a
connection of its own. What is told is code: files, lines and functions, never the value of a variable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from typing import Protocol
from uuid import UUID

import anyio
from anyio.abc import TaskGroup
from anyio.to_thread import run_sync

from pgworkd.core.error_report import describe_error, describe_stack, describe_steps
from pgworkd.core.payload import clean_text
from pgworkd.core.stacks import steps_of
from pgworkd.core.validation import counted
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.life.loop_watch import BLOCKED_S, LoopWatch, attempt_of
from pgworkd.errors import PgworkdError

LIMIT_S = 5.0
"""How long it may take to find a stack, and then to store it."""
TASKS_MAX = 10
"""Tasks that a handler has started, and whose stacks are told beside its own."""
BYTES_MAX = 60 * 1024
OFF = "not told: the setting stacks of this worker is off (stacks in pgworkd.toml, PGWORKD_STACKS)\n"


class StackStore(Protocol):
    """The calls of an answer, on a connection of its own. They raise PgworkdError."""

    async def answer_stack(self, worker_id: int, job_id: UUID, attempt: int, stack: str) -> bool:
        """Stores a stack; False if it is not asked for any more, or not of this worker."""

    async def close(self) -> None:
        """Closes the connection."""


class StackAnswers:
    """The answers of one daemon. All but `__init__` is called in the heartbeat's loop, or in a thread."""

    def __init__(
        self, in_flight: InFlight, watch: LoopWatch, connect: Callable[[float], StackStore], *, told: bool
    ) -> None:
        """`connect` makes a connection; its argument is the limit of each call, in seconds. `told` False: say no."""
        self._in_flight, self._watch, self._connect, self._told = in_flight, watch, connect, told
        self._under_way: set[tuple[UUID, int]] = set()
        self._storing = anyio.Lock()  # one connection at a time

    def begin(self, tasks: TaskGroup, worker_id: int, asked: Collection[tuple[UUID, int]]) -> None:
        """Begins to answer for those attempts that are not being answered for already."""
        for each in asked:
            if each not in self._under_way:
                self._under_way.add(each)
                tasks.start_soon(self._answer, worker_id, each)

    async def _answer(self, worker_id: int, asked: tuple[UUID, int]) -> None:
        try:
            stack = f"not found within {LIMIT_S:g} s: the process, or its disk, is overloaded\n"
            with anyio.move_on_after(LIMIT_S):
                stack = await run_sync(self._found, *asked, abandon_on_cancel=True)
            async with self._storing:
                await self._store(worker_id, asked, clean_text(stack, BYTES_MAX))
        finally:
            self._under_way.discard(asked)

    async def _store(self, worker_id: int, asked: tuple[UUID, int], stack: str) -> None:
        store = self._connect(LIMIT_S)
        try:
            with contextlib.suppress(PgworkdError):  # it is asked for again by the next heartbeat
                await store.answer_stack(worker_id, *asked, stack)
        finally:
            with anyio.CancelScope(shield=True):
                await store.close()

    # In a thread.

    def _found(self, job_id: UUID, number: int) -> str:
        try:
            return self._stack(self._in_flight.find(job_id, number)) if self._told else OFF
        except Exception as error:  # noqa: BLE001 - whoever asks is told, and the heartbeat goes on
            return f"not found: {describe_error(error).summary}\n"

    def _stack(self, attempt: Attempt | None) -> str:
        if attempt is None:
            return "it has ended: its outcome is stored, or about to be\n"
        scope, started, stack = attempt.scope, attempt.started, attempt.stack
        if scope is None or started is None:
            waits = "its handler has not been called yet" if started is None else "its handler has returned"
            return f"{waits}\n"
        head = f"running for {time.monotonic() - started:.1f} s, "
        return head + (self._in_loop(attempt) if stack is None else stack())

    def _in_loop(self, attempt: Attempt) -> str:
        """The stack of a coroutine, and of the tasks that it has started; of the one that runs now, where it runs."""
        running, frame = self._watch.current()
        own = None if attempt.scope is None else attempt.scope.task
        if own is None:
            return "its handler has returned\n"
        others = [task for task in self._watch.tasks() if task is not own and attempt_of(task) is attempt]
        parts = []
        for task in (own, *others[:TASKS_MAX]):
            is_running = task is running and frame is not None
            what = "in the event loop" if task is own else "in a task that it has started"
            lag_s = self._watch.lag_s
            blocks = f", which it has blocked for {lag_s:.1f} s" if lag_s >= BLOCKED_S else ""
            is_at = f"running now{blocks}" if is_running else "waiting"
            text = describe_stack(frame) if is_running and frame is not None else describe_steps(steps_of(task))
            parts.append(f"{what}, {is_at}:\n{text}")
        if others[TASKS_MAX:]:
            parts.append(f"and in {counted(len(others) - TASKS_MAX, 'more task')}\n")
        if self._watch.blocked is not None and not (running is own or running in others):
            parts.append(f"{self._watch.text()}\n")
        return "".join(parts)
