"""rescue restores workers whose rows someone deleted, and ids are given out once."""

from __future__ import annotations

import contextlib

import asyncpg
import pytest

from .verbs import Db, at, claim, complete, heartbeat, insert, one, rescue, steady, worker

pytestmark = pytest.mark.usefixtures("t0")


async def test_a_vanished_workers_row_is_restored_and_a_living_worker_finds_itself_again(db: Db) -> None:
    rescuer, alive = await worker(db), await worker(db)
    job_id = await one(db)
    await claim(db, alive)
    await steady(db, rescuer)
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", alive)
    assert await heartbeat(db, alive) is None
    assert await rescue(db, rescuer) == {}
    row = await db.fetchrow("SELECT state, lease_until, lost_at FROM pgworkd.workers WHERE id = $1", alive)
    assert row == ("vanished", at(90), None)
    assert await heartbeat(db, alive) is not None
    await steady(db, rescuer, alive, since=60, until=120)
    assert await rescue(db, rescuer) == {}
    assert await complete(db, [job_id]) == {job_id}


async def test_a_vanished_worker_that_is_dead_is_rescued_after_one_lease(db: Db) -> None:
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


async def test_an_id_is_not_given_out_again_after_its_worker_was_rescued(db: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]
    assert await worker(db) > rescuer > victim


async def test_register_never_meets_an_id_that_rescue_restored(db: Db) -> None:
    """A hand-made running row names an id ahead of the sequence: it is restored, and register must not raise 23505."""
    rescuer = await worker(db)
    await insert(db, 1, status="running", worker_id=rescuer + 1)
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await worker(db) > rescuer + 1


async def test_an_absurd_worker_id_does_not_use_up_all_ids(db: Db) -> None:
    """setval takes the sequence to its end: from then on every register raises 2200H, and no daemon can start."""
    rescuer = await worker(db)
    with contextlib.suppress(asyncpg.CheckViolationError):  # refused at the insert is as good
        await insert(db, 1, status="running", worker_id=2**31 - 1)
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await worker(db) > rescuer
