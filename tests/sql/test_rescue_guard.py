"""rescue and its guards: a worker that may be lost itself rescues nobody."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.kits import verbs as v
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")


async def _lost_job(db: Db) -> int:
    """A worker that died at T0 with a job; its lease ends at T0 + 5 s."""
    victim = await v.worker(db, 5)
    await v.one(db)
    await v.claim(db, victim)
    return victim


@pytest.mark.parametrize(
    "guard", ["unknown", "not yet steady", "silent", "lease over", "lost", "seen in the future", "steady in the future"]
)
async def test_a_worker_that_may_itself_be_lost_rescues_nobody(db: Db, guard: str) -> None:
    await _lost_job(db)
    rescuer = await v.worker(db)
    await v.steady(db, rescuer)
    changes = {
        "not yet steady": "steady_since = pgworkd.clock() - interval '29.9 s'",
        "silent": "seen_at = pgworkd.clock() - interval '15 s'",
        "lease over": "lease_until = pgworkd.clock()",
        "lost": "lost_at = pgworkd.clock()",
        "seen in the future": "seen_at = pgworkd.clock() + interval '1 ms'",
        "steady in the future": "steady_since = pgworkd.clock() + interval '1 s'",
    }
    await db.execute("BEGIN")
    assert len(await v.rescue(db, rescuer)) == 1, "nothing but the guard is in the way"
    await db.execute("ROLLBACK")
    if guard == "unknown":
        await db.execute("DELETE FROM pgworkd.workers WHERE id = $1", rescuer)
    else:
        await db.execute(f"UPDATE pgworkd.workers SET {changes[guard]} WHERE id = $1", rescuer)  # noqa: S608
    before = await db.fetch("SELECT * FROM pgworkd.workers")
    assert await v.rescue(db, rescuer) == {}
    assert await db.fetch("SELECT * FROM pgworkd.workers") == before


async def test_after_an_outage_no_worker_is_rescued_until_live_ones_have_renewed(db: Db) -> None:
    """hexpm PR#1825: living jobs were rescued by age alone, nightly for a week."""
    rescuer, slow, truly_dead = [await v.worker(db) for _ in range(3)]
    for _ in range(3):
        await v.one(db)
    jobs = [(await v.claim_ids(db, worker_id, 1))[0] for worker_id in (rescuer, slow, truly_dead)]
    await v.steady(db, rescuer, slow, truly_dead)
    # The database is unavailable, or frozen, or its clock jumps: an hour has passed.
    await v.clock(3600, db)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers WHERE lease_until < pgworkd.clock()") == 3
    assert await v.rescue(db, rescuer) == {}
    assert await v.heartbeat(db, rescuer) is not None
    for seconds in (3600, 3605, 3610):
        await v.clock(seconds, db)
        await v.heartbeat(db, rescuer)
        assert await v.rescue(db, rescuer) == {}
    assert await v.heartbeat(db, slow) is not None  # it reconnects late, yet within the lease
    await v.steady(db, rescuer, slow, since=3610, until=3629)
    assert await v.rescue(db, rescuer) == {}
    await v.steady(db, rescuer, slow, since=3629, until=3630)
    assert await v.rescue(db, rescuer) == {jobs[2]: "failed"}
    assert await v.statuses(db, jobs) == ["running", "running", "failed"]


async def test_a_clock_set_back_makes_no_worker_lost_and_no_lease_endless(db: Db) -> None:
    rescuer, healthy, dead = [await v.worker(db) for _ in range(3)]
    for _ in range(3):
        await v.one(db)
    jobs = [(await v.claim_ids(db, worker_id, 1))[0] for worker_id in (rescuer, healthy, dead)]
    back = -3600.0
    await v.steady(db, rescuer, healthy, since=back, until=back + 40)
    # The dead one's lease, by the old clock, is an hour ahead: it is cut to one lease from now.
    assert await v.rescue(db, rescuer) == {}
    assert await db.fetchval("SELECT lease_until FROM pgworkd.workers WHERE id = $1", dead) == v.at(back + 70)
    assert await db.fetchval("SELECT lease_until FROM pgworkd.workers WHERE id = $1", healthy) == v.at(back + 70)
    await v.steady(db, rescuer, healthy, since=back + 40, until=back + 71)
    assert await v.rescue(db, rescuer) == {jobs[2]: "failed"}


async def test_no_worker_is_rescued_before_the_server_has_been_up_for_a_lease(db: Db) -> None:
    started = await db.fetchval("SELECT pg_postmaster_start_time()")

    async def stand(seconds: float) -> None:
        await db.execute("SELECT set_config('pgworkd.clock', $1, false)", str(started + timedelta(seconds=seconds)))

    await stand(-100)
    await _lost_job(db)
    rescuer = await v.worker(db)
    for seconds in range(-90, 30, 10):
        await stand(seconds)
        await v.heartbeat(db, rescuer)
        assert seconds < 0 or await v.rescue(db, rescuer) == {}
    await stand(29.999)
    assert await v.rescue(db, rescuer) == {}
    await stand(30)
    await v.heartbeat(db, rescuer)
    assert len(await v.rescue(db, rescuer)) == 1


async def test_a_server_start_time_in_the_future_does_not_prevent_rescue(db: Db) -> None:
    started = await db.fetchval("SELECT pg_postmaster_start_time()")
    back = (started - timedelta(seconds=600) - v.at(0)).total_seconds()
    await v.clock(back + 700, db)
    rescuer = await v.worker(db)
    await v.clock(back, db)
    await _lost_job(db)
    await v.steady(db, rescuer, since=back, until=back + 39)
    assert await v.rescue(db, rescuer) == {}
    await v.steady(db, rescuer, since=back + 39, until=back + 41)
    assert len(await v.rescue(db, rescuer)) == 1


@pytest.mark.parametrize("given_back", [False, True])
async def test_jobs_started_before_a_clock_step_back_are_due_at_once_when_returned(db: Db, *, given_back: bool) -> None:
    victim, rescuer = await v.worker(db, 5), await v.worker(db)
    job_id = await v.one(db)
    await v.claim(db, victim)
    await v.clock(-600, db)
    if given_back:
        assert await v.release(db, [job_id]) == {job_id}
    else:
        await v.steady(db, rescuer, since=-600, until=-560)
        await v.rescue(db, rescuer)  # cuts the lease, which was set by the old clock
        await v.steady(db, rescuer, since=-560, until=-500)
        assert await v.rescue(db, rescuer) == {job_id: "failed"}
    assert await v.claim_ids(db, rescuer) == [job_id]


async def test_of_two_concurrent_rescues_one_does_the_work_and_neither_waits(db: Db, other: Db) -> None:
    await _lost_job(db)
    rescuer, second = await v.worker(db), await v.worker(db)
    await v.insert(db, 1, status="running", worker_id=4711)  # whose row both would restore
    await v.steady(db, rescuer, second)
    await v.clock(60, other)
    await other.execute("SET statement_timeout = '2s'")
    await db.execute("BEGIN")
    assert len(await v.rescue(db, rescuer)) == 1
    assert await v.rescue(other, second) == {}
    await db.execute("COMMIT")
    assert await v.rescue(other, second) == {}


async def _fleet(db: Db, *leases_s: float) -> list[int]:
    """A worker for each lease, with a running job."""
    workers = [await v.worker(db, lease_s) for lease_s in leases_s]
    for worker_id in workers:
        await v.one(db)
        await v.claim(db, worker_id, 1)
    return workers


LEASES_S = (6.0, 30.0, 60.0)


@pytest.mark.slow("leases, gaps and outages, each with each")
@pytest.mark.parametrize("own_s", LEASES_S)
@pytest.mark.parametrize("others_s", LEASES_S)
@pytest.mark.parametrize("outage", [0.6, 1.3])
async def test_after_an_outage_each_worker_is_judged_by_its_own_lease(
    db: Db, own_s: float, others_s: float, outage: float
) -> None:
    """Of two healthy workers one renews at once, the other as late as its lease permits: it is not presumed dead.

    The outage lasts `outage` times either lease, and begins right after the rescuer's last heartbeat.
    """
    for began_s in (60.0, 60.0 + own_s / 6):
        for lasts_s in (outage * own_s, outage * others_s):
            await db.execute("TRUNCATE pgworkd.jobs, pgworkd.workers, pgworkd.pools")
            await v.clock(0, db)
            rescuer, late, dead = await _fleet(db, own_s, others_s, others_s)
            ends_s = began_s + lasts_s
            renews = {float(began_s - others_s / 3 * n) for n in range(1, 100) if others_s / 3 * n < began_s}
            renews.add(ends_s + (others_s - 0.01 if lasts_s > others_s * 0.5 else 0.01))
            beats = {own_s / 3 * n for n in range(int(3 * (ends_s + others_s) / own_s) + 2)}
            beats = {s for s in beats if not began_s < s < ends_s} | {ends_s}
            polls = {s + 0.005 for s in beats if s >= began_s - own_s} | {max(renews) - 0.001}
            polls -= {s for s in polls if began_s < s < ends_s}
            for seconds in sorted(s for s in beats | renews | polls if s <= max(renews)):
                await v.clock(seconds, db)
                if seconds in beats:
                    assert await v.heartbeat(db, rescuer) is not None
                if seconds in renews:
                    assert await v.heartbeat(db, late) is not None, (began_s, lasts_s, seconds)
                if seconds in polls:
                    await v.rescue(db, rescuer)
            if lasts_s <= others_s * 0.5:
                continue
            # The dead worker is found nevertheless, and no later than this.
            for seconds in range(int(max(renews)) + 1, int(max(renews) + own_s * 2 + others_s * 2) + 2):
                await v.clock(seconds, db)
                assert await v.heartbeat(db, rescuer) is not None
                assert await v.heartbeat(db, late) is not None
                await v.rescue(db, rescuer)
            assert await db.fetch("SELECT id FROM pgworkd.workers WHERE id = $1", dead) == []


async def test_a_worker_with_a_long_lease_gets_its_whole_lease_to_renew(db: Db) -> None:
    long, rescuer, same = await _fleet(db, 60, 6, 6)
    for seconds in range(0, 20, 2):
        await v.clock(seconds, db)
        await v.heartbeat(db, rescuer)
    # The database is unavailable for two minutes; both leases have expired.
    for seconds in range(140, 200, 2):
        await v.clock(seconds, db)
        assert await v.heartbeat(db, rescuer) is not None
        await v.rescue(db, rescuer)
        left = {row["id"] for row in await db.fetch("SELECT id FROM pgworkd.workers")}
        assert long in left, f"taken {seconds - 140} s after the outage, with a lease of 60 s"
        assert (same in left) == (seconds < 146)
    await v.clock(200, db)
    assert await v.heartbeat(db, rescuer) is not None
    assert len(await v.rescue(db, rescuer)) == 1
    assert await db.fetch("SELECT id FROM pgworkd.workers") == [(rescuer,)]
