"""Periodic queries of daemons, and settles, beside jobs that are finished, waiting, or of other queues."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from benchmarks.bench import Bench
from benchmarks.measure import Line

from .stage import BAR, Cost, Pool, Stage, compare

FINISHED = 300_000
QUEUES = 5_000
WAITING = 900_000
KEYS, STEP = 200_000, 1_000
WANTED = "SELECT * FROM pgworkd.wanted($1, $2, '{q}')"


async def heartbeat_row(bench: Bench) -> list[Line]:
    """Queries of each heartbeat and of an idle worker, after 300,000 jobs whose entries vacuum may not remove."""
    bars = dict.fromkeys(("wanted()", "running_of()", "an empty claim", "next_due()"), BAR)
    return await compare(bench, "heartbeat", _heartbeat, bench.jobs(FINISHED), "over, under a snapshot", bars)


@asynccontextmanager
async def _heartbeat(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    worker = await stage.worker()
    token = await stage.db.fetchval("SELECT token FROM pgworkd.workers WHERE id = $1", worker)
    async with stage.snapshot():
        await stage.ran(worker, crowd)
        await stage.fill("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 10)")
        pool = Pool(stage, worker, "q")
        await pool.advance(10, 10)
        version = await stage.db.fetchval("SELECT settings_version FROM pgworkd.wanted($1, NULL, '{q}')", worker)
        yield {
            "wanted()": stage.call(WANTED, worker, version),
            "running_of()": stage.call("SELECT * FROM pgworkd.running_of($1, $2, 60, 120, '{q}')", worker, token),
            "an empty claim": pool.cost(10, 0),
            "next_due()": stage.call("SELECT * FROM pgworkd.next_due('{q}', '{12}', '{\"{0}\"}')"),
        }


async def settings_row(bench: Bench) -> list[Line]:
    """A settle of 1,000 jobs, and the queries of a heartbeat, beside 5,000 other queues with settings."""
    bars = {"settle of 1,000": BAR, "wanted()": BAR}
    return await compare(bench, "settings", _settings, bench.jobs(QUEUES), "other queues with settings", bars)


@asynccontextmanager
async def _settings(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    await stage.db.execute(
        """INSERT INTO pgworkd.queues (name, limit_per_key, keep_s) SELECT 'other' || i, 5, 60 * (i % 3)
           FROM generate_series(1, $1::int) i""",
        crowd,
    )
    worker = await stage.worker()
    await stage.db.execute("SELECT pgworkd.set_pool($1, 'q', 10, false)", worker)
    ids = await _running(stage, worker, 1000)
    await stage.db.execute("ANALYZE pgworkd.jobs")
    version = await stage.db.fetchval("SELECT settings_version FROM pgworkd.wanted($1, NULL, '{q}')", worker)
    yield {
        "settle of 1,000": stage.call("SELECT pgworkd.settle_completed($1, $2, $3)", ids, [1] * 1000, ["null"] * 1000),
        "wanted()": stage.call(WANTED, worker, version),
    }


async def _running(stage: Stage, worker: int, count: int) -> list[object]:
    """Inserts running jobs of queue `q`, in their first attempt; returns their ids."""
    insert = """INSERT INTO pgworkd.jobs (queue, status, worker_id, attempts, started_at)
                SELECT 'q', 'running', $1, 1, now() FROM generate_series(1, $2::int)"""
    await stage.fill(insert, worker, count)
    rows = await stage.db.fetch("SELECT id FROM pgworkd.jobs WHERE worker_id = $1", worker)
    return [row["id"] for row in rows]


async def depth_row(bench: Bench) -> list[Line]:
    """depth() of 100 due jobs, beside future, other queues' and running ones, a third each; and finished ones."""
    bars = {"depth() of 100 due jobs": BAR}
    lines = await compare(bench, "depth", _depth, bench.jobs(WAITING), "not due, of others, running", bars)
    return lines + await compare(bench, "depth", _depth_held, bench.jobs(FINISHED), "over, under a snapshot", bars)


@asynccontextmanager
async def _depth(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    insert = """INSERT INTO pgworkd.jobs (queue, run_at, status, worker_id, attempts)
                SELECT $1, now() + make_interval(secs => $2), $3::text::pgworkd.job_status,
                       CASE $3 WHEN 'running' THEN 1000 END, CASE $3 WHEN 'running' THEN 1 ELSE 0 END
                FROM generate_series(1, $4::int) i"""
    for queue, due_in_s, status in (("q", 3600.0, "pending"), ("r", 0.0, "pending"), ("q", 0.0, "running")):
        await stage.fill(insert, queue, due_in_s, status, crowd // 3)
    await stage.fill(insert, "q", -1.0, "pending", 100)
    await stage.db.execute("ANALYZE pgworkd.jobs")
    yield {"depth() of 100 due jobs": stage.call("SELECT pgworkd.depth('q')")}


@asynccontextmanager
async def _depth_held(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    async with stage.snapshot():
        await stage.ran(await stage.worker(), crowd)
        await stage.fill("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 100)")
        yield {"depth() of 100 due jobs": stage.call("SELECT pgworkd.depth('q')")}


async def unblock_row(bench: Bench) -> list[Line]:
    """A step of unblock() over keys that are all busy, against the thousand that one step visits."""
    crowd = bench.jobs(KEYS, 2 * STEP)
    bars = {"unblock()": BAR, "a step of unblock() further on": BAR}
    return await compare(bench, "unblock", _unblock, crowd, "busy keys", bars, base=STEP)


@asynccontextmanager
async def _unblock(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    for status, worker in (("running", 1000), ("blocked", None)):
        await stage.fill(
            """INSERT INTO pgworkd.jobs (queue, serialize_key, status, worker_id, attempts)
               SELECT 'q', 'k' || lpad(i::text, 9, '0'), $1::text::pgworkd.job_status, $2::int, $3
               FROM generate_series(1, $4::int) i""",
            status,
            worker,
            0 if worker is None else 1,
            crowd,
        )
    await stage.db.execute("ANALYZE pgworkd.jobs")
    place = f"k{crowd - STEP:09}"
    yield {
        "unblock()": stage.call("SELECT pgworkd.unblock()"),
        "a step of unblock() further on": stage.call("SELECT * FROM pgworkd.unblock_lines('q', $1, $2)", place, STEP),
    }
