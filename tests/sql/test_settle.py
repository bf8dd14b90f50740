"""settle_completed, settle_failed, settle_released, settle_ended: every attempt ends once, by its own worker."""

from __future__ import annotations

import json
import uuid
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import Db, Settle

pytestmark = pytest.mark.usefixtures("t0")

MIB = 1024 * 1024

VERBS = pytest.mark.parametrize("settle", [v.complete, v.fail, v.release, v.end])


async def _everything(db: Db) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await db.fetch("SELECT * FROM pgworkd.all_jobs ORDER BY id")]


# The fence, the same for all four


@VERBS
@pytest.mark.parametrize("attempt", [0, 1, 3, -1, 2**31 - 1])
async def test_settling_an_attempt_that_is_not_running_changes_nothing(db: Db, settle: Settle, attempt: int) -> None:
    (job_id,) = await v.insert_running(db)
    await v.release(db, [job_id])
    await v.claim(db, await v.worker(db))
    assert (await v.live(db, job_id))["attempts"] == 2
    before = await _everything(db)
    assert not await settle(db, [job_id], attempt)
    assert await _everything(db) == before
    assert list(await settle(db, [job_id], 2)) == [job_id]


@VERBS
@pytest.mark.parametrize("late", [v.complete, v.fail, v.release, v.end])
async def test_the_second_settle_of_an_attempt_is_reported_as_late(db: Db, settle: Settle, late: Settle) -> None:
    (job_id,) = await v.insert_running(db)
    assert list(await settle(db, [job_id])) == [job_id]
    before = await _everything(db)
    assert not await late(db, [job_id])
    assert await _everything(db) == before


@VERBS
async def test_a_job_that_is_not_running_is_not_settled(db: Db, settle: Settle) -> None:
    waiting, dead = await v.one(db), await v.one(db, status="dead")
    unknown = uuid.uuid4()
    assert not await settle(db, [waiting, dead, unknown], 0)
    assert await v.statuses(db, [waiting, dead]) == ["pending", "dead"]


@VERBS
async def test_good_and_stale_settles_may_share_a_batch(db: Db, settle: Settle) -> None:
    ids = await v.insert_running(db, 6)
    await v.release(db, ids[2:4])
    await v.claim(db, await v.worker(db))  # two of them run again, under attempt 2
    await db.execute("DELETE FROM pgworkd.jobs WHERE id = $1", ids[5])
    assert set(await settle(db, [*ids, uuid.uuid4()])) == {ids[0], ids[1], ids[4]}
    assert (await v.statuses(db, ids))[2:4] == ["running"] * 2


@VERBS
async def test_an_id_that_occurs_twice_in_a_batch_is_settled_once(db: Db, settle: Settle) -> None:
    (job_id,) = await v.insert_running(db)
    assert list(await settle(db, [job_id, job_id], [1, 7])) == [job_id]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 1


@VERBS
async def test_an_empty_batch_is_accepted(db: Db, settle: Settle) -> None:
    assert not await settle(db, [])


@VERBS
@pytest.mark.parametrize("late", [v.complete, v.fail, v.release, v.end])
async def test_of_two_concurrent_settles_one_wins(db: Db, other: Db, third: Db, settle: Settle, late: Settle) -> None:
    """solid_queue#589, oban#532: finished and failed at once."""
    (job_id,) = await v.insert_running(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert list(await settle(db, [job_id])) == [job_id]
        waiting = Later(tasks, late(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert not await waiting.answer()
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 1


@VERBS
async def test_if_the_first_of_two_settles_rolls_back_the_second_wins(
    db: Db, other: Db, third: Db, settle: Settle
) -> None:
    (job_id,) = await v.insert_running(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await v.complete(db, [job_id])
        waiting = Later(tasks, settle(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("ROLLBACK")
        assert list(await waiting.answer()) == [job_id]


@pytest.mark.parametrize(
    ("settle", "outcome"),
    [(v.complete, "completed"), (v.fail, "cancelled"), (v.release, "cancelled"), (v.end, "cancelled")],
)
async def test_a_cancel_committed_while_a_settle_waits_for_it_takes_effect(
    db: Db, other: Db, third: Db, settle: Settle, outcome: str
) -> None:
    (job_id,) = await v.insert_running(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await v.cancel(db, job_id) == {job_id: "requested"}
        waiting = Later(tasks, settle(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert list(await waiting.answer()) == [job_id]
    assert await v.statuses(db, [job_id]) == [outcome]


# Completed


async def test_completed_stores_all_columns_in_the_history(db: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(
        db, kind="k", payload='{"n": 1}', meta='{"t": 1}', priority=-4, dedupe_key="d", max_attempts=4, run_at=v.at(-9)
    )
    await v.claim(db, worker_id)
    await v.fail(db, [job_id], delay_s=2)
    await v.clock(3, db)
    await v.claim(db, worker_id)
    await v.clock(5, db)
    before = await v.live(db, job_id)
    assert await v.complete(db, [job_id], 2, ['{"r": [1, 2]}']) == {job_id}
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
    row = dict(await v.over(db, job_id))
    assert row == {name: before[name] for name in row if name in before} | {
        "status": "completed",
        "finished_at": v.at(5),
        "result": '{"r": [1, 2]}',
        "keep_until": None,
        "began_at": None,
    }
    assert (row["attempts"], row["failures"], row["started_at"], row["worker_id"]) == (2, 1, v.at(3), worker_id)
    assert len(json.loads(row["errors"])) == 1


async def test_the_history_stores_when_handlers_started(db: Db) -> None:
    ids = await v.insert_running(db, 3)
    await v.clock(9, db)
    sql = "SELECT pgworkd.settle_completed($1, '{1,1,1}', NULL, p_began_ago_s => '{2,NULL,0.5}')"
    assert sorted(await db.fetchval(sql, ids)) == sorted(ids)
    began = [await db.fetchval("SELECT started_at FROM pgworkd.all_jobs WHERE id = $1", each) for each in ids]
    assert began == [v.at(7), None, v.at(8.5)]


async def test_a_result_may_be_any_json_or_missing(db: Db) -> None:
    results = [None, "null", "7", '"text"', "[1]", "{}"]
    ids = await v.insert_running(db, len(results))
    await v.complete(db, ids, 1, results)
    assert [(await v.over(db, i))["result"] for i in ids] == results


@pytest.mark.parametrize(
    ("result", "sqlstate", "name"),
    [
        (json.dumps("a" * 2 * MIB), "23514", "result_must_not_exceed_1_mib"),
        (json.dumps("a" * 20 * MIB), "23514", "result_must_not_exceed_1_mib"),
        ('{"x": "\\u0000"}', "22P05", None),
        ("NaN", "22P02", None),
    ],
)
async def test_an_invalid_result_is_refused_by_sqlstate_class_and_nothing_is_settled(
    db: Db, result: str, sqlstate: str, name: str | None
) -> None:
    ids = await v.insert_running(db, 2)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await v.complete(db, ids, 1, ["{}", result])
    assert (caught.value.sqlstate, caught.value.constraint_name) == (sqlstate, name)
    assert await v.statuses(db, ids) == ["running"] * 2


async def test_a_payload_and_a_result_of_1_mib_are_accepted(db: Db) -> None:
    text = json.dumps({"x": "a" * (MIB - 100)})
    (job_id,) = await v.insert_running(db, payload=text)
    assert await v.complete(db, [job_id], 1, [text]) == {job_id}
    row = await v.over(db, job_id)
    assert row["payload"] == row["result"] == text


async def test_a_queue_without_history_keeps_no_completed_jobs(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0), ('other', 1), ('null', NULL)")
    gone = await v.insert_running(db, 3)
    assert await v.complete(db, gone, 1, ["1"] * 3) == set(gone)
    kept = []
    for queue in ("other", "null", "without a row"):
        ids = await v.insert(db, 1, queue)
        await v.claim(db, await v.worker(db), queue=queue)
        assert await v.complete(db, ids) == set(ids)
        kept += ids
    assert await v.statuses(db, [*gone, *kept]) == [None] * 3 + ["completed"] * 3


async def test_a_row_is_stored_in_the_partition_of_its_day_or_in_the_default_one(db: Db) -> None:
    here, far = await v.insert_running(db, 2)
    await v.complete(db, [far])
    await db.execute("RESET pgworkd.clock")
    await v.complete(db, [here])
    rows = await db.fetch("SELECT id, finished_at, tableoid::regclass::text FROM pgworkd.finished_jobs")
    today = next(row["finished_at"] for row in rows if row["id"] == here)
    assert {row["id"]: row["tableoid"] for row in rows} == {
        here: f"pgworkd.finished_jobs_{today:%Y%m%d}",
        far: "pgworkd.finished_jobs_other",
    }


# Ended


async def test_settle_ended_archives_as_cancelled_or_expired(db: Db) -> None:
    ids = await v.insert_running(db, 4, payload='{"n": 1}')
    await v.clock(5, db)
    outcomes = ["cancelled", "expired", "cancelled", "expired"]
    assert await v.end(db, ids, status=outcomes, message="because") == set(ids)
    assert await v.statuses(db, ids) == outcomes
    row = await v.over(db, ids[0])
    assert (row["finished_at"], row["error"], row["payload"], row["result"]) == (v.at(5), "because", '{"n": 1}', None)
    assert (row["attempts"], row["started_at"]) == (1, v.T0)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_settle_ended_without_a_message_keeps_the_last_error(db: Db) -> None:
    (job_id,) = await v.insert_running(db)
    await v.fail(db, [job_id], delay_s=0, message="first")
    await v.claim(db, await v.worker(db))
    await v.end(db, [job_id], 2)
    assert (await v.over(db, job_id))["error"] == "first"


@pytest.mark.parametrize("status", ["running", "pending", "nonsense"])
async def test_settle_ended_refuses_any_other_status(db: Db, status: str) -> None:
    (job_id,) = await v.insert_running(db)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await v.end(db, [job_id], status=status)
    assert caught.value.sqlstate in {"23514", "22P02"}
    assert await v.statuses(db, [job_id]) == ["running"]


@pytest.mark.parametrize("settle", [v.fail, v.end])
async def test_a_queue_without_history_keeps_no_cancelled_or_expired_jobs(db: Db, settle: Settle) -> None:
    """keep_s = 0 means no history, whatever the outcome."""
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    (job_id,) = await v.insert_running(db)
    await v.cancel(db, job_id)
    await settle(db, [job_id])
    assert await v.statuses(db, [job_id]) == [None]
