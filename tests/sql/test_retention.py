"""What a retention of a queue's own costs, and what it deletes: counted in rows read, whatever the history contains."""

from __future__ import annotations

import pytest

from pgworkd.database import schema
from tests.kits.verbs import Db, clock, complete, insert, one, worker

pytestmark = pytest.mark.usefixtures("t0")

HISTORY = """
    INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures, queue,
                                       payload, errors)
    SELECT pgworkd.new_id(), pgworkd.clock() - interval '1 hour', pgworkd.clock(), pgworkd.clock(), 'completed', 0, 1,
           0, 'q', '{}', '[]'
    FROM generate_series(1, 20000)"""
READ = """
    SELECT coalesce(sum(coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)), 0)
    FROM pg_stat_xact_all_tables WHERE relname ~ '^finished_jobs'"""


async def finish(db: Db, count: int, queue: str = "q") -> None:
    """Completes this many jobs now."""
    ids = await insert(db, count, queue)
    await db.fetch("SELECT * FROM pgworkd.claim($1, $2, $3)", await worker(db), queue, count)
    await complete(db, ids)


async def rows_read(db: Db) -> tuple[int, int]:
    """prune() with the default periods: rows deleted, rows of the history read for that."""
    async with db.transaction():
        deleted = int(await db.fetchval("SELECT rows_deleted FROM pgworkd.prune(7, 30)"))
        return deleted, int(await db.fetchval(READ))


@pytest.mark.parametrize("keep_s", [0, 60])
async def test_a_retention_of_one_queue_reads_only_the_rows_it_deletes(db: Db, keep_s: int) -> None:
    await db.execute(HISTORY)
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', $1)", keep_s)
    await finish(db, 10)
    await clock(61, db)
    deleted, read = await rows_read(db)
    assert deleted == (10 if keep_s else 0)
    assert read <= 3 * deleted


async def test_rows_without_a_partition_are_deleted_by_index(db: Db) -> None:
    await db.execute(HISTORY)
    await clock(-8 * 86_400, db)
    await finish(db, 10)
    await clock(0, db)
    deleted, read = await rows_read(db)
    assert (deleted, read <= 30) == (10, True)


async def test_every_outcome_stores_how_long_the_queue_keeps_it(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 60), ('more', 100)")
    await finish(db, 1)
    await finish(db, 1, "more")
    await finish(db, 1, "plain")
    await db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", await one(db))
    sql = """SELECT queue, status::text, extract(epoch FROM keep_until - finished_at)::int
             FROM pgworkd.finished_jobs ORDER BY 1, 2"""
    assert [tuple(row) for row in await db.fetch(sql)] == [
        ("more", "completed", 100), ("plain", "completed", None), ("q", "cancelled", 60), ("q", "completed", 60),
    ]  # fmt: skip


async def test_an_installation_without_the_column_gets_it(db: Db) -> None:
    await db.execute("ALTER TABLE pgworkd.finished_jobs DROP COLUMN keep_until")
    await db.execute("UPDATE pgworkd.schema_version SET version = 1")
    await db.execute(schema.text())
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 60)")
    await finish(db, 3)
    await clock(61, db)
    assert await rows_read(db) == (3, 6)
