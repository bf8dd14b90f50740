"""Recurring jobs: one job per occurrence on any number of daemons, after an outage and across clock changes."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.core.claims import ClaimOrder
from pgworkd.core.events import Events
from pgworkd.core.fence import Fence
from pgworkd.core.recurrence import Recurrence
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.store import Store
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.life.recurring import Recurring
from tests.kits.daemon import running, until
from tests.kits.settles import complete

pytestmark = pytest.mark.slow("occurrences, a second apart")


async def test_five_daemons_create_one_job_per_occurrence(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """All five daemons serve the same schedule: each occurrence is one row and runs once, and no second is skipped."""
    ran: list[datetime] = []

    def app() -> App:
        app = App()

        @app.handler("tick", every=1)
        async def tick(job: Job) -> None:
            assert job.schedule == "tick"
            assert job.occurrence is not None
            ran.append(job.occurrence)

        return app

    async with AsyncExitStack() as daemons:
        for _ in range(5):
            await daemons.enter_async_context(running(app(), dsn))
        await until(lambda: db.fetchval("SELECT count(*) >= 3 FROM pgworkd.finished_jobs"))

    rows = await db.fetch(
        "SELECT occurrence, count(*) AS n FROM pgworkd.all_jobs WHERE schedule = 'tick' GROUP BY 1 ORDER BY 1"
    )
    assert {row["n"] for row in rows} == {1}
    assert len(set(ran)) == len(ran)
    # Every second has its occurrence, and the next one is already pending.
    instants = [row["occurrence"] for row in rows]
    assert all(later - earlier == timedelta(seconds=1) for earlier, later in itertools.pairwise(instants))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending'") == 1


async def test_schedules_are_managed_in_plain_sql_and_an_invalid_one_reports_its_error(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A schedule is a row: INSERT starts it, UPDATE fixes or disables it; an invalid rule is reported in `error`."""
    app = App()

    @app.handler("report")
    async def report(payload: dict[str, Any]) -> Any:
        return payload

    async with running(app, dsn) as (_, seen):
        await db.execute(
            "INSERT INTO pgworkd.schedules (name, queue, every_s, payload)"
            " VALUES ('r', 'report', 1, '{\"for\": \"me\"}')"
        )
        await db.execute("INSERT INTO pgworkd.schedules (name, queue, cron) VALUES ('bad', 'report', '61 * * * *')")
        await until(lambda: db.fetchval("SELECT count(*) >= 2 FROM pgworkd.finished_jobs WHERE schedule = 'r'"))
        failed = await seen.wait(events.SCHEDULE_FAILED, schedule="bad")
        assert "61" in failed["error"]
        assert await db.fetchval("SELECT error FROM pgworkd.schedules WHERE name = 'bad'") == failed["error"]
        # Once its rule is fixed by an UPDATE, it starts.
        await db.execute("UPDATE pgworkd.schedules SET cron = '* * * * * *' WHERE name = 'bad'")
        await until(lambda: db.fetchval("SELECT count(*) >= 1 FROM pgworkd.finished_jobs WHERE schedule = 'bad'"))
        # Disabling a schedule deletes its pending occurrence.
        await db.execute("UPDATE pgworkd.schedules SET enabled = false")
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
    assert (
        await db.fetchval("SELECT DISTINCT result::text FROM pgworkd.finished_jobs WHERE schedule = 'r'")
        == '{"for": "me"}'
    )


async def test_a_schedule_continues_after_a_dead_and_after_a_deleted_occurrence(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Neither a job that ends dead nor an operator's DELETE stops the schedule from creating its next occurrence."""
    app = App()

    @app.handler("tick", every=1, max_attempts=1)
    async def tick() -> None:
        raise RuntimeError("no luck today")

    async with running(app, dsn):
        await until(lambda: db.fetchval("SELECT count(*) >= 2 FROM pgworkd.jobs WHERE status = 'dead'"))
        await until(
            lambda: db.fetchval(
                "WITH d AS (DELETE FROM pgworkd.jobs WHERE status = 'pending' RETURNING 1) SELECT count(*) FROM d"
            )
        )
        await until(lambda: db.fetchval("SELECT count(*) >= 3 FROM pgworkd.jobs WHERE status = 'dead'"))
    rows = await db.fetch("SELECT occurrence, count(*) AS n FROM pgworkd.jobs GROUP BY 1")
    assert {row["n"] for row in rows} == {1}


async def _after_an_outage(dsn: str, db: asyncpg.Connection[Any], missed: Any) -> tuple[list[datetime], Any]:
    """Simulates five hours without a daemon; returns the occurrences that the next daemon ran, and its events."""
    ran: list[datetime] = []
    app = App()

    @app.handler("hourly", every="0 0 1 1 *", missed=missed)
    async def hourly(job: Job) -> None:
        assert job.occurrence is not None
        ran.append(job.occurrence)

    async with running(app, dsn):
        await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.jobs"))
    await db.execute("ALTER TABLE pgworkd.schedules DISABLE TRIGGER USER")  # as if it had been hourly from the start
    await db.execute("UPDATE pgworkd.schedules SET cron = '0 * * * *', last_occurrence = now() - interval '300 min'")
    await db.execute("ALTER TABLE pgworkd.schedules ENABLE TRIGGER USER")
    await db.execute(
        "UPDATE pgworkd.jobs SET run_at = now() - interval '300 min', occurrence = now() - interval '300 min'"
    )
    app.handlers["hourly"] = dataclasses.replace(
        app.handlers["hourly"], recurrence=Recurrence.parse("0 * * * *", missed=missed)
    )
    async with running(app, dsn) as (_, seen):
        await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.jobs WHERE run_at > now()"))
    return ran, seen


async def test_with_missed_skip_an_overdue_occurrence_expires_and_is_reported(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """`missed="skip"`: what fell due during the outage does not run; the row and an event give the reason."""
    ran, seen = await _after_an_outage(dsn, db, "skip")
    assert ran == []
    (skipped,) = seen.all(events.SCHEDULE_SKIPPED)
    assert (skipped["schedule"], skipped["kind"]) == ("hourly", "hourly")
    row = await db.fetchrow("SELECT status::text, error FROM pgworkd.finished_jobs")
    assert row is not None
    assert row["status"] == "expired"
    assert row["error"] == skipped["reason"]
    assert "skipped: missed before" in row["error"]


async def test_with_missed_once_an_outage_is_made_up_for_by_one_run(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """`missed="once"`: a single run stands for all occurrences of the outage."""
    ran, seen = await _after_an_outage(dsn, db, "once")
    assert len(ran) == 1
    assert not seen.all(events.SCHEDULE_SKIPPED)


async def test_with_missed_all_every_missed_occurrence_runs(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """`missed="all"`: five hours of outage, and every hourly occurrence runs."""
    ran, _ = await _after_an_outage(dsn, db, "all")
    assert len(ran) in (5, 6)


async def test_a_schedule_removed_from_the_code_is_disabled_until_it_is_declared_again(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling deploy drops a schedule: it stays enabled while any daemon still declares it, then it is disabled."""
    old, new = App(), App()
    for app in (old, new):

        @app.handler("kept", every=3600)
        async def kept() -> None: ...

    @old.handler("left", every=3600)
    async def left() -> None: ...

    monkeypatch.setattr(Recurring.__init__, "__kwdefaults__", {"retire_after_s": 0.0})
    enabled = "SELECT array_agg(name::text ORDER BY name) FROM pgworkd.schedules WHERE enabled"
    async with running(old, dsn), running(new, dsn) as (_, seen):
        await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.workers WHERE schedules IS NOT NULL"))
        assert not seen.all(events.SCHEDULE_RETIRED)
    assert await db.fetchval(enabled) == ["kept", "left"]
    async with running(new, dsn) as (_, seen):
        assert (await seen.wait(events.SCHEDULE_RETIRED))["schedule"] == "left"
        assert await db.fetchval(enabled) == ["kept"]
        assert await db.fetchval("SELECT after ->> 'enabled' FROM pgworkd.audit WHERE what = 'schedule'") == "false"
        async with running(old, dsn):
            await until(lambda: db.fetchval(f"{enabled[:-7]}name = 'left' AND enabled"))


ZONES = {
    "Europe/Berlin": ("2027-03-28", "2027-10-31"),
    "America/New_York": ("2027-03-14", "2027-11-07"),
    "Australia/Lord_Howe": ("2027-10-03", "2027-04-04"),
}


@pytest.mark.parametrize("zone", ZONES)
async def test_a_nightly_schedule_follows_local_time_across_both_dst_changes(
    dsn: str, db: asyncpg.Connection[Any], zone: str
) -> None:
    """The real tables and functions, with a clock that the test advances through both daylight-saving changes."""
    store = Store(ConnectionOptions(dsn))
    recurring = Recurring(store, Events())
    for n, day in enumerate(ZONES[zone]):
        start = datetime.fromisoformat(f"{day}T12:00:00+00:00") - timedelta(days=3)
        name = f"nightly {n}"
        await db.execute(
            "INSERT INTO pgworkd.schedules (name, queue, cron, timezone) VALUES ($1, 'q', '15 2 * * *', $2)", name, zone
        )
        await _turn(store, start)
        await recurring.refresh()
        happened = [await _run_next(store, recurring, db) for _ in range(6)]
        assert happened == _expected(zone, start, 6)
        await db.execute("DELETE FROM pgworkd.schedules")
    await store.close()


async def _turn(store: Store, instant: datetime) -> None:
    for connection in (store._claims, store._settles, store._maintenance):
        await connection.value("SELECT set_config('pgworkd.clock', $1, false)", instant.isoformat())


async def _run_next(store: Store, recurring: Recurring, db: asyncpg.Connection[Any]) -> datetime:
    """Advances the clock to the pending occurrence, claims and settles it; returns its instant."""
    due: datetime = await db.fetchval("SELECT run_at FROM pgworkd.jobs")
    await _turn(store, due - timedelta(milliseconds=1))
    worker = await store.register("w", 1, "t", 30)
    assert await store.claim(ClaimOrder(worker, "q", 10)) == []
    await _turn(store, due)
    (claimed,) = await store.claim(ClaimOrder(worker, "q", 10))
    await recurring.refresh()
    following = recurring.following(Attempt(claimed, "q"))
    assert following is not None
    assert await complete(store, Fence.of(claimed.id, 1, worker), following=[following]) == {claimed.id}
    assert claimed.occurrence is not None
    return datetime.fromtimestamp(claimed.occurrence, UTC)


def _expected(zone: str, start: datetime, count: int) -> list[datetime]:
    """02:15 in local time, found by stepping through UTC minute by minute: the first 02:15 of a day that has two, and
    the first minute after the gap of a day that has none."""
    found: list[datetime] = []
    instant, last_wall = start, start.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
    done: set[Any] = set()
    while len(found) < count:
        instant += timedelta(minutes=1)
        wall = instant.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
        wanted = wall.replace(hour=2, minute=15)
        passed = wall == wanted or (last_wall < wanted < wall and wall - last_wall > timedelta(minutes=1))
        if passed and wall.date() not in done:
            done.add(wall.date())
            found.append(instant)
        last_wall = wall
    return found
