"""Spans of a test: a provider of its own that keeps them in memory, and a daemon that traces."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pgworkd import App
from pgworkd.engine.life.daemon import Daemon
from pgworkd.tracing import Tracing
from tests.kits.daemon import Recorder, running, until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


class Spans:
    """What has been exported, and a tracer of the application."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.app = self.provider.get_tracer("app")

    def all(self, name: str) -> list[ReadableSpan]:
        """Those of this name, in the order in which they began."""
        found = [span for span in self._exporter.get_finished_spans() if span.name == name]
        return sorted(found, key=lambda span: span.start_time or 0)

    async def wait(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """The same, once there are so many."""
        await until(lambda: len(self.all(name)) >= count)
        found = self.all(name)
        assert len(found) == count
        return found


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """The global provider, which OpenTelemetry lets a program set once, for this test only."""
    found = Spans()
    monkeypatch.setattr(otel, "get_tracer_provider", lambda: found.provider)
    yield found
    found.provider.shutdown()


@contextlib.asynccontextmanager
async def tracing(app: App, dsn: str, **changes: Any) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """A daemon that traces."""
    async with running(app, dsn, parts=(Tracing(otel.get_tracer_provider()),), **changes) as started:
        yield started


def trace_id(span: ReadableSpan) -> str:
    return f"{context(span).trace_id:032x}"


def context(span: ReadableSpan) -> otel.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def is_child(span: ReadableSpan, of: ReadableSpan) -> bool:
    """In the trace of `of`, directly below it."""
    return span.parent is not None and span.parent.span_id == context(of).span_id and trace_id(span) == trace_id(of)


def links(span: ReadableSpan) -> list[tuple[str, str]]:
    """(trace id, span id) of each link."""
    return [(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links]


def to(span: ReadableSpan) -> tuple[str, str]:
    """As a link to this span is shown by `links`."""
    return trace_id(span), f"{context(span).span_id:016x}"


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})
