"""How a supervisor knows that nothing of a daemon is left that could still run a handler.

The daemon, and each process in which it runs handlers, hold the writing end of a pipe to which nothing is written. When
the last of them is gone, whatever ended it, the supervisor reads the end of the pipe. What a handler forks holds it,
too; programs that it starts do not.
"""

from __future__ import annotations

import contextlib
import os

import anyio

VARIABLE = "PGWORKD_REMAINS_FD"
"""Tells a daemon the number of its end of the pipe."""
_fds: list[int] = []


def hold() -> None:
    """In the daemon, before it starts anything: takes over the end that it was started with, if there is one."""
    given = os.environ.pop(VARIABLE, "")
    with contextlib.suppress(ValueError, OSError):
        os.set_inheritable(int(given), False)
        _fds.append(int(given))


def inherited() -> tuple[int, ...]:
    """What a process that runs handlers must be started with (`pass_fds`)."""
    return tuple(_fds)


async def gone(end: int) -> None:
    """In the supervisor: waits for the end of the pipe."""
    while True:
        await anyio.wait_readable(end)
        if not os.read(end, 4096):
            return
