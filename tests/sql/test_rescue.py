"""rescue: the jobs of lost workers come back, those of living ones never do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest

from .conftest import Connect
from .verbs import (
    Db,
    Later,
    Notices,
    at,
    cancel,
    claim,
    claim_ids,
    clock,
    complete,
    fail,
    heartbeat,
    insert,
    live,
    one,
    over,
    release,
    rescue,
    set_pool,
    statuses,
    waits_for_lock,
    worker,
)

pytestmark = pytest.mark.usefixtures("t0")

Settle = Callable[..., Awaitable[Any]]


async def steady(db: Db, *workers: int, since: float = 0, until: float = 60) -> None:
    """These workers (lease 30 s) beat every 10 s; the clock ends at T0 + `until`."""
    seconds = since
    while seconds < until:
        seconds = min(seconds + 10, until)
        await clock(seconds, db)
        for worker_id in workers:
            assert await heartbeat(db, worker_id) is not None


async def test_the_jobs_of_a_lost_worker_wait_again_with_a_loss(db: Db) -> None:
    victim, rescuer = await worker(db, 5, "host-9"), await worker(db)
    job_id = await one(db, kind="k", run_at=at(-7))
    await claim(db, victim)
    await steady(db, rescuer)
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
    job = await live(db, job_id)
    assert (job["status"], job["losses"], job["failures"], job["attempts"]) == ("failed", 1, 1, 1)
    assert (job["worker_id"], job["run_at"], job["failed_at"], job["error"]) == (None, at(-7), at(60), message)
    (entry,) = json.loads(job["errors"])
    assert await db.fetchval("SELECT $1::text::timestamptz", entry.pop("at")) == at(60)
    assert entry == {"attempt": 1, "type": "lost", "message": message, "worker": "host-9"}
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]
    # Due at once; and who comes late is told so.
    assert [r["attempt"] for r in await claim(db, rescuer)] == [2]
    assert not await complete(db, [job_id], 1)
    assert await rescue(db, rescuer) == {}


async def test_a_rescue_takes_from_lost_workers_only(db: Db) -> None:
    rescuer, healthy, victim, idle = [await worker(db) for _ in range(4)]
    jobs = await insert(db, 3)
    for worker_id in (rescuer, healthy, victim):
        await claim(db, worker_id, 1)
    await steady(db, rescuer, healthy)
    assert await rescue(db, rescuer) == {jobs[2]: "failed"}
    assert await statuses(db, jobs) == ["running", "running", "failed"]
    assert {row["id"] for row in await db.fetch("SELECT id FROM pgworkd.workers")} == {rescuer, healthy}
    assert idle


@pytest.mark.parametrize("early_s", [0.001, 0])
async def test_a_lease_lasts_to_its_very_end(db: Db, early_s: float) -> None:
    victim, rescuer = await worker(db, 60), await worker(db)
    await one(db)
    await claim(db, victim)
    await steady(db, rescuer, until=60 - early_s)
    assert await rescue(db, rescuer) == {}
    await clock(60.001, db)
    assert len(await rescue(db, rescuer)) == 1


async def test_the_third_loss_is_dead_whatever_the_budget(db: Db) -> None:
    rescuer = await worker(db)
    job_id = await one(db, max_attempts=1000)
    outcomes = []
    for turn in range(3):
        victim = await worker(db, 5)
        assert await claim_ids(db, victim) == [job_id]
        await steady(db, rescuer, since=turn * 60, until=turn * 60 + 60)
        outcomes += (await rescue(db, rescuer)).values()
    assert outcomes == ["failed", "failed", "dead"]
    job = await live(db, job_id)
    assert (job["losses"], job["failures"], job["attempts"]) == (3, 3, 3)
    assert [entry["type"] for entry in json.loads(job["errors"])] == ["lost"] * 3
    assert job["error"].startswith("lost: ")


async def test_at_most_once_a_job_with_one_attempt_is_dead(db: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    single, spent, fresh = await one(db, max_attempts=1), await one(db, max_attempts=2, failures=1), await one(db)
    await claim(db, victim)
    await steady(db, rescuer)
    assert await rescue(db, rescuer) == {single: "dead", spent: "dead", fresh: "failed"}


async def test_those_that_merely_ran_beside_the_killer_survive(db: Db) -> None:
    """Suspects run apart from each other, so the killer is lost alone."""
    rescuer = await worker(db)
    killer, *innocent = await insert(db, 4)
    victim = await worker(db, 5)
    await claim(db, victim)
    await steady(db, rescuer)
    assert len(await rescue(db, rescuer)) == 4
    outcomes = []
    for turn in (1, 2):
        victim = await worker(db, 5)
        assert await claim_ids(db, victim) == [killer]
        await steady(db, rescuer, since=turn * 60, until=turn * 60 + 60)
        outcomes.append(await rescue(db, rescuer))
    assert outcomes == [{killer: "failed"}, {killer: "dead"}]
    for job_id in innocent:
        assert await claim_ids(db, rescuer) == [job_id]
        assert await complete(db, [job_id], 2) == {job_id}


async def test_a_cancelled_job_is_not_tried_again(db: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    asked, dead, plain = await one(db), await one(db, max_attempts=1), await one(db)
    await claim(db, victim)
    await cancel(db, asked, dead)
    await steady(db, rescuer)
    assert set(await rescue(db, rescuer)) == {asked, dead, plain}
    assert await statuses(db, [asked, dead, plain]) == ["cancelled", "dead", "failed"]
    row = await over(db, asked)
    assert (row["failures"], len(json.loads(row["errors"]))) == (1, 1)


async def test_the_pools_of_the_lost_go_and_sleepers_of_the_queue_are_woken(db: Db, notices: Notices) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    await insert(db, 3)
    await claim(db, victim)
    await set_pool(db, victim, "q")
    await set_pool(db, victim, "r")
    await set_pool(db, rescuer, "q")
    await set_pool(db, rescuer, "r")
    await steady(db, rescuer)
    await notices.heard()
    await rescue(db, rescuer)
    assert await db.fetch("SELECT DISTINCT worker_id FROM pgworkd.pools") == [(rescuer,)]
    assert await notices.heard() == [{"queue": "q"}]


# The guards


async def _lost_job(db: Db) -> int:
    """A worker that died at T0 with a job; its lease ends at T0 + 5 s."""
    victim = await worker(db, 5)
    await one(db)
    await claim(db, victim)
    return victim


@pytest.mark.parametrize(
    "guard", ["unknown", "not yet steady", "silent", "lease over", "lost", "seen in the future", "steady in the future"]
)
async def test_who_does_not_know_that_it_is_well_rescues_nobody(db: Db, guard: str) -> None:
    await _lost_job(db)
    rescuer = await worker(db)
    await steady(db, rescuer)
    changes = {
        "not yet steady": "steady_since = pgworkd.clock() - interval '29.9 s'",
        "silent": "seen_at = pgworkd.clock() - interval '15 s'",
        "lease over": "lease_until = pgworkd.clock()",
        "lost": "lost_at = pgworkd.clock()",
        "seen in the future": "seen_at = pgworkd.clock() + interval '1 ms'",
        "steady in the future": "steady_since = pgworkd.clock() + interval '1 s'",
    }
    await db.execute("BEGIN")
    assert len(await rescue(db, rescuer)) == 1, "nothing but the guard is in the way"
    await db.execute("ROLLBACK")
    if guard == "unknown":
        await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", rescuer)
    else:
        await db.execute(f"UPDATE pgworkd.workers SET {changes[guard]} WHERE id = $1", rescuer)  # noqa: S608
    before = await db.fetch("SELECT * FROM pgworkd.workers")
    assert await rescue(db, rescuer) == {}
    assert await db.fetch("SELECT * FROM pgworkd.workers") == before


async def test_after_an_outage_all_look_lost_and_nobody_is_rescued_until_the_living_have_come_back(
    db: Db,
) -> None:
    """hexpm PR#1825: living jobs were rescued by age alone, nightly for a week."""
    rescuer, slow, truly_dead = [await worker(db) for _ in range(3)]
    for _ in range(3):
        await one(db)
    jobs = [(await claim_ids(db, worker_id, 1))[0] for worker_id in (rescuer, slow, truly_dead)]
    await steady(db, rescuer, slow, truly_dead)
    # The database is away, or frozen, or its clock jumps: an hour is over.
    await clock(3600, db)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE lease_until < pgworkd.clock()") == 3
    assert await rescue(db, rescuer) == {}
    assert await heartbeat(db, rescuer) is not None
    for seconds in (3600, 3605, 3610):
        await clock(seconds, db)
        await heartbeat(db, rescuer)
        assert await rescue(db, rescuer) == {}
    assert await heartbeat(db, slow) is not None  # it reconnects late, yet within the lease
    await steady(db, rescuer, slow, since=3610, until=3629)
    assert await rescue(db, rescuer) == {}
    await steady(db, rescuer, slow, since=3629, until=3630)
    assert await rescue(db, rescuer) == {jobs[2]: "failed"}
    assert await statuses(db, jobs) == ["running", "running", "failed"]


async def test_a_clock_set_back_makes_no_one_lost_and_no_lease_eternal(db: Db) -> None:
    rescuer, healthy, dead = [await worker(db) for _ in range(3)]
    for _ in range(3):
        await one(db)
    jobs = [(await claim_ids(db, worker_id, 1))[0] for worker_id in (rescuer, healthy, dead)]
    back = -3600.0
    await steady(db, rescuer, healthy, since=back, until=back + 40)
    # The dead one's lease, of the old clock, is an hour ahead: it is cut to one lease from now.
    assert await rescue(db, rescuer) == {}
    assert await db.fetchval("SELECT lease_until FROM pgworkd.workers WHERE id = $1", dead) == at(back + 70)
    assert await db.fetchval("SELECT lease_until FROM pgworkd.workers WHERE id = $1", healthy) == at(back + 70)
    await steady(db, rescuer, healthy, since=back + 40, until=back + 71)
    assert await rescue(db, rescuer) == {jobs[2]: "failed"}


async def test_nobody_is_rescued_before_the_server_has_been_up_for_a_lease(db: Db) -> None:
    started = await db.fetchval("SELECT pg_postmaster_start_time()")

    async def stand(seconds: float) -> None:
        await db.execute("SELECT set_config('pgworkd.clock', $1, false)", str(started + timedelta(seconds=seconds)))

    await stand(-100)
    await _lost_job(db)
    rescuer = await worker(db)
    for seconds in range(-90, 30, 10):
        await stand(seconds)
        await heartbeat(db, rescuer)
        assert await rescue(db, rescuer) == {}
    await stand(29.999)
    assert await rescue(db, rescuer) == {}
    await stand(30)
    await heartbeat(db, rescuer)
    assert len(await rescue(db, rescuer)) == 1


async def test_two_rescues_at_once_do_the_work_once_and_neither_waits(db: Db, other: Db) -> None:
    await _lost_job(db)
    rescuer, second = await worker(db), await worker(db)
    await insert(db, 1, status="running", worker_id=4711)  # whose row both would restore
    await steady(db, rescuer, second)
    await clock(60, other)
    await other.execute("SET statement_timeout = '2s'")
    await db.execute("BEGIN")
    assert len(await rescue(db, rescuer)) == 1
    assert await rescue(other, second) == {}
    await db.execute("COMMIT")
    assert await rescue(other, second) == {}


# Batches and jobs that are being settled


async def test_a_batch_is_bounded_and_the_worker_row_goes_with_the_last(db: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    ids = await insert(db, 25)
    await claim(db, victim, 25)
    await steady(db, rescuer)
    sizes, taken = [], set()
    for _ in range(4):
        batch = await rescue(db, rescuer, 10)
        sizes.append(len(batch))
        taken |= set(batch)
        left = await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE id = $1", victim)
        assert left == (1 if len(taken) < 25 else 0)
    assert sizes == [10, 10, 5, 0]
    assert taken == set(ids)


async def test_a_job_that_is_being_settled_is_left_to_its_settle(db: Db, other: Db) -> None:
    """procrastinate#1518: the worker row must not go before its last job."""
    victim, rescuer = await worker(db, 5), await worker(db)
    settling, plain = await insert(db, 2)
    await claim(db, victim)
    await steady(db, rescuer)
    await db.execute("SET statement_timeout = '2s'")
    await other.execute("BEGIN")
    assert await complete(other, [settling]) == {settling}
    assert await rescue(db, rescuer) == {plain: "failed"}
    assert await db.fetchval("SELECT lost_at FROM pgworkd.workers WHERE id = $1", victim) == at(60)
    await other.execute("COMMIT")
    assert await rescue(db, rescuer) == {}
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]
    assert await statuses(db, [settling, plain]) == ["completed", "failed"]


async def test_a_job_whose_settle_rolls_back_is_rescued_next_time(db: Db, other: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    job_id = await one(db)
    await claim(db, victim)
    await steady(db, rescuer)
    await other.execute("BEGIN")
    await complete(other, [job_id])
    assert await rescue(db, rescuer) == {}
    await other.execute("ROLLBACK")
    assert await heartbeat(db, victim) is None, "once lost, always lost"
    assert await rescue(db, rescuer) == {job_id: "failed"}


async def test_an_absurd_row_does_not_stop_the_rescue_of_others(db: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    absurd, plain = await one(db, losses=2**31 - 1, failures=2**31 - 1, attempts=2**31 - 2, errors="[7]"), await one(db)
    assert set(await claim_ids(db, victim)) == {absurd, plain}
    await steady(db, rescuer)
    assert await rescue(db, rescuer) == {absurd: "dead", plain: "failed"}


async def test_locked_rows_do_not_fill_the_batch(db: Db, other: Db) -> None:
    """river PR#1318: a full page of exempt rows must not hide the rest."""
    victim, rescuer = await worker(db, 5), await worker(db)
    ids = await insert(db, 15)
    await claim(db, victim, 15)
    await steady(db, rescuer)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs WHERE id = ANY ($1) FOR UPDATE", ids[:10])
    assert set(await rescue(db, rescuer, 10)) == set(ids[10:])
    await other.execute("COMMIT")


@pytest.mark.parametrize("settle", [complete, fail, release])
async def test_a_settle_that_waited_for_a_rescue_is_too_late(db: Db, other: Db, third: Db, settle: Settle) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    job_id = await one(db)
    await claim(db, victim)
    await steady(db, rescuer)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await rescue(db, rescuer)
        settling = Later(tasks, settle(other, [job_id]))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert not await settling.answer()
    assert await statuses(db, [job_id]) == ["failed"]


async def test_what_is_left_of_a_lost_workers_jobs_is_taken_even_if_the_clock_was_set_back_since(db: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    ids = await insert(db, 2)
    await claim(db, victim)
    await steady(db, rescuer)
    assert len(await rescue(db, rescuer, 1)) == 1
    await steady(db, rescuer, since=-40, until=0)  # its lease, of T0 + 5 s, looks good again
    assert len(await rescue(db, rescuer)) == 1
    assert await statuses(db, ids) == ["failed"] * 2


async def test_a_heartbeat_that_commits_first_saves_its_worker(db: Db, other: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db)
    job_id = await one(db)
    await claim(db, victim)
    await steady(db, rescuer)
    await clock(60, other)
    await other.execute("BEGIN")
    assert await heartbeat(other, victim) is not None
    assert await rescue(db, rescuer) == {}
    await other.execute("COMMIT")
    assert await rescue(db, rescuer) == {}
    assert await statuses(db, [job_id]) == ["running"]


# A worker whose row someone deleted


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


async def test_many_workers_in_parallel_rescue_each_job_once(db: Db, connect: Connect) -> None:
    victims = [await worker(db, 5) for _ in range(5)]
    ids = await insert(db, 100)
    for victim in victims:
        await claim(db, victim, 20)
    rescuers = [await worker(db) for _ in range(4)]
    await steady(db, *rescuers)
    taken: list[object] = []

    async def take(session: Db, rescuer: int) -> None:
        while len(taken) < len(ids):  # whoever finds the lock taken comes again
            taken.extend(await rescue(session, rescuer, 7))

    async with anyio.create_task_group() as tasks:
        for rescuer in rescuers:
            session = await connect()
            await clock(60, session)
            tasks.start_soon(take, session, rescuer)
    assert len(taken) == len(set(taken)) == 100
    assert set(taken) == set(ids)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE losses = 1 AND status = 'failed'") == 100


# Once wrong


async def test_register_never_meets_an_id_that_rescue_restored(db: Db) -> None:
    """A hand-made running row names an id ahead of the sequence: it is restored, and register must not raise 23505."""
    rescuer = await worker(db)
    await insert(db, 1, status="running", worker_id=rescuer + 1)
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await worker(db) > rescuer + 1


async def test_defect_an_absurd_worker_id_does_not_use_up_all_ids(db: Db) -> None:
    """setval takes the sequence to its end: from then on every register raises 2200H, and no daemon can start."""
    rescuer = await worker(db)
    with contextlib.suppress(asyncpg.CheckViolationError):  # refused at the insert is as good
        await insert(db, 1, status="running", worker_id=2**31 - 1)
    await steady(db, rescuer)
    await rescue(db, rescuer)
    assert await worker(db) > rescuer


async def test_the_answer_of_a_rescue_tells_what_became_of_a_cancelled_job(db: Db) -> None:
    """The same call has moved it to the history."""
    victim, rescuer = await worker(db, 5), await worker(db)
    job_id = await one(db)
    await claim(db, victim)
    await cancel(db, job_id)
    await steady(db, rescuer)
    assert await rescue(db, rescuer) == {job_id: "cancelled"}
