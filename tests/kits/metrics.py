"""Metrics as tests need them: snapshots made up, pages fetched over HTTP and read by prometheus_client."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

from pgworkd.core.histogram import BOUNDS_S
from pgworkd.metrics.families import FAMILIES, Family
from pgworkd.metrics.samples import Check, Labels, Samples, Value
from tests.kits.commands import Command

COUNTS = len(BOUNDS_S) + 1
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
NO_PROMETHEUS = "Debian's package prometheus (with promtool) is not installed: apt-get install prometheus"
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""Values by the name of the sample and its labels, sorted."""


class FakeSource:
    """Shows what it is given."""

    def __init__(self, samples: Samples, checks: list[Check] | None = None) -> None:
        self._samples, self._checks = samples, checks or [Check("database", ok=True, says="answers")]

    def samples(self) -> Samples:
        return self._samples

    def checks(self) -> list[Check]:
        return self._checks

    def sick(self) -> str:
        return ""


def filled(queues: int, kinds: int, number: int = 3) -> Samples:
    """Every family of a process with values, for so many queues and kinds."""
    labels = {"queue": [f"q{i}" for i in range(queues)], "kind": [f"k{i}" for i in range(kinds)]}
    found: Samples = {}
    for family in FAMILIES:
        if family.source == "process":
            rows: list[Labels] = [()]
            for label in family.labels:
                rows = [(*row, value) for row in rows for value in labels.get(label, ["a", "b"])]
            found[family.name] = {row: _value(family, number) for row in rows}
    return found


def _value(family: Family, number: int) -> Value:
    return ([number] * COUNTS, number * 1.5) if family.kind == "histogram" else number


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def page(self) -> Page:
        """The values of a page of metrics."""
        read = read_openmetrics if "openmetrics" in self.headers["content-type"] else read_text
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in read(self.text) for s in f.samples}

    @property
    def failing(self) -> dict[str, str]:
        """Checks of /readyz that fail, with what they say."""
        checks: dict[str, dict[str, Any]] = json.loads(self.text)["checks"]
        return {name: check["says"] for name, check in checks.items() if not check["ok"]}


def fetch(address: str, path: str = "/metrics", *, accept: str = "text/plain", method: str = "GET") -> Response:
    """The answer of a server at host:port."""
    place = urlsplit(f"http://{address}")
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=10)
    try:
        connection.request(method, path, headers={"Accept": accept})
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Response(response.status, headers, response.read().decode())
    finally:
        connection.close()


def address_of(run: Command) -> str:
    """Where a command serves its metrics; waits for it."""
    return str(run.event("metrics.listening")["address"])


def total(page: Page, name: str, **labels: str) -> float:
    """The sum of the samples of this name that have these labels."""
    return sum(value for (found, had), value in page.items() if found == name and labels.items() <= dict(had).items())


def fell(before: Page, after: Page) -> list[Any]:
    """What must only grow and did not."""
    ends = ("_total", "_bucket", "_count", "_sum")
    return [key for key, value in before.items() if key[0].endswith(ends) and after.get(key, 0.0) < value]


def complaints(page: str) -> str:
    """What promtool says about a page: nothing if it is well made."""
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=page, text=True, capture_output=True, check=False)
    return (done.stdout + done.stderr).strip() or ("" if done.returncode == 0 else f"exit code {done.returncode}")
