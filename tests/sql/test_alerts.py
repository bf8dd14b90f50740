"""Alerts in SQL: which deaths are told of and when, that none stays untold, and that messages are few."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from typing import Any

import pytest

from tests.kits.alerts import count, declare, die, due, group_of, messages, mute, tell
from tests.kits.schema import Roles
from tests.kits.sessions import refuse, refused_rows
from tests.kits.verbs import Db, at, clock, complete, fail, insert_running, retry

pytestmark = pytest.mark.usefixtures("t0")


async def counted(db: Db, message: str = "x", jobs: int = 1, **columns: Any) -> list[tuple[str, str, int]]:
    """Deaths that are counted; what the message that they made, if any, has told."""
    await die(db, message, jobs, **columns)
    await count(db)
    return await tell(db)


async def test_a_new_group_is_told_of_at_once(db: Db) -> None:
    await declare(db, {})
    await die(db, "it broke at 1", 3)
    await count(db)
    assert await messages(db) == ["a"]
    assert await due(db) == [("a", "new", 3)]


async def test_what_comes_while_a_message_is_on_its_way_is_told_with_it(db: Db) -> None:
    await declare(db, {})
    await die(db, "it broke at 1", 3)
    await count(db)
    await clock(5000, db)
    await die(db, "it broke at 2", 40)
    await die(db, "another", 2)
    await count(db)
    assert await messages(db) == ["a"]
    assert await tell(db) == [("a", "new", 43), ("a", "new", 2)]
    await count(db)
    assert await messages(db) == []


async def test_a_storm_of_new_groups_makes_two_messages(db: Db) -> None:
    await declare(db, {})
    told = []
    for n in range(30):
        await clock(n, db)
        for name in "abcdefghij":
            await die(db, f"no such customer {name}-{'abcdefghijklmnopqrstuvwxyzABCD'[n]}")
        await count(db)
        if n < 3 or n > 20:  # else the mail server is slow
            told += [await tell(db)]
    assert [len(each) for each in told if each] == [10], "then the rule waits"
    await clock(301, db)
    await count(db)
    (rest,) = [await tell(db)]
    assert (len(rest), sum(deaths for *_, deaths in rest), {why for _, why, _ in rest}) == (290, 290, {"new"})
    await count(db)
    assert await messages(db) == []


async def test_a_group_that_goes_on_dying_is_told_of_at_ten_times_the_deaths(db: Db) -> None:
    await declare(db, {})
    assert await counted(db, jobs=3) == [("a", "new", 3)]
    await clock(100, db)
    assert await counted(db, jobs=30) == [], "less than bundle_s since the last message"
    await clock(301, db)
    await count(db)
    assert await tell(db) == [("a", "more", 30)]
    await clock(700, db)
    assert await counted(db, jobs=200) == [], "not ten times as many"
    await clock(701, db)
    assert await counted(db, jobs=200) == [("a", "more", 400)]


async def test_the_rest_is_told_at_the_end_of_the_cool_down(db: Db) -> None:
    await declare(db, {"cooldown_s": 1000})
    assert await counted(db) == [("a", "new", 1)]
    await clock(10, db)
    assert await counted(db, jobs=2) == []
    await clock(999, db)
    assert await counted(db, jobs=2) == []
    await clock(1000, db)
    await count(db)
    assert await tell(db) == [("a", "more", 4)]
    await clock(3000, db)
    assert await counted(db) == [("a", "more", 1)], "it is back, after a silence longer than the cool-down"
    assert await counted(db) == []
    await clock(3500, db)
    assert await counted(db, "y") == [("a", "new", 1), ("a", "more", 1)], "a message has all that is untold"


async def test_a_group_that_was_there_before_the_rule_is_not_new(db: Db) -> None:
    await die(db)
    await count(db)
    await declare(db, {})
    await die(db, jobs=20)
    await count(db)
    assert (await messages(db), await due(db)) == ([], [])


async def test_many_deaths_within_the_time_make_one_message_per_cool_down(db: Db) -> None:
    await declare(db, {"on_new": False, "deaths": 3, "cooldown_s": 1000})
    assert await counted(db, "x", 2) == []
    await clock(700, db)
    assert await counted(db, "x", 2) == [], "four, of which two are too old"
    assert await counted(db, "x", 1) == [("a", "many", 3)]
    await clock(1600, db)
    assert await counted(db, "x", 5) == [], "cooling down"
    await clock(1700, db)
    await count(db)
    assert await tell(db) == [("a", "more", 5)]
    await clock(9000, db)
    assert await counted(db, "x", 2) == []
    assert await counted(db, "x", 2) == [("a", "many", 4)], "those of this time only"


async def test_the_first_message_of_a_group_does_not_silence_the_number(db: Db) -> None:
    """`new` has a cool-down of its own: the rule's number of deaths is told at the next message."""
    await declare(db, {"deaths": 50})
    assert await counted(db, jobs=20) == [("a", "new", 20)]
    await clock(301, db)
    assert await counted(db, jobs=40) == [("a", "many", 40)]
    await clock(602, db)
    assert await counted(db, jobs=40) == [], "that has a cool-down, too"


async def test_queues_rules_and_groups_apart(db: Db) -> None:
    await declare(db, {"queues": ["mail"]}, {"name": "b", "kind": "pgworkd.alert.b"})
    await die(db, queue="mail")
    await die(db, queue="bills")
    await count(db)
    assert sorted(await messages(db)) == ["a", "b"]
    assert await due(db) == [("a", "new", 1), ("b", "new", 1), ("b", "new", 1)]


async def test_a_muted_group_makes_no_alerts_until_then(db: Db) -> None:
    await declare(db, {"on_new": False, "deaths": 1, "cooldown_s": 0, "bundle_s": 0})
    assert len(await counted(db, "x")) == 1
    await mute(db, await group_of(db, "x"), at(600))
    assert await counted(db, "x") == []
    await clock(600, db)
    assert len(await counted(db, "x")) == 1


async def test_the_death_of_an_alert_makes_no_alert_of_its_rule_and_the_next_job_tells_all(db: Db) -> None:
    await declare(db, {"deaths": 1, "cooldown_s": 0})
    await die(db, "x")
    await count(db)
    worker_id = await db.fetchval("SELECT pgworkd.register('w', 1, 'v', 30)")
    (job,) = await db.fetch("SELECT id FROM pgworkd.claim($1, 'alerts', 1, '{}', '{}')", worker_id)
    await fail(db, [job["id"]], message="no mail server")
    await clock(301, db)
    assert await count(db) == 0
    assert len(await messages(db)) == 1, "it is tried again"
    await db.execute("UPDATE pgworkd.jobs SET status = 'dead' WHERE id = $1", job["id"])
    await db.execute("SELECT pgworkd.note_deaths(ARRAY[$1::uuid])", job["id"])
    assert await count(db) == 1
    assert len(await messages(db)) == 2
    assert await due(db) == [("a", "new", 1)]


async def test_a_step_that_is_rolled_back_makes_its_alerts_later(db: Db, other: Db) -> None:
    await declare(db, {})
    await die(db)
    transaction = db.transaction()
    await transaction.start()
    await count(db)
    assert await messages(db) == ["a"]
    await transaction.rollback()
    assert (await messages(db), await due(db)) == ([], [])
    await count(other)
    await count(db)
    assert (await messages(db), await due(db)) == (["a"], [("a", "new", 1)])


async def test_an_alert_that_cannot_be_inserted_loses_no_death(db: Db) -> None:
    await declare(db, {}, {"name": "b", "kind": "pgworkd.alert.b", "queue": "other"})
    await die(db)
    await refuse(db, "alerts", column="queue", when="INSERT")
    assert await count(db) == 1
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'other'") == 1
    assert await refused_rows(db) == {"make_alerts": {"a"}}
    await db.execute("DELETE FROM public.kept; DELETE FROM pgworkd.refused_rows")
    assert await count(db) == 0
    assert (await messages(db), len(await due(db))) == (["a"], 2)


async def test_a_message_is_told_of_with_the_end_of_its_job_or_not_at_all(db: Db) -> None:
    await declare(db, {})
    await die(db, "x", 7)
    await count(db)
    transaction = db.transaction()
    await transaction.start()
    assert await tell(db) == [("a", "new", 7)]
    assert await due(db) == []
    await transaction.rollback()
    assert await due(db) == [("a", "new", 7)]
    assert await tell(db) == [("a", "new", 7)]


async def test_deaths_that_come_between_a_message_and_its_end_are_told_later(db: Db) -> None:
    await declare(db, {})
    for message, later in (("x", 5), ("y", 50)):
        await die(db, message)
        await count(db)
        groups = [await group_of(db, message)]
        await die(db, message, later)
        await count(db)
        await db.execute("SELECT pgworkd.told('a', $1, '{1}')", groups)
    assert await due(db) == [("a", "more", 50)]
    await clock(3600, db)
    assert sorted(await due(db)) == [("a", "more", 5), ("a", "more", 50)]


async def test_a_late_attempt_untells_nothing(db: Db) -> None:
    await declare(db, {})
    await counted(db, "x", 7)
    await db.execute("SELECT pgworkd.told('a', $1, '{3}')", [await group_of(db, "x")])
    assert await db.fetchval("SELECT told FROM pgworkd.alerts") == 7


async def test_more_deaths_than_one_step_make_one_message(db: Db) -> None:
    await declare(db, {"deaths": 8})
    await die(db, "x", 20)
    while await count(db, 3):
        pass
    assert (await messages(db), await tell(db)) == (["a"], [("a", "new", 20)])


async def test_a_job_that_dies_again_may_make_an_alert(db: Db) -> None:
    await declare(db, {"on_new": False, "deaths": 2, "cooldown_s": 0})
    (job_id,) = await die(db)
    await retry(db, job_id)
    worker_id = await db.fetchval("SELECT pgworkd.register('w', 1, 'v', 30)")
    await db.fetch("SELECT id FROM pgworkd.claim($1, 'q', 1, '{}', '{}')", worker_id)
    await fail(db, [job_id], 2, permanent=True)
    await count(db)
    assert await due(db) == [("a", "many", 2)]


async def test_a_group_that_was_forgotten_is_told_of_no_more(db: Db) -> None:
    await declare(db, {})
    await die(db)
    await count(db)
    await db.execute("DELETE FROM pgworkd.error_groups")
    await tell(db)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.alerts") == 0


async def test_after_a_step_back_of_the_clock_alerts_go_on(db: Db) -> None:
    """What lies ahead by then holds nothing back: no cool-down, no message, and no deaths that are not counted yet."""
    await declare(db, {"deaths": 2, "cooldown_s": 86_400})
    assert await counted(db, "x") == [("a", "new", 1)]
    await die(db, "x")
    await count(db)  # its rest is due at the end of the cool-down
    await die(db, "y")
    await clock(-86_400 * 3, db)
    assert await count(db) == 1
    assert sorted(await tell(db)) == [("a", "many", 1), ("a", "new", 1)]
    assert await counted(db, "z") == []
    await clock(-86_400 * 3 + 301, db)
    await count(db)
    assert await tell(db) == [("a", "new", 1)]
    row = await db.fetchrow("SELECT first_at, last_at FROM pgworkd.error_groups WHERE pattern = 'z'")
    assert row is not None
    assert row["first_at"] == at(-86_400 * 3), "the first, by the clock"


@pytest.mark.parametrize(("seed", "rule"), [(1, {}), (2, {}), (3, {"on_new": False, "deaths": 1})])
async def test_whatever_happens_all_is_told_and_messages_are_bounded(db: Db, seed: int, rule: dict[str, Any]) -> None:
    """Deaths of few and of many groups, messages that are late, lost and sent twice, over three hours; then silence."""
    chance = random.Random(seed)  # noqa: S311 - it decides what comes next
    await declare(db, {"cooldown_s": 1800, **rule})
    now, sent, told, died = 0.0, list[float](), Counter[str](), Counter[str]()
    while now < 14_400:
        now += chance.choice((1, 10, 100, 400))
        await clock(now, db)
        for _ in range(chance.randrange(3) if now < 10_800 else 0):
            message = f"cause {chance.choice('abcdefghijkl')}"
            died[message] += (jobs := chance.choice((1, 1, 2, 30)))
            await die(db, message, jobs)
        await count(db)
        assert len(await messages(db)) <= 1
        if chance.random() < 0.5 and (found := await tell(db)):
            sent.append(now)
            told["deaths"] += sum(deaths for *_, deaths in found)
    assert told["deaths"] == died.total()
    assert await db.fetchval("SELECT count(*) FROM pgworkd.alerts WHERE due_at IS NOT NULL") == 0
    assert len(sent) <= now / 300 + 1


async def test_rules_of_two_applications_leave_each_other_alone(db: Db) -> None:
    """A rule goes a day after its last declaration, unless a worker that lives has a handler for its jobs."""
    other = {"name": "b", "kind": "pgworkd.alert.b"}
    names = "SELECT array_agg(name::text ORDER BY name) FROM pgworkd.alert_rules"
    await declare(db, {})
    await declare(db, other)
    await counted(db)
    await declare(db, {"deaths": 5})
    assert await db.fetchval(names) == ["a", "b"]
    row = await db.fetchrow("SELECT deaths, bundle_s, job_at FROM pgworkd.alert_rules WHERE name = 'a'")
    assert row is not None
    assert tuple(row) == (5, 300, at(0)), "when it sent the last message is not forgotten"
    await clock(86_401, db)
    await db.execute("SELECT pgworkd.register('w', 1, 'v', 30, NULL, '{pgworkd.alert.b}')")
    await declare(db)
    assert await db.fetchval(names) == ["b"], "its worker may be about to declare it again"
    await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
    await declare(db, {})
    assert await db.fetchval(names) == ["a"]


async def test_the_worker_role_makes_alerts_and_notes_what_was_told(db: Db, roles: Roles) -> None:
    await die(db)
    async with roles.session("worker") as ours:
        await declare(ours, {})
        await count(ours)
        await ours.execute("SELECT pgworkd.told('a', $1, '{1}')", [await group_of(db, "it broke")])
    assert await messages(db) == ["a"]
    assert await db.fetchval("SELECT told FROM pgworkd.alerts") == 1


async def test_retired_jobs_are_no_deaths(db: Db) -> None:
    ids: list[uuid.UUID] = await insert_running(db, 2)
    await complete(db, ids)
    assert await count(db) == 0


async def test_it_is_known_when_the_next_message_is_due(db: Db) -> None:
    await declare(db, {"bundle_s": 30})
    ask = "SELECT pgworkd.next_alert_s()"
    assert await db.fetchval(ask) is None
    await counted(db, "first")
    assert await db.fetchval(ask) is None
    await clock(10, db)
    assert await counted(db, "second") == []
    assert await db.fetchval(ask) == 20
