"""Trees of batches: finished once, called back once, and deleted in the end."""

from __future__ import annotations

import json
import uuid
from typing import Any

import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.batches import add, batch, calls, cancel_batch, counted, create, progress, run, seal, sealed, state
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

CALLBACKS: dict[str, Any] = {
    "on_complete": {"queue": "done", "payload": {"ok": True}},
    "on_failure": {"queue": "failed"},
}


async def test_a_tree_is_finished_when_all_its_batches_are_and_calls_back_once(db: Db, notices: Notices) -> None:
    worker_id = await v.worker(db)
    root = await batch(db, "payroll", **CALLBACKS)
    children = [await batch(db, name, parent=root, queue=f"q{name}") for name in "ab"]
    await add(db, root)
    for child in children:
        await add(db, child)
    await seal(db, root, *children)
    await v.set_pool(db, worker_id, "done")
    for queue in ("q", "qa"):
        await run(db, worker_id, queue=queue)
        assert await calls(db) == []
    assert await state(db, root, *children) == ["completed", "completed", "sealed"]
    await notices.queues()
    await run(db, worker_id, queue="qb")
    facts = {"id": str(root), "name": "payroll", "state": "completed", "completed": 3, "dead": 0, "cancelled": 0}
    assert await calls(db) == [{"ok": True, "batch": facts}]
    assert await notices.queues() == ["done"]
    await db.fetchval("SELECT pgworkd.unblock()")
    assert len(await calls(db)) == 1
    assert await calls(db, "failed") == []


@pytest.mark.parametrize("what", ["dead", "cancelled", "expired"])
@pytest.mark.parametrize("has_on_failure", [True, False])
async def test_a_tree_with_failures_sends_on_failure_if_it_has_one(db: Db, what: str, *, has_on_failure: bool) -> None:
    root = await batch(db, on_complete={"queue": "done"}, on_failure={"queue": "failed"} if has_on_failure else None)
    child = await batch(db, "child", parent=root)
    ids = await add(db, child, 2)
    await seal(db, root, child)
    await v.claim(db, await v.worker(db))
    await v.complete(db, ids[:1])
    if what == "dead":
        await v.fail(db, ids[1:], permanent=True)
    else:
        await v.end(db, ids[1:], status=what)
    called = {queue: len(await calls(db, queue)) for queue in ("done", "failed")}
    assert called == ({"done": 0, "failed": 1} if has_on_failure else {"done": 1, "failed": 0})
    (payload,) = await calls(db, "failed" if has_on_failure else "done")
    assert payload["batch"]["state"] == "completed with failures"
    assert (payload["batch"]["completed"], payload["batch"]["dead"] + payload["batch"]["cancelled"]) == (1, 1)


async def test_a_callback_is_inserted_as_described(db: Db) -> None:
    job = {"queue": "done", "kind": "k", "payload": {"a": 1}, "priority": 5, "max_attempts": 7, "timeout_s": 2.5}
    await seal(db, await batch(db, on_complete=job | {"meta": {"m": 1}, "serialize_key": "s", "limit_key": "l"}))
    row = await db.fetchrow("SELECT * FROM pgworkd.jobs WHERE queue = 'done'")
    assert row is not None
    assert [row[n] for n in ("kind", "priority", "max_attempts", "timeout_s", "serialize_key", "limit_key")] == [
        "k",
        5,
        7,
        2.5,
        "s",
        "l",
    ]
    assert (json.loads(row["payload"])["a"], json.loads(row["meta"]), row["batch_id"]) == (1, {"m": 1}, None)


async def test_one_unfinished_root_has_a_name_and_dedupe_key(db: Db) -> None:
    first = await create(db, dedupe_key="july")
    assert (await create(db, dedupe_key="july"))["id"] == first["id"]
    assert not (await create(db, dedupe_key="july"))["created"]
    assert (await create(db, "other", dedupe_key="july"))["created"]
    assert (await create(db, queue="another", dedupe_key="july"))["created"], "a key belongs to its queue"
    assert (await create(db, dedupe_key="july"))["id"] == first["id"]
    assert (await create(db, dedupe_key="august"))["created"]
    assert (await create(db))["created"]
    await seal(db, first["id"])
    assert (await create(db, dedupe_key="july"))["created"]


@pytest.mark.parametrize("way", ["for_s", "until"])
async def test_a_finished_tree_keeps_its_key_until_dedupe_until(db: Db, way: str) -> None:
    keep = {"dedupe_for_s": 60.0} if way == "for_s" else {"dedupe_until": v.at(60)}
    first = await create(db, dedupe_key="july", **keep)
    await seal(db, first["id"])
    assert await db.fetchval("SELECT tree_finished_at IS NOT NULL FROM pgworkd.batches")
    assert tuple(await create(db, dedupe_key="july", **keep)) == (first["id"], False)
    await v.clock(59.9, db)
    assert tuple(await create(db, dedupe_key="july")) == (first["id"], False)
    await v.clock(60, db)
    assert (await create(db, dedupe_key="july", dedupe_for_s=60.0))["created"]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches WHERE dedupe_until IS NOT NULL") == 1


async def test_a_key_is_not_kept_if_dedupe_until_passed_before_the_tree_finished(db: Db) -> None:
    first = await create(db, dedupe_key="july", dedupe_for_s=60.0)
    await v.clock(61, db)
    assert not (await create(db, dedupe_key="july"))["created"], "it is not over"
    await seal(db, first["id"])
    assert (await create(db, dedupe_key="july"))["created"]


@pytest.mark.parametrize("how", ["cancel", "max_failures", "delete"])
async def test_cancelling_or_deleting_a_tree_frees_its_key(db: Db, how: str) -> None:
    first = await create(db, dedupe_key="july", dedupe_for_s=60.0, max_failures=0)
    (job_id,) = await add(db, first["id"])
    await seal(db, first["id"])
    if how == "cancel":
        await db.fetchrow("SELECT * FROM pgworkd.cancel_batch($1)", first["id"])
    else:
        await v.claim(db, await v.worker(db))
        if how == "delete":
            await v.complete(db, [job_id])
            assert not (await create(db, dedupe_key="july"))["created"]
            await db.execute("SELECT pgworkd.delete_batch($1)", first["id"])
        else:
            await v.fail(db, [job_id], permanent=True)
    assert (await create(db, dedupe_key="july"))["created"]


async def test_prune_skips_a_tree_that_keeps_its_key(db: Db) -> None:
    day_s = 86_400
    for key, days in (("short", 1), ("long", 30)):
        await seal(db, (await create(db, dedupe_key=key, dedupe_for_s=days * day_s))["id"])
    await v.clock(8 * day_s, db)
    await db.execute("SELECT pgworkd.prune(7, 30)")
    assert await db.fetchval("SELECT array_agg(dedupe_key::text) FROM pgworkd.batches") == ["long"]
    await v.clock(30 * day_s, db)
    await db.execute("SELECT pgworkd.prune(7, 30)")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"dedupe_for_s": 1.0},
        {"dedupe_key": "k", "dedupe_for_s": 0.0},
        {"dedupe_key": "k", "dedupe_for_s": 1.0, "dedupe_until": v.at(1)},
    ],
)
async def test_invalid_dedupe_periods_of_a_tree_are_refused(db: Db, wrong: dict[str, Any]) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="p_dedupe_for_s"):
        await create(db, **wrong)


async def test_creating_an_existing_child_returns_it(db: Db) -> None:
    root, other = await batch(db, "r"), await batch(db, "o")
    child = await create(db, "c", None, parent=root)
    assert tuple(await create(db, "c", None, parent=root)) == (child["id"], False)
    assert (await create(db, "c", None, parent=other))["created"]


async def test_a_tree_of_33_levels_that_stream_is_finished_from_top_to_bottom(db: Db) -> None:
    worker_id = await v.worker(db)
    ids = [await batch(db, on_complete={"queue": "done"})]
    for level in range(1, 33):
        ids.append(await batch(db, f"level {level}", None, parent=ids[-1], stream=True))
        assert (await progress(db, ids[-1]))["depth"] == level
    with pytest.raises(asyncpg.PostgresError, match="at depth 33") as caught:
        await batch(db, "too deep", None, parent=ids[-1])
    assert caught.value.sqlstate == "22023"
    await add(db, ids[0])
    await seal(db, ids[0])
    for batch_id in ids:
        assert await state(db, batch_id) == ["sealed"]
        assert len(await run(db, worker_id)) == 1
        assert await state(db, batch_id) == ["completed"]
    assert (await calls(db))[0]["batch"]["completed"] == 33
    await counted(db)


# Finished trees are deleted


async def test_prune_deletes_finished_trees_past_the_retention_of_the_history(db: Db) -> None:
    old, (root, child) = await batch(db, "old"), [await batch(db, "running"), await batch(db, "empty")]
    await batch(db, "child", parent=old, queue=None)
    grand = await batch(db, "child", parent=child, queue=None)
    await seal(
        db, root, child, old, *[r["id"] for r in await db.fetch("SELECT id FROM pgworkd.batches WHERE depth = 1")]
    )
    root = await batch(db, "open")
    await v.clock(86400 * 6.9, db)
    await db.execute("SELECT pgworkd.prune(7, 7)")
    assert await state(db, old, grand) == ["completed", "completed"]
    await v.clock(86400 * 7.1, db)
    rows = await db.fetchval("SELECT rows_deleted FROM pgworkd.prune(7, 7)")
    assert rows == 5
    assert [row["id"] for row in await db.fetch("SELECT id FROM pgworkd.batches")] == [root]


async def test_delete_batch_deletes_finished_trees_only(db: Db) -> None:
    worker_id = await v.worker(db)
    root, (job_id,) = await sealed(db, 1)
    with pytest.raises(asyncpg.PostgresError, match="tree that is not finished") as caught:
        await db.fetchval("SELECT pgworkd.delete_batch($1)", root)
    assert caught.value.sqlstate == v.BATCH_CLOSED
    await v.claim(db, worker_id)
    await v.fail(db, [job_id], permanent=True)
    assert await db.fetchval("SELECT pgworkd.delete_batch($1)", root) == 1
    assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 0
    assert await v.retry(db, job_id) == {job_id}, "it belongs to no tree any more"
    assert await run(db, worker_id) == [job_id]
    notes = await db.fetch("SELECT what, queue, before FROM pgworkd.audit WHERE job_id IS NULL")
    assert [(note["what"], note["queue"]) for note in notes] == [("delete_batch", "q")]
    assert json.loads(notes[0]["before"]) == {"batch": str(root), "name": "b"}


async def test_delete_batch_of_a_subtree(db: Db) -> None:
    root = await batch(db)
    child = await batch(db, "c", parent=root)
    grand = await batch(db, "g", parent=child)
    other = await batch(db, "o", parent=root)
    await seal(db, root, child, grand, other)
    assert await db.fetchval("SELECT pgworkd.delete_batch($1)", child) == 2
    assert {row["id"] for row in await db.fetch("SELECT id FROM pgworkd.batches")} == {root, other}


# Repair


async def test_rows_deleted_by_hand_do_not_keep_a_batch_open(db: Db) -> None:
    batch_id, ids = await sealed(db, 2, on_complete={"queue": "done"})
    await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", ids[0])
    await run(db, await v.worker(db))
    assert await state(db, batch_id) == ["sealed"]
    await db.fetchval("SELECT pgworkd.unblock()")
    assert await state(db, batch_id) == ["completed"]
    assert len(await calls(db)) == 1


async def test_a_batch_with_more_live_jobs_than_its_counter_says_is_not_finished(db: Db) -> None:
    """Counters only say when to check."""
    batch_id, ids = await sealed(db, 2)
    await db.execute("UPDATE pgworkd.batches SET added = 1")
    worker_id = await v.worker(db)
    assert await run(db, worker_id, 1) == ids[:1]
    assert await state(db, batch_id) == ["sealed"]
    await db.fetchval("SELECT pgworkd.unblock()")
    assert await state(db, batch_id) == ["sealed"]
    assert await run(db, worker_id, 1) == ids[1:]
    assert await state(db, batch_id) == ["completed"]


async def test_jobs_of_a_batch_deleted_by_hand_can_still_be_settled(db: Db) -> None:
    _, ids = await sealed(db, 4)
    await v.claim(db, await v.worker(db), 3)
    await db.execute("DELETE FROM pgworkd.batches")
    await v.complete(db, ids[:1])
    await v.fail(db, ids[1:2], permanent=True)
    await v.end(db, ids[2:3])
    await v.cancel(db, ids[3])
    assert await v.statuses(db, ids) == ["completed", "dead", "cancelled", "cancelled"]


async def test_cancel_batch_of_an_unknown_batch(db: Db) -> None:
    for call in ("cancel_batch", "delete_batch", "seal_batch"):
        with pytest.raises(asyncpg.PostgresError, match="does not exist") as caught:
            await db.fetchval(f"SELECT pgworkd.{call}($1)", uuid.uuid4())
        assert caught.value.sqlstate == v.BATCH_CLOSED
    batch_id = await batch(db)
    await seal(db, batch_id)
    assert await cancel_batch(db, batch_id) == (0, 0, False)
    assert await state(db, batch_id) == ["completed"]
