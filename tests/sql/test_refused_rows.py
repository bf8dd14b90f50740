"""A row that refuses maintenance, by a trigger or foreign key of others, does not delay other rows."""

from __future__ import annotations

import uuid

import asyncpg
import pytest

from tests.kits import batches
from tests.kits.sessions import REFUSE, refuse, refused_rows
from tests.kits.verbs import Db, at, claim, clock, insert, insert_running, rescue, statuses, steady, worker

pytestmark = pytest.mark.usefixtures("t0")

DAY = 86_400


async def lost(db: Db, count: int, **columns: object) -> tuple[list[uuid.UUID], int]:
    """Jobs of a worker that is lost by now, and a worker that may rescue them."""
    rescuer = await worker(db)
    ids = await insert_running(db, count, **columns)
    await steady(db, rescuer)
    return ids, rescuer


@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_rescue_takes_all_rows_except_those_that_refuse(db: Db, limit: int) -> None:
    ids, rescuer = await lost(db, 7)
    await refuse(db, ids[0], ids[4])
    taken: dict[uuid.UUID, str] = {}
    for _ in range(7):
        taken |= await rescue(db, rescuer, limit)
    assert taken == dict.fromkeys([*ids[1:4], *ids[5:]], "failed")
    assert await refused_rows(db) == {"rescue": {str(ids[0]), str(ids[4])}}
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 2, "the lost worker stays as long as its jobs"


async def test_a_row_that_no_longer_refuses_is_rescued_after_a_pause(db: Db) -> None:
    ids, rescuer = await lost(db, 2)
    await refuse(db, ids[0])
    assert set(await rescue(db, rescuer)) == {ids[1]}
    await db.execute("DELETE FROM public.kept")
    assert await rescue(db, rescuer) == {}
    await steady(db, rescuer, since=60, until=70)
    assert set(await rescue(db, rescuer)) == {ids[0]}
    assert await refused_rows(db) == {}


async def test_a_row_that_keeps_refusing_is_retried_with_growing_pauses(db: Db) -> None:
    ids, rescuer = await lost(db, 1)
    await refuse(db, ids[0])
    pauses, seconds = [], 60.0
    for _ in range(9):
        await rescue(db, rescuer)
        until = await db.fetchval("SELECT until FROM pgworkd.refused_rows")
        pauses.append((until - at(seconds)).total_seconds())
        seconds += pauses[-1]
        await clock(seconds, db)
        await db.execute("UPDATE pgworkd.workers SET steady_since = $1, seen_at = $2, lease_until = $3 WHERE id = $4",
                         at(0), at(seconds), at(seconds + 30), rescuer)  # fmt: skip
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600]


async def test_a_dead_job_whose_dependent_or_batch_refuses_is_skipped_as_a_whole(db: Db) -> None:
    rescuer = await worker(db)
    batch_id, (member,) = await batches.sealed(db)
    ids = [member, *await insert(db, 3)]
    await db.execute("UPDATE pgworkd.jobs SET max_attempts = 1")
    dependent = await batches.after(db, ids[1], on_failed="run")
    await claim(db, await worker(db))
    await steady(db, rescuer)
    await refuse(db, dependent)
    await refuse(db, batch_id, table="batches", when="UPDATE")
    assert await rescue(db, rescuer) == dict.fromkeys(ids[2:], "dead")
    assert await statuses(db, ids[:2]) == ["running"] * 2
    assert await refused_rows(db) == {"rescue": {str(i) for i in ids[:2]}}


async def test_a_constraint_checked_at_commit_counts_as_refusal(db: Db) -> None:
    ids, rescuer = await lost(db, 3)
    await db.execute(
        "CREATE TABLE public.held (job_id uuid REFERENCES pgworkd.jobs (id) DEFERRABLE INITIALLY DEFERRED);"
        "UPDATE pgworkd.jobs SET cancel_requested_at = pgworkd.clock()"
    )
    await db.execute("INSERT INTO public.held VALUES ($1)", ids[0])
    assert await rescue(db, rescuer) == dict.fromkeys(ids[1:], "cancelled")
    assert await refused_rows(db) == {"rescue": {str(ids[0])}}


@pytest.mark.parametrize(("error", "code"), [("lock_not_available", "55P03"), ("deadlock_detected", "40P01")])
async def test_an_error_that_is_not_caused_by_a_row_is_raised(db: Db, error: str, code: str) -> None:
    ids, rescuer = await lost(db, 2)
    await refuse(db, ids[0])
    await db.execute(REFUSE.split(";", 1)[1].replace("CREATE", "CREATE OR REPLACE", 1)
                     .replace("it is'", f"it is' USING ERRCODE = '{error}'"))  # fmt: skip
    with pytest.raises(asyncpg.PostgresError) as raised:
        await rescue(db, rescuer)
    assert raised.value.sqlstate == code
    assert await refused_rows(db) == {}


async def test_a_refused_row_is_reported_once(db: Db) -> None:
    ids, rescuer = await lost(db, 5)
    await refuse(db, *ids[:2])
    await rescue(db, rescuer)
    (row,) = await db.fetch("SELECT * FROM pgworkd.report_refused()")
    assert tuple(row) == ("rescue", "P0001", 2, str(min(ids[:2])), "this one stays as it is")
    await steady(db, rescuer, since=60, until=100)
    await rescue(db, rescuer)
    assert await db.fetch("SELECT * FROM pgworkd.report_refused()") == []
    await clock(2 * DAY, db)
    await db.execute("SELECT pgworkd.prune(7, 30)")
    assert await refused_rows(db) == {}, "nobody has met them for a day"
