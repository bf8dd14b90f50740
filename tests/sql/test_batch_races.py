"""Batches under several sessions: the last one finishes, nobody who adds is waited for, nothing is done twice."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from .flow import unblock
from .trees import add, batch, calls, cancel_batch, counted, counts, create, run, seal, sealed, state
from .verbs import (
    BATCH_CLOSED,
    Db,
    Later,
    Settle,
    cancel,
    claim,
    complete,
    end,
    fail,
    is_locked,
    one,
    retry,
    waits_for_lock,
    worker,
)

pytestmark = pytest.mark.usefixtures("t0")

CALLBACK = {"on_complete": {"queue": "done"}}
ADDS: dict[str, Callable[[Db, uuid.UUID], Awaitable[Any]]] = {
    "add_jobs": add,
    "insert": lambda db, batch_id: one(db, batch_id=batch_id),
    "child": lambda db, batch_id: batch(db, "child", parent=batch_id),
}


async def _die(db: Db, ids: list[uuid.UUID]) -> Any:
    return await fail(db, ids, permanent=True)


@pytest.mark.parametrize("settle", [complete, _die, end])
@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_the_last_two_jobs_end_at_the_same_instant(
    db: Db, other: Db, third: Db, settle: Settle, end_with: str
) -> None:
    root, (first, second) = await sealed(db, 2, **CALLBACK)
    await claim(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete(db, [first])
        waiting = Later(tasks, settle(other, [second]))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        await waiting.answer()
    if end_with == "ROLLBACK":
        assert await calls(db) == []
        await complete(db, [first])
    assert len(await calls(db)) == 1
    assert (await state(db, root))[0].startswith("completed")
    await counted(db)


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_two_siblings_finish_at_the_same_instant(db: Db, other: Db, third: Db, end_with: str) -> None:
    root = await batch(db, **CALLBACK)
    children = [await batch(db, name, parent=root) for name in "ab"]
    first, second = [(await add(db, child))[0] for child in children]
    await seal(db, root, *children)
    await claim(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete(db, [first])
        waiting = Later(tasks, complete(other, [second]))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        await waiting.answer()
    if end_with == "ROLLBACK":
        assert await calls(db) == []
        await complete(db, [first])
    assert await state(db, root, *children) == ["completed"] * 3
    assert len(await calls(db)) == 1
    await counted(db)


async def test_trees_do_not_wait_for_each_other(db: Db, other: Db) -> None:
    trees = [await sealed(db, 1, name) for name in "ab"]
    await claim(db, await worker(db))
    async with db.transaction():
        await complete(db, trees[0][1])
        with anyio.fail_after(5):
            await complete(other, trees[1][1])
    assert await state(db, trees[0][0], trees[1][0]) == ["completed"] * 2


async def test_a_settle_of_two_trees_locks_their_roots_in_order(db: Db, other: Db, third: Db) -> None:
    trees = sorted([await sealed(db, 1, name) for name in "ab"])
    ids = [trees[1][1][0], trees[0][1][0]]
    await claim(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT FROM pgworkd.batches WHERE id = $1 FOR NO KEY UPDATE", trees[0][0])
        settling = Later(tasks, complete(other, ids))
        await waits_for_lock(third, other)
        held = await is_locked(third, "batches", "id", trees[1][0])
        await db.execute("COMMIT")
        assert await settling.answer() == set(ids)
    assert not held, "it holds the second root while it waits for the first"


@pytest.mark.parametrize("verb", ["fail", "end", "release"])
async def test_who_frees_keys_locks_roots_before_queues(db: Db, other: Db, third: Db, verb: str) -> None:
    """Two burials in one settle, each with a root and a queue: all roots come first."""
    trees = [await batch(db, name) for name in "ab"]
    ids = [await one(db, batch_id=tree, serialize_key=f"k {tree}") for tree in trees]
    await claim(db, await worker(db))
    await cancel(db, *ids)
    calls_of: dict[str, Callable[[], Awaitable[Any]]] = {
        "fail": lambda: fail(other, ids, permanent=[True, False]),
        "end": lambda: end(other, ids, status=["cancelled", "expired"]),
        "release": lambda: other.fetchval(
            "SELECT pgworkd.settle_released($1, '{1,1}', '{NULL,NULL}', '{NULL,NULL}')", ids
        ),
    }
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT FROM pgworkd.batches WHERE id = $1 FOR NO KEY UPDATE", max(trees))
        settling = Later(tasks, calls_of[verb]())
        await waits_for_lock(third, other)
        is_free = await third.fetchval("SELECT pg_try_advisory_xact_lock(1886873446, hashtext('q'))")
        await db.execute("COMMIT")
        await settling.answer()
    assert is_free, "it holds the queue while it waits for a root"
    await counted(db)


# Adding


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
async def test_who_adds_when_a_batch_is_sealed_is_still_let_in(db: Db, other: Db, how: str, end_with: str) -> None:
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


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_who_makes_a_child_when_its_parent_could_be_finished(db: Db, other: Db, end_with: str) -> None:
    root = await batch(db, **CALLBACK)
    await other.execute("BEGIN")
    child = await batch(other, "child", parent=root)
    (job_id,) = await add(other, child)
    await seal(other, child)
    await seal(db, root)
    assert await state(db, root) == ["sealed"]
    await other.execute(end_with)
    if end_with == "COMMIT":
        assert await run(db, await worker(db)) == [job_id]
        assert await state(db, root, child) == ["completed", "completed"], "the child's end looks above, too"
    else:
        await unblock(db)
        assert await state(db, root) == ["completed"]
    assert len(await calls(db)) == 1


@pytest.mark.parametrize("how", ADDS)
@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_who_adds_while_a_batch_is_being_finished_waits_and_sees(
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
    """Whoever adds under REPEATABLE READ sees the batch as it was when the transaction began."""
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


async def test_a_seal_under_repeatable_read_is_carried_out_by_the_chores(db: Db, other: Db) -> None:
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


async def test_two_sessions_make_the_same_root_at_once(db: Db, other: Db, third: Db) -> None:
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        batch_id = await batch(db, dedupe_key="k")
        creating = Later(tasks, create(other, dedupe_key="k"))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert tuple(await creating.answer()) == (batch_id, False)


# Cancelling, replaying


async def test_jobs_that_are_being_settled_are_left_to_their_settle(db: Db, other: Db) -> None:
    batch_id, ids = await sealed(db, 3)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[0])
    with anyio.fail_after(5):
        assert await cancel_batch(db, batch_id) == (2, 0, True)
    await other.execute("COMMIT")
    assert await cancel_batch(db, batch_id) == (1, 0, False)
    assert await state(db, batch_id) == ["cancelled"]


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_a_replay_beside_the_end_of_the_last_job(db: Db, other: Db, third: Db, end_with: str) -> None:
    batch_id, (first, second) = await sealed(db, 2, **CALLBACK)
    await claim(db, await worker(db))
    await fail(db, [first], permanent=True)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete(db, [second])
        retrying = Later(tasks, retry(other, first))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        assert await retrying.answer() == (set() if end_with == "COMMIT" else {first})
    if end_with == "ROLLBACK":
        await complete(db, [second])
        assert await state(db, batch_id) == ["sealed"]
        assert await calls(db) == []
    await counted(db)
