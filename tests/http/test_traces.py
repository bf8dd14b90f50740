"""The trace of whoever calls: its context, in the headers of a request, goes with the jobs that the request creates."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from opentelemetry.trace import SpanKind, StatusCode
from starlette.applications import Starlette
from starlette.routing import Mount

from pgworkd.core import traces
from pgworkd.database.connection import ConnectionOptions
from pgworkd.gateway.api.app import asgi
from pgworkd.gateway.api.request.access import anyone
from pgworkd.gateway.api.request.gateway import GatewayOptions
from tests.http.test_once import CALLS, NDJSON, prepared
from tests.kits.gateway import calling
from tests.kits.traces import Spans, attributes, spans, trace_id
from tests.kits.verbs import Db

__all__ = ["prepared", "spans"]  # fixtures

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=x"}
OTHER = {"traceparent": "00-11111111111111111111111111111111-2222222222222222-00"}
COPIES = {"/v1/jobs/{job_id}/replay", "/v1/schedules/{name}/run"}
"""Routes whose job has the meta of another one."""
METAS = "SELECT meta::text FROM pgworkd.jobs ORDER BY id"


async def metas(db: Db) -> list[Any]:
    return [None if meta is None else json.loads(meta) for (meta,) in await db.fetch(METAS)]


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("route", sorted(CALLS.keys() - COPIES))
async def test_jobs_take_the_context_of_the_request_with_them(
    dsn: str, db: Db, prepared: dict[str, str], monkeypatch: pytest.MonkeyPatch, route: str, *, is_imported: bool
) -> None:
    if not is_imported:  # OpenTelemetry, by the program that serves
        monkeypatch.setattr(traces, "api", lambda: None)
    path, body = CALLS[route][0].format_map(prepared), CALLS[route][1]("")
    sent: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
    more = NDJSON if isinstance(body, bytes) else {}
    await db.execute("DELETE FROM pgworkd.jobs")
    async with calling(dsn) as call:
        assert (await call("POST", path, headers=TRACE | more, **sent)).status_code == 201
        found = await metas(db)
        assert found
        assert all(each == TRACE for each in found)
        await db.execute("DELETE FROM pgworkd.jobs")
        await call("POST", path, headers={"traceparent": "00-nothing"} | more, **sent)
        assert not any(await metas(db)), "nor that of the request before"
        await db.execute("DELETE FROM pgworkd.jobs")
        doubled = [*TRACE.items(), *OTHER.items(), *more.items()]
        await call.client.request("POST", path, headers=[*doubled, ("Authorization", f"Bearer {call.token}")], **sent)
        assert not any(await metas(db)), "of two, none is believed"


async def test_a_context_that_a_job_has_of_its_own_is_kept(dsn: str, db: Db) -> None:
    number = "123456789012345678901234567890"
    job = f'{{"queue": "q", "meta": {{"tag": {number}}}}}'
    async with calling(dsn) as call:
        await call("POST", "/v1/jobs", {"queue": "q", "meta": OTHER}, headers=TRACE)
        await call("POST", "/v1/jobs", content=job, headers=TRACE | {"Content-Type": "application/json"})
        await call("PUT", "/v1/jobs/00000000-0000-4000-8000-000000000000", {"queue": "q"}, headers=TRACE)
        again = await call("PUT", "/v1/jobs/00000000-0000-4000-8000-000000000000", {"queue": "q"}, headers=OTHER)
        assert again.json()["created"] is False
        callback = {"name": "b", "sealed": True, "on_complete": {"queue": "done"}}
        await call("POST", "/v1/batches", callback, headers=TRACE)
    rows = [json.loads(row[0]) for row in await db.fetch("SELECT meta::text FROM pgworkd.jobs WHERE queue = 'q'")]
    assert OTHER in rows
    assert TRACE | {"tag": int(number)} in rows
    assert TRACE in rows
    (done,) = await db.fetch("SELECT meta::text FROM pgworkd.jobs WHERE queue = 'done'")
    assert json.loads(done[0]) == TRACE


async def test_a_request_is_a_span_in_the_trace_of_its_caller(dsn: str, db: Db, spans: Spans) -> None:
    async with calling(dsn) as call:
        await call("POST", "/v1/jobs?", {"queue": "q"}, headers=TRACE)
        await call("POST", "/v1/jobs", {"queue": "q", "kind": 7}, headers={"traceparent": "00-nothing"})
        await call("GET", "/v1/jobs/00000000-0000-4000-8000-000000000000")
        await call("GET", "/v1/nowhere")
        await call("GET", "/healthz")
    (made, refused), (missing,), (nowhere,) = (
        spans.all("POST /v1/jobs"),
        spans.all("GET /v1/jobs/{job_id}"),
        spans.all("GET"),
    )
    assert attributes(made) == {
        "http.request.method": "POST",
        "url.path": "/v1/jobs",
        "url.scheme": "http",
        "http.route": "/v1/jobs",
        "http.response.status_code": 201,
    }
    assert (made.kind, made.status.status_code) == (SpanKind.SERVER, StatusCode.UNSET)
    assert made.instrumentation_scope is not None
    assert made.instrumentation_scope.version
    assert made.parent is not None
    assert f"00-{made.parent.trace_id:032x}-{made.parent.span_id:016x}-01" == TRACE["traceparent"]
    (meta,) = await metas(db)
    assert made.context is not None
    assert meta["traceparent"] == f"00-{trace_id(made)}-{made.context.span_id:016x}-01"
    assert meta["tracestate"] == TRACE["tracestate"]
    assert refused.parent is None
    found = [attributes(each)["http.response.status_code"] for each in (refused, missing, nowhere)]
    assert found == [422, 404, 404]
    assert not any(attributes(each).get("error.type") for each in (refused, missing, nowhere))


async def test_a_failure_of_the_gateway_is_one_of_its_span(dsn: str, db: Db, spans: Spans) -> None:
    async with calling(dsn) as call:
        await db.execute("DROP SCHEMA pgworkd CASCADE")
        answer = await call("POST", "/v1/jobs", {"queue": "q"})
    (span,) = spans.all("POST /v1/jobs")
    assert answer.status_code >= 500
    assert (span.status.status_code, attributes(span)["error.type"]) == (StatusCode.ERROR, str(answer.status_code))


async def test_an_application_around_it_that_traces_has_the_only_span(dsn: str, db: Db, spans: Spans) -> None:
    gateway = asgi(GatewayOptions(ConnectionOptions(dsn), connections_max=5, workers=False), authorize=anyone)
    app = Starlette(routes=[Mount("/below", gateway)])

    async def traced(scope: Any, receive: Any, send: Any) -> None:
        with spans.app.start_as_current_span("around"):
            await app(scope, receive, send)

    transport = httpx.ASGITransport(app=traced)
    async with gateway.running(), httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/below/v1/jobs", json={"queue": "q"}, headers=TRACE)).status_code == 201
    (around,) = spans.all("around")
    assert not spans.all("POST /v1/jobs")
    (meta,) = await metas(db)
    assert around.context is not None
    assert meta["traceparent"].startswith(f"00-{trace_id(around)}-{around.context.span_id:016x}-")
