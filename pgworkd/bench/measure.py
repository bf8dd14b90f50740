"""Times, drains and CPU seconds, as `pgworkd bench` and the benchmarks of this project measure them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that `percent` of all do not exceed (nearest rank); NaN of nothing."""
    if not samples:
        return math.nan
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


@dataclass(frozen=True, slots=True)
class Times:
    """How long each of several calls or jobs took, in ms."""

    all_ms: Sequence[float]

    def at(self, percent: float) -> float:
        """A percentile, in ms."""
        return percentile(self.all_ms, percent)

    def __str__(self) -> str:
        return f"p50 {self.at(50):.2f}  p95 {self.at(95):.2f}  p99 {self.at(99):.2f} ms"


@dataclass(frozen=True, slots=True)
class Drain:
    """A number of jobs, the time that they took together, and CPU seconds.

    A drain's clock runs from the first call of a handler until no job runs any more. `server_s` None: the processes
    of the server are not visible from this host.
    """

    jobs: int
    seconds: float
    worker_s: float = 0.0
    server_s: float | None = None

    @property
    def rate(self) -> float:
        """Jobs per second."""
        return self.jobs / self.seconds

    @property
    def worker_us(self) -> float:
        """CPU of the worker per job, in microseconds."""
        return self.worker_s / self.jobs * 1e6

    @property
    def server_us(self) -> float | None:
        """CPU of the server per job, in microseconds."""
        return None if self.server_s is None else self.server_s / self.jobs * 1e6

    def __str__(self) -> str:
        server = "" if self.server_us is None else f" + {self.server_us:.1f}"
        return f"{self.rate:,.0f}/s, {self.worker_us:.1f}{server} us of CPU per job"


def cpu_s(pid: int) -> float:
    """CPU seconds of a process of this machine, without its children. Raises OSError.

    By its CPU clock: /proc counts ticks of 10 ms, which is a twentieth of what a fast drain takes.
    """
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), which Python lacks


def sessions_s(pids: Sequence[int]) -> dict[int, float] | None:
    """CPU seconds of sessions of Postgres, by process id; None unless all of them are on this host."""
    try:
        if pids and all((_PROC / str(pid) / "cmdline").read_bytes().startswith(b"postgres: ") for pid in pids):
            return {pid: cpu_s(pid) for pid in pids}
    except OSError:  # the id is that of another host or container
        pass
    return None


def host_ticks() -> tuple[int, int]:
    """The time of all cores of this host, in ticks: busy, and in total. (0, 0) where it is not known."""
    try:
        ticks = [int(field) for field in (_PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):  # not on Linux
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle, and waiting for the disk
