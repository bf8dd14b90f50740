"""In every mode of handlers the context of the attempt is current, and log lines name it."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psycopg
import pytest
import structlog
from opentelemetry import trace as otel

from pgworkd import App, Job, log
from pgworkd.client import enqueue
from pgworkd.core import traces
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.traces import PARENT, SPAN, TRACE, Spans, attributes, is_child, to, trace_id, tracing
from tests.kits.verbs import Db


@pytest.fixture(autouse=True)
def logger_of_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not propagate to pytest's."""
    monkeypatch.setattr(logging.getLogger("shop"), "propagate", False)


def _say(dsn: str) -> Any:
    """Logs, and enqueues a job on a connection of its own; returns the current context."""
    logging.getLogger("shop").info("charged")
    structlog.get_logger("shop").info("charged")
    with psycopg.connect(dsn, autocommit=True) as connection:
        enqueue(connection, "next")
    return traces.current_context()


async def in_loop(payload: dict[str, str]) -> Any:
    return await anyio.to_thread.run_sync(_say, payload["dsn"])


async def in_a_child_task(payload: dict[str, str]) -> Any:
    found: list[Any] = []

    async def say() -> None:
        found.append(_say(payload["dsn"]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(say)
    return found[0]


def in_thread(payload: dict[str, str]) -> Any:
    return _say(payload["dsn"])


def in_process(payload: dict[str, str]) -> Any:
    return _say(payload["dsn"])


async def nothing() -> None:
    pass


def said(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"')]


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("handle", [in_loop, in_a_child_task, in_thread, in_process], ids=lambda h: h.__name__)
async def test_the_context_is_current_in_every_mode(
    dsn: str, db: Db, spans: Spans, handle: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("shop").handlers.clear()  # pytest's handler
    app, out = App(), io.StringIO()
    app.handler("q", concurrency=1, **({"run_in": "process"} if handle is in_process else {}))(handle)
    app.handler("next")(nothing)
    before, sys.stderr = sys.stderr, out
    try:
        log.configure("debug", "json", "till-1")
        async with tracing(app, dsn, queues={"q": 1}) as (daemon, _):
            daemon.events.listen(log.listener("debug"))
            for _ in range(2):  # the second finds its task and its process as the first has left them
                job_id = await insert(db, "q", json.dumps({"dsn": dsn}), meta=json.dumps({"traceparent": PARENT}))
                await until(waits_for_status(db, job_id, "completed"))
    finally:
        sys.stderr = before
    ran = await spans.wait("process q", 2)
    result = await db.fetch("SELECT result->>'traceparent' AS parent FROM pgworkd.finished_jobs ORDER BY id")
    assert [row["parent"][:52] for row in result] == [f"00-{TRACE}-{to(span)[1]}" for span in ran]
    nested = await db.fetch("SELECT meta->>'traceparent' AS parent FROM pgworkd.jobs WHERE queue = 'next'")
    assert {row["parent"][3:35] for row in nested} == {TRACE}
    ids = [{"trace_id": TRACE, "span_id": to(span)[1]} for span in ran]
    lines = said(out.getvalue() + capfd.readouterr().err)
    for name in ("job.started", "job.completed"):
        assert [ids_of(line) for line in lines if line["event"] == name] == ids
    handlers = [line for line in lines if "charged" in (line["event"], line.get("message"))]
    assert sorted((ids_of(line) for line in handlers), key=str) == sorted(ids * 2, key=str)


def ids_of(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("trace_id", "span_id")}


async def test_lines_in_a_span_of_the_handler_name_that_one(dsn: str, db: Db, spans: Spans) -> None:
    found: list[dict[str, Any]] = []
    app = App()

    @app.handler("q")
    async def handle() -> None:
        with spans.app.start_as_current_span("inner"):
            found.append(dict(log.add_job(None, "", {})))
        found.append(dict(log.add_job(None, "", {})))
        record = logging.makeLogRecord({})
        log.JobFilter().filter(record)
        found.append(vars(record))

    async with tracing(app, dsn):
        await insert(db, "q")
        (ran,) = await spans.wait("process q")
    (inner,) = spans.all("inner")
    assert is_child(inner, ran)
    assert [(line["trace_id"], line["span_id"]) for line in found] == [to(inner), to(ran), to(ran)]


async def test_without_tracing_lines_name_no_trace(dsn: str, db: Db, spans: Spans) -> None:
    found: list[Any] = []
    app = App()

    @app.handler("q")
    async def handle() -> None:
        found.extend((dict(log.add_job(None, "", {})), otel.get_current_span().get_span_context().is_valid))

    async with running(app, dsn) as (daemon, seen):
        assert daemon.events.tracer is None
        await insert(db, "q", meta=json.dumps({"traceparent": PARENT}))
        await seen.wait("job.completed")
    assert found[0].keys() == {"job_id", "queue", "kind", "attempt"}
    assert found[1] is False
    assert not spans.all("process q")


async def test_failures_and_timeouts_leave_the_slot_clean(dsn: str, db: Db, spans: Spans) -> None:
    """A span that stayed current would be the parent of the next job's."""
    tasks: set[Any] = set()
    app = App()

    @app.handler("q", concurrency=1, max_attempts=1, timeout_s=0.2)
    async def handle(job: Job) -> None:
        tasks.add(job.payload["how"] in ("raise", "fine") and anyio.get_current_task().id)
        match job.payload["how"]:
            case "raise":
                raise ValueError
            case "hang":
                await anyio.sleep_forever()

    async with tracing(app, dsn):
        for how in ("raise", "raise", "fine", "hang", "fine"):
            job_id = await insert(db, "q", json.dumps({"how": how}))
            await until(waits_for_status(db, job_id, "completed" if how == "fine" else "dead"))
        ran = await spans.wait("process q", 5)
    assert [span.parent for span in ran] == [None] * 5
    assert len({trace_id(span) for span in ran}) == 5
    assert attributes(ran[3])["error.type"] == "Timeout"
    assert len(tasks - {False}) == 2, "one task runs until the time-out, another from then on"


APP = """
import sys
from pgworkd import App
{imports}
app = App()

@app.handler("q")
async def handle() -> bool:
    return "pgworkd.tracing" in sys.modules or "opentelemetry" in sys.modules
"""
WITH_OTEL = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
trace.set_tracer_provider(provider)
"""


@pytest.mark.slow("commands and daemons in processes of their own")
@pytest.mark.parametrize("imports", ["", WITH_OTEL], ids=["off", "on"])
async def test_the_command_traces_if_the_application_has_imported_opentelemetry(
    dsn: str, db: Db, tmp_path: Path, imports: str
) -> None:
    (tmp_path / "jobs.py").write_text(APP.format(imports=imports), encoding="utf-8")
    environ = {**os.environ, "PGWORKD_DSN": dsn, "PGWORKD_APP": "jobs:app", "PYTHONPATH": str(Path.cwd())}
    async with await anyio.open_process(
        [sys.executable, "-m", "pgworkd.cli", "run"], cwd=tmp_path, env=environ, stdout=None
    ) as process:
        job_id = await insert(db, "q", meta=json.dumps({"traceparent": PARENT}))
        await until(waits_for_status(db, job_id, "completed"))
        process.terminate()
        assert process.stderr is not None
        text = b"".join([chunk async for chunk in process.stderr]).decode()
    assert await db.fetchval("SELECT result FROM pgworkd.finished_jobs") == ("true" if imports else "false")
    (completed,) = [line for line in said(text) if line.get("event") == "job.completed"]
    assert completed.get("trace_id") == (TRACE if imports else None)
    assert ('"name": "process q"' in text, f'"parent_id": "0x{SPAN}"' in text) == (bool(imports),) * 2
