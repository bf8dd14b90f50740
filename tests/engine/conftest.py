"""Fixtures of several files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace as otel

from tests.kits.traces import Spans


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """The global provider, which OpenTelemetry lets a program set once, for this test only."""
    found = Spans()
    monkeypatch.setattr(otel, "get_tracer_provider", lambda: found.provider)
    yield found
    found.provider.shutdown()
