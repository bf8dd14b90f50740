"""Schedules: their rules, who may change them, and who is notified."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from tests.kits.sessions import Notices
from tests.kits.verbs import T0, Db, add_occurrences, at, occurrences, put_schedule, schedule, set_pool, worker

pytestmark = pytest.mark.usefixtures("t0")


async def test_put_schedule_stores_a_rule_from_code(db: Db) -> None:
    rule = {"cron": "0 7 * * *", "every_s": None, "timezone": "Europe/Berlin"}
    await put_schedule(db, queue="m", kind="k", **rule, payload='{"n": 1}')
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
        "missed_grace_s": 60.0,
        "waits_for_retries": False,
        "retired_at": None,
        "in_force_since": T0,
    }


async def test_the_same_rule_again_changes_nothing(db: Db) -> None:
    await put_schedule(db)
    await add_occurrences(db, ("s", at(60), 1))
    before = await schedule(db)
    await put_schedule(db)
    assert await schedule(db) == before
    assert await occurrences(db) == [(at(60), "pending")]


@pytest.mark.parametrize(
    "change",
    [
        {"queue": "r"},
        {"kind": "k"},
        {"every_s": 61},
        {"cron": "* * * * *", "every_s": None},
        {"timezone": "Europe/Berlin", "cron": "* * * * *", "every_s": None},
        {"missed": "all"},
        {"payload": '{"n": 1}'},
    ],
)
async def test_a_changed_rule_gets_a_new_revision(db: Db, change: dict[str, Any]) -> None:
    await put_schedule(db)
    await put_schedule(db, **change)
    row = await schedule(db)
    assert row["revision"] == 2
    assert {name: row[name] for name in change} == change


async def test_code_never_overwrites_a_rule_defined_in_sql(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 5)")
    before = await schedule(db)
    assert (before["source"], before["enabled"], before["missed"]) == ("sql", True, "skip")
    await put_schedule(db, every_s=60)
    assert await schedule(db) == before


async def test_code_does_not_enable_a_schedule_disabled_by_an_operator(db: Db) -> None:
    await put_schedule(db)
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    await put_schedule(db, every_s=61)
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
async def test_an_invalid_rule_is_refused(db: Db, columns: str, check: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await db.execute(f"INSERT INTO pgworkd.schedules (name, queue, cron, every_s) VALUES ({columns})")  # noqa: S608
    assert caught.value.constraint_name == check


async def test_missed_must_be_skip_once_or_all(db: Db) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await put_schedule(db, missed="never")
    assert caught.value.constraint_name == "missed_must_be_skip_once_or_all"


async def test_ensure_schedules_lists_enabled_ones_and_those_without_a_live_occurrence(db: Db) -> None:
    for name in ("live", "dead", "none", "off"):
        await put_schedule(db, name)
    await add_occurrences(db, ("live", T0, 1), ("dead", T0, 1))
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


async def test_a_rule_without_a_next_instant_has_an_error_until_it_is_changed(db: Db) -> None:
    await put_schedule(db)
    sql = "SELECT pgworkd.fail_schedule('s', $1, $2)"
    assert await db.fetchval(sql, 2, "stale") is False
    assert await db.fetchval(sql, 1, "never comes") is True
    assert await db.fetchval(sql, 1, "never comes") is False, "no news"
    assert (await schedule(db))["error"] == "never comes"
    assert await db.fetchval(sql, 1, "x" * 10_000) is True
    assert len((await schedule(db))["error"]) == 4096
    await put_schedule(db, every_s=61)
    assert (await schedule(db))["error"] is None


# NOTIFY


async def test_daemons_are_notified_of_every_change_of_a_rule_and_of_nothing_else(db: Db, notices: Notices) -> None:
    await set_pool(db, await worker(db))
    changed = {"schedules": True}
    await put_schedule(db)
    assert await notices.heard() == [changed]
    await add_occurrences(db, ("s", at(60), 1))
    assert await notices.heard() == []
    await db.execute("UPDATE pgworkd.schedules SET enabled = false")
    assert await notices.heard() == [changed]
    await db.execute("SELECT pgworkd.fail_schedule('s', 2, 'why')")
    assert await notices.heard() == []
    await db.execute("DELETE FROM pgworkd.schedules")
    assert await notices.heard() == [changed]
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 5)")
    assert await notices.heard() == [changed]


async def test_a_declaration_that_changes_nothing_notifies_nobody(db: Db, notices: Notices) -> None:
    """Each daemon of the fleet declares all its schedules at each start."""
    await put_schedule(db)
    await notices.heard()
    await put_schedule(db)
    assert await notices.heard() == []
