"""Samples of the queues, and statistics by the period: what they count, and that thinning them loses nothing."""

from __future__ import annotations

import random
from bisect import bisect_left
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pgworkd.core.histogram import BOUNDS_S
from tests.kits.verbs import T0, Db, at, cancel, claim, claim_ids, clock, end, fail, insert, worker

from .conftest import Connect

COLUMNS = "queue, due, scheduled, running, failed, blocked, dead, oldest_due_s"
APPEND = "SELECT pgworkd.append_minutes('w', 10, $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
TOTALS = """
    SELECT queue, kind, sum(started), sum(completed), sum(failed), sum(dead), sum(released),
           round(sum(wait_s)::numeric, 6), round(sum(run_s)::numeric, 6)
    FROM pgworkd.queue_minutes GROUP BY 1, 2 ORDER BY 1, 2"""
COUNTS = """
    SELECT m.queue, m.kind, u.place, sum(u.wait), sum(u.run)
    FROM pgworkd.queue_minutes m, ROWS FROM (unnest(m.waits), unnest(m.runs)) WITH ORDINALITY AS u (wait, run, place)
    GROUP BY 1, 2, 3 ORDER BY 1, 2, 3"""


PLACES = len(BOUNDS_S) + 1


async def sample(db: Db) -> float:
    return float(await db.fetchval("SELECT pgworkd.sample_queues()"))


async def newest(db: Db) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await db.fetch(f"SELECT {COLUMNS} FROM pgworkd.queue_depths ORDER BY queue")]  # noqa: S608


async def append(db: Db, dice: random.Random, rows: int) -> None:
    """Statistics of random sizes, from up to nine days ago until now."""
    for _ in range(rows):
        waits, runs = ([dice.choice((0, 0, 0, dice.randrange(10**6))) for _ in range(PLACES)] for _ in range(2))
        text = [f"{{{','.join(map(str, each))}}}" for each in (waits, runs)]
        numbers = [[dice.randrange(10**9)] for _ in range(5)]
        queue, kind = dice.choice("ab"), dice.choice("xyz")
        sums = [[round(dice.random() * 1e6, 3)] for _ in range(2)]
        await db.fetchval(APPEND, [queue], [kind], *numbers, text[:1], text[1:], *sums)
        age_s = dice.choice((60, 7200, 86_400 * 2, 86_400 * 9)) * dice.random()
        await db.execute(
            "UPDATE pgworkd.queue_minutes SET at = at - make_interval(secs => $1) WHERE at > $2::timestamptz",
            age_s,
            T0 - timedelta(seconds=11),
        )


async def roll_up(db: Db, limit: int) -> int:
    """Until nothing is left to do; how many steps that took."""
    for step in range(10_000):
        if not await db.fetchval("SELECT pgworkd.roll_up(30, $1)", limit):
            return step
    raise AssertionError("it never ends")


async def test_the_bounds_are_those_of_the_program(db: Db) -> None:
    assert tuple(await db.fetchval("SELECT pgworkd.histogram_bounds()")) == BOUNDS_S


@pytest.mark.usefixtures("t0")
async def test_each_live_job_is_in_one_count_and_due_means_the_same_everywhere(db: Db) -> None:
    """Also where it is due again: whoever scales by one number and is alerted by another acts on both."""
    worker_id = await worker(db)
    await insert(db, 4, "q", max_attempts=9)
    for delay_s, job in zip((0, 0, 60), await claim_ids(db, worker_id, 3), strict=True):
        await fail(db, [job], delay_s=delay_s)
    await insert(db, 2, "q", run_at=T0 + timedelta(hours=1))
    await insert(db, 3, "q", serialize_key="k")
    await sample(db)
    counted = dict(await db.fetchrow(f"SELECT {COLUMNS} FROM pgworkd.queue_stats"))  # noqa: S608
    sampled = dict(await db.fetchrow(f"SELECT {COLUMNS} FROM pgworkd.queue_depths"))  # noqa: S608
    depth, live = await db.fetchrow("SELECT pgworkd.depth('q'), (SELECT count(*) FROM pgworkd.jobs)")
    assert counted == sampled
    assert (depth, counted["due"], counted["failed"]) == (6, 6, 1)
    assert sum(value for name, value in counted.items() if name not in ("queue", "oldest_due_s")) == live
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', pgworkd.clock() + interval '1 min')")
    assert await db.fetchval("SELECT pgworkd.depth('q')") == 0, "nothing could run now: nobody is to scale"
    await clock(61, db)
    assert await db.fetchval("SELECT pgworkd.depth('q')") == 7


ENDED = "SELECT sum(cancelled)::int, sum(expired)::int FROM pgworkd.queue_minutes"


@pytest.mark.usefixtures("t0")
async def test_what_is_cancelled_or_expires_is_counted(db: Db, connect: Connect) -> None:
    """Whoever does it, in its own transaction; and no lock on the statistics holds it up."""
    worker_id = await worker(db)
    await insert(db, 3, "q", expires_at=T0 + timedelta(seconds=5))
    ids = await insert(db, 4, "q")
    assert set((await cancel(db, *ids[:2])).values()) == {"cancelled"}
    (running,) = await claim_ids(db, worker_id, 1)
    await end(db, [running])
    await clock(6, db)
    await db.fetch("SELECT pgworkd.expire_jobs()")
    assert tuple(await db.fetchrow(ENDED)) == (3, 2)
    await roll_up(db, 100)
    day = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2199, 1, 1, tzinfo=UTC))
    (told,) = await db.fetch("SELECT * FROM pgworkd.throughput($1, $2, 2000000000)", *day)
    assert (told["cancelled"], told["expired"], told["completed"]) == (3, 2, 0)
    other = await connect()
    await db.execute("SET statement_timeout = '10s'")
    async with other.transaction():
        await other.execute("LOCK TABLE pgworkd.queue_minutes IN ACCESS EXCLUSIVE MODE")
        assert "cancelled" in (await cancel(db, *ids[2:])).values()
    assert tuple(await db.fetchrow(ENDED)) == (3, 2)


@pytest.mark.usefixtures("t0")
async def test_a_daemon_of_before_adds_its_coarser_counts(db: Db) -> None:
    """Up to version 14 there were three bounds to a decade; each of them still is one."""
    old = [float(f"{digit}e{power}") for power in range(-3, 4) for digit in (1, 2, 5)] + [10_000.0]
    counts = list(range(1, 24))
    text = "{" + ",".join(map(str, counts)) + "}"
    await db.fetchval(APPEND, ["q"], ["k"], [276], [276], [0], [0], [0], [text], [text], [1.0], [1.0])
    stored = await db.fetchval("SELECT runs FROM pgworkd.queue_minutes")
    assert {bound: count for bound, count in zip([*BOUNDS_S, None], stored, strict=True) if count} == dict(
        zip([*old, None], counts, strict=True)
    )


@pytest.mark.usefixtures("t0")
async def test_a_sample_is_what_queue_stats_counts(db: Db) -> None:
    worker_id = await worker(db)
    await insert(db, 5, "a")
    await insert(db, 2, "a", run_at=T0 + timedelta(hours=1))
    await insert(db, 3, "b", max_attempts=1)
    for job in await claim(db, worker_id, 2, "b"):
        await fail(db, [job["id"]])
    await insert(db, 1, "b", run_at=T0 - timedelta(seconds=90))
    await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('idle')")
    assert await sample(db) == 5
    sql = f"SELECT {COLUMNS} FROM pgworkd.queue_stats ORDER BY queue"  # noqa: S608
    counted = [tuple(row) for row in await db.fetch(sql)]
    assert await newest(db) == counted
    assert [row[0] for row in counted] == ["a", "b", "idle"]
    assert {row[0]: row[7] for row in counted}["b"] == 90


@pytest.mark.usefixtures("t0")
async def test_samples_are_taken_every_five_seconds_by_whoever_comes_first(db: Db, connect: Connect) -> None:
    other = await connect()
    await clock(0, other)
    await insert(db)
    assert await sample(db) == 5
    await clock(3, db, other)
    assert await sample(other) == 2
    await clock(5, db, other)
    async with db.transaction():
        assert await sample(db) == 5
        assert await sample(other) == 5, "another session is taking one"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.samples") == 2


@pytest.mark.usefixtures("t0")
async def test_an_expensive_sample_is_taken_less_often(db: Db) -> None:
    await sample(db)
    await db.execute("UPDATE pgworkd.samples SET took_s = 3")
    await clock(59, db)
    assert await sample(db) == pytest.approx(1, abs=0.001)
    await clock(60, db)
    assert await sample(db) == 5


@pytest.mark.usefixtures("t0")
async def test_a_clock_that_steps_back_does_not_stop_the_samples(db: Db) -> None:
    await insert(db, 7)
    await sample(db)
    await db.execute("DELETE FROM pgworkd.jobs")
    await clock(-3600, db)
    assert await sample(db) == 5
    assert await newest(db) == [], "the newest sample is the one that was taken last"
    assert await db.fetchval("SELECT count(*) FROM pgworkd.samples") == 1


@pytest.mark.usefixtures("t0")
@pytest.mark.parametrize("seed", range(6))
async def test_summing_up_keeps_every_count_whatever_the_size_of_a_step(db: Db, seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311
    await append(db, dice, 60)
    before = await db.fetch(TOTALS), await db.fetch(COUNTS)
    await roll_up(db, dice.choice((1, 2, 7, 1000)))
    assert (await db.fetch(TOTALS), await db.fetch(COUNTS)) == before
    late = "SELECT count(*) FROM pgworkd.queue_minutes WHERE period_s < $1 AND at < pgworkd.clock() - $2::interval"
    assert await db.fetchval(late, 60, timedelta(hours=1, minutes=1)) == 0
    assert await db.fetchval(late, 3600, timedelta(days=3, hours=1)) == 0


@pytest.mark.usefixtures("t0")
async def test_statistics_are_deleted_after_400_days(db: Db) -> None:
    await append(db, random.Random(0), 5)  # noqa: S311
    await db.execute("UPDATE pgworkd.queue_minutes SET at = pgworkd.clock() - interval '402 days'")
    await db.execute("INSERT INTO pgworkd.samples SELECT pgworkd.clock() - interval '402 days', 0")
    await db.execute("INSERT INTO pgworkd.queue_samples SELECT at, 'q', 1, 1, 1, 1, 1, 1, 1 FROM pgworkd.samples")
    await roll_up(db, 2)
    for table in ("queue_minutes", "samples", "queue_samples"):
        assert await db.fetchval(f"SELECT count(*) FROM pgworkd.{table}") == 0, table  # noqa: S608


@pytest.mark.usefixtures("t0")
@pytest.mark.parametrize("limit", [3, 500])
async def test_samples_are_thinned_to_the_first_of_each_minute_and_hour(db: Db, limit: int) -> None:
    """Some 5 s apart over ten minutes, at three ages; in steps of any size the same ones are left."""
    dice, taken = random.Random(limit), []  # noqa: S311
    for age in (timedelta(), timedelta(hours=5), timedelta(days=8)):
        at = T0 - age - timedelta(minutes=10)
        while at < T0 - age:
            taken.append(at)
            at += timedelta(seconds=dice.uniform(5, 20))
    await db.execute("INSERT INTO pgworkd.samples SELECT unnest($1::timestamptz[]), 0", taken)
    await db.execute("INSERT INTO pgworkd.queue_samples SELECT at, 'q', 1, 1, 1, 1, 1, 1, 1 FROM pgworkd.samples")
    await roll_up(db, limit)

    def first_of_each(seconds: int, ages: tuple[timedelta, timedelta]) -> set[datetime]:
        found: dict[float, datetime] = {}
        for at in taken:
            if ages[0] <= T0 - at < ages[1]:
                found.setdefault(at.timestamp() // seconds, at)
        return set(found.values())

    hour, week, ever = timedelta(hours=1), timedelta(days=7), timedelta(days=999)
    wanted = (
        {at for at in taken if T0 - at < hour} | first_of_each(60, (hour, week)) | first_of_each(3600, (week, ever))
    )
    for table in ("samples", "queue_samples"):
        assert {row[0] for row in await db.fetch(f"SELECT at FROM pgworkd.{table}")} == wanted, table  # noqa: S608


async def test_a_percentile_lies_between_the_bounds_of_the_true_one(db: Db) -> None:
    dice = random.Random(1)  # noqa: S311
    edges = (0.0, *BOUNDS_S)
    for _ in range(200):
        values = sorted(10 ** dice.uniform(-4, 4.2) for _ in range(dice.randint(1, 40)))
        counts = [0] * (len(BOUNDS_S) + 1)
        for value in values:
            counts[bisect_left(BOUNDS_S, value)] += 1
        share = dice.choice((0.0, 0.5, 0.95, 1.0))
        true = values[max(0, -int(-share * len(values) // 1) - 1)]
        place = bisect_left(BOUNDS_S, true)
        found = await db.fetchval("SELECT pgworkd.percentile($1, $2)", counts, share)
        assert edges[place] <= found <= (BOUNDS_S[place] if place < len(BOUNDS_S) else BOUNDS_S[-1]), (values, share)
    assert await db.fetchval("SELECT pgworkd.percentile($1, 0.5)", [0] * PLACES) is None
    assert await db.fetchval("SELECT pgworkd.percentile('{}', 0.5)") is None


@pytest.mark.usefixtures("t0")
async def test_throughput_adds_up_the_rows_of_each_step(db: Db) -> None:
    zeros, ones = ("{" + ",".join([first] + ["0"] * (PLACES - 1)) + "}" for first in "01")
    for kind in ("x", "x", "y"):
        await db.fetchval(APPEND, ["q"], [kind], [3], [2], [1], [0], [0], [ones], [zeros], [0.0005], [0.0])
    ask = "SELECT * FROM pgworkd.throughput($1, $2, 60, 'q', $3)"
    day = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2199, 1, 1, tzinfo=UTC))
    (both,) = await db.fetch(ask, *day, None)
    assert (both["started"], both["completed"], both["failed"]) == (9, 6, 3)
    assert 0 < both["wait_p50_s"] <= 0.001
    assert both["run_p50_s"] is None
    (one,) = await db.fetch(ask, *day, "y")
    assert one["started"] == 3
    assert await db.fetch(ask, *day, "z") == []


async def test_a_period_longer_than_an_hour_counts_in_its_last_one_and_is_forgotten_like_others(db: Db) -> None:
    """An outage of the database makes a period long; rows longer than an hour would be summed by no step."""
    await clock(0, db)
    columns = (["q"], ["k"], [1], [1], [0], [0], [0], ["{1}"], ["{1}"], [0.5], [0.5])
    await db.execute(APPEND.replace("10,", "90000,", 1), *columns)
    assert await db.fetchrow("SELECT at, period_s FROM pgworkd.queue_minutes") == (at(-3600), 3600)
    await clock(401 * 86_400, db)
    await roll_up(db, 100)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.queue_minutes") == 0
