"""Metrics through OpenTelemetry: the numbers of the page, by asynchronous instruments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import asyncpg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, InMemoryMetricReader, Sum

from pgworkd.client import NewJob, Workflow, batch, enqueue, enqueue_many, sent
from pgworkd.metrics.otel import observe, observe_sent
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
        ("messaging.operation.name", "process"),
        ("messaging.system", "pgworkd"),
        ("pgworkd.job.kind", "k0"),
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


@pytest.fixture
def none_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has enqueued nothing yet."""
    monkeypatch.setattr(sent, "_counts", Counter())


@pytest.mark.usefixtures("none_sent")
async def test_jobs_sent_are_counted_by_queue_however_they_are_enqueued(db: asyncpg.Connection[Any]) -> None:
    await enqueue(db, "mail")
    await enqueue(db, "mail", dedupe_key="a", on_duplicate="skip")
    await enqueue_many(db, [NewJob("mail"), NewJob("ocr"), NewJob("ocr")])
    async with batch(db, "all", queue="ocr") as made:
        await made.add([{}, {}], queue="ocr")
        await made.add([{}])
    flow = Workflow()
    flow.add("one", "mail")
    flow.add("two", "mail", after=["one"])
    await flow.enqueue(db)
    with pytest.raises(asyncpg.UniqueViolationError):
        await enqueue(db, "mail", dedupe_key="a")  # was sent, though refused
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_sent(provider)
    data = reader.get_metrics_data()
    provider.shutdown()
    assert data is not None
    ((metric,),) = [scope.metrics for resource in data.resource_metrics for scope in resource.scope_metrics]
    found = {point.attributes.get("messaging.destination.name"): point.value for point in metric.data.data_points}
    assert found == {"mail": 6, "ocr": 4, None: 1}


@pytest.mark.usefixtures("none_sent")
def test_queues_beyond_the_bound_are_counted_together() -> None:
    for number in range(sent.QUEUES_MAX + 50):
        sent.count(f"tenant-{number}", 2)
    found = sent.counts()
    assert len(found) == sent.QUEUES_MAX + 1
    assert found.pop(sent.OTHER) == 100
    assert set(found.values()) == {2}
