"""python parent_guard.py PARENT COMMAND...: runs the command, which gets one SIGTERM when the process PARENT is gone.

Run by its path and without imports of the package, so that it starts quickly. It stays between the two processes,
because with PR_SET_PDEATHSIG (prctl(2)) the kernel signals a child at the end of *every* thread of its parent, and a
second SIGTERM would stop a worker at once. This process receives those signals and forwards SIGTERM once; as it has
only one thread, its own child is signalled once. It forwards other signals as they come, and ends as the command ends.
PR_SET_PDEATHSIG survives exec, except of a program that changes the user (sudo). A pipe on standard input, as daemons
of `--processes` have, is no alternative: the command may be any program, which would not read it.
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
    """Runs the command and ends the process as it ends; at once if the parent is gone or it cannot be run."""
    for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)  # ignored by Python or the parent, but the command must not inherit that
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
        sys.exit("pgworkd: autoscale ended before its worker was started")


def _become(parent: int, command: list[str]) -> None:
    _follow(parent)
    try:
        os.execvp(command[0], command)  # noqa: S606 # nosec B606 # the operator's own
    except OSError as error:
        sys.exit(f"pgworkd: {command[0]}: {error.strerror}")


def _lead(worker: int) -> int:
    """Forwards signals until the worker ends; its exit code, or minus the signal that ended it."""
    is_stopping = False
    while True:
        number = signal.sigwait(PASSED | {signal.SIGCHLD})
        if number == signal.SIGCHLD:
            pid, status = os.waitpid(worker, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
        elif number != signal.SIGTERM or not is_stopping:
            os.kill(worker, number)  # it has not been reaped, so its pid cannot have been reused
            is_stopping = is_stopping or number == signal.SIGTERM


def _end(code: int) -> None:
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its core already
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
