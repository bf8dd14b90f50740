"""Adding to batches and sealing them while their jobs end: settles do not wait for an adder and miss no job."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits.batches import add, batch, calls, cancel_batch, counted, counts, create, run, seal, sealed, state
from tests.kits.flow import unblock
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import BATCH_CLOSED, Db, claim, complete, end, fail, one, worker

from .conftest import Connect

pytestmark = [pytest.mark.usefixtures("t0"), pytest.mark.slow("many sessions that add to one tree")]

CALLBACK = {"on_complete": {"queue": "done"}}
ADDS: dict[str, Callable[[Db, uuid.UUID], Awaitable[Any]]] = {
    "add_jobs": add,
    "insert": lambda db, batch_id: one(db, batch_id=batch_id),
    "child": lambda db, batch_id: batch(db, "child", parent=batch_id),
}


@pytest.mark.parametrize("how", ADDS)
async def test_no_settle_waits_for_a_transaction_that_adds_and_seals(db: Db, other: Db, how: str) -> None:
    batch_id = await batch(db)
    ids = await add(db, batch_id, 4)
    await claim(db, await worker(db))
    async with other.transaction():
        await ADDS[how](other, batch_id)
        await seal(other, batch_id)
        with anyio.fail_after(5):
            await complete(db, ids[:1])
            await fail(db, ids[1:2], permanent=True)
            await end(db, ids[2:3])
            await cancel_batch(db, batch_id)
            await complete(db, ids[3:])
    await counted(db)


@pytest.mark.parametrize("how", ["add_jobs", "insert"])
@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_a_transaction_that_was_adding_when_the_batch_was_sealed_may_commit(
    db: Db, other: Db, how: str, end_with: str
) -> None:
    worker_id = await worker(db)
    batch_id = await batch(db, **CALLBACK)
    ids = await add(db, batch_id)
    await other.execute("BEGIN")
    await ADDS[how](other, batch_id)
    with anyio.fail_after(5):
        await seal(db, batch_id)
    with pytest.raises(asyncpg.PostgresError, match="is sealed") as caught:
        await add(db, batch_id)
    assert caught.value.sqlstate == BATCH_CLOSED
    assert await run(db, worker_id) == ids
    assert await state(db, batch_id) == ["sealed"], "someone is adding"
    await other.execute(end_with)
    if end_with == "COMMIT":
        assert len(await run(db, worker_id)) == 1
    else:
        await unblock(db)
    assert await state(db, batch_id) == ["completed"]
    assert await counts(db, batch_id) == ((2, 2, 0, 0) if end_with == "COMMIT" else (1, 1, 0, 0))
    assert len(await calls(db)) == 1
    await counted(db)


@pytest.mark.parametrize("how", ["add_jobs", "insert"])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_jobs_committed_after_the_cancel_never_run(db: Db, other: Db, how: str, isolation: str) -> None:
    worker_id = await worker(db)
    batch_id = await batch(db, **CALLBACK)
    plain = await one(db)
    await other.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    for _ in range(3):
        await ADDS[how](other, batch_id)
    await ADDS[how](other, another := await batch(other, "another"))
    await cancel_batch(db, batch_id)
    await other.execute("COMMIT")
    if isolation == "REPEATABLE READ":  # its snapshot is older than the cancel
        await unblock(db)
    assert len(await run(db, worker_id)) == 2, "the plain job and that of the other batch"
    await unblock(db)
    assert await state(db, batch_id, another) == ["cancelled", "open"]
    assert await counts(db, batch_id) == (3, 0, 0, 3)
    assert len(await calls(db)) == 1
    assert await db.fetchval("SELECT status FROM pgworkd.all_jobs WHERE id = $1", plain) == "completed"
    await counted(db)


async def test_a_commit_after_the_cancel_waits_for_no_lock_at_a_constant_cost_per_job(
    db: Db, other: Db, third: Db
) -> None:
    batch_id = await batch(db)
    await other.execute("BEGIN")
    sql = "INSERT INTO pgworkd.jobs (queue, batch_id, payload) SELECT 'q', $1, '{}' FROM generate_series(1, 20000)"
    await other.execute(sql, batch_id)
    await cancel_batch(db, batch_id)
    await third.execute("BEGIN")
    await third.execute("SELECT pgworkd.lock_trees($1)", [batch_id])
    with anyio.fail_after(20):  # squared it would take minutes
        await other.execute("COMMIT")
    await third.execute("ROLLBACK")
    assert await claim(db, await worker(db)) == []
    await unblock(db)
    assert await state(db, batch_id) == ["cancelled"]
    assert await counts(db, batch_id) == (20000, 0, 0, 20000)


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("deep", [False, True])
async def test_a_parent_is_not_finished_while_a_child_is_being_created(
    db: Db, other: Db, end_with: str, *, deep: bool
) -> None:
    root = await batch(db, **CALLBACK)
    parent = await batch(db, "parent", parent=root) if deep else root
    await other.execute("BEGIN")
    child = await batch(other, "child", parent=parent)
    (job_id,) = await add(other, child)
    await seal(other, child)
    await seal(db, root, parent)
    assert await state(db, parent) == ["sealed"]
    await other.execute(end_with)
    if end_with == "COMMIT":
        assert await run(db, await worker(db)) == [job_id]
        assert await state(db, parent, child) == ["completed", "completed"], "the child's end looks above, too"
    else:
        await unblock(db)
        assert await state(db, parent) == ["completed"]
    assert len(await calls(db)) == 1


async def test_a_transaction_waiting_for_a_root_that_hides_it_finishes_the_tree(
    db: Db, other: Db, third: Db, connect: Connect
) -> None:
    """SKIP LOCKED also skips a row for which another session is queued next."""
    observer = await connect()
    root = await batch(db, **CALLBACK)
    one_child, another = [await batch(db, name, parent=root) for name in "ab"]
    (last,), (first, _) = await add(db, one_child), await add(db, another, 2)
    await claim(db, await worker(db))
    await third.execute("BEGIN")
    await add(third, root)
    await seal(db, root, one_child, another)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT pgworkd.lock_trees($1)", [root])
        waiting = Later(tasks, complete(other, [first]))
        await waits_for_lock(observer, other)
        await third.execute("ROLLBACK")
        await complete(db, [last])
        await db.execute("COMMIT")
        await waiting.answer()
    assert await state(db, root, one_child, another) == ["completed", "completed", "sealed"]


@pytest.mark.parametrize("how", ADDS)
@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_adding_to_a_batch_that_is_being_finished_waits_and_sees_the_result(
    db: Db, other: Db, third: Db, how: str, end_with: str
) -> None:
    batch_id, ids = await sealed(db, 1)
    await claim(db, await worker(db))
    await db.execute("UPDATE pgworkd.batches SET sealed_at = NULL")
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("UPDATE pgworkd.batches SET sealed_at = now()")
        await complete(db, ids)
        adding = Later(tasks, ADDS[how](other, batch_id))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        if end_with == "COMMIT":
            with pytest.raises(asyncpg.PostgresError, match="is finished"):
                await adding.answer()
        else:
            await adding.answer()
    await counted(db)


async def test_an_old_snapshot_adds_before_the_batch_is_finished_or_not_at_all(db: Db, other: Db) -> None:
    """A transaction that adds under REPEATABLE READ sees the batch as it was when the transaction began."""
    worker_id = await worker(db)
    batch_id = await batch(db)
    await add(db, batch_id)
    await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await other.fetchval("SELECT count(*) FROM pgworkd.jobs")
    await run(db, worker_id)
    await add(other, batch_id)  # counters have moved: no reason to fail
    await seal(db, batch_id)
    assert await state(db, batch_id) == ["sealed"]
    await other.execute("COMMIT")
    await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await other.fetchval("SELECT count(*) FROM pgworkd.jobs")
    await run(db, worker_id)
    assert await state(db, batch_id) == ["completed"]
    with pytest.raises(asyncpg.SerializationError):
        await add(other, batch_id)
    await other.execute("ROLLBACK")
    await counted(db)


async def test_an_old_snapshot_is_refused_whatever_row_locks_were_taken_before(db: Db, other: Db, third: Db) -> None:
    """For a row with several lockers, Postgres remembers that it was updated, but not that it was locked FOR UPDATE."""
    batch_id = await batch(db)
    await third.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await third.fetchval("SELECT count(*) FROM pgworkd.jobs")
    await other.execute("BEGIN")
    await add(other, batch_id)
    await seal(db, batch_id)
    async with db.transaction():
        await db.execute("SELECT pgworkd.lock_trees($1)", [batch_id])
        await other.execute("ROLLBACK")
        await db.execute("SELECT pgworkd.advance($1, true)", [batch_id])
    assert await state(db, batch_id) == ["completed"]
    with pytest.raises(asyncpg.SerializationError):
        await add(third, batch_id)


async def test_a_seal_under_repeatable_read_is_applied_by_maintenance(db: Db, other: Db) -> None:
    worker_id = await worker(db)
    batch_id = await batch(db)
    await add(db, batch_id)
    await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await seal(other, batch_id)
    await run(db, worker_id)
    await other.execute("COMMIT")
    with pytest.raises(asyncpg.PostgresError, match="is sealed"):
        await add(db, batch_id)
    assert await state(db, batch_id) == ["sealed"]
    await unblock(db)
    assert await state(db, batch_id) == ["completed"]


async def test_two_transactions_that_seal_two_trees_do_not_deadlock(db: Db, other: Db) -> None:
    trees = [await batch(db, name) for name in "ab"]
    for _ in range(5):
        for batch_id in trees:
            await add(db, batch_id)
    await other.execute("SET deadlock_timeout = '20ms'")
    await db.execute("BEGIN")
    await other.execute("BEGIN")
    await seal(db, *trees)
    await seal(other, *reversed(trees))
    await asyncio.gather(db.execute("COMMIT"), other.execute("COMMIT"))
    assert await state(db, *trees) == ["sealed", "sealed"]


async def test_two_sessions_creating_the_same_root_get_one_root(db: Db, other: Db, third: Db) -> None:
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        batch_id = await batch(db, dedupe_key="k")
        creating = Later(tasks, create(other, dedupe_key="k"))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert tuple(await creating.answer()) == (batch_id, False)
