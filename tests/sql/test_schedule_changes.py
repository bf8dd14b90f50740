"""Schedules: a change of a rule takes effect at once, and removes no run."""

from __future__ import annotations

import pytest

from tests.kits import verbs as v
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE pgworkd.schedules SET every_s = 7",
        "UPDATE pgworkd.schedules SET payload = '{\"n\": 2}', priority = 4",
        "UPDATE pgworkd.schedules SET enabled = false",
        "DELETE FROM pgworkd.schedules",
        "SELECT pgworkd.put_schedule('s', 'q', NULL, NULL, 61, 'UTC', 'skip', '{}')",
    ],
)
async def test_a_change_removes_the_waiting_occurrence_that_is_not_due(db: Db, change: str) -> None:
    await v.put_schedule(db)
    await v.put_schedule(db, "another")
    await v.add_occurrences(db, ("s", v.at(60), 1), ("another", v.at(60), 1))
    plain = await v.one(db, run_at=v.at(60))
    await db.execute(change + (" WHERE name = 's'" if " pgworkd.schedules" in change else ""))
    assert await v.occurrences(db) == []
    assert await v.occurrences(db, "another") == [(v.at(60), "pending")]
    assert await v.statuses(db, [plain]) == ["pending"]


@pytest.mark.parametrize("status", ["due", "running", "failed", "dead"])
async def test_a_change_leaves_an_occurrence_that_is_due_or_has_run(db: Db, status: str) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    if status == "due":
        await v.add_occurrences(db, ("s", v.T0, 1))
    else:
        job_id = await v.due_occurrence(db, worker_id)
        if status != "running":
            await v.fail(db, [job_id], permanent=status == "dead")
    before = await db.fetch("SELECT * FROM pgworkd.jobs")
    await db.execute("UPDATE pgworkd.schedules SET every_s = 7")
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    assert await db.fetch("SELECT * FROM pgworkd.jobs") == before


@pytest.mark.parametrize("removal", ["DELETE FROM pgworkd.schedules", "SELECT pgworkd.retire_schedules('{s}')"])
@pytest.mark.parametrize("status", ["due", "unknown", "later", "running", "failed", "dead"])
async def test_a_schedule_that_is_gone_takes_its_waiting_occurrence_along(db: Db, status: str, removal: str) -> None:
    await v.put_schedule(db)
    worker_id = await v.worker(db)
    if status in ("due", "later"):
        await v.add_occurrences(db, ("s", v.T0 if status == "due" else v.at(60), 1))
        (job_id,) = await db.fetchrow("SELECT id FROM pgworkd.jobs")
    else:
        job_id = await v.due_occurrence(db, worker_id)
        if status == "unknown":
            await v.release(db, [job_id], delay_s=30, message="no handler for kind 'q'")
        elif status != "running":
            await v.fail(db, [job_id], permanent=status == "dead")
    await db.execute("UPDATE pgworkd.workers SET schedules = '{}'")
    await db.execute(removal)
    left = await db.fetchval("SELECT status::text FROM pgworkd.all_jobs WHERE id = $1", job_id)
    stays = {"running": "running", "dead": "dead", "later": None}
    assert left == stays.get(status, "cancelled")
    if left == "cancelled":
        why = await db.fetchval("SELECT error FROM pgworkd.all_jobs WHERE id = $1", job_id)
        assert why == ("its schedule was removed" if "DELETE" in removal else "its schedule left the code")


async def test_an_occurrence_that_is_locked_does_not_hold_up_the_removal_of_its_schedule(db: Db, other: Db) -> None:
    await v.put_schedule(db)
    await v.add_occurrences(db, ("s", v.T0, 1))
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs FOR UPDATE")
    await db.execute("SET LOCAL statement_timeout = 2000; DELETE FROM pgworkd.schedules")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 1


async def test_the_new_rule_may_be_due_sooner_than_the_instant_it_replaced(db: Db) -> None:
    await v.put_schedule(db, every_s=86400)
    await v.add_occurrences(db, ("s", v.at(86400), 1))
    await v.put_schedule(db, every_s=60)
    row = await v.schedule(db)
    assert (row["revision"], row["last_occurrence"]) == (2, v.T0)
    assert await v.add_occurrences(db, ("s", v.at(60), 2)) == ["s"]


async def test_the_chain_continues_when_a_schedule_is_enabled_again(db: Db) -> None:
    await v.put_schedule(db)
    await v.add_occurrences(db, ("s", v.at(60), 1))
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    assert await db.fetch("SELECT * FROM pgworkd.ensure_schedules()") == []
    assert await v.add_occurrences(db, ("s", v.at(60), 2)) == []
    await db.execute("UPDATE pgworkd.schedules SET enabled = true")
    assert await v.add_occurrences(db, ("s", v.at(60), 3)) == ["s"]


async def test_a_deleted_occurrence_is_noticed_and_the_chain_restored(db: Db) -> None:
    await v.put_schedule(db)
    await v.add_occurrences(db, ("s", v.at(60), 1))
    await db.execute("DELETE FROM pgworkd.jobs")
    assert await db.fetchval("SELECT broken FROM pgworkd.ensure_schedules()") is True
    assert await v.add_occurrences(db, ("s", v.at(60), 1)) == [], "one row per occurrence"
    assert await v.add_occurrences(db, ("s", v.at(120), 1)) == ["s"]


async def test_a_change_of_the_rule_does_not_remove_a_snoozed_occurrence(db: Db) -> None:
    """It has been claimed (attempts = 1) and waits to continue: deleted, it would reach no final state."""
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await v.release(db, [job_id], delay_s=60)
    await v.put_schedule(db, payload='{"n": 2}')
    assert await v.statuses(db, [job_id]) == ["pending"]


# While an occurrence is being settled


async def test_a_rule_changed_while_its_occurrence_is_settled_takes_precedence(db: Db, other: Db) -> None:
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await db.execute("BEGIN")
    await v.complete_occurrence(db, job_id, "s", v.at(60))  # by the old rule
    await v.put_schedule(other, every_s=7)
    assert (await v.schedule(other))["every_s"] == 60, "it waits for nobody: the next check of the schedules changes it"
    await db.execute("COMMIT")
    await v.put_schedule(other, every_s=7)
    assert await v.occurrences(db) == [], "the old rule's next one made room"
    assert await v.add_occurrences(db, ("s", v.at(7), 2)) == ["s"]


async def test_a_settle_concurrent_with_a_change_of_the_rule_neither_waits_nor_adds(db: Db, other: Db) -> None:
    await v.put_schedule(db)
    job_id = await v.due_occurrence(db, await v.worker(db))
    await db.execute("BEGIN")
    await v.put_schedule(db, every_s=7)
    assert await v.complete_occurrence(other, job_id, "s", v.at(60)), "completed it is"
    await db.execute("COMMIT")
    assert await v.occurrences(db) == []
    assert await v.add_occurrences(db, ("s", v.at(60), 1)) == [], "the old rule's"
    assert await v.add_occurrences(db, ("s", v.at(7), 2)) == ["s"]
