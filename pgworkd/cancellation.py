"""Cleaning up after user code that has meddled with the task it was called in."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import anyio
from anyio._backends._asyncio import _task_states


def leave_open_scopes(ours: anyio.CancelScope) -> None:
    """A handler that entered a cancel scope and never left it (`break` out of an async generator is enough) would have
    it close on the next job: they are left here, innermost first, and ours last. anyio has no public way to find them.
    """
    state = _task_states.get(cast(Any, asyncio.current_task()))
    while state is not None and state.cancel_scope is not None:
        scope = state.cancel_scope
        scope.__exit__(None, None, None)
        if scope is ours:
            return


async def forget_stray_cancellation(task: asyncio.Task[Any] | None, cancelling: int) -> None:
    """A handler that cancelled its own task leaves a request on it, which would hit our next await: take it here."""
    if task is None or task.cancelling() <= cancelling:
        return
    with anyio.CancelScope(shield=True), contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    while task.cancelling() > cancelling:
        task.uncancel()
