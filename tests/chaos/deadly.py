"""Processes that kill themselves at a chosen call of the database, or right after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from tests.chaos.history import of_this_process

_armed = ""


def arm() -> None:
    """Reads the points from standard input, until its end."""
    global _armed
    while line := os.read(0, 4096):  # not by sys.stdin, whose lock every child of multiprocessing takes
        _armed = line.decode().strip()


def make_deadly(owner: type, method: str) -> None:
    """Lets calls of that method pass the points "before METHOD" and "after METHOD"."""
    original: Callable[..., Awaitable[Any]] = getattr(owner, method)

    def pass_by(point: str) -> None:
        if point == _armed:
            of_this_process()("dies", point=point)
            os.kill(os.getpid(), signal.SIGKILL)

    async def passed(*args: Any, **kwargs: Any) -> Any:
        pass_by(f"before {method}")
        answer = await original(*args, **kwargs)
        pass_by(f"after {method}")
        return answer

    setattr(owner, method, passed)
