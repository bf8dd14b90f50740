"""What batches cost: a settle reads the batches of its jobs, by index, however many other batches there are."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.kits.batches import add, batch, cancel_batch, counted, create, seal
from tests.kits.sessions import STATISTICS, blocks, crowd_tables, read_by_table
from tests.kits.verbs import Db, cancel, claim_ids, complete, end, fail, insert_running, retry, worker

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

TABLES = ("jobs", "batches", "batch_additions")
MANY = """
    INSERT INTO pgworkd.batches (name, queue) SELECT 'many', 'r' FROM generate_series(1, 3000);
    INSERT INTO pgworkd.batches (name, parent_id, stream, sealed_at)
    SELECT 'child', b.id, n % 2 = 0, CASE WHEN n % 3 = 0 THEN now() END
    FROM (SELECT id, row_number() OVER () AS n FROM pgworkd.batches) b;
    INSERT INTO pgworkd.jobs (queue, batch_id, counted, status)
    SELECT 'r', b.id, true, CASE WHEN n = 5 THEN 'dead' ELSE 'pending' END::pgworkd.job_status
    FROM pgworkd.batches b, generate_series(1, 5) n;
    INSERT INTO pgworkd.batch_additions (batch_id, added) SELECT b.id, 5 FROM pgworkd.batches b;
"""


@pytest.mark.parametrize("statistics", STATISTICS)
async def test_verbs_that_finish_jobs_read_only_the_batches_of_those_jobs(db: Db, other: Db, statistics: str) -> None:
    worker_id = await worker(db)
    await crowd_tables(db, TABLES, MANY, statistics)
    root = await batch(db, "root", max_failures=3, on_complete={"queue": "done"})
    child = await batch(db, "streams", parent=root, stream=True)
    ids = await add(db, root, 9)
    assert await claim_ids(db, worker_id, 8) == ids[:8]
    calls: dict[str, Callable[[Db], Awaitable[Any]]] = {
        "complete": lambda session: complete(session, ids[:1]),
        "fail": lambda session: fail(session, ids[1:2], permanent=True),
        "end": lambda session: end(session, ids[2:3]),
        "retry": lambda session: retry(session, ids[1]),
        "cancel": lambda session: cancel(session, ids[8]),
        "seal": lambda session: seal(session, root),
        "fail too many": lambda session: fail(session, ids[3:7], permanent=True),
        "finish": lambda session: complete(session, ids[7:8]),
        "cancel_batch": lambda session: cancel_batch(session, child),
        "delete_batch": lambda session: session.fetchval("SELECT pgworkd.delete_batch($1)", root),
        "create_batch": lambda session: batch(session, "new", dedupe_key="k"),
        "create_batch again": lambda session: create(session, "new", dedupe_key="k"),
    }
    for name, call in calls.items():
        async with other.transaction():
            before = await read_by_table(other)
            await call(other)
            await other.execute("SET CONSTRAINTS ALL IMMEDIATE")
            after = await read_by_table(other)
        for table in TABLES:
            seq, idx = (after[table][n] - before[table][n] for n in (0, 1))
            assert seq == 0, f"{name} scanned {table}"
            assert idx <= 60, f"{name} read {idx} rows of {table}"


async def test_the_pages_read_by_a_settle_do_not_depend_on_the_number_of_trees(db: Db) -> None:
    worker_id = await worker(db)
    root = await batch(db, "root")
    ids = await add(db, root, 200)
    assert len(await claim_ids(db, worker_id, 200)) == 200
    sql = "SELECT pgworkd.settle_completed($1, array_fill(1, '{10}'), array_fill('1'::text, '{10}'))"
    await complete(db, ids[:10])
    few = await blocks(db, sql, ids[10:20])
    await crowd_tables(db, TABLES, MANY, "none")
    assert await blocks(db, sql, ids[20:30]) <= few + 60


async def test_a_batch_adds_a_few_pages_to_a_settle(db: Db) -> None:
    """Two statements and one changed row, whatever the number of jobs."""
    plain = await insert_running(db, 20)
    root = await batch(db, "root")
    batched = await add(db, root, 20)
    assert await claim_ids(db, await worker(db), 20) == batched
    sql = "SELECT pgworkd.settle_completed($1, array_fill(1, '{20}'), array_fill('1'::text, '{20}'))"
    cost = await blocks(db, sql, plain)
    # One more index of the job itself, and for each job a check whether its batch streams.
    assert await blocks(db, sql, batched) <= cost + 20 * 6 + 60


async def test_a_held_snapshot_does_not_make_a_settle_scan_all_finished_jobs(db: Db, other: Db) -> None:
    """Ended jobs stay in the indexes until vacuum removes them. Only a batch that may be finished is scanned."""
    worker_id = await worker(db)
    await db.execute("ALTER TABLE pgworkd.jobs SET (autovacuum_enabled = off)")
    root = await batch(db, "root")
    await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await other.fetchval("SELECT count(*) FROM pgworkd.jobs")
    await add(db, root, 3000)
    await seal(db, root)
    sql = "SELECT pgworkd.settle_completed($1, array_fill(1, '{10}'), array_fill('1'::text, '{10}'))"
    first = await blocks(db, sql, await claim_ids(db, worker_id, 10))
    for _ in range(9):
        ids = await claim_ids(db, worker_id, 300)
        await complete(db, ids)
    assert await blocks(db, sql, await claim_ids(db, worker_id, 10)) <= first + 60
    await other.execute("ROLLBACK")
    await counted(db)
