"""python leash.py PARENT COMMAND...: becomes the command, which gets SIGTERM when the process PARENT is gone.

Run by its path and free of our own imports, so that it takes no time. prctl(2): the leash lasts through exec, but
not through one that changes the user (sudo).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Ends the process when the parent is gone already, or the command cannot be run."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # what we or Python ignore, the command need not
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("pgworkd: autoscale is gone before its worker began")
    try:
        os.execvp(command[0], command)  # noqa: S606 # nosec B606 # it is the operator's own
    except OSError as error:
        sys.exit(f"pgworkd: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
