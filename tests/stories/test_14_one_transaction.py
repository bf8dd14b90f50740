"""A payment service books in the transaction that claims the job: a crash undoes both at once; a failure is counted."""

from __future__ import annotations

import json
import signal
from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.money import TABLES, age_workers, app_of, money_process

pytestmark = pytest.mark.slow("daemons that are killed")

LONG = {"lease_s": 600, "heartbeat_s": 1}
"""A lease that nobody waits for in a test."""


@pytest.mark.fast
async def test_the_job_of_a_killed_daemon_runs_again_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """kill -9 in the middle of a booking: it is undone, and another daemon books, while the lease still holds.

    Nothing was counted: the claim was undone, too. Until then the job looked as if it waited, and no other daemon that
    polled took it."""
    await db.execute(TABLES)
    with money_process(dsn, **LONG) as first:
        await age_workers(db)
        job_id = await insert(db, "money", '{"gate": "open"}')
        await until(lambda: db.fetchval("SELECT count(*) FROM runs"))
        async with running(app_of(dsn), dsn, **LONG):
            await age_workers(db, 2)
            other = await insert(db, "money")
            await until(waits_for_status(db, other, "completed"))
            assert await db.fetchval("SELECT count(*) FROM runs WHERE job = $1", job_id) == 1
            first.send_signal(signal.SIGKILL)
            first.wait()
            await until(lambda: db.fetchval("SELECT count(*) = 2 FROM runs WHERE job = $1", job_id))
            assert await db.fetchval("SELECT min(lease_until) > clock_timestamp() FROM pgworkd.workers")
            assert await db.fetchval("SELECT count(*) FROM bookings WHERE job = $1", job_id) == 0
            await db.execute("INSERT INTO gates VALUES ('open')")
            await until(waits_for_status(db, job_id, "completed"))

    row = await db.fetchrow("SELECT attempts, failures, errors FROM pgworkd.finished_jobs WHERE id = $1", job_id)
    assert row is not None
    assert tuple(row) == (1, 0, "[]")
    assert {row[0] for row in await db.fetch("SELECT job FROM bookings")} == {job_id, other}
    assert {row[0] for row in await db.fetch("SELECT status FROM runs")} == {"pending"}


@pytest.mark.fast
async def test_a_run_that_raises_books_nothing_and_is_counted(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Two runs fail, the third books; the failures are counted, in the transactions that claimed."""
    await db.execute(TABLES)
    async with running(app_of(dsn), dsn) as (daemon, seen):
        await age_workers(db)
        job_id = await insert(db, "money", '{"raises": 2}')
        await until(waits_for_status(db, job_id, "completed"))
        await until(lambda: daemon.counters.of("money", "money").ended["completed"])
        assert [facts["error"] for facts in seen.all(events.JOB_FAILED)] == ["ValueError: not booked"] * 2
        assert daemon.counters.of("money", "money").ended == {
            **dict.fromkeys(daemon.counters.of("money", "money").ended, 0),
            "failed": 2,
            "completed": 1,
        }
    row = await db.fetchrow("SELECT attempts, failures, errors FROM pgworkd.finished_jobs")
    assert row is not None
    assert (row["attempts"], row["failures"]) == (3, 2)
    assert [(e["attempt"], e["type"], e["worker"]) for e in json.loads(row["errors"])] == [
        (1, "ValueError", "test"),
        (2, "ValueError", "test"),
    ]
    assert await db.fetchval("SELECT count(*) FROM bookings") == 1
    assert [tuple(row) for row in await db.fetch("SELECT attempt, status FROM runs ORDER BY attempt")] == [
        (1, "pending"),
        (2, "failed"),
        (3, "failed"),
    ]


async def test_a_job_that_kills_its_worker_is_found(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """It kills a daemon uncounted once; one that has just started claims first, so that each loss is counted."""
    await db.execute(TABLES)
    lease = {"lease_s": 1.0, "heartbeat_s": 0.2}
    async with running(_rescuer(), dsn, **lease):
        with money_process(dsn, **lease) as first:
            await age_workers(db, 2)
            job_id = await insert(db, "money", '{"kills": true}')
            await until(lambda: first.poll() is not None)
        assert await db.fetchval("SELECT losses + attempts FROM pgworkd.jobs WHERE id = $1", job_id) == 0
        for losses in (1, 2, 3):
            with money_process(dsn, **lease) as victim:
                await until(lambda: victim.poll() is not None)
            counted = "SELECT losses = $2 FROM pgworkd.jobs WHERE id = $1"
            await until(lambda: db.fetchval(counted, job_id, losses))  # noqa: B023
        await until(waits_for_status(db, job_id, "dead"))
    assert await db.fetchval("SELECT array_agg(status) FROM runs") == ["pending", "running", "running", "running"]


def _rescuer() -> App:
    app = App()

    @app.handler("other")
    async def other() -> None:
        return None

    return app
