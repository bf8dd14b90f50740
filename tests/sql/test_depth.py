"""depth(): the number of jobs that could run now, at a cost in proportion to them."""

from __future__ import annotations

import pytest

from tests.kits.verbs import Db, at, claim_ids, clock, insert, one, worker

pytestmark = pytest.mark.usefixtures("t0")

DEPTH = "SELECT pgworkd.depth('q')"
COUNT = """SELECT count(*) FROM pgworkd.jobs
    WHERE queue = 'q' AND status IN ('pending', 'failed') AND run_at <= pgworkd.clock()"""


async def test_depth_is_the_number_of_jobs_that_could_run_now(db: Db) -> None:
    assert await db.fetchval(DEPTH) == 0
    for priority in (-(2**31), -1, 0, 7, 2**31 - 1):
        for columns in ({}, {"serialize_key": "s"}, {"limit_key": "l"}, {"losses": 2}, {"losses": 2, "limit_key": "l"}):
            await insert(db, 2, priority=priority, **columns)
            await insert(db, 3, priority=priority, run_at=at(5), **columns)
            await one(db, "r", priority=priority, **columns)
    assert await db.fetchval(DEPTH) == await db.fetchval(COUNT) == 50
    await claim_ids(db, await worker(db), 9)
    assert await db.fetchval(DEPTH) == await db.fetchval(COUNT) < 50
    await clock(5, db)
    assert await db.fetchval(DEPTH) == await db.fetchval(COUNT) > 100
    assert [await db.fetchval("SELECT pgworkd.depth('q', $1)", most) for most in (1, 7, 50)] == [1, 7, 50]
