"""Prefetching: quick jobs are claimed before a slot is free, and no job waits where it cannot run."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.core.job import Reason
from pgworkd.engine.claim.prefetch import Prefetch
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.maintenance import Periods
from tests.kits.apps import (
    QUICK,
    RUNNING,
    Waiters,
    claimed_ahead,
    fill,
    never_stalls,
    set_concurrency,
    settled_in,
    stalls_now,
)
from tests.kits.daemon import cancel, running, until

pytestmark = [
    pytest.mark.slow("alone, and hundreds of jobs whose handlers take different times"),
    pytest.mark.alone("how many jobs are claimed ahead follows from how long handlers take"),
]

IN_SLOTS = [1, 4]


# Which jobs are prefetched.


@pytest.mark.parametrize("slots", IN_SLOTS)
async def test_quick_jobs_are_prefetched_and_each_runs_once(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    never_stalls(monkeypatch)
    waiters = Waiters(slots)
    async with claimed_ahead(waiters, dsn, db, waiting=200) as (_, seen, ahead):
        assert await db.fetchval(RUNNING) == slots + ahead > slots
        waiters.gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED, count=QUICK + 200)
    assert len(waiters.returned) == sum(waiters.returned.values()) == QUICK + 200
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.finished_jobs") == 1


async def test_slow_jobs_are_never_prefetched(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiters = Waiters(4)
    await fill(db, 0, 60)
    async with running(waiters.app, dsn, shutdown_s=0.5) as (daemon, seen):
        surplus = surplus_of(daemon, monkeypatch)
        for done in (4, 8, 12, 16):
            await waiters.gauge.shows(4)
            for _ in range(6):
                assert await settled_in(db, daemon) == 4
                await anyio.sleep(0.05)
            old, waiters.gauge.go_on = waiters.gauge.go_on, anyio.Event()
            old.set()
            await seen.wait(events.JOB_COMPLETED, count=done)
        await waiters.gauge.shows(4)
        assert await settled_in(db, daemon) == 4
        assert max(surplus) == 0
        waiters.gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED, count=60)


def surplus_of(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much each claim from now on exceeds the number of free slots."""
    surplus = [0]
    store, slots = daemon._store, daemon.pools["q"]._executor
    claim = store.claim

    async def claiming(*args: Any) -> Any:
        claimed = await claim(*args)
        surplus.append(len(claimed) - slots.free)
        return claimed

    monkeypatch.setattr(store, "claim", claiming)
    return surplus


# Prefetched jobs that stall.


@pytest.mark.parametrize("slots", IN_SLOTS)
@pytest.mark.parametrize("quick_s", [None, 0.001], ids=["quick", "of a millisecond"])
async def test_stalled_prefetched_jobs_are_released_uncounted_and_run_elsewhere(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, slots: int, quick_s: float | None
) -> None:
    def some_ahead(pace: Prefetch, *_: Any, **__: Any) -> None:
        pace.ahead = 8

    quick = QUICK
    if quick_s is not None:  # so few of such jobs are prefetched that there may be none
        quick = 300
        monkeypatch.setattr(Prefetch, "claimed", some_ahead)
    one, other = Waiters(slots, quick_s), Waiters(500)
    await fill(db, quick, 100)
    async with running(one.app, dsn, shutdown_s=0.5) as (_, seen):
        await one.gauge.shows(slots)
        await until(lambda: db.fetchval(f"SELECT ({RUNNING}) = $1", slots), limit_s=1)
        released = await seen.wait(events.JOB_RELEASED)
        assert (released["reason"], released["delay_s"]) == (Reason.ELSEWHERE.value, None)
        given = {facts["job_id"] for facts in seen.all(events.JOB_RELEASED)}
        rows = await db.fetch(
            "SELECT DISTINCT status::text, failures, losses, worker_id, error FROM pgworkd.jobs WHERE id = ANY ($1)",
            list(given),
        )
        assert [tuple(row) for row in rows] == [("pending", 0, 0, None, None)]
        async with running(other.app, dsn, shutdown_s=0.5) as (_, seen_there):
            await other.gauge.shows(100 - slots)
            assert given <= {facts["job_id"] for facts in seen_there.all(events.JOB_STARTED)}
            assert one.gauge.now == slots
            one.gauge.go_on.set()
            other.gauge.go_on.set()
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=4)
    returned = one.returned + other.returned
    assert len(returned) == sum(returned.values()) == quick + 100


async def test_a_trickle_of_inserts_does_not_delay_the_release_of_stalled_jobs(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each insert sends a notification, because the other daemon is idle: both daemons poll."""
    never_stalls(monkeypatch)
    one, other = Waiters(4), Waiters(500)
    async with claimed_ahead(one, dsn, db, waiting=100) as (daemon, _, ahead), running(other.app, dsn) as (_, seen):
        await other.gauge.shows(96 - ahead)
        stalls_now(daemon, monkeypatch)
        trickled = await asyncpg.connect(dsn)
        for _ in range(60):
            await trickled.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
            await anyio.sleep(0.015)
        await trickled.close()
        assert other.gauge.now == 96, "due jobs wait for slots here while there are free ones elsewhere"
        await seen.wait(events.JOB_COMPLETED, count=60)
        one.gauge.go_on.set()
        other.gauge.go_on.set()


async def test_jobs_slower_than_estimated_do_not_wait_prefetched_for_seconds(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Jobs of 40 ms behind instant ones: one starts now and then, so none stalls, but the last has long to wait."""
    app = App()

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> None:
        if payload:
            await anyio.sleep(0.04)

    await fill(db, QUICK, 100)
    async with running(app, dsn, queues={"q": 1}) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, count=QUICK // 2)
        async with running(app, dsn, queues={"q": 100}):
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE payload = '{}')"))
            began = anyio.current_time()
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=4.5)
            assert anyio.current_time() - began < 2, "the other daemon, with a hundred free slots, had nothing to do"


@pytest.mark.parametrize("slots", IN_SLOTS)
async def test_no_due_job_waits_while_another_daemon_has_a_free_slot(
    dsn: str, db: asyncpg.Connection[Any], slots: int
) -> None:
    """Both have learned that jobs are quick; then there is exactly one job for each slot of the two."""
    one, other = Waiters(slots), Waiters(8)
    async with running(one.app, dsn, shutdown_s=0.5), running(other.app, dsn, shutdown_s=0.5):

        async def all_run() -> bool:
            return one.gauge.now + other.gauge.now == slots + 8

        for round_ in range(1, 5):
            await fill(db, QUICK // 4, slots + 8)
            await until(all_run, limit_s=1.5)
            for waiters in (one, other):
                go_on, waiters.gauge.go_on = waiters.gauge.go_on, anyio.Event()
                go_on.set()
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=2)
            assert sum(one.returned.values()) + sum(other.returned.values()) == round_ * (QUICK // 4 + slots + 8)


# Events and requests while jobs are prefetched.


async def _ids_ahead(db: asyncpg.Connection[Any], waiters: Waiters) -> list[Any]:
    rows = await db.fetch("SELECT id FROM pgworkd.jobs WHERE status = 'running' AND id <> ALL ($1)", [*waiters.began])
    return [row[0] for row in rows]


@pytest.mark.parametrize("stalls", [False, True])
async def test_a_prefetched_job_that_is_cancelled_never_runs(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, stalls: bool
) -> None:
    never_stalls(monkeypatch)
    waiters = Waiters(4)
    async with claimed_ahead(waiters, dsn, db) as (daemon, seen, ahead):
        ids = await _ids_ahead(db, waiters)
        assert len(ids) == ahead
        assert set((await cancel(db, *ids)).values()) == {"requested"}
        await until(lambda: all(held.reason for held in daemon.in_flight if held.claimed.id in set(ids)))
        if stalls:
            stalls_now(daemon, monkeypatch)
        else:
            waiters.gauge.go_on.set()
        count = "SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'cancelled' AND failures = 0"
        await until(lambda: db.fetchval(f"SELECT ({count}) = $1", ahead), limit_s=2)
        waiters.gauge.go_on.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=4)
        assert waiters.began.keys().isdisjoint(ids)
        assert len(waiters.returned) == sum(waiters.returned.values()) == QUICK + 1000 - ahead
        cancelled = {facts["job_id"] for facts in seen.all(events.JOB_CANCELLED, reason=Reason.CANCEL.value)}
        assert cancelled == {str(job_id) for job_id in ids}


async def test_prefetched_jobs_of_a_paused_queue_are_released(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    never_stalls(monkeypatch)
    waiters = Waiters(4)
    async with claimed_ahead(waiters, dsn, db) as (daemon, seen, ahead):
        began = set(waiters.began)
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', 'infinity')")
        await seen.wait(events.QUEUE_SETTINGS, queue="q", paused=True)
        stalls_now(daemon, monkeypatch)
        await until(lambda: db.fetchval(f"SELECT ({RUNNING}) = 4"), limit_s=2)
        await seen.wait(events.JOB_RELEASED, count=ahead)
        assert len(seen.all(events.JOB_RELEASED)) == ahead
        waiters.gauge.go_on.set()
        await until(lambda: db.fetchval(f"SELECT ({RUNNING}) = 0"), limit_s=2)
        assert waiters.began.keys() == began
        await db.execute("UPDATE pgworkd.queues SET paused_until = NULL")
        await seen.wait(events.JOB_COMPLETED, count=QUICK + 1000)
    assert len(waiters.returned) == sum(waiters.returned.values()) == QUICK + 1000


LOST = {
    "lease": "UPDATE pgworkd.workers SET lost_at = now()",
    "jobs": "WITH lost AS (UPDATE pgworkd.workers SET lost_at = now()) UPDATE pgworkd.jobs "
    "SET status = 'pending', worker_id = NULL WHERE status = 'running'",
}


@pytest.mark.parametrize("lost", LOST)
async def test_prefetched_jobs_of_a_lost_worker_run_under_its_next_registration(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    never_stalls(monkeypatch)
    waiters = Waiters(4)
    periods = Periods(rescue_s=3600, orphans_s=0.1)  # or its next registration takes them over before they are released
    async with claimed_ahead(waiters, dsn, db, periods=periods) as (daemon, seen, ahead):
        worker_id = daemon.worker_id
        ids, begun = await _ids_ahead(db, waiters), set(waiters.began)
        held = [each for each in daemon.in_flight if each.claimed.id in set(ids)]
        assert len(held) == ahead
        await db.execute(LOST[lost])
        await seen.wait(events.LEASE_LOST, worker_id=worker_id)
        assert len(seen.all(events.LEASE_FENCED)) == 1
        await seen.wait(events.LEASE_RENEWED)
        assert all(each.started is None for each in held), "it ran under a lease that was over"
        await waiters.gauge.shows(4)
        waiters.gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED, count=QUICK + 1000)
        stale = {facts["job_id"] for facts in seen.all(events.JOB_STALE)}
        assert stale >= {str(job_id) for job_id in ids} if lost == "jobs" else not stale
    assert len(waiters.returned) == sum(waiters.returned.values()) == QUICK + 1000
    assert {n for job_id, n in waiters.began.items() if job_id not in begun} == {1}
    assert await db.fetchval("SELECT max(failures) FROM pgworkd.finished_jobs") == 0


@pytest.mark.parametrize("how", ["gracefully", "at once"])
async def test_a_stop_releases_prefetched_jobs(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    never_stalls(monkeypatch)
    waiters = Waiters(4)
    async with claimed_ahead(waiters, dsn, db, shutdown_s=10) as (daemon, seen, ahead):
        ids, began = await _ids_ahead(db, waiters), set(waiters.began)
        daemon.request_stop(now=how == "at once")
        await seen.wait(events.JOB_RELEASED, count=ahead, reason=Reason.SHUTDOWN.value)
        waiters.gauge.go_on.set()
        assert (await seen.wait(events.DAEMON_STOPPED))["exit_code"] == 0
        assert waiters.began.keys() == began
    rows = dict(await db.fetch("SELECT id, status::text || failures FROM pgworkd.jobs"))
    assert set(rows.values()) == {"pending0"}
    assert rows.keys() >= set(ids)
    assert len(rows) + len(waiters.returned) == QUICK + 1000
    assert len(waiters.returned) == QUICK + (4 if how == "gracefully" else 0)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0


async def test_concurrency_changes_while_jobs_are_prefetched(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    never_stalls(monkeypatch)
    waiters = Waiters(4)
    gauge = waiters.gauge
    async with claimed_ahead(waiters, dsn, db, waiting=300) as (daemon, seen, _):
        for slots in (1, 6, 2):
            await set_concurrency(db, slots, daemon)
            before, gauge.most = gauge.now, 0
            go_on, gauge.go_on = gauge.go_on, anyio.Event()
            go_on.set()
            await seen.wait(events.JOB_COMPLETED, count=len(seen.all(events.JOB_COMPLETED)) + before)
            await gauge.shows(slots)
            assert gauge.most == slots
        gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED, count=QUICK + 300)
        assert gauge.most <= 2
    assert len(waiters.returned) == sum(waiters.returned.values()) == QUICK + 300
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.finished_jobs") == 1
