"""Whatever a handler does: its attempt ends with a reason, and the daemon runs the next job."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.errors import PermanentError
from tests.kits.apps import cancel_this_task, dead_end
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("each outcome, with a daemon for each")

Handle = Callable[[], Awaitable[Any]]

RAISED: dict[str, tuple[Callable[[], BaseException], str]] = {
    "a time-out of its own": (lambda: TimeoutError("mine"), "TimeoutError: mine"),
    "recursion": (lambda: RecursionError("too deep"), "RecursionError: too deep"),
    "a group": (
        lambda: ExceptionGroup("both", [ValueError("a"), KeyError("b")]),
        "ExceptionGroup: both (2 sub-exceptions): ValueError: a; KeyError: 'b'",
    ),
    "a group around an interrupt": (
        lambda: BaseExceptionGroup("all", [KeyboardInterrupt(), SystemExit(1)]),
        "BaseExceptionGroup: all (2 sub-exceptions): KeyboardInterrupt; SystemExit: 1",
    ),
    "stop iteration": (StopIteration, "StopIteration"),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", RAISED)
@pytest.mark.parametrize("mode", ["loop", "thread"])
async def test_an_exception_fails_the_attempt(dsn: str, db: asyncpg.Connection[Any], name: str, mode: str) -> None:
    make, error = RAISED[name]

    def handle() -> None:
        raise make()

    async def handle_in_loop() -> None:
        raise make()

    row = await dead_end(dsn, db, handle if mode == "thread" else handle_in_loop)
    assert row["error"].endswith(error)
    assert "in handle" in json.loads(row["errors"])[0]["traceback"]


async def _cancels_itself_and_waits() -> None:
    cancel_this_task()
    await anyio.sleep(10)


async def _cancels_itself_twice() -> None:
    cancel_this_task()
    try:
        await anyio.sleep(10)
    finally:
        cancel_this_task()


async def _cancels_itself_and_raises() -> None:
    cancel_this_task()
    raise ValueError("and raises")


async def _cancels_itself_within_a_group() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 10)
        cancel_this_task()


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        (_cancels_itself_and_waits, "asyncio.exceptions.CancelledError"),
        (_cancels_itself_twice, "asyncio.exceptions.CancelledError"),
        (_cancels_itself_and_raises, "ValueError: and raises"),
        (_cancels_itself_within_a_group, "asyncio.exceptions.CancelledError"),
    ],
)
async def test_a_handler_that_cancels_its_own_task_ends_only_its_attempt(
    dsn: str, db: asyncpg.Connection[Any], handle: Handle, error: str
) -> None:
    assert (await dead_end(dsn, db, handle))["error"].startswith(error)


async def test_a_handler_that_cancels_its_own_task_and_returns_has_returned(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q", concurrency=1)
    async def handle() -> str:
        cancel_this_task()
        return "done"

    async with running(app, dsn) as (daemon, _):
        for _ in range(3):
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert daemon.worker.may_claim


@pytest.mark.fast
async def test_a_cancel_scope_left_open_harms_no_later_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("odd", queue="q", concurrency=1)
    async def odd() -> None:
        anyio.CancelScope(deadline=anyio.current_time() + 0.001).__enter__()

    @app.handler("next", queue="q")
    async def following() -> None:
        await anyio.sleep(0.01)  # the forgotten scope would cancel this

    async with running(app, dsn) as (daemon, _):
        for kind in ("odd", "next", "odd", "next"):
            await until(waits_for_status(db, await insert(db, "q", kind=kind), "completed"))
        assert daemon.worker.may_claim


_tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


async def test_context_variables_do_not_leak_into_the_next_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Request ids, tenants, locales: frameworks keep them in context variables, and log lines show them."""
    app = App()

    @app.handler("q", concurrency=1)
    async def handle(payload: dict[str, Any]) -> str:
        before = _tenant.get()
        _tenant.set(payload["tenant"])
        return before

    async with running(app, dsn):
        for tenant in ("a", "b", "c"):
            job_id = await insert(db, "q", json.dumps({"tenant": tenant}))
            await until(waits_for_status(db, job_id, "completed"))
    assert await db.fetchval("SELECT array_agg(DISTINCT result::text) FROM pgworkd.finished_jobs") == ['"nobody"']


async def test_recording_a_huge_error_does_not_block_the_loop(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A message of 50 MB is truncated before it is processed."""

    async def handle() -> None:
        began = time.perf_counter()
        try:
            raise ValueError("y" * (50 << 20)) from RuntimeError("z\ud800" * (10 << 20))
        finally:
            assert time.perf_counter() - began < 1

    row = await dead_end(dsn, db, handle)
    assert row["error"].startswith("ValueError: yyy")


async def test_the_history_has_the_times_of_claim_and_start(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Two jobs are claimed together for one slot; one returns, one ends by its own transaction, one fails."""
    app, began = App(), dict[str, float]()

    @app.handler("q", concurrency=1)
    async def handle(payload: dict[str, Any], job: Job) -> None:
        began[payload["end"]] = time.monotonic()
        await anyio.sleep(0.2)
        if payload["end"] == "raise":
            raise PermanentError("no use")
        if payload["end"] == "commit":
            async with job.transaction():
                pass

    payloads = [{"end": "raise"}, {"end": "return"}, {"end": "commit"}]
    insert_all = "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'q', unnest($1::text[])::jsonb"
    await db.execute(insert_all, [json.dumps(payload) for payload in payloads])
    async with running(app, dsn):
        await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.finished_jobs"))
        await until(lambda: db.fetchval("SELECT status = 'dead' FROM pgworkd.jobs"))
    rows = await db.fetch(
        "SELECT payload ->> 'end' AS ended, claimed_at, started_at, finished_at, errors FROM pgworkd.all_jobs"
    )
    by_end = {row["ended"]: row for row in rows}
    for end in ("return", "commit"):
        row = by_end[end]
        assert row["claimed_at"] <= row["started_at"] <= row["finished_at"] - timedelta(seconds=0.19)
    between_s = (by_end["commit"]["started_at"] - by_end["return"]["started_at"]).total_seconds()
    assert between_s == pytest.approx(began["commit"] - began["return"], abs=0.1)
    assert 0.19 < json.loads(by_end["raise"]["errors"])[-1]["ran_s"] < 5
    assert by_end["raise"]["started_at"] is None
