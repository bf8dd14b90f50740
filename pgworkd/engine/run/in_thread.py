"""The call of a handler in a thread."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from pgworkd.core.error_report import describe_stack
from pgworkd.engine.attempts import Attempt
from pgworkd.process import forks


def in_thread(
    function: Callable[..., Any], arguments: dict[str, Any], attempt: Attempt
) -> tuple[Any, BaseException | None, bool]:
    """Calls a handler: its result, what it raised, and whether it had been asked to end before it returned.

    One that takes no `Job` cannot know that. The exception is returned, not raised, because a GeneratorExit thrown into
    the loop closes coroutines.
    """
    result, error, job = None, None, attempt.job
    attempt.stack = functools.partial(_stack, threading.get_ident())
    try:
        result = forks.call(function, arguments)
    except BaseException as raised:  # noqa: BLE001 - raised again in the loop
        error = raised
    attempt.stack = None
    return result, error, job is not None and job.stopping.is_set()


def _stack(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - the only way
    return "its thread has ended\n" if frame is None else f"in a thread:\n{describe_stack(frame, in_loop=False)}"
