"""Serialize keys: a job that is given back keeps its place, unless it asks to be due later."""

from __future__ import annotations

import pytest

from tests.kits.flow import line, take_ids
from tests.kits.verbs import Db, at, clock, complete, fail, heartbeat, one, release, rescue, worker

pytestmark = pytest.mark.usefixtures("t0")


@pytest.mark.parametrize("was", ["first", "failed", "lost"])
@pytest.mark.parametrize("how", ["stop", "unknown kind", "snooze"])
async def test_a_job_that_is_given_back_keeps_its_place_unless_it_asks_to_be_due_later(
    db: Db, how: str, was: str
) -> None:
    worker_id = await worker(db)
    first, second = await line(db, "k", "k")
    assert await take_ids(db, worker_id) == [first]
    attempt = 1
    if was != "first":
        if was == "failed":
            await fail(db, [first], delay_s=5.0)
        else:
            await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
            await rescue(db, worker_id := await worker(db))
        await clock(10, db)
        await heartbeat(db, worker_id)
        assert await take_ids(db, worker_id) == [first]
        attempt = 2
    late = await one(db, serialize_key="k", run_at=at(-60))  # committed late: due before the first, which has begun
    delay_s, message = {"stop": (None, None), "unknown kind": (30.0, "no handler"), "snooze": (30.0, None)}[how]
    await release(db, [first], attempt, delay_s=delay_s, message=message)
    if how == "snooze":
        assert await take_ids(db, worker_id) == [late]
        return
    if how == "unknown kind":
        assert await take_ids(db, worker_id) == []
        await clock(45, db)
        await heartbeat(db, worker_id)
    assert await take_ids(db, worker_id) == [first]
    await complete(db, [first], attempt + 1)
    assert await take_ids(db, worker_id) == [late]
    await complete(db, [late])
    assert await take_ids(db, worker_id) == [second]
