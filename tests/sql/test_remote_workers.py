"""Remote workers: their leases, who judges them, their sign-off, what operators ask of them."""

from __future__ import annotations

import json
import uuid

import asyncpg
import pytest

from tests.kits.remote import Waiter, beat, claim_for, registered, standing
from tests.kits.verbs import Db, at, clock, heartbeat, insert, live, one, rescue, set_pool, statuses, steady, worker

from .conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")


async def test_a_kind_that_is_unknown_is_refused(db: Db) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="workers_kind_check"):
        await registered(db, "robot")


async def test_the_standing_worker_is_one_and_has_a_token(db: Db, other: Db) -> None:
    first = await db.fetchrow("SELECT * FROM pgworkd.standing_worker()")
    assert first == await other.fetchrow("SELECT * FROM pgworkd.standing_worker()")
    assert first["token"] is not None
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE kind = 'standing'") == 1


async def test_leases_are_renewed_together_and_each_learns_its_own(db: Db, other: Db) -> None:
    fine, lost, locked, gone = [await registered(db) for _ in range(4)]
    await db.execute("UPDATE pgworkd.workers SET lost_at = $2 WHERE id = $1", lost, at(0))
    await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", gone)
    await db.execute("SELECT pgworkd.ask_worker($1, 'quiet', 'ann')", fine)
    await clock(7, db)
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.workers WHERE id = $1 FOR UPDATE", locked)
        expected = {fine: "renewed", lost: "lost", locked: "locked", gone: "lost"}
        assert await beat(db, locked, gone, lost, fine) == expected
    row = await db.fetchrow("SELECT * FROM pgworkd.workers WHERE id = $1", fine)
    assert (row["seen_at"], row["lease_until"], row["steady_since"]) == (at(7), at(37), at(0))
    assert await beat(db, locked) == {locked: "renewed"}
    asked = await db.fetch(
        "SELECT requested, lease_s FROM pgworkd.heartbeats($1, $2, '{stopping}')", [fine], [row["token"]]
    )
    assert asked == [("quiet", 30.0)]
    assert await db.fetchval("SELECT state FROM pgworkd.workers WHERE id = $1", fine) == "stopping"


async def test_another_token_renews_nothing(db: Db) -> None:
    worker_id = await registered(db)
    sql = "SELECT outcome FROM pgworkd.heartbeats($1, $2, '{running}')"
    assert await db.fetchval(sql, [worker_id], [uuid.uuid4()]) == "lost"


async def _remote_job(db: Db, lease_s: float = 30) -> tuple[int, uuid.UUID]:
    worker_id, job_id = await registered(db, lease_s=lease_s), await one(db)
    assert await claim_for(db, Waiter(worker_id)) == {worker_id: [job_id]}
    return worker_id, job_id


async def test_without_a_gateway_nobody_remote_is_presumed_dead(db: Db) -> None:
    _, job_id = await _remote_job(db)
    daemon = await worker(db)
    await steady(db, daemon, until=3000)
    assert await rescue(db, daemon) == {}
    assert await statuses(db, [job_id]) == ["running"]


@pytest.mark.parametrize("lease_s", [10, 30, 120])
async def test_a_gateway_must_have_been_there_for_a_whole_lease_of_the_worker(db: Db, lease_s: float) -> None:
    _, job_id = await _remote_job(db, lease_s)
    daemon = await worker(db)
    await steady(db, daemon, until=1000)
    gateway = await registered(db, "gateway")
    taken_at = 0
    for second in range(1010, 1400, 10):
        await steady(db, daemon, gateway, since=second - 10, until=second)
        if await rescue(db, daemon):
            taken_at = second
            break
    assert await statuses(db, [job_id]) == ["failed"]
    assert lease_s <= taken_at - 1000 <= lease_s + 40


async def test_a_gateway_beside_others_has_been_there_for_as_long_as_they_have(db: Db) -> None:
    """Else a gateway that is deployed anew every few minutes would put off each rescue for ever."""
    _, job_id = await _remote_job(db, 300)
    daemon, gateway, second = await worker(db), await registered(db, "gateway"), 0
    while second < 600:
        await steady(db, daemon, gateway, since=second, until=second + 100)
        second += 100
        newer = await registered(db, "gateway")
        await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", gateway)
        gateway = newer
    await steady(db, daemon, gateway, since=second, until=second + 10)
    assert list(await rescue(db, daemon)) == [job_id]


async def test_a_gateway_that_is_frozen_lends_the_next_one_nothing(db: Db) -> None:
    _, job_id = await _remote_job(db)
    daemon, frozen = await worker(db), await registered(db, "gateway")
    await steady(db, daemon, frozen, until=50)
    await steady(db, daemon, since=50, until=70)
    gateway = await registered(db, "gateway")  # the frozen one still has its lease
    await steady(db, daemon, gateway, since=70, until=90)
    assert await rescue(db, daemon) == {}
    await steady(db, daemon, gateway, since=90, until=110)
    assert list(await rescue(db, daemon)) == [job_id]


async def test_a_gateway_rescues_like_any_worker(db: Db) -> None:
    gateway, victim = await registered(db, "gateway"), await worker(db, 5)
    job_id = await one(db)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.claim($1, 'q', 1)", victim) == 1
    await steady(db, gateway)
    assert list(await rescue(db, gateway)) == [job_id]


async def test_the_standing_worker_outlives_everything(db: Db) -> None:
    holder, job_id = await registered(db, lease_s=10), await one(db)
    standing_id = await standing(db)
    assert await claim_for(db, Waiter(holder, 1, 3600)) == {holder: [job_id]}
    daemon, gateway = await worker(db), await registered(db, "gateway")
    await steady(db, daemon, gateway, until=600)
    assert await rescue(db, daemon) == {}
    assert (await live(db, job_id))["worker_id"] == standing_id
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE id = $1", holder) == 0, "presumed dead"
    assert await db.fetchval("SELECT lease_until FROM pgworkd.workers WHERE id = $1", standing_id) is not None
    await clock(-100_000, db)  # the clock is set back: leases are shortened, this one has no end
    await rescue(db, daemon)
    assert await db.fetchval("SELECT lease_until = 'infinity' FROM pgworkd.workers WHERE id = $1", standing_id)


async def test_attempts_of_a_standing_worker_whose_row_was_deleted_go_on(db: Db) -> None:
    holder, job_id = await registered(db), await one(db)
    assert await claim_for(db, Waiter(holder, 1, 3600)) == {holder: [job_id]}
    await db.execute("DELETE FROM pgworkd.workers WHERE kind = 'standing'")
    daemon, gateway = await worker(db), await registered(db, "gateway")
    for second in range(60, 600, 60):
        await steady(db, daemon, gateway, since=second - 60, until=second)
        assert await rescue(db, daemon) == {}
    assert await statuses(db, [job_id]) == ["running"]
    assert await db.fetchval("SELECT lost_at IS NOT NULL FROM pgworkd.workers WHERE state = 'vanished'")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.refused_rows") == 0


async def test_what_a_worker_still_runs_goes_back_when_it_signs_off(db: Db) -> None:
    worker_id = await registered(db)
    await set_pool(db, worker_id)
    again, once = await one(db), await one(db, max_attempts=1)
    own = await one(db)
    await claim_for(db, Waiter(worker_id, 2))
    await claim_for(db, Waiter(worker_id, 1, 60))
    token = await db.fetchval("SELECT token FROM pgworkd.workers WHERE id = $1", worker_id)
    assert await db.fetchval("SELECT pgworkd.abandon($1, $2)", worker_id, uuid.uuid4()) is None
    assert sorted(await db.fetchval("SELECT pgworkd.abandon($1, $2)", worker_id, token)) == sorted([again, once])
    assert await statuses(db, [again, once, own]) == ["pending", "dead", "running"]
    assert (await live(db, again))["failures"] == 0
    assert json.loads((await live(db, once))["errors"])[0]["type"] == "lost"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.pools") == 0
    assert await db.fetchval("SELECT pgworkd.abandon($1, $2)", worker_id, token) is None


async def test_operators_ask_remote_workers_only_and_it_is_audited(db: Db) -> None:
    remote, daemon = await registered(db, name="go-7"), await worker(db)
    assert not await db.fetchval("SELECT pgworkd.ask_worker($1, 'stop', 'ann')", daemon)
    assert await db.fetchval("SELECT pgworkd.ask_worker($1, 'stop', 'ann')", remote)
    with pytest.raises(asyncpg.CheckViolationError, match="workers_requested_check"):
        await db.fetchval("SELECT pgworkd.ask_worker($1, 'dance', 'ann')", remote)
    (row,) = await db.fetch("SELECT who, what, before, after FROM pgworkd.audit")
    assert (row["who"], row["what"]) == ("ann", "worker")
    assert json.loads(row["after"]) == {"worker": remote, "name": "go-7", "requested": "stop"}
    assert await db.fetchval("SELECT requested FROM pgworkd.worker_stats WHERE id = $1", remote) == "stop"


async def test_schedules_are_retired_beside_workers_that_declare_none(db: Db) -> None:
    """A gateway, a remote and the standing worker have no code of ours: they are not waited for."""
    await registered(db, "gateway")
    await registered(db)
    await standing(db)
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s, source) VALUES ('s', 'q', 60, 'code')")
    assert await db.fetchval("SELECT pgworkd.retire_schedules('{s}')") == ["s"]


async def test_a_locked_worker_holds_up_no_rescue_of_others(db: Db, connect: Connect) -> None:
    (first, one_job), (_, other_job) = await _remote_job(db), await _remote_job(db)
    daemon, gateway = await worker(db), await registered(db, "gateway")
    await steady(db, daemon, gateway, until=60)
    session = await connect()
    async with session.transaction():
        await session.execute("SELECT FROM pgworkd.workers WHERE id = $1 FOR UPDATE", first)
        assert list(await rescue(db, daemon)) == [other_job]
    assert list(await rescue(db, daemon)) == [one_job]


async def test_a_living_remote_worker_keeps_its_jobs(db: Db) -> None:
    worker_id, job_id = await _remote_job(db, 30)
    daemon, gateway = await worker(db), await registered(db, "gateway")
    for second in range(10, 300, 10):
        await steady(db, daemon, gateway, since=second - 10, until=second)
        assert await beat(db, worker_id) == {worker_id: "renewed"}
        assert await rescue(db, daemon) == {}
    assert await heartbeat(db, worker_id) is not None
    assert await statuses(db, [job_id]) == ["running"]
    assert len(await insert(db)) == 1
