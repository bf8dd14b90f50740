"""How a supervisor knows that no process of a daemon is left that could still run a handler.

The daemon, and each process in which it runs handlers, keep the write end of a pipe open, to which nothing is written.
When the last of them has exited, for whatever reason, the supervisor reads EOF. What a handler itself forks or executes
does not keep it open.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from pgworkd.process import forks

VARIABLE = "PGWORKD_REMAINS_FD"
"""The environment variable with the daemon's file descriptor of the pipe."""
_fds: list[int] = []


def hold() -> None:
    """Takes over the inherited descriptor, at the start of a daemon or a handler process, if there is one."""
    given = os.environ.pop(VARIABLE, "")
    with contextlib.suppress(ValueError, OSError):
        os.set_inheritable(int(given), False)
        forks.keep_private(int(given))
        _fds.append(int(given))


@contextlib.contextmanager
def passed_on(*others: int) -> Iterator[dict[str, Any]]:
    """Arguments for starting, within the block, a process that runs handlers, so that it holds the pipe, too.

    `others`: more descriptors that it gets.
    """
    with forks.passing(*_fds, *others):
        held = {"env": {**os.environ, VARIABLE: str(_fds[0])}} if _fds else {}
        yield {"pass_fds": [*_fds, *others], **held}


async def gone(end: int) -> None:
    """Waits for EOF, in the supervisor."""
    import anyio  # slow, and handler processes have no need of it

    while True:
        await anyio.wait_readable(end)
        if not os.read(end, 4096):
            return
