"""Handlers in threads: how they end, how they are stopped, and that they do not block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import PermanentError, Snooze
from tests.kits.daemon import Recorder, insert, quick_options, running, status, until, waits_for_status

pytestmark = pytest.mark.slow("threads and processes that end, or do not")


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In production threads are checked every 0.5 s."""
    monkeypatch.setattr("pgworkd.engine.settle.job_events.CHECK_S", 0.02)


async def test_a_plain_function_runs_in_a_thread_of_its_own(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", concurrency=3)
    def handle(payload: dict[str, Any], job: Job) -> list[Any]:
        together.wait(10)
        return [threading.get_ident(), payload, job.attempt]

    together = threading.Barrier(3)
    async with running(app, dsn):
        ids = [await insert(db, "q", json.dumps({"n": n})) for n in range(3)]
        for job_id in ids:
            await until(waits_for_status(db, job_id, "completed"))
    results = [json.loads(row[0]) for row in await db.fetch("SELECT result FROM pgworkd.finished_jobs ORDER BY id")]
    threads = {result[0] for result in results}
    assert len(threads) == 3
    assert threading.get_ident() not in threads
    assert [result[1:] for result in results] == [[{"n": n}, 1] for n in range(3)]


@pytest.mark.parametrize(
    ("ending", "final", "failures"),
    [
        ("return", "dead", 1),
        ("is done", "completed", 0),
        ("raise", "dead", 1),
        ("permanent", "dead", 1),
        ("snooze", "dead", 1),
    ],
)
async def test_an_overdue_thread_is_asked_to_stop_reported_and_never_run_twice(
    dsn: str, db: asyncpg.Connection[Any], ending: str, final: str, failures: int
) -> None:
    app, runs, go_on = App(), [], threading.Event()
    ends: dict[str, BaseException] = {
        "raise": ValueError("too late"),
        "permanent": PermanentError("no use"),
        "snooze": Snooze(3600),
    }

    @app.handler("q", timeout_s=0.1, max_attempts=1)
    def handle(job: Job) -> str:
        runs.append(job.attempt)
        assert job.stopping.wait(10)
        assert go_on.wait(10)
        if ending in ends:
            raise ends[ending]
        if ending == "is done":
            job.done()
        return "late, but done"

    async with running(app, dsn, heartbeat_s=0.1) as (_, seen):
        job_id = await insert(db, "q")
        overdue = await seen.wait(events.JOB_OVERDUE, job_id=str(job_id))
        assert overdue["timeout_s"] == pytest.approx(0.1)
        for _ in range(5):
            await anyio.sleep(0.04)
            assert await status(db, job_id) == "running"
        go_on.set()
        await until(waits_for_status(db, job_id, final))
        assert len(seen.all(events.JOB_OVERDUE)) == 1
    assert runs == [1]
    assert await db.fetchval("SELECT failures FROM pgworkd.all_jobs") == failures
    if ending == "is done":
        assert await db.fetchval("SELECT result::text FROM pgworkd.finished_jobs") == '"late, but done"'


@pytest.mark.parametrize("how", ["timeout", "cancelled on request"])
async def test_a_handler_that_swallows_its_cancellation_is_reported_once(
    dsn: str, db: asyncpg.Connection[Any], how: str
) -> None:
    app, go_on = App(), anyio.Event()

    @app.handler("q", timeout_s=0.1 if how == "timeout" else 60, max_attempts=1)
    async def handle() -> None:
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()

    async with running(app, dsn, cancel_grace_s=0.1, heartbeat_s=0.1) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        if how != "timeout":
            await db.execute("SELECT pgworkd.cancel($1)", [job_id])
        overdue = await seen.wait(events.JOB_OVERDUE, job_id=str(job_id))
        assert (overdue["reason"], overdue["timeout_s"]) == (how, 0.1 if how == "timeout" else 60)
        assert await status(db, job_id) == "running"
        await anyio.sleep(1.1)  # two more checks
        go_on.set()
        await until(waits_for_status(db, job_id, "dead" if how == "timeout" else "cancelled"))
        assert len(seen.all(events.JOB_OVERDUE)) == 1


async def test_a_thread_in_time_is_not_overdue(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", timeout_s=60)
    def handle(job: Job) -> bool:
        time.sleep(0.05)
        return job.stopping.is_set()

    async with running(app, dsn) as (_, seen):
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert seen.all(events.JOB_OVERDUE) == []
    assert await db.fetchval("SELECT result::text FROM pgworkd.finished_jobs") == "false"


async def test_threads_are_bounded_only_by_the_slots_of_the_queue(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """By default anyio limits threads to 40."""
    app, together = App(), threading.Barrier(60)

    @app.handler("q", concurrency=60)
    def handle() -> None:
        together.wait(10)

    async with running(app, dsn) as (_, seen):
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 60)")
        await seen.wait(events.JOB_COMPLETED, count=60)


async def test_a_stop_does_not_wait_forever_for_a_thread_that_ignores_it(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, let_go, entered, ended = App(), threading.Event(), threading.Event(), list[str]()

    @app.handler("q")
    def handle() -> None:
        entered.set()
        let_go.wait(15)

    def end(reason: str) -> None:
        ended.append(reason)
        let_go.set()  # the real one never returns

    daemon, seen = Daemon(app, quick_options(dsn, shutdown_s=0.1, cancel_grace_s=0.1), end_process=end), Recorder()
    daemon.events.listen(seen)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        await daemon.ready.wait()
        await insert(db, "q")
        await until(entered.is_set)
        daemon.request_stop()
        try:
            await until(lambda: ended, limit_s=3)
        finally:
            let_go.set()
    assert "handler" in ended[0]
