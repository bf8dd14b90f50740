"""Jobs that depend on others: blocked until all have completed, in whatever order, number and way they end."""

from __future__ import annotations

import itertools
import uuid

import pytest

from tests.kits import verbs as v
from tests.kits.batches import after, blocked, depend, exact, run_one, undepend
from tests.kits.flow import unblock
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def test_a_job_runs_when_all_its_dependencies_have_completed(db: Db) -> None:
    worker_id = await v.worker(db)
    ids = await v.insert(db, 3)
    last = await after(db, *ids)
    assert await v.statuses(db, [last]) == ["blocked"]
    assert await v.claim_ids(db, worker_id) == ids
    for left, job_id in zip((3, 2, 1), ids, strict=True):
        assert (await v.live(db, last))["status"] == "blocked"
        assert (await blocked(db, last))[0] == left
        await v.complete(db, [job_id])
        await exact(db)
    await run_one(db, worker_id, last)
    await exact(db)


async def test_one_settle_of_all_dependencies_releases_the_job_due_from_then_on(db: Db) -> None:
    ids = await v.insert_running(db, 5)
    last, later = await after(db, *ids), await after(db, *ids, run_at=v.at(100))
    await v.clock(10, db)
    await v.complete(db, ids)
    row = await v.live(db, last)
    assert (row["status"], row["run_at"], row["waiting_on"]) == ("pending", v.at(10), 0)
    assert (await v.live(db, later))["run_at"] == v.at(100)
    await exact(db)


async def test_a_dependency_that_completed_earlier_counts_as_satisfied(db: Db) -> None:
    (done,) = await v.insert_running(db)
    other = await v.one(db)
    await v.complete(db, [done])
    async with db.transaction():
        free, waits = await v.insert(db, 2)
        assert await depend(db, free, done) == 0
        assert await depend(db, waits, done, other, other) == 1
        assert await depend(db, waits, other) == 0, "it does already"
        assert await depend(db, free) == 0, "nothing at all"
    assert await v.statuses(db, [free, waits]) == ["pending", "blocked"]
    await exact(db)


async def test_idle_pools_are_notified_when_a_dependent_is_released(db: Db, notices: Notices) -> None:
    (job_id,) = await v.insert_running(db, queue="first")
    last = await after(db, job_id)
    await v.set_pool(db, await v.worker(db))
    await notices.heard()
    await v.complete(db, [job_id])
    assert await notices.queues() == ["q"]
    assert await v.statuses(db, [last]) == ["pending"]


async def test_a_savepoint_rollback_removes_the_dependencies_made_in_it(db: Db) -> None:
    first = await v.one(db)
    async with db.transaction():
        async with db.transaction():  # a row inserted in a savepoint belongs to the same transaction
            last = await v.one(db)
        await depend(db, last, first)
        await db.execute("SAVEPOINT s")
        gone = await after(db, last)
        await db.execute("ROLLBACK TO s")
    await exact(db)
    assert (await blocked(db, last))[0] == 1
    assert await v.statuses(db, [gone]) == [None]


# Keys


async def test_a_job_blocked_by_dependencies_neither_holds_nor_blocks_its_key(db: Db) -> None:
    worker_id = await v.worker(db)
    first = await v.one(db, queue="first")
    waits = await after(db, first, serialize_key="k")
    second, third = await v.insert(db, 2, serialize_key="k")
    assert await v.claim_ids(db, worker_id) == [second]
    await v.complete(db, [second])
    assert await v.claim_ids(db, worker_id) == [third]
    await run_one(db, worker_id, first, "first")
    assert (await v.live(db, waits))["waiting_on"] == 0
    assert await v.claim_ids(db, worker_id) == [], "now it stands in line"
    assert (await v.live(db, waits))["status"] == "blocked"
    await v.complete(db, [third])
    await run_one(db, worker_id, waits)
    await unblock(db)
    await exact(db)


async def test_an_edit_changes_the_due_time_of_a_dependent_and_leaves_it_blocked(db: Db) -> None:
    last = await after(db, await v.one(db, queue="first"), serialize_key="k", dedupe_key="d")
    await db.execute("SELECT pgworkd.edit($1, p_run_at => $2)", last, v.at(5))
    sql = "SELECT changed FROM pgworkd.enqueue('q', p_dedupe_key => 'd', p_run_at => $1, p_on_duplicate => $2)"
    for how in ("reschedule", "replace"):
        assert await db.fetchval(sql, v.at(7), how)
    row = await v.live(db, last)
    assert (row["status"], row["waiting_on"], row["run_at"]) == ("blocked", 1, v.at(7))
    await unblock(db)
    assert (await v.live(db, last))["status"] == "blocked"
    await exact(db)


async def test_filters_find_jobs_blocked_by_dependencies(db: Db) -> None:
    first = await v.one(db, queue="first")
    last = await after(db, first, limit_key="x", serialize_key="s")
    sql = "SELECT ids FROM pgworkd.matching('cancel', p_queue => 'q', p_key => $1)"
    for key in (None, "x", "s"):
        assert await db.fetchval(sql, key) == [last]


# Other ways to end


async def test_undepend_releases_the_job_and_records_the_actor(db: Db) -> None:
    worker_id = await v.worker(db)
    first, second = await v.insert(db, 2, queue="first")
    last, other = await after(db, first, second), await v.one(db, run_at=v.at(9))
    await db.execute("SET pgworkd.by = 'ada'")
    assert await undepend(db, last, other, uuid.uuid4()) == [last]
    assert await undepend(db, last) == []
    await exact(db)
    (row,) = await db.fetch("SELECT who, what, job_id, before::text, after::text FROM pgworkd.audit")
    assert tuple(row)[:3] == ("ada", "undepend", last)
    assert row["before"] == '{"status": "blocked", "waiting_on": 2}'
    assert row["after"] == '{"status": "pending", "waiting_on": 0}'
    await run_one(db, worker_id, last)
    await v.claim_ids(db, worker_id, queue="first")
    await v.complete(db, [first, second])
    await exact(db)


async def test_the_view_shows_why_each_job_is_blocked(db: Db) -> None:
    dead, running, lost = await v.insert_running(db, 3)
    (plain,) = await v.insert_running(db, serialize_key="k")
    keyed = await v.one(db, serialize_key="k")
    assert await v.claim_ids(db, await v.worker(db)) == []
    last, only = await after(db, dead, running), await after(db, dead)
    waits, adrift = await after(db, running), await after(db, lost)
    await v.fail(db, [dead], permanent=True)
    await v.cancel(db, lost)
    await db.execute("SELECT pgworkd.settle_ended($1, '{1}', '{cancelled}', '{NULL}')", [lost])
    assert await blocked(db, keyed) == (0, "waits for its serialize_key", None)
    assert await blocked(db, waits) == (1, "waits for 1 job", None)
    why = f"job {dead} is dead: retry it, or undepend() this one"
    assert await blocked(db, last) == (2, f"waits for 2 jobs; {why}", dead)
    assert await blocked(db, only) == (1, f"waits for 1 job; {why}", dead)
    over = "undepend() or cancel this one"
    assert await blocked(db, adrift) == (1, f"waits for 1 job; job {lost} was cancelled: {over}", lost)
    await db.execute("SELECT pgworkd.discard($1)", [dead])
    assert await blocked(db, only) == (1, f"waits for 1 job; job {dead} was discarded: {over}", dead)
    await db.execute("DELETE FROM pgworkd.finished_jobs")
    assert await blocked(db, only) == (1, f"waits for 1 job; job {dead} is gone: {over}", dead)
    assert await undepend(db, only) == [only]
    assert await v.retry(db, plain) == set()
    await exact(db)


async def test_a_commit_checks_all_that_was_made_to_wait_once(db: Db) -> None:
    await db.execute("SET track_functions = 'pl'")
    calls = "SELECT calls FROM pg_stat_xact_user_functions WHERE funcname = 'check_dependencies'"
    async with db.transaction():
        ids = await v.insert(db, 20)
        for first, then in itertools.pairwise(ids):
            await db.execute("SELECT pgworkd.depend($1, ARRAY[$2::uuid])", then, first)
        await db.execute("SET CONSTRAINTS ALL IMMEDIATE")
        assert await db.fetchval(calls) == 1
        late = await v.one(db)
        await db.execute("SELECT pgworkd.depend($1, $2)", late, ids)
        assert await db.fetchval(calls) == 2
    assert set(await v.statuses(db, [*ids[1:], late])) == {"blocked"}
