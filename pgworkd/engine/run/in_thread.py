"""The call of a handler in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pgworkd.core.job import Job
from pgworkd.process import forks


def in_thread(
    function: Callable[..., Any], arguments: dict[str, Any], job: Job | None
) -> tuple[Any, BaseException | None, bool]:
    """Calls a handler: its result, what it raised, and whether it had been asked to end before it returned.

    One that takes no `Job` cannot know that. The exception is returned, not raised, because a GeneratorExit thrown into
    the loop closes coroutines.
    """
    result, error = None, None
    try:
        result = forks.call(function, arguments)
    except BaseException as raised:  # noqa: BLE001 - raised again in the loop
        error = raised
    return result, error, job is not None and job.stopping.is_set()
