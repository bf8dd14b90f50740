"""register, heartbeat, sign_off: the life of a worker and of its lease."""

from __future__ import annotations

import json
import uuid

import anyio
import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def _row(db: Db, worker_id: int) -> asyncpg.Record:
    row = await db.fetchrow("SELECT * FROM pgworkd.workers WHERE id = $1", worker_id)
    assert row is not None
    return row


async def test_register_grants_the_first_lease(db: Db) -> None:
    token = uuid.uuid4()
    worker_id = await db.fetchval("SELECT pgworkd.register('host-1', 4711, '0.1.0', 30, $1)", token)
    assert dict(await _row(db, worker_id)) == {
        "id": worker_id,
        "name": "host-1",
        "pid": 4711,
        "version": "0.1.0",
        "state": "running",
        "lease_s": 30,
        "started_at": v.T0,
        "seen_at": v.T0,
        "steady_since": v.T0,
        "lease_until": v.at(30),
        "lost_at": None,
        "token": token,
        "schedules": None,
        "kinds": None,
        "rules": None,
        "kind": "daemon",
        "requested": None,
    }


async def test_a_long_name_is_truncated_and_an_invalid_lease_refused(db: Db) -> None:
    assert (await _row(db, await v.worker(db, name="ü" * 300)))["name"] == "ü" * 200
    for lease_s in (0, 0.99, 3601, -1, float("nan"), float("inf")):
        with pytest.raises(asyncpg.PostgresError) as caught:
            await v.worker(db, lease_s)
        assert caught.value.sqlstate in {"23514", "22008", "22003"}  # beyond the CHECK, or beyond an interval
    assert await v.worker(db, 1)
    assert await v.worker(db, 3600)


async def test_ids_are_never_reused(db: Db) -> None:
    first, last = await v.worker(db), await v.worker(db)
    assert last > first
    assert await v.sign_off(db, last) is True
    await db.execute("DELETE FROM pgworkd.workers")
    assert await v.worker(db) > last
    with pytest.raises(asyncpg.PostgresError):
        await db.execute(
            "INSERT INTO pgworkd.workers (id, name, pid, version, lease_s, lease_until) VALUES (1, '', 1, '', 1, now())"
        )


async def test_a_heartbeat_renews_the_lease(db: Db) -> None:
    worker_id = await v.worker(db, 20)
    await v.clock(8, db)
    answer = await v.heartbeat(db, worker_id, "stopping")
    assert answer is not None
    assert dict(answer) | {"settings_version": ""} == {
        "cancel_ids": [], "cancel_attempts": [], "settings": "{}", "differing": "{}", "settings_version": "",
        "stack_ids": [], "stack_attempts": [],
    }  # fmt: skip
    row = await _row(db, worker_id)
    assert (row["seen_at"], row["lease_until"], row["state"], row["steady_since"]) == (
        v.at(8),
        v.at(28),
        "stopping",
        v.T0,
    )


async def test_a_heartbeat_returns_the_jobs_of_this_worker_to_cancel(db: Db) -> None:
    mine, others = await v.worker(db), await v.worker(db)
    ids = await v.insert(db, 3)
    await v.claim(db, mine)
    await v.cancel(db, *ids[:2])
    (theirs,) = await v.insert(db, 1)
    await v.claim(db, others)
    await v.cancel(db, theirs)
    answer = await v.heartbeat(db, mine)
    assert answer is not None
    assert sorted(zip(answer["cancel_ids"], answer["cancel_attempts"], strict=True)) == [(i, 1) for i in ids[:2]]
    await v.end(db, ids[:1])
    await v.complete(db, ids[1:2])
    answer = await v.heartbeat(db, mine)
    assert answer is not None
    assert (answer["cancel_ids"], answer["cancel_attempts"]) == ([], [])


async def test_a_heartbeat_returns_the_settings_of_all_queues(db: Db) -> None:
    worker_id = await v.worker(db)
    await db.execute(
        "INSERT INTO pgworkd.queues (name, concurrency, paused_until) "
        "VALUES ('q', 4, NULL), ('later', NULL, $1), ('ever', 1, 'infinity'), ('past', 2, $2)",
        v.at(5),
        v.at(0),
    )
    answer = await v.heartbeat(db, worker_id)
    assert answer is not None
    off = {"fair": False, "limited": False}
    assert json.loads(answer["settings"]) == {
        "q": {"concurrency": 4, "paused": False, **off},
        "later": {"paused": True, "paused_until": v.at(5).isoformat(), "pause_s": 5, **off},
        "ever": {"concurrency": 1, "paused": True, "paused_until": "infinity", **off},
        "past": {"concurrency": 2, "paused": False, **off},
    }
    await v.clock(5, db)
    answer = await v.heartbeat(db, worker_id)
    assert answer is not None
    assert json.loads(answer["settings"])["later"] == {"paused": False, **off}


@pytest.mark.parametrize(
    ("gap_s", "is_steady"), [(0, True), (9.9, True), (10, True), (10.1, False), (100, False), (-0.001, False)]
)
async def test_a_gap_of_more_than_half_a_lease_makes_a_worker_unsteady(db: Db, gap_s: float, is_steady: bool) -> None:
    worker_id = await v.worker(db, 20)
    await v.clock(7, db)
    await v.heartbeat(db, worker_id)
    await v.clock(7 + gap_s, db)
    assert await v.heartbeat(db, worker_id) is not None
    row = await _row(db, worker_id)
    assert row["steady_since"] == (v.T0 if is_steady else v.at(7 + gap_s))
    assert (row["seen_at"], row["lease_until"]) == (v.at(7 + gap_s), v.at(27 + gap_s))


async def test_a_clock_set_back_and_forth_shortens_the_lease_and_restarts_steadiness(db: Db) -> None:
    worker_id = await v.worker(db, 20)
    await v.clock(-3600, db)
    assert await v.heartbeat(db, worker_id) is not None
    row = await _row(db, worker_id)
    assert (row["lease_until"], row["steady_since"]) == (v.at(-3580), v.at(-3600))
    await v.clock(-3595, db)
    await v.heartbeat(db, worker_id)
    assert (await _row(db, worker_id))["steady_since"] == v.at(-3600)
    await v.clock(0, db)
    await v.heartbeat(db, worker_id)
    row = await _row(db, worker_id)
    assert (row["lease_until"], row["steady_since"]) == (v.at(20), v.T0)


async def test_a_heartbeat_after_the_lease_but_before_a_rescue_keeps_the_jobs(db: Db) -> None:
    worker_id = await v.worker(db, 10)
    job_id = await v.one(db)
    await v.claim(db, worker_id)
    await v.clock(1000, db)
    assert await v.heartbeat(db, worker_id) is not None
    assert await v.complete(db, [job_id]) == {job_id}


@pytest.mark.parametrize("ending", ["lost", "deleted", "unknown"])
async def test_a_heartbeat_of_a_lost_or_unknown_worker_returns_nothing(db: Db, ending: str) -> None:
    worker_id = await v.worker(db)
    if ending == "lost":
        await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
    elif ending == "deleted":
        await db.execute("DELETE FROM pgworkd.workers")
    else:
        worker_id += 100
    before = await db.fetch("SELECT * FROM pgworkd.workers")
    assert await v.heartbeat(db, worker_id) is None
    assert await db.fetch("SELECT * FROM pgworkd.workers") == before


async def test_a_heartbeat_that_waited_for_a_rescue_reports_the_worker_lost(db: Db, other: Db, third: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db, 60)
    for seconds in (25, 50, 60):
        await v.clock(seconds, db)
        await v.heartbeat(db, rescuer)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await v.rescue(db, rescuer)
        beating = Later(tasks, v.heartbeat(other, victim))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await beating.answer() is None


async def test_an_unknown_worker_state_is_refused(db: Db) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await v.heartbeat(db, await v.worker(db), "asleep")


# Signing off


async def test_sign_off_removes_the_worker_and_its_pools(db: Db) -> None:
    worker_id, stays = await v.worker(db), await v.worker(db)
    for queue in ("q", "r"):
        await v.set_pool(db, worker_id, queue)
    await v.set_pool(db, stays)
    assert await v.sign_off(db, worker_id) is True
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(stays,)]
    assert await db.fetch("SELECT worker_id FROM pgworkd.pools") == [(stays,)]
    assert await v.heartbeat(db, worker_id) is None
    assert await v.sign_off(db, worker_id) is True, "asked again: the answer was lost"


async def test_sign_off_keeps_the_row_while_jobs_run(db: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(db)
    await v.claim(db, worker_id)
    await v.set_pool(db, worker_id)
    assert await v.sign_off(db, worker_id) is False
    assert (await _row(db, worker_id))["lease_until"] == v.at(30)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.pools") == 0
    await v.complete(db, [job_id])
    assert await v.sign_off(db, worker_id) is True


async def test_sign_off_waits_for_a_concurrent_claim_and_sees_its_jobs(db: Db, other: Db, third: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await v.claim(db, worker_id)
        signing = Later(tasks, v.sign_off(other, worker_id))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await signing.answer() is False
    assert await v.complete(db, [job_id]) == {job_id}


async def test_a_claim_that_waited_for_a_sign_off_returns_nothing(db: Db, other: Db, third: Db) -> None:
    worker_id = await v.worker(db)
    job_id = await v.one(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await v.sign_off(db, worker_id) is True
        claiming = Later(tasks, v.claim_ids(other, worker_id))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        with pytest.raises(asyncpg.PostgresError) as caught:
            await claiming.answer()
    assert caught.value.sqlstate == v.LEASE_GONE
    assert await v.statuses(db, [job_id]) == ["pending"]


async def test_a_lost_worker_signs_off_and_leaves_its_row_to_the_rescuer(db: Db) -> None:
    worker_id = await v.worker(db)
    await v.one(db)
    await v.claim(db, worker_id)
    await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
    assert await v.sign_off(db, worker_id) is False
    await db.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL, started_at = NULL")
    assert await v.sign_off(db, worker_id) is True
    assert (await _row(db, worker_id))["lost_at"] == v.T0
