"""Debian's prometheus and promtool, and a fleet that does not exist: series of every metric, healthy or not."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pgworkd.metrics.families import FAMILIES, Family
from tests.kits.boards import VALUES

PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)")

ODD = "we\"ird\\q'\nueue"
"""A queue's name with all that could end a string early."""
BOUNDS = (0.01, 0.1, 1.0, 10.0, "+Inf")
_LABELS: dict[str, Sequence[str]] = {
    "queue": ("mail", "reports"),
    "kind": ("send", "build"),
    "task": ("rescue", "schedules"),
    "version": ("0.1.0",),
    "python": ("3.12",),
    "schedule": ("nightly",),
    "by": ("session", "slot"),
    "table": ("jobs", "finished_jobs"),
    "endpoint": ("billing",),
    "status": ("200", "503"),
    "method": ("GET", "POST"),
    "route": ("/v1/jobs",),
}
_GAUGES = {
    **dict.fromkeys(("pgworkd_database_up", "pgworkd_listening", "pgworkd_build_info", "pgworkd_scrape_up"), 1.0),
    "pgworkd_jobs_running": 3.0,
    "pgworkd_slots": 8.0,
    "pgworkd_queue_workers": 2.0,
    "pgworkd_queue_slots": 16.0,
    "pgworkd_lease_remaining_seconds": 22.0,
    "pgworkd_loop_lag_seconds": 0.002,
    "pgworkd_sample_age_seconds": 3.0,
    "pgworkd_queue_oldest_due_seconds": 2.0,
    "pgworkd_schedule_last_seconds": 1800.0,
    "pgworkd_oldest_snapshot_seconds": 1.0,
    "pgworkd_processes": 4.0,
    "pgworkd_oldest_snapshot_transactions": 900.0,
    "pgworkd_table_bytes": 4e6,
    "pgworkd_table_dead_rows": 500.0,
    "pgworkd_queue_paused": 0.0,
    "pgworkd_claims_refused_seconds": 0.0,
    "process_resident_memory_bytes": 5e7,
    "process_start_time_seconds": 1.7e9,
    "process_open_fds": 20.0,
    "process_max_fds": 1024.0,
    "pgworkd_requests_waiting": 2.0,
    "pgworkd_request_connections": 4.0,
    "pgworkd_endpoint_paused": 0.0,
    "pgworkd_endpoint_disabled": 0.0,
    "pgworkd_schedule_late_seconds": 0.0,
}
_RARE = {"pgworkd_jobs_lost_total", "pgworkd_jobs_rescued_total", "pgworkd_lease_fences_total"}


class Series(NamedTuple):
    """One series: at first `start`, and `step` more each minute."""

    name: str
    labels: Mapping[str, str]
    start: float
    step: float


def _combined(family: Family, queues: Sequence[str] | None) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [{}]
    for label in family.labels:
        values = VALUES.get((family.name, label)) or _LABELS[label]
        values = queues if label == "queue" and queues else values
        found = [{**each, label: value} for each in found for value in values]
    return found


def _gauge(family: Family, labels: Mapping[str, str]) -> float:
    if family.name == "pgworkd_queue_jobs":
        return {"due": 40.0, "scheduled": 100.0, "running": 3.0}.get(labels["state"], 0.0)
    if family.name == "pgworkd_workers":
        return 2.0 if labels["state"] == "running" else 0.0
    return _GAUGES[family.name]


def healthy(*queues: str) -> list[Series]:
    """Every metric of a fleet that works; some jobs fail, none dies. `queues`: their names."""
    found: list[Series] = []
    for family in FAMILIES:
        for labels in _combined(family, queues):
            if family.kind == "gauge":
                found.append(Series(family.name, labels, _gauge(family, labels), 0))
            elif family.kind == "counter":
                rare = family.name in _RARE or labels.get("outcome") == "dead"
                step = 6 if "failed" in labels.values() else 60
                found.append(Series(family.name, labels, 0 if rare else 100, 0 if rare else step))
            else:
                for number, bound in enumerate(BOUNDS, 1):
                    found.append(Series(f"{family.name}_bucket", {**labels, "le": str(bound)}, 0, 12 * number))
                found += [
                    Series(f"{family.name}_sum", labels, 0, 30),
                    Series(f"{family.name}_count", labels, 0, 12 * len(BOUNDS)),
                ]
    return found


def selector(name: str, labels: Mapping[str, str]) -> str:
    """A series as Prometheus writes it."""
    quoted = (value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in labels.values())
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in zip(labels, quoted, strict=True)) + "}"


def page(series: Sequence[Series], minutes: float) -> str:
    """What a scrape sees, so long after the start."""
    lines = [f"{selector(each.name, each.labels)} {each.start + each.step * minutes:g}" for each in series]
    return "\n".join(lines) + "\n"


def promtool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *map(str, args)], capture_output=True, text=True, timeout=120, check=False)


@contextlib.contextmanager
def served(text: Callable[[], str]) -> Iterator[int]:
    """The port of a page of metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Prometheus:
    """A server that scrapes targets each second."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **params: object) -> Any:
        """The data of an answer of its API."""
        query = urllib.parse.urlencode(params)
        with urllib.request.urlopen(f"{self.url}{path}?{query}", timeout=10) as answer:  # noqa: S310 - our own
            return json.load(answer)["data"]

    def range(self, expr: str, seconds: float = 30) -> list[Any]:
        """The series that an expression has in the last seconds."""
        now = time.time()
        found = self.get("/api/v1/query_range", query=expr, start=now - seconds, end=now, step=1)
        return list(found["result"])


@contextlib.contextmanager
def prometheus(folder: Path, targets: Mapping[str, int], rules: str | None = None) -> Iterator[Prometheus]:
    """A Prometheus with its data in `folder`. `targets`: ports by job; `rules`: the text of a file of rules."""
    assert PROMETHEUS is not None
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]} for job, port in targets.items()
        ],
    }
    if rules is not None:
        (folder / "rules.yml").write_text(rules, encoding="utf-8")
        config["rule_files"] = ["rules.yml"]
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    server = Prometheus(port)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, (folder / "prometheus.log").read_text(encoding="utf-8")[-2000:]
            with contextlib.suppress(OSError):
                if server.get("/api/v1/status/buildinfo"):
                    break
            assert time.monotonic() < deadline, "prometheus does not answer"
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)
