"""A daemon embedded in another process: it stops and reports it, and never ends that process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import SchemaError
from tests.kits.daemon import Recorder, insert, quick_options, status, until, waits_for_status


@pytest.mark.parametrize("how", ["a stop", "the end of the lease"])
async def test_run_returns_1_when_a_thread_does_not_end(
    dsn: str, db: asyncpg.Connection[Any], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[object] = []
    monkeypatch.setattr("os._exit", ended.append)
    app, entered, let_go = App(), threading.Event(), threading.Event()

    @app.handler("q")
    def handle() -> None:
        entered.set()
        let_go.wait(20)

    daemon, seen = Daemon(app, quick_options(dsn, shutdown_s=0.05, cancel_grace_s=0.05)), Recorder()
    daemon.events.listen(seen)
    codes: list[int] = []

    async def run() -> None:
        codes.append(await daemon.run())

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await daemon.ready.wait()
            job_id = await insert(db, "q")
            await until(entered.is_set)
            if how == "a stop":
                daemon.request_stop()
            else:  # like the thread that watches the lease
                assert daemon.worker.heartbeat is not None
                await anyio.to_thread.run_sync(daemon.worker.heartbeat._end_process, "the lease ends")
            await until(lambda: codes)
        assert codes == [1]
        assert not let_go.is_set()
        assert await status(db, job_id) == "running", "others take it back when the lease is over"
        reasons = [facts["reason"] for facts in seen.all(events.SHUTDOWN_INCOMPLETE)]
        assert reasons[-1] == "1 handler would not stop"
        assert (reasons[0] == "the lease ends") is (how == "the end of the lease")
        assert [facts["exit_code"] for facts in seen.all(events.DAEMON_STOPPED)] == [1]
    finally:
        let_go.set()
    assert ended == []


async def test_the_reported_exit_code_is_that_of_the_process(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The command exits with 2 if the database can never be used."""
    app = App()
    app.handler("q")(anyio.sleep_forever)
    await db.execute("UPDATE pgworkd.schema_version SET version = version + 1")
    daemon, seen = Daemon(app, quick_options(dsn)), Recorder()
    daemon.events.listen(seen)
    with pytest.raises(SchemaError):
        await daemon.run()
    assert [facts["exit_code"] for facts in seen.all(events.DAEMON_STOPPED)] == [2]


async def _by_task(run: Callable[[], Awaitable[int]], cancel: anyio.Event) -> None:
    task = asyncio.create_task(run())  # type: ignore[arg-type]  # noqa: TID251 - as hosts do
    await cancel.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # some are impatient
    with pytest.raises(asyncio.CancelledError):
        await task


async def _by_scope(run: Callable[[], Awaitable[int]], cancel: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await cancel.wait()
        tasks.cancel_scope.cancel()


async def _by_sibling(run: Callable[[], Awaitable[int]], cancel: anyio.Event) -> None:
    async def fail() -> None:
        await cancel.wait()
        raise ValueError("of the host")

    with pytest.raises(ExceptionGroup):  # noqa: PT012 - the group raises at its end
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run())  # type: ignore[arg-type]
            tasks.create_task(fail())


async def _by_time(run: Callable[[], Awaitable[int]], cancel: anyio.Event) -> None:
    async def expire(limit: asyncio.Timeout) -> None:
        await cancel.wait()
        limit.reschedule(0)

    async with anyio.create_task_group() as tasks:
        with pytest.raises(TimeoutError):  # noqa: PT012 - as above
            async with asyncio.timeout(None) as limit:
                tasks.start_soon(expire, limit)
                await run()


@pytest.mark.parametrize("how", [_by_task, _by_scope, _by_sibling, _by_time])
async def test_a_host_that_cancels_run_leaves_nothing_behind(
    dsn: str, db: asyncpg.Connection[Any], how: Callable[..., Awaitable[None]]
) -> None:
    app, begun, cleaned = App(), 0, 0

    @app.handler("q", concurrency=5)
    async def handle() -> None:
        nonlocal begun, cleaned
        begun += 1
        try:
            await anyio.sleep_forever()
        finally:
            await asyncio.sleep(0.05)
            cleaned += 1

    daemon, cancel = Daemon(app, quick_options(dsn, lease_s=60, heartbeat_s=10)), anyio.Event()
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 20)")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(how, daemon.run, cancel)
        await until(lambda: begun == 5)
        cancel.set()
        with anyio.fail_after(10):
            await until(lambda: db.fetchval("SELECT count(*) = 0 FROM pgworkd.workers"))
    assert cleaned == 5
    rows = await db.fetch("SELECT DISTINCT status::text, failures, losses FROM pgworkd.jobs")
    assert [tuple(row) for row in rows] == [("pending", 0, 0)]
    assert daemon.running == 0


async def test_a_host_that_cancels_run_during_the_start_waits_for_nothing(db: asyncpg.Connection[Any]) -> None:
    app = App()
    app.handler("q")(anyio.sleep_forever)
    daemon = Daemon(app, quick_options("postgresql://nobody@127.0.0.1:1/nothing"))
    with anyio.fail_after(5):
        with anyio.move_on_after(0.1) as limit:
            await daemon.run()
    assert limit.cancelled_caught


@pytest.mark.parametrize("own", [False, True])
async def test_without_a_listener_it_logs_by_logging(
    dsn: str, db: asyncpg.Connection[Any], caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    app = App()

    @app.handler("q", max_attempts=1)
    async def fail() -> None:
        raise ValueError(f"no {dsn}")

    daemon = Daemon(app, quick_options(dsn))
    if own:
        daemon.events.listen(Recorder())
    caplog.set_level(logging.INFO, "pgworkd")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "dead"))
        daemon.request_stop()
    records = {record.event: record for record in caplog.records if record.name == "pgworkd"}  # type: ignore[attr-defined]
    if own:
        assert records == {}
        return
    assert {"daemon.starting", "daemon.ready", "job.dead", "daemon.stopped"} <= records.keys()
    dead = records["job.dead"]
    assert dead.levelno == logging.ERROR
    assert dead.facts["job_id"] == str(job_id)  # type: ignore[attr-defined]
    text = dead.getMessage()
    assert text.startswith("job.dead ")
    assert "ValueError: no postgresql://" in text
    assert "Traceback" in text
    assert dsn.split(":")[2].split("@")[0] not in text, "the password"
