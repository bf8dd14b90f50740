"""Streaming: each job that completes in a batch inserts one, with its payload and result, into each streaming child."""

from __future__ import annotations

import json
import uuid
from typing import Any

import asyncpg
import pytest

from tests.kits.batches import add, batch, calls, cancel_batch, counted, counts, progress, run, seal, state
from tests.kits.sessions import Notices
from tests.kits.verbs import BATCH_CLOSED, Db, cancel, claim, complete, end, fail, live, set_pool, worker

pytestmark = pytest.mark.usefixtures("t0")


async def _pair(db: Db, **options: Any) -> tuple[uuid.UUID, uuid.UUID]:
    """A root with a child that streams from it into queue r."""
    root = await batch(db, "payroll", kind="calculate", on_complete={"queue": "done"})
    return root, await batch(db, "cheques", "r", parent=root, stream=True, **options)


async def _jobs(db: Db, queue: str = "r") -> list[asyncpg.Record]:
    return await db.fetch("SELECT * FROM pgworkd.jobs WHERE queue = $1 ORDER BY created_at, id", queue)


async def test_a_completed_job_is_streamed_with_its_payload_and_result(db: Db, notices: Notices) -> None:
    worker_id = await worker(db)
    root, child = await _pair(db, kind="send")
    await add(db, root, 2, meta='{"trace": 1}')
    await set_pool(db, worker_id, "r")
    await notices.queues()
    await run(db, worker_id, 1, result='{"net": 5}')
    (job,) = await _jobs(db)
    assert json.loads(job["payload"]) == {"input": {"n": 0}, "result": {"net": 5}}
    assert (job["kind"], job["batch_id"], job["status"]) == ("send", child, "pending")
    assert json.loads(job["meta"]) == {"trace": 1}
    assert await notices.queues() == ["r"]
    assert await counts(db, child) == (1, 0, 0, 0)
    await run(db, worker_id, 1)
    assert json.loads((await _jobs(db))[1]["payload"]) == {"input": {"n": 1}, "result": None}
    await counted(db)


async def test_only_completed_jobs_are_streamed(db: Db) -> None:
    root, _ = await _pair(db)
    dies, ends, waits, completes = ids = await add(db, root, 4)
    assert len(await claim(db, await worker(db), 3)) == 3
    await fail(db, [dies], permanent=True)
    await end(db, [ends])
    await cancel(db, completes)
    assert await _jobs(db) == []
    await complete(db, [waits])
    assert [json.loads(job["payload"])["input"] for job in await _jobs(db)] == [{"n": ids.index(waits)}]


async def test_a_finished_parent_seals_the_child_it_streams_into(db: Db) -> None:
    worker_id = await worker(db)
    root, child = await _pair(db)
    by_hand = await batch(db, "by hand", "s", parent=root)
    await add(db, root, 2)
    await seal(db, root)
    await run(db, worker_id, 1)
    await run(db, worker_id, 10, "r")
    assert await state(db, root, child) == ["sealed", "open"]
    await run(db, worker_id, 1)
    assert await state(db, root, child, by_hand) == ["completed", "sealed", "open"]
    await run(db, worker_id, 10, "r")
    assert await state(db, child) == ["completed"]
    assert await calls(db) == []
    await seal(db, by_hand)
    assert len(await calls(db)) == 1
    await counted(db)


async def test_an_empty_parent_finishes_the_child_it_would_have_streamed_into(db: Db) -> None:
    root, child = await _pair(db)
    grand = await batch(db, "archive", parent=child, stream=True)
    await seal(db, root)
    assert await state(db, root, child, grand) == ["completed"] * 3
    assert len(await calls(db)) == 1


async def test_jobs_of_the_stream_kind_create_the_jobs_and_only_those_are_streamed_on(db: Db) -> None:
    """It is a live job of the batch meanwhile; if it fails, it is retried on its own, visibly."""
    worker_id = await worker(db)
    root, child = await _pair(db, kind="send", stream_kind="split")
    grand = await batch(db, "archive", "t", parent=child, stream=True)
    await add(db, root)
    await seal(db, root)
    await run(db, worker_id)
    (splits,) = await _jobs(db)
    assert (splits["kind"], splits["batch_id"]) == ("split", child)
    await claim(db, worker_id, 10, "r")
    await fail(db, [splits["id"]], delay_s=0)
    assert await state(db, root, child) == ["completed", "sealed"]
    with pytest.raises(asyncpg.PostgresError, match="is sealed"):
        await add(db, child)
    await claim(db, worker_id, 10, "r")
    made = await add(db, child, 2)
    with pytest.raises(asyncpg.PostgresError, match="is sealed"):
        await batch(db, "too late", parent=child)
    await complete(db, [splits["id"]], 2)
    with pytest.raises(asyncpg.PostgresError, match="is sealed"):
        await add(db, child)
    assert [(await live(db, job_id))["kind"] for job_id in made] == ["send", "send"]
    assert await counts(db, grand) == (0, 0, 0, 0)
    await run(db, worker_id, 10, "r")
    assert await counts(db, grand) == (2, 0, 0, 0)
    await run(db, worker_id, 10, "t")
    assert len(await calls(db)) == 1
    await counted(db)


async def test_oversized_results_are_dead_jobs_in_the_child_and_do_not_stop_the_parent(db: Db) -> None:
    worker_id = await worker(db)
    root, child = await _pair(db)
    await add(db, root, 1, {"x": "a" * 600_000})
    (large,) = await add(db, root, 1, {"x": "a" * 1_040_000})
    await seal(db, root)
    await run(db, worker_id, 1, result=json.dumps({"y": "b" * 1_040_000}))
    await run(db, worker_id, 1, result=json.dumps({"y": "b" * 1_500_000}))
    assert await state(db, root, child) == ["completed", "sealed"]
    fits, dead = await _jobs(db)
    assert len(json.loads(fits["payload"])["input"]["x"]) == 600_000
    assert (dead["status"], json.loads(dead["payload"])) == ("dead", {"source": str(large)})
    assert dead["error"] == f"input and result of job {large} are larger than 1 MiB together: let it return less"
    assert json.loads(dead["errors"])[0]["message"] == dead["error"]
    assert await counts(db, child) == (2, 0, 1, 0)
    await run(db, worker_id, queue="r")
    assert (await calls(db))[0]["batch"]["state"] == "completed with failures"
    await counted(db)


async def test_too_many_oversized_results_cancel_the_child(db: Db) -> None:
    root, child = await _pair(db, max_failures=0)
    await add(db, root, 2, {"x": "a" * 1_040_000})
    await seal(db, root)
    await run(db, await worker(db), result=json.dumps({"y": "b" * 1_500_000}))
    assert await state(db, root, child) == ["completed", "cancelled"]
    assert len(await calls(db)) == 1


async def test_nothing_is_streamed_into_a_cancelled_child(db: Db) -> None:
    worker_id = await worker(db)
    root, child = await _pair(db)
    await add(db, root, 2)
    await run(db, worker_id, 1)
    assert await cancel_batch(db, child) == (1, 0, False)
    assert await state(db, child) == ["cancelled"]
    await seal(db, root)
    await run(db, worker_id)
    assert await counts(db, child) == (1, 0, 0, 1)
    assert (await calls(db))[0]["batch"]["state"] == "completed with failures"


async def test_a_streaming_child_cannot_be_sealed_by_hand(db: Db) -> None:
    root, child = await _pair(db)
    with pytest.raises(asyncpg.PostgresError, match="cannot be sealed while payroll streams into it") as caught:
        await seal(db, child)
    assert caught.value.sqlstate == BATCH_CLOSED
    assert await seal(db, root) == [True]
    assert await seal(db, child) == [False]


async def test_a_child_cannot_stream_jobs_that_completed_before_it_was_created(db: Db) -> None:
    root = await batch(db, "payroll")
    await add(db, root)
    await batch(db, "early", parent=root, stream=True)
    await run(db, await worker(db))
    with pytest.raises(asyncpg.PostgresError, match="has completed jobs that would be missing") as caught:
        await batch(db, "late", parent=root, stream=True)
    assert caught.value.sqlstate == BATCH_CLOSED
    assert (await progress(db, await batch(db, "plain", parent=root)))["stream"] is False
