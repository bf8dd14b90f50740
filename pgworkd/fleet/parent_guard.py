"""python leash.py PARENT COMMAND...: runs the command, which gets one SIGTERM when the process PARENT is gone.

Run by its path and free of our own imports, so that it takes no time. It stays between the two, because the kernel
tells a child of every thread of its parent that ends before the last one does (prctl(2), PR_SET_PDEATHSIG), and a
second SIGTERM would stop a worker at once. A process of one thread passes it on once, and is itself good for one only.
It hands down the other signals as they come, and ends as the command has ended. The kernel's word lasts through exec,
but not through one that changes the user (sudo).
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
PASSED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def main(parent: int, command: list[str]) -> None:
    """Ends the process when the parent is gone already, or the command cannot be run or has ended."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # what we, Python or our parent ignore, the command need not
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED | {signal.SIGCHLD})
    _follow(parent)
    ourselves = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        sys.exit(f"pgworkd: {command[0]}: {error.strerror}")
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _become(ourselves, command)
    _end(_lead(worker))


def _follow(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("pgworkd: autoscale is gone before its worker began")


def _become(parent: int, command: list[str]) -> None:
    _follow(parent)
    try:
        os.execvp(command[0], command)  # noqa: S606 # nosec B606 # it is the operator's own
    except OSError as error:
        sys.exit(f"pgworkd: {command[0]}: {error.strerror}")


def _lead(worker: int) -> int:
    """Its exit code, or minus the signal that has ended it."""
    told = False
    while True:
        number = signal.sigwait(PASSED | {signal.SIGCHLD})
        if number == signal.SIGCHLD:
            pid, status = os.waitpid(worker, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        elif number != signal.SIGTERM or not told:
            os.kill(worker, number)  # not waited for yet, so the number is still its own
            told = told or number == signal.SIGTERM


def _end(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left one, if it was to
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
