"""The lease: a worker that cannot renew stops in time, one that can again loses nothing, a lost one starts anew."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.engine.life.heartbeat import boot_time_s
from tests.kits.apps import Sleepers
from tests.kits.daemon import LEFT_S, daemon_of, insert, running, until, waits_for_status
from tests.kits.proxy import Proxy

pytestmark = [
    pytest.mark.slow("leases that run out, each test alone on the machine"),
    pytest.mark.alone("leases of a second or two: who cannot renew in time must stop"),
]

# A short outage.


@pytest.mark.fast
async def test_an_outage_shorter_than_the_lease_counts_no_failure_and_no_rerun(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    sleepers, ended = Sleepers(), list[str]()
    async with (
        Proxy(dsn) as proxy,
        daemon_of(sleepers.app, proxy.dsn, ended, lease_s=3.0) as (daemon, seen),
    ):
        worker_id = daemon.worker_id
        ids = [await insert(db, "q") for _ in range(3)]
        await seen.wait(events.JOB_STARTED, count=3)
        proxy.mode = "hold"
        await seen.wait(events.DATABASE_UNAVAILABLE, part="lease")
        sleepers.go_on.set()  # they finish while nothing can be settled
        await until(lambda: len(sleepers.returned) == 3)
        await seen.wait(events.DATABASE_UNAVAILABLE, part="settler")
        proxy.mode = "pass"
        for job_id in ids:
            await until(waits_for_status(db, job_id, "completed"))
        assert seen.all(events.LEASE_FENCED) == []
        assert daemon.worker_id == worker_id
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
    rows = await db.fetch("SELECT attempts, failures FROM pgworkd.finished_jobs")
    assert {tuple(row) for row in rows} == {(1, 0)}
    assert ended == []


# The fence.


@pytest.mark.fast
async def test_a_worker_that_cannot_renew_cancels_its_jobs_before_the_lease_ends(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    sleepers, ended, lease_s = Sleepers(), list[str](), 3.0
    async with (
        Proxy(dsn) as proxy,
        daemon_of(sleepers.app, proxy.dsn, ended, lease_s=lease_s) as (daemon, seen),
    ):
        for _ in range(3):
            await insert(db, "q")
        await seen.wait(events.JOB_STARTED, count=3)
        proxy.mode = "hold"
        fenced = await seen.wait(events.LEASE_FENCED)
        assert lease_s * 5 / 6 <= fenced["since_s"] < lease_s * 29 / 30
        assert fenced["running"] == 3
        assert not daemon.worker.may_claim
        await until(lambda: len(sleepers.ended) == 3)
        # Whatever the clocks say: according to the database their lease was still valid then.
        assert await db.fetchval(LEFT_S) > 0
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == 3
        proxy.mode = "pass"
        await seen.wait(events.LEASE_RENEWED)
        await seen.wait(events.JOB_RELEASED, count=3, reason="the worker could not renew its lease")
        sleepers.go_on.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        assert daemon.worker.may_claim
    assert ended == []
    assert sleepers.twice == 0
    assert len(sleepers.began) == 3 * 2, "each job began once before the fence and once after"
    rows = await db.fetch("SELECT attempts, failures FROM pgworkd.finished_jobs")
    assert [row["failures"] for row in rows] == [0] * 3
    # A claim in progress at the fence may become an attempt that never starts: see test_lease_claims.
    began = {(str(job_id), attempt) for job_id, attempt in sleepers.began}
    unbegun = [f for f in seen.all(events.JOB_RELEASED) if (f["job_id"], f["attempt"]) not in began]
    strays = sum(facts["count"] for facts in seen.all(events.ORPHANS_RELEASED))
    assert sum(row["attempts"] for row in rows) == 3 * 2 + len(unbegun) + strays


@pytest.mark.parametrize("mode", ["loop", "thread"])
async def test_a_handler_still_running_when_the_lease_ends_ends_the_process(
    dsn: str, db: asyncpg.Connection[Any], mode: str
) -> None:
    app, ended, at, let_go = App(), list[str](), list[float](), threading.Event()
    entered = threading.Event()

    def in_thread() -> None:
        entered.set()
        let_go.wait(15)

    async def in_loop() -> None:
        entered.set()
        give_up = time.monotonic() + 15
        while not let_go.is_set() and time.monotonic() < give_up:  # ignores its cancellation
            with contextlib.suppress(anyio.get_cancelled_exc_class()):
                await anyio.lowlevel.checkpoint()
            time.sleep(0.001)  # noqa: ASYNC251 - and blocks the event loop

    app.handler("q")(in_thread if mode == "thread" else in_loop)

    def end(reason: str) -> None:
        if not ended:
            at.append(boot_time_s())
            ended.append(reason)

    lease_s = 3.0  # the guard checks every sixtieth of it, and has a thirtieth left
    async with Proxy(dsn) as proxy, daemon_of(app, proxy.dsn, ended, lease_s=lease_s) as (daemon, seen):
        lease = daemon.worker.heartbeat
        assert lease is not None
        lease._end_process = end
        await insert(db, "q")
        await until(entered.is_set)
        proxy.mode = "hold"
        renewed_at = lease.renewed_at_s
        await until(lambda: ended)
        held_s = at[0] - max(renewed_at, lease.renewed_at_s)
        assert lease_s * 29 / 30 - 0.01 <= held_s < lease_s
        assert await db.fetchval(LEFT_S) + (boot_time_s() - at[0]) > 0
        proxy.mode = "pass"
        let_go.set()
        await seen.wait(events.LEASE_RENEWED)
    assert ended[0] == "the lease expires and 1 handler would not stop"


async def test_a_fence_does_not_end_an_idle_process(dsn: str, db: asyncpg.Connection[Any]) -> None:
    sleepers, ended = Sleepers(), list[str]()
    sleepers.go_on.set()
    async with (
        Proxy(dsn) as proxy,
        daemon_of(sleepers.app, proxy.dsn, ended, lease_s=1.0) as (daemon, seen),
    ):
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        lease = daemon.worker.heartbeat
        assert lease is not None
        proxy.mode = "hold"
        await seen.wait(events.LEASE_FENCED, running=0)
        await until(lambda: boot_time_s() - lease.renewed_at_s > 1.2)  # well past its end
        assert ended == []
        proxy.mode = "pass"
        await seen.wait(events.LEASE_RENEWED)
        await until(waits_for_status(db, await insert(db, "q"), "completed"))


@pytest.mark.fast
async def test_a_lost_worker_registers_again_only_after_its_handlers_returned(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app, ended, entered, let_go = App(), list[str](), threading.Event(), threading.Event()

    @app.handler("q")
    def handle(payload: dict[str, Any]) -> None:
        if payload:
            entered.set()
            let_go.wait(15)

    async with running(app, dsn, lease_s=30.0, heartbeat_s=0.05) as (daemon, seen):
        old = daemon.worker_id
        job_id = await insert(db, "q", '{"wait": 1}')
        await until(entered.is_set)
        # What rescue() does with a lost worker.
        await db.execute("UPDATE pgworkd.workers SET lost_at = now()")
        await seen.wait(events.LEASE_LOST, worker_id=old)
        waiting = await insert(db, "q")
        for _ in range(5):
            await anyio.sleep(0.05)
            assert daemon.worker_id == old
            assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 1
            assert await db.fetchval("SELECT status::text FROM pgworkd.jobs WHERE id = $1", waiting) == "pending"
        let_go.set()
        await until(lambda: daemon.worker_id != old)
        await until(waits_for_status(db, waiting, "completed"))
        # The old attempt was not taken over yet, so its outcome still counts.
        await until(waits_for_status(db, job_id, "completed"))
        assert daemon.worker_id > old
        assert daemon.worker.may_claim
    assert ended == []


# A deleted worker row.


async def test_a_deleted_worker_row_loses_no_job_and_overlaps_no_run(dsn: str, db: asyncpg.Connection[Any]) -> None:
    sleepers = Sleepers()
    async with running(sleepers.app, dsn, heartbeat_s=0.05) as (daemon, seen):
        old = daemon.worker_id
        ids = [await insert(db, "q") for _ in range(3)]
        await seen.wait(events.JOB_STARTED, count=3)
        await db.execute("DELETE FROM pgworkd.workers")
        await seen.wait(events.LEASE_LOST, worker_id=old)
        await until(lambda: len(sleepers.ended) == 3)
        sleepers.go_on.set()
        for job_id in ids:
            await until(waits_for_status(db, job_id, "completed"))
        assert daemon.worker_id != old
        assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE id = $1", daemon.worker_id) == 1
    assert sleepers.twice == 0
    rows = await db.fetch("SELECT attempts, failures FROM pgworkd.finished_jobs")
    assert [tuple(row) for row in rows] == [(2, 0)] * 3


async def test_a_worker_row_deleted_under_load_loses_no_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """It may be deleted between any two calls; each job completes once, and no two runs of a job overlap."""
    app, together, overlaps = App(), Counter[Any](), list[Any]()

    @app.handler("q", concurrency=20)
    async def handle(job: Job) -> None:
        together[job.id] += 1
        if together[job.id] > 1:
            overlaps.append(job.id)
        try:
            await anyio.sleep(0.002)
        finally:
            together[job.id] -= 1

    async with running(app, dsn, heartbeat_s=0.05) as (daemon, seen):
        for n in range(1, 6):
            worker_id = daemon.worker_id
            await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 200)")
            await seen.wait(events.JOB_STARTED, count=n * 200 - 150)
            await db.execute("DELETE FROM pgworkd.workers")
            await until(lambda worker_id=worker_id: daemon.worker_id != worker_id)  # type: ignore[misc]
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
    assert overlaps == []
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed'") == 1000
    assert await db.fetchval("SELECT count(DISTINCT id) FROM pgworkd.finished_jobs") == 1000
    assert await db.fetchval("SELECT max(failures) FROM pgworkd.finished_jobs") == 0


# A long outage.


async def test_an_outage_longer_than_the_lease_makes_no_worker_lost(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """When the network is back, each worker looks lost to the other; neither may take the other's jobs."""
    first, second, ended = Sleepers(), Sleepers(), list[str]()
    async with (
        Proxy(dsn) as proxy,
        daemon_of(first.app, proxy.dsn, ended, lease_s=1.0) as (one, seen),
        daemon_of(second.app, proxy.dsn, ended, lease_s=1.0) as (two, seen_two),
    ):
        ids = {one.worker_id, two.worker_id}
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 20)")
        await until(lambda: len(first.began) + len(second.began) == 20)
        await until(lambda: db.fetchval("SELECT bool_and(steady_since < now() - interval '1 s') FROM pgworkd.workers"))
        proxy.mode = "hold"
        over = "SELECT max(lease_until) < clock_timestamp() - interval '100 ms' FROM pgworkd.workers"
        await until(lambda: db.fetchval(over))
        proxy.mode = "pass"
        await seen.wait(events.LEASE_RENEWED)
        await seen_two.wait(events.LEASE_RENEWED)
        for sleepers in (first, second):
            sleepers.go_on.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        assert {one.worker_id, two.worker_id} == ids
        assert seen.all(events.JOB_LOST) + seen_two.all(events.JOB_LOST) == []
    assert await db.fetchval("SELECT max(failures) FROM pgworkd.finished_jobs") == 0
    assert ended == []


async def test_maintenance_that_has_asked_nothing_reports_no_recovery(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Without a lease some of its tasks do nothing, and return at once, while nothing answers."""
    async with Proxy(dsn) as proxy, daemon_of(Sleepers().app, proxy.dsn, []) as (daemon, seen):
        proxy.mode = "hold"
        await seen.wait(events.DATABASE_UNAVAILABLE, part="rescue")
        await seen.wait(events.LEASE_FENCED)
        done = daemon.counters.maintenance_s["rescue"].counts
        before = sum(done)
        await until(lambda: sum(done) > before + 2)
        assert seen.all(events.DATABASE_RECOVERED) == []
        proxy.mode = "pass"
        await seen.wait(events.DATABASE_RECOVERED, part="rescue")
    assert [each["part"] for each in seen.all(events.DATABASE_RECOVERED)].count("rescue") == 1
