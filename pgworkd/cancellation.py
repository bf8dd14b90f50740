"""The task that runs one job after another, and what user code may do to it.

A cancel scope per job would cost as much as all the rest of its dispatch, so the jobs of a task share one. It is clean
again as long as nothing was cancelled and nothing left behind; after that the task ends, and another takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from types import TracebackType
from typing import Any, Self, cast

import anyio
from anyio._backends._asyncio import _task_states


class RunnerTask:
    """The current task, entered with its scope: `async with RunnerTask() as task`."""

    __slots__ = ("_cancelling", "_context", "_left", "_state", "_task", "scope")

    def __init__(self) -> None:
        self._task = cast("asyncio.Task[Any]", asyncio.current_task())
        # anyio has no public way to see the innermost scope of a task.
        self._state = _task_states[self._task]
        self._context = contextvars.copy_context()
        self._cancelling = self._task.cancelling()
        self._left = False
        self.scope = anyio.CancelScope()

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

        Not so after a cancellation; when a handler has set context variables; and when it has entered a scope and never
        left it (`break` out of an async generator is enough), which would then close on the next job.
        """
        if (
            self._left
            or self._state.cancel_scope is not self.scope
            or self.scope.cancel_called
            or self._task.cancelling() > self._cancelling
        ):
            return False
        try:
            return contextvars.copy_context() == self._context
        except Exception:  # noqa: BLE001 - some values do not like to be compared
            return False

    async def leave(self, error: BaseException | None) -> bool:
        """Leaves the scopes that are open, innermost first, ours last; `error` is what came out of the handler.

        True if the daemon itself is being torn down: then the error must go on.
        """
        if not self._left:
            self._left = True
            shown = error if isinstance(error, asyncio.CancelledError) else None
            while (scope := self._state.cancel_scope) is not None:
                scope.__exit__(type(shown) if shown else None, shown, None)
                if scope is self.scope:
                    break
            await forget_stray_cancellation(self._task, self._cancelling)
        return anyio.current_effective_deadline() == -math.inf


async def forget_stray_cancellation(task: asyncio.Task[Any] | None, cancelling: int) -> None:
    """A handler that cancelled its own task leaves a request on it, which would hit our next await: take it here."""
    if task is None or task.cancelling() <= cancelling:
        return
    with anyio.CancelScope(shield=True), contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling() > cancelling:
        task.uncancel()
