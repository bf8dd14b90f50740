"""The attempt is ended by someone else while its handler runs, or its transaction fails: no write happens twice."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import LeaseLost, Snooze
from tests.kits.apps import dead_end
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("each outcome with each way of losing it")

# The attempt is ended by someone else while its handler runs.


TAKEN = {
    "deleted": "DELETE FROM pgworkd.jobs",
    "truncated": "TRUNCATE pgworkd.jobs",
    "rescued": "UPDATE pgworkd.jobs SET status = 'failed', worker_id = NULL, run_at = now() + interval '1 h'",
    "claimed again": "UPDATE pgworkd.jobs SET attempts = attempts + 1",
    "cancelled and archived": "SELECT pgworkd.archive(array_agg(id), 'cancelled', NULL) FROM pgworkd.jobs",
}


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize("ending", ["return", "raise", "snooze"])
async def test_an_attempt_that_was_taken_over_settles_nothing_and_is_stale(
    dsn: str, db: asyncpg.Connection[Any], how: str, ending: str
) -> None:
    app, go_on = App(), anyio.Event()

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> str:
        if payload:
            await go_on.wait()
            if ending != "return":
                raise Snooze(1) if ending == "snooze" else ValueError("too late")
        return "done"

    async with running(app, dsn) as (daemon, seen):
        job_id = await insert(db, "q", '{"wait": true}')
        await seen.wait(events.JOB_STARTED)
        await db.execute(TAKEN[how])
        before = await db.fetch("SELECT * FROM pgworkd.all_jobs")
        go_on.set()
        stale = await seen.wait(events.JOB_STALE)
        assert (stale["job_id"], stale["attempt"]) == (str(job_id), 1)
        assert await db.fetch("SELECT * FROM pgworkd.all_jobs") == before
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert daemon.worker.may_claim
        await db.execute("DELETE FROM pgworkd.jobs")  # lets the daemon sign off


@pytest.mark.fast
@pytest.mark.parametrize("how", TAKEN)
async def test_the_transaction_of_an_attempt_that_was_taken_over_writes_nothing(
    dsn: str, db: asyncpg.Connection[Any], how: str
) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")
    app, written, go_on, raised = App(), anyio.Event(), anyio.Event(), []

    @app.handler("q")
    async def handle(job: Job) -> None:
        try:
            async with job.transaction() as connection:
                await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
                written.set()
                await go_on.wait()
        except LeaseLost as error:
            raised.append(error)
            raise

    async with running(app, dsn) as (daemon, seen):
        job_id = await insert(db, "q")
        await written.wait()
        await db.execute(TAKEN[how])
        before = await db.fetch("SELECT * FROM pgworkd.all_jobs")
        go_on.set()
        await seen.wait(events.JOB_STALE, job_id=str(job_id))
        assert await db.fetch("SELECT * FROM pgworkd.all_jobs") == before
        assert daemon.worker.may_claim
        await db.execute("DELETE FROM pgworkd.jobs")
    assert len(raised) == 1
    assert await db.fetchval("SELECT count(*) FROM payments") == 0


async def test_a_timeout_after_the_transaction_committed_changes_nothing(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")
    app = App()

    @app.handler("q", timeout_s=1)  # the first transaction of a daemon has to open a connection
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
            job.result = "paid"
        await anyio.sleep_forever()

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED, job_id=str(job_id))
        assert seen.all(events.JOB_STALE) == []
    assert await db.fetchval("SELECT result FROM pgworkd.finished_jobs") == '"paid"'
    assert await db.fetchval("SELECT count(*) FROM payments") == 1


async def test_a_timeout_inside_the_transaction_rolls_it_back(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")
    app = App()

    @app.handler("q", timeout_s=0.2, max_attempts=1)
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
            await connection.execute("SELECT pg_sleep(60)")

    async with running(app, dsn):
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "dead"))
    assert await db.fetchval("SELECT error FROM pgworkd.jobs") == "Timeout: no result within 0.2 s"
    assert await db.fetchval("SELECT count(*) FROM payments") == 0


@pytest.mark.parametrize("result", [object(), "x" * (2 << 20)], ids=["no type of JSON", "too large"])
async def test_a_result_that_cannot_be_stored_rolls_the_transaction_back(
    dsn: str, db: asyncpg.Connection[Any], result: object
) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")

    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
            job.result = result

    row = await dead_end(dsn, db, handle)
    assert "InvalidPayload: result" in row["error"]
    assert await db.fetchval("SELECT count(*) FROM payments") == 0
