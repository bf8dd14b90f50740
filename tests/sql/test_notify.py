"""Which pools an INSERT notifies: one notification per queue and statement, and only if a pool is idle."""

from __future__ import annotations

from datetime import timedelta

from tests.kits.sessions import Notices, blocks
from tests.kits.verbs import T0, Db, at, clock, one, set_pool, worker


async def test_no_notification_when_no_pool_of_that_queue_is_idle(db: Db, notices: Notices) -> None:
    worker_id = await worker(db)
    await set_pool(db, worker_id, "q", idle=False)
    await set_pool(db, worker_id, "another")
    await one(db)
    assert await notices.queues() == []


async def test_one_notification_per_queue_and_statement(db: Db, notices: Notices) -> None:
    for queue in ("q", "ü", "third"):
        for _ in range(2):
            await set_pool(db, await worker(db), queue)
    await set_pool(db, await worker(db), "q", idle=False)
    queues = "SELECT (ARRAY['q', 'ü', 'awake'])[1 + i % 3] FROM generate_series(1, 10000) i"
    await db.execute(f"INSERT INTO pgworkd.jobs (queue) {queues}")
    heard = await notices.queues()
    assert sorted(heard) == ["q", "ü"]
    await one(db)
    await one(db)
    assert await notices.queues() == ["q"] * 2


async def test_copy_notifies_too(db: Db, notices: Notices) -> None:
    await set_pool(db, await worker(db))
    rows = [("q", '{"n": 1}')] * 1000
    await db.copy_records_to_table("jobs", schema_name="pgworkd", columns=["queue", "payload"], records=rows)
    assert await notices.queues() == ["q"]


async def test_a_notification_is_sent_at_commit_and_not_after_a_rollback(db: Db, notices: Notices) -> None:
    await set_pool(db, await worker(db))
    for ending in ("ROLLBACK", "COMMIT"):
        await db.execute("BEGIN")
        await one(db)
        assert await notices.queues() == []
        await db.execute(ending)
        assert await notices.queues() == (["q"] if ending == "COMMIT" else [])


async def test_jobs_that_are_not_due_soon_notify_nobody(db: Db, notices: Notices) -> None:
    await clock(0, db)
    await set_pool(db, await worker(db))
    await one(db, run_at=T0 + timedelta(seconds=10.001))
    await one(db, run_at=at(86400))
    await one(db, status="dead")
    assert await notices.queues() == []
    await one(db, run_at=T0 + timedelta(seconds=10))
    assert await notices.queues() == ["q"]


async def test_a_statement_that_inserts_no_row_notifies_nobody(db: Db, notices: Notices) -> None:
    await one(db, dedupe_key="k")
    await set_pool(db, await worker(db))
    await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('q', 'k') ON CONFLICT DO NOTHING")
    assert await notices.queues() == []


async def test_a_pool_that_is_no_longer_idle_is_not_notified(db: Db, notices: Notices) -> None:
    worker_id = await worker(db)
    for idle in (True, False, True):
        await set_pool(db, worker_id, idle=idle)
        await one(db)
        assert await notices.queues() == (["q"] if idle else [])


async def test_set_pool_writes_only_if_something_changed(db: Db) -> None:
    worker_id = await worker(db)
    await set_pool(db, worker_id)
    version = await db.fetchval("SELECT xmin::text FROM pgworkd.pools")
    await set_pool(db, worker_id)
    assert await db.fetchval("SELECT xmin::text FROM pgworkd.pools") == version
    await set_pool(db, worker_id, idle=False)
    assert await db.fetchval("SELECT xmin::text FROM pgworkd.pools") != version


async def test_the_trigger_costs_the_same_for_one_row_and_for_ten_thousand(db: Db) -> None:
    sql = "SELECT pgworkd.wake(ARRAY(SELECT 'q' FROM generate_series(1, $1::int)))"
    assert await blocks(db, sql, 10_000) <= await blocks(db, sql, 1) + 2


async def test_a_pool_of_a_removed_worker_is_not_announced(db: Db, notices: Notices) -> None:
    """Nothing would ever remove the row, and each insert would send a NOTIFY for nobody."""
    await set_pool(db, 4711)
    await one(db)
    assert await notices.queues() == []
