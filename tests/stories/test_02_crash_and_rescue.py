"""Crash recovery: a daemon is killed, frozen or blocked. Its jobs complete; none is rescued while its lease lasts."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from tests.kits import process
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("daemons that are killed, and leases that run out")

LEASE = {"lease_s": 1.5, "heartbeat_s": 0.2}


@pytest.mark.fast
async def test_jobs_of_a_killed_daemon_are_rescued_after_its_lease_expires(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """kill -9 in the middle of five jobs: another daemon rescues them once the lease has expired, and not before.

    The lost attempt is recorded in the job's errors and does not count as a failure."""
    await db.execute(process.TABLES)
    ids = [await insert(db, "work", json.dumps({"gate": "open"})) for _ in range(5)]
    with process.daemon_process(dsn, **LEASE) as first:
        await until(lambda: db.fetchval("SELECT count(*) = 5 FROM runs"))
        async with running(App_of_work(), dsn, **LEASE) as (_, seen):
            first.send_signal(signal.SIGKILL)
            first.wait()
            worker = await db.fetchval("SELECT max(worker_id) FROM pgworkd.jobs")
            lease_until = await db.fetchval("SELECT lease_until FROM pgworkd.workers WHERE id = $1", worker)
            await seen.wait(events.JOB_LOST, count=5)
            for job_id in ids:
                await until(waits_for_status(db, job_id, "completed"))

    rows = await db.fetch("SELECT id, attempts, failures, errors, started_at FROM pgworkd.finished_jobs")
    assert {r["id"] for r in rows} == set(ids)
    for row in rows:
        assert (row["attempts"], row["failures"]) == (2, 0)
        assert [(e["attempt"], e["type"]) for e in json.loads(row["errors"])] == [(1, "lost")]
        assert row["started_at"] > lease_until, "taken over while the first still held its lease"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE id = $1", worker) == 0


async def test_a_handler_that_blocks_the_event_loop_keeps_its_lease(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The lease is renewed from a thread of its own: a handler that blocks the event loop does not lose its jobs."""
    await db.execute(process.TABLES)
    job_id = await insert(db, "block", '{"seconds": 3.5}')
    lease = {"lease_s": 1.0, "heartbeat_s": 0.2}
    with process.daemon_process(dsn, loop_limit_s=0, **lease):
        await until(lambda: db.fetchval("SELECT count(*) FROM runs"))
        async with running(App_of_work(), dsn, **lease):
            await until(waits_for_status(db, job_id, "completed"))
    row = await db.fetchrow("SELECT attempts, failures FROM pgworkd.finished_jobs")
    assert row is not None
    assert (row["attempts"], row["failures"]) == (1, 0)


async def test_a_frozen_daemon_ends_with_its_lease(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """SIGSTOP for longer than the lease: the kernel ends the process just before others take its jobs over.

    So no handler runs on when it thaws. A frozen daemon without a job lives, and goes on."""
    await db.execute(process.TABLES)
    lease = {"lease_s": 2.0, "heartbeat_s": 0.4}
    with process.daemon_process(dsn, **lease) as first, process.daemon_process(dsn, **lease) as second:
        await until(lambda: db.fetchval("SELECT count(DISTINCT worker_id) = 2 FROM pgworkd.pools"))
        job_id = await insert(db, "work", json.dumps({"gate": "open"}))
        await until(lambda: db.fetchval("SELECT count(*) FROM runs"))
        is_first = await db.fetchval("SELECT pid FROM runs") == first.pid
        busy, idle = (first, second) if is_first else (second, first)
        for each in (busy, idle):
            os.kill(each.pid, signal.SIGSTOP)
        async with running(App_of_work(), dsn, **lease) as (_, seen):
            await seen.wait(events.JOB_LOST)
            assert busy.poll() == -signal.SIGKILL
            await until(waits_for_status(db, job_id, "completed"))
        os.kill(idle.pid, signal.SIGCONT)
        again = await insert(db, "block", '{"seconds": 0}')
        await until(waits_for_status(db, again, "completed"))
        assert idle.poll() is None


async def test_an_embedded_daemon_that_was_frozen_loses_its_jobs_and_cannot_settle_them(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Its process belongs to its host and is not ended: the outcomes of the old attempts are rejected."""
    await db.execute(process.TABLES)
    job_id = await insert(db, "work", json.dumps({"gate": "open"}))
    lease = {"lease_s": 2.0, "heartbeat_s": 0.4}
    with process.daemon_process(dsn, embedded=1, **lease) as frozen:
        await until(lambda: db.fetchval("SELECT count(*) FROM runs"))
        worker = await db.fetchval("SELECT worker_id FROM pgworkd.jobs")
        os.kill(frozen.pid, signal.SIGSTOP)
        async with running(App_of_work(), dsn, **lease) as (_, seen):
            await seen.wait(events.JOB_LOST)
            await until(waits_for_status(db, job_id, "completed"))
            before = await db.fetchrow("SELECT * FROM pgworkd.finished_jobs")
            os.kill(frozen.pid, signal.SIGCONT)
            await db.execute("INSERT INTO gates VALUES ('open')")  # lets the first attempt finish, too late
            # The resumed daemon notices the lost lease, cancels what it ran, and registers as a new worker.
            serves = "SELECT count(*) FROM pgworkd.pools WHERE queue = 'block' AND worker_id <> $1"
            await until(lambda: db.fetchval(serves, worker))
            assert await db.fetchrow("SELECT * FROM pgworkd.finished_jobs") == before
            again = await insert(db, "block", '{"seconds": 0}')
            await until(waits_for_status(db, again, "completed"))


@pytest.mark.fast
async def test_a_job_that_keeps_killing_its_worker_ends_dead_and_others_complete(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A poison job is dead after its third lost attempt; the innocent jobs lost with it complete without a failure."""
    await db.execute(process.TABLES)
    innocent = [await insert(db, "poison", '{"deadly": false, "seconds": 0.1}') for _ in range(3)]
    deadly = await insert(db, "poison", '{"deadly": true}')
    lease = {"lease_s": 1.0, "heartbeat_s": 0.2}
    async with running(App_of_work(), dsn, **lease):  # serves another queue; it only rescues
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
    """An app whose handler of the queue `work` returns at once, and which serves no other queue."""
    app = App()

    @app.handler("work", concurrency=1000)
    async def work() -> None:
        return None

    return app


async def _gone(victim: Any) -> bool:
    return victim.poll() is not None
