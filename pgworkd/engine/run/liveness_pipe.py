"""How a supervisor knows that no process of a daemon is left that could still run a handler.

The daemon, and each process in which it runs handlers, keep the write end of a pipe open, to which nothing is written.
When the last of them has exited, for whatever reason, the supervisor reads EOF. Forks of a handler keep it open, too;
programs that a handler executes do not.
"""

from __future__ import annotations

import contextlib
import os

import anyio

VARIABLE = "PGWORKD_REMAINS_FD"
"""The environment variable with the daemon's file descriptor of the pipe."""
_fds: list[int] = []


def hold() -> None:
    """In the daemon, before it starts any process: takes over the inherited descriptor, if there is one."""
    given = os.environ.pop(VARIABLE, "")
    with contextlib.suppress(ValueError, OSError):
        os.set_inheritable(int(given), False)
        _fds.append(int(given))


def inherited() -> tuple[int, ...]:
    """The descriptors to pass to processes that run handlers (`pass_fds`)."""
    return tuple(_fds)


async def gone(end: int) -> None:
    """In the supervisor: waits for EOF."""
    while True:
        await anyio.wait_readable(end)
        if not os.read(end, 4096):
            return
