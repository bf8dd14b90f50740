"""Log records of handlers: they are emitted, with the job and the worker."""

from __future__ import annotations

import importlib
import io
import json
import logging
import sys
from typing import Any

import anyio
import asyncpg
import pytest
import structlog

from pgworkd import App, log
from tests.kits.daemon import insert, running, until, waits_for_status


@pytest.fixture(autouse=True)
def logger_of_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not propagate to pytest's."""
    monkeypatch.setattr(logging.getLogger("shop"), "propagate", False)


def _say() -> None:
    logging.getLogger("shop").info("charged %s", "card")
    structlog.get_logger("shop").info("charged")


async def _in_loop() -> None:
    _say()


async def _in_a_child_task() -> None:
    async def say() -> None:
        await anyio.sleep(0.01)
        _say()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(say)


def _in_thread() -> None:
    _say()


def in_process() -> None:
    _say()


def lines(text: str) -> list[dict[str, Any]]:
    """The log lines of handlers."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in found if "charged" in (line["event"], line.get("message", "")[:7])]


@pytest.mark.parametrize("handle", [_in_loop, _in_a_child_task, _in_thread, in_process], ids=lambda h: h.__name__)
async def test_log_records_of_handlers_carry_job_and_worker(
    dsn: str, db: asyncpg.Connection[Any], handle: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("shop").handlers.clear()  # pytest's handler
    app, out = App(), io.StringIO()
    app.handler("k", queue="q", concurrency=1, **({"run_in": "process"} if handle is in_process else {}))(handle)
    before, sys.stderr = sys.stderr, out
    try:
        log.configure("info", "json", "till-1")
        async with running(app, dsn):
            ids = [await insert(db, "q", kind="k") for _ in range(2)]
            for job_id in ids:
                await until(waits_for_status(db, job_id, "completed"))
    finally:
        sys.stderr = before
    said = lines(out.getvalue() + capfd.readouterr().err)
    wanted = {"queue": "q", "kind": "k", "attempt": 1, "worker": "till-1", "level": "info"}
    assert [line["job_id"] for line in said] == [str(job_id) for job_id in ids for _ in range(2)]
    assert all(wanted.items() <= line.items() for line in said)


@pytest.mark.parametrize("mode", ["loop", "thread", "process"])
async def test_the_structlog_of_an_application_stays_and_names_the_job(
    dsn: str, db: asyncpg.Connection[Any], mode: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_structlog: Any = importlib.import_module("tests.kits.own_structlog")  # not by this module: a child imports that
    app, out, ours = App(), io.StringIO(), io.StringIO()
    own_structlog.set_up(out)
    monkeypatch.setattr(own_structlog, "used", structlog.get_logger("shop"))
    handle = own_structlog.handle_in_loop if mode == "loop" else own_structlog.handle
    app.handler("q", run_in=mode)(handle)
    before, sys.stderr = sys.stderr, ours
    try:
        log.configure("info", "json", "till-1")
        log.configure("info", "json", "till-1")  # a reload
        async with running(app, dsn) as (daemon, _):
            daemon.events.listen(log.listener("info"))
            job_id = await insert(db, "q")
            await until(waits_for_status(db, job_id, "completed"))
    finally:
        sys.stderr = before
    wanted = {"service": "shop", "job_id": str(job_id), "queue": "q", "attempt": 1}
    said = lines(out.getvalue() + "".join(capfd.readouterr()))
    assert len(said) == 2
    assert all(wanted.items() <= line.items() for line in said)
    own = [json.loads(line) for line in ours.getvalue().splitlines()]
    (completed,) = [line for line in own if line["event"] == "job.completed"]
    assert completed["worker"] == "till-1"
    assert "service" not in completed


async def test_failures_are_logged_with_their_traceback(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, out = App(), io.StringIO()

    @app.handler("q", max_attempts=2, backoff=0.01)
    async def handle() -> None:
        raise ValueError("no card")

    structlog_file, sys.stderr = sys.stderr, out
    try:
        log.configure("info", "json", "till-1")
        async with running(app, dsn) as (daemon, _):
            daemon.events.listen(log.listener("info"))
            await until(waits_for_status(db, await insert(db, "q"), "dead"))
    finally:
        sys.stderr = structlog_file
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    for event in ("job.failed", "job.dead"):
        (line,) = [line for line in found if line["event"] == event]
        assert line["worker"] == "till-1"
        assert 'raise ValueError("no card")' in line["exception"]
        assert line["exception"].endswith("ValueError: no card")


def test_an_app_may_configure_logging_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record)

    handler = Keep()
    handler.addFilter(log.JobFilter())
    monkeypatch.setattr(logging.getLogger("shop"), "handlers", [handler])
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    log.configure("debug", "json")
    assert logging.root.level == logging.ERROR
    logging.getLogger("shop").error("no job runs")
    assert (said[0].job_id, said[0].attempt) == ("", "")  # type: ignore[attr-defined]


def test_a_reload_changes_the_level_of_libraries_too() -> None:
    logging.root.setLevel(logging.WARNING)
    for level in ("info", "error", "debug"):
        log.configure(level, "json")
        assert logging.root.level == logging.getLevelName(level.upper())
