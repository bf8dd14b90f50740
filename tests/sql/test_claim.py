"""claim(): which jobs it takes, in which order, and never twice."""

from __future__ import annotations

import random
import uuid
from datetime import timedelta

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import Db

from .conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")


async def test_a_claim_returns_all_columns_that_a_worker_needs(db: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(
        db, kind="k", payload='{"n": 1}', meta='{"trace": "t"}', timeout_s=2.5, priority=3, run_at=v.at(-60)
    )
    (row,) = await v.claim(db, worker_id)
    assert dict(row) == {
        "id": job_id,
        "kind": "k",
        "payload": '{"n": 1}',
        "attempt": 1,
        "failures": 0,
        "max_attempts": 3,
        "timeout_s": 2.5,
        "priority": 3,
        "losses": 0,
        "run_at": v.at(-60).timestamp(),
        "created_at": v.T0.timestamp(),
        "schedule": None,
        "occurrence": None,
        "meta": '{"trace": "t"}',
        "serialize_key": None,
    }
    job = await v.live(db, job_id)
    assert (job["status"], job["worker_id"], job["started_at"], job["attempts"]) == ("running", worker_id, v.T0, 1)


async def test_a_null_kind_is_returned_as_the_name_of_the_queue(db: Db) -> None:
    await v.one(db, "embedding")
    assert [row["kind"] for row in await v.claim(db, await v.worker(db), queue="embedding")] == ["embedding"]


async def test_jobs_are_claimed_by_priority_then_run_at_then_id(db: Db) -> None:
    rng = random.Random(7)  # noqa: S311 - repeatable
    waiting = []
    for _ in range(60):
        priority, run_at = rng.choice([-(2**31), -1, 0, 1, 2**31 - 1]), v.at(-rng.randrange(5))
        waiting.append((-priority, run_at, await v.one(db, priority=priority, run_at=run_at)))
    expected = [job_id for *_, job_id in sorted(waiting)]
    worker_id = await v.worker(db)
    taken = []
    for limit in (7, 1, 30, 100):
        taken += await v.claim_ids(db, worker_id, limit)
    assert taken == expected


async def test_among_equal_jobs_the_id_decides(db: Db) -> None:
    ids = [uuid.UUID(int=n) for n in (5, 1, 9, 3)]
    for job_id in ids:
        await v.one(db, id=job_id)
    assert await v.claim_ids(db, await v.worker(db), 3) == sorted(ids)[:3]


@pytest.mark.parametrize("limit", [0, 1, 5, 99, 100])
async def test_the_limit_is_exact(db: Db, limit: int) -> None:
    """IN (SELECT .. LIMIT 5 FOR UPDATE SKIP LOCKED) under a nested loop claims all 100: queue_classic PR#320."""
    await v.insert(db, 100)
    worker_id = await v.worker(db)
    for method in ("hashjoin", "mergejoin", "hashagg", "material"):
        await db.execute(f"SET enable_{method} = off")
    assert len(await v.claim_ids(db, worker_id, limit)) == limit
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == limit


async def test_the_limit_is_exact_over_several_priorities_and_a_suspect(db: Db) -> None:
    for priority in range(5):
        await v.insert(db, 3, priority=priority)
    suspect = await v.one(db, losses=2)
    rows = await v.claim(db, await v.worker(db), 8)
    assert [row["priority"] for row in rows] == [4, 4, 4, 3, 3, 3, 2, 0]
    assert rows[-1]["id"] == suspect


async def test_future_and_expired_jobs_are_not_claimed(db: Db) -> None:
    due = [await v.one(db, run_at=v.T0), await v.one(db, expires_at=v.T0 + timedelta(microseconds=1))]
    await v.one(db, run_at=v.T0 + timedelta(microseconds=1))
    await v.one(db, expires_at=v.T0)
    await v.one(db, expires_at=v.at(-1))
    await v.one(db, status="dead")
    await v.one(db, "another queue")
    assert await v.claim_ids(db, await v.worker(db)) == due


async def test_a_failed_job_is_claimed_once_its_retry_is_due(db: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(db)
    await v.claim(db, worker_id)
    await v.fail(db, [job_id], delay_s=10)
    await v.clock(9.9, db)
    assert await v.claim(db, worker_id) == []
    await v.clock(10, db)
    assert [(row["attempt"], row["failures"]) for row in await v.claim(db, worker_id)] == [(2, 1)]


async def test_attempts_rise_with_every_claim(db: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(db, max_attempts=100)
    for attempt in range(1, 6):
        assert [row["attempt"] for row in await v.claim(db, worker_id)] == [attempt]
        await v.fail(db, [job_id], attempt, delay_s=0)
    assert (await v.live(db, job_id))["attempts"] == 5


async def test_a_row_with_extreme_counters_does_not_stop_the_queue(db: Db) -> None:
    absurd, plain = await v.one(db, attempts=2**31 - 1, failures=2**31 - 1), await v.one(db)
    assert await v.claim_ids(db, await v.worker(db)) == [absurd, plain]


async def test_a_worker_stores_no_budget_for_a_kind_that_it_may_not_know(db: Db) -> None:
    """As the old release in a rolling deployment: what the new one knows of the kind must hold, also for a loss."""
    old, new = await v.worker(db), await v.worker(db)
    job_id = await v.one(db, kind="charge")
    await v.claim(db, old, kinds=["other"], budgets=[7])
    assert (await v.live(db, job_id))["max_attempts"] is None
    await v.release(db, [job_id], delay_s=0.0, message="no handler for kind 'charge'")
    await v.claim(db, new, kinds=["charge"], budgets=[1])
    assert (await v.live(db, job_id))["max_attempts"] == 1
    assert await v.fail(db, [job_id], 2) == {job_id: "dead"}


async def test_max_attempts_is_stamped_from_the_job_then_its_kind_then_defaults_to_3(db: Db) -> None:
    worker_id = await v.worker(db)
    jobs = [
        await v.one(db, kind="five"),
        await v.one(db, kind="five", max_attempts=7),
        await v.one(db, kind="other"),
        await v.one(db, kind="one"),
        await v.one(db),
    ]
    rows = await v.claim(db, worker_id, kinds=["one", "five"], budgets=[1, 5])
    assert [row["max_attempts"] for row in rows] == [5, 7, 3, 1, 3]
    await v.fail(db, jobs[:1], delay_s=0)
    # Once stamped it stays, whatever the default from code is later.
    assert [row["max_attempts"] for row in await v.claim(db, worker_id, kinds=["five"], budgets=[9])] == [5]
    await v.one(db, "five")
    assert (await v.claim(db, worker_id, 1, "five", ["five"], [5]))[0]["max_attempts"] == 5


async def test_nothing_is_claimed_from_a_paused_queue_until_the_pause_ends(db: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(db)
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', $1), ('other', 'infinity')", v.at(5))
    assert await v.claim(db, worker_id) == []
    await v.clock(5, db)
    assert await v.claim_ids(db, worker_id) == [job_id]
    await v.one(db, "other")
    assert await v.claim(db, worker_id, queue="other") == []


# The lease


async def test_without_a_lease_nothing_is_claimed(db: Db) -> None:
    job_id = await v.one(db)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await v.claim(db, 4711)
    assert caught.value.sqlstate == v.LEASE_GONE
    assert "register again" in str(caught.value.hint)
    assert await v.statuses(db, [job_id]) == ["pending"]


async def test_a_worker_with_an_expired_lease_claims_nothing_until_it_renews(db: Db) -> None:
    worker_id = await v.worker(db, 10)
    job_id = await v.one(db)
    await v.clock(10, db)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await v.claim(db, worker_id)
    assert caught.value.sqlstate == v.LEASE_GONE
    assert await v.heartbeat(db, worker_id) is not None
    assert await v.claim_ids(db, worker_id) == [job_id]


async def test_a_worker_marked_lost_claims_nothing_even_before_its_lease_ends(db: Db) -> None:
    worker_id = await v.worker(db)
    await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
    await v.one(db)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await v.claim(db, worker_id)
    assert caught.value.sqlstate == v.LEASE_GONE


async def _steady_rescuer(db: Db) -> int:
    """A worker that may rescue at T0 + 60 s."""
    rescuer = await v.worker(db, 60, "rescuer")
    for seconds in (25, 50):
        await v.clock(seconds, db)
        await v.heartbeat(db, rescuer)
    await v.clock(60, db)
    return rescuer


async def test_a_claim_concurrent_with_a_rescue_waits_and_then_has_no_lease(db: Db, other: Db, third: Db) -> None:
    victim = await v.worker(db, 5)
    held = await v.one(db)
    await v.claim(db, victim)
    waiting = await v.one(db)
    rescuer = await _steady_rescuer(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await v.rescue(db, rescuer) == {held: "failed"}
        # In the victim's session, by its own clock, the lease is still valid.
        claiming = Later(tasks, v.claim(other, victim))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        with pytest.raises(asyncpg.PostgresError) as caught:
            await claiming.answer()
    assert caught.value.sqlstate == v.LEASE_GONE
    assert await v.statuses(db, [held, waiting]) == ["failed", "pending"]


async def test_a_rescue_concurrent_with_a_claim_skips_the_worker_until_the_next_call(db: Db, other: Db) -> None:
    victim = await v.worker(db, 5)
    job_id = await v.one(db)
    rescuer = await _steady_rescuer(db)
    await other.execute("BEGIN")
    assert await v.claim_ids(other, victim) == [job_id]
    assert await v.rescue(db, rescuer) == {}
    assert await db.fetchval("SELECT lost_at FROM pgworkd.workers WHERE id = $1", victim) is None
    await other.execute("COMMIT")
    assert await v.rescue(db, rescuer) == {job_id: "failed"}


async def test_a_heartbeat_and_a_claim_do_not_wait_for_each_other(db: Db, other: Db) -> None:
    worker_id = await v.worker(db)
    await v.insert(db, 2)
    await db.execute("SET statement_timeout = '2s'")
    await other.execute("SET statement_timeout = '2s'")
    await db.execute("BEGIN")
    await v.claim(db, worker_id, 1)
    assert await v.heartbeat(other, worker_id) is not None
    await db.execute("COMMIT")
    await db.execute("BEGIN")
    await v.heartbeat(db, worker_id)
    assert len(await v.claim(other, worker_id, 1)) == 1
    await db.execute("COMMIT")


# Concurrent claims


async def test_concurrent_claims_share_the_jobs_without_waiting(db: Db, other: Db) -> None:
    ids = await v.insert(db, 10)
    one_worker, another = await v.worker(db), await v.worker(db)
    await other.execute("SET statement_timeout = '2s'")
    await db.execute("BEGIN")
    assert await v.claim_ids(db, one_worker, 4) == ids[:4]
    assert await v.claim_ids(other, another, 10) == ids[4:]
    assert await v.claim_ids(other, another, 10) == []
    await db.execute("ROLLBACK")
    assert await v.claim_ids(other, another, 10) == ids[:4]


async def test_a_locked_row_is_skipped(db: Db, other: Db) -> None:
    ids = await v.insert(db, 5)
    worker_id = await v.worker(db)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = ANY ($1) FOR UPDATE", ids[:2])
    await db.execute("SET statement_timeout = '2s'")
    assert await v.claim_ids(db, worker_id, 2) == ids[2:4]
    await other.execute("COMMIT")
    assert await v.claim_ids(db, worker_id) == [*ids[:2], ids[4]]


async def test_claims_in_parallel_take_every_job_exactly_once(db: Db, connect: Connect) -> None:
    for priority in range(3):
        await v.insert(db, 100, priority=priority)
    taken: list[uuid.UUID] = []

    async def take(session: Db, worker_id: int) -> None:
        while ids := await v.claim_ids(session, worker_id, 7):
            taken.extend(ids)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            session = await connect()
            await v.clock(0, session)
            tasks.start_soon(take, session, await v.worker(db))
    assert len(taken) == len(set(taken)) == 300
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE attempts = 1 AND status = 'running'") == 300


async def test_a_job_that_is_being_cancelled_is_not_claimed(db: Db, other: Db) -> None:
    ids = await v.insert(db, 2)
    worker_id = await v.worker(db)
    await other.execute("BEGIN")
    assert await v.cancel(other, ids[0]) == {ids[0]: "cancelled"}
    assert await v.claim_ids(db, worker_id) == [ids[1]]
    await other.execute("ROLLBACK")
    assert await v.claim_ids(db, worker_id) == [ids[0]]
