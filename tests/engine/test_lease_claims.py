"""Claims whose response comes after the fence or is lost, or that arrive too late: all their jobs are released."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.store import Store
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.maintenance import Periods
from tests.kits.apps import Sleepers
from tests.kits.daemon import Recorder, daemon_of, insert, running, until, waits_for_status
from tests.kits.proxy import Proxy

pytestmark = [
    pytest.mark.slow("leases that run out, each test alone on the machine"),
    pytest.mark.alone("leases of a second or two: who cannot renew in time must stop"),
]

WAITING_CLAIM = """SELECT EXISTS (SELECT FROM pg_stat_activity
    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%pgworkd.claim(%')"""


async def test_a_claim_that_returns_after_the_fence_is_released_and_not_started(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Sent before the fence, with a response after it: the fence released the jobs, not a stop."""
    sleepers, ended, connection = Sleepers(), list[str](), ConnectionOptions(dsn, command_timeout_s=5)
    sleepers.go_on.set()
    locker, writer = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
    async with daemon_of(sleepers.app, dsn, ended, connection=connection, lease_s=2.0) as (daemon, seen):
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        written = writer.transaction()
        await written.start()
        await writer.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 3)")
        async with locker.transaction():
            await locker.execute("SELECT FROM pgworkd.workers FOR NO KEY UPDATE")  # renewals wait for that row
            await locker.execute("SAVEPOINT claims; SELECT FROM pgworkd.workers FOR UPDATE")  # and claims, too
            daemon.pools["q"].claim_soon()
            await until(lambda: db.fetchval(WAITING_CLAIM))
            await written.commit()  # the jobs are older than that claim, and visible when it continues
            await seen.wait(events.LEASE_FENCED, running=0)
            await locker.execute("ROLLBACK TO claims")
            await seen.wait(events.JOB_RELEASED, count=3, attempt=1, reason="the worker could not renew its lease")
            assert len(sleepers.began) == 1
        await seen.wait(events.LEASE_RENEWED)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
    locker.terminate()
    writer.terminate()
    assert ended == []
    rows = await db.fetch("SELECT attempts, failures FROM pgworkd.finished_jobs ORDER BY id")
    assert [tuple(row) for row in rows] == [(1, 0), (2, 0), (2, 0), (2, 0)]
    assert sorted(attempt for _, attempt in sleepers.began) == [1, 2, 2, 2]


async def test_orphaned_attempts_are_released_uncounted(dsn: str, db: asyncpg.Connection[Any]) -> None:
    sleepers = Sleepers()
    connection = ConnectionOptions(dsn, connect_timeout_s=5, command_timeout_s=0.3)
    async with running(sleepers.app, dsn, connection=connection, periods=Periods(rescue_s=0.1, orphans_s=0.05)) as (
        daemon,
        seen,
    ):
        held = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        # The server has executed this call; its response was lost.
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', NULL)")
        async with db.transaction():
            await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 3)")
            lost = await db.fetch("SELECT id FROM pgworkd.claim($1, 'q', 10)", daemon.worker_id)
        assert len(lost) == 3
        released = await seen.wait(events.ORPHANS_RELEASED)
        assert released["count"] == 3
        await seen.wait(events.JOB_STARTED, count=4)
        assert len(sleepers.ended) == 0, "what we do hold was not given back"
        sleepers.go_on.set()
        for job_id in [held, *(row["id"] for row in lost)]:
            await until(waits_for_status(db, job_id, "completed"))
    rows = await db.fetch("SELECT attempts, failures FROM pgworkd.finished_jobs ORDER BY 1")
    assert [tuple(row) for row in rows] == [(1, 0), (2, 0), (2, 0), (2, 0)]
    assert sleepers.twice == 0


async def test_a_database_clock_set_forward_within_a_claim_makes_no_orphan(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt seems to be an hour old, and its claim is being answered."""
    sleepers, searched, found = Sleepers(), 0, asyncio.Event()
    claim, running_of = Store.claim, Store.running_of

    async def slow(self: Store, *args: Any, **kwargs: Any) -> Any:
        claimed = await claim(self, *args, **kwargs)
        if claimed:
            await db.execute("UPDATE pgworkd.jobs SET started_at = started_at - interval '1 hour'")
            await found.wait()
        return claimed

    async def counted(self: Store, *args: Any) -> list[tuple[UUID, int]]:
        nonlocal searched
        searched += 1
        rows = await running_of(self, *args)
        if rows:
            found.set()
        return rows

    monkeypatch.setattr(Store, "claim", slow)
    monkeypatch.setattr(Store, "running_of", counted)
    connection = ConnectionOptions(dsn, command_timeout_s=1)
    async with running(sleepers.app, dsn, connection=connection, periods=Periods(orphans_s=0.05)) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        before = searched
        await until(lambda: searched > before)
        assert seen.all(events.ORPHANS_RELEASED) == []
        sleepers.go_on.set()
        await until(waits_for_status(db, job_id, "completed"))
    assert [attempt for _, attempt in sleepers.began] == [1]


async def test_a_claim_delivered_after_its_daemon_gave_up_starts_nothing(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The server executes it when the network is back, under a valid lease, but nobody receives the response."""
    sleepers, ended = Sleepers(), list[str]()
    sleepers.go_on.set()
    async with (
        Proxy(dsn) as proxy,
        daemon_of(sleepers.app, proxy.dsn, ended, lease_s=3.0) as (daemon, seen),
    ):
        await until(waits_for_status(db, await insert(db, "q"), "completed"))  # opens the connection
        await _hold_claim(daemon, seen, proxy)
        ids = [await insert(db, "q") for _ in range(3)]
        proxy.mode = "pass"
        released = await seen.wait(events.ORPHANS_RELEASED)
        assert released["count"] == 3
        for job_id in ids:
            await until(waits_for_status(db, job_id, "completed"))
        assert seen.all(events.LEASE_FENCED) == []
    rows = await db.fetch("SELECT attempts, failures FROM pgworkd.finished_jobs WHERE id = ANY ($1)", ids)
    assert [tuple(row) for row in rows] == [(2, 0)] * 3
    assert sorted(run for run in sleepers.began if run[0] in ids) == sorted((job_id, 2) for job_id in ids)


async def _hold_claim(daemon: Daemon, seen: Recorder, proxy: Proxy) -> None:
    """Returns when a claim waits at the proxy and has been given up."""
    pool, count = daemon.pools["q"], 0
    while True:
        count += 1
        await until(lambda: pool.quiet)  # otherwise the response of a claim that found nothing might be held
        proxy.mode = "hold"
        pool.claim_soon()
        outage = await seen.wait(events.DATABASE_UNAVAILABLE, count, part="claim q")
        if "may have taken effect" in outage["error"]:
            return
        proxy.mode = "pass"  # its connection was being cut, so that it was never sent
        await seen.wait(events.DATABASE_RECOVERED, count, part="claim q")


async def test_a_long_attempt_in_flight_is_not_an_orphan(dsn: str, db: asyncpg.Connection[Any]) -> None:
    sleepers = Sleepers()
    connection = ConnectionOptions(dsn, connect_timeout_s=5, command_timeout_s=0.2)
    async with running(sleepers.app, dsn, connection=connection, periods=Periods(orphans_s=0.02)) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        old = "SELECT started_at < now() - interval '900 ms' FROM pgworkd.jobs"
        await until(lambda: db.fetchval(old))
        sleepers.go_on.set()
        await until(waits_for_status(db, job_id, "completed"))
        assert seen.all(events.ORPHANS_RELEASED) == []
