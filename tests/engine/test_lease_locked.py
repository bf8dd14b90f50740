"""A lease while whole tables are locked, as by VACUUM FULL and ALTER TABLE."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from tests.kits.apps import Sleepers
from tests.kits.daemon import daemon_of, insert, until, waits_for_status

pytestmark = [
    pytest.mark.slow("leases that run out, each test alone on the machine"),
    pytest.mark.alone("leases of a second or two: who cannot renew in time must stop"),
]

LEASE_S = 1.2
_FULL_LEASES = "SELECT min(lease_until) > $1::timestamptz + interval '2 s' FROM pgworkd.workers"


@pytest.mark.fast
async def test_a_lock_on_the_jobs_table_does_not_cost_the_lease(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The heartbeat also asks which jobs to cancel: that query may wait, the renewal must not."""
    sleepers, ended = Sleepers(), list[str]()
    other = await asyncpg.connect(dsn)
    async with daemon_of(sleepers.app, dsn, ended, lease_s=LEASE_S) as (daemon, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        worker_id = daemon.worker_id
        async with other.transaction():
            await other.execute("LOCK TABLE pgworkd.jobs IN ACCESS EXCLUSIVE MODE")
            locked_at = await other.fetchval("SELECT clock_timestamp()")
            await until(lambda: db.fetchval(_FULL_LEASES, locked_at), limit_s=5)
        sleepers.go_on.set()
        await until(waits_for_status(db, job_id, "completed"))
        assert daemon.worker_id == worker_id
        assert seen.all(events.LEASE_FENCED) == []
    await other.close()
    assert await db.fetchval("SELECT attempts FROM pgworkd.finished_jobs") == 1
    assert ended == []


async def test_a_claim_that_waited_past_the_lease_does_not_give_up_the_worker(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """The lease has merely expired: the next heartbeat tells whether the worker is lost."""
    app, ended = App(), list[str]()
    for n in range(12):

        @app.handler(f"q{n}")
        async def handle() -> None:
            pass

    other = await asyncpg.connect(dsn)
    async with daemon_of(app, dsn, ended, lease_s=LEASE_S) as (daemon, seen):
        worker_id = daemon.worker_id
        async with other.transaction():
            await other.execute("LOCK TABLE pgworkd.workers IN ACCESS EXCLUSIVE MODE")
            for pool in daemon.pools.values():
                pool.claim_soon()
            await seen.wait(events.LEASE_FENCED)
            await until(
                lambda: other.fetchval(
                    "SELECT min(lease_until) < clock_timestamp() - interval '300 ms' FROM pgworkd.workers"
                )
            )
        await seen.wait(events.LEASE_RENEWED)
        await until(waits_for_status(db, await insert(db, "q7"), "completed"))
        assert seen.all(events.LEASE_LOST) == []
        assert daemon.worker_id == worker_id
    await other.close()
    assert ended == []
