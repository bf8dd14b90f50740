"""Alerts in SQL: which deaths make one, and that exactly one job is inserted for each."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest

from tests.kits.alerts import count, die, group_of, mute
from tests.kits.schema import Roles
from tests.kits.sessions import refuse, refused_rows
from tests.kits.verbs import Db, at, clock, complete, fail, insert_running, retry

pytestmark = pytest.mark.usefixtures("t0")
RULE = {"name": "a", "queue": "alerts", "kind": "pgworkd.alert.a", "on_new": True, "within_s": 600, "cooldown_s": 3600}


async def declare(db: Db, *rules: dict[str, Any]) -> None:
    await db.execute("SELECT pgworkd.declare_alerts($1)", json.dumps([RULE | rule for rule in rules]))


async def alerts(db: Db) -> list[tuple[str, str, int]]:
    """Rule, reason and deaths of each alert's job."""
    rows = await db.fetch("SELECT payload FROM pgworkd.jobs WHERE queue = 'alerts' ORDER BY id")
    found = [json.loads(row[0]) for row in rows]
    return [(each["rule"], each["reason"], each["deaths"]) for each in found]


async def test_a_new_group_makes_one_alert(db: Db) -> None:
    await declare(db, {})
    await die(db, "it broke at 1", 3)
    await count(db)
    await die(db, "it broke at 2")
    await count(db)
    await clock(5000, db)
    await die(db, "it broke at 3")
    await count(db)
    assert await alerts(db) == [("a", "new", 3)]


async def test_a_group_that_was_there_before_the_rule_is_not_new(db: Db) -> None:
    await die(db)
    await count(db)
    await declare(db, {})
    await die(db)
    await count(db)
    assert await alerts(db) == []


async def test_many_deaths_within_the_time_make_one_alert_per_cool_down(db: Db) -> None:
    await declare(db, {"on_new": False, "deaths": 3, "cooldown_s": 1000})
    await die(db, "x", 2)
    await count(db)
    await clock(700, db)
    await die(db, "x", 2)
    await count(db)
    assert await alerts(db) == [], "four, of which two are too old"
    await die(db, "x", 1)
    await count(db)
    assert await alerts(db) == [("a", "many", 3)]
    await clock(1600, db)
    await die(db, "x", 5)
    await count(db)
    assert len(await alerts(db)) == 1, "cooling down"
    await clock(1701, db)
    await die(db, "x", 1)
    await count(db)
    assert await alerts(db) == [("a", "many", 3), ("a", "many", 6)]


async def test_queues_rules_and_groups_apart(db: Db) -> None:
    await declare(db, {"queues": ["mail"]}, {"name": "b", "kind": "pgworkd.alert.b"})
    await die(db, queue="mail")
    await die(db, queue="bills")
    await count(db)
    assert sorted(await alerts(db)) == [("a", "new", 1), ("b", "new", 1), ("b", "new", 1)]


async def test_a_muted_group_makes_no_alerts_until_then(db: Db) -> None:
    await declare(db, {"on_new": False, "deaths": 1, "cooldown_s": 0})
    await die(db, "x")
    await count(db)
    await mute(db, await group_of(db, "x"), at(600))
    await die(db, "x")
    await count(db)
    assert len(await alerts(db)) == 1
    await clock(600, db)
    await die(db, "x")
    await count(db)
    assert len(await alerts(db)) == 2


async def test_the_death_of_an_alert_makes_no_alert_of_its_rule(db: Db) -> None:
    await declare(db, {"deaths": 1, "cooldown_s": 0})
    await die(db, "x")
    await count(db)
    worker_id = await db.fetchval("SELECT pgworkd.register('w', 1, 'v', 30)")
    (job,) = await db.fetch("SELECT id FROM pgworkd.claim($1, 'alerts', 1, '{}', '{}')", worker_id)
    await fail(db, [job["id"]], permanent=True, message="no mail server")
    assert await count(db) == 1
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs WHERE queue = 'alerts'") == 1


async def test_a_step_that_is_rolled_back_makes_its_alerts_later(db: Db, other: Db) -> None:
    await declare(db, {})
    await die(db)
    transaction = db.transaction()
    await transaction.start()
    await count(db)
    assert len(await alerts(db)) == 1
    await transaction.rollback()
    assert await alerts(db) == []
    await count(other)
    await count(db)
    assert await alerts(db) == [("a", "new", 1)]


async def test_an_alert_that_cannot_be_inserted_loses_no_death(db: Db) -> None:
    await declare(db, {})
    await die(db)
    await refuse(db, "alerts", column="queue", when="INSERT")
    assert await count(db) == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.error_groups") == 0
    assert set(await refused_rows(db)) == {"count_deaths"}
    await db.execute("DELETE FROM public.kept; DELETE FROM pgworkd.refused_rows")
    assert await count(db) == 1
    assert await alerts(db) == [("a", "new", 1)]


async def test_more_deaths_than_one_step_make_one_alert(db: Db) -> None:
    await declare(db, {"deaths": 8})
    await die(db, "x", 20)
    while await count(db, 3):
        pass
    assert await alerts(db) == [("a", "new", 3)]


async def test_a_job_that_dies_again_may_make_an_alert(db: Db) -> None:
    await declare(db, {"on_new": False, "deaths": 2, "cooldown_s": 0})
    (job_id,) = await die(db)
    await retry(db, job_id)
    worker_id = await db.fetchval("SELECT pgworkd.register('w', 1, 'v', 30)")
    await db.fetch("SELECT id FROM pgworkd.claim($1, 'q', 1, '{}', '{}')", worker_id)
    await fail(db, [job_id], 2, permanent=True)
    await count(db)
    assert await alerts(db) == [("a", "many", 2)]


async def test_after_a_step_back_of_the_clock_alerts_go_on(db: Db) -> None:
    """What lies ahead by then holds nothing back: neither a cool-down, nor deaths that are not counted yet."""
    await declare(db, {"deaths": 2, "cooldown_s": 86_400})
    await die(db, "x")
    await count(db)
    await die(db, "y")
    await clock(-86_400 * 3, db)
    assert await count(db) == 1
    await die(db, "x", 2)
    await die(db, "z", 1)
    await count(db)
    assert sorted(reason for _, reason, _ in await alerts(db)) == ["many", "new", "new", "new"]
    row = await db.fetchrow("SELECT first_at, last_at FROM pgworkd.error_groups WHERE pattern = 'x'")
    assert row is not None
    assert row["first_at"] == at(-86_400 * 3), "the first, by the clock"


async def test_rules_of_two_applications_leave_each_other_alone(db: Db) -> None:
    """A rule goes a day after its last declaration, unless a worker that lives has a handler for its jobs."""
    other = {"name": "b", "kind": "pgworkd.alert.b"}
    names = "SELECT array_agg(name::text ORDER BY name) FROM pgworkd.alert_rules"
    await declare(db, {})
    await declare(db, other)
    await declare(db, {"deaths": 5})
    assert await db.fetchval(names) == ["a", "b"]
    assert await db.fetchval("SELECT deaths FROM pgworkd.alert_rules WHERE name = 'a'") == 5
    await clock(86_401, db)
    await db.execute("SELECT pgworkd.register('w', 1, 'v', 30, NULL, '{pgworkd.alert.b}')")
    await declare(db)
    assert await db.fetchval(names) == ["b"], "its worker may be about to declare it again"
    await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
    await declare(db, {})
    assert await db.fetchval(names) == ["a"]


async def test_the_worker_role_makes_alerts(db: Db, roles: Roles) -> None:
    await die(db)
    async with roles.session("worker") as ours:
        await declare(ours, {})
        await count(ours)
    assert await alerts(db) == [("a", "new", 1)]


async def test_retired_jobs_are_no_deaths(db: Db) -> None:
    ids: list[uuid.UUID] = await insert_running(db, 2)
    await complete(db, ids)
    assert await count(db) == 0
