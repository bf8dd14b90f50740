"""A finished tree that is reopened by the retry of one of its dead jobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.batches import add, batch, calls, counted, create, run, seal, state
from tests.kits.verbs import Db, claim, complete, fail, retry, worker

from .test_batch_trees import CALLBACKS

pytestmark = pytest.mark.usefixtures("t0")


async def _finished_badly(db: Db, worker_id: int, **callbacks: Any) -> tuple[Any, Any, Any]:
    """A finished tree of two batches, the second streaming from the first: of two jobs the second is dead."""
    root = await batch(db, **callbacks)
    child = await batch(db, "c", "s", parent=root, stream=True)
    first, second = await add(db, root, 2)
    await seal(db, root)
    await claim(db, worker_id)
    await complete(db, [first])
    await fail(db, [second], permanent=True)
    await run(db, worker_id, queue="s")
    assert await db.fetchval("SELECT tree_finished_at IS NOT NULL FROM pgworkd.batches WHERE id = $1", root)
    return root, child, second


@pytest.mark.parametrize("both", [False, True])
async def test_a_retry_reopens_a_finished_tree_and_the_matching_callback_is_sent_once(db: Db, both: bool) -> None:
    worker_id = await worker(db)
    callbacks = CALLBACKS if both else {"on_complete": CALLBACKS["on_complete"]}
    root, child, dead = await _finished_badly(db, worker_id, **callbacks)
    assert (len(await calls(db)), len(await calls(db, "failed"))) == ((0, 1) if both else (1, 0))
    assert await retry(db, dead) == {dead}
    assert await state(db, root, child) == ["sealed", "open"]
    await counted(db)
    await run(db, worker_id)
    assert await state(db, root, child) == ["completed", "sealed"]
    await run(db, worker_id, queue="s")  # the job that completed late has been streamed
    assert await state(db, root, child) == ["completed", "completed"]
    # on_complete is not inserted if on_failure was; without on_failure it is.
    assert (len(await calls(db)), len(await calls(db, "failed"))) == ((1, 1) if both else (1, 0))
    await counted(db)


async def test_a_callback_is_sent_again_if_requested(db: Db) -> None:
    worker_id = await worker(db)
    _, _, dead = await _finished_badly(db, worker_id, on_complete=CALLBACKS["on_complete"])
    await db.fetchval("SELECT pgworkd.retry($1, p_call_back => true)", [dead])
    await run(db, worker_id)
    await run(db, worker_id, queue="s")
    assert [made["batch"]["state"] for made in await calls(db)] == ["completed with failures", "completed"]


async def test_a_tree_that_fails_again_sends_on_failure_once(db: Db) -> None:
    worker_id = await worker(db)
    root, _, dead = await _finished_badly(db, worker_id, **CALLBACKS)
    for attempt in (2, 3):
        assert await retry(db, dead) == {dead}
        await claim(db, worker_id)
        await fail(db, [dead], attempt, permanent=True)
        assert await state(db, root) == ["completed with failures"]
    assert len(await calls(db, "failed")) == 1
    await counted(db)


async def test_a_reopened_tree_does_not_take_its_key_from_the_new_holder(db: Db) -> None:
    worker_id = await worker(db)
    root, _, dead = await _finished_badly(db, worker_id, dedupe_key="july")
    other = await create(db, dedupe_key="july")
    assert other["created"]
    assert await retry(db, dead) == {dead}
    assert tuple(await create(db, dedupe_key="july")) == (other["id"], False)
    assert await state(db, root) == ["sealed"]
