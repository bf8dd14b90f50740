"""Schedules: each occurrence once, the next one in the settle's own transaction."""

from __future__ import annotations

import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Notices
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def test_an_occurrence_is_a_job_as_its_schedule_defines_it(db: Db) -> None:
    await v.put_schedule(db, queue="m", kind="k", payload='{"n": 1}')
    await db.execute("UPDATE pgworkd.schedules SET priority = 3, max_attempts = 7, timeout_s = 2.5")
    assert await v.add_occurrences(db, ("s", v.at(60), 2)) == ["s"]
    job = await db.fetchrow("SELECT * FROM pgworkd.jobs")
    assert job is not None
    assert (job["queue"], job["kind"], job["payload"], job["schedule"]) == ("m", "k", '{"n": 1}', "s")
    assert (job["priority"], job["max_attempts"], job["timeout_s"]) == (3, 7, 2.5)
    assert (job["run_at"], job["occurrence"], job["status"]) == (v.at(60), v.at(60), "pending")
    assert (await v.schedule(db))["last_occurrence"] == v.at(60)
    await v.clock(60, db)
    (row,) = await v.claim(db, await v.worker(db), queue="m")
    assert (row["schedule"], row["occurrence"]) == ("s", v.at(60).timestamp())


@pytest.mark.parametrize("status", ["pending", "running"])
async def test_no_occurrence_is_added_while_one_is_live(db: Db, status: str) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    job_id = await v.due_occurrence(db, worker_id)
    if status == "pending":
        await v.release(db, [job_id])
    assert await v.add_occurrences(db, ("s", v.at(60), 1)) == []
    assert await v.occurrences(db) == [(v.T0, status)]
    assert (await v.schedule(db))["last_occurrence"] == v.T0


async def test_a_dead_occurrence_does_not_stop_the_chain(db: Db) -> None:
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await v.fail(db, [job_id], permanent=True)
    assert await v.add_occurrences(db, ("s", v.at(60), 1)) == ["s"]
    assert await v.occurrences(db) == [(v.T0, "dead"), (v.at(60), "pending")]


async def test_a_schedule_never_goes_back_in_time_nor_repeats_an_instant(db: Db) -> None:
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await v.end(db, [job_id])
    for instant in (v.T0, v.at(-60)):
        assert await v.add_occurrences(db, ("s", instant, 1)) == []
    assert await v.add_occurrences(db, ("s", v.at(0.001), 1)) == ["s"]


async def test_no_occurrence_is_added_for_a_stale_revision_or_a_disabled_schedule(db: Db) -> None:
    await v.put_schedule(db, "off")
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    await v.put_schedule(db)
    assert await v.add_occurrences(db, ("s", v.at(60), 2), ("off", v.at(60), 2), ("unknown", v.at(60), 1)) == []
    assert await v.add_occurrences(db, ("s", v.at(60), 0)) == []
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_several_schedules_in_one_call(db: Db) -> None:
    for name in ("b", "a", "c"):
        await v.put_schedule(db, name)
    await v.add_occurrences(db, ("c", v.at(60), 1))
    assert await v.add_occurrences(db, ("c", v.at(120), 1), ("b", v.at(60), 1), ("a", v.at(60), 1)) == ["a", "b"]


async def test_two_concurrent_sessions_add_one_occurrence(db: Db, other: Db) -> None:
    """oban#1488: a stale leader doubled the cron jobs for 19 days."""
    await v.put_schedule(db)
    await db.execute("BEGIN")
    assert await v.add_occurrences(db, ("s", v.at(60), 1)) == ["s"]
    # The second has computed the same instant, or believes it is later already. It does not wait.
    assert await v.add_occurrences(other, ("s", v.at(120), 1)) == []
    await db.execute("COMMIT")
    assert await v.add_occurrences(other, ("s", v.at(120), 1)) == []
    assert await v.occurrences(db) == [(v.at(60), "pending")]


async def test_a_rolled_back_addition_leaves_the_instant_to_the_next_call(db: Db, other: Db) -> None:
    await v.put_schedule(db)
    await db.execute("BEGIN")
    await v.add_occurrences(db, ("s", v.at(60), 1))
    assert await v.add_occurrences(other, ("s", v.at(60), 1)) == []
    await db.execute("ROLLBACK")
    assert await db.fetchval("SELECT broken FROM pgworkd.ensure_schedules()"), "the next check finds it"
    assert await v.add_occurrences(other, ("s", v.at(60), 1)) == ["s"]


async def test_a_locked_schedule_is_skipped_and_the_others_of_the_call_are_not(db: Db, other: Db, third: Db) -> None:
    """Two sessions may name them in any order: a session that never waits cannot deadlock."""
    for name in ("a", "b", "c"):
        await v.put_schedule(db, name)
    await third.execute("BEGIN")
    await third.execute("SELECT FROM pgworkd.schedules WHERE name = 'a' FOR UPDATE")
    async with db.transaction():
        assert await v.add_occurrences(db, ("c", v.at(60), 1), ("a", v.at(60), 1)) == ["c"]
        assert await v.add_occurrences(other, ("a", v.at(60), 1), ("b", v.at(60), 1), ("c", v.at(60), 1)) == ["b"]
    await third.execute("COMMIT")
    assert await v.add_occurrences(other, ("a", v.at(60), 1), ("b", v.at(60), 1), ("c", v.at(60), 1)) == ["a"]


async def test_one_failing_schedule_does_not_affect_the_others_of_the_call(db: Db) -> None:
    """An existing row for that instant must not raise 23505 for all."""
    await v.put_schedule(db, "a")
    await v.put_schedule(db, "b")
    sql = "INSERT INTO pgworkd.jobs (queue, schedule, occurrence, status) VALUES ('q', 'a', $1, 'dead')"
    await db.execute(sql, v.at(60))
    assert "b" in await v.add_occurrences(db, ("a", v.at(60), 1), ("b", v.at(60), 1))


async def test_a_due_occurrence_notifies_an_idle_pool(db: Db, notices: Notices) -> None:
    await v.put_schedule(db)
    await v.set_pool(db, await v.worker(db))
    await notices.heard()
    await v.add_occurrences(db, ("s", v.at(1), 1))
    assert await notices.queues() == ["q"]


# The settle's transaction


async def test_completed_adds_the_next_occurrence_in_the_same_transaction(db: Db, other: Db) -> None:
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await db.execute("BEGIN")
    assert await v.complete_occurrence(db, job_id, "s", v.at(60))
    assert await v.occurrences(other) == [(v.T0, "running")]
    await db.execute("COMMIT")
    assert await v.occurrences(db) == [(v.at(60), "pending")]
    row = await v.over(db, job_id)
    assert (row["schedule"], row["occurrence"], row["status"]) == ("s", v.T0, "completed")


async def test_a_settle_whose_schedule_is_locked_notifies_daemons_to_check(db: Db, other: Db, notices: Notices) -> None:
    """Otherwise the next occurrence would wait for their periodic check, half a minute later."""
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.schedules FOR UPDATE")
    await notices.heard()
    assert await v.complete_occurrence(db, job_id, "s", v.at(60))
    assert {"schedules": True} in await notices.heard()
    await other.execute("ROLLBACK")
    assert await v.add_occurrences(db, ("s", v.at(60), 1)) == ["s"]


async def test_failed_adds_the_next_occurrence_and_dead_adds_none_beside_it(db: Db) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    job_id = await v.due_occurrence(db, worker_id)
    assert await v.fail(db, [job_id], delay_s=0, following=("s", v.at(60), 1)) == {job_id: "failed"}
    assert await v.occurrences(db) == [(v.T0, "failed"), (v.at(60), "pending")]
    await v.claim(db, worker_id)
    assert await v.fail(db, [job_id], 2, permanent=True, following=("s", v.at(60), 1)) == {job_id: "dead"}
    assert await v.occurrences(db) == [(v.T0, "dead"), (v.at(60), "pending")]


async def test_a_late_settle_adds_nothing(db: Db) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    job_id = await v.due_occurrence(db, worker_id)
    await v.release(db, [job_id])
    await v.claim(db, worker_id)
    assert not await v.complete_occurrence(db, job_id, "s", v.at(60))
    assert not await v.fail(db, [job_id], permanent=True, following=("s", v.at(60), 1))
    assert await v.occurrences(db) == [(v.T0, "running")]
    assert await v.complete_occurrence(db, job_id, "s", v.at(60), attempt=2)
    await db.execute("DELETE FROM pgworkd.jobs")
    assert not await v.complete_occurrence(db, job_id, "s", v.at(120), attempt=2)
    assert await v.occurrences(db) == []


async def test_a_settle_adds_only_the_occurrences_of_its_own_schedules(db: Db) -> None:
    await v.put_schedule(db)
    await v.put_schedule(db, "another")
    worker_id = await v.worker(db)
    job_id = await v.due_occurrence(db, worker_id)
    (plain,) = await v.insert(db, 1)
    await v.claim(db, worker_id)
    sql = "SELECT pgworkd.settle_completed($1, '{1,1}', '{NULL,NULL}', '{another,s}', $2, '{1,1}')"
    assert len(await db.fetchval(sql, [plain, job_id], [v.at(60), v.at(60)])) == 2
    assert await v.occurrences(db) == [(v.at(60), "pending")]
    assert await v.occurrences(db, "another") == []


async def test_a_settle_without_a_current_next_instant_leaves_it_to_the_next_check(db: Db) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    job_id = await v.due_occurrence(db, worker_id)
    await db.execute("UPDATE pgworkd.schedules SET payload = '{\"n\": 2}'")
    assert await v.complete_occurrence(db, job_id, "s", v.at(60), revision=1)
    assert await v.occurrences(db) == []
    assert await db.fetchval("SELECT broken FROM pgworkd.ensure_schedules()") is True
    assert await v.add_occurrences(db, ("s", v.at(60), 2)) == ["s"]
    await v.clock(60, db)
    (job_id,) = await v.claim_ids(db, await v.worker(db))
    sql = "SELECT pgworkd.settle_completed($1, '{1}', '{NULL}', '{s}', $2, '{2}')"
    assert await db.fetchval(sql, [job_id], [None]) == [job_id]
    assert await v.occurrences(db) == []


async def test_a_queue_without_history_gets_the_next_occurrence_too(db: Db) -> None:
    await v.put_schedule(db)
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    job_id = await v.due_occurrence(db, await v.worker(db))
    assert await v.complete_occurrence(db, job_id, "s", v.at(60))
    assert await v.occurrences(db) == [(v.at(60), "pending")]
    assert await v.statuses(db, [job_id]) == [None]


async def test_a_settle_and_a_concurrent_check_add_one_occurrence(db: Db, other: Db) -> None:
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await db.execute("BEGIN")
    await v.complete_occurrence(db, job_id, "s", v.at(60))
    assert await v.add_occurrences(other, ("s", v.at(60), 1)) == []
    await db.execute("COMMIT")
    assert await v.add_occurrences(other, ("s", v.at(60), 1)) == []
    assert await v.occurrences(db) == [(v.at(60), "pending")]


async def test_a_retried_dead_occurrence_leaves_the_chain(db: Db) -> None:
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await v.fail(db, [job_id], permanent=True, following=("s", v.at(60), 1))
    assert await v.retry(db, job_id) == {job_id}
    assert (await v.live(db, job_id))["schedule"] is None
    assert await v.occurrences(db) == [(v.at(60), "pending")]
