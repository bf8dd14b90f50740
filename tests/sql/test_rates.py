"""Rates over the whole fleet: a maximum of starts per period, of a queue or of each limit_key."""

from __future__ import annotations

import anyio
import pytest

from tests.kits.flow import line, most_in_window, settings, take, take_ids
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import Db, at, cancel, clock, complete, insert, one, release, worker

from .conftest import Connect

pytestmark = pytest.mark.usefixtures("t0")


async def test_a_rate_allows_a_burst_and_then_one_start_at_a_time(db: Db) -> None:
    worker_id = await worker(db, 3600)
    await settings(db, rate=10, rate_period_s=1.0, rate_burst=3)
    ids = await insert(db, 20)
    taken = await take(db, worker_id)
    assert taken.ids == ids[:3]
    assert taken.again_s == pytest.approx(0.1)
    for number in range(3, 8):
        again_s = taken.again_s
        assert again_s is not None
        await clock((number - 2) * 0.1 - 0.001, db)
        assert await take_ids(db, worker_id) == []
        await clock((number - 2) * 0.1 + 0.0001, db)
        taken = await take(db, worker_id)
        assert taken.ids == [ids[number]]
    await clock(10, db)
    assert (await take(db, worker_id)).ids == ids[8:11], "time that was not used is not saved up"


@pytest.mark.parametrize(("rate", "period_s", "burst"), [(50, 1.0, 5), (3, 1.0, 1), (100, 60.0, 1), (600, 60.0, 1)])
async def test_the_burst_defaults_to_a_tenth_of_a_second(db: Db, rate: int, period_s: float, burst: int) -> None:
    worker_id = await worker(db)
    await settings(db, rate=rate, rate_period_s=period_s)
    await insert(db, 100)
    taken = await take(db, worker_id, 100)
    assert len(taken.ids) == burst
    assert taken.again_s == pytest.approx(period_s / rate)


async def test_claiming_again_after_the_returned_delay_starts_the_next_job_never_sooner(db: Db) -> None:
    worker_id = await worker(db, 3600)
    await settings(db, rate=7, rate_period_s=1.0, rate_burst=2)
    await insert(db, 100)
    now, starts = 0.0, []
    for _ in range(40):
        await clock(now, db)
        taken = await take(db, worker_id, 5)
        starts += [at(now)] * len(taken.ids)
        assert taken.ids or now == 0 or taken.again_s is not None
        assert taken.again_s is not None
        now += taken.again_s + 1e-6
    for window_s in (0.5, 1.0, 3.0):
        assert most_in_window(starts, window_s) <= 2 + 7 * window_s
    assert len(starts) >= 7 * now, "the rate is used to the full"


async def test_a_claim_that_returns_all_it_asked_for_returns_no_delay(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, rate=10, rate_period_s=1.0, rate_burst=5)
    await insert(db, 4)
    assert (await take(db, worker_id, 2)).again_s is None
    assert (await take(db, worker_id, 2)).again_s is None
    assert (await take(db, worker_id, 2)).again_s in (None, pytest.approx(0.1))


async def test_a_rate_per_key_delays_that_key_only(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, rate_per_key=2, rate_per_key_period_s=1.0, rate_per_key_burst=2)
    a, b = await insert(db, 5, limit_key="a"), await insert(db, 1, limit_key="b")
    taken = await take(db, worker_id)
    assert set(taken.ids) == {*a[:2], *b}
    assert taken.again_s == pytest.approx(0.5)
    await clock(0.6, db)
    assert await take_ids(db, worker_id) == a[2:3]


async def test_suspects_count_against_the_rate(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, rate=1, rate_period_s=10.0, rate_per_key=1, rate_per_key_period_s=20.0)
    suspect = await one(db, losses=2, limit_key="a")
    behind = await one(db, limit_key="a")
    (plain,) = await insert(db, 1)
    assert await take_ids(db, worker_id) == [suspect]
    await clock(11, db)
    assert await take_ids(db, worker_id) == [plain]
    await complete(db, [suspect])
    await clock(21.5, db)
    assert await take_ids(db, worker_id) == [behind]


async def test_a_rolled_back_claim_does_not_count_against_the_rate(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, rate=1, rate_period_s=10.0, rate_per_key=1, rate_per_key_period_s=10.0)
    (job_id,) = await insert(db, 1, limit_key="a")
    await db.execute("BEGIN")
    assert await take_ids(db, worker_id) == [job_id]
    await db.execute("ROLLBACK")
    assert await take_ids(db, worker_id) == [job_id]
    assert (await take(db, worker_id)).ids == []


async def test_a_retry_counts_again_and_a_finished_job_still_counts(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, rate=1, rate_period_s=10.0)
    first, second = await insert(db, 2)
    assert await take_ids(db, worker_id) == [first]
    await release(db, [first])
    assert await take_ids(db, worker_id) == []
    await clock(10.1, db)
    assert await take_ids(db, worker_id) == [first]
    await complete(db, [first], 2)
    assert await take_ids(db, worker_id) == []
    await clock(20.2, db)
    assert await take_ids(db, worker_id) == [second]


@pytest.mark.parametrize("scope", ["", "_per_key"])
async def test_a_higher_rate_takes_effect_at_once(db: Db, scope: str) -> None:
    """Starts under the lower rate are not charged at its price for hours afterwards."""
    worker_id = await worker(db)
    rate, period_s, burst = f"rate{scope}", f"rate{scope}_period_s", f"rate{scope}_burst"
    await settings(db, **{rate: 10, period_s: 3600.0, burst: 10})
    await insert(db, 60, limit_key="a")
    assert len(await take_ids(db, worker_id)) == 10
    await settings(db, **{rate: 100, period_s: 1.0, burst: 10})
    taken = await take(db, worker_id)
    assert len(taken.ids) <= 10
    await clock(0.5, db)
    assert len(await take_ids(db, worker_id, 50)) == 10
    await settings(db, **{rate: None, period_s: None, burst: None})
    assert len(await take_ids(db, worker_id, 50)) >= 30


async def test_a_lower_rate_takes_effect_at_once(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, rate=100, rate_period_s=1.0, rate_burst=10)
    await insert(db, 60)
    assert len(await take_ids(db, worker_id)) == 10
    await settings(db, rate=1, rate_period_s=10.0, rate_burst=1)
    assert await take_ids(db, worker_id) == []
    await clock(9, db)
    assert len(await take_ids(db, worker_id)) <= 1
    await clock(30, db)
    worker_id = await worker(db)
    assert len(await take_ids(db, worker_id)) == 1


async def test_a_rate_is_changed_concurrently_with_a_claim_in_a_longer_transaction(
    db: Db, other: Db, third: Db
) -> None:
    """Rates are checked when it commits: until then it holds no lock that a claim would wait for."""
    worker_id = await worker(db)
    await settings(db, rate=10, rate_period_s=3600.0, rate_burst=2)
    ids = [*await line(db, "k", "k"), *await insert(db, 4)]
    assert await take_ids(db, worker_id, 1) == ids[:1]
    await db.execute("BEGIN")
    await settings(db, rate=1000, rate_period_s=1.0, rate_burst=10)
    assert await take_ids(other, worker_id, 1) == ids[2:3]
    await other.execute("BEGIN")
    await complete(other, ids[:1])
    async with anyio.create_task_group() as tasks:
        cancelled = Later(tasks, cancel(db, ids[1]))
        await waits_for_lock(third, db)
        await other.execute("COMMIT")
        assert await cancelled.answer() == {ids[1]: "cancelled"}
    await db.execute("COMMIT")
    await clock(0.1, other)
    assert await take_ids(other, worker_id) == ids[3:]


async def test_an_extremely_high_rate_does_not_limit(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, rate=1_000_000, rate_period_s=1e-6, rate_per_key=1_000_000, rate_per_key_period_s=1e-6)
    ids = await insert(db, 20, limit_key="a")
    assert await take_ids(db, worker_id, 7) == ids[:7]
    await clock(0.001, db)
    assert await take_ids(db, worker_id, 100) == ids[7:]


@pytest.mark.parametrize("scope", ["", "_per_key"])
async def test_a_clock_set_back_does_not_stop_a_rate(db: Db, scope: str) -> None:
    """Starts recorded for a time in the future count as a full burst, and no more."""
    worker_id = await worker(db, 3600)
    await settings(db, **{f"rate{scope}": 1, f"rate{scope}_period_s": 5.0, f"rate{scope}_burst": 3})
    ids = await insert(db, 30, limit_key="a")
    await clock(600, db)
    assert await take_ids(db, worker_id) == ids[:3]
    await clock(0, db)
    taken = await take(db, worker_id)
    assert taken.ids == []
    assert taken.again_s is not None
    assert taken.again_s <= 5.0 + 1e-3
    now, starts = 0.0, []
    while now < 100:
        await clock(now, db)
        starts += [at(now)] * len((await take(db, worker_id)).ids)
        now += 1.0
    assert most_in_window(starts, 30) <= 3 + 30 / 5
    assert len(starts) >= 100 / 5 - 1, "the rate is used to the full"


async def test_claims_that_waited_for_each_other_are_charged_when_they_start(connect: Connect, db: Db) -> None:
    """Time is real here: the second claim begins a second after the first, and both proceed at the same instant."""
    await db.execute("RESET pgworkd.clock")
    worker_id = await worker(db, 3600)
    await settings(db, rate=1, rate_period_s=1.0, rate_burst=1)
    await insert(db, 10)
    first, second = await connect(), await connect()
    await db.execute("BEGIN")
    await db.execute("SELECT pgworkd.lock_queue('q')")
    async with anyio.create_task_group() as tasks:
        claims = [Later(tasks, take(first, worker_id, 5))]
        await anyio.sleep(1.05)
        claims.append(Later(tasks, take(second, worker_id, 5)))
        for session in (first, second):
            await waits_for_lock(db, session)
        await db.execute("COMMIT")
        taken = [await claim.answer() for claim in claims]
    assert sorted(len(each.ids) for each in taken) == [0, 1]


async def test_rows_of_rates_that_no_longer_limit_are_deleted_in_steps(db: Db, other: Db) -> None:
    """Each step reads a bounded number; rows locked by a claim, rows that still limit and the queue's own row stay."""
    await db.execute(
        "INSERT INTO pgworkd.rates (queue, limit_key, spent_until) SELECT q, k, $1 FROM unnest('{q,r}'::text[]) q,"
        " unnest('{a,b,c,d,e,\"\"}'::text[]) k",
        at(-1),
    )
    await db.execute("UPDATE pgworkd.rates SET spent_until = $1 WHERE (queue, limit_key) = ('r', 'b')", at(1))
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.rates WHERE (queue, limit_key) = ('q', 'd') FOR UPDATE")
    await db.execute("SET statement_timeout = '2s'")
    steps, last = [], ("", "")
    while last[0] is not None:
        forgotten, *last = await db.fetchrow("SELECT * FROM pgworkd.forget_rates($1, $2, 5)", *last)
        steps.append((forgotten, *last))
    assert steps == [(3, "q", "d"), (3, "r", "c"), (2, None, None)]
    left = await db.fetch("SELECT queue, limit_key FROM pgworkd.rates ORDER BY 1, 2")
    assert [tuple(row) for row in left] == [("q", ""), ("q", "d"), ("r", ""), ("r", "b")]
