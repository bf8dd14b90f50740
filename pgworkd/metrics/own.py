"""What else is on the page: the process itself, under the names that Prometheus' clients give it, and the application's
own metrics, if it has made some with prometheus_client.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pgworkd.log import logger as _logger
from pgworkd.metrics.families import FAMILIES
from pgworkd.metrics.samples import Labels, Samples, Value

SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which the processes of an application share what prometheus_client counts in each of them."""
_STARTED_S = time.time()
_OURS = {family.name.removesuffix("_total") for family in FAMILIES}


def of_process() -> Samples:
    """CPU, memory and files of this process. What the system does not tell is absent."""
    times = os.times()
    found: dict[str, float] = {
        "process_cpu_seconds_total": times.user + times.system,
        "process_start_time_seconds": _STARTED_S,
        "process_max_fds": float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    with contextlib.suppress(OSError):  # Linux only
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        found["process_resident_memory_bytes"] = float(pages * resource.getpagesize())
        found["process_open_fds"] = float(sum(1 for _ in Path("/proc/self/fd").iterdir()))
    return {name: _alone(value) for name, value in found.items()}


def of_application(*, openmetrics: bool) -> bytes:
    """The metrics that the application has registered at prometheus_client, without what is ours.

    With PROMETHEUS_MULTIPROC_DIR those of all its processes. Empty if it has not imported prometheus_client.
    """
    if "prometheus_client" not in sys.modules and SHARED not in os.environ:
        return b""
    try:
        import prometheus_client as client
        from prometheus_client import exposition, multiprocess
        from prometheus_client.openmetrics import exposition as openmetrics_exposition

        source: Any = client.REGISTRY
        if SHARED in os.environ:
            multiprocess.MultiProcessCollector(source := client.CollectorRegistry())  # type: ignore[no-untyped-call]
        write = openmetrics_exposition.generate_latest if openmetrics else exposition.generate_latest
        return bytes(write(_Others(source)))
    except Exception:  # noqa: BLE001 - a collector of the application's that fails; the rest of the page is true
        _logger().exception("metrics.failed", path="the application's own")
        return b""


class _Others:
    """The metrics of a registry but those that are on our page: twice, a scraper would refuse all of it."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Any]:
        return [each for each in self._registry.collect() if each.name not in _OURS]


def _alone(value: float) -> dict[Labels, Value]:
    return {(): value}
