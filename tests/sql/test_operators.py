"""cancel, retry, discard, next_due: the operators' verbs."""

from __future__ import annotations

import uuid

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Later, Notices, waits_for_lock
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def discard(db: Db, *ids: uuid.UUID) -> int:
    """discard(); the number of jobs."""
    return int(await db.fetchval("SELECT pgworkd.discard($1)", ids))


async def next_due(db: Db, *queues: str) -> dict[str, float]:
    """next_due(); seconds by queue."""
    return {row["queue"]: row["due_in_s"] for row in await db.fetch("SELECT * FROM pgworkd.next_due($1)", queues)}


async def dead(db: Db, **columns: object) -> uuid.UUID:
    """A job that was claimed and is dead."""
    job_id = await v.one(db, priority=2**31 - 1, **columns)
    assert await v.claim_ids(db, await v.worker(db), 1) == [job_id]
    assert await v.fail(db, [job_id], permanent=True) == {job_id: "dead"}
    return job_id


# cancel


async def test_cancel_finishes_waiting_jobs_and_requests_it_of_running_ones(db: Db, notices: Notices) -> None:
    worker_id = await v.worker(db)
    running, failed, completed = await v.insert(db, 3)
    await v.claim(db, worker_id)
    await v.fail(db, [failed])
    await v.complete(db, [completed])
    died, waiting, future, unknown = await dead(db), await v.one(db), await v.one(db, run_at=v.at(60)), uuid.uuid4()
    await notices.heard()
    answer = await v.cancel(db, running, failed, completed, died, waiting, future, unknown)
    assert answer == {running: "requested", **dict.fromkeys((failed, waiting, future), "cancelled")}, (
        "the dead has ended"
    )
    assert await notices.heard() == [{"worker": worker_id}]
    everything = [running, failed, completed, died, waiting, future]
    assert await v.statuses(db, everything) == ["running", "cancelled", "completed", "dead", *["cancelled"] * 2]
    assert (await v.live(db, running))["cancel_requested_at"] == v.T0
    row = await v.over(db, failed)
    assert (row["error"], row["finished_at"], row["failures"]) == ("it broke", v.T0, 1)


async def test_cancelling_again_keeps_the_first_time_and_notifies_the_worker_again(db: Db, notices: Notices) -> None:
    worker_id, job_id = await v.worker(db), await v.one(db)
    await v.claim(db, worker_id)
    await v.cancel(db, job_id)
    await v.clock(5, db)
    assert await v.cancel(db, job_id) == {job_id: "requested"}
    assert (await v.live(db, job_id))["cancel_requested_at"] == v.T0
    assert await notices.heard() == [{"worker": worker_id}] * 2
    await v.end(db, [job_id])
    assert await v.cancel(db, job_id) == {}


async def test_cancel_of_no_jobs_and_of_jobs_of_many_workers(db: Db, notices: Notices) -> None:
    assert await v.cancel(db) == {}
    workers = [await v.worker(db) for _ in range(3)]
    ids = await v.insert(db, 6)
    for worker_id in workers:
        await v.claim(db, worker_id, 2)
    assert set((await v.cancel(db, *ids)).values()) == {"requested"}
    assert sorted(notice["worker"] for notice in await notices.heard()) == workers


async def test_cancel_waits_for_a_concurrent_claim_and_then_notifies_its_worker(db: Db, other: Db, third: Db) -> None:
    worker_id, job_id = await v.worker(db), await v.one(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await v.claim(db, worker_id)
        cancelling = Later(tasks, v.cancel(other, job_id))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await cancelling.answer() == {job_id: "requested"}
    answer = await v.heartbeat(db, worker_id)
    assert answer is not None
    assert answer["cancel_ids"] == [job_id]


async def test_cancel_waits_for_a_concurrent_settle_and_finds_the_job_finished(db: Db, other: Db, third: Db) -> None:
    job_id = await v.one(db)
    await v.claim(db, await v.worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await v.complete(db, [job_id])
        cancelling = Later(tasks, v.cancel(other, job_id))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await cancelling.answer() == {}
    assert await v.statuses(db, [job_id]) == ["completed"]


async def test_operators_lock_rows_in_the_order_of_ids(db: Db, other: Db, third: Db) -> None:
    high, low = [await v.one(db, id=uuid.UUID(int=n), status="dead") for n in (2, 1)]
    for verb in (v.retry, discard):
        async with anyio.create_task_group() as tasks:
            await db.execute("BEGIN")
            await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", low)
            await other.execute("BEGIN")
            acting = Later(tasks, verb(other, high, low))
            await waits_for_lock(third, other)
            assert await third.fetch("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE NOWAIT", high)
            await db.execute("COMMIT")
            assert await acting.answer()
            await other.execute("ROLLBACK")


# retry


async def test_retry_resets_the_failures_of_a_dead_job(db: Db) -> None:
    job_id = await dead(db, max_attempts=2)
    await v.clock(7, db)
    assert await v.retry(db, job_id) == {job_id}
    row = await v.live(db, job_id)
    assert (row["status"], row["run_at"], row["attempts"]) == ("pending", v.at(7), 1)
    assert (row["failures"], row["losses"]) == (0, 0)
    assert row["error"] == "it broke", "the history stays"
    worker_id = await v.worker(db)
    for attempt, outcome in ((2, "failed"), (3, "dead")):
        assert [r["attempt"] for r in await v.claim(db, worker_id)] == [attempt]
        assert await v.fail(db, [job_id], attempt, delay_s=0) == {job_id: outcome}


async def test_retry_of_a_job_that_killed_three_workers_clears_its_losses(db: Db) -> None:
    job_id = await v.one(db, status="dead", losses=3, failures=3)
    await v.retry(db, job_id)
    await v.one(db, losses=2, priority=1)
    assert job_id in await v.claim_ids(db, await v.worker(db))


async def test_retry_makes_a_failed_job_due_now_and_keeps_its_failures_and_losses(db: Db) -> None:
    job_id = await v.one(db, losses=1, schedule="s", occurrence=v.T0)
    await v.claim(db, await v.worker(db))
    await v.fail(db, [job_id], delay_s=600)
    assert await v.retry(db, job_id) == {job_id}
    row = await v.live(db, job_id)
    assert (row["status"], row["run_at"], row["failures"], row["losses"]) == ("pending", v.T0, 1, 1)
    assert row["schedule"] == "s", "it is still the chain's live occurrence"


async def test_retry_skips_running_waiting_and_finished_jobs(db: Db) -> None:
    running, completed = await v.insert(db, 2)
    await v.claim(db, await v.worker(db))
    await v.complete(db, [completed])
    future = await v.one(db, run_at=v.at(60))
    before = await db.fetch("SELECT * FROM pgworkd.all_jobs ORDER BY id")
    assert await v.retry(db, running, completed, future, uuid.uuid4()) == set()
    assert await v.retry(db) == set()
    assert await db.fetch("SELECT * FROM pgworkd.all_jobs ORDER BY id") == before


async def test_retry_notifies_idle_pools(db: Db, notices: Notices) -> None:
    ids = [await dead(db) for _ in range(3)]
    await v.set_pool(db, await v.worker(db))
    await v.retry(db, *ids)
    assert await notices.heard() == [{"queue": "q"}]
    await v.retry(db, *ids)
    assert await notices.heard() == []


async def test_retry_of_a_job_whose_dedupe_key_is_taken_changes_nothing(db: Db) -> None:
    blocked, free = await dead(db, dedupe_key="k"), await dead(db)
    holder = await v.one(db, dedupe_key="k")
    with pytest.raises(asyncpg.UniqueViolationError) as caught:
        await v.retry(db, free, blocked)
    assert caught.value.constraint_name == "jobs_dedupe"
    assert await v.statuses(db, [blocked, free, holder]) == ["dead", "dead", "pending"]
    await v.complete(db, await v.claim_ids(db, await v.worker(db)))
    assert await v.retry(db, free, blocked) == {free, blocked}


# discard


async def test_discard_archives_only_dead_jobs(db: Db) -> None:
    died = [await dead(db), await dead(db)]
    running = await v.one(db)
    await v.claim(db, await v.worker(db))
    waiting = await v.one(db)
    assert await discard(db, *died, running, waiting, uuid.uuid4()) == 2
    assert await discard(db, *died) == 0
    assert await discard(db) == 0
    row = await v.over(db, died[0])
    assert (row["status"], row["finished_at"], row["error"]) == ("dead", v.T0, "it broke")
    assert await v.statuses(db, [running, waiting]) == ["running", "pending"]
    assert await v.retry(db, *died) == set()


# With a serialize key


async def test_cancelling_or_retrying_a_job_with_a_serialize_key_leaves_none_stuck(db: Db) -> None:
    ids = [await v.one(db, serialize_key="k", yields=True) for _ in range(5)]
    worker_id = await v.worker(db)
    assert await v.claim_ids(db, worker_id) == ids[:1]
    await v.cancel(db, ids[1])
    await v.fail(db, ids[:1], delay_s=600)
    assert await v.statuses(db, ids) == ["failed", "cancelled", "pending", "blocked", "blocked"]
    await v.cancel(db, ids[2])
    assert await v.statuses(db, ids[3:]) == ["pending", "blocked"], "the next one is first now"
    await v.clock(605, db)
    await v.retry(db, ids[0])
    assert (await v.live(db, ids[0]))["run_at"] == v.at(600), "it was due already, and keeps its place"
    ran, worker_id = [], await v.worker(db)
    while rows := await v.claim(db, worker_id):
        await v.complete(db, [row["id"] for row in rows], [row["attempt"] for row in rows])
        ran += [row["id"] for row in rows]
    assert ran == [ids[3], ids[4], ids[0]]


# next_due


async def test_next_due_returns_the_earliest_waiting_job_of_each_queue(db: Db) -> None:
    await v.one(db, "past", run_at=v.at(-3))
    await v.one(db, "past", run_at=v.at(50), priority=9)
    await v.one(db, "future", run_at=v.at(7.25), priority=-5)
    await v.one(db, "future", run_at=v.at(9), priority=5)
    await v.one(db, "suspect", run_at=v.at(4), losses=2)
    await v.one(db, "suspect", run_at=v.at(5))
    await v.one(db, "dead", status="dead")
    await v.one(db, "running")
    await v.claim(db, await v.worker(db), queue="running")
    await v.one(db, "not asked")
    queues = ["past", "future", "suspect", "dead", "running", "empty"]
    assert await next_due(db, *queues) == {"past": -3, "future": 7.25, "suspect": 4}
    assert await next_due(db) == {}


async def test_next_due_includes_failed_and_snoozed_jobs(db: Db) -> None:
    first, second = await v.insert(db, 2)
    await v.claim(db, await v.worker(db))
    assert await next_due(db, "q") == {}
    await v.fail(db, [first], delay_s=30)
    assert await next_due(db, "q") == {"q": 30}
    await v.release(db, [second], delay_s=10)
    assert await next_due(db, "q") == {"q": 10}


async def test_next_due_handles_more_than_a_hundred_priorities(db: Db) -> None:
    for priority in range(130):
        await v.one(db, priority=priority, run_at=v.at(1000 + priority))
    assert await next_due(db, "q") == {"q": 1000}
    await v.one(db, priority=-7, run_at=v.at(3))
    assert await next_due(db, "q") == {"q": 3}


# Regressions


async def test_discard_counts_the_jobs_of_a_queue_without_history(db: Db) -> None:
    """The operator was told `0 discarded`, yet the job was gone."""
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    assert await discard(db, await dead(db)) == 1


async def test_a_retried_job_is_not_cancelled_by_a_request_made_before_it_died(db: Db) -> None:
    """If cancel_requested_at outlived the death, the next heartbeat would cancel the run just requested."""
    worker_id, job_id = await v.worker(db), await v.one(db)
    await v.claim(db, worker_id)
    await v.cancel(db, job_id)
    assert await v.fail(db, [job_id], permanent=True) == {job_id: "dead"}
    await v.retry(db, job_id)
    await v.claim(db, worker_id)
    answer = await v.heartbeat(db, worker_id)
    assert answer is not None
    assert answer["cancel_ids"] == []
    await v.release(db, [job_id], 2)
    assert await v.statuses(db, [job_id]) == ["pending"]


async def test_a_retried_job_runs_although_its_expiry_has_passed(db: Db) -> None:
    """Otherwise retry reports success, claim skips it, and expire archives it: `expired before it could start`."""
    job_id = await dead(db, expires_at=v.at(5))
    await v.clock(10, db)
    assert await v.retry(db, job_id) == {job_id}
    assert await db.fetchval("SELECT pgworkd.expire()") == 0
    assert await v.claim_ids(db, await v.worker(db)) == [job_id]
