"""claim(): its cost does not grow with the jobs it may not take."""

from __future__ import annotations

import pytest

from tests.kits.sessions import NO_STATISTICS, blocks, rows_read
from tests.kits.verbs import Db, at, claim, claim_ids, insert, worker

pytestmark = pytest.mark.usefixtures("t0")

CLAIM = "SELECT * FROM pgworkd.claim($1, $2, $3)"


async def _primed(db: Db, worker_id: int) -> None:
    """Plans everything while the table is empty, and prevents statistics from being updated."""
    await db.execute(NO_STATISTICS)
    await db.execute("ANALYZE pgworkd.jobs")
    for _ in range(2):
        await claim(db, worker_id)


async def test_many_future_jobs_of_a_higher_priority_do_not_slow_a_claim(db: Db, other: Db) -> None:
    worker_id = await worker(db)
    await _primed(db, worker_id)
    due = await insert(db, 5)
    before = await blocks(db, CLAIM, worker_id, "q", 10)
    await insert(db, 20_000, priority=1, run_at=at(3600))
    for session in (db, other):  # one session with a plan from before, one that plans now
        assert await blocks(session, CLAIM, worker_id, "q", 10) <= before + 20
        async with session.transaction():
            seq, idx = await rows_read(session)
            assert await claim_ids(session, worker_id) == due
            seq_after, idx_after = await rows_read(session)
            assert seq_after - seq == 0
            assert idx_after - idx <= 30
            await session.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL WHERE worker_id > 0")


async def test_many_waiting_jobs_of_any_queue_do_not_slow_a_claim(db: Db, other: Db) -> None:
    worker_id = await worker(db)
    await _primed(db, worker_id)
    await insert(db, 10)
    before = await blocks(db, CLAIM, worker_id, "q", 10)
    await insert(db, 10_000, run_at=at(-1), queue="r")
    await insert(db, 10_000)
    for session in (db, other):
        assert await blocks(session, CLAIM, worker_id, "q", 10) <= before + 20


async def test_many_suspects_do_not_slow_the_claims_of_workers_that_cannot_take_them(db: Db, other: Db) -> None:
    worker_id = await worker(db)
    await _primed(db, worker_id)
    await insert(db, 10, losses=2)
    await claim(db, worker_id, 1)
    await insert(db, 10)
    before = await blocks(db, CLAIM, worker_id, "q", 10)
    await insert(db, 10_000, losses=2, priority=5)
    for session in (db, other):
        assert await blocks(session, CLAIM, worker_id, "q", 10) <= before + 20
