"""Recurring jobs: each occurrence once, whoever runs it, also when the clocks change."""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import pytest

from pgworkd import events
from pgworkd.app import App
from pgworkd.events import Events
from pgworkd.held import Held
from pgworkd.job import Job
from pgworkd.link import LinkOptions
from pgworkd.recurring import Recurring
from pgworkd.store import ClaimOrder, Store
from tests.kit import running, until


async def test_five_daemons_and_one_row_per_occurrence(dsn: str, db: asyncpg.Connection[Any]) -> None:
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
    # Each whole second, none left out, and the next one waits.
    instants = [row["occurrence"] for row in rows]
    assert all(later - earlier == timedelta(seconds=1) for earlier, later in itertools.pairwise(instants))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending'") == 1


async def test_a_schedule_by_plain_sql_and_one_that_makes_no_sense(dsn: str, db: asyncpg.Connection[Any]) -> None:
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
        # Mended by SQL, it begins.
        await db.execute("UPDATE pgworkd.schedules SET cron = '* * * * * *' WHERE name = 'bad'")
        await until(lambda: db.fetchval("SELECT count(*) >= 1 FROM pgworkd.finished_jobs WHERE schedule = 'bad'"))
        # Switched off, its waiting occurrence goes.
        await db.execute("UPDATE pgworkd.schedules SET enabled = false")
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
    assert (
        await db.fetchval("SELECT DISTINCT result::text FROM pgworkd.finished_jobs WHERE schedule = 'r'")
        == '{"for": "me"}'
    )


async def test_a_dead_occurrence_and_a_deleted_one_do_not_end_the_chain(dsn: str, db: asyncpg.Connection[Any]) -> None:
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


ZONES = {
    "Europe/Berlin": ("2027-03-28", "2027-10-31"),
    "America/New_York": ("2027-03-14", "2027-11-07"),
    "Australia/Lord_Howe": ("2027-10-03", "2027-04-04"),
}


@pytest.mark.parametrize("zone", ZONES)
async def test_the_chain_across_both_clock_changes_equals_the_wall_clock(
    dsn: str, db: asyncpg.Connection[Any], zone: str
) -> None:
    """The engine's own tables and functions, under a clock that the test turns, day by day across each change."""
    store = Store(LinkOptions(dsn))
    recurring = Recurring(store, Events())
    for n, day in enumerate(ZONES[zone]):
        start = datetime.fromisoformat(f"{day}T12:00:00+00:00") - timedelta(days=3)
        name = f"nightly {n}"
        await db.execute(
            "INSERT INTO pgworkd.schedules (name, queue, cron, timezone) VALUES ($1, 'q', '15 2 * * *', $2)", name, zone
        )
        await _turn(store, start)
        await recurring.look()
        happened = [await _run_next(store, recurring, db) for _ in range(6)]
        assert happened == _expected(zone, start, 6)
        await db.execute("DELETE FROM pgworkd.schedules")
    await store.close()


async def _turn(store: Store, instant: datetime) -> None:
    for link in (store._claims, store._settles, store._rest):
        await link.value("SELECT set_config('pgworkd.clock', $1, false)", instant.isoformat())


async def _run_next(store: Store, recurring: Recurring, db: asyncpg.Connection[Any]) -> datetime:
    """Turns the clock to the waiting occurrence, claims and settles it; its instant."""
    due: datetime = await db.fetchval("SELECT run_at FROM pgworkd.jobs")
    await _turn(store, due - timedelta(milliseconds=1))
    worker = await store.register("w", 1, "t", 30)
    assert await store.claim(ClaimOrder(worker, "q", 10)) == []
    await _turn(store, due)
    (claimed,) = await store.claim(ClaimOrder(worker, "q", 10))
    await recurring.look()
    following = recurring.following(Held(claimed, "q"))
    assert following is not None
    assert await store.settle_completed([claimed.id], [claimed.attempt], ["null"], [following]) == [claimed.id]
    assert claimed.occurrence is not None
    return datetime.fromtimestamp(claimed.occurrence, UTC)


def _expected(zone: str, start: datetime, count: int) -> list[datetime]:
    """02:15 by the wall, minute by minute of real time: the first 02:15 of a day that has two, else the first
    minute after the gap of a day that has none."""
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
