"""rescue restores workers whose rows were deleted, and ids are never reused."""

from __future__ import annotations

import contextlib

import asyncpg
import pytest

from tests.kits.verbs import Db, at, claim, claim_ids, insert, one, rescue, steady, token, worker

pytestmark = pytest.mark.usefixtures("t0")


async def test_a_deleted_worker_row_is_restored_for_its_jobs_and_cannot_be_renewed(db: Db) -> None:
    """The process with that id may be another one: the id had no lease for a while, and others may have the jobs."""
    rescuer, alive = await worker(db), await worker(db)
    job_id, its_token = await one(db), await token(db, alive)
    await claim(db, alive)
    await steady(db, rescuer)
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", alive)
    renew = "SELECT pgworkd.heartbeat($1, $2, 'running')"
    assert await db.fetchval(renew, alive, its_token) is False
    assert await rescue(db, rescuer) == {}
    row = await db.fetchrow("SELECT state, lease_until, lost_at, token FROM pgworkd.workers WHERE id = $1", alive)
    assert row == ("vanished", at(90), None, None)
    for each in (its_token, None):
        assert await db.fetchval(renew, alive, each) is False
    sql = "SELECT pgworkd.settle_completed($1, '{1}', '{NULL}', p_worker => $2, p_token => $3)"
    await db.execute("BEGIN")
    assert await db.fetchval(sql, [job_id], alive, its_token) == [job_id], "what it gives back or has done counts"
    await db.execute("ROLLBACK")
    await steady(db, rescuer, since=60, until=91)
    assert await rescue(db, rescuer) == {job_id: "failed"}
    assert await db.fetchval(sql, [job_id], alive, its_token) == []


async def test_a_restored_row_lasts_for_the_longest_lease(db: Db) -> None:
    """The lease of that worker is unknown: it may still be running its jobs."""
    rescuer, gone, _ = await worker(db), await worker(db, 120), await worker(db, 120)
    await one(db)
    await claim(db, gone)
    await steady(db, rescuer)
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", gone)
    await rescue(db, rescuer)
    assert await db.fetchval("SELECT lease_until FROM pgworkd.workers WHERE id = $1", gone) == at(180)


async def test_a_worker_whose_row_was_deleted_is_rescued_after_one_lease_if_dead(db: Db) -> None:
    rescuer, gone = await worker(db), await worker(db)
    ids = [*await insert(db, 2), *await insert(db, 1, status="running", worker_id=4711)]
    await claim(db, gone)
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", gone)
    await steady(db, rescuer)
    assert await rescue(db, rescuer) == {}
    await steady(db, rescuer, since=60, until=90)
    assert await rescue(db, rescuer) == {}
    await steady(db, rescuer, since=90, until=91)
    assert set(await rescue(db, rescuer)) == set(ids)
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]


async def test_an_id_is_not_reused_after_its_worker_was_rescued(db: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]
    assert await worker(db) > rescuer > victim


async def test_register_never_collides_with_an_id_that_rescue_restored(db: Db) -> None:
    """A hand-made running row names an id ahead of the sequence: it is restored, and register must not raise 23505."""
    rescuer = await worker(db)
    await insert(db, 1, status="running", worker_id=rescuer + 1)
    assert await worker(db) > rescuer + 1, "nor one that has jobs and no row"
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await worker(db) > rescuer + 1


async def test_an_extreme_worker_id_does_not_exhaust_the_sequence(db: Db) -> None:
    """setval moves the sequence to its end: from then on every register raises 2200H, and no daemon can start."""
    rescuer = await worker(db)
    with contextlib.suppress(asyncpg.CheckViolationError):  # refused at the insert is as good
        await insert(db, 1, status="running", worker_id=2**31 - 1)
    await insert(db, 1, status="running", worker_id=10**9)
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await worker(db) == rescuer + 1
    await db.execute("SELECT setval('pgworkd.workers_id_seq', 1000000000)")  # as rescue() once did
    job_id, later = await one(db), await worker(db)
    assert 0 < later < 10**9
    assert await claim_ids(db, later) == [job_id]
