"""A process that was frozen for longer than its lease: no job starts under the expired lease."""

from __future__ import annotations

import time
from typing import Any

import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.engine.life.daemon import Daemon
from tests.kits import process
from tests.kits.daemon import LEASE_S, daemon_of, insert, until, waits_for_status
from tests.kits.proxy import Proxy

pytestmark = [
    pytest.mark.slow("leases that run out, each test alone on the machine"),
    pytest.mark.alone("leases of a second or two: who cannot renew in time must stop"),
]


async def test_no_claimed_job_starts_after_a_freeze_until_the_lease_is_renewed(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """As after SIGSTOP and SIGCONT: the clock is past the lease, and the heartbeat thread has not run yet."""
    app, ended, daemons, began = App(), list[str](), list[Daemon](), list[tuple[str, int, bool]]()

    @app.handler("q", concurrency=5)
    async def run(job: Job) -> None:
        lease = daemons[0].worker.heartbeat
        assert lease is not None
        began.append((str(job.id), job.attempt, lease.fresh))
        if len(began) == 1:  # four more are claimed and wait to be scheduled in this loop
            time.sleep(0.01)  # noqa: ASYNC251 - as for the whole process: longer than a time slice
            lease.renewed_at_s -= LEASE_S

    async with db.transaction():
        for _ in range(5):
            await insert(db, "q")
    async with daemon_of(app, dsn, ended) as (daemon, seen):
        daemons.append(daemon)
        await seen.wait(events.JOB_RELEASED, count=4, reason="the worker could not renew its lease")
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
    assert all(fresh for _, _, fresh in began), began
    assert len({job_id for job_id, _, _ in began}) == 5
    assert ended == []


async def test_an_outage_ends_no_process_in_which_nothing_runs(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The fence has cancelled the handlers: the timers that would end the process are disarmed."""
    await db.execute(process.TABLES)
    lease_s = 2.0
    async with Proxy(dsn) as proxy:
        with process.daemon_process(proxy.dsn, lease_s=lease_s, heartbeat_s=0.4) as daemon:
            job_id = await insert(db, "work", '{"gate": "open"}')
            await until(lambda: db.fetchval("SELECT count(*) FROM runs"))
            proxy.mode = "hold"
            held_at = time.monotonic()
            await until(lambda: time.monotonic() - held_at > 2 * lease_s)
            assert daemon.poll() is None
            proxy.mode = "pass"
            await db.execute("INSERT INTO gates VALUES ('open')")
            await until(waits_for_status(db, job_id, "completed"))
            assert daemon.poll() is None
    rows = await db.fetch("SELECT DISTINCT pid FROM runs")
    assert [row["pid"] for row in rows] == [daemon.pid]
