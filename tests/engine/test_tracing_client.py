"""Every way to enqueue takes the trace context along, and leaves a caller's own alone."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import psycopg
import pytest
from opentelemetry.trace import SpanKind, StatusCode

from pgworkd import App, ConnectionOptions
from pgworkd.admin import Admin
from pgworkd.client import Batch, NewJob, Workflow, batch, columns, enqueue, enqueue_many
from pgworkd.errors import UsageError
from tests.kits.drivers import in_autocommit, psycopg_sync, settled
from tests.kits.traces import PARENT, Spans, attributes, context, is_child, links, to, trace_id, tracing
from tests.kits.verbs import Db


def parent_of(span: Any) -> str:
    """The traceparent of this span."""
    trace, own = to(span)
    return f"00-{trace}-{own}-{context(span).trace_flags:02x}"


async def metas(db: Db) -> list[Any]:
    rows = await db.fetch("SELECT meta FROM pgworkd.jobs ORDER BY payload->'n', id")
    return [None if row["meta"] is None else json.loads(row["meta"]) for row in rows]


@in_autocommit
async def test_each_driver_sends_the_context(opener: Any, dsn: str, db: Db, spans: Spans) -> None:
    async with opener(dsn, autocommit=True) as caller:
        with spans.app.start_as_current_span("request") as request:
            await settled(enqueue(caller.conn, "q", {"n": 1}))
            await settled(enqueue_many(caller.conn, [NewJob("q", {"n": n}) for n in (2, 3)]))
    one, many = spans.all("enqueue q")
    assert [is_child(span, request) for span in (one, many)] == [True, True]
    assert await metas(db) == [{"traceparent": parent_of(span)} for span in (one, many, many)]
    assert attributes(many)["messaging.batch.message_count"] == 2


async def test_without_a_current_span_nothing_is_written(db: Db, spans: Spans) -> None:
    await enqueue(db, "q", {"n": 1})
    await enqueue_many(db, [NewJob("q", {"n": 2})])
    await Batch(db, (await batch(db, "b")).id).add([{"n": 3}])
    assert await metas(db) == [None] * 3
    assert not [*spans.all("enqueue q"), *spans.all("enqueue")]


OWN = [{"traceparent": PARENT}, {"traceparent": "garbage", "tags": ["x"]}, {"tracestate": "a=1"}]


@pytest.mark.parametrize("own", OWN, ids=str)
async def test_a_context_of_the_caller_is_kept(db: Db, spans: Spans, own: dict[str, Any]) -> None:
    flow = Workflow()
    flow.add("step", "q", {"n": 3}, meta=own)
    with spans.app.start_as_current_span("request"):
        await enqueue(db, "q", {"n": 1}, meta=own)
        await enqueue_many(db, [NewJob("q", {"n": 2}, meta=own), NewJob("q", {"n": 2}, meta=own)])
        await flow.enqueue(db)
        async with batch(db, "q") as root:
            await root.add([{"n": 4}], meta=own)
        await enqueue(db, "q", {"n": 5}, meta=own, dedupe_key="k", on_duplicate="skip")
    assert await metas(db) == [own] * 6


async def test_many_jobs_in_several_statements_are_one_span(
    db: Db, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "STATEMENT_ROWS", 2)
    with spans.app.start_as_current_span("request"):
        await enqueue_many(db, (NewJob("q", {"n": n}, kind=f"k{n}") for n in range(5)))
        await enqueue_many(db, (NewJob(f"q{n // 2}", {"n": n}) for n in range(5, 10)))
    (alike,), (several,) = spans.all("enqueue q"), spans.all("enqueue")
    assert await metas(db) == [{"traceparent": parent_of(span)} for span in [alike] * 5 + [several] * 5]
    assert [attributes(span)["messaging.batch.message_count"] for span in (alike, several)] == [5, 5]


async def test_duplicates(db: Db, spans: Spans) -> None:
    first = await enqueue(db, "q", {"n": 1}, dedupe_key="k")
    with spans.app.start_as_current_span("request"):
        skipped = await enqueue(db, "q", {"n": 2}, dedupe_key="k", on_duplicate="skip")
        assert await metas(db) == [None]
        replaced = await enqueue(db, "q", {"n": 3}, dedupe_key="k", on_duplicate="replace")
        with pytest.raises(asyncpg.UniqueViolationError):
            await enqueue(db, "q", {"n": 4}, dedupe_key="k")
        with pytest.raises(UsageError):
            await enqueue(db, "q", {"n": 5}, on_duplicate="skip")
    assert skipped.id == replaced.id == first
    *found, failed = spans.all("enqueue q")
    assert [attributes(span)["messaging.message.id"] for span in found] == [str(first)] * 2
    assert await metas(db) == [{"traceparent": parent_of(found[1])}]
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed)["error.type"].endswith("UniqueViolationError")
    assert [event.name for event in failed.events] == ["exception"]


async def test_operators_programs_send_it_too(dsn: str, db: Db, spans: Spans) -> None:
    async with Admin(ConnectionOptions(dsn)) as admin:
        await admin.jobs.enqueue("q", '{"n": 1}')
        with spans.app.start_as_current_span("request"):
            made = await admin.jobs.enqueue("q", '{"n": 2}')
    (sent,) = spans.all("enqueue q")
    assert attributes(sent)["messaging.message.id"] == str(made.id)
    assert await metas(db) == [None, {"traceparent": parent_of(sent)}]


async def test_an_error_of_a_sync_driver_is_recorded(dsn: str, spans: Spans) -> None:
    async with psycopg_sync(dsn, autocommit=True) as caller:
        with spans.app.start_as_current_span("request"):
            enqueue(caller.conn, "q", dedupe_key="k")
            with pytest.raises(psycopg.errors.UniqueViolation):
                enqueue(caller.conn, "q", dedupe_key="k")
    assert [span.status.status_code for span in spans.all("enqueue q")] == [StatusCode.UNSET, StatusCode.ERROR]


async def nothing() -> None:
    pass


async def test_workflows_and_batches_are_in_the_trace_and_so_are_callbacks(dsn: str, db: Db, spans: Spans) -> None:
    app = App()
    for queue in ("step", "work", "report"):
        app.handler(queue)(nothing)
    app.stream("all", "each")(lambda given, result: [given])
    app.handler("each")(nothing)
    async with tracing(app, dsn):
        with spans.app.start_as_current_span("request"):
            flow = Workflow()
            flow.add("a", "step")
            flow.add("b", "step", after=["a"])
            await flow.enqueue(db)
            async with batch(db, "all", queue="work", kind="work", on_complete={"queue": "report"}) as root:
                await root.child("each", stream=True, kind="each", queue="each")
                await root.add([{"n": 1}], queue="work")
        await spans.wait("process report")
        steps = await spans.wait("process step", 2)
    (request,), (flowed,), (added,) = (spans.all(name) for name in ("request", "enqueue step", "enqueue work"))
    assert [span.kind for span in (flowed, added)] == [SpanKind.PRODUCER] * 2
    assert all(is_child(span, request) for span in (flowed, added))
    assert all(is_child(span, flowed) and links(span) == [to(flowed)] for span in steps)
    (worked,), (reported,) = spans.all("process work"), spans.all("process report")
    assert is_child(worked, added)
    assert is_child(reported, request)
    streamed = spans.all("process each")
    assert streamed
    assert {trace_id(span) for span in streamed} == {trace_id(request)}
