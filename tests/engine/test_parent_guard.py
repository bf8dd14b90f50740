"""The parent-death guard between `pgworkd autoscale` and each of its workers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pgworkd.processes import parent_guard
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

GUARD = [sys.executable, "-I", "-S", parent_guard.__file__]
SCALE = """
import os, subprocess, sys, threading, time
for _ in range(128):
    threading.Thread(target=time.sleep, args=(20,)).start()
subprocess.Popen([*sys.argv[1:5], str(os.getpid()), *sys.argv[5:]], start_new_session=True)
"""
KID = """
import os, signal
heard, over = [], []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))
signal.signal(signal.SIGWINCH, lambda *_: over.append(1))
signal.alarm(20)  # a test that failed leaves nobody behind
print(os.getppid(), os.getpid(), flush=True)
while not over:
    signal.pause()
print(*heard, flush=True)
"""


class Trio(NamedTuple):
    """A multi-threaded process in the role of autoscale, its parent-death guard, and the worker."""

    scale: subprocess.Popen[str]
    parent_guard: int
    kid: int

    async def received(self, *alive: int) -> list[str]:
        """The signals that the worker received, once none is pending in `alive`; ends the worker."""
        await until(lambda: all(map(quiet, [*alive, self.kid])))
        os.kill(self.kid, signal.SIGWINCH)
        assert self.scale.stdout is not None
        return self.scale.stdout.readline().split()


@pytest.fixture
def trio() -> Iterator[Trio]:
    command = [sys.executable, "-c", SCALE, *GUARD, sys.executable, "-c", KID]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scale:
        try:
            assert scale.stdout is not None
            yield Trio(scale, *map(int, scale.stdout.readline().split()))
        finally:
            scale.kill()


def quiet(pid: int) -> bool:
    """The process sleeps, and no signal is pending."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    facts = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return facts["State"][0] == "S" and int(facts["SigPnd"], 16) | int(facts["ShdPnd"], 16) == 0


@pytest.mark.parametrize("_round", range(3))
async def test_a_worker_gets_one_signal_when_autoscale_dies(trio: Trio, _round: int) -> None:
    """The kernel signals for each thread that passes the child on to another; a second signal would mean: at once."""
    trio.scale.kill()
    trio.scale.wait()
    assert await trio.received(trio.parent_guard) == ["SIGTERM"]


async def test_a_stop_in_progress_stays_graceful_when_autoscale_is_killed(trio: Trio) -> None:
    os.kill(trio.parent_guard, signal.SIGTERM)
    await until(lambda: quiet(trio.parent_guard))
    trio.scale.kill()
    trio.scale.wait()
    assert await trio.received(trio.parent_guard) == ["SIGTERM"]


async def test_a_worker_gets_a_signal_when_its_guard_is_killed(trio: Trio) -> None:
    os.kill(trio.parent_guard, signal.SIGKILL)
    await until(lambda: Path(f"/proc/{trio.parent_guard}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    assert await trio.received() == ["SIGTERM"]


async def test_other_signals_are_forwarded(trio: Trio) -> None:
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.kill(trio.parent_guard, number)
        await until(lambda: quiet(trio.parent_guard))
        await until(lambda: quiet(trio.kid))
    assert await trio.received(trio.parent_guard) == ["SIGHUP", "SIGTERM", "SIGINT"]


def guarded(parent: int, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GUARD, str(parent), *command], check=False, capture_output=True, text=True, timeout=20)


def test_a_worker_whose_parent_is_already_dead_does_not_start() -> None:
    late = guarded(1, sys.executable, "-c", "print('begun')")
    assert (late.returncode, late.stdout) == (1, "")
    assert "autoscale ended before" in late.stderr


def test_a_missing_command_is_named() -> None:
    assert guarded(os.getpid(), "/nowhere/x").stderr == "pgworkd: /nowhere/x: No such file or directory\n"


def test_a_worker_inherits_no_ignored_or_blocked_signals() -> None:
    status = guarded(os.getpid(), "cat", "/proc/self/status").stdout
    ignored, blocked = (re.findall(rf"{name}:\s*(\w+)", status)[0] for name in ("SigIgn", "SigBlk"))
    assert int(ignored, 16) & (1 << (signal.SIGPIPE - 1)) == 0
    assert int(blocked, 16) == 0


@pytest.mark.parametrize("code", [0, 3, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV])
def test_the_guard_exits_like_its_worker(code: int, tmp_path: Path) -> None:
    end = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    with contextlib.chdir(tmp_path):  # where a core file may be written
        assert guarded(os.getpid(), sys.executable, "-c", end).returncode == code
