"""Schedules: each occurrence once, the next one in the settle's own transaction, changes at once."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import anyio
import asyncpg
import pytest

from .verbs import (
    T0,
    Db,
    Later,
    Notices,
    at,
    claim,
    claim_ids,
    clock,
    complete_occurrence,
    end,
    fail,
    insert,
    live,
    one,
    over,
    release,
    retry,
    set_pool,
    statuses,
    waits_for_lock,
    worker,
)

pytestmark = pytest.mark.usefixtures("t0")


async def put(db: Db, name: str = "s", **changes: Any) -> None:
    """put_schedule, every minute unless told otherwise."""
    rule = {"queue": "q", "kind": None, "cron": None, "every_s": 60, "timezone": "UTC", "missed": "skip"}
    sql = "SELECT pgworkd.put_schedule($1, $2, $3, $4, $5, $6, $7, $8)"
    await db.execute(sql, name, *{**rule, "payload": "{}", **changes}.values())


async def add(db: Db, *occurrences: tuple[str, datetime, int]) -> list[str]:
    """add_occurrences; the names that got one."""
    columns = [list(column) for column in zip(*occurrences, strict=True)]
    return sorted(await db.fetchval("SELECT pgworkd.add_occurrences($1, $2, $3)", *columns))


async def schedule(db: Db, name: str = "s") -> asyncpg.Record:
    """The schedule's row."""
    row = await db.fetchrow("SELECT * FROM pgworkd.schedules WHERE name = $1", name)
    assert row is not None
    return row


async def occurrences(db: Db, name: str = "s") -> list[tuple[datetime, str]]:
    """The schedule's occurrences in jobs: instant and status, in order."""
    sql = "SELECT occurrence, status::text FROM pgworkd.jobs WHERE schedule = $1 ORDER BY occurrence"
    return [(row[0], row[1]) for row in await db.fetch(sql, name)]


async def due_occurrence(db: Db, worker_id: int, instant: datetime = T0) -> uuid.UUID:
    """Adds the occurrence of schedule s at `instant`, which is due, and claims it."""
    assert await add(db, ("s", instant, (await schedule(db))["revision"])) == ["s"]
    (job_id,) = await claim_ids(db, worker_id)
    return job_id


# The rule


async def test_put_schedule_enters_a_rule_of_code(db: Db) -> None:
    await put(db, queue="m", kind="k", cron="0 7 * * *", every_s=None, timezone="Europe/Berlin", payload='{"n": 1}')
    row = dict(await schedule(db))
    assert row == {
        "name": "s",
        "queue": "m",
        "kind": "k",
        "payload": '{"n": 1}',
        "cron": "0 7 * * *",
        "every_s": None,
        "timezone": "Europe/Berlin",
        "missed": "skip",
        "priority": 0,
        "max_attempts": None,
        "timeout_s": None,
        "enabled": True,
        "source": "code",
        "revision": 1,
        "last_occurrence": None,
        "error": None,
        "created_at": T0,
    }


async def test_the_same_rule_again_changes_nothing(db: Db) -> None:
    await put(db)
    await add(db, ("s", at(60), 1))
    before = await schedule(db)
    await put(db)
    assert await schedule(db) == before
    assert await occurrences(db) == [(at(60), "pending")]


@pytest.mark.parametrize(
    "change",
    [
        {"queue": "r"},
        {"kind": "k"},
        {"every_s": 61},
        {"cron": "* * * * *", "every_s": None},
        {"timezone": "Europe/Berlin"},
        {"missed": "all"},
        {"payload": '{"n": 1}'},
    ],
)
async def test_a_changed_rule_gets_a_new_revision(db: Db, change: dict[str, Any]) -> None:
    await put(db)
    await put(db, **change)
    row = await schedule(db)
    assert row["revision"] == 2
    assert {name: row[name] for name in change} == change


async def test_code_never_overwrites_a_rule_of_sql(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 5)")
    before = await schedule(db)
    assert (before["source"], before["enabled"], before["missed"]) == ("sql", True, "skip")
    await put(db, every_s=60)
    assert await schedule(db) == before


async def test_code_does_not_enable_what_someone_disabled(db: Db) -> None:
    await put(db)
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    await put(db, every_s=61)
    assert (await schedule(db))["enabled"] is False


@pytest.mark.parametrize(
    ("columns", "check"),
    [
        ("'s', 'q', '* * * * *', 60", "exactly_one_of_cron_and_every_s_must_be_set"),
        ("'s', 'q', NULL, NULL", "exactly_one_of_cron_and_every_s_must_be_set"),
        ("'s', 'q', NULL, 0", "every_s_must_be_1_to_366_days"),
        ("'s', 'q', NULL, 31622401", "every_s_must_be_1_to_366_days"),
        ("'', 'q', NULL, 60", "name_must_have_1_to_200_characters"),
        ("'s', '', NULL, 60", "name_must_have_1_to_200_characters"),
    ],
)
async def test_a_bad_rule_is_refused(db: Db, columns: str, check: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await db.execute(f"INSERT INTO pgworkd.schedules (name, queue, cron, every_s) VALUES ({columns})")  # noqa: S608
    assert caught.value.constraint_name == check


async def test_missed_is_skip_once_or_all(db: Db) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await put(db, missed="never")
    assert caught.value.constraint_name == "missed_must_be_skip_once_or_all"


async def test_ensure_schedules_lists_the_enabled_and_says_which_have_no_live_occurrence(db: Db) -> None:
    for name in ("live", "dead", "none", "off"):
        await put(db, name)
    await add(db, ("live", T0, 1), ("dead", T0, 1))
    await db.execute("UPDATE pgworkd.jobs SET status = 'dead' WHERE schedule = 'dead'")
    await db.execute("UPDATE pgworkd.schedules SET enabled = false WHERE name = 'off'")
    rows = await db.fetch("SELECT * FROM pgworkd.ensure_schedules()")
    assert [(row["name"], row["broken"]) for row in rows] == [("dead", True), ("live", False), ("none", True)]
    assert dict(rows[0]) == {
        "name": "dead",
        "cron": None,
        "every_s": 60,
        "timezone": "UTC",
        "missed": "skip",
        "revision": 1,
        "last_occurrence": T0,
        "at": T0,
        "broken": True,
    }


async def test_a_rule_without_a_next_instant_says_why_until_it_is_changed(db: Db) -> None:
    await put(db)
    sql = "SELECT pgworkd.fail_schedule('s', $1, $2)"
    assert await db.fetchval(sql, 2, "stale") is False
    assert await db.fetchval(sql, 1, "never comes") is True
    assert await db.fetchval(sql, 1, "never comes") is False, "no news"
    assert (await schedule(db))["error"] == "never comes"
    assert await db.fetchval(sql, 1, "x" * 10_000) is True
    assert len((await schedule(db))["error"]) == 4096
    await put(db, every_s=61)
    assert (await schedule(db))["error"] is None


# Occurrences


async def test_an_occurrence_is_a_job_as_the_rule_says(db: Db) -> None:
    await put(db, queue="m", kind="k", payload='{"n": 1}')
    await db.execute("UPDATE pgworkd.schedules SET priority = 3, max_attempts = 7, timeout_s = 2.5")
    assert await add(db, ("s", at(60), 2)) == ["s"]
    job = await db.fetchrow("SELECT * FROM pgworkd.jobs")
    assert job is not None
    assert (job["queue"], job["kind"], job["payload"], job["schedule"]) == ("m", "k", '{"n": 1}', "s")
    assert (job["priority"], job["max_attempts"], job["timeout_s"]) == (3, 7, 2.5)
    assert (job["run_at"], job["occurrence"], job["status"]) == (at(60), at(60), "pending")
    assert (await schedule(db))["last_occurrence"] == at(60)
    await clock(60, db)
    (row,) = await claim(db, await worker(db), queue="m")
    assert (row["schedule"], row["occurrence"]) == ("s", at(60).timestamp())


@pytest.mark.parametrize("status", ["pending", "failed", "running"])
async def test_no_occurrence_is_added_while_one_is_live(db: Db, status: str) -> None:
    await put(db)
    worker_id = await worker(db)
    job_id = await due_occurrence(db, worker_id)
    if status == "failed":
        await fail(db, [job_id])
    elif status == "pending":
        await release(db, [job_id])
    assert await add(db, ("s", at(60), 1)) == []
    assert await occurrences(db) == [(T0, status)]
    assert (await schedule(db))["last_occurrence"] == T0


async def test_a_dead_occurrence_does_not_stop_the_chain(db: Db) -> None:
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    await fail(db, [job_id], permanent=True)
    assert await add(db, ("s", at(60), 1)) == ["s"]
    assert await occurrences(db) == [(T0, "dead"), (at(60), "pending")]


async def test_a_schedule_never_goes_back_in_time_nor_twice_to_one_instant(db: Db) -> None:
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    await end(db, [job_id])
    for instant in (T0, at(-60)):
        assert await add(db, ("s", instant, 1)) == []
    assert await add(db, ("s", at(0.001), 1)) == ["s"]


async def test_an_occurrence_of_another_revision_a_disabled_or_an_unknown_schedule_is_not_added(db: Db) -> None:
    await put(db, "off")
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    await put(db)
    assert await add(db, ("s", at(60), 2), ("off", at(60), 2), ("unknown", at(60), 1)) == []
    assert await add(db, ("s", at(60), 0)) == []
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_several_schedules_in_one_call(db: Db) -> None:
    for name in ("b", "a", "c"):
        await put(db, name)
    await add(db, ("c", at(60), 1))
    assert await add(db, ("c", at(120), 1), ("b", at(60), 1), ("a", at(60), 1)) == ["a", "b"]


async def test_two_sessions_at_once_add_one_occurrence(db: Db, other: Db, third: Db) -> None:
    """oban#1488: a stale leader doubled the cron jobs for 19 days."""
    await put(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await add(db, ("s", at(60), 1)) == ["s"]
        # The second has computed the same instant, or thinks it is later already.
        adding = Later(tasks, add(other, ("s", at(120), 1)))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await adding.answer() == []
    assert await occurrences(db) == [(at(60), "pending")]


async def test_a_rolled_back_addition_leaves_the_instant_to_the_next(db: Db, other: Db, third: Db) -> None:
    await put(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await add(db, ("s", at(60), 1))
        adding = Later(tasks, add(other, ("s", at(60), 1)))
        await waits_for_lock(third, other)
        await db.execute("ROLLBACK")
        assert await adding.answer() == ["s"]


async def test_two_sessions_with_many_schedules_in_opposite_order_do_not_deadlock(db: Db, other: Db, third: Db) -> None:
    for name in ("a", "b", "c"):
        await put(db, name)
    async with anyio.create_task_group() as tasks:
        await third.execute("BEGIN")
        await third.execute("SELECT FROM pgworkd.schedules WHERE name = 'a' FOR UPDATE")
        forth = Later(tasks, add(db, ("c", at(60), 1), ("b", at(60), 1), ("a", at(60), 1)))
        back = Later(tasks, add(other, ("a", at(60), 1), ("b", at(60), 1), ("c", at(60), 1)))
        await waits_for_lock(third, db)
        await waits_for_lock(third, other)
        # Both wait for the first by name; neither holds a later one.
        assert len(await third.fetch("SELECT FROM pgworkd.schedules WHERE name > 'a' FOR UPDATE NOWAIT")) == 2
        await third.execute("COMMIT")
        assert sorted([*await forth.answer(), *await back.answer()]) == ["a", "b", "c"]


# The settle's transaction


async def test_completed_adds_the_next_occurrence_in_the_same_transaction(db: Db, other: Db) -> None:
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    await db.execute("BEGIN")
    assert await complete_occurrence(db, job_id, "s", at(60))
    assert await occurrences(other) == [(T0, "running")]
    await db.execute("COMMIT")
    assert await occurrences(db) == [(at(60), "pending")]
    row = await over(db, job_id)
    assert (row["schedule"], row["occurrence"], row["status"]) == ("s", T0, "completed")


async def test_dead_adds_the_next_occurrence_and_a_retry_does_not(db: Db) -> None:
    await put(db)
    worker_id = await worker(db)
    job_id = await due_occurrence(db, worker_id)
    assert await fail(db, [job_id], delay_s=0, following=("s", at(60), 1)) == {job_id: "failed"}
    assert await occurrences(db) == [(T0, "failed")]
    await claim(db, worker_id)
    assert await fail(db, [job_id], 2, permanent=True, following=("s", at(60), 1)) == {job_id: "dead"}
    assert await occurrences(db) == [(T0, "dead"), (at(60), "pending")]


async def test_a_late_settle_adds_nothing(db: Db) -> None:
    await put(db)
    worker_id = await worker(db)
    job_id = await due_occurrence(db, worker_id)
    await release(db, [job_id])
    await claim(db, worker_id)
    assert not await complete_occurrence(db, job_id, "s", at(60))
    assert not await fail(db, [job_id], permanent=True, following=("s", at(60), 1))
    assert await occurrences(db) == [(T0, "running")]
    assert await complete_occurrence(db, job_id, "s", at(60), attempt=2)
    await db.execute("DELETE FROM pgworkd.jobs")
    assert not await complete_occurrence(db, job_id, "s", at(120), attempt=2)
    assert await occurrences(db) == []


async def test_a_batch_adds_the_next_of_its_own_schedules_only(db: Db) -> None:
    await put(db)
    await put(db, "another")
    worker_id = await worker(db)
    job_id = await due_occurrence(db, worker_id)
    (plain,) = await insert(db, 1)
    await claim(db, worker_id)
    sql = "SELECT pgworkd.settle_completed($1, '{1,1}', '{NULL,NULL}', '{another,s}', $2, '{1,1}')"
    assert len(await db.fetchval(sql, [plain, job_id], [at(60), at(60)])) == 2
    assert await occurrences(db) == [(at(60), "pending")]
    assert await occurrences(db, "another") == []


async def test_a_settle_without_the_next_instant_or_of_an_old_revision_leaves_the_chain_to_the_next_look(
    db: Db,
) -> None:
    await put(db)
    worker_id = await worker(db)
    job_id = await due_occurrence(db, worker_id)
    await db.execute("UPDATE pgworkd.schedules SET payload = '{\"n\": 2}'")
    assert await complete_occurrence(db, job_id, "s", at(60), revision=1)
    assert await occurrences(db) == []
    assert await db.fetchval("SELECT broken FROM pgworkd.ensure_schedules()") is True
    assert await add(db, ("s", at(60), 2)) == ["s"]
    await clock(60, db)
    (job_id,) = await claim_ids(db, await worker(db))
    sql = "SELECT pgworkd.settle_completed($1, '{1}', '{NULL}', '{s}', $2, '{2}')"
    assert await db.fetchval(sql, [job_id], [None]) == [job_id]
    assert await occurrences(db) == []


async def test_a_queue_without_history_has_a_next_occurrence_all_the_same(db: Db) -> None:
    await put(db)
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    job_id = await due_occurrence(db, await worker(db))
    assert await complete_occurrence(db, job_id, "s", at(60))
    assert await occurrences(db) == [(at(60), "pending")]
    assert await statuses(db, [job_id]) == [None]


async def test_a_settle_and_a_look_at_once_add_one(db: Db, other: Db, third: Db) -> None:
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete_occurrence(db, job_id, "s", at(60))
        adding = Later(tasks, add(other, ("s", at(60), 1)))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await adding.answer() == []
    assert await occurrences(db) == [(at(60), "pending")]


async def test_a_rule_that_changes_while_its_occurrence_is_settled_has_the_last_word(
    db: Db, other: Db, third: Db
) -> None:
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete_occurrence(db, job_id, "s", at(60))  # by the old rule
        changing = Later(tasks, put(other, every_s=7))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        await changing.answer()
    assert await occurrences(db) == [], "the old rule's next one made room"
    assert await add(db, ("s", at(7), 2)) == ["s"]


async def test_a_settle_that_waited_for_a_change_of_the_rule_adds_nothing(db: Db, other: Db, third: Db) -> None:
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await put(db, every_s=7)
        settling = Later(tasks, complete_occurrence(other, job_id, "s", at(60)))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await settling.answer(), "completed it is"
    assert await occurrences(db) == []


async def test_a_replayed_occurrence_leaves_the_chain(db: Db) -> None:
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    await fail(db, [job_id], permanent=True, following=("s", at(60), 1))
    assert await retry(db, job_id) == {job_id}
    assert (await live(db, job_id))["schedule"] is None
    assert await occurrences(db) == [(at(60), "pending")]


# Changes


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
    await put(db)
    await put(db, "another")
    await add(db, ("s", at(60), 1), ("another", at(60), 1))
    plain = await one(db, run_at=at(60))
    await db.execute(change + (" WHERE name = 's'" if " pgworkd.schedules" in change else ""))
    assert await occurrences(db) == []
    assert await occurrences(db, "another") == [(at(60), "pending")]
    assert await statuses(db, [plain]) == ["pending"]


@pytest.mark.parametrize("status", ["due", "running", "failed", "dead"])
async def test_a_change_leaves_an_occurrence_that_is_due_or_has_run(db: Db, status: str) -> None:
    await put(db)
    worker_id = await worker(db)
    if status == "due":
        await add(db, ("s", T0, 1))
    else:
        job_id = await due_occurrence(db, worker_id)
        if status != "running":
            await fail(db, [job_id], permanent=status == "dead")
    before = await db.fetch("SELECT * FROM pgworkd.jobs")
    await db.execute("UPDATE pgworkd.schedules SET every_s = 7")
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    await db.execute("DELETE FROM pgworkd.schedules")
    assert await db.fetch("SELECT * FROM pgworkd.jobs") == before


async def test_the_new_rule_may_come_sooner_than_the_instant_it_replaced(db: Db) -> None:
    await put(db, every_s=86400)
    await add(db, ("s", at(86400), 1))
    await put(db, every_s=60)
    row = await schedule(db)
    assert (row["revision"], row["last_occurrence"]) == (2, T0)
    assert await add(db, ("s", at(60), 2)) == ["s"]


async def test_disabled_and_enabled_again_the_chain_goes_on(db: Db) -> None:
    await put(db)
    await add(db, ("s", at(60), 1))
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    assert await db.fetch("SELECT * FROM pgworkd.ensure_schedules()") == []
    assert await add(db, ("s", at(60), 2)) == []
    await db.execute("UPDATE pgworkd.schedules SET enabled = true")
    assert await add(db, ("s", at(60), 3)) == ["s"]


async def test_an_occurrence_someone_deleted_is_missed_and_the_chain_restored(db: Db) -> None:
    await put(db)
    await add(db, ("s", at(60), 1))
    await db.execute("DELETE FROM pgworkd.jobs")
    assert await db.fetchval("SELECT broken FROM pgworkd.ensure_schedules()") is True
    assert await add(db, ("s", at(60), 1)) == [], "one row per occurrence"
    assert await add(db, ("s", at(120), 1)) == ["s"]


# NOTIFY


async def test_daemons_hear_of_every_change_of_a_rule_and_of_nothing_else(db: Db, notices: Notices) -> None:
    await set_pool(db, await worker(db))
    changed = {"schedules": True}
    await put(db)
    assert await notices.heard() == [changed]
    await add(db, ("s", at(60), 1))
    assert await notices.heard() == []
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    assert await notices.heard() == [changed]
    await db.execute("SELECT pgworkd.fail_schedule('s', 2, 'why')")
    assert await notices.heard() == []
    await db.execute("DELETE FROM pgworkd.schedules")
    assert await notices.heard() == [changed]
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 5)")
    assert await notices.heard() == [changed]


async def test_an_occurrence_that_is_due_wakes_a_sleeping_pool(db: Db, notices: Notices) -> None:
    await put(db)
    await set_pool(db, await worker(db))
    await notices.heard()
    await add(db, ("s", at(1), 1))
    assert await notices.heard() == [{"queue": "q"}]


# Once wrong


async def test_a_change_of_the_rule_does_not_throw_away_a_run_that_snoozed(db: Db) -> None:
    """It has been claimed (attempts = 1) and waits to go on: deleted, it would reach no final state (guarantee 4)."""
    await put(db)
    job_id = await due_occurrence(db, await worker(db))
    await release(db, [job_id], delay_s=60)
    await put(db, payload='{"n": 2}')
    assert await statuses(db, [job_id]) == ["pending"]


async def test_one_schedule_in_trouble_does_not_harm_the_others_of_the_call(db: Db) -> None:
    """A row that stands for that instant already must not raise 23505 for all."""
    await put(db, "a")
    await put(db, "b")
    sql = "INSERT INTO pgworkd.jobs (queue, schedule, occurrence, status) VALUES ('q', 'a', $1, 'dead')"
    await db.execute(sql, at(60))
    assert "b" in await add(db, ("a", at(60), 1), ("b", at(60), 1))


async def test_a_declaration_that_changes_nothing_notifies_nobody(db: Db, notices: Notices) -> None:
    """Each daemon of the fleet declares all its schedules at each start."""
    await put(db)
    await notices.heard()
    await put(db)
    assert await notices.heard() == []
