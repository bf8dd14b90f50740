"""serialize_key in two sessions at once: whichever is first, and whatever is rolled back, the key makes progress."""

from __future__ import annotations

import uuid
from typing import Any

import anyio
import pytest

from tests.kits import verbs as v
from tests.kits.flow import line, run_all, settings, take_ids, unblock
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import Db, Settle

pytestmark = [pytest.mark.usefixtures("t0"), pytest.mark.slow("several sessions in each order")]

QUEUES = [f"queue {number}" for number in range(4)]
LOCK = "SELECT pgworkd.lock_queue($1)"
TRY_LOCK = "SELECT pg_try_advisory_xact_lock(1886873446, hashtext($1))"


async def _settle(settle: str, db: Db, first: uuid.UUID) -> None:
    if settle == "complete":
        await v.complete(db, [first])
    elif settle == "fail":
        await v.fail(db, [first], permanent=True)
    else:
        await v.release(db, [first], delay_s=30)


@pytest.mark.parametrize("settle", ["complete", "fail", "snooze"])
@pytest.mark.parametrize("next_is", ["parked", "waiting"])
@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_a_claim_concurrent_with_a_settle_that_frees_a_key(
    db: Db, other: Db, third: Db, settle: str, next_is: str, end_with: str
) -> None:
    """With only a blocked job ahead it need not wait; otherwise it waits to see what the settle did."""
    worker_id = await v.worker(db)
    first, second = await line(db, "k", "k")
    assert await take_ids(db, worker_id, 1 if next_is == "waiting" else 10) == [first]
    await db.execute("BEGIN")
    await _settle(settle, db, first)
    async with anyio.create_task_group() as tasks:
        claimed = Later(tasks, take_ids(other, worker_id))
        if next_is == "waiting":
            await waits_for_lock(third, other)
        else:
            assert await claimed.answer() == []
        await db.execute(end_with)
        assert await claimed.answer() == ([second] if (next_is, end_with) == ("waiting", "COMMIT") else [])
    if end_with == "ROLLBACK":
        assert await take_ids(db, worker_id) == []
        await _settle(settle, db, first)
    if (next_is, end_with) != ("waiting", "COMMIT"):
        assert await take_ids(db, worker_id) == [second]


async def snooze(db: Db, ids: list[uuid.UUID]) -> object:
    """Gives jobs back that are due later, which frees their keys."""
    return await v.release(db, ids, delay_s=0.0)


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("settle", [v.complete, v.fail, snooze, v.end])
async def test_a_settle_waits_for_a_claim_that_blocks_jobs_and_promotes_one_of_them(
    db: Db, other: Db, third: Db, settle: Settle, end_with: str
) -> None:
    worker_id = await v.worker(db)
    (first,) = await line(db, "k")
    await take_ids(db, worker_id)
    (second,) = await line(db, "k", run_at=v.at(-1))
    await db.execute("BEGIN")
    assert await take_ids(db, worker_id) == []
    if settle is v.fail:
        await third.execute("UPDATE pgworkd.jobs SET max_attempts = 1 WHERE id = $1", first)
    async with anyio.create_task_group() as tasks:
        settled = Later(tasks, settle(other, [first]))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        assert set(await settled.answer()) == {first}
    assert await v.statuses(db, [second]) == ["pending"]
    assert (await run_all(db, worker_id))[0] == second


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_two_claims_never_take_one_key(db: Db, other: Db, third: Db, end_with: str) -> None:
    one_worker, another = await v.worker(db), await v.worker(db)
    first, second = await line(db, "k", "k")
    await db.execute("BEGIN")
    assert await take_ids(db, one_worker, 1) == [first]
    async with anyio.create_task_group() as tasks:
        claimed = Later(tasks, take_ids(other, another))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        assert await claimed.answer() == ([] if end_with == "COMMIT" else [first])
    await v.complete(db, [first])
    assert await run_all(db, one_worker) == [second]


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_the_first_waiter_is_being_cancelled_while_its_key_is_freed(db: Db, other: Db, end_with: str) -> None:
    worker_id = await v.worker(db)
    first, second, last = await line(db, "k", "k", "k")
    await take_ids(db, worker_id)
    await other.execute("BEGIN")
    assert await v.cancel(other, second) == {second: "cancelled"}
    async with anyio.create_task_group() as tasks:
        settled = Later(tasks, v.complete(db, [first]))
        await other.execute(end_with)
        assert await settled.answer() == {first}
    await db.execute("SELECT pgworkd.apply_effects()")  # the settle may have found the first waiter locked
    expected = [last] if end_with == "COMMIT" else [second, last]
    assert await run_all(db, worker_id) == expected


# The order of locks


async def _two_queues(db: Db) -> tuple[str, str]:
    """Two queues whose locks are taken in this order."""
    first, second = await db.fetch("SELECT q FROM unnest($1::text[]) q ORDER BY hashtext(q) LIMIT 2", QUEUES)
    return first["q"], second["q"]


@pytest.mark.parametrize("verb", ["fail", "end", "complete"])
@pytest.mark.parametrize("turned", [False, True])
async def test_a_settle_that_frees_keys_of_two_queues_locks_them_in_order(
    db: Db, other: Db, third: Db, verb: str, *, turned: bool
) -> None:
    """It waits for the first without holding the second; otherwise two of them would deadlock."""
    first, second = await _two_queues(db)
    one_queue, another = (second, first) if turned else (first, second)
    victim = await v.worker(db)
    (asked,) = await line(db, "k", queue=one_queue)
    (dead,) = await line(db, "k", queue=another, max_attempts=1)
    assert await take_ids(db, victim, queue=one_queue) + await take_ids(db, victim, queue=another) == [asked, dead]
    await v.cancel(db, asked)
    calls: dict[str, Any] = {
        "fail": lambda: v.fail(other, [asked, dead]),
        "end": lambda: v.end(other, [asked, dead], status=["cancelled", "expired"]),
        "complete": lambda: v.complete(other, [asked, dead]),
    }
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute(LOCK, first)
        freeing = Later(tasks, calls[verb]())
        await waits_for_lock(third, other)
        is_free = await db.fetchval(TRY_LOCK, second)
        await db.execute("COMMIT")
        await freeing.answer()
    assert is_free, "it holds the lock of the second while it waits for the first"
    gone = ["cancelled", "expired"] if verb == "end" else ["completed"] * 2 if verb == "complete" else None
    assert await v.statuses(db, [asked, dead]) == (gone or ["cancelled", "dead"])


async def test_unblock_waits_for_no_queue_lock(db: Db, other: Db, third: Db) -> None:
    """Otherwise a slow claim of one queue would delay the maintenance of all."""
    worker_id = await v.worker(db)
    await settings(db, rate_per_key=10, rate_per_key_period_s=1.0)
    (first,) = await v.insert(db, 1, limit_key="r")
    assert await take_ids(db, worker_id) == [first]
    await v.one(db, limit_key="r")
    (moved,) = await line(db, "k", queue="r")
    assert await take_ids(db, worker_id, queue="r") == [moved]
    await line(db, "k", queue="r")
    await take_ids(db, worker_id, queue="r")
    await db.execute("UPDATE pgworkd.jobs SET serialize_key = 'other' WHERE id = $1", moved)
    await v.clock(10, db, other)
    await third.execute("BEGIN")
    await third.execute(LOCK, "r")
    with anyio.fail_after(3):
        assert await unblock(other) == 1
        assert len(await take_ids(db, worker_id)) == 1
    await third.execute("COMMIT")
    await v.clock(20, db)
    assert await unblock(db) == 0


async def test_a_step_of_unblock_waits_for_no_queue_lock_and_defers_the_locked_queue(db: Db, third: Db) -> None:
    """An application may hold the lock of a queue in a long transaction: the keys of all other queues make progress."""
    ids = [await v.one(db, queue, serialize_key="k", status="blocked") for queue in QUEUES]
    await third.execute("BEGIN")
    await third.execute(LOCK, QUEUES[0])
    await db.execute("SET statement_timeout = '2s'")
    assert await db.fetchval("SELECT promoted FROM pgworkd.unblock_lines('', '', 1000)") == len(QUEUES)
    assert await v.statuses(db, ids) == ["pending"] * len(QUEUES)
    left = "SELECT array_agg(queue) FROM pgworkd.pending_effects"
    await db.execute("SELECT pgworkd.apply_effects()")
    assert await db.fetchval(left) == [QUEUES[0]], "a claim that holds the lock may be parking one more"
    await third.execute("COMMIT")
    await db.execute("SELECT pgworkd.apply_effects()")
    assert await db.fetchval(left) is None


async def test_a_claim_locks_only_the_jobs_it_takes_or_blocks(db: Db, other: Db, third: Db) -> None:
    worker_id = await v.worker(db)
    ids = [*await line(db, "k", "k"), *await v.insert(db, 500)]
    await db.execute("BEGIN")
    assert await take_ids(db, worker_id, 3) == [ids[0], *ids[2:4]]
    free = await third.fetch("SELECT id FROM pgworkd.jobs WHERE status = 'pending' FOR UPDATE SKIP LOCKED")
    assert {row["id"] for row in free} == set(ids[4:])
    await db.execute("ROLLBACK")
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = ANY ($1) FOR UPDATE", ids[:3])
    assert await take_ids(db, worker_id, 2) == ids[3:5]


# Everything concurrently
