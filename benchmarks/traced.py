"""An application that enqueues single jobs, traced and not, in turns on one connection.

    python -m benchmarks.traced CALLS     (the database is PGWORKD_BENCH_DSN's)

Prints the median microseconds of one `enqueue`, by name, as JSON. The ways take turns call by call, in random order,
because a shared machine and its disk drift by more than is to be measured here.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any

import asyncpg
import uvloop

from pgworkd.client import enqueue, enqueueing

from .bare import DSN

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Way = Callable[[], Any]
API = "opentelemetry.trace"
WARM_UP = 50


def dropping() -> TracerProvider:
    """A provider whose spans are batched, and dropped at the end of a batch."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

    class Nowhere(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    return provider


def sdk() -> dict[str, Way]:
    """The ways that need OpenTelemetry: without a current span; in one, but none is made; and in full."""
    from opentelemetry import trace

    provider = dropping()
    trace.set_tracer_provider(provider)
    span = provider.get_tracer("app").start_span("request")
    none = trace.NoOpTracerProvider()

    @contextmanager
    def no_sdk() -> Iterator[None]:
        with trace.use_span(span):
            ours, trace.get_tracer_provider = trace.get_tracer_provider, lambda: none
            try:
                yield
            finally:
                trace.get_tracer_provider = ours

    return {"no span": nullcontext, "no SDK": no_sdk, "traced": lambda: trace.use_span(span)}


@contextmanager
def absent() -> Iterator[None]:
    """As if nobody had imported OpenTelemetry."""
    module = sys.modules.pop(API, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[API] = module


@contextmanager
def unasked() -> Iterator[None]:
    """Without even the question whether it is imported."""
    asked = enqueueing.traced
    enqueueing.traced = lambda _fields, _job_id=None: None
    try:
        yield
    finally:
        enqueueing.traced = asked


async def measure(calls: int, ways: dict[str, Way]) -> dict[str, float]:
    """The median of each way; each call is a transaction of its own."""
    connection = await asyncpg.connect(os.environ[DSN])
    payload = {"number": 1000000, "text": "x" * 70}
    names = list(ways)
    took: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(calls + WARM_UP):
        random.shuffle(names)
        for name in names:
            with ways[name]():
                began = time.perf_counter()
                await enqueue(connection, "bench", payload)
                took[name].append(time.perf_counter() - began)
    await connection.close()
    return {name: median(samples[WARM_UP:]) * 1e6 for name, samples in took.items()}


async def main() -> None:
    print(json.dumps(await measure(int(sys.argv[1]), {"unasked": unasked, "absent": absent, **sdk()})))


if __name__ == "__main__":
    uvloop.run(main())
