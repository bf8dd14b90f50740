"""A schedule that loses its next occurrence continues at once; missed occurrences run late and are not lost."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life.maintenance import Periods
from tests.kits.daemon import running, until

pytestmark = pytest.mark.slow("occurrences, a second apart")

SELDOM = Periods(rescue_s=0.1, schedules_s=3600)
LOST = """
    WITH lost AS (
        INSERT INTO pgworkd.workers (name, pid, version, lease_s, started_at, seen_at, steady_since, lease_until)
        SELECT 'lost', 1, '0', 1, t, t, t, t FROM (SELECT clock_timestamp() - interval '1 hour' AS t) x RETURNING id
    )
    UPDATE pgworkd.jobs SET status = 'running', worker_id = lost.id, started_at = now(), attempts = 1, max_attempts = 1
    FROM lost WHERE schedule = 's'"""
CANCELLED = "SELECT pgworkd.cancel(ARRAY(SELECT id FROM pgworkd.jobs WHERE schedule = 's'))"
EXPIRED = "UPDATE pgworkd.jobs SET expires_at = now() - interval '1 s' WHERE schedule = 's'"


def _app() -> App:
    app = App()

    @app.handler("q")
    async def handle() -> None: ...

    return app


@pytest.mark.parametrize("how", [LOST, CANCELLED, EXPIRED], ids=["lost", "cancelled", "expired"])
async def test_a_schedule_that_lost_its_next_occurrence_is_restored_at_once(
    dsn: str, db: asyncpg.Connection[Any], how: str
) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 3600)")
    async with running(_app(), dsn, periods=SELDOM, lease_s=1.0) as (_, seen):
        await seen.wait(events.SCHEDULE_CREATED, schedule="s")
        assert seen.all(events.SCHEDULE_RESTORED) == [], "a new schedule has lost nothing"
        await db.execute(how)
        if how == EXPIRED:
            await db.execute("SELECT pgworkd.expire(100)")
        await seen.wait(events.SCHEDULE_RESTORED, schedule="s")
        assert len(seen.all(events.SCHEDULE_CREATED)) == 1


@pytest.mark.parametrize(
    ("missed", "changed", "late_s"), [("skip", False, 60), ("skip", True, -10), ("once", False, 0)]
)
async def test_occurrences_missed_by_a_broken_chain_run_late_within_the_grace(
    dsn: str, db: asyncpg.Connection[Any], missed: str, *, changed: bool, late_s: int
) -> None:
    """Its last occurrence was 100 s ago; it is due every 10 s, since a day ago or since now."""
    await db.execute(
        "INSERT INTO pgworkd.schedules (name, queue, every_s, missed, in_force_since, last_occurrence)"
        " SELECT 's', 'q', 10, $1, now() - interval '1 day',"
        " to_timestamp(floor(extract(epoch FROM now() - interval '100 s') / 10) * 10)",
        missed,
    )
    if changed:
        await db.execute("UPDATE pgworkd.schedules SET enabled = false; UPDATE pgworkd.schedules SET enabled = true")
    now: datetime = await db.fetchval("SELECT now()")
    async with running(_app(), dsn, periods=SELDOM) as (_, seen):
        restored = await seen.wait(events.SCHEDULE_RESTORED, schedule="s")
        late = now - datetime.fromisoformat(restored["occurrence"])
        assert timedelta(seconds=late_s - 12) < late <= timedelta(seconds=late_s + 10)
        await until(lambda: db.fetchval("SELECT count(*) > 0 FROM pgworkd.finished_jobs WHERE status = 'completed'"))
