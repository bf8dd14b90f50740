"""The timers of the kernel by themselves: they end a process in which Python does not run, and no other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pgworkd.engine.life.kill_timer import EXIT_CODE

pytestmark = pytest.mark.slow("processes that hold the interpreter lock until they are ended")

PROGRAM = """
import ctypes, os, re, signal, subprocess, sys, threading, time
from pgworkd.engine.life.kill_timer import KillTimer

def the_application():
    {does}

timer = KillTimer.made()
timer.arm({dump}, {kill})
print("armed", time.monotonic(), os.getpid(), flush=True)
the_application()
print("lived", flush=True)
"""
DUMP_S, KILL_S = 0.4, 0.6
LATE_S = 2.0
"""A machine that is busy may take so long to notice that a process has ended."""
SLEEPS = "ctypes.PyDLL(None).usleep(20_000_000)"
HOLDS_THE_LOCK = {
    "an extension": SLEEPS,
    "a regular expression": 're.match("(a|aa)+$", "a" * 60 + "b")',
    "a sum": "sum(range(1 << 40))",
    "a large number": "pow(3, 1 << 34)",
    "a thread": f"t = threading.Thread(target=lambda: {SLEEPS}); t.start(); t.join()",
}


class Ran:
    """A program that has armed its timer."""

    def __init__(self, does: str, stderr: Any, before: tuple[str, ...] = ()) -> None:
        text = PROGRAM.format(does=does, dump=DUMP_S, kill=KILL_S)
        command = [*before, sys.executable, "-c", text]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert self.process.stdout is not None
        _, at, pid = self.process.stdout.readline().split()
        self.armed_at, self.pid = float(at), int(pid)

    def ends(self) -> tuple[int, float]:
        """Its exit code, and how long after the timer was armed it ended."""
        code, took_s = self.process.wait(30), time.monotonic() - self.armed_at
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code, took_s


@pytest.mark.parametrize("does", HOLDS_THE_LOCK.values(), ids=HOLDS_THE_LOCK.keys())
def test_a_process_that_holds_the_interpreter_lock_ends_with_its_stacks(does: str, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        code, took_s = Ran(does, log).ends()
    assert code == EXIT_CODE
    assert DUMP_S <= took_s < KILL_S + LATE_S
    assert "in the_application" in (tmp_path / "log").read_text()


def test_a_process_whose_standard_error_nobody_reads_is_killed() -> None:
    """The stacks cannot be written, so the first timer does not end it."""
    with contextlib.ExitStack() as stack:
        full = _full_pipe(stack)
        code, took_s = Ran(SLEEPS, full).ends()
    assert code == -signal.SIGKILL
    assert KILL_S <= took_s < KILL_S + LATE_S


def test_a_process_whose_stacks_are_due_at_once_and_cannot_be_written_is_killed() -> None:
    """To write them is what it does from the moment on at which that timer is set: the other one must be set before."""
    text = f"from pgworkd.engine.life.kill_timer import KillTimer; KillTimer.made().arm(-1.0, {KILL_S})"
    with contextlib.ExitStack() as stack:
        done = subprocess.run([sys.executable, "-c", text], stderr=_full_pipe(stack), check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL


def test_a_process_that_is_stopped_is_killed() -> None:
    code, took_s = Ran("os.kill(os.getpid(), signal.SIGSTOP)", subprocess.DEVNULL).ends()
    assert code == -signal.SIGKILL
    assert KILL_S <= took_s < KILL_S + LATE_S


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--pid", "--fork", "true"], check=False).returncode != 0,
    reason="this user may not make a PID namespace",
)
@pytest.mark.parametrize("reader", [True, False], ids=["stderr is read", "nobody reads stderr"])
def test_init_of_a_container_ends_too(reader: bool, tmp_path: Path) -> None:
    """The kernel protects it from SIGKILL that comes from inside."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w")) if reader else _full_pipe(stack)
        ran = Ran(SLEEPS, log, ("unshare", "--pid", "--fork", "--kill-child"))
        assert ran.pid == 1
        code, took_s = ran.ends()
    assert code == EXIT_CODE + (not reader)
    assert took_s < KILL_S + LATE_S


def test_forks_and_programs_started_from_it_live_on(tmp_path: Path) -> None:
    """A fork has no timers, and gets no signal from them."""
    does = f"""
    programs = subprocess.Popen(["sleep", "2"], stdout=subprocess.DEVNULL)
    fork = os.fork()
    if fork == 0:
        time.sleep({KILL_S} + 0.5)
        open({str(tmp_path / "fork")!r}, "w").close()
        os._exit(0)
    open({str(tmp_path / "pids")!r}, "w").write(str(programs.pid))
    {SLEEPS}
    """
    code, _ = Ran(does.strip(), subprocess.DEVNULL).ends()
    assert code == EXIT_CODE
    assert _lives(int((tmp_path / "pids").read_text()))
    deadline = time.monotonic() + 10
    while not (tmp_path / "fork").exists():
        assert time.monotonic() < deadline, "the fork was ended, too"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "does",
    ["timer.disarm(); time.sleep(0.8)", "for _ in range(8): timer.arm(0.4, 0.6); time.sleep(0.1)\n    timer.disarm()"],
    ids=["disarmed", "armed again and again"],
)
def test_it_can_be_moved_and_disarmed(does: str) -> None:
    ran = Ran(does, subprocess.DEVNULL)
    assert ran.process.stdout is not None
    assert ran.process.stdout.read() == "lived\n"
    assert ran.ends()[0] == 0


def _full_pipe(stack: contextlib.ExitStack) -> int:
    """One that takes nothing more, and is never read."""
    reads, writes = os.pipe()
    stack.callback(os.close, reads)
    stack.callback(os.close, writes)
    os.set_blocking(writes, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writes, b"x" * fcntl.fcntl(writes, fcntl.F_GETPIPE_SZ))
    os.set_blocking(writes, True)
    return writes


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
