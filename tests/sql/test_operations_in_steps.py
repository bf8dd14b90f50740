"""Operations in the background: done in steps, once for each job that was there, and past what is locked or refused."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from tests.kits import batches as b
from tests.kits import verbs as v
from tests.kits.daemon import until
from tests.kits.sessions import refuse
from tests.kits.verbs import Db
from tests.sql.conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")
Row = dict[str, Any]


async def dead(db: Db, count: int = 1, **columns: Any) -> list[uuid.UUID]:
    """Jobs that have died, in order of id."""
    ids = await v.insert_running(db, count, **columns)
    await v.fail(db, ids, permanent=True)
    return sorted(ids)


async def start(db: Db, what: str = "retry", **which: Any) -> int:
    """Starts an operation on the jobs of q, or of `which`; its id."""
    given = which or {"queue": "q"}
    names = ", ".join(f"p_{name} => ${number}" for number, name in enumerate(given, 2))
    sql = f"SELECT pgworkd.start_operation($1, {names}, p_by => 'ann')"
    return int(await db.fetchval(sql, what, *given.values()))


async def advance(db: Db, limit: int = 5) -> float | None:
    """A step; the seconds until the next."""
    due_s: float | None = await db.fetchval("SELECT pgworkd.advance_operations($1)", limit)
    return due_s


async def go_on(db: Db, limit: int = 5, steps_max: int = 100) -> None:
    """Steps until none is due at this instant."""
    for _ in range(steps_max):
        if await advance(db, limit):
            return
        if not await db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.operations WHERE finished_at IS NULL)"):
            return
    raise AssertionError("it does not end")


async def operation(db: Db, number: int) -> Row:
    """Its row."""
    return dict(await db.fetchrow("SELECT * FROM pgworkd.operations WHERE id = $1", number) or {})


def counts(row: Row) -> tuple[int, int, int, bool]:
    """What it has done, asked for and not done, and whether it has finished."""
    return row["done"], row["requested"], row["refused"], row["finished_at"] is not None


async def locks(session: Db, ids: Sequence[uuid.UUID], table: str = "jobs") -> Any:
    """Opens a transaction that locks these rows."""
    transaction = session.transaction()
    await transaction.start()
    await session.execute(f"SELECT FROM pgworkd.{table} WHERE id = ANY ($1) FOR UPDATE", ids)
    return transaction


async def test_it_does_what_was_there_in_steps_and_nothing_that_came_later(db: Db) -> None:
    ids = await dead(db, 12)
    number = await start(db)
    assert (await operation(db, number))["expected"] == 12
    assert await advance(db) == 0
    assert counts(await operation(db, number)) == (5, 0, 0, False), "a step has no more jobs than its limit"
    await v.clock(5, db)
    late = await dead(db, 1, queue="q", priority=9)  # it dies after the start
    await go_on(db)
    assert counts(await operation(db, number)) == (12, 0, 0, True)
    assert await v.statuses(db, ids) == ["pending"] * 12
    assert await v.statuses(db, late) == ["dead"]
    assert await advance(db) is None


async def test_a_job_that_dies_again_is_not_retried_again(db: Db) -> None:
    ids = await dead(db, 3)
    number = await start(db)
    await advance(db, 2)
    await v.clock(1, db)
    again = await v.claim_ids(db, await v.worker(db), 10)
    assert again == ids[:2]
    await v.fail(db, again, 2, permanent=True)
    await go_on(db)
    assert counts(await operation(db, number)) == (3, 0, 0, True)
    assert await v.statuses(db, ids) == ["dead", "dead", "pending"]


@pytest.mark.parametrize("what", ["retry", "cancel", "discard"])
async def test_locked_jobs_wait_for_another_round_and_hold_up_no_other(db: Db, other: Db, what: str) -> None:
    ids = sorted(await v.insert(db, 7)) if what == "cancel" else await dead(db, 7)
    number = await start(db, what)
    held = await locks(other, [ids[0], ids[3]])
    await go_on(db)
    assert counts(await operation(db, number)) == (5, 0, 0, False)
    await v.clock(60, db)
    await go_on(db)
    assert counts(await operation(db, number)) == (5, 0, 0, False), "they are locked still"
    await held.rollback()
    await v.clock(180, db)
    await go_on(db)
    assert counts(await operation(db, number)) == (7, 0, 0, True)
    assert set(await v.statuses(db, ids)) == {{"retry": "pending", "cancel": "cancelled", "discard": "discarded"}[what]}


async def test_a_locked_batch_holds_up_only_its_own_jobs(db: Db, other: Db) -> None:
    root, mine = await b.sealed(db, 2)
    assert set(await v.claim_ids(db, await v.worker(db))) == set(mine)
    await v.fail(db, mine, permanent=True)
    plain = await dead(db, 6)
    number = await start(db)
    held = await locks(other, [root], "batches")
    await go_on(db)
    assert counts(await operation(db, number)) == (6, 0, 0, False)
    assert await v.statuses(db, plain) == ["pending"] * 6
    await held.rollback()
    await v.clock(60, db)
    await go_on(db)
    assert counts(await operation(db, number)) == (8, 0, 0, True)


async def test_a_job_that_cannot_be_changed_is_counted_with_its_reason(db: Db) -> None:
    ids = await dead(db, 5)
    await refuse(db, ids[2])
    (taken,) = await dead(db, 1, dedupe_key="k")
    await v.one(db, "q", dedupe_key="k")
    number = await start(db)
    await go_on(db)
    row = await operation(db, number)
    assert counts(row) == (4, 0, 2, True)
    assert row["reason"]
    assert await v.statuses(db, [ids[2], taken]) == ["dead", "dead"]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.refused_rows WHERE what = $1", f"operation {number}") == 2


async def test_what_refused_is_tried_again_by_the_next_one_at_once(db: Db) -> None:
    """Whoever has mended the cause retries, and does not wait until the refusal is forgotten."""
    (one,) = await dead(db, 1, dedupe_key="k")
    holder = await v.one(db, "other", dedupe_key="k")
    await db.execute("UPDATE pgworkd.jobs SET queue = 'q' WHERE id = $1", holder)
    first = await start(db)
    await go_on(db)
    assert counts(await operation(db, first)) == (0, 0, 1, True)
    await v.cancel(db, holder)
    second = await start(db)
    await go_on(db)
    assert counts(await operation(db, second)) == (1, 0, 0, True)
    assert await v.statuses(db, [one]) == ["pending"]


async def test_what_matches_is_counted_beyond_one_page(db: Db) -> None:
    await v.insert(db, 10_500)
    number = await start(db, "cancel")
    assert (await operation(db, number))["expected"] == 10_500


async def test_running_jobs_are_asked_to_stop_once(db: Db, other: Db) -> None:
    running = await v.insert_running(db, 3)
    waiting = await v.insert(db, 3)
    number = await start(db, "cancel")
    held = await locks(other, waiting[:1])
    await go_on(db, 2)
    assert counts(await operation(db, number)) == (2, 3, 0, False)
    await held.rollback()
    await v.clock(60, db)
    await go_on(db, 2)
    assert counts(await operation(db, number)) == (3, 3, 0, True)
    assert await v.statuses(db, waiting + running) == ["cancelled"] * 3 + ["running"] * 3


async def test_what_is_stopped_goes_no_further(db: Db) -> None:
    ids = await dead(db, 9)
    number = await start(db)
    await advance(db)
    assert await db.fetchval("SELECT pgworkd.stop_operation($1, 'bob')", number)
    assert not await db.fetchval("SELECT pgworkd.stop_operation($1, 'bob')", number)
    assert await advance(db) is None
    row = await operation(db, number)
    assert (counts(row), row["stopped_by"]) == ((5, 0, 0, True), "bob")
    assert await v.statuses(db, ids) == ["pending"] * 5 + ["dead"] * 4


async def test_two_take_turns_and_the_same_one_is_not_started_twice(db: Db) -> None:
    many, few = await dead(db, 20), await dead(db, 2, queue="r")
    first = await start(db)
    assert await start(db) == first
    second = await start(db, queue="r")
    assert second != first
    await v.clock(1, db)
    await advance(db)
    await advance(db)
    assert (await operation(db, second))["finished_at"] is not None
    assert await v.statuses(db, few) == ["pending"] * 2
    assert await v.statuses(db, many) == ["pending"] * 5 + ["dead"] * 15


async def test_one_session_does_a_step_at_a_time_and_a_killed_one_loses_only_its_step(db: Db, other: Db) -> None:
    await dead(db, 9)
    number = await start(db)
    async with db.transaction():
        await advance(db)
        assert await advance(other) == 5
        assert counts(await operation(other, number)) == (0, 0, 0, False)
    doing = other.transaction()
    await doing.start()
    await advance(other)
    other.terminate()

    async def is_free() -> bool:
        return await advance(db) != 5

    await until(is_free)
    await go_on(db)
    assert counts(await operation(db, number)) == (9, 0, 0, True)


async def test_the_audit_says_who_has_started_it_and_what_became_of_it(db: Db) -> None:
    ids = await dead(db, 2)
    number = await start(db)
    await go_on(db)
    rows = await db.fetch("SELECT who, what, queue, job_id, after->>'became', after->>'done' FROM pgworkd.audit")
    assert [tuple(row) for row in rows if row["job_id"] is None] == [
        ("ann", "retry", "q", None, "started", "0"),
        ("ann", "retry", "q", None, "finished", "2"),
    ]
    assert sorted(row["job_id"] for row in rows if row["job_id"]) == ids
    assert await db.fetchval("SELECT (after->>'operation')::int FROM pgworkd.audit LIMIT 1") == number


@pytest.mark.parametrize(
    ("what", "which", "says"),
    [
        ("retry", {"queue": None}, "nothing says which jobs to retry"),
        ("mend", {"queue": "q"}, "p_what is 'mend'"),
        ("cancel", {"queue": "q", "status": "dead"}, "cannot cancel a job whose status is dead"),
    ],
)
async def test_what_makes_no_sense_is_not_started(db: Db, what: str, which: Row, says: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=says):
        await start(db, what, **which)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.operations") == 0


async def test_a_hundred_at_once_are_enough(db: Db) -> None:
    for number in range(100):
        await start(db, queue=f"q{number}")
    with pytest.raises(asyncpg.ProgramLimitExceededError, match="100 operations"):
        await start(db)
    assert await start(db, queue="q7") == 8, "one that is there already"


async def test_daemons_are_notified_and_what_is_over_is_forgotten(db: Db, connect: Connect) -> None:
    heard: list[str] = []
    listener = await connect()
    await listener.add_listener("pgworkd", lambda *said: heard.append(str(said[3])))
    number = await start(db)
    await go_on(db)
    await listener.fetchval("SELECT 1")
    assert '{"operations": true}' in heard
    await v.clock(6 * 86_400, db)
    await db.fetch("SELECT * FROM pgworkd.prune(1, 30)")
    assert await operation(db, number)
    await v.clock(8 * 86_400, db)
    await db.fetch("SELECT * FROM pgworkd.prune(1, 30)")
    assert not await operation(db, number)
