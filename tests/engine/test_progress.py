"""Progress of a job: from the loop, a thread and a process; throttled, and only for its own attempt."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.core.job import PROGRESS_CHARS_MAX
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.store import Store
from pgworkd.errors import PgworkdError, UsageError
from tests.kits.daemon import insert, running, until, waits_for_status

SAID = "SELECT done, message FROM pgworkd.job_progress WHERE id = $1"


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In production progress is written every 0.5 s."""
    monkeypatch.setattr("pgworkd.engine.settle.job_events.CHECK_S", 0.02)


def half(payload: dict[str, Any], job: Job) -> None:  # at the top level of a module, for the process
    job.progress(0.5, "page 12\0")
    while not Path(payload["go_on"]).exists():
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["loop", "thread", "process"])
async def test_progress_is_visible_while_the_job_runs(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, mode: str
) -> None:
    app = App()
    if mode == "loop":

        @app.handler("q")
        async def handle(payload: dict[str, Any], job: Job) -> None:
            job.progress(0.5, "page 12\0")
            while not Path(payload["go_on"]).exists():  # noqa: ASYNC240
                await anyio.sleep(0.01)

    else:
        app.handler("q", run_in=mode)(half)  # type: ignore[arg-type]
    async with running(app, dsn):
        job_id = await insert(db, "q", f'{{"go_on": "{tmp_path / "go_on"}"}}')
        await until(lambda: db.fetchrow(SAID, job_id))
        row = await db.fetchrow(SAID, job_id)
        assert row is not None
        assert tuple(row) == (0.5, "page 12")
        (tmp_path / "go_on").touch()
        await until(waits_for_status(db, job_id, "completed"))
    assert await db.fetchrow(SAID, job_id) is None


async def test_frequent_progress_is_written_rarely(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[float] = []
    report = Store.report_progress

    async def counted(self: Store, said: Any, worker_id: int | None = None) -> None:
        written.extend(done for _, _, done, _ in said)
        await report(self, said, worker_id)

    monkeypatch.setattr(Store, "report_progress", counted)
    app, go_on = App(), anyio.Event()

    @app.handler("q")
    async def handle(job: Job) -> None:
        for n in range(10_000):
            job.progress(n / 10_000)
            if n % 1000 == 0:
                await anyio.sleep(0.001)
        job.progress(1, "x" * 1000)
        await go_on.wait()

    async with running(app, dsn):
        job_id = await insert(db, "q")
        await until(lambda: db.fetchval("SELECT done = 1 FROM pgworkd.job_progress WHERE id = $1", job_id))
        message = await db.fetchval("SELECT message FROM pgworkd.job_progress WHERE id = $1", job_id)
        go_on.set()
    assert message == "x" * PROGRESS_CHARS_MAX
    assert written == sorted(set(written)), "each word at most once"
    assert len(written) <= 10


async def test_a_lost_attempt_writes_no_progress(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, go_on, said = App(), anyio.Event(), anyio.Event()

    @app.handler("q")
    async def handle(job: Job) -> None:
        await said.wait()
        job.progress(0.9)
        await go_on.wait()

    async with running(app, dsn):
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "running"))
        await db.execute("UPDATE pgworkd.jobs SET attempts = attempts + 1 WHERE id = $1", job_id)
        said.set()
        for _ in range(5):
            await anyio.sleep(0.02)
        assert await db.fetchval("SELECT count(*) FROM pgworkd.job_progress") == 0
        go_on.set()


@pytest.mark.parametrize("done", [-0.1, 1.1, float("nan"), True, "half"])
def test_progress_outside_0_to_1_is_refused(done: Any) -> None:
    job = Job.__new__(Job)
    with pytest.raises(UsageError, match="give a number from 0 to 1"):
        job.progress(done)


async def test_progress_that_cannot_be_written_blocks_nothing_and_is_retried(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    report, refused = Store.report_progress, list[PgworkdError]()

    async def noted(self: Store, said: Any, worker_id: int | None = None) -> None:
        try:
            await report(self, said, worker_id)
        except PgworkdError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(Store, "report_progress", noted)
    app, go_on = App(), threading.Event()

    @app.handler("q", timeout_s=0.2)
    def handle(job: Job) -> None:
        job.progress(0.5, "said once")
        go_on.wait(20)

    connection = ConnectionOptions(dsn, command_timeout_s=8)
    async with running(app, dsn, connection=connection) as (_, seen):
        async with db.transaction():
            await db.execute("LOCK TABLE pgworkd.progress IN ACCESS EXCLUSIVE MODE")
            other = await asyncpg.connect(dsn)
            job_id = await insert(other, "q")
            await other.close()
            await until(lambda: seen.all(events.JOB_OVERDUE), limit_s=5)
            await until(lambda: refused)
        await until(lambda: db.fetchrow(SAID, job_id))
        go_on.set()
