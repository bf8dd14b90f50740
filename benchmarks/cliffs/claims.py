"""Claims beside jobs that they cannot take: not due, running elsewhere, finished, of other kinds, behind a busy key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from benchmarks.bench import Bench
from benchmarks.measure import Line

from .stage import BAR, LIMITED, SLOW_ROUNDS, Cost, Pool, Stage, compare

CROWD = 100_000
FINISHED = 300_000
PRIORITIES = 40
DUE = 100
CLAIM = 25


def _settings(**columns: object) -> str:
    """The statement that gives queue $1 these settings."""
    values = ", ".join(str(value) for value in columns.values())
    return f"INSERT INTO pgworkd.queues (name, {', '.join(columns)}) VALUES ($1, {values})"  # noqa: S608 - ours


async def turns_row(bench: Bench) -> list[Line]:
    """100 due jobs of as many keys, in claims of 25, among 100,000 keys of which none has a due job."""
    bars = {f"{DUE} due jobs, {queue}": LIMITED for queue in ("fair", "limit_per_key")}
    of = "keys without a due job"
    return await compare(bench, "turns", _turns, bench.jobs(CROWD), of, bars, rounds=SLOW_ROUNDS)


@asynccontextmanager
async def _turns(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    costs = {}
    for queue, settings in {"fair": _settings(fair=True), "limit_per_key": _settings(limit_per_key=5)}.items():
        await stage.db.execute(settings, queue)
        for key, count, due_in_s in (("k", crowd, 3600.0), ("d", DUE, 0.0)):
            await stage.fill(
                """INSERT INTO pgworkd.jobs (queue, limit_key, run_at)
                   SELECT $1, $2 || i, now() + make_interval(secs => $4) FROM generate_series(1, $3::int) i""",
                queue,
                key,
                count,
                due_in_s,
            )
        pool = Pool(stage, await stage.worker(), queue)
        costs[f"{DUE} due jobs, {queue}"] = pool.cost_of_all(CLAIM, DUE)
    await stage.db.execute("ANALYZE pgworkd.jobs")
    yield costs


async def running_row(bench: Bench) -> list[Line]:
    """A claim under max_running while 50,000 jobs of another queue run; under limit_per_key, also of other keys."""
    bars = dict.fromkeys(("claim under max_running", "claim under limit_per_key"), LIMITED)
    return await compare(bench, "running", _running, bench.jobs(CROWD), "running elsewhere", bars)


@asynccontextmanager
async def _running(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    await stage.fill(
        """INSERT INTO pgworkd.jobs (queue, limit_key, status, worker_id, attempts, started_at)
           SELECT CASE i % 2 WHEN 0 THEN 'other' ELSE 'limit_per_key' END, 'l' || i % 1000, 'running', 1000 + i % 20, 1,
                  now() FROM generate_series(1, $1::int) i""",
        crowd,
    )
    costs = {}
    for limit in ("max_running", "limit_per_key"):
        await stage.db.execute(_settings(**{limit: 50}), limit)
        insert = "INSERT INTO pgworkd.jobs (queue, limit_key) SELECT $1, 'a' FROM generate_series(1, 20)"
        await stage.fill(insert, limit)
        costs[f"claim under {limit}"] = Pool(stage, await stage.worker(), limit).cost(10, 10)
    await stage.db.execute("ANALYZE pgworkd.jobs")
    yield costs


async def keyed_row(bench: Bench) -> list[Line]:
    """A claim of one keyed job while vacuum may not remove the entries of 300,000 finished jobs."""
    crowd, of = bench.jobs(FINISHED), "over, under a snapshot"
    return await compare(bench, "keyed", _keyed, crowd, of, {"claim of one job with a key": LIMITED})


@asynccontextmanager
async def _keyed(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    worker = await stage.worker()
    async with stage.snapshot():
        await stage.ran(worker, crowd, ", serialize_key", ", 'k' || i")
        insert = "INSERT INTO pgworkd.jobs (queue, serialize_key) SELECT 'q', 'w' || i FROM generate_series(1, 30) i"
        await stage.fill(insert)
        pool = Pool(stage, worker, "q")
        await pool.advance(1, 2)
        yield {"claim of one job with a key": pool.cost(1, 1)}


async def priorities_row(bench: Bench) -> list[Line]:
    """A claim that takes one job of each of 40 priorities, under such a snapshot."""
    crowd, of = bench.jobs(FINISHED), "over, under a snapshot"
    bars = {f"claim of one job in each of {PRIORITIES} priorities": BAR}
    return await compare(bench, "priorities", _priorities, crowd, of, bars)


@asynccontextmanager
async def _priorities(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    worker = await stage.worker()
    one_each = "INSERT INTO pgworkd.jobs (queue, priority) SELECT 'q', generate_series(1, $1::int)"
    async with stage.snapshot():
        await stage.ran(worker, crowd, ", priority", f", 1 + i % {PRIORITIES}")
        await stage.fill(one_each, PRIORITIES)
        pool = Pool(stage, worker, "q")
        await pool.advance(1000, PRIORITIES)
        await stage.fill(one_each, PRIORITIES)
        yield {f"claim of one job in each of {PRIORITIES} priorities": pool.cost(PRIORITIES, PRIORITIES)}


async def parking_row(bench: Bench) -> list[Line]:
    """The claims until a queue's ten plain jobs are taken, behind 100,000 of two busy keys that are not blocked yet."""
    crowd, of = bench.jobs(CROWD), "of two busy keys, not parked yet"
    return await compare(bench, "parking", _parking, crowd, of, {"10 plain jobs": LIMITED}, rounds=SLOW_ROUNDS)


@asynccontextmanager
async def _parking(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    await stage.fill(
        """INSERT INTO pgworkd.jobs (queue, serialize_key, status, worker_id, attempts, started_at)
           VALUES ('q', 'k0', 'running', 1000, 1, now()), ('q', 'k1', 'running', 1000, 1, now())"""
    )
    await stage.fill(
        """INSERT INTO pgworkd.jobs (queue, serialize_key, run_at)
           SELECT 'q', 'k' || i % 2, now() - interval '1 min' + i * interval '1 us'
           FROM generate_series(1, $1::int) i""",
        crowd,
    )
    await stage.fill("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 10)")
    await stage.db.execute("ANALYZE pgworkd.jobs")
    yield {"10 plain jobs": Pool(stage, await stage.worker(), "q").cost_of_all(10, 10)}


async def left_out_row(bench: Bench) -> list[Line]:
    """A claim beside due jobs of a kind that is left to other workers: plain, with keys, with limits per key."""
    crowd, of = bench.jobs(CROWD), "due, of a kind left to others"
    bars = {"claim of 10": BAR, "claim of 10, serialize_keys": LIMITED}
    lines = await compare(bench, "leftout", partial(_left_out, queues=bars), crowd, of, bars)
    # A claim visits some of the keys, and the next one continues from there: hence a smaller crowd.
    crowd, bars = bench.jobs(CROWD // 100), {"claim of 10, limit_per_key": LIMITED}
    scene = partial(_left_out, queues=bars)
    return lines + await compare(bench, "leftout", scene, crowd, of, bars, rounds=SLOW_ROUNDS)


@asynccontextmanager
async def _left_out(stage: Stage, crowd: int, queues: Iterable[str]) -> AsyncIterator[Mapping[str, Cost]]:
    costs = {}
    for queue in queues:
        key = queue.endswith("limit_per_key")
        if key:
            await stage.db.execute(_settings(limit_per_key=5), queue)
        column = "limit_key" if key else "serialize_key" if queue.endswith("serialize_keys") else "error"
        insert = (
            f"INSERT INTO pgworkd.jobs (queue, kind, run_at, {column}) "  # noqa: S608 - ours
            "SELECT $1, $3::text, now() + make_interval(secs => $4), $3::text || i FROM generate_series(1, $2::int) i"
        )
        pool = Pool(stage, await stage.worker(), queue, ("new",))
        await stage.fill(insert, queue, 10, "old", -61.0)
        await stage.fill(insert, queue, crowd, "new", -60.0)
        await stage.db.execute("ANALYZE pgworkd.jobs")
        await pool.advance(10, 10)
        await stage.fill(insert, queue, 10, "own", 0.0)
        costs[queue] = pool.cost_of_all(10, 10) if key else pool.cost(10, 10)
    yield costs
