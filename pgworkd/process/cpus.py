"""How many CPUs this process may use: a container or a unit may have fewer than its machine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available() -> int:
    """The CPUs of this process' affinity, or of its control group's limit, rounded up, if that is less; at least 1."""
    try:
        own = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux
        own = os.cpu_count() or 1
    return max(1, min([own, *(math.ceil(limit) for limit in _limits())]))


def _limits() -> Iterator[float]:
    """The limits of this process' control group and of all above it, in CPUs."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            yield from _along(CGROUPS, path, _of_version_2)
        elif "cpu" in controllers.split(","):
            for root in {CGROUPS / controllers, CGROUPS / "cpu"}:
                yield from _along(root, path, _of_version_1)


def _along(root: Path, path: str, limit_of: Callable[[Path], float]) -> Iterator[float]:
    """The limits along a path of control groups; in a container it may be its host's, seen by its root only."""
    group = root / path.lstrip("/")
    for directory in (group, *group.parents):
        try:
            if (limit := limit_of(directory)) > 0:
                yield limit
        except (OSError, ValueError, ZeroDivisionError):
            pass
        if directory == root:
            return


def _of_version_2(directory: Path) -> float:
    quota, period = (directory / "cpu.max").read_text(encoding="ascii").split()
    return 0.0 if quota == "max" else int(quota) / int(period)


def _of_version_1(directory: Path) -> float:
    quota, period = ((directory / f"cpu.cfs_{each}_us").read_text(encoding="ascii") for each in ("quota", "period"))
    return int(quota) / int(period)
