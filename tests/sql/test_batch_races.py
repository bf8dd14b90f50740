"""Batches under several sessions: the last job finishes the batch, adders block nobody, nothing is done twice."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits.batches import add, batch, calls, cancel_batch, counted, sealed, state
from tests.kits.sessions import Later, is_locked, waits_for_lock
from tests.kits.verbs import BATCH_CLOSED, Db, Settle, cancel, claim, complete, end, fail, one, retry, worker

pytestmark = [pytest.mark.usefixtures("t0"), pytest.mark.slow("several sessions in each order")]

CALLBACK = {"on_complete": {"queue": "done"}}


async def _die(db: Db, ids: list[uuid.UUID]) -> Any:
    return await fail(db, ids, permanent=True)


@pytest.mark.parametrize("settle", [complete, _die, end])
@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_the_last_two_jobs_finish_at_the_same_instant(
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
async def test_a_settle_that_frees_keys_locks_roots_before_queues(db: Db, other: Db, third: Db, verb: str) -> None:
    """Two jobs archived in one settle, each with a root and a queue: all roots are locked first."""
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


# Cancelling, retrying


async def test_cancel_batch_skips_jobs_that_are_being_settled(db: Db, other: Db) -> None:
    batch_id, ids = await sealed(db, 3)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[0])
    with anyio.fail_after(5):
        assert await cancel_batch(db, batch_id) == (2, 0, True)
    await other.execute("COMMIT")
    assert await cancel_batch(db, batch_id) == (1, 0, False)
    assert await state(db, batch_id) == ["cancelled"]


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_a_retry_concurrent_with_the_end_of_the_last_job(db: Db, other: Db, third: Db, end_with: str) -> None:
    batch_id, (first, second) = await sealed(db, 2, **CALLBACK)
    await claim(db, await worker(db))
    await fail(db, [first], permanent=True)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete(db, [second])
        retrying = Later(tasks, retry(other, first))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        assert await retrying.answer() == {first}
    assert await state(db, batch_id) == ["sealed"]
    assert len(await calls(db)) == (end_with == "COMMIT")
    if end_with == "ROLLBACK":
        await complete(db, [second])
        assert await state(db, batch_id) == ["sealed"]
        assert await calls(db) == []
    await counted(db)


@pytest.mark.parametrize("ends", ["before", "beside"])
async def test_a_stream_created_during_the_first_completion_is_refused_or_misses_nothing(
    db: Db, other: Db, third: Db, ends: str
) -> None:
    """The settle could not see the child, or waits for its commit and has to be retried."""
    root = await batch(db)
    (first,) = await add(db, root)
    await claim(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await other.execute("BEGIN")
        child = await batch(other, "child", parent=root, stream=True)
        if ends == "before":
            await complete(db, [first])
            with pytest.raises(asyncpg.PostgresError, match="would be missing in its child") as caught:
                await other.execute("COMMIT")
            assert caught.value.sqlstate == BATCH_CLOSED
            return
        await other.execute("SET CONSTRAINTS ALL IMMEDIATE")  # as far as a commit proceeds
        settling = Later(tasks, complete(db, [first]))
        await waits_for_lock(third, db)
        await other.execute("COMMIT")
        with pytest.raises(asyncpg.SerializationError, match="beside the end of jobs"):
            await settling.answer()
    assert await complete(db, [first]) == {first}
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE batch_id = $1", child) == 1
    await counted(db)


async def test_a_handlers_transaction_may_create_a_stream_for_its_own_completion(db: Db) -> None:
    root = await batch(db)
    (first,) = await add(db, root)
    await claim(db, await worker(db))
    async with db.transaction():
        child = await batch(db, "child", parent=root, stream=True)
        await complete(db, [first])
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE batch_id = $1", child) == 1
    await counted(db)
