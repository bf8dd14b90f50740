"""Dedupe keys: one job per queue and key, while it is live and until `dedupe_until`."""

from __future__ import annotations

import json
import uuid
from datetime import datetime

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Later, Notices, waits_for_lock
from tests.kits.verbs import Db

from .conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")

UNTIL = v.at(3600)
TARGET = "ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead'"


async def keyed(db: Db, key: str = "k", until: datetime | None = None, **columns: object) -> uuid.UUID:
    """Inserts a job with a key as an application would; its id."""
    job_id = await v.one(db, dedupe_key=key, **columns)
    await db.execute("UPDATE pgworkd.jobs SET dedupe_until = $2 WHERE id = $1", job_id, until)
    return job_id


async def kept(db: Db, key: str = "k", until: datetime = UNTIL) -> uuid.UUID:
    """A job that is completed and keeps its key."""
    job_id = await keyed(db, key, until)
    assert await v.claim_ids(db, await v.worker(db), 1) == [job_id]
    assert await v.complete(db, [job_id]) == {job_id}
    return job_id


async def is_free(db: Db, key: str = "k") -> bool:
    """Whether a plain INSERT gets the key; it is rolled back."""
    transaction = db.transaction()
    await transaction.start()
    try:
        await v.one(db, dedupe_key=key)
    except asyncpg.UniqueViolationError:
        return False
    finally:
        await transaction.rollback()
    return True


# While the job is live, and after


async def test_a_plain_insert_is_refused_while_the_job_is_live_and_on_conflict_works(db: Db) -> None:
    job_id = await keyed(db)
    assert not await is_free(db)
    sql = f"INSERT INTO pgworkd.jobs (queue, dedupe_key, priority) VALUES ('q', 'k', 7) {TARGET}"  # noqa: S608
    assert await db.execute(f"{sql} DO NOTHING") == "INSERT 0 0"
    assert await db.fetchval(f"{sql} DO UPDATE SET priority = excluded.priority RETURNING id") == job_id
    assert (await v.live(db, job_id))["priority"] == 7


async def ended(db: Db, how: str) -> uuid.UUID:
    """A job with this outcome that keeps its key until UNTIL."""
    waiting = how in ("cancelled while it waits", "expired")
    job_id = await keyed(db, until=UNTIL, **({"expires_at": v.at(1)} if how == "expired" else {}))
    if not waiting:
        assert await v.claim_ids(db, await v.worker(db)) == [job_id]
    if how == "completed":
        await v.complete(db, [job_id], results=['{"n": 1}'])
    elif how == "cancelled while it runs":
        await v.end(db, [job_id])
    elif how == "cancelled after a failure":
        await v.cancel(db, job_id)
        assert await v.fail(db, [job_id]) == {job_id: "cancelled"}
    elif how == "cancelled while it waits":
        await v.cancel(db, job_id)
    else:
        await v.clock(2, db)
        await db.execute("SELECT pgworkd.expire()")
    return job_id


ENDS = [
    "completed",
    "cancelled while it runs",
    "cancelled after a failure",
    "cancelled while it waits",
    "expired",
]


@pytest.mark.parametrize("how", ENDS)
async def test_a_finished_job_keeps_its_key_until_dedupe_until(db: Db, how: str) -> None:
    job_id = await ended(db, how)
    assert (await v.over(db, job_id))["status"] == how.split()[0]
    row = {name: value for name, value in (await v.live(db, job_id)).items() if value not in (None, 0, False)}
    assert row.keys() == set("id run_at created_at dedupe_until status queue payload errors dedupe_key".split())
    assert (row["status"], row["payload"], row["errors"], row["dedupe_until"]) == ("completed", "{}", "[]", UNTIL)

    await v.clock(3599.999, db)
    assert not await is_free(db)
    sql = f"INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('q', 'k') {TARGET}"  # noqa: S608
    assert await db.execute(f"{sql} DO NOTHING") == "INSERT 0 0"
    assert await db.fetchval(f"{sql} DO UPDATE SET queue = jobs.queue RETURNING id") == job_id

    await v.clock(3600, db)  # at once: no maintenance is needed
    new = await db.fetchval(f"{sql} DO NOTHING RETURNING id")
    assert await v.statuses(db, [job_id, new]) == [how.split()[0], "pending"]
    assert await db.fetchval("SELECT array_agg(id) FROM pgworkd.jobs") == [new]


async def test_no_row_is_kept_if_dedupe_until_passed_before_the_job_finished(db: Db) -> None:
    job_id = await keyed(db, until=v.at(5))
    assert await v.claim_ids(db, await v.worker(db)) == [job_id]
    await v.clock(5, db)
    assert not await is_free(db), "it runs"
    await v.complete(db, [job_id])
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


@pytest.mark.parametrize("then", ["stays", "is not cancelled", "is discarded", "ages out"])
async def test_a_dead_job_holds_no_key_and_leaves_no_row(db: Db, then: str) -> None:
    job_id = await keyed(db, until=v.at(10**8))
    assert await v.claim_ids(db, await v.worker(db)) == [job_id]
    await v.fail(db, [job_id], permanent=True)
    new = await keyed(db)
    if then == "is not cancelled":
        assert await v.cancel(db, job_id) == {}, "it has ended"
    elif then == "is discarded":
        assert await db.fetchval("SELECT pgworkd.discard($1)", [job_id]) == 1
    elif then == "ages out":
        await v.clock(86_400 * 31, db)
        await db.execute("SELECT pgworkd.prune(7, 30)")
    assert (await v.live(db, new))["status"] == "pending"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1 + (then in ("stays", "is not cancelled"))


async def test_a_queue_without_history_keeps_keys_too(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    job_id = await kept(db)
    assert not await is_free(db)
    assert await v.statuses(db, [job_id]) == [None]
    cancelled = await keyed(db, "other", UNTIL)
    await v.cancel(db, cancelled)
    assert not await is_free(db, "other")


async def test_keys_settled_in_one_batch_are_each_kept_for_their_own_time(db: Db) -> None:
    ids = [
        await keyed(db, key, until) for key, until in (("a", v.at(10)), ("b", None), ("c", v.at(20)), ("d", v.at(-1)))
    ]
    assert await v.claim_ids(db, await v.worker(db)) == ids
    assert await v.complete(db, ids) == set(ids)
    assert [await is_free(db, key) for key in "abcd"] == [False, True, False, True]
    await v.clock(10, db)
    assert [await is_free(db, key) for key in "abcd"] == [True, True, False, True]


# A row that only keeps a key is invisible


async def test_a_row_that_only_keeps_a_key_is_not_a_job(db: Db) -> None:
    job_id = await kept(db)
    worker_id = await v.worker(db)
    assert await v.statuses(db, [job_id]) == ["completed"]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queue_stats") == 0
    assert await v.claim_ids(db, worker_id) == []
    assert await db.fetch("SELECT * FROM pgworkd.next_due('{q}')") == []
    assert await v.cancel(db, job_id) == {}
    assert await v.retry(db, job_id) == set()
    assert await db.fetchval("SELECT pgworkd.discard($1)", [job_id]) == 0
    assert await v.complete(db, [job_id]) == set()
    assert await v.end(db, [job_id]) == set()
    assert await v.release(db, [job_id]) == set()
    assert await v.fail(db, [job_id]) == {}
    with pytest.raises(asyncpg.PostgresError, match="is completed, only a waiting job can be edited") as caught:
        await db.execute("SELECT pgworkd.edit($1, p_priority => 7)", job_id)
    assert caught.value.hint == "It has ended: enqueue a new one."
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1


async def test_expired_keys_are_deleted_in_steps(db: Db, other: Db) -> None:
    for number in range(5):
        await kept(db, f"k{number}", v.at(10 + number))
    await v.clock(12, db)
    await db.execute("BEGIN")
    await db.execute("SELECT FROM pgworkd.jobs WHERE dedupe_key = 'k0' FOR UPDATE")
    await v.clock(12, other)
    with anyio.fail_after(10):
        assert await other.fetchval("SELECT pgworkd.expire()") == 2, "one is locked, two have time"
    await db.execute("COMMIT")
    assert await db.fetchval("SELECT array_agg(dedupe_key::text ORDER BY dedupe_key) FROM pgworkd.jobs") == [
        "k0",
        "k3",
        "k4",
    ]
    await v.clock(99, db)
    assert [await db.fetchval("SELECT pgworkd.expire(2)") for _ in range(3)] == [2, 1, 0]


# Retry


async def dead(db: Db, until: datetime | None = None) -> uuid.UUID:
    job_id = await keyed(db, until=until)
    assert await v.claim_ids(db, await v.worker(db), 1) == [job_id]
    await v.fail(db, [job_id], permanent=True)
    return job_id


# Several sessions


async def test_an_insert_waiting_for_a_job_to_finish_meets_the_kept_key(db: Db, other: Db, third: Db) -> None:
    for until, refused in ((UNTIL, True), (None, False)):
        job_id = await keyed(db, until=until)
        assert await v.claim_ids(db, await v.worker(db)) == [job_id]
        async with anyio.create_task_group() as tasks:
            await db.execute("BEGIN")
            await v.complete(db, [job_id])
            inserting = Later(tasks, v.one(other, dedupe_key="k"))
            await waits_for_lock(third, other)
            await db.execute("COMMIT")
            if refused:
                with pytest.raises(asyncpg.UniqueViolationError):
                    await inserting.answer()
            else:
                await inserting.answer()
        await db.execute("DELETE FROM pgworkd.jobs")


@pytest.mark.parametrize("end_of_first", ["COMMIT", "ROLLBACK"])
async def test_of_two_sessions_that_want_an_expired_key_one_gets_it(
    db: Db, other: Db, third: Db, end_of_first: str
) -> None:
    await kept(db)
    await v.clock(3600, db, other)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        first = await v.one(db, dedupe_key="k")
        second = Later(tasks, v.one(other, dedupe_key="k"))
        await waits_for_lock(third, other)
        await db.execute(end_of_first)
        if end_of_first == "COMMIT":
            with pytest.raises(asyncpg.UniqueViolationError):
                await second.answer()
        winner = first if end_of_first == "COMMIT" else await second.answer()
    assert await db.fetchval("SELECT array_agg(id) FROM pgworkd.jobs") == [winner]


# Privileges and notifications


async def test_keeping_a_key_notifies_nobody(db: Db, notices: Notices, connect: Connect) -> None:
    job_id = await keyed(db, until=UNTIL)
    worker_id = await v.worker(db)
    assert await v.claim_ids(db, worker_id) == [job_id]
    await v.set_pool(db, worker_id)
    await notices.heard()
    await v.complete(db, [job_id])
    assert await notices.heard() == []
    assert len(await v.insert(await connect(), 1)) == 1
    assert await notices.queues() == ["q"]


async def test_jobs_without_a_key_cost_nothing_extra(db: Db) -> None:
    async def triggers(columns: str) -> dict[str, int]:
        sql = f"EXPLAIN (ANALYZE, FORMAT JSON) INSERT INTO pgworkd.jobs ({columns}) VALUES ('q', NULL), ('q', 'k')"  # noqa: S608
        (plan,) = json.loads(await db.fetchval(sql))
        return {trigger["Trigger Name"]: trigger["Calls"] for trigger in plan["Triggers"]}

    assert (await triggers("queue, dedupe_key"))["jobs_key_wanted"] == 1
    assert "jobs_key_wanted" not in await triggers("queue, kind")
