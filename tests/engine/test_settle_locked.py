"""An open transaction of an application blocks nothing except the rows that it has locked."""

from __future__ import annotations

import json
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from tests.kits.daemon import insert, running, status, until, waits_for_status

pytestmark = pytest.mark.slow("outcomes beside open transactions")

WITHIN_S = 1.5
_BATCH = "(SELECT batch_id FROM pgworkd.jobs WHERE id = $1)"
_DEPENDENT = "(SELECT job_id FROM pgworkd.job_dependencies WHERE depends_on = $1)"
_NEXT = "(SELECT n.id FROM pgworkd.jobs n JOIN pgworkd.jobs j USING (serialize_key) WHERE j.id = $1 AND n.id <> j.id)"
HELD = {
    "the row": "SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE",
    "cancel a running job": "SELECT pgworkd.cancel(ARRAY[$1::uuid])",
    "lock its tree": f"SELECT FROM pgworkd.batches WHERE id = {_BATCH} FOR UPDATE",
    "cancel its batch": f"SELECT pgworkd.cancel_batch({_BATCH})",
    "edit its dependent": f"SELECT pgworkd.edit({_DEPENDENT}, '{{}}')",
    "edit the next in line": f"SELECT pgworkd.edit({_NEXT}, p_run_at => now())",
}
TAKES_THE_JOB = {"the row", "cancel a running job", "cancel its batch"}


async def _scene(db: asyncpg.Connection[Any]) -> str:
    """A job with a key, in a batch, with a dependent, and a job blocked by its key."""
    batch = await db.fetchval("SELECT (pgworkd.create_batch('b', 'q')).id")
    job: str = await db.fetchval(
        "INSERT INTO pgworkd.jobs (queue, payload, serialize_key, batch_id) VALUES ('q', $1, 'k', $2) RETURNING id",
        json.dumps({"wait": True}),
        batch,
    )
    async with db.transaction():
        dependent = await db.fetchval("INSERT INTO pgworkd.jobs (queue) VALUES ('q') RETURNING id")
        await db.fetchval("SELECT pgworkd.depend($1, ARRAY[$2::uuid])", dependent, job)
    return job


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_only_the_rows_locked_by_an_open_transaction_wait(
    dsn: str, db: asyncpg.Connection[Any], held: str, end: str
) -> None:
    app, go_on, runs = App(), anyio.Event(), list[str]()

    @app.handler("q", concurrency=50)
    async def handle(payload: dict[str, Any]) -> None:
        runs.append(str(payload.get("n")))
        if payload.get("wait"):
            await go_on.wait()

    @app.handler("other")
    async def other() -> None:
        return None

    job = await _scene(db)
    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_STARTED)
        await db.execute("INSERT INTO pgworkd.jobs (queue, serialize_key) VALUES ('q', 'k')")
        await until(
            lambda: db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE status = 'blocked' AND waiting_on = 0)")
        )
        holder = await asyncpg.connect(dsn)
        await holder.execute("BEGIN")
        await holder.fetch(HELD[held], job)
        go_on.set()
        for n in range(3):
            ids = [await insert(db, "q", f'{{"n": {n}}}') for _ in range(20)] + [await insert(db, "other")]
            with anyio.fail_after(WITHIN_S):
                for each in ids:
                    await until(waits_for_status(db, each, "completed"))
        if held in TAKES_THE_JOB:
            assert await status(db, job) == "running", "it stays in flight"
        elif held != "edit the next in line":
            assert await status(db, job) == "completed"
        assert seen.all(events.DATABASE_UNAVAILABLE) == []
        assert seen.all(events.JOB_STALE) == []
        await holder.execute(end)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=5)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.pending_effects)"), limit_s=5)
        await holder.close()
    assert seen.all(events.JOB_STALE) == []
    counted = await db.fetchval("SELECT completed + cancelled FROM pgworkd.batches")
    assert counted == 1
    assert runs.count("None") <= 3, "nothing ran twice"


async def test_a_schedule_with_a_locked_occurrence_resumes_after_the_unlock(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 1)")
    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED)
        holder = await asyncpg.connect(dsn)
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM pgworkd.schedules FOR UPDATE")
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=4)
        before = len(seen.all(events.JOB_COMPLETED))
        with anyio.fail_after(WITHIN_S):
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
        await holder.execute("COMMIT")
        await seen.wait(events.JOB_COMPLETED, count=before + 3)
        await holder.close()
        assert seen.all(events.DATABASE_UNAVAILABLE) == []


@pytest.mark.parametrize("held", sorted(set(HELD) - TAKES_THE_JOB))
async def test_a_transactional_completion_does_not_wait_for_locked_rows(
    dsn: str, db: asyncpg.Connection[Any], held: str
) -> None:
    app, go_on = App(), anyio.Event()

    @app.handler("q")
    async def handle(payload: dict[str, Any], job: Job) -> None:
        if payload.get("wait"):
            await go_on.wait()
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO notes VALUES ($1)", job.id)

    await db.execute("CREATE TABLE notes (job uuid)")
    job = await _scene(db)
    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_STARTED)
        await db.execute("INSERT INTO pgworkd.jobs (queue, serialize_key) VALUES ('q', 'k')")
        holder = await asyncpg.connect(dsn)
        await holder.execute("BEGIN")
        await holder.fetch(HELD[held], job)
        go_on.set()
        with anyio.fail_after(2 * WITHIN_S):
            await until(waits_for_status(db, job, "completed"))
        await holder.execute("ROLLBACK")
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=5)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.pending_effects)"), limit_s=5)
        await holder.close()
    assert seen.all(events.DATABASE_UNAVAILABLE) == []
    assert await db.fetchval("SELECT count(*) = 3 AND count(DISTINCT job) = 3 FROM notes")
    assert await db.fetchval("SELECT completed FROM pgworkd.batches") == 1
