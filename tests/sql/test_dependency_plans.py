"""What dependencies cost: two probes for a job without any, the others read their own by index, whatever the total."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.kits.batches import after, batch, exact, undepend
from tests.kits.flow import unblock
from tests.kits.sessions import STATISTICS, blocks, crowd_tables, read_by_table, rows_read
from tests.kits.verbs import Db, cancel, claim_ids, complete, end, fail, insert_running, live, one, statuses, worker

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

EDGES = 100_000
TABLES = ("jobs", "job_dependencies", "result_waiters", "progress", "finished_jobs")
MANY = f"""
    INSERT INTO pgworkd.jobs (queue, status, waiting_on)
    SELECT 'r', 'blocked', 10 FROM generate_series(1, {EDGES // 10});
    INSERT INTO pgworkd.job_dependencies (job_id, depends_on)
    SELECT j.id, pgworkd.new_id() FROM pgworkd.jobs j, generate_series(1, 10) WHERE j.queue = 'r';
    INSERT INTO pgworkd.result_waiters (job_id, channel, until)
    SELECT id, 'c', '2200-01-01' FROM pgworkd.jobs WHERE queue = 'r';
    INSERT INTO pgworkd.progress (job_id, at, attempt, done) SELECT id, now(), 1, 0 FROM pgworkd.jobs WHERE queue = 'r';
"""  # noqa: S608 - a number of ours


@pytest.mark.parametrize("statistics", STATISTICS)
async def test_each_verb_reads_its_own_rows_by_index(db: Db, other: Db, statistics: str) -> None:
    await crowd_tables(db, TABLES[:-1], MANY, statistics)
    ids = await insert_running(db, 6)
    rules = ("wait", "run", "cancel")
    waits = [await after(db, *ids, on_failed=rules[n % 3], queue="then") for n in range(6)]
    root = await batch(db)
    gone = await after(db, ids[0])
    calls: dict[str, Callable[[Db], Awaitable[Any]]] = {
        "complete": lambda session: complete(session, ids[:2]),
        "depend": lambda session: after(session, *ids, queue="then"),
        "cancel": lambda session: cancel(session, gone),
        "die": lambda session: fail(session, ids[2:3], permanent=True),
        "end": lambda session: end(session, ids[3:4]),
        "undepend": lambda session: undepend(session, waits[0]),
        "await": lambda session: session.fetch("SELECT * FROM pgworkd.await_results($1, 'c', 9)", [*ids, *waits]),
        "last": lambda session: complete(session, ids[4:]),
        "result": lambda session: session.fetch("SELECT * FROM pgworkd.result_of($1)", ids),
        "results": lambda session: session.fetch("SELECT * FROM pgworkd.batch_results($1)", root),
        "report": lambda session: session.fetchval(
            "SELECT pgworkd.report_progress($1, '{1,1}', '{0,1}', '{a,b}')", ids[:2]
        ),
        "why": lambda session: session.fetch("SELECT * FROM pgworkd.blocked_jobs WHERE id = $1", waits[3]),
    }
    for name, call in calls.items():
        async with other.transaction():
            before = await read_by_table(other)
            await call(other)
            await other.execute("SET CONSTRAINTS ALL IMMEDIATE")
            rows = await read_by_table(other)
        for table in TABLES:
            seq, idx = (rows[table][n] - before[table][n] for n in (0, 1))
            assert seq == 0, f"{name} scanned {table}"
            assert idx <= 150, f"{name} read {idx} rows of {table}"


async def test_the_pages_read_by_a_settle_do_not_depend_on_other_dependencies(db: Db) -> None:
    """Jobs without dependents, beside a hundred thousand dependencies: a few pages of two indexes for each."""
    sql = "SELECT pgworkd.settle_completed($1, array_fill(1, '{10}'), array_fill('1'::text, '{10}'))"
    few = await blocks(db, sql, await insert_running(db, 10))
    await db.execute("DELETE FROM pgworkd.jobs")
    await crowd_tables(db, TABLES[:-1], MANY, "none")
    # The rows of `jobs` are in other pages, each of its indexes may have a level more, and two more indexes have three.
    assert await blocks(db, sql, await insert_running(db, 10)) <= few + 10 * 20


async def test_dependents_are_not_read_by_claims_nor_by_maintenance_of_serialize_keys(db: Db) -> None:
    (first,) = await insert_running(db, queue="first")
    for _ in range(2):
        await after(db, first, serialize_key="k")
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, serialize_key, status, waiting_on)"
        " SELECT 'q', 'k', 'blocked', 1 FROM generate_series(1, 5000)"
    )
    worker_id, job_id = await worker(db), await one(db, serialize_key="k")
    async with db.transaction():
        seq, idx = await rows_read(db)
        assert await claim_ids(db, worker_id) == [job_id]
        await complete(db, [job_id])
        await unblock(db)
        seq_after, idx_after = await rows_read(db)
    assert seq_after == seq
    assert idx_after - idx < 60


@pytest.mark.parametrize("size", [1, 100])
async def test_a_fan_in_costs_the_same_for_the_first_and_the_last_dependency(db: Db, size: int) -> None:
    """One counter, however many are left: the cost of each of 10,000 settles does not depend on the others."""
    ids = await insert_running(db, 10_000)
    last = await after(db, *ids, queue="then")
    sql = f"SELECT pgworkd.settle_completed($1, array_fill(1, '{{{size}}}'), array_fill('1'::text, '{{{size}}}'))"
    first = await blocks(db, sql, ids[:size])
    await complete(db, ids[2 * size : -2 * size])
    # By then some of the indexes have a level more.
    assert await blocks(db, sql, ids[-size:]) <= first + 30 + 4 * size
    await complete(db, ids[: 2 * size])
    assert (await live(db, last))["status"] == "blocked"
    await complete(db, ids[-2 * size :])
    assert await statuses(db, [last]) == ["pending"]
    await exact(db)
