"""The settles find and lock the rows of their batch, in the order of the key, and read no others."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from tests.kits.sessions import NO_STATISTICS, Later, blocks, is_locked, rows_read, waits_for_lock
from tests.kits.verbs import Db, Settle, claim, complete, end, fail, insert, insert_running, one, release, worker

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]


async def _pinned_plan(db: Db, verb: str) -> list[dict[str, Any]]:
    """The plan nodes of the statement that finds the rows, taken from the function, under its settings."""
    row = await db.fetchrow(
        "SELECT prosrc, proargnames[:pronargs] AS names, oidvectortypes(proargtypes) AS types, proconfig "
        "FROM pg_proc WHERE oid = ('pgworkd.' || $1)::regproc",
        verb,
    )
    assert row is not None
    found = re.search(
        r"(DELETE FROM jobs|UPDATE jobs|SELECT j\.id).*?(RETURNING j\.(id|\*)|FOR UPDATE OF j)", row["prosrc"], re.S
    )
    assert found is not None
    statement = re.sub(r"\bp_\w+", lambda match: f"${row['names'].index(match[0]) + 1}", found[0])
    async with db.transaction():
        for setting in row["proconfig"]:
            await db.execute("SELECT set_config($1, $2, true)", *setting.split("=", 1))
        await db.execute(f"PREPARE pinned ({row['types']}) AS {statement}")
        nulls = ", ".join(["NULL"] * len(row["names"]))
        (plan,) = json.loads(await db.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE pinned ({nulls})"))
        await db.execute("DEALLOCATE pinned")
    nodes = [plan["Plan"]]
    for node in nodes:
        nodes += node.get("Plans", [])
    return nodes


@pytest.mark.parametrize("verb", ["settle_completed", "settle_failed", "settle_released", "settle_ended"])
async def test_the_plan_uses_the_primary_key_hashed_against_the_batch(db: Db, verb: str) -> None:
    """Whatever the statistics: a nested loop compares batch x batch rows, another index reads all running jobs."""
    await db.execute(NO_STATISTICS)
    running = {"status": "running", "worker_id": await worker(db), "attempts": 1}
    steps: list[Callable[[], Awaitable[Any]]] = [
        lambda: db.execute("SELECT 'never analysed'"),
        lambda: db.execute("ANALYZE pgworkd.jobs"),  # while it is empty
        lambda: insert(db, 2000, "r"),
        lambda: db.execute("ANALYZE pgworkd.jobs"),  # while nothing runs
        lambda: insert(db, 5000, **running),
        lambda: db.execute("ANALYZE pgworkd.jobs"),
    ]
    for number, step in enumerate(steps):
        await step()
        nodes = await _pinned_plan(db, verb)
        scans = [
            (n["Node Type"], n.get("Index Name")) for n in nodes if n.get("Alias") == "j" and "Scan" in n["Node Type"]
        ]
        assert scans == [("Index Scan", "jobs_pkey")], f"step {number}"
        (condition,) = [n["Index Cond"] for n in nodes if n.get("Alias") == "j" and "Index Cond" in n]
        assert "ANY ($1)" in condition, f"step {number}: not a generic plan, or not by the ids"
        joins = {n["Node Type"] for n in nodes} & {"Nested Loop", "Merge Join", "Hash Join"}
        assert joins == {"Hash Join"}, f"step {number}"


@pytest.mark.parametrize("before", [0, 2000])
async def test_settles_read_only_the_rows_they_settle(db: Db, other: Db, before: int) -> None:
    """As long as it estimates few running jobs, the planner tends to read all of them."""
    worker_id = await worker(db)
    await db.execute(NO_STATISTICS)
    await insert(db, before, "r")
    await db.execute("ANALYZE pgworkd.jobs")
    for settle in (complete, fail, release, end):  # plans of a time when nothing was running
        await settle(db, [uuid.uuid4()])
    ids = (await insert(db, 50_000, status="running", worker_id=worker_id, attempts=1))[::5]
    for session, size in ((db, 10), (other, 10), (db, 1000), (other, 1000)):
        for settle in (complete, fail, release, end):
            batch, ids = ids[:size], ids[size:]
            async with session.transaction():
                seq, idx = await rows_read(session)
                assert set(await settle(session, batch)) == set(batch)
                seq_after, idx_after = await rows_read(session)
                assert seq_after == seq, f"{settle.__name__} scanned the table"
                assert idx_after - idx <= 3 * len(batch), f"{settle.__name__} read rows it did not settle"


async def test_the_pages_read_by_a_settle_depend_on_the_batch_and_not_on_the_table(db: Db) -> None:
    worker_id = await worker(db)
    await db.execute(NO_STATISTICS)
    small = await insert(db, 10, status="running", worker_id=worker_id, attempts=1)
    await db.execute("ANALYZE pgworkd.jobs")
    ones, texts = "array_fill(1, '{10}')", "array_fill('expired'::text, '{10}')"
    delays, falses = "array_fill(1::float8, '{10}')", "array_fill(false, '{10}')"
    calls = {
        f"settle_completed($1, {ones}, array_fill('1'::text, '{{10}}'))": 0,
        f"settle_failed($1, {ones}, {delays}, {falses}, {texts}, array_fill('{{}}'::text, '{{10}}'))": 0,
        f"settle_released($1, {ones}, {delays}, {texts})": 0,
        f"settle_ended($1, {ones}, {texts}, {texts})": 0,
    }
    for call in calls:
        calls[call] = await blocks(db, f"SELECT pgworkd.{call}", small)
    ids = (await insert(db, 20_000, status="running", worker_id=worker_id, attempts=1))[::2000]
    for call, few in calls.items():
        # Ten pages of rows instead of one, and one more level of each of a dozen indexes per row.
        assert await blocks(db, f"SELECT pgworkd.{call}", ids) <= few + 10 * 20, call


# Locks


@pytest.mark.parametrize("settle", [complete, fail, release, end])
@pytest.mark.parametrize("order", ["by id", "against"])
async def test_rows_are_locked_in_the_order_of_their_key(
    db: Db, other: Db, third: Db, settle: Settle, order: str
) -> None:
    """A bitmap scan locks in physical order; with cancel and retry, which lock by id, that deadlocks (40P01)."""
    high, low = uuid.UUID(int=2), uuid.UUID(int=1)
    for job_id in (high, low):
        await one(db, id=job_id, priority=job_id.int)
    await claim(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", low)
        waiting = Later(tasks, settle(other, [low, high] if order == "by id" else [high, low]))
        await waits_for_lock(third, other)
        held = await is_locked(third, "jobs", "id", high)
        await db.execute("COMMIT")
        assert set(await waiting.answer()) == {low, high}
    assert not held, "it holds the second row while it waits for the first"


async def test_rows_of_a_batch_with_long_messages_are_locked_in_key_order_too(db: Db, other: Db, third: Db) -> None:
    """Beyond work_mem a hash join runs in batches, each in order, but not the whole: by default, 8 MB of errors."""
    ids = sorted(await insert_running(db, 200))
    await other.execute("SET work_mem = '64kB'")
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[100])
        waiting = Later(tasks, fail(other, ids, message="x" * 4096))
        await waits_for_lock(third, other)
        free = await third.fetch("SELECT id FROM pgworkd.jobs ORDER BY id FOR UPDATE SKIP LOCKED")
        await db.execute("COMMIT")
        assert len(await waiting.answer()) == 200
    assert [row["id"] for row in free] == ids[101:]
