"""rescue: jobs of lost workers are taken back, those of live ones never."""

from __future__ import annotations

import json

import anyio
import pytest

from tests.kits import verbs as v
from tests.kits.sessions import Later, Notices, waits_for_lock
from tests.kits.verbs import Db, Settle

from .conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")


async def test_jobs_of_a_lost_worker_are_waiting_again_with_a_loss(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5, "host-9"), await v.worker(db)
    job_id = await v.one(db, kind="k", run_at=v.at(-7))
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    (row,) = await db.fetch("SELECT * FROM pgworkd.rescue($1)", rescuer)
    message = f"lost: worker host-9 (id {victim}, pid 1) did not renew its lease"
    assert dict(row) == {
        "id": job_id,
        "queue": "q",
        "kind": "k",
        "attempt": 1,
        "status": "failed",
        "worker_id": victim,
        "worker": "host-9",
        "error": message,
    }
    job = await v.live(db, job_id)
    assert (job["status"], job["losses"], job["failures"], job["attempts"]) == ("failed", 1, 0, 1)
    assert (job["worker_id"], job["run_at"], job["failed_at"], job["error"]) == (None, v.at(-7), v.at(60), message)
    (entry,) = json.loads(job["errors"])
    assert await db.fetchval("SELECT $1::text::timestamptz", entry.pop("at")) == v.at(60)
    assert entry == {"attempt": 1, "type": "lost", "message": message, "worker": "host-9"}
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]
    # Due at once; and a late settle is reported as such.
    assert [r["attempt"] for r in await v.claim(db, rescuer)] == [2]
    assert not await v.complete(db, [job_id], 1)
    assert await v.rescue(db, rescuer) == {}


async def test_a_rescue_takes_jobs_of_lost_workers_only(db: Db) -> None:
    rescuer, healthy, victim, idle = [await v.worker(db) for _ in range(4)]
    jobs = await v.insert(db, 3)
    for worker_id in (rescuer, healthy, victim):
        await v.claim(db, worker_id, 1)
    await v.steady(db, rescuer, healthy)
    assert await v.rescue(db, rescuer) == {jobs[2]: "failed"}
    assert await v.statuses(db, jobs) == ["running", "running", "failed"]
    assert {row["id"] for row in await db.fetch("SELECT id FROM pgworkd.workers")} == {rescuer, healthy}
    assert idle


@pytest.mark.parametrize("early_s", [0.001, 0])
async def test_a_lease_is_valid_until_its_very_end(db: Db, early_s: float) -> None:
    victim, rescuer = await v.worker(db, 60), await v.worker(db)
    await v.one(db)
    await v.claim(db, victim)
    await v.steady(db, rescuer, until=60 - early_s)
    assert await v.rescue(db, rescuer) == {}
    await v.clock(60.001, db)
    assert len(await v.rescue(db, rescuer)) == 1


async def test_the_third_loss_makes_a_job_dead_whatever_its_max_attempts(db: Db) -> None:
    rescuer = await v.worker(db)
    job_id = await v.one(db, max_attempts=1000)
    outcomes = []
    for turn in range(3):
        victim = await v.worker(db, 5)
        assert await v.claim_ids(db, victim) == [job_id]
        await v.steady(db, rescuer, since=turn * 60, until=turn * 60 + 60)
        outcomes += (await v.rescue(db, rescuer)).values()
    assert outcomes == ["failed", "failed", "dead"]
    job = await v.live(db, job_id)
    assert (job["losses"], job["failures"], job["attempts"]) == (3, 0, 3)
    assert [entry["type"] for entry in json.loads(job["errors"])] == ["lost"] * 3
    assert job["error"].startswith("lost: ")


async def test_a_job_with_max_attempts_1_is_dead_after_one_loss(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    single, spent, fresh = await v.one(db, max_attempts=1), await v.one(db, max_attempts=2, failures=1), await v.one(db)
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    assert await v.rescue(db, rescuer) == {single: "dead", spent: "failed", fresh: "failed"}
    assert (await v.live(db, spent))["failures"] == 1, "losses are counted on their own"


@pytest.mark.parametrize("max_losses", [1, 2, 5])
async def test_max_losses_is_a_setting_of_the_queue(db: Db, max_losses: int) -> None:
    rescuer = await v.worker(db)
    await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps({"max_losses": max_losses}))
    job_id, elsewhere = await v.one(db), await v.one(db, "r")
    outcomes = []
    for turn in range(max_losses):
        victim = await v.worker(db, 5)
        assert await v.claim_ids(db, victim) == [job_id]
        if turn == 0:
            assert await v.claim_ids(db, victim, 1, "r") == [elsewhere]
        await v.steady(db, rescuer, since=turn * 60, until=turn * 60 + 60)
        outcomes.append(await v.rescue(db, rescuer))
    assert [each[job_id] for each in outcomes] == ["failed"] * (max_losses - 1) + ["dead"]
    assert outcomes[0][elsewhere] == "failed"
    await db.execute("SELECT pgworkd.set_queue('q', $1)", json.dumps({"max_losses": None}))
    assert await db.fetch("SELECT FROM pgworkd.queues") == []


async def test_after_one_crash_the_lost_jobs_run_again_at_once_and_concurrently(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    ids = await v.insert(db, 500, run_at=v.at(-1))
    assert len(await v.claim(db, victim, 500)) == 500
    await v.steady(db, rescuer)
    assert set((await v.rescue(db, rescuer)).values()) == {"failed"}
    assert await v.claim_ids(db, rescuer, 500) == ids


async def test_jobs_released_by_a_fenced_worker_count_no_loss_until_it_was_rescued(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    early, late = await v.insert(db, 2)
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    assert await v.release(db, [early]) == {early}
    assert await v.rescue(db, rescuer) == {late: "failed"}
    assert await v.release(db, [late]) == set()
    assert [(await v.live(db, job_id))["losses"] for job_id in (early, late)] == [0, 1]


async def test_jobs_that_merely_ran_beside_the_killer_survive(db: Db) -> None:
    """Suspects run one at a time, so the killer is lost alone."""
    rescuer = await v.worker(db)
    killer, *innocent = await v.insert(db, 4)
    for turn in (0, 1):
        victim = await v.worker(db, 5)
        assert len(await v.claim(db, victim)) == 4, "one loss says nothing"
        await v.steady(db, rescuer, since=turn * 60, until=turn * 60 + 60)
        assert len(await v.rescue(db, rescuer)) == 4
    victim = await v.worker(db, 5)
    assert await v.claim_ids(db, victim) == [killer]
    await v.steady(db, rescuer, since=120, until=180)
    assert await v.rescue(db, rescuer) == {killer: "dead"}
    for job_id in innocent:
        assert await v.claim_ids(db, rescuer) == [job_id]
        assert await v.complete(db, [job_id], 3) == {job_id}


async def test_a_job_with_a_cancellation_requested_is_not_retried(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    asked, dead, plain = await v.one(db), await v.one(db, max_attempts=1), await v.one(db)
    await v.claim(db, victim)
    await v.cancel(db, asked, dead)
    await v.steady(db, rescuer)
    assert set(await v.rescue(db, rescuer)) == {asked, dead, plain}
    assert await v.statuses(db, [asked, dead, plain]) == ["cancelled", "dead", "failed"]
    row = await v.over(db, asked)
    assert (row["failures"], len(json.loads(row["errors"]))) == (0, 1)


async def test_pools_of_the_lost_worker_are_removed_and_idle_pools_are_notified(db: Db, notices: Notices) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    await v.insert(db, 3)
    await v.claim(db, victim)
    await v.set_pool(db, victim, "q")
    await v.set_pool(db, victim, "r")
    await v.set_pool(db, rescuer, "q")
    await v.set_pool(db, rescuer, "r")
    await v.steady(db, rescuer)
    await notices.heard()
    await v.rescue(db, rescuer)
    assert await db.fetch("SELECT DISTINCT worker_id FROM pgworkd.pools") == [(rescuer,)]
    run_at = v.at(0).timestamp()
    assert await notices.heard() == [{"queue": "q", "run_at": run_at}]


async def test_a_rescue_returns_the_outcome_of_a_cancelled_job(db: Db) -> None:
    """The same call has moved it to the history."""
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    job_id = await v.one(db)
    await v.claim(db, victim)
    await v.cancel(db, job_id)
    await v.steady(db, rescuer)
    assert await v.rescue(db, rescuer) == {job_id: "cancelled"}


# Batches and jobs that are being settled


async def test_one_call_is_bounded_and_the_last_deletes_the_worker_row(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    ids = await v.insert(db, 25)
    await v.claim(db, victim, 25)
    await v.steady(db, rescuer)
    sizes, taken = [], set()
    for _ in range(4):
        batch = await v.rescue(db, rescuer, 10)
        sizes.append(len(batch))
        taken |= set(batch)
        left = await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE id = $1", victim)
        assert left == (1 if len(taken) < 25 else 0)
    assert sizes == [10, 10, 5, 0]
    assert taken == set(ids)


async def test_a_job_being_settled_is_left_to_its_settle(db: Db, other: Db) -> None:
    """procrastinate#1518: the worker row must not go before its last job."""
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    settling, plain = await v.insert(db, 2)
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    await db.execute("SET statement_timeout = '2s'")
    await other.execute("BEGIN")
    assert await v.complete(other, [settling]) == {settling}
    assert await v.rescue(db, rescuer) == {plain: "failed"}
    assert await db.fetchval("SELECT lost_at FROM pgworkd.workers WHERE id = $1", victim) == v.at(60)
    await other.execute("COMMIT")
    assert await v.rescue(db, rescuer) == {}
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]
    assert await v.statuses(db, [settling, plain]) == ["completed", "failed"]


async def test_a_job_whose_settle_rolls_back_is_rescued_by_the_next_call(db: Db, other: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    job_id = await v.one(db)
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    await other.execute("BEGIN")
    await v.complete(other, [job_id])
    assert await v.rescue(db, rescuer) == {}
    await other.execute("ROLLBACK")
    assert await v.heartbeat(db, victim) is None, "once lost, always lost"
    assert await v.rescue(db, rescuer) == {job_id: "failed"}


async def test_a_row_with_extreme_counters_does_not_stop_the_rescue_of_others(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    absurd, plain = (
        await v.one(db, losses=2**31 - 1, failures=2**31 - 1, attempts=2**31 - 2, errors="[7]"),
        await v.one(db),
    )
    assert set(await v.claim_ids(db, victim)) == {absurd, plain}
    await v.steady(db, rescuer)
    assert await v.rescue(db, rescuer) == {absurd: "dead", plain: "failed"}


async def test_locked_rows_do_not_count_against_the_limit(db: Db, other: Db) -> None:
    """river PR#1318: a full page of exempt rows must not hide the rest."""
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    ids = await v.insert(db, 15)
    await v.claim(db, victim, 15)
    await v.steady(db, rescuer)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = ANY ($1) FOR UPDATE", ids[:10])
    assert set(await v.rescue(db, rescuer, 10)) == set(ids[10:])
    await other.execute("COMMIT")


@pytest.mark.parametrize("settle", [v.complete, v.fail, v.release])
async def test_a_settle_that_waited_for_a_rescue_is_too_late(db: Db, other: Db, third: Db, settle: Settle) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    job_id = await v.one(db)
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await v.rescue(db, rescuer)
        settling = Later(tasks, settle(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert not await settling.answer()
    assert await v.statuses(db, [job_id]) == ["failed"]


async def test_the_remaining_jobs_of_a_lost_worker_are_rescued_after_a_clock_step_back(db: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    ids = await v.insert(db, 2)
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    assert len(await v.rescue(db, rescuer, 1)) == 1
    await v.steady(db, rescuer, since=-40, until=0)  # its lease, of T0 + 5 s, appears valid again
    assert len(await v.rescue(db, rescuer)) == 1
    assert await v.statuses(db, ids) == ["failed"] * 2


async def test_a_heartbeat_that_commits_first_keeps_its_worker(db: Db, other: Db) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    job_id = await v.one(db)
    await v.claim(db, victim)
    await v.steady(db, rescuer)
    await v.clock(60, other)
    await other.execute("BEGIN")
    assert await v.heartbeat(other, victim) is not None
    assert await v.rescue(db, rescuer) == {}
    await other.execute("COMMIT")
    assert await v.rescue(db, rescuer) == {}
    assert await v.statuses(db, [job_id]) == ["running"]


async def test_many_parallel_workers_rescue_each_job_once(db: Db, connect: Connect) -> None:
    victims = [await v.worker(db, 5) for _ in range(5)]
    ids = await v.insert(db, 100)
    for victim in victims:
        await v.claim(db, victim, 20)
    rescuers = [await v.worker(db) for _ in range(4)]
    await v.steady(db, *rescuers)
    taken: list[object] = []

    async def take(session: Db, rescuer: int) -> None:
        while len(taken) < len(ids):  # a caller that finds the lock taken tries again
            taken.extend(await v.rescue(session, rescuer, 7))

    async with anyio.create_task_group() as tasks:
        for rescuer in rescuers:
            session = await connect()
            await v.clock(60, session)
            tasks.start_soon(take, session, rescuer)
    assert len(taken) == len(set(taken)) == 100
    assert set(taken) == set(ids)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE losses = 1 AND status = 'failed'") == 100
