"""Shutdown: no job is lost, a released job has no failure counted, and the exit code says how the stop went."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.database.store import Store
from pgworkd.engine.life.daemon import Daemon
from tests.kits.daemon import Recorder, insert, quick_options, running, status, until


async def registered(db: asyncpg.Connection[Any]) -> int:
    """How many daemons the database knows, with and without a gateway, and pools of theirs."""
    sql = """SELECT count(*) FROM pgworkd.workers w LEFT JOIN pgworkd.pools p ON p.worker_id = w.id
             WHERE w.kind IN ('daemon', 'remote')"""
    return int(await db.fetchval(sql))


async def test_a_graceful_stop_finishes_running_jobs_and_releases_the_rest(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """SIGTERM: running handlers finish, jobs not yet started go back to pending, and the worker's row is deleted."""
    app, release = App(), anyio.Event()

    @app.handler("q", concurrency=1)
    async def handle() -> str:
        await release.wait()
        return "finished in peace"

    async with running(app, dsn) as (daemon, seen):
        first, second = await insert(db, "q"), await insert(db, "q")
        await seen.wait(events.JOB_STARTED, job_id=str(first))
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPING)
        third = await insert(db, "q")
        release.set()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)

    assert [await status(db, job_id) for job_id in (first, second, third)] == ["completed", "pending", "pending"]
    assert await registered(db) == 0


async def test_jobs_still_running_after_shutdown_s_are_cancelled_and_released(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """The shutdown timeout expires: the handler is cancelled, and the release does not count as a failure."""
    app, cleaned_up = App(), []

    @app.handler("q")
    async def handle(job: Job) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned_up.append(job.attempt)

    async with running(app, dsn, shutdown_s=0.05) as (daemon, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
        released = await seen.wait(events.JOB_RELEASED)
    assert released["reason"] == "the daemon stops"
    assert cleaned_up == [1]
    row = await db.fetchrow("SELECT status, attempts, failures, error FROM pgworkd.jobs")
    assert row is not None
    assert tuple(row) == ("pending", 1, 0, None)


async def test_a_second_stop_request_cancels_running_jobs_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """An operator presses Ctrl-C twice: the daemon no longer waits for the running jobs, which are released."""
    app = App()

    @app.handler("q")
    async def handle() -> None:
        await anyio.sleep_forever()

    async with running(app, dsn, shutdown_s=3600) as (daemon, seen):
        await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPING)
        daemon.request_stop(now=True)
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert await db.fetchval("SELECT status FROM pgworkd.jobs") == "pending"


async def test_a_stop_in_the_middle_of_a_backlog_leaves_no_job_running(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """With 5,000 jobs waiting, every job is completed or pending after the stop, and none has a failure."""
    app = App()

    @app.handler("q", concurrency=50)
    async def handle() -> None:
        await anyio.lowlevel.checkpoint()

    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 5000)")
    async with running(app, dsn) as (daemon, seen):
        await seen.wait(events.JOB_COMPLETED, count=100)
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    counts = dict(await db.fetch("SELECT status::text, count(*) FROM pgworkd.all_jobs GROUP BY 1"))
    assert set(counts) <= {"completed", "pending"}
    assert sum(counts.values()) == 5000
    assert counts["completed"] == len(seen.all(events.JOB_COMPLETED))
    assert await db.fetchval("SELECT max(failures) FROM pgworkd.all_jobs") == 0


@pytest.mark.parametrize("says", ["nothing", "it checks", "it is done"])
async def test_a_thread_that_returns_early_on_a_stop_is_released_unless_marked_done(
    dsn: str, db: asyncpg.Connection[Any], says: str
) -> None:
    """A threaded handler stops after one of 200 pages: the job is released, and the next daemon runs it again.

    Only `job.done()` says that returning early means that the work is complete."""
    app, entered, pages = App(), threading.Event(), []

    @app.handler("q")
    def handle(job: Job) -> str:
        for page in range(200):
            if says == "it checks":
                job.check()
            elif job.stopping.is_set():
                break
            pages.append(page)
            entered.set()
            job.stopping.wait(10)
        if says == "it is done":
            job.done()
        return "came home"

    async with running(app, dsn, shutdown_s=0.05) as (daemon, seen):
        job_id = await insert(db, "q")
        await until(entered.is_set)
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert pages == [0]
    assert await status(db, job_id) == ("completed" if says == "it is done" else "pending")
    assert await db.fetchval("SELECT failures FROM pgworkd.all_jobs") == 0


async def test_a_daemon_that_never_reached_its_database_stops_cleanly() -> None:
    """The database has been unavailable from the start: the daemon keeps retrying, and a stop still exits with 0."""
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    seen = Recorder()
    daemon = Daemon(app, quick_options("postgresql://nobody@127.0.0.1:1/nowhere"))
    daemon.events.listen(seen)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        outage = await seen.wait(events.DATABASE_UNAVAILABLE)
        assert "no connection to the database" in outage["error"]
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)


async def test_a_handler_that_ignores_cancellation_ends_the_process_with_exit_code_1(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A handler swallows its cancellation: the shutdown is reported as incomplete, and the process is ended."""
    app, release, ended = App(), anyio.Event(), []

    @app.handler("q")
    async def handle() -> None:
        while not release.is_set():
            try:
                await anyio.sleep(0.01)
            except BaseException:  # noqa: BLE001, S112 - ignoring cancellation is the point of this test
                continue

    def end_process(reason: str) -> None:  # in production this does not return
        ended.append(reason)
        release.set()

    app_daemon = running(app, dsn, shutdown_s=0.05, cancel_grace_s=0.1, end_process=end_process)
    async with app_daemon as (daemon, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=1, still_running=1)
        assert seen.all(events.SHUTDOWN_INCOMPLETE) == [{"reason": "1 handler would not stop"}]
    assert ended == ["1 handler would not stop"]


async def test_a_heartbeat_during_deregistration_neither_loses_nor_renews_the_lease(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat finds no worker row because the daemon has just deleted its own: that is no lost lease."""
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    sign_off = Store.sign_off

    async def sign_off_slowly(self: Store, worker_id: int) -> bool:
        signed_off = await sign_off(self, worker_id)
        daemon.worker.renew_now()
        await anyio.sleep(0.3)  # a slow reply
        return signed_off

    monkeypatch.setattr(Store, "sign_off", sign_off_slowly)
    async with running(app, dsn) as (daemon, seen):
        await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED)
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert seen.all(events.LEASE_LOST) == []
    assert await registered(db) == 0
