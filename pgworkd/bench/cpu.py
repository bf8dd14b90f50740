"""CPU seconds of this process, of sessions of a server on this host, and of all cores. Not on Linux: less."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class Reading(NamedTuple):
    """CPU seconds at one instant. None: not known."""

    worker_s: float
    sessions_s: Mapping[int, float] | None
    """CPU seconds of each session, by process id."""
    host_s: tuple[float, float] | None
    """CPU seconds of all cores: busy, and in total."""


def read(sessions: Collection[int]) -> Reading:
    """Reads the CPU seconds of this process, of all cores, and of `sessions`: process ids of a server."""
    found = {pid: cpu_s for pid in sessions if (cpu_s := _session_s(pid)) is not None}
    local = bool(found) and len(found) == len(sessions)
    return Reading(time.process_time(), found if local else None, _host_s() if local else None)


def used(before: Reading, after: Reading) -> tuple[float, float | None, float | None, float | None]:
    """Between two readings: CPU seconds of the worker, of all sessions, of the busiest, and how busy the host was.

    A session that was not read before counts whole.
    """
    worker_s = after.worker_s - before.worker_s
    if after.sessions_s is None or before.sessions_s is None:
        return worker_s, None, None, None
    each = [cpu_s - before.sessions_s.get(pid, 0.0) for pid, cpu_s in after.sessions_s.items()]
    host = None
    if after.host_s is not None and before.host_s is not None and after.host_s[1] > before.host_s[1]:
        host = (after.host_s[0] - before.host_s[0]) / (after.host_s[1] - before.host_s[1])
    return worker_s, sum(each), max(each, default=0.0), host


def _session_s(pid: int) -> float | None:
    """CPU seconds of a session; None unless its process is one of Postgres here: the id may be that of another host."""
    try:
        if not (_PROC / str(pid) / "cmdline").read_bytes().startswith(b"postgres: "):
            return None
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _host_s() -> tuple[float, float] | None:
    try:
        ticks = [int(field) for field in (_PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    total = sum(ticks)
    return total - ticks[3] - ticks[4], total  # idle, and waiting for the disk
