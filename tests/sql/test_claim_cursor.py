"""claim() with cursors: the position each priority was claimed up to, and priorities without one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest

from pgworkd.core.claims import Claims
from pgworkd.engine.claim.claim_cursor import ClaimCursor
from tests.kits.sessions import NO_STATISTICS, blocks
from tests.kits.verbs import T0, Db, at, claim, claim_ids, clock, complete, fail, in_order, insert, live, one, worker

from .conftest import Connect

pytestmark = [pytest.mark.usefixtures("t0"), pytest.mark.slow("claims from each position, in each order")]

NIL = uuid.UUID(int=0)
TOP = uuid.UUID(int=2**128 - 1)
CLAIM = "SELECT * FROM pgworkd.claim($1, $2, $3, $4, $5, $6, $7, $8)"
Places = Mapping[int, tuple[datetime | float, uuid.UUID]]


def arguments(worker_id: int, limit: int, places: Places) -> list[Any]:
    """Of claim(); `places`: (run_at, id) by priority."""
    known = sorted(places, reverse=True)
    run_ats = [r.timestamp() if isinstance(r, datetime) else r for r, _ in (places[p] for p in known)]
    return [worker_id, "q", limit, [], [], known, run_ats, [places[p][1] for p in known]]


async def claim_behind(db: Db, worker_id: int, places: Places, limit: int = 100) -> list[uuid.UUID]:
    """The ids claimed from these cursors, in their order."""
    return [row["id"] for row in in_order(await db.fetch(CLAIM, *arguments(worker_id, limit, places)))]


# Strictly after the cursor


async def test_a_claim_starts_strictly_after_its_cursor(db: Db) -> None:
    before, there, behind = [await one(db, run_at=at(n)) for n in (-3, -2, -1)]
    worker_id = await worker(db)
    assert await claim_behind(db, worker_id, {0: (at(-2), there)}) == [behind]
    assert await claim_behind(db, worker_id, {0: (at(-2), NIL)}) == [there]
    assert await claim_ids(db, worker_id) == [before]


async def test_limits_alone_do_not_change_where_a_claim_starts(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, max_running, rate, rate_period_s) VALUES ('q', 3, 1000, 1)")
    await one(db, run_at=at(-9))
    there, *behind = [await one(db, run_at=at(n)) for n in (-5, -4, -3, -2, -1)]
    worker_id = await worker(db)
    assert await claim_behind(db, worker_id, {0: (at(-5), there)}) == behind[:3]


async def test_among_rows_of_one_instant_the_id_decides(db: Db) -> None:
    ids = [uuid.UUID(int=n << 64) for n in range(1, 10)]
    for job_id in reversed(ids):
        await one(db, id=job_id, run_at=at(-1))
    worker_id = await worker(db)
    assert await claim_behind(db, worker_id, {0: (at(-1), TOP)}) == []
    assert await claim_behind(db, worker_id, {0: (at(-1), ids[5])}) == ids[6:]
    assert await claim_behind(db, worker_id, {0: (at(-1), uuid.UUID(int=5))}) == ids[:6]


@pytest.mark.parametrize("year", [1970, 2026, 2106, 2199])
async def test_cursors_are_exact_to_the_microsecond_in_any_year(db: Db, year: int) -> None:
    """A claim returns run_at as a double; passed back, it must be the very same instant."""
    base = T0.replace(year=year, month=11, day=5, minute=59, second=58)
    await db.execute("SELECT set_config('pgworkd.clock', $1, false)", str(base + timedelta(seconds=9)))
    worker_id = await worker(db)
    instants = [base + timedelta(microseconds=n) for n in (0, 1, 2, 499_999, 500_000, 500_001, 999_998, 999_999)]
    ids = [await one(db, run_at=instant) for instant in instants]
    taken, places = [], {}
    while rows := await db.fetch(CLAIM, *arguments(worker_id, 1, places)):
        taken.append(rows[0]["id"])
        places = {0: (rows[0]["run_at"], TOP)}  # TOP: had the cursor moved back, the previous row would come first
        assert len(taken) <= len(ids)
    assert taken == ids
    await db.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL")
    for n, instant in enumerate(instants):
        async with db.transaction():
            seen = await claim_behind(db, worker_id, {0: (instant.timestamp(), NIL)})
            assert seen == ids[n:]
            await db.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL")


async def test_a_cursor_in_the_future_or_before_1970_is_accepted(db: Db) -> None:
    job_id = await one(db)
    worker_id = await worker(db)
    assert await claim_behind(db, worker_id, {0: (at(3600), NIL)}) == []
    assert await claim_behind(db, worker_id, {0: (-5.12, NIL)}) == [job_id]


async def test_a_failed_job_and_one_with_an_expiry_are_found_after_a_cursor(db: Db) -> None:
    worker_id = await worker(db)
    failed = await one(db, run_at=at(-9))
    await claim(db, worker_id)
    await fail(db, [failed], delay_s=1)
    await clock(1, db)
    expiring, gone = await one(db, run_at=at(1), expires_at=at(5)), await one(db, run_at=at(1), expires_at=at(1))
    assert await claim_behind(db, worker_id, {0: (at(0), TOP)}) == sorted([failed, expiring])
    assert (await live(db, gone))["status"] == "pending"


# Known and unknown priorities


async def test_unknown_priorities_above_between_and_below_are_found_in_order(db: Db) -> None:
    found, places = [], {}
    for priority in (2**31 - 1, 8, 7, 5, 4, 0, -1, -5, -(2**31)):
        old, new = await one(db, priority=priority, run_at=at(-9)), await one(db, priority=priority, run_at=at(-1))
        if priority in (7, 4, 0, -1):
            places[priority] = (at(-5), NIL)
            found.append(new)
        else:
            found += [old, new]
    places[9] = places[3] = places[-9] = (at(-5), NIL)  # has a cursor, empty now
    worker_id = await worker(db)
    taken = []
    for limit in (1, 2, 3, 6, 100):
        async with db.transaction():
            assert await claim_behind(db, worker_id, places, limit) == found[:limit]
            taken = await db.fetch("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL RETURNING 1")
    assert len(taken) == 18
    assert await claim_behind(db, worker_id, places, 100) == found


@pytest.mark.parametrize("edge", [2**31 - 1, -(2**31)])
async def test_the_first_and_the_last_priority_may_be_known(db: Db, edge: int) -> None:
    old, new, other = await one(db, priority=edge, run_at=at(-9)), await one(db, priority=edge), await one(db)
    worker_id = await worker(db)
    expected = [new, other] if edge > 0 else [other, new]
    assert await claim_behind(db, worker_id, {edge: (at(-1), NIL)}) == expected
    assert await claim_ids(db, worker_id) == [old]


async def test_an_unknown_priority_without_due_jobs_does_not_hide_lower_ones(db: Db) -> None:
    await one(db, priority=5, run_at=at(60))
    await one(db, priority=2, run_at=at(60))
    high, low = await one(db, priority=3), await one(db, priority=1)
    places: Places = {4: (at(-5), NIL), 3: (at(-5), NIL)}
    assert await claim_behind(db, await worker(db), places) == [high, low]


async def test_more_than_two_hundred_unknown_priorities_beside_known_ones(db: Db) -> None:
    expected = []
    for priority in range(230, 0, -1):
        old, new = await one(db, priority=priority, run_at=at(-9)), await one(db, priority=priority)
        expected += [new] if priority > 220 else [old, new]
    places: Places = {p: (at(-5), NIL) for p in range(230, 220, -1)}
    assert await claim_behind(db, await worker(db), places, 1000) == expected


async def test_rows_of_another_queue_are_not_touched(db: Db) -> None:
    await one(db, "r", priority=3)
    job_id = await one(db)
    assert await claim_behind(db, await worker(db), {0: (at(-1), NIL), 3: (at(-1), NIL)}) == [job_id]


async def test_suspects_are_claimed_regardless_of_the_cursor(db: Db) -> None:
    """They have a short index of their own, which is always scanned from its head."""
    worker_id = await worker(db)
    old = await one(db, run_at=at(-60), losses=2)
    new = await one(db, run_at=at(-1))
    places: Places = {0: (at(-5), NIL)}
    assert await claim_behind(db, worker_id, places) == [old, new]
    await one(db, run_at=at(-60), losses=2)
    assert await claim_behind(db, worker_id, places) == [], "one suspect at a time, with places or without"


# Purpose


async def test_a_claim_after_its_cursor_does_not_scan_finished_jobs(db: Db, connect: Connect) -> None:
    await db.execute(NO_STATISTICS)
    worker_id, held = await worker(db), await connect()
    await held.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await held.fetchval("SELECT count(*) FROM pgworkd.jobs")  # from here on vacuum cannot remove anything
    for priority in (0, 3):
        await db.execute(
            """INSERT INTO pgworkd.jobs (queue, priority, run_at)
               SELECT 'q', $1, pgworkd.clock() - make_interval(secs => 100 - i / 200.0)
               FROM generate_series(1, 10000) i""",
            priority,
        )
    places = {}
    while rows := await db.fetch(CLAIM, *arguments(worker_id, 10_000, places)):
        places |= {row["priority"]: (row["run_at"], row["id"]) for row in rows}
        ids = [row["id"] for row in rows]
        assert await complete(db, ids) == set(ids)
    assert set(places) == {0, 3}
    await insert(db, 10)
    await insert(db, 10, priority=3)
    begun_behind = await blocks(db, CLAIM, *arguments(worker_id, 20, places))
    at_the_head = await blocks(db, CLAIM, *arguments(worker_id, 20, {}))
    assert begun_behind < at_the_head / 3, (begun_behind, at_the_head)
    assert begun_behind < 1000
    assert len(await claim_behind(db, worker_id, places)) == 20


async def test_120_priorities_cost_the_same_while_vacuum_is_held_back(db: Db, connect: Connect) -> None:
    await db.execute(NO_STATISTICS)
    worker_id, held, cursor = await worker(db, 3600), await connect(), ClaimCursor()
    sql = """INSERT INTO pgworkd.jobs (queue, priority, run_at)
             SELECT 'q', 3 * (n % 120), $1 FROM generate_series(1, 120 * $2::int) n"""

    async def run_all(second: int, each: int) -> int:
        """Claims and completes this many jobs of each priority; the pages that a claim of one more job then touches."""
        await clock(second, db)
        await db.execute(sql, at(second), each)
        while rows := await claimed(1000):
            await complete(db, [row.id for row in rows])
        await one(db, run_at=at(second))
        return await blocks(db, CLAIM, worker_id, "q", 10, [], [], *cursor.start(0.001))

    async def claimed(limit: int) -> Claims:
        order = (worker_id, "q", limit, [], [], *cursor.start(0.001))
        rows = Claims.read([tuple(row) for row in await db.fetch(CLAIM, *order)])
        cursor.claimed(rows, 0.001, 0.0, full=len(rows) == limit)
        return rows

    cursor.start(0.0)
    cursor.claimed([], 0.0, 0.0, full=False)  # the next sweeps come later
    alone = await run_all(1, 100)
    await held.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await held.fetchval("SELECT count(*) FROM pgworkd.jobs")
    await run_all(2, 50)
    assert await run_all(3, 50) <= 1.5 * alone + 100


# max_attempts
