"""The life of a job: an application inserts a row, a daemon runs it, and it reaches one final state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import asyncpg

from pgworkd import App, DeadJob, Job
from pgworkd.core import events
from pgworkd.errors import PermanentError, RetryAfter, Snooze
from tests.kits.daemon import insert, running, until, waits_for_status


async def test_an_inserted_job_runs_and_its_result_is_stored(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Enqueueing is one INSERT, in any language; the finished job keeps its result and its timestamps."""
    app = App()

    @dataclass
    class Note:
        note: int

    @app.handler("embedding")
    async def embed(note: Note, job: Job) -> dict[str, Any]:
        return {"note": note.note, "attempt": job.attempt}

    async with running(app, dsn):
        # The whole interface: one row, in the application's own transaction.
        job_id = await db.fetchval(
            "INSERT INTO pgworkd.jobs (queue, payload) VALUES ('embedding', '{\"note\": 7}') RETURNING id"
        )
        await until(waits_for_status(db, job_id, "completed"))

    row = await db.fetchrow("SELECT * FROM pgworkd.finished_jobs WHERE id = $1", job_id)
    assert row is not None
    assert json.loads(row["result"]) == {"note": 7, "attempt": 1}
    assert (row["attempts"], row["failures"], row["error"]) == (1, 0, None)
    assert row["created_at"] <= row["started_at"] <= row["finished_at"]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_a_job_of_a_rolled_back_transaction_never_runs(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A job exists exactly if the transaction that inserted it commits."""
    app, ran = App(), []

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> None:
        ran.append(payload["n"])

    async with running(app, dsn):
        transaction = db.transaction()
        await transaction.start()
        await insert(db, "q", '{"n": 1}')
        await transaction.rollback()
        done = await insert(db, "q", '{"n": 2}')
        await until(waits_for_status(db, done, "completed"))
    assert ran == [2]


async def test_a_failing_job_is_retried_with_backoff_and_then_dead(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Every attempt fails: the job is retried after each delay of its backoff and dead after `max_attempts`.

    The row keeps the error of every attempt, and the `on_dead` hook is called once, after the last one."""
    app, dead_jobs = App(), []

    @app.handler("flaky", max_attempts=3, backoff=[0.02, 0.04])
    async def flaky() -> None:
        raise ValueError("downstream said no")

    @app.on_dead
    async def on_dead(dead: DeadJob) -> None:
        dead_jobs.append(dead)

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "flaky", '{"n": 1}')
        await seen.wait(events.JOB_DEAD)
        await until(lambda: dead_jobs)

    row = await db.fetchrow("SELECT * FROM pgworkd.jobs WHERE id = $1", job_id)
    assert row is not None
    assert (row["status"], row["attempts"], row["failures"]) == ("dead", 3, 3)
    assert row["error"] == "ValueError: downstream said no"
    history = json.loads(row["errors"])
    assert [entry["attempt"] for entry in history] == [1, 2, 3]
    assert "downstream said no" in history[-1]["traceback"]
    assert [round(f["retry_in_s"], 2) for f in seen.all(events.JOB_FAILED)] == [0.02, 0.04]
    assert [(d.id, d.attempt, d.payload) for d in dead_jobs] == [(str(job_id), 3, {"n": 1})]


async def test_permanent_error_snooze_retry_after_timeout_and_unknown_kind(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """The outcomes besides success and failure: PermanentError, Snooze, RetryAfter, a timeout, and an unknown kind."""
    app = App()

    @app.handler("permanent", queue="q")
    async def permanent() -> None:
        raise PermanentError("no such user")

    @app.handler("snooze", queue="q")
    async def snooze(job: Job) -> str:
        if job.attempt == 1:
            raise Snooze(0.05)
        return "awake"

    @app.handler("after", queue="q")
    async def after(job: Job) -> str:
        if job.attempt == 1:
            raise RetryAfter(0.05, "busy")
        return "done"

    @app.handler("slow", queue="q", timeout_s=0.05, max_attempts=1)
    async def slow(job: Job) -> None:
        await job_never_ends()

    async with running(app, dsn):
        ids = {kind: await insert(db, "q", kind=kind) for kind in ("permanent", "snooze", "after", "slow", "unheard")}
        for kind, wanted in (("permanent", "dead"), ("snooze", "completed"), ("after", "completed"), ("slow", "dead")):
            await until(waits_for_status(db, ids[kind], wanted))

        async def unheard() -> Any:
            return await db.fetchrow("SELECT * FROM pgworkd.jobs WHERE id = $1 AND error IS NOT NULL", ids["unheard"])

        row = await until(unheard)

    # An unknown kind stays pending and does not count as a failure: in a rolling deploy a newer daemon will run it.
    assert (row["status"], row["failures"], row["error"]) == ("pending", 0, "no handler for kind 'unheard'")
    facts = {r["id"]: r for r in await db.fetch("SELECT id, attempts, failures, error FROM pgworkd.all_jobs")}
    assert (facts[ids["snooze"]]["attempts"], facts[ids["snooze"]]["failures"]) == (2, 0)
    assert (facts[ids["after"]]["attempts"], facts[ids["after"]]["failures"]) == (2, 1)
    assert facts[ids["permanent"]]["attempts"] == 1
    assert facts[ids["slow"]]["error"] == "Timeout: no result within 0.05 s"


async def test_writes_in_job_transaction_commit_with_the_completion_or_not_at_all(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Exactly once: the rows written inside `job.transaction()` and the job's completion are one commit."""
    await db.execute("CREATE TABLE payments (job uuid, attempt int)")
    app = App()

    @app.handler("pay", backoff=0.02)
    async def pay(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO payments VALUES ($1, $2)", job.id, job.attempt)
            if job.attempt == 1:
                raise RuntimeError("the power went out before the commit")
            job.result = {"paid": True}

    async with running(app, dsn):
        job_id = await insert(db, "pay")
        await until(waits_for_status(db, job_id, "completed"))

    assert [tuple(r) for r in await db.fetch("SELECT job, attempt FROM payments")] == [(job_id, 2)]
    assert await db.fetchval("SELECT result FROM pgworkd.finished_jobs") == '{"paid": true}'


async def job_never_ends() -> None:
    import anyio

    await anyio.sleep_forever()
