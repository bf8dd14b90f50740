"""Traces of jobs: one from the enqueue to what the handler enqueues; retries and late starts are linked."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from pgworkd import App, Job, PermanentError, RetryAfter, Snooze
from pgworkd.client import enqueue
from pgworkd.core import events
from pgworkd.tracing import CHILD_S
from tests.kits.daemon import insert, until, waits_for_status
from tests.kits.traces import (
    PARENT,
    SPAN,
    TRACE,
    Spans,
    attributes,
    is_child,
    links,
    to,
    trace_id,
    tracing,
)
from tests.kits.verbs import Db

pytestmark = pytest.mark.slow("each mode and each ending, traced")


def app_of(handle: Any, **options: Any) -> App:
    app = App()
    app.handler("q", backoff=0.01, **options)(handle)
    return app


async def nothing() -> None:
    pass


async def test_one_trace_from_an_enqueue_to_what_its_handler_enqueues(dsn: str, db: Db, spans: Spans) -> None:
    app = App()

    @app.handler("first")
    async def first(job: Job) -> None:
        async with job.transaction() as connection:
            await enqueue(connection, "second", {"n": 2})

    app.handler("second")(nothing)
    async with tracing(app, dsn):
        with spans.app.start_as_current_span("request"):
            job_id = await enqueue(db, "first", {"n": 1}, kind="first")
        (last,) = await spans.wait("process second")
    (request,), (sent,), (ran,) = (spans.all(name) for name in ("request", "enqueue first", "process first"))
    (nested,) = spans.all("enqueue second")
    chain = [request, sent, ran, nested, last]
    assert all(is_child(below, above) for above, below in pairwise(chain))
    assert {trace_id(span) for span in chain} == {trace_id(request)}
    assert (links(ran), links(last)) == ([to(sent)], [to(nested)])
    assert [span.kind for span in chain[1:]] == [SpanKind.PRODUCER, SpanKind.CONSUMER] * 2
    common = {
        "messaging.system": "pgworkd",
        "messaging.destination.name": "first",
        "messaging.message.id": str(job_id),
    }
    assert attributes(sent) == common | {
        "messaging.operation.type": "send",
        "messaging.operation.name": "enqueue",
    }
    wait_s = attributes(ran)["pgworkd.job.wait_s"]
    assert 0 <= wait_s < 20
    assert attributes(ran) == common | {
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "pgworkd.job.kind": "first",
        "pgworkd.job.attempt": 1,
        "pgworkd.job.wait_s": wait_s,
        "pgworkd.job.outcome": "completed",
    }
    assert all(span.status.status_code is StatusCode.UNSET for span in chain)


async def test_retries_are_linked_and_failures_recorded(dsn: str, db: Db, spans: Spans) -> None:
    async def handle(job: Job) -> None:
        match job.attempt:
            case 1:
                raise ValueError("postgresql://user:secret@host/app is broken")
            case 2:
                raise Snooze(0.01)
            case 3:
                raise RetryAfter(0.01, "busy")
            case 4:
                raise PermanentError("no use")

    async with tracing(app_of(handle, max_attempts=9), dsn) as (_, seen):
        with spans.app.start_as_current_span("request"):
            await enqueue(db, "q")
        ran = await spans.wait("process q", 4)
        await seen.wait(events.JOB_DEAD)
    (sent,) = spans.all("enqueue q")
    assert is_child(ran[0], sent)
    assert [span.parent for span in ran[1:]] == [None] * 3
    assert all(links(span) == [to(sent)] for span in ran)
    assert len({trace_id(span) for span in ran}) == 4
    assert [attributes(span)["pgworkd.job.attempt"] for span in ran] == [1, 2, 3, 4]
    outcomes = [attributes(span)["pgworkd.job.outcome"] for span in ran]
    assert outcomes == ["failed", "released", "failed", "failed"]
    codes = [span.status.status_code for span in ran]
    assert codes == [StatusCode.ERROR, StatusCode.UNSET, StatusCode.ERROR, StatusCode.ERROR]
    assert "secret" not in (ran[0].status.description or "secret")
    (event,) = ran[0].events
    assert event.name == "exception"
    facts = dict(event.attributes or {})
    assert facts["exception.type"] == attributes(ran[0])["error.type"] == "ValueError"
    assert "is broken" in str(facts["exception.message"])
    assert "Traceback" in str(facts["exception.stacktrace"])
    assert "secret" not in str(facts)
    assert not ran[1].events


async def process(dsn: str, db: Db, spans: Spans, **columns: Any) -> ReadableSpan:
    """The span of one job inserted with SQL."""
    async with tracing(app_of(nothing), dsn):
        job_id = await insert(db, "q", **columns)
        (ran,) = await spans.wait("process q")
        await until(waits_for_status(db, job_id, "completed"))
    return ran


async def test_sql_may_write_the_context(dsn: str, db: Db, spans: Spans) -> None:
    ran = await process(dsn, db, spans, meta=json.dumps({"traceparent": PARENT, "tracestate": "a=1", "tags": ["x"]}))
    assert ran.parent is not None
    assert (trace_id(ran), f"{ran.parent.span_id:016x}", ran.parent.is_remote) == (TRACE, SPAN, True)
    assert links(ran) == [(TRACE, SPAN)]
    assert ran.parent.trace_state.to_header() == "a=1"


async def test_without_a_context_each_run_is_a_trace_of_its_own(dsn: str, db: Db, spans: Spans) -> None:
    with spans.app.start_as_current_span("the program that hosts the daemon"):
        ran = await process(dsn, db, spans)
    assert (ran.parent, links(ran)) == (None, [])


@pytest.mark.parametrize(("ago_s", "joined"), [(CHILD_S - 20, True), (CHILD_S + 1, False)])
async def test_a_late_start_is_linked(dsn: str, db: Db, spans: Spans, ago_s: float, joined: bool) -> None:
    sql = "UPDATE pgworkd.jobs SET created_at = clock_timestamp() - make_interval(secs => $1)"
    await insert(db, "q", meta=json.dumps({"traceparent": PARENT}))
    await db.execute(sql, ago_s)
    async with tracing(app_of(nothing), dsn):
        (ran,) = await spans.wait("process q")
    assert (ran.parent is not None) is joined
    assert links(ran) == [(TRACE, SPAN)]


@pytest.mark.parametrize("skew_s", [-4000.0, 4000.0])
async def test_the_age_of_a_job_is_taken_by_the_clock_of_the_database(
    dsn: str, db: Db, spans: Spans, monkeypatch: pytest.MonkeyPatch, skew_s: float
) -> None:
    import time

    real = time.time
    for module in ("pgworkd.database.heartbeat_store", "pgworkd.tracing"):
        monkeypatch.setattr(f"{module}.time", type("Clock", (), {"time": staticmethod(lambda: real() + skew_s)}))
    async with tracing(app_of(nothing), dsn) as (daemon, _):
        await insert(db, "q", meta=json.dumps({"traceparent": PARENT}))
        (ran,) = await spans.wait("process q")
        assert daemon.worker.clock_ahead_s == pytest.approx(-skew_s, abs=5)
    assert trace_id(ran) == TRACE
    assert 0 <= attributes(ran)["pgworkd.job.wait_s"] < 20


async def test_recurring_jobs_are_roots(dsn: str, db: Db, spans: Spans) -> None:
    app = App()
    app.handler("q", every=1.0)(nothing)
    await db.execute(f"""CREATE FUNCTION traced() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN NEW.meta := '{{"traceparent": "{PARENT}"}}'; RETURN NEW; END $$""")
    await db.execute("CREATE TRIGGER traced BEFORE INSERT ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION traced()")
    async with tracing(app, dsn):
        await until(lambda: len(spans.all("process q")) >= 2)
    for ran in spans.all("process q"):
        assert (ran.parent, links(ran)) == (None, [(TRACE, SPAN)])


ZEROS = f"00-{'0' * 32}-{SPAN}-01"
GARBAGE: list[Any] = ["", "garbage", PARENT.upper(), ZEROS, 7, None, [], {"a": PARENT}, "\u0663" * 55]


async def test_garbage_never_fails_a_job_and_goes_no_further(dsn: str, db: Db, spans: Spans) -> None:
    app = App()

    @app.handler("q")
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await enqueue(connection, "next", {"n": job.payload["n"]})

    for number, parent in enumerate(GARBAGE):
        given = json.dumps({"traceparent": parent, "tracestate": "a=1"})
        await insert(db, "q", json.dumps({"n": number}), meta=given)
    async with tracing(app, dsn):
        ran = await spans.wait("process q", len(GARBAGE))
    assert all(span.parent is None and not span.links for span in ran)
    metas = await db.fetch("SELECT meta->>'traceparent' AS parent, meta->'tracestate' AS state FROM pgworkd.jobs")
    assert {row["parent"][3:35] for row in metas} == {trace_id(span) for span in ran}
    assert [row["state"] for row in metas] == [None] * len(GARBAGE)


async def test_a_torn_down_daemon_ends_its_spans(dsn: str, db: Db, spans: Spans) -> None:
    import anyio

    began = anyio.Event()

    async def handle() -> None:
        began.set()
        await anyio.sleep_forever()

    await insert(db, "q")
    with anyio.CancelScope() as scope:
        async with tracing(app_of(handle), dsn):
            await began.wait()
            scope.cancel()
    (ran,) = spans.all("process q")
    assert ran.status.status_code is StatusCode.UNSET, "it was given back"


async def test_a_broken_tracer_fails_no_job(dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(otel.TracerProvider):
        def get_tracer(self, *_: Any, **__: Any) -> Any:
            return self

        def start_span(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError

    monkeypatch.setattr(otel, "get_tracer_provider", Broken)
    async with tracing(app_of(nothing), dsn) as (_, seen):
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "completed"))
        assert (await seen.wait(events.HOOK_FAILED))["hook"] == "tracing"
