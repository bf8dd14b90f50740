"""transaction=True: which jobs are claimed in the transactions that run them, what others see, and stops."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job, PermanentError
from pgworkd.core import events
from pgworkd.core.job import Reason
from tests.kits.daemon import cancel, insert, running, status, until, waits_for_status
from tests.kits.money import age_workers, serving

pytestmark = pytest.mark.slow("a daemon for each kind of job")


@pytest.fixture
async def notes(db: asyncpg.Connection[Any]) -> asyncpg.Connection[Any]:
    await db.execute("CREATE TABLE notes (n int)")
    return db


async def write(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")


async def seen_from_aside(dsn: str, job: Job) -> str | None:
    """The status of the job, as others see it."""
    other = await asyncpg.connect(dsn)
    try:
        return await status(other, job.id)
    finally:
        other.terminate()


# Which jobs are claimed first.


@pytest.mark.parametrize(
    ("columns", "setting", "seen_as"),
    [
        ({}, "", "pending"),
        ({"priority": 3, "meta": "{}"}, "", "pending"),
        ({"dedupe_key": "a"}, "", "running"),
        ({"serialize_key": "a"}, "", "running"),
        ({"limit_key": "a"}, "", "running"),
        ({"max_attempts": 1}, "", "running"),
        ({"payload": json.dumps({"x": os.urandom(300_000).hex()})}, "", "running"),
        ({}, "max_running = 5", "running"),
        ({}, "rate = 100, rate_period_s = 1", "running"),
        ({}, "fair = true", "running"),
        ({}, "max_attempts = 1", "running"),
        ({}, "concurrency = 2", "pending"),
    ],
)
async def test_what_others_would_wait_for_and_what_must_be_counted_is_claimed_first(
    dsn: str, notes: asyncpg.Connection[Any], columns: dict[str, Any], setting: str, seen_as: str
) -> None:
    """Such a job is `running` while it runs, like any other; and its handler writes as ever."""
    found: list[str | None] = []

    async def handle(job: Job) -> None:
        found.append(await seen_from_aside(dsn, job))
        await write(job)

    if setting:
        await notes.execute("INSERT INTO pgworkd.queues (name) VALUES ('q')")
        await notes.execute(f"UPDATE pgworkd.queues SET {setting}")  # noqa: S608 - texts of ours
    async with serving(handle, dsn, notes):
        await until(waits_for_status(notes, await insert(notes, "q", **columns), "completed"))
    assert found == [seen_as]
    assert await notes.fetchval("SELECT count(*) FROM notes") == 1


async def test_a_job_with_an_expiry_one_that_was_lost_and_the_jobs_of_a_young_worker_are_claimed_first(
    dsn: str, notes: asyncpg.Connection[Any]
) -> None:
    found: dict[Any, str | None] = {}

    async def handle(job: Job) -> None:
        found[job.id] = await seen_from_aside(dsn, job)

    async with serving(handle, dsn, notes, aged=False, lease_s=600):
        young = await insert(notes, "q")
        await until(waits_for_status(notes, young, "completed"))
        await age_workers(notes)
        expiring = await notes.fetchval(
            "INSERT INTO pgworkd.jobs (queue, expires_at) VALUES ('q', now() + interval '1 h') RETURNING id"
        )
        lost = await notes.fetchval("INSERT INTO pgworkd.jobs (queue, losses) VALUES ('q', 1) RETURNING id")
        plain = await insert(notes, "q")
        for each in (expiring, lost, plain):
            await until(waits_for_status(notes, each, "completed"))
    assert found == {young: "running", expiring: "running", lost: "running", plain: "pending"}


async def test_a_plain_job_is_claimed_first_while_one_with_a_key_waits_beside_it(
    dsn: str, notes: asyncpg.Connection[Any]
) -> None:
    """A claim that looks at keys locks its queue: it must not stay open for as long as a handler takes."""
    gate, found = anyio.Event(), []

    async def handle(job: Job) -> None:
        found.append(await seen_from_aside(dsn, job))
        await gate.wait()

    async with serving(handle, dsn, notes, options={"concurrency": 2}):
        async with notes.transaction():
            due = datetime.now(UTC) - timedelta(minutes=1)  # a claim that has begun finds both, or none
            await insert(notes, "q", serialize_key="a", priority=-1, run_at=due)
            await insert(notes, "q", run_at=due)
        await until(lambda: len(found) == 2)
        assert found == ["running", "running"]
        gate.set()


# Others, meanwhile.


async def test_others_see_a_job_that_waits_and_wait_for_its_row(dsn: str, notes: asyncpg.Connection[Any]) -> None:
    """A cancel waits for the end of the run, and says so where that takes too long."""
    gate, begun = anyio.Event(), anyio.Event()

    async def handle(job: Job) -> None:
        begun.set()
        await gate.wait()

    async with serving(handle, dsn, notes) as (daemon, _):
        job_id = await insert(notes, "q")
        await begun.wait()
        assert await notes.fetchval("SELECT pgworkd.depth('q')") == 1
        assert daemon.running == 1
        async with running(_app_of_nothing(), dsn):
            await notes.execute("SET lock_timeout = 100")
            with pytest.raises(asyncpg.LockNotAvailableError):
                await cancel(notes, job_id)
            await notes.execute("SET lock_timeout = 0")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel, notes, job_id)
                await until(lambda: _waits(dsn))
                gate.set()
    assert await status(notes, job_id) == "completed"


def _app_of_nothing() -> App:
    app = App()

    @app.handler("nothing")
    async def nothing() -> None:
        return None

    return app


async def _waits(dsn: str) -> bool:
    other = await asyncpg.connect(dsn)
    try:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return bool(await other.fetchval(sql))
    finally:
        other.terminate()


# Stops, batches, connections.


async def test_a_stop_gives_back_what_runs(dsn: str, notes: asyncpg.Connection[Any]) -> None:
    begun = anyio.Event()

    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO notes VALUES (0)")
            begun.set()
            await anyio.sleep_forever()

    async with serving(handle, dsn, notes, shutdown_s=0) as (daemon, seen):
        job_id = await insert(notes, "q")
        await begun.wait()
        daemon.request_stop(now=True)
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
        assert seen.all(events.JOB_RELEASED, job_id=str(job_id), attempt=1)
    row = await notes.fetchrow("SELECT status::text, failures, attempts FROM pgworkd.jobs")
    assert row is not None
    assert tuple(row) == ("pending", 0, 1)
    assert await notes.fetchval("SELECT count(*) FROM notes") == 0


async def test_what_was_claimed_and_has_not_begun_is_undone(dsn: str, notes: asyncpg.Connection[Any]) -> None:
    """Its connection is closed at once, and the next claim takes another."""
    release: list[Any] = []

    async def handle(job: Job) -> None:
        await write(job)

    async with serving(handle, dsn, notes) as (daemon, seen):
        pool = daemon.pools["q"]
        wake = pool._executor.wake
        pool._executor.wake = lambda *_: release.append(pool._executor.waiting)  # type: ignore[method-assign]
        job_id = await insert(notes, "q")
        await until(lambda: any(release))
        pool._executor.wake = wake  # type: ignore[method-assign]
        pool.release_unstarted(Reason.ELSEWHERE)
        await seen.wait(events.JOB_RELEASED, job_id=str(job_id))
        await until(waits_for_status(notes, job_id, "completed"))
    assert await notes.fetchval("SELECT attempts FROM pgworkd.finished_jobs") == 1


async def test_more_slots_than_connections_and_many_jobs(dsn: str, notes: asyncpg.Connection[Any]) -> None:
    async def handle(payload: dict[str, int], job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO notes VALUES ($1)", payload["n"])

    async with serving(handle, dsn, notes, transactions_max=2, options={"concurrency": 8}):
        sql = "SELECT 'q', jsonb_build_object('n', n) FROM generate_series(1, 200) n"
        await notes.execute(f"INSERT INTO pgworkd.jobs (queue, payload) {sql}")
        await until(lambda: notes.fetchval("SELECT count(*) = 200 FROM pgworkd.finished_jobs WHERE attempts = 1"))
    assert await notes.fetchval("SELECT count(*) FROM notes") == 200


async def test_batches_and_dependents_learn_of_the_end(dsn: str, notes: asyncpg.Connection[Any]) -> None:
    async def handle(payload: dict[str, Any], job: Job) -> None:
        if payload.get("dies"):
            raise PermanentError("no")

    async with serving(handle, dsn, notes):
        batch = await notes.fetchval("SELECT id FROM pgworkd.create_batch('b', 'q')")
        await insert(notes, "q", batch_id=batch)
        await insert(notes, "q", '{"dies": true}', batch_id=batch)
        async with notes.transaction():
            first, then = await insert(notes, "q"), await insert(notes, "q")
            await notes.execute("SELECT pgworkd.depend($1, ARRAY[$2::uuid])", then, first)
        await until(waits_for_status(notes, then, "completed"))
        counts = "SELECT (completed, dead) = (1, 1) FROM pgworkd.batches WHERE id = $1"
        await until(lambda: notes.fetchval(counts, batch))


async def test_a_run_whose_connection_breaks_is_cancelled_at_once_and_counted(
    dsn: str, notes: asyncpg.Connection[Any]
) -> None:
    """As by a restart of Postgres: the job is no longer locked, so another worker may begin it."""
    begun, ended = anyio.Event(), anyio.Event()

    async def handle(job: Job) -> None:
        if job.failures:
            return
        begun.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    sessions = "pg_stat_activity WHERE application_name LIKE 'pgworkd transaction%' AND state LIKE 'idle in%'"
    async with serving(handle, dsn, notes, options={"backoff": 0}) as (_, seen):
        job_id = await insert(notes, "q")
        await begun.wait()
        await notes.execute(f"SELECT pg_terminate_backend(pid) FROM {sessions}")  # noqa: S608 - a text of ours
        await ended.wait()
        await until(waits_for_status(notes, job_id, "completed"))
        assert seen.all(events.JOB_STALE) == []
    row = await notes.fetchrow("SELECT attempts, failures, error FROM pgworkd.finished_jobs")
    assert row is not None
    assert tuple(row) == (2, 1, f"TransactionLost: {Reason.LOST.value}")


async def test_a_handler_that_gives_up_its_claim_and_goes_on_is_not_run_again_beside_itself(
    dsn: str, notes: asyncpg.Connection[Any]
) -> None:
    """Claims of this daemon find the job again and again, and leave it."""
    runs: list[int] = []
    claimed = anyio.Event()

    async def handle(job: Job) -> None:
        runs.append(job.attempt)
        async with job.transaction() as connection:
            await connection.execute("ROLLBACK")
            await claimed.wait()

    async with serving(handle, dsn, notes) as (daemon, seen):
        job_id = await insert(notes, "q")
        await until(lambda: daemon.counters.claims["q", "jobs"] > 3)
        claimed.set()
        await until(waits_for_status(notes, job_id, "failed"))
        assert seen.all(events.JOB_STALE) == []
    assert runs == [1]
