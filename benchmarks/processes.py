"""Programs under measurement: started in a session of their own, observed through /proc, always terminated."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio

from pgworkd.bench import measure

ROOT = Path(__file__).parent.parent
STOP_S = 20.0
"""Seconds that a worker gets to stop."""
WAIT_S = 900.0
"""Time limit of every wait, so that a benchmark that hangs fails."""


class BenchmarkError(RuntimeError):
    """An invalid measurement: a worker died, a job was lost or ran twice, nothing happened."""


class Program:
    """A running program and its output."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PGWORKD_", "PG"))}
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(  # noqa: S603 - commands are ours
                command, cwd=ROOT, env=clean | dict(environ), stdout=out, stderr=out, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """The id of the process itself; `tree` finds its children."""
        return self.process.pid

    def check(self) -> None:
        """Raises BenchmarkError if it has ended."""
        if (code := self.process.poll()) is not None:
            raise BenchmarkError(f"{self._shown()} ended with {code}:\n{self.tail()}")

    def tail(self) -> str:
        """Its last lines of output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    async def stop(self) -> int:
        """Terminates it; returns its exit code. Raises BenchmarkError if it does not exit."""
        self.process.terminate()
        with anyio.move_on_after(STOP_S):
            while self.process.poll() is None:
                await anyio.sleep(0.01)
            return int(self.process.returncode)
        raise BenchmarkError(f"{self._shown()} did not stop within {STOP_S:g} s:\n{self.tail()}")

    async def finished(self) -> str:
        """Waits for its exit; returns its output. Raises BenchmarkError for any exit code but 0."""
        while self.process.poll() is None:
            await anyio.sleep(0.01)
        if self.process.returncode:
            self.check()
        return self.log.read_text()

    def kill(self) -> None:
        """Kills it and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _shown(self) -> str:
        words = [str(word) for word in self.process.args] if isinstance(self.process.args, list) else []
        return " ".join(Path(word).name if "/" in word and "@" not in word else word[:60] for word in words[:6])


@asynccontextmanager
async def running(command: Sequence[str], environ: Mapping[str, str], log: Path) -> AsyncIterator[Program]:
    """The program, for as long as the block lasts."""
    program = Program(list(command), environ, log)
    try:
        yield program
    finally:
        program.kill()


async def until(
    fact: Callable[[], bool] | Callable[[], Awaitable[bool]],
    what: str,
    programs: Sequence[Program] = (),
    *,
    every_s: float = 0.002,
    limit_s: float = WAIT_S,
) -> int:
    """Polls every few ms until the condition holds; returns the monotonic ns at which it did.

    Raises BenchmarkError when it takes too long, and at once when one of the programs has ended.
    """
    deadline, looks = time.monotonic() + limit_s, 0
    while True:
        holds = fact()
        if holds if isinstance(holds, bool) else await holds:
            return time.monotonic_ns()
        looks += 1
        if looks % 50 == 0:
            for program in programs:
                program.check()
        if time.monotonic() > deadline:
            said = "\n".join(program.tail() for program in programs)
            raise BenchmarkError(f"not within {limit_s:g} s: {what}\n{said}")
        await anyio.sleep(every_s)


async def until_told(failures: Coroutine[Any, Any, int]) -> int:
    """Awaits `failures`, the number of failures; SIGTERM and Ctrl-C clean up workers and databases. The exit code."""
    task = asyncio.current_task()
    assert task is not None
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, task.cancel)
    try:
        return 1 if await failures else 0
    except asyncio.CancelledError:
        return 130


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_s(root: int, without: Iterable[int] = ()) -> float:
    """CPU seconds of a process with its descendants, those that have ended included, except `without`.

    User and system time as in /proc/PID/stat, but read from the processes' CPU clocks: a tick is 10 ms, which is a
    twentieth of what a fast drain takes. Only the share of children that have ended is counted in ticks.
    """
    excluded, total = set(without), 0.0
    for pid in tree(root):
        if pid not in excluded:
            with suppress(OSError):
                total += measure.cpu_s(pid)
    with suppress(OSError):
        fields = Path(f"/proc/{root}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return total


def rss_mb(root: int) -> float:
    """Resident memory of a process with its descendants, in MB (10^6 bytes); pages they share count for each."""
    total = 0
    for pid in tree(root):
        with suppress(OSError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE") / 1e6


def parent_of(pid: int) -> int | None:
    """The parent of a process of this machine; None if there is no such process."""
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def name_of(pid: int | None) -> str:
    """The program's name; empty if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
