"""edit: a waiting job can be changed, any other is refused, and no job waiting for the same key is left behind."""

from __future__ import annotations

import json
import uuid
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Later, Notices, waits_for_lock
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def edit(db: Db, job_id: uuid.UUID, **changes: Any) -> dict[str, Any]:
    """edit(); the columns that have changed."""
    sql = "SELECT pgworkd.edit($1, $2, $3, $4)"
    values = (changes.get(name) for name in ("payload", "run_at", "priority"))
    answer: dict[str, Any] = json.loads(await db.fetchval(sql, job_id, *values))
    return answer


async def in_line(db: Db, *run_ats: float, key: str = "k", **columns: Any) -> list[uuid.UUID]:
    """Jobs of one serialize_key, due in this order."""
    return [await v.one(db, serialize_key=key, run_at=v.at(s), **columns) for s in run_ats]


async def drain(db: Db) -> list[uuid.UUID]:
    """Claims and completes until nothing is due; the ids in the order of their runs."""
    worker_id, ran = await v.worker(db), []
    while rows := await v.claim(db, worker_id):
        ids = [row["id"] for row in rows]
        assert await v.complete(db, ids, [row["attempt"] for row in rows]) == set(ids)
        ran += ids
    return ran


async def test_given_columns_change_and_the_rest_stay(db: Db) -> None:
    await db.execute("SET timezone = 'UTC'")
    job_id = await v.one(db, payload='{"a": 1}', priority=2, run_at=v.at(60))
    assert await edit(db, job_id, priority=7) == {"priority": 7}
    assert await edit(db, job_id, payload='{"a": 2}', run_at=v.at(30)) == {
        "payload": {"a": 2},
        "run_at": "2100-06-15T12:00:30+00:00",
    }
    row = await v.live(db, job_id)
    assert (row["payload"], row["priority"], row["run_at"], row["status"]) == ('{"a": 2}', 7, v.at(30), "pending")
    rows = await db.fetch("SELECT before, after FROM pgworkd.audit ORDER BY id")
    assert [tuple(map(json.loads, row)) for row in rows] == [
        ({"priority": 2}, {"priority": 7}),
        (
            {"payload": {"a": 1}, "run_at": "2100-06-15T12:01:00+00:00"},
            {"payload": {"a": 2}, "run_at": "2100-06-15T12:00:30+00:00"},
        ),
    ]


async def test_unchanged_values_are_not_reported_as_a_change(db: Db, notices: Notices) -> None:
    job_id = await v.one(db, payload='{"a": 1}', priority=2)
    await v.set_pool(db, await v.worker(db))
    await notices.heard()
    assert await edit(db, job_id, payload='{"a": 1}', priority=2, run_at=v.T0) == {}
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit") == 0
    assert await notices.heard() == []


async def test_a_job_waiting_for_its_retry_keeps_its_status(db: Db) -> None:
    job_id = await v.one(db)
    await v.claim(db, await v.worker(db))
    await v.fail(db, [job_id], delay_s=600)
    assert "run_at" in await edit(db, job_id, run_at=v.at(5))
    row = await v.live(db, job_id)
    assert (row["status"], row["run_at"], row["failures"]) == ("failed", v.at(5), 1)


@pytest.mark.parametrize(
    ("state", "hint"),
    [
        ("running", "Cancel it"),
        ("dead", "Pause its queue, retry the job"),
        ("completed", "It has ended"),
        ("unknown", "Check the id"),
    ],
)
async def test_a_job_that_is_not_waiting_is_refused_with_its_status_and_a_remedy(db: Db, state: str, hint: str) -> None:
    job_id = uuid.uuid4() if state == "unknown" else await v.one(db)
    await v.claim(db, await v.worker(db))
    if state == "dead":
        await v.fail(db, [job_id], permanent=True)
    if state == "completed":
        await v.complete(db, [job_id])
    before = await db.fetch("SELECT * FROM pgworkd.all_jobs")
    with pytest.raises(asyncpg.PostgresError) as caught:
        await edit(db, job_id, priority=1)
    assert caught.value.sqlstate == "PW002"
    assert f"job {job_id} is {state}, only a waiting job can be edited" in str(caught.value)
    assert hint in str(caught.value)
    assert await db.fetch("SELECT * FROM pgworkd.all_jobs") == before
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit") == 0


@pytest.mark.parametrize("ended", ["completed", "cancelled"])
async def test_a_finished_job_that_keeps_its_key_is_reported_as_finished(db: Db, ended: str) -> None:
    job_id = await v.one(db, dedupe_key="k", dedupe_until=v.at(600))
    if ended == "cancelled":
        await v.cancel(db, job_id)
    else:
        await v.claim(db, await v.worker(db))
        await v.complete(db, [job_id])
    with pytest.raises(asyncpg.PostgresError, match=f"is {ended}, only a waiting job can be edited") as caught:
        await edit(db, job_id, priority=1)
    assert "It has ended" in str(caught.value)
    assert await v.cancel(db, job_id) == {}
    assert await db.fetchval("SELECT ids FROM pgworkd.matching('cancel', 'q')") == []
    assert await db.fetchval("SELECT ids FROM pgworkd.matching('cancel', 'q', p_key => 'k')") == []


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "22023"),
        ({"payload": "[1]"}, "23514"),
        ({"payload": "null"}, "23514"),
        ({"payload": json.dumps({"a": "x" * 2**21})}, "23514"),
        ({"run_at": v.at(200 * 366 * 86_400)}, "23514"),
    ],
    ids=["nothing", "array", "null", "too large", "too late"],
)
async def test_values_out_of_bounds_are_refused(db: Db, changes: dict[str, Any], state: str) -> None:
    job_id = await v.one(db)
    with pytest.raises(asyncpg.PostgresError) as caught:
        await edit(db, job_id, **changes)
    assert caught.value.sqlstate == state
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit") == 0


# Concurrent claims


async def test_an_edit_waits_for_a_concurrent_claim_and_is_refused(db: Db, other: Db, third: Db) -> None:
    worker_id, job_id = await v.worker(db), await v.one(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await v.claim(db, worker_id)
        editing = Later(tasks, edit(other, job_id, payload='{"late": true}'))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        with pytest.raises(asyncpg.PostgresError, match="is running"):
            await editing.answer()
    assert (await v.live(db, job_id))["payload"] == "{}"


async def test_a_claim_skips_a_job_being_edited_and_later_takes_the_edited_one(db: Db, other: Db) -> None:
    worker_id, job_id = await v.worker(db), await v.one(db)
    await other.execute("BEGIN")
    await edit(other, job_id, payload='{"a": 2}')
    assert await v.claim_ids(db, worker_id) == []
    await other.execute("COMMIT")
    assert [(row["id"], row["payload"]) for row in await v.claim(db, worker_id)] == [(job_id, '{"a": 2}')]


@pytest.mark.parametrize("idle", [True, False])
async def test_pools_are_notified_of_the_new_due_time(db: Db, notices: Notices, idle: bool) -> None:
    job_id = await v.one(db, run_at=v.at(3600))
    await v.set_pool(db, await v.worker(db), idle=idle)
    await edit(db, job_id, run_at=v.at(-5))
    await edit(db, job_id, priority=3)
    await edit(db, job_id, payload='{"a": 1}')
    assert await notices.heard() == [{"queue": "q", "run_at": v.at(-5).timestamp()}] * 2, "a payload moves nothing"


# With a serialize key


async def test_a_blocked_job_moved_to_the_front_of_its_key_runs_next(db: Db) -> None:
    first, second, third = await in_line(db, 0, 0, 0)
    worker_id = await v.worker(db)
    assert await v.claim_ids(db, worker_id) == [first]
    assert await v.statuses(db, [second, third]) == ["blocked", "blocked"]
    assert (await edit(db, third, run_at=v.at(-9)))["status"] == "pending"
    assert await v.claim_ids(db, worker_id) == [], "the key is held"
    await v.complete(db, [first])
    assert await drain(db) == [third, second]


async def test_when_the_first_job_of_a_key_is_postponed_the_next_one_runs(db: Db) -> None:
    first, second, third = await in_line(db, 0, 0, 0)
    holder = await v.worker(db)
    assert await v.claim_ids(db, holder) == [first]
    await v.complete(db, [first])
    assert await v.statuses(db, [second, third]) == ["pending", "blocked"]
    await edit(db, second, run_at=v.at(600))
    assert await drain(db) == [third]
    await v.clock(600, db)
    assert await drain(db) == [second]


async def test_a_blocked_job_that_is_postponed_leaves_the_waiters_until_due(db: Db) -> None:
    first, second = await in_line(db, 0, 0)
    assert await v.claim_ids(db, await v.worker(db)) == [first]
    await edit(db, second, run_at=v.at(600))
    assert (await v.live(db, second))["status"] == "pending"
    await v.complete(db, [first])
    assert await drain(db) == []
    await v.clock(600, db)
    assert await drain(db) == [second]


async def test_a_retry_that_holds_its_key_keeps_it(db: Db) -> None:
    first, second = await in_line(db, 0, 0)
    await v.claim(db, await v.worker(db))
    await v.fail(db, [first], delay_s=60)
    await edit(db, first, run_at=v.at(3600))
    assert await drain(db) == [], "strict order: it is still its turn"
    await edit(db, first, run_at=v.at(0))
    assert await drain(db) == [first, second]


async def test_a_new_priority_or_payload_does_not_change_the_order_of_a_key(db: Db) -> None:
    first, second, third = await in_line(db, 0, 0, 0)
    await v.claim(db, await v.worker(db))
    assert await edit(db, third, priority=9, payload='{"a": 1}') == {"payload": {"a": 1}, "priority": 9}
    assert (await v.live(db, third))["status"] == "blocked"
    await v.complete(db, [first])
    assert await drain(db) == [second, third]
