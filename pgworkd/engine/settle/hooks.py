"""Calling the app's `on_dead` hooks: after the fact, bounded in time, and without power over the daemon."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pgworkd.engine.registry import App, DeadJob
from pgworkd.engine.runner_task import discard_late_cancellation
from pgworkd.words import events
from pgworkd.words.error_report import describe_error
from pgworkd.words.events import Events

LIMIT_S = 30.0
"""How long one hook may take for one job."""
AT_ONCE_MAX = 100
"""Hook calls under way at once; a flood of deaths beyond that is reported, not queued without end."""


class Hooks:
    """Tells an app's hooks of each dead job."""

    def __init__(self, app: App, events_: Events) -> None:
        self._hooks = app.dead_hooks
        self._events = events_
        self._under_way = 0

    def died(self, dead: DeadJob, tasks: TaskGroup) -> None:
        """Calls every hook, each in a task of its own."""
        for hook in self._hooks:
            if self._under_way >= AT_ONCE_MAX:
                self._failed(hook, f"not called for job {dead.id}: {AT_ONCE_MAX} calls are under way")
            else:
                self._under_way += 1
                tasks.start_soon(self._call, hook, dead, name="on_dead")

    async def _call(self, hook: Callable[[DeadJob], Any], dead: DeadJob) -> None:
        task = asyncio.current_task()
        try:
            with anyio.fail_after(LIMIT_S):
                answer = hook(dead)
                if inspect.isawaitable(answer):
                    await answer
        except BaseException as error:
            if anyio.current_effective_deadline() == -math.inf:
                raise  # the daemon itself is being torn down
            self._failed(hook, describe_error(error).summary)
        finally:
            self._under_way -= 1
            await discard_late_cancellation(task, 0)

    def _failed(self, hook: Callable[..., Any], error: str) -> None:
        self._events.emit(events.HOOK_FAILED, hook=getattr(hook, "__qualname__", repr(hook)), error=error)
