"""enqueue_once: a job with an id of the caller's own is inserted at most once, however often it is asked for."""

from __future__ import annotations

import json
import uuid
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd.client.new_job import new_ids
from tests.kits.schema import Roles
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import Db, claim_ids, complete, fail, live, worker

ID = uuid.UUID("01890000-0000-7000-8000-000000000001")


def _v7() -> uuid.UUID:
    return uuid.UUID(int=new_ids(1)[0])


async def _put(db: Db, job_id: uuid.UUID = ID, queue: str = "q", **options: Any) -> tuple[bool, bool | None, str]:
    names = "".join(f", p_{name} => ${number}" for number, name in enumerate(options, 3))
    sql = f"SELECT created, same, status FROM pgworkd.enqueue_once($1, $2{names})"  # noqa: S608 - names are ours
    row = await db.fetchrow(sql, job_id, queue, *options.values())
    assert row is not None
    return row["created"], row["same"], row["status"]


async def _ended(db: Db, how: str) -> None:
    worker_id = await worker(db)
    assert await claim_ids(db, worker_id) == [ID]
    if how == "completed":
        await complete(db, [ID])
    else:
        await fail(db, [ID], permanent=True)
    if how == "discarded":
        await db.execute("SELECT pgworkd.discard($1)", [ID])


@pytest.mark.parametrize("now", ["pending", "running", "dead", "completed", "discarded"])
async def test_a_job_that_is_there_is_not_inserted_again(db: Db, now: str) -> None:
    given = {"payload": '{"n": 12345678901234567890}', "kind": "k"}
    assert await _put(db, **given) == (True, True, "pending")
    if now == "running":
        assert await claim_ids(db, await worker(db)) == [ID]
    elif now != "pending":
        await _ended(db, now)
    status = "dead" if now == "discarded" else now
    assert await _put(db, **given) == (False, True, status)
    assert await _put(db, payload='{"n": 12345678901234567891}', kind="k") == (False, False, status)
    assert await _put(db, payload=given["payload"]) == (False, False, status)
    assert await _put(db, queue="other", **given) == (False, False, status)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 1


async def test_all_options_of_enqueue_are_there(db: Db) -> None:
    sql = "SELECT proargnames FROM pg_proc WHERE pronamespace = 'pgworkd'::regnamespace AND proname = $1"
    ours, theirs = [set(await db.fetchval(sql, name)) for name in ("enqueue_once", "enqueue")]
    assert theirs - ours == {"id", "changed", "p_on_duplicate", "p_batch"}
    await _put(db, priority=3, delay_s=60.0, max_attempts=2, timeout_s=9.0, limit_key="l", serialize_key="s")
    job = await live(db, ID)
    assert (job["priority"], job["max_attempts"], job["timeout_s"], job["limit_key"]) == (3, 2, 9, "l")


async def test_an_id_of_any_version_is_found_in_the_history(db: Db) -> None:
    for job_id in (uuid.uuid4(), uuid.uuid4(), _v7()):
        assert (await _put(db, job_id))[0]
        assert await claim_ids(db, await worker(db)) == [job_id]
        await complete(db, [job_id])
        assert await _put(db, job_id) == (False, True, "completed")


async def test_a_queue_without_history_remembers_nothing_but_a_kept_key(db: Db) -> None:
    await db.execute("SELECT pgworkd.set_queue('q', '{\"keep_s\": 0}')")
    row = await db.fetchrow(
        "SELECT * FROM pgworkd.enqueue_once($1, 'q', p_dedupe_key => 'k', p_dedupe_for_s => 60)", ID
    )
    assert (row["created"], row["keep_s"]) == (True, 0)
    await _ended(db, "completed")
    assert await _put(db) == (False, None, "gone")


async def test_two_at_once_insert_one(db: Db, other: Db) -> None:
    """The second waits for the first, and sees what has become of its job, even if that has ended since."""
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await _put(db) == (True, True, "pending")
        second = Later(tasks, _put(other))
        await waits_for_lock(db, other)
        await db.execute("COMMIT")
        assert await second.answer() == (False, True, "pending")
    async with anyio.create_task_group() as tasks:
        job_id = _v7()
        await db.execute("BEGIN")
        await _put(db, job_id)
        second = Later(tasks, _put(other, job_id))
        await waits_for_lock(db, other)
        await db.execute("ROLLBACK")
        assert await second.answer() == (True, True, "pending")


async def test_a_duplicate_key_of_another_job_is_refused(db: Db) -> None:
    await _put(db, _v7(), dedupe_key="k")
    with pytest.raises(asyncpg.UniqueViolationError, match="jobs_dedupe"):
        await _put(db, dedupe_key="k")


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_a_transaction_with_an_old_snapshot_is_refused(db: Db, isolation: str) -> None:
    async with db.transaction(isolation=isolation):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="READ COMMITTED"):
            await _put(db)


async def test_an_enqueuer_may_call_it_and_sees_no_payload(db: Db, roles: Roles) -> None:
    await _put(db, payload=json.dumps({"secret": 1}))
    async with roles.session("enqueuer") as session:
        assert await _put(session, payload=json.dumps({"secret": 2})) == (False, False, "pending")
        assert await _put(session, _v7()) == (True, True, "pending")
