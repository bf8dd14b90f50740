"""What a queue says of attempts and time limits, for jobs that do not say it themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kits.verbs import Db, claim, fail, insert, live, one, rescue, steady, worker

pytestmark = pytest.mark.usefixtures("t0")


async def say(db: Db, **settings: Any) -> None:
    await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps(settings))


@pytest.mark.parametrize(
    ("own", "queue", "handler", "counts"),
    [
        (None, None, None, 3),
        (None, None, 7, 7),
        (None, 2, None, 2),
        (None, 2, 7, 2),
        (5, 2, 7, 5),
        (5, None, 7, 5),
    ],
)
async def test_the_job_says_first_then_its_queue_then_its_handler(
    db: Db, own: int | None, queue: int | None, handler: int | None, counts: int
) -> None:
    worker_id = await worker(db)
    await say(db, max_attempts=queue)
    job_id = await one(db, max_attempts=own)
    kinds = ([], []) if handler is None else (["q"], [handler])
    (claimed,) = await claim(db, worker_id, 1, "q", kinds=kinds[0], budgets=kinds[1])
    assert claimed["max_attempts"] == counts
    for attempt in range(1, counts + 1):
        if attempt > 1:
            await claim(db, worker_id, 1, "q")
        outcome = await fail(db, [job_id], attempt, delay_s=0)
        assert outcome[job_id] == ("dead" if attempt == counts else "failed")


async def test_a_change_leaves_alone_what_has_begun(db: Db) -> None:
    worker_id = await worker(db)
    await say(db, max_attempts=2)
    begun, new = await one(db), None
    await claim(db, worker_id, 1, "q")
    await say(db, max_attempts=1)
    assert (await fail(db, [begun], delay_s=0))[begun] == "failed"
    (again,) = await claim(db, worker_id, 1, "q")
    assert (again["id"], again["max_attempts"]) == (begun, 2)
    new = await one(db)
    (claimed,) = await claim(db, worker_id, 1, "q")
    assert (claimed["id"], claimed["max_attempts"]) == (new, 1)


async def test_a_rule_that_comes_later_leaves_alone_what_has_begun(db: Db) -> None:
    """Else a job that has run once, and may run again, would run again and be told that it may not."""
    worker_id = await worker(db)
    begun = await one(db)
    await claim(db, worker_id, 1, "q")
    await say(db, max_attempts=1)
    assert (await fail(db, [begun], delay_s=0))[begun] == "failed"
    (again,) = await claim(db, worker_id, 1, "q", kinds=["q"], budgets=[2])
    assert (again["id"], again["attempt"], again["max_attempts"]) == (begun, 2, 2)
    assert (await fail(db, [begun], 2, delay_s=0))[begun] == "dead"


async def test_a_queue_whose_jobs_run_at_most_once(db: Db) -> None:
    """A worker that dies may have done the work."""
    first, second = await worker(db, 5), await worker(db, 30)
    await say(db, max_attempts=1)
    job_id = await one(db)
    await claim(db, first, 1, "q")
    await steady(db, second)
    assert await rescue(db, second) == {job_id: "dead"}


async def test_its_time_limit_is_that_of_attempts_from_the_next_one_on(db: Db) -> None:
    worker_id = await worker(db)
    await say(db, timeout_s=20)
    mine, own = await one(db), await one(db, timeout_s=7)
    found = {row["id"]: row["timeout_s"] for row in await claim(db, worker_id, 2, "q")}
    assert found == {mine: 20, own: 7}
    assert (await live(db, mine))["timeout_s"] is None, "it is not the job's own"
    await say(db, timeout_s=30)
    await fail(db, [mine], delay_s=0)
    (again,) = await claim(db, worker_id, 1, "q")
    assert again["timeout_s"] == 30
    await insert(db, 1)
    await say(db, timeout_s=None)
    (last,) = await claim(db, worker_id, 1, "q")
    assert last["timeout_s"] is None
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queues") == 0, "no setting is left"
