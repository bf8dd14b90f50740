"""A row that maintenance cannot update is logged once; the daemon continues with the others."""

from __future__ import annotations

from typing import Any

import asyncpg

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life.maintenance import Periods
from tests.kits.daemon import running
from tests.kits.sessions import refuse
from tests.kits.verbs import insert_running, statuses

PERIODS = Periods(rescue_s=0.1, expire_s=0.1)


async def test_one_job_that_cannot_be_rescued_does_not_block_the_others(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        """Has nothing to do."""

    ids = await insert_running(db, 20)
    await db.execute("UPDATE pgworkd.workers SET lost_at = now()")
    await refuse(db, ids[0])
    async with running(app, dsn, periods=PERIODS) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, 19)
        assert await seen.wait(events.ROWS_REJECTED) == {
            "what": "rescue",
            "sqlstate": "P0001",
            "count": 1,
            "key": str(ids[0]),
            "error": "this one stays as it is",
        }
        await db.execute("TRUNCATE public.kept")
        await db.execute("UPDATE pgworkd.refused_rows SET until = now()")  # it is tried again at once
        await seen.wait(events.JOB_COMPLETED, 20)
    assert len(seen.all(events.ROWS_REJECTED)) == 1
    assert seen.all(events.MAINTENANCE_FAILED) == []
    assert await statuses(db, ids) == ["completed"] * 20
