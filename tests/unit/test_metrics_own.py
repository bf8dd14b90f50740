"""Beside ours: the process itself, and what the application has registered at prometheus_client."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import prometheus_client as client
import pytest
from prometheus_client.registry import Collector

from pgworkd.core.address import Address
from pgworkd.metrics import own
from pgworkd.metrics.endpoint import bound, served
from pgworkd.metrics.server import listen
from tests.kits.metrics import PROMETHEUS_ACCEPT, PROMTOOL, FakeSource, complaints, fetch, filled, total

pytestmark = pytest.mark.slow("a port of its own")


@pytest.fixture
def address() -> Iterator[str]:
    listener = listen(Address("127.0.0.1", 0), "test")
    with served(FakeSource(filled(1, 1) | own.of_process()), listener):
        yield str(bound(listener))


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> client.Counter:
    """A counter of the application, at the registry that all its modules share."""
    registry = client.CollectorRegistry()
    monkeypatch.setattr(client, "REGISTRY", registry)
    client.ProcessCollector(registry=registry)
    client.Gauge("pgworkd_slots", "Ours, taken by somebody else.", registry=registry).set(77)
    return client.Counter("invoices", "Sent.", ["country"], registry=registry)


@pytest.mark.parametrize("accept", ["text/plain", PROMETHEUS_ACCEPT])
def test_the_applications_own_metrics_are_on_the_page(address: str, counter: client.Counter, accept: str) -> None:
    counter.labels("de").inc(3)
    answer = fetch(address, accept=accept)
    assert total(answer.page, "invoices_total", country="de") == 3
    assert total(answer.page, "pgworkd_slots") != 77, "a name that is ours is ours"
    assert answer.text.count("# TYPE process_resident_memory_bytes") == 1, "though both have it"
    assert answer.text.count("# EOF") == ("openmetrics" in answer.headers["content-type"])
    if PROMTOOL is not None and accept == "text/plain":
        assert complaints(answer.text) == ""


def test_one_that_fails_takes_nothing_else_away(address: str, counter: client.Counter) -> None:
    class Broken(Collector):
        def collect(self) -> Iterator[client.Metric]:
            raise RuntimeError("no")

        def describe(self) -> list[client.Metric]:
            return []

    client.REGISTRY.register(Broken())
    assert total(fetch(address).page, "pgworkd_slots") > 0


def test_the_process_is_told_of(address: str) -> None:
    page = fetch(address).page
    assert 1e6 < total(page, "process_resident_memory_bytes") < 1e10
    assert total(page, "process_cpu_seconds_total") > 0
    assert 0 < total(page, "process_open_fds") < total(page, "process_max_fds")
    assert total(page, "process_start_time_seconds") > 1.7e9


def test_all_processes_of_an_application_share_theirs(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As prometheus_client has it: in files, which the process with the port adds up."""
    work = "import prometheus_client as c; c.Counter('letters', 'Sent.').inc(2)"
    monkeypatch.setenv(own.SHARED, str(tmp_path))
    for _ in range(2):
        subprocess.run([sys.executable, "-c", work], env=dict(os.environ), check=True, timeout=60)
    assert total(fetch(address).page, "letters_total") == 4
