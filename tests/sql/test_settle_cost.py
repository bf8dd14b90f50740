"""A settle reads the settings of the queues of its jobs, however many other queues have settings."""

from __future__ import annotations

import pytest

from tests.kits.sessions import NO_STATISTICS
from tests.kits.verbs import Db, Settle, claim_ids, complete, end, fail, insert, one, release, worker

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

READ = """SELECT seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables
          WHERE relid = 'pgworkd.queues'::regclass"""


@pytest.mark.parametrize("settle", [complete, fail, release, end])
async def test_settings_of_other_queues_do_not_slow_a_settle(db: Db, settle: Settle) -> None:
    """5,000 of them, with every setting that a settle reads."""
    worker_id = await worker(db)
    await db.execute(NO_STATISTICS)
    await db.execute(
        """INSERT INTO pgworkd.queues (name, limit_per_key, keep_s) SELECT 'other' || n, 5, n % 3
           FROM generate_series(1, 5000) n"""
    )
    await db.execute("INSERT INTO pgworkd.queues (name, max_running) VALUES ('q', 1000)")
    ids = await insert(db, 100)
    assert await claim_ids(db, worker_id, 100) == ids
    async with db.transaction():
        before = await db.fetchval(READ)
        assert set(await settle(db, ids)) == set(ids)
        assert await db.fetchval(READ) - before <= 3


async def test_each_queue_in_a_settle_has_its_own_retention(db: Db) -> None:
    """One settle of jobs of four queues: without settings, with other settings, without history, with a retention."""
    worker_id = await worker(db)
    await db.execute(
        "INSERT INTO pgworkd.queues (name, concurrency, keep_s) VALUES ('b', 1, NULL), ('c', NULL, 0), ('d', NULL, 60)"
    )
    ids = {queue: await one(db, queue) for queue in "abcd"}
    for queue in ids:
        await claim_ids(db, worker_id, 1, queue)
    assert await complete(db, list(ids.values())) == set(ids.values())
    rows = await db.fetch("SELECT queue, keep_until - finished_at AS keeps FROM pgworkd.finished_jobs ORDER BY queue")
    assert [(row["queue"], row["keeps"] and row["keeps"].total_seconds()) for row in rows] == [
        ("a", None),
        ("b", None),
        ("d", 60),
    ]
