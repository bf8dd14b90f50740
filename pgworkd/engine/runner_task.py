"""The asyncio task that runs one job after another, and what handlers may do to it.

A cancel scope per job would cost as much as all the rest of its dispatch, so the jobs of a task share one. The task is
reused while it is clean: nothing was cancelled, and nothing left behind; else it ends, and another takes its place.

A handler is cancelled as asyncio does it: one CancelledError, at its current await. anyio's own scopes raise at every
await from then on, which cuts off what `finally` and `__aexit__` await, and spins where a handler swallows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import anyio
from anyio._backends._asyncio import CancelScope, _task_states

from pgworkd import log

AGAIN_S = 0.1
"""A handler that still runs after its grace period is cancelled again this often."""
SHIELDED_S = 0.01
"""How often to check whether a handler has left its shielded scope (a COMMIT)."""


class RunScope(CancelScope):
    """The scope of one task's runs; `end` cancels the run once, and again after its grace period."""

    __slots__ = ("_cut_at", "_next", "asked", "on_deadline", "stop_seen")

    def __init__(self) -> None:
        super().__init__()
        self.asked = False
        """`end` was called."""
        self.stop_seen = False
        """A CancelledError was raised in the handler: if it returns after that, it returns in spite of it."""
        self.on_deadline: Callable[[], None] = _nothing
        self._cut_at = math.inf
        self._next: asyncio.TimerHandle | None = None

    def cancel(self, reason: str | None = None) -> None:
        """Ends the run, whose deadline has passed."""
        self.on_deadline()

    def end(self, grace_s: float) -> None:
        """Cancels the run: at once, and after `grace_s` repeatedly until it ends; the shortest grace counts."""
        cut_at = asyncio.get_running_loop().time() + grace_s
        if self.asked and cut_at >= self._cut_at:
            return
        self.asked, self._cut_at = True, min(cut_at, self._cut_at)
        self._deliver()

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task whose runs these are."""
        return self._host_task

    @property
    def overrun(self) -> bool:
        """True if the run was cancelled, its grace period is over, and it goes on."""
        return self.asked and asyncio.get_running_loop().time() > self._cut_at + AGAIN_S

    def finished(self) -> None:
        """Notes that the handler has returned: nothing more is raised in its task."""
        self.on_deadline = _nothing
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _deliver(self) -> None:
        if self._next is not None:
            self._next.cancel()
        loop, task = asyncio.get_running_loop(), self._host_task
        if task is None:
            return
        left_s = self._cut_at - loop.time()
        if self.stop_seen and left_s > 0:
            wait_s = left_s
        elif self._shielded(task):
            wait_s = SHIELDED_S
        elif _is_about_to_go_on(task):
            wait_s = 0.0  # its await is about to return: it may end without ever having been cancelled
        else:
            task.cancel()
            self.stop_seen = True
            wait_s = max(left_s, AGAIN_S)
        self._next = loop.call_later(wait_s, self._deliver)

    def _shielded(self, task: asyncio.Task[Any]) -> bool:
        scope = _task_states[task].cancel_scope
        while scope is not None and scope is not self:
            if scope.shield:
                return True
            scope = scope._parent_scope  # noqa: SLF001 - as above
        return False


def _nothing() -> None:
    return None


def _is_about_to_go_on(task: asyncio.Task[Any]) -> bool:
    waiter = task._fut_waiter  # type: ignore[attr-defined] # noqa: SLF001 - as anyio does
    return task is asyncio.current_task() or (isinstance(waiter, asyncio.Future) and waiter.done())


class RunnerTask:
    """The current task, entered with its scope: `async with RunnerTask() as task`."""

    __slots__ = ("_cancelling", "_context", "_left", "_state", "_task", "attempt", "scope")

    def __init__(self) -> None:
        self.attempt: log.LoggedAttempt | None = None
        """The attempt that the task runs; log lines written meanwhile, also by tasks of the handler, name it."""
        log.RUNNING.set(self)
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        # anyio has no public way to see the innermost scope of a task.
        self._state = _task_states[self._task]
        self._context = contextvars.copy_context()
        self._cancelling = self._task.cancelling()
        self._left = False
        self.scope = RunScope()

    async def __aenter__(self) -> Self:
        self.scope.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.leave(error)

    @property
    def clean(self) -> bool:
        """True when the next job would find this task as the last one did.

        False after a cancellation, when a handler has set context variables, and when it has entered a scope and never
        left it (`break` out of an async generator is enough), which would then cancel the next job.
        """
        if (
            self._left
            or self._state.cancel_scope is not self.scope
            or self.scope.asked
            or self._task.cancelling() > self._cancelling
        ):
            return False
        try:
            return contextvars.copy_context() == self._context
        except Exception:  # noqa: BLE001 - some values raise when compared
            return False

    async def leave(self, error: BaseException | None) -> bool:
        """Leaves the open scopes, innermost first, ours last; `error` is what the handler raised.

        True if the daemon itself is being torn down: then the error must propagate.
        """
        if not self._left:
            self._left = True
            self.scope.finished()
            shown = error if isinstance(error, asyncio.CancelledError) else None
            while (scope := self._state.cancel_scope) is not None:
                scope.__exit__(type(shown) if shown else None, shown, None)
                if scope is self.scope:
                    break
            await discard_late_cancellation(self._task, self._cancelling)
        return anyio.current_effective_deadline() == -math.inf


async def discard_late_cancellation(task: asyncio.Task[Any] | None, cancelling: int) -> None:
    """Discards a cancellation that a handler requested of its own task: it would hit our next await."""
    if task is None or task.cancelling() <= cancelling:
        return
    with anyio.CancelScope(shield=True), contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling() > cancelling:
        task.uncancel()
