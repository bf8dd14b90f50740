"""A daemon is killed, frozen or blocked; its jobs run to their end all the same, and never twice under a held lease."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import asyncpg

from pgworkd import App
from pgworkd.words import events
from tests import process
from tests.kit import insert, running, until, waits_for_status

LEASE = {"lease_s": 1.5, "heartbeat_s": 0.2}


async def test_a_killed_daemons_jobs_are_taken_over_after_its_lease(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute(process.TABLES)
    ids = [await insert(db, "work", json.dumps({"gate": "open"})) for _ in range(5)]
    with process.daemon_process(dsn, **LEASE) as first:
        await until(lambda: db.fetchval("SELECT count(*) = 5 FROM runs"))
        async with running(App_of_work(), dsn, **LEASE) as (_, seen):
            first.send_signal(signal.SIGKILL)
            first.wait()
            lease_until = await db.fetchval("SELECT max(lease_until) FROM pgworkd.workers WHERE pid = $1", first.pid)
            await seen.wait(events.JOB_LOST, count=5)
            for job_id in ids:
                await until(waits_for_status(db, job_id, "completed"))

    rows = await db.fetch("SELECT id, attempts, failures, errors, started_at FROM pgworkd.finished_jobs")
    assert {r["id"] for r in rows} == set(ids)
    for row in rows:
        assert (row["attempts"], row["failures"]) == (2, 0)
        assert [(e["attempt"], e["type"]) for e in json.loads(row["errors"])] == [(1, "lost")]
        assert row["started_at"] > lease_until, "taken over while the first still held its lease"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE pid = $1", first.pid) == 0


async def test_a_handler_that_blocks_the_loop_keeps_its_lease(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute(process.TABLES)
    job_id = await insert(db, "block", '{"seconds": 3.5}')
    lease = {"lease_s": 1.0, "heartbeat_s": 0.2}
    with process.daemon_process(dsn, **lease):
        await until(lambda: db.fetchval("SELECT count(*) FROM runs"))
        async with running(App_of_work(), dsn, **lease):
            await until(waits_for_status(db, job_id, "completed"))
    row = await db.fetchrow("SELECT attempts, failures FROM pgworkd.finished_jobs")
    assert row is not None
    assert (row["attempts"], row["failures"]) == (1, 0)


async def test_a_frozen_daemon_loses_its_jobs_and_changes_nothing_when_it_thaws(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    await db.execute(process.TABLES)
    job_id = await insert(db, "work", json.dumps({"gate": "open"}))
    lease = {"lease_s": 2.0, "heartbeat_s": 0.4}
    with process.daemon_process(dsn, **lease) as frozen:
        await until(lambda: db.fetchval("SELECT count(*) FROM runs"))
        worker = await db.fetchval("SELECT worker_id FROM pgworkd.jobs")
        os.kill(frozen.pid, signal.SIGSTOP)
        async with running(App_of_work(), dsn, **lease) as (_, seen):
            await seen.wait(events.JOB_LOST)
            await until(waits_for_status(db, job_id, "completed"))
            before = await db.fetchrow("SELECT * FROM pgworkd.finished_jobs")
            os.kill(frozen.pid, signal.SIGCONT)
            await db.execute("INSERT INTO gates VALUES ('open')")  # the first run could end now, too late
            # It notices, stops what it ran, and comes back as a new worker.
            await until(
                lambda: db.fetchval(
                    "SELECT count(*) FROM pgworkd.workers WHERE pid = $1 AND id <> $2", frozen.pid, worker
                )
            )
            assert await db.fetchrow("SELECT * FROM pgworkd.finished_jobs") == before
            again = await insert(db, "block", '{"seconds": 0}')
            await until(waits_for_status(db, again, "completed"))


async def test_a_job_that_kills_its_worker_is_found_and_its_neighbours_live(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    await db.execute(process.TABLES)
    innocent = [await insert(db, "poison", '{"deadly": false, "seconds": 0.1}') for _ in range(3)]
    deadly = await insert(db, "poison", '{"deadly": true}')
    lease = {"lease_s": 1.0, "heartbeat_s": 0.2}
    async with running(App_of_work(), dsn, **lease):  # serves another queue: it is there to rescue
        for _ in range(3):
            with process.daemon_process(dsn, **lease) as victim:
                await until(lambda: _gone(victim), limit_s=15)
                await until(
                    lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status = 'running')")
                )
        await until(waits_for_status(db, deadly, "dead"))
        with process.daemon_process(dsn, **lease):
            for job_id in innocent:
                await until(waits_for_status(db, job_id, "completed"))
    row = await db.fetchrow("SELECT losses, attempts, error FROM pgworkd.jobs WHERE id = $1", deadly)
    assert row is not None
    assert (row["losses"], row["attempts"]) == (3, 3)
    assert row["error"].startswith("lost: worker ")
    assert await db.fetchval("SELECT max(failures) FROM pgworkd.finished_jobs") == 0


def App_of_work() -> App:  # noqa: N802
    """An app that runs the queue `work` at once, without gates, and knows nothing of the other queues."""
    app = App()

    @app.handler("work", concurrency=1000)
    async def work() -> None:
        return None

    return app


async def _gone(victim: Any) -> bool:
    return victim.poll() is not None
