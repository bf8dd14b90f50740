"""Cancelling batches: by hand, by too many failures, in bounded steps; concurrent operations leave it consistent."""

from __future__ import annotations

import json

import pytest

from tests.kits import verbs as v
from tests.kits.batches import add, batch, calls, cancel_batch, counted, counts, run, seal, sealed, state
from tests.kits.flow import HOLDERS, run_all, unblock
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def test_cancel_batch_cancels_waiting_jobs_requests_it_of_running_and_recurses(db: Db, notices: Notices) -> None:
    worker_id = await v.worker(db)
    root = await batch(db, on_complete={"queue": "done"})
    child = await batch(db, "child", parent=root)
    grand = await batch(db, "grand", parent=child)
    other = await batch(db, "other", parent=root)
    (running,) = await add(db, child)
    assert await v.claim_ids(db, worker_id) == [running]
    waiting = [*await add(db, child), *await add(db, grand, 2)]
    (outside,) = await add(db, other)
    await notices.heard()
    assert await cancel_batch(db, child) == (3, 1, False)
    assert await notices.heard() == [{"worker": worker_id}]
    assert await v.statuses(db, waiting) == ["cancelled"] * 3
    answer = await v.heartbeat(db, worker_id)
    assert answer is not None
    assert answer["cancel_ids"] == [running]
    assert await state(db, root, child, grand, other) == ["open", "cancelling", "cancelled", "open"]
    assert await cancel_batch(db, child) == (0, 0, False)
    await v.end(db, [running])
    assert await state(db, child) == ["cancelled"]
    await seal(db, root, other)
    assert await run(db, worker_id) == [outside]
    facts = (await calls(db))[0]["batch"]
    assert (facts["state"], facts["completed"], facts["cancelled"]) == ("completed with failures", 1, 4)
    await counted(db)


async def test_cancel_batch_is_recorded_once(db: Db) -> None:
    batch_id, _ = await sealed(db, 1)
    await v.claim(db, await v.worker(db))
    await cancel_batch(db, batch_id)
    await cancel_batch(db, batch_id)
    (note,) = await db.fetch("SELECT what, queue, job_id, before, after FROM pgworkd.audit")
    assert tuple(note[:3]) == ("cancel_batch", "q", None)
    assert json.loads(note["before"]) == {"batch": str(batch_id), "cancelled_at": None}


async def test_a_large_batch_is_cancelled_in_bounded_steps(db: Db) -> None:
    batch_id, _ = await sealed(db, 10)
    assert await cancel_batch(db, batch_id, 4) == (4, 0, True)
    assert await state(db, batch_id) == ["cancelling"]
    assert await cancel_batch(db, batch_id, 4) == (4, 0, True)
    assert await cancel_batch(db, batch_id, 4) == (2, 0, False)
    assert await state(db, batch_id) == ["cancelled"]
    await counted(db)


async def test_maintenance_continues_a_cancellation_that_was_begun(db: Db) -> None:
    worker_id = await v.worker(db)
    batch_id = await batch(db)
    keyed = [await v.one(db, batch_id=batch_id, serialize_key="k") for _ in range(3)]
    outside = await v.one(db, serialize_key="k")
    assert [row["id"] for row in await v.claim(db, worker_id)] == keyed[:1]
    assert await v.statuses(db, keyed) == ["running", "blocked", "blocked"]
    await add(db, batch_id, 3)
    await cancel_batch(db, batch_id, 1)
    await unblock(db)
    assert await v.statuses(db, keyed) == ["running", "cancelled", "cancelled"]
    assert (await v.live(db, keyed[0]))["cancel_requested_at"] is not None
    await v.end(db, keyed[:1])
    assert await state(db, batch_id) == ["cancelled"]
    assert await db.fetch(HOLDERS) == []
    assert await run_all(db, worker_id) == [outside]
    await counted(db)


async def test_a_batch_with_too_many_dead_jobs_is_cancelled_with_its_subtree(db: Db) -> None:
    worker_id = await v.worker(db)
    root = await batch(db, on_failure={"queue": "done"}, max_failures=1)
    child = await batch(db, "child", "r", parent=root)
    ids = await add(db, root, 6)
    below = await add(db, child, 2)
    assert len(await v.claim(db, worker_id, 3)) == 3
    await v.fail(db, ids[:1], permanent=True)
    assert await state(db, root) == ["open"]
    await v.fail(db, ids[1:2], permanent=True)
    assert await v.statuses(db, ids) == ["dead", "dead", "running", "cancelled", "cancelled", "cancelled"]
    assert await v.statuses(db, below) == ["cancelled"] * 2
    assert (await v.live(db, ids[2]))["cancel_requested_at"] is not None
    assert await state(db, root, child) == ["cancelling", "cancelled"]
    assert await v.retry(db, ids[0]) == set(), "it was stopped"
    await v.complete(db, ids[2:3])
    assert await state(db, root) == ["cancelled"]
    assert await counts(db, root) == (6, 1, 2, 3)
    assert (await calls(db))[0]["batch"] | {"id": None} == {
        "id": None,
        "name": "b",
        "state": "cancelled",
        "completed": 1,
        "dead": 2,
        "cancelled": 5,
    }
    await counted(db)


async def test_max_failures_0_allows_no_failure_and_null_allows_any_number(db: Db) -> None:
    worker_id = await v.worker(db)
    strict, lenient = await batch(db, "strict", max_failures=0), await batch(db, "lenient", "r")
    for batch_id, queue in ((strict, "q"), (lenient, "r")):
        ids = await add(db, batch_id, 3)
        await v.claim(db, worker_id, 2, queue)
        await v.fail(db, ids[:2], permanent=True)
    assert await state(db, strict, lenient) == ["cancelled", "open"]


async def test_a_settle_cancels_a_thousand_jobs_at_once_and_none_with_a_key(db: Db) -> None:
    """It holds the root and must lock no queue to free a key: a settle locks all of its queues at once."""
    worker_id = await v.worker(db)
    batch_id = await batch(db, max_failures=0)
    first, second = await add(db, batch_id, 2)
    assert await v.claim_ids(db, worker_id) == [first, second]
    await v.one(db, batch_id=batch_id, serialize_key="k")
    await add(db, batch_id, 1200)
    await v.fail(db, [first], permanent=True)
    assert await counts(db, batch_id) == (1203, 0, 1, 1000)
    await v.complete(db, [second])
    assert await counts(db, batch_id) == (1203, 1, 1, 1200)
    assert await state(db, batch_id) == ["cancelling"]
    await unblock(db)
    assert await state(db, batch_id) == ["cancelled"]
    await counted(db)


async def test_cancelling_every_job_does_not_cancel_the_batch(db: Db) -> None:
    batch_id, ids = await sealed(db, 2)
    await v.cancel(db, *ids)
    assert await state(db, batch_id) == ["completed with failures"]
