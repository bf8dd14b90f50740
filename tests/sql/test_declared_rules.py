"""declare_rules: the rule of a schedule is that of the workers that declare it, and none takes it from another."""

from __future__ import annotations

import json
import random
from typing import Any

import asyncpg
import pytest

from tests.kits.verbs import Db, add_occurrences, at, one, worker

pytestmark = pytest.mark.usefixtures("t0")


def rule(every_s: int, queue: str = "q", **more: Any) -> dict[str, Any]:
    """A rule, by the columns of the table."""
    fixed = {"kind": "s", "timezone": "UTC", "missed": "skip", "payload": {}, "missed_grace_s": 60}
    return {"queue": queue, "every_s": every_s, "waits_for_retries": False, **fixed, **more}


async def declare(db: Db, worker_id: int | None, **rules: Any) -> list[tuple[str, int | None, bool]]:
    """What is not as declared: (name, every_s in force, whether a worker is named)."""
    rows = await db.fetch("SELECT * FROM pgworkd.declare_rules($1, $2)", worker_id, json.dumps(rules))
    rules_ = [None if row["rule"] is None else json.loads(row["rule"]) for row in rows]
    return [
        (row["name"], each and each["every_s"], row["worker"] is not None)
        for row, each in zip(rows, rules_, strict=True)
    ]


async def in_force(db: Db, name: str = "s") -> int | None:
    """The every_s of the schedule; None: it has no row, or is disabled."""
    every_s: int | None = await db.fetchval("SELECT every_s FROM pgworkd.schedules WHERE name = $1 AND enabled", name)
    return every_s


async def gone(db: Db, worker_id: int) -> None:
    """The worker has signed off."""
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", worker_id)


@pytest.mark.parametrize("seed", range(40))
async def test_a_deployment_in_any_order_ends_with_the_rule_of_those_that_are_left(db: Db, seed: int) -> None:
    """Workers of releases 1, 2 and 3 start, check and end in any order; whoever is left has its rule in the end."""
    dice = random.Random(seed)  # noqa: S311 - to be repeatable
    live: dict[int, int] = {}
    for _ in range(30):
        release = dice.randint(1, 3)
        match dice.choice(("start", "start", "check", "end")):
            case "start":
                before = await in_force(db)
                await declare(db, None, s=rule(release))
                live[await worker(db)] = release
                await declare(db, max(live), s=rule(release))
                if before in live.values():
                    assert await in_force(db) == before, "a worker that declares it was there before"
            case "check" if live:
                worker_id, declared = dice.choice(list(live.items()))
                await declare(db, worker_id, s=rule(declared))
            case "end" if live:
                worker_id = dice.choice(list(live))
                del live[worker_id]
                await gone(db, worker_id)
        assert not live or await in_force(db) is not None
    for worker_id in [each for each, release in live.items() if release != 2]:
        await gone(db, worker_id)
    last = await worker(db)
    await declare(db, last, s=rule(2))
    assert await in_force(db) == 2


async def test_the_second_service_of_a_name_is_told_whose_it_is(db: Db) -> None:
    shop, billing = await worker(db, name="shop"), await worker(db, name="billing")
    assert await declare(db, shop, s=rule(5, "shop"), other=rule(1)) == []
    assert await declare(db, billing, s=rule(9, "billing"), other=rule(1)) == [("s", 5, True)]
    assert await declare(db, shop, s=rule(5, "shop"), other=rule(1)) == []
    assert await in_force(db) == 5
    await gone(db, shop)
    assert await declare(db, billing, s=rule(9, "billing")) == [("other", None, False)]
    assert await in_force(db) == 9


async def test_a_row_that_is_gone_comes_back(db: Db) -> None:
    worker_id = await worker(db)
    await declare(db, worker_id, s=rule(5))
    await db.execute("DELETE FROM pgworkd.schedules")
    assert await declare(db, worker_id, s=rule(5)) == []
    assert await in_force(db) == 5


async def test_a_lost_worker_declares_nothing_and_one_that_has_not_declared_may(db: Db) -> None:
    lost, silent, ours = await worker(db), await worker(db), await worker(db)
    await declare(db, lost, s=rule(5))
    await db.execute("UPDATE pgworkd.workers SET schedules = '{s}' WHERE id = $1", silent)
    assert await declare(db, ours, s=rule(7)) == [("s", 5, True)]
    await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock() WHERE id = $1", lost)
    assert await declare(db, ours, s=rule(7)) == [("s", 5, True)], "a daemon of the version before, of either release"
    await gone(db, silent)
    assert await declare(db, ours, s=rule(7)) == []
    assert await in_force(db) == 7


async def test_an_operator_s_row_and_decision_stay(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 60)")
    worker_id = await worker(db)
    assert await declare(db, worker_id, s=rule(5), off=rule(5)) == []
    assert await in_force(db) == 60
    await db.execute("SELECT pgworkd.enable_schedule('off', false)")
    assert await declare(db, worker_id, s=rule(5), off=rule(5)) == []
    assert await in_force(db, "off") is None


async def test_a_declaration_waits_for_no_locked_row_and_changes_it_next_time(db: Db, other: Db) -> None:
    worker_id = await worker(db)
    await declare(db, worker_id, s=rule(5), t=rule(5))
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.schedules WHERE name = 's' FOR UPDATE")
    await db.execute("SET statement_timeout = 2000")
    assert await declare(db, worker_id, s=rule(6), t=rule(6)) == [("s", 5, False)]
    assert (await in_force(db), await in_force(db, "t")) == (5, 6)
    await other.execute("COMMIT")
    assert await declare(db, worker_id, s=rule(6), t=rule(6)) == []


async def test_a_new_rule_replaces_the_waiting_occurrence_of_the_old(db: Db) -> None:
    worker_id = await worker(db)
    await declare(db, worker_id, s=rule(60))
    await add_occurrences(db, ("s", at(60), 1))
    await declare(db, worker_id, s=rule(61, payload={"n": 2}))
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
    assert await one(db)


async def test_a_wrong_rule_is_refused_with_what_is_wrong(db: Db) -> None:
    for wrong in (rule(0), rule(5, missed="never"), rule(5, queue=""), rule(5, payload=[])):
        with pytest.raises(asyncpg.CheckViolationError):
            await declare(db, None, s=wrong)
