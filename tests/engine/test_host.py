"""A daemon embedded in another process: it stops and reports it, and never ends that process."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from pgworkd import App
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import UsageError
from pgworkd.words import events
from tests.kits.daemon import Recorder, insert, quick_options, status, until


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
    await db.execute("CREATE ROLE nobody_at_all LOGIN PASSWORD 'right'")
    daemon, seen = Daemon(app, quick_options(dsn.replace("postgres:", "nobody_at_all:", 1))), Recorder()
    daemon.events.listen(seen)
    try:
        with pytest.raises(UsageError):
            await daemon.run()
    finally:
        await db.execute("DROP ROLE nobody_at_all")
    assert [facts["exit_code"] for facts in seen.all(events.DAEMON_STOPPED)] == [2]
