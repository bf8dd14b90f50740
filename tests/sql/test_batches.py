"""A batch takes jobs until it is sealed, counts every outcome, and is finished when its last job has ended."""

from __future__ import annotations

import json

import pytest

from tests.kits import verbs as v
from tests.kits.batches import add, batch, calls, counted, counts, progress, run, seal, state
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


# One batch


async def test_a_sealed_batch_is_finished_when_its_last_job_has_ended(db: Db) -> None:
    worker_id = await v.worker(db)
    batch_id = await batch(db, kind="calculate")
    ids = await add(db, batch_id, 3)
    assert [json.loads((await v.live(db, job_id))["payload"]) for job_id in ids] == [{"n": n} for n in range(3)]
    assert {(row["kind"], row["queue"], row["batch_id"]) for row in [await v.live(db, i) for i in ids]} == {
        ("calculate", "q", batch_id)
    }
    await run(db, worker_id, 2)
    assert await state(db, batch_id) == ["open"]
    assert await counts(db, batch_id) == (3, 2, 0, 0)
    assert await seal(db, batch_id) == [True]
    assert await state(db, batch_id) == ["sealed"]
    await v.clock(5, db)
    await run(db, worker_id)
    row = await progress(db, batch_id)
    assert (row["state"], row["done"], row["finished_at"], row["tree_finished_at"]) == (
        "completed",
        3,
        v.at(5),
        v.at(5),
    )
    await counted(db)


async def test_an_unsealed_batch_is_never_finished(db: Db) -> None:
    worker_id = await v.worker(db)
    batch_id = await batch(db)
    for _ in range(3):
        await add(db, batch_id)
        await run(db, worker_id)
        assert await state(db, batch_id) == ["open"]
    await seal(db, batch_id)
    assert await state(db, batch_id) == ["completed"]
    assert await seal(db, batch_id) == [False]


async def test_sealing_an_empty_batch_finishes_it(db: Db) -> None:
    batch_id = await batch(db, on_complete={"queue": "done"})
    assert await seal(db, batch_id) == [True]
    assert await state(db, batch_id) == ["completed"]
    assert len(await calls(db)) == 1


async def test_a_tree_and_its_jobs_are_created_in_one_transaction(db: Db) -> None:
    async with db.transaction():
        root = await batch(db, on_complete={"queue": "done"})
        child = await batch(db, "child", None, parent=root)
        ids = [*await add(db, root, 2), *await add(db, child, 2)]
        assert await seal(db, child, root, root) == [True, True, False]
    assert await state(db, root, child) == ["sealed", "sealed"]
    assert sorted(await run(db, await v.worker(db))) == sorted(ids)
    assert await state(db, root, child) == ["completed", "completed"]
    assert len(await calls(db)) == 1


async def test_columns_that_are_not_given_default_to_those_of_the_batch(db: Db) -> None:
    batch_id = await batch(db, queue="q", kind="k")
    (job_id,) = await add(
        db, batch_id, kind="other", queue="r", priority=7, run_at=v.at(9), max_attempts=2, timeout_s=3.0
    )
    row = await v.live(db, job_id)
    set_ = {name: row[name] for name in ("kind", "queue", "priority", "run_at", "max_attempts", "timeout_s")}
    assert tuple(set_.values()) == ("other", "r", 7, v.at(9), 2, 3.0)
    assert await add(db, batch_id, 0) == []


async def test_every_outcome_is_counted(db: Db) -> None:
    worker_id = await v.worker(db)
    batch_id = await batch(db)
    ids = await add(db, batch_id, 6)
    await v.one(db, batch_id=batch_id, expires_at=v.at(1), run_at=v.at(500))
    waiting, late = ids[5], ids[4]
    assert len(await v.claim(db, worker_id, 4)) == 4
    await v.complete(db, ids[:1])
    await v.fail(db, ids[1:2], permanent=True)
    await v.fail(db, ids[2:3])  # waits for its retry
    await v.end(db, ids[3:4])
    await v.cancel(db, waiting)
    await v.clock(2, db)
    await db.fetchval("SELECT pgworkd.expire()")
    assert await counts(db, batch_id) == (7, 1, 1, 3)
    await v.cancel(db, ids[2])
    assert await v.claim_ids(db, worker_id) == [late]
    await v.cancel(db, late)
    await v.release(db, [late])
    assert await counts(db, batch_id) == (7, 1, 1, 5)
    await seal(db, batch_id)
    assert await state(db, batch_id) == ["completed with failures"]
    await counted(db)


async def test_rescued_jobs_that_are_dead_or_cancelled_are_counted(db: Db) -> None:
    victim, rescuer = await v.worker(db), await v.worker(db)
    batch_id = await batch(db)
    dies = await v.one(db, batch_id=batch_id, max_attempts=1)
    asked, lives = await add(db, batch_id, 2)
    await seal(db, batch_id)
    await v.claim(db, victim)
    await v.cancel(db, asked)
    await v.steady(db, rescuer)
    assert await v.rescue(db, rescuer) == {dies: "dead", asked: "cancelled", lives: "failed"}
    assert await counts(db, batch_id) == (3, 0, 1, 1)
    assert await run(db, rescuer) == [lives]
    assert await state(db, batch_id) == ["completed with failures"]
    await counted(db)


# Every outcome


async def test_a_dead_job_that_is_later_discarded_or_pruned_is_counted_once(db: Db) -> None:
    batch_id = await batch(db)
    ids = await add(db, batch_id, 3)
    await v.claim(db, await v.worker(db))
    await v.fail(db, ids, permanent=True)
    assert await counts(db, batch_id) == (3, 0, 3, 0)
    assert await db.fetchval("SELECT pgworkd.discard($1)", ids[:1]) == 1
    assert await v.cancel(db, ids[1]) == {}, "it has ended"
    assert await counts(db, batch_id) == (3, 0, 3, 0)
    await counted(db)
    await v.clock(86400 * 40, db)
    await db.execute("SELECT pgworkd.prune(100, 30)")
    assert await counts(db, batch_id) == (3, 0, 3, 0)
