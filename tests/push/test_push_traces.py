"""A push daemon that traces: the request to an endpoint is a span below its attempt, and the endpoint sees it."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.trace import SpanKind, StatusCode

from pgworkd.tracing import Tracing
from tests.kits.daemon import insert, until, waits_for_status
from tests.kits.downstream import Downstream, answer_of, headers_of, serving
from tests.kits.push import pushing, put_endpoint
from tests.kits.traces import PARENT, TRACE, Spans, attributes, context, is_child, spans, trace_id
from tests.kits.verbs import Db

__all__ = ["spans"]  # fixtures


async def hang_up(_: Any) -> None:
    """Answers nothing; the connection is closed."""


@pytest.mark.parametrize(
    ("down", "error"),
    [
        (Downstream(answer_of(204)), None),
        (Downstream(answer_of(503)), "503"),
        (Downstream(act=hang_up), "PerhapsDelivered"),
    ],
)
async def test_a_request_is_a_span_below_its_attempt(
    dsn: str, db: Db, spans: Spans, down: Downstream, error: str | None
) -> None:
    tracing = Tracing(otel.get_tracer_provider())
    async with serving(down), pushing(dsn, parts=(tracing,)):
        await put_endpoint(db, "billing", f"{down.url}?key=secret", "invoices")
        job_id: Any = await insert(db, "invoices", meta=f'{{"traceparent": "{PARENT}"}}', max_attempts=1)
        await until(waits_for_status(db, job_id, "dead" if error else "completed"))
        (attempt,) = await spans.wait("process invoices")
    (sent,) = spans.all("POST")
    assert is_child(sent, attempt)
    assert trace_id(sent) == TRACE
    (request,) = down.requests
    assert headers_of(request)["traceparent"] == f"00-{TRACE}-{context(sent).span_id:016x}-01"
    found = attributes(sent)
    assert sent.kind is SpanKind.CLIENT
    assert found["url.full"] == down.url.removesuffix("/jobs"), "the rest may have a secret"
    assert found["server.address"] == "127.0.0.1"
    assert found.get("error.type") == error
    assert (sent.status.status_code is StatusCode.ERROR) == bool(error)
    assert found.get("http.response.status_code") == {None: 204, "503": 503}.get(error)
