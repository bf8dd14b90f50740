"""Timers of the kernel that end this process before its lease expires, where Python cannot run.

The thread that watches the lease needs Python's interpreter lock, which a handler may hold for minutes (a regular
expression that backtracks, an extension), and a frozen process (SIGSTOP, a cgroup's freezer) runs nothing at all. A
timer needs neither. The first one has faulthandler write the stacks of all threads to standard error, and exits with
EXIT_CODE. The second one is SIGKILL: for a frozen process, and in case nobody reads standard error.

They run on CLOCK_MONOTONIC, which stands still while the machine is suspended. Forks and programs started from here do
not inherit them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from typing import Any

EXIT_CODE = 63
"""The exit code of a process that was ended by the first timer: the number of its signal."""
_CLOCK_MONOTONIC = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = (("whole", ctypes.c_long), ("nano", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class _SignalEvent(ctypes.Structure):
    """struct sigevent; `notify` 0 is SIGEV_SIGNAL."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 64),
    )


class KillTimer:
    """The timers of this process, which must be ours: see `made`. Not to be called by two threads at once."""

    armed = False
    """True while the timers are set, and not reached."""

    def __init__(self) -> None:
        """Raises OSError or AttributeError where the system has no such timers."""
        self._libc = _with_timers()
        # The kernel keeps a process that is init in its PID namespace (a container) from SIGKILL, but not from a
        # handler; and _exit, called with the number of its signal, may be one.
        kill = signal.SIGKILL if os.getpid() != 1 else self._exit_on(EXIT_CODE + 1)
        faulthandler.register(self._exit_on(EXIT_CODE), file=2, all_threads=True, chain=True)
        self._in = _TimerSpec()
        self._dump, self._kill = self._timer(EXIT_CODE), self._timer(kill)

    @classmethod
    def made(cls) -> KillTimer | None:
        """The timers, for a program that has the process to itself; None where there are none."""
        if sys.platform != "linux":
            return None
        try:
            return cls()
        except (OSError, AttributeError):
            return None

    def arm(self, dump_in_s: float, kill_in_s: float) -> None:
        """Ends the process after these seconds, unless it is called again, or `disarm`, before."""
        self.armed = True
        self._set(self._kill, kill_in_s)  # first: to write the stacks may take for ever
        self._set(self._dump, dump_in_s)

    def disarm(self) -> None:
        """Lets the process live."""
        self._set(self._dump, None)
        self._set(self._kill, None)
        self.armed = False

    def _exit_on(self, number: int) -> int:
        end = self._libc._exit  # noqa: SLF001 - of the C library
        self._libc.signal(number, ctypes.cast(end, ctypes.c_void_p))
        return number

    def _timer(self, number: int) -> ctypes.c_void_p:
        timer, event = ctypes.c_void_p(), _SignalEvent(number=number)
        self._checked(self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)))
        return timer

    def _set(self, timer: ctypes.c_void_p, in_s: float | None) -> None:
        value, left_s = self._in.value, 0.0 if in_s is None else max(in_s, 1e-6)  # 0: not at all
        value.whole, value.nano = int(left_s), int(left_s % 1 * 1e9)
        self._checked(self._libc.timer_settime(timer, 0, ctypes.byref(self._in), None))

    @staticmethod
    def _checked(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), "no timer of the kernel")


def _with_timers() -> Any:
    """The C library, called without giving up the interpreter lock, as these calls return at once. Raises OSError.

    Before glibc 2.34 timers had a library of their own.
    """
    libc = ctypes.PyDLL(None, use_errno=True)
    if not hasattr(libc, "timer_create"):
        libc = ctypes.PyDLL("librt.so.1", use_errno=True)  # finds the functions of the other, too
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    return libc
