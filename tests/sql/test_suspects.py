"""Suspects, jobs that were running when their worker was lost: each worker claims one at a time."""

from __future__ import annotations

import anyio
import pytest

from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import T0, Db, at, claim, claim_ids, complete, insert, one, worker

pytestmark = pytest.mark.usefixtures("t0")


async def test_suspects_run_one_at_a_time_per_worker_beside_other_jobs(db: Db) -> None:
    one_worker, another = await worker(db), await worker(db)
    suspects = await insert(db, 3, losses=2, priority=9)
    plain = await insert(db, 2)
    assert await claim_ids(db, one_worker) == [suspects[0], *plain]
    assert await claim_ids(db, one_worker) == []
    assert await claim_ids(db, another) == [suspects[1]]
    assert await complete(db, [suspects[0]]) == {suspects[0]}
    assert await claim_ids(db, one_worker) == [suspects[2]]


async def test_the_due_suspect_with_the_highest_priority_is_first(db: Db) -> None:
    worker_id = await worker(db)
    low = await one(db, losses=3)
    high = await one(db, losses=2, priority=1)
    await one(db, losses=2, priority=2, run_at=at(1))
    await one(db, losses=2, priority=2, expires_at=T0)
    await one(db, "another queue", losses=2)
    for suspect in (high, low):
        assert await claim_ids(db, worker_id, 1) == [suspect]
        await complete(db, [suspect])


async def test_a_worker_runs_one_suspect_across_all_queues(db: Db) -> None:
    worker_id = await worker(db)
    await one(db, "a", losses=2)
    await one(db, "b", losses=2)
    assert len(await claim(db, worker_id, queue="a")) == 1
    assert await claim(db, worker_id, queue="b") == []


async def test_two_overlapping_claims_of_one_worker_take_one_suspect(db: Db, other: Db) -> None:
    worker_id = await worker(db)
    suspects = await insert(db, 2, losses=2)
    plain = await one(db)
    await db.execute("BEGIN")
    assert await claim_ids(db, worker_id, 1) == suspects[:1]
    assert await claim_ids(other, worker_id) == [plain]
    await db.execute("COMMIT")
    assert await claim_ids(other, worker_id) == []


async def test_two_overlapping_claims_of_two_workers_take_one_suspect_each(db: Db, other: Db) -> None:
    one_worker, another = await worker(db), await worker(db)
    suspects = await insert(db, 2, losses=2)
    await db.execute("BEGIN")
    assert await claim_ids(db, one_worker) == suspects[:1]
    assert await claim_ids(other, another) == suspects[1:]
    await db.execute("COMMIT")


async def _gate(db: Db) -> None:
    """From now on claims block between their check for suspects and their try for the lock while 42 is locked.

    The functions' search path has pgworkd before pg_catalog, so this shadow is found first.
    """
    await db.execute("""
        CREATE FUNCTION pgworkd.pg_try_advisory_xact_lock(a int, b int) RETURNS boolean LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM pg_catalog.pg_advisory_lock_shared(42);
            PERFORM pg_catalog.pg_advisory_unlock_shared(42);
            RETURN pg_catalog.pg_try_advisory_xact_lock(a, b);
        END $$""")


async def test_a_claim_that_waited_for_the_suspects_lock_sees_the_suspect_taken_before(
    db: Db, other: Db, third: Db
) -> None:
    """If check and lock were one statement, they would share a snapshot taken before the lock: two suspects at once."""
    worker_id = await worker(db)
    suspects = await insert(db, 2, losses=2)
    await db.execute("BEGIN")
    assert await claim_ids(db, worker_id) == suspects[:1]
    await _gate(third)
    await third.execute("SELECT pg_advisory_lock(42)")
    async with anyio.create_task_group() as tasks:
        claiming = Later(tasks, claim_ids(other, worker_id))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        await third.execute("SELECT pg_advisory_unlock_all()")
        assert await claiming.answer() == []
