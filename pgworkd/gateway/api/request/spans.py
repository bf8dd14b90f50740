"""The span of a request (`POST /v1/jobs`, SERVER), where the program that serves has imported OpenTelemetry.

Jobs that a request makes take its context with them; without OpenTelemetry that of the request's headers. The
attributes are those of https://opentelemetry.io/docs/specs/semconv/http/http-spans/#http-server-span
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pgworkd.core import spans, traces
from pgworkd.gateway.api.request.bounds import PROBES
from pgworkd.gateway.api.request.names import encoded
from pgworkd.log.http import without_secrets

SPAN = "pgworkd.span"
FAILED = 500
"""Statuses from here on are failures of the server; those below are answers to mistakes of the client."""


@contextlib.contextmanager
def of_request(scope: Any) -> Iterator[None]:
    """Answers the request of this scope within its span, if it is to have one."""
    carrier = traces.received(scope["headers"]) if scope["type"] == "http" else None
    if (trace := traces.api()) is None or scope["type"] != "http":
        traces.RECEIVED.set(carrier)
        yield
        return
    around = trace.get_current_span().get_span_context()
    if around.is_valid:  # that of an application that has mounted this one, and traces its requests
        traces.RECEIVED.set(traces.carrier_of(around))
        yield
        return
    method, path = scope["method"], scope["path"].removeprefix(scope.get("root_path", ""))
    is_probe = path in PROBES or path == "/metrics"
    facts = {
        "http.request.method": method,
        "url.path": without_secrets(encoded(scope["path"])[:500]),
        "url.scheme": scope.get("scheme", "http"),
    }
    span = None if is_probe else spans.begin(method, "SERVER", facts, carrier)
    traces.RECEIVED.set(carrier if span is None else span.carrier)
    if span is None:
        yield
        return
    scope[SPAN] = span
    try:
        with span.current():
            yield
    finally:
        span.end()


def answered(scope: Any, status: int) -> None:
    """Notes the answer to a request; `scope`: as the routes have left it; status 0: there was no answer."""
    span: spans.OpenSpan | None = scope.get(SPAN)
    if span is None:
        return
    if (route := getattr(scope.get("route"), "path_format", None)) is not None:
        span.note({"http.route": route}, f"{scope['method']} {route}")
    if status:
        span.note({"http.response.status_code": status})
    if status >= FAILED or not status:
        span.fail(str(status) if status else "no_answer")
