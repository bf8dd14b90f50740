"""A claim that goes along with a small settle: one call for both, where that is right."""

from __future__ import annotations

import json
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import events, pool
from pgworkd.app import App
from pgworkd.chores import Periods
from tests.engine.ahead_kit import RUNNING, Waiters, fill
from tests.engine.along_kit import ALL_OVER, UNTOLD, at_rest, calls_of, let_go, nothing_ahead, warmed_up
from tests.kit import running, status, until


async def test_a_single_slot_works_its_queue_off_with_one_call_per_job(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_ahead(monkeypatch)
    app = App()

    @app.handler("q", concurrency=1)
    async def handle(payload: dict[str, Any]) -> Any:
        await anyio.sleep(0.001)
        return {"n": payload["n"]}

    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, payload) "
        "SELECT 'q', jsonb_build_object('n', n) FROM generate_series(1, 200) n"
    )
    async with running(app, dsn) as (daemon, seen):
        calls = calls_of(daemon, monkeypatch)
        await until(lambda: db.fetchval(ALL_OVER), limit_s=4)
        await seen.wait(events.JOB_COMPLETED, count=200)
    assert len(calls) > 50
    assert max(len(call.settled) for call in calls) <= 4
    assert all(call.claimed is not None and call.claimed <= call.limit for call in calls)
    rows = await db.fetch("SELECT payload, result, attempts, failures, status::text FROM pgworkd.finished_jobs")
    assert len(rows) == 200
    assert all(row["payload"] == row["result"] for row in rows)
    assert {tuple(row)[2:] for row in rows} == {(1, 0, "completed")}


async def test_each_settle_of_a_full_queue_takes_exactly_one_claim_along(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_ahead(monkeypatch)
    monkeypatch.setattr(pool, "ALONG_S", 60.0)
    waiters = Waiters(2)
    await fill(db, 0, 8)
    async with running(waiters.app, dsn, **UNTOLD) as (daemon, seen):
        await warmed_up()
        await waiters.gauge.shows(2)
        calls = calls_of(daemon, monkeypatch)
        for round_ in (1, 2, 3):
            await at_rest(daemon)
            let_go(waiters)
            await seen.wait(events.JOB_COMPLETED, count=2 * round_)
            await waiters.gauge.shows(2)
            assert [(len(call.settled), call.limit, call.claimed) for call in calls] == [(2, 2, 2)] * round_
        waiters.gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED, count=8)
        assert await db.fetchval(ALL_OVER)


async def test_a_large_settle_and_one_of_a_queue_without_more_jobs_take_nothing_along(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_ahead(monkeypatch)
    waiters = Waiters(5)
    await fill(db, 0, 12)
    async with running(waiters.app, dsn, **UNTOLD) as (daemon, seen):
        calls = calls_of(daemon, monkeypatch)
        for done, left in ((5, 5), (10, 2), (12, 0)):  # five, five, and two in a pool with three free slots
            await waiters.gauge.shows(min(5, left + 5 if left else 2))
            let_go(waiters)
            await seen.wait(events.JOB_COMPLETED, count=done)
        assert calls == []


# What it must not do.


async def test_a_recurring_job_is_settled_with_its_next_occurrence_and_nothing_along(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_ahead(monkeypatch)
    waiters = Waiters(1)
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('hourly', 'q', 3600)")
    async with running(waiters.app, dsn, periods=Periods()) as (daemon, seen):
        occurrence = await until(lambda: db.fetchval("SELECT id FROM pgworkd.jobs WHERE schedule = 'hourly'"))
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', 'infinity')")
        await seen.wait(events.QUEUE_SETTINGS, paused=True)
        await db.execute("UPDATE pgworkd.jobs SET run_at = now() - interval '1 min', payload = '{\"wait\": true}'")
        await fill(db, 0, 5)
        calls = calls_of(daemon, monkeypatch)
        await db.execute("UPDATE pgworkd.queues SET paused_until = NULL")
        await waiters.gauge.shows(1)
        assert await status(db, occurrence) == "running"
        for done in (1, 2):
            await at_rest(daemon)
            let_go(waiters)
            await seen.wait(events.JOB_COMPLETED, count=done)
            await waiters.gauge.shows(1)
        assert len(calls) == 1, "the second, which is of no schedule, takes one along"
        assert calls[0].settled != [occurrence]
        waiters.gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED, count=6)
        row = await db.fetchrow("SELECT schedule, status::text, run_at > now() AS later FROM pgworkd.jobs")
        assert row is not None
        assert tuple(row) == ("hourly", "pending", True)
        assert len(seen.all(events.SCHEDULE_RESTORED)) == 1


async def test_an_attempt_that_is_not_ours_any_more_is_reported_stale_and_the_rest_is_not(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_ahead(monkeypatch)
    monkeypatch.setattr(pool, "ALONG_S", 60.0)
    waiters = Waiters(2)
    await fill(db, 0, 6)
    async with running(waiters.app, dsn, **UNTOLD) as (daemon, seen):
        await warmed_up()
        await waiters.gauge.shows(2)
        calls = calls_of(daemon, monkeypatch)
        taken, ours = waiters.began
        await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", taken)
        await at_rest(daemon)
        let_go(waiters)
        stale = await seen.wait(events.JOB_STALE)
        assert (stale["job_id"], stale["attempt"], stale["outcome"]) == (str(taken), 1, "completed")
        await seen.wait(events.JOB_COMPLETED, job_id=str(ours))
        await waiters.gauge.shows(2)
        assert [(len(call.settled), call.claimed) for call in calls] == [(2, 2)]
        waiters.gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED, count=5)
        assert len(seen.all(events.JOB_STALE)) == 1
        await until(lambda: len(daemon._holdings) == 0)


async def test_a_queue_that_was_paused_unheard_gives_nothing_along(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_ahead(monkeypatch)
    await db.execute("ALTER TABLE pgworkd.queues DISABLE TRIGGER queues_changed")
    waiters = Waiters(1)
    await fill(db, 0, 4)
    async with running(waiters.app, dsn, **UNTOLD) as (daemon, seen):
        await waiters.gauge.shows(1)
        calls = calls_of(daemon, monkeypatch)
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', 'infinity')")
        waiters.gauge.go_on.set()
        await seen.wait(events.JOB_COMPLETED)
        assert [call.claimed for call in calls] == [0]
        assert await db.fetchval(RUNNING) == 0
    assert sum(waiters.began.values()) == 1


async def test_two_queues_with_a_slot_each_are_both_worked_off(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A settle of jobs of both takes along a claim for one: the other must not wait for it."""
    app = App()

    async def handle(payload: dict[str, Any]) -> int:
        await anyio.sleep(0.001)
        return int(payload["n"])

    for queue in ("one", "other"):
        app.handler(queue, concurrency=1)(handle)
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, payload) SELECT q, $1 "
        "FROM unnest(ARRAY['one', 'other']) q, generate_series(1, 150)",
        json.dumps({"n": 7}),
    )
    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, count=300)
        finished = dict(
            await db.fetch("SELECT queue, max(finished_at) - min(started_at) FROM pgworkd.finished_jobs GROUP BY 1")
        )
    slower, quicker = sorted(finished.values(), reverse=True)
    assert slower < 4 * quicker, "one queue stood while the other was worked off"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE result = '7'") == 300
