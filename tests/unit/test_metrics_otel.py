"""Metrics through OpenTelemetry: the numbers of the page, by asynchronous instruments."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum

from pgworkd.metrics.otel import observe
from tests.kits.metrics import COUNTS, FakeSource, filled


def collected(queues: int = 2, kinds: int = 2) -> dict[str, Any]:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe(FakeSource(filled(queues, kinds)), provider)
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    (scope,) = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
    assert scope.scope.name == "pgworkd"
    return {metric.name: metric for metric in scope.metrics}


def values(metric: Any) -> dict[tuple[Any, ...], float]:
    return {tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points}


def test_counters_gauges_and_histograms() -> None:
    found = collected()
    started = found["pgworkd.jobs_started"]
    assert isinstance(started.data, Sum)
    assert started.data.is_monotonic
    assert values(started)[("kind", "k1"), ("queue", "q0")] == 3
    assert isinstance(found["pgworkd.slots"].data, Gauge)
    assert found["pgworkd.lease_remaining"].unit == "s"
    runs = ("kind", "k0"), ("queue", "q1")
    assert values(found["pgworkd.job_run.count"])[runs] == 3 * COUNTS
    assert values(found["pgworkd.job_run.sum"])[runs] == 4.5
    assert found["pgworkd.job_run.sum"].unit == "s"


def test_the_names_for_messaging() -> None:
    found = collected(1, 1)
    attributes = (
        ("messaging.destination.name", "q0"),
        ("messaging.operation.name", "k0"),
        ("messaging.system", "pgworkd"),
    )
    assert values(found["messaging.client.consumed.messages"]) == {attributes: 3}
    assert values(found["messaging.process.duration.count"]) == {attributes: 3 * COUNTS}
    assert values(found["messaging.process.duration.sum"]) == {attributes: 4.5}


def test_one_collection_reads_once() -> None:
    class Counting(FakeSource):
        asked = 0

        def samples(self) -> Any:
            Counting.asked += 1
            return super().samples()

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe(Counting(filled(2, 2)), provider)
    reader.get_metrics_data()
    provider.shutdown()
    assert Counting.asked == 1
