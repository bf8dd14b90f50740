"""What one operation costs by its context: partitions, dependents, idle pools, previous load."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial

import anyio

from benchmarks.bench import Bench, calm, daemon
from benchmarks.latency import ready
from benchmarks.measure import Bar, Line, interleave
from benchmarks.processes import until
from benchmarks.systems import executed
from pgworkd.bench.measure import percentile
from pgworkd.database import schema

from .stage import BAR, SLOW_ROUNDS, TEMPLATE, Cost, Pool, Stage, compare

PARTITIONS = 374
AFTER = 1_000
DEPENDENTS, PAGE = 100_000, 1_000
ROWS, POOLS = 200_000, 500
BATCH, EVERY_S, STEADY_S = 15, 0.025, 4.0
BURST = 20_000
LATENCY = Bar("at most", 1.3)


async def depend_row(bench: Bench) -> list[Line]:
    """A job that depends on 1,000 finished jobs, with a history of 374 partitions."""
    crowd = max(10, round(PARTITIONS * min(1.0, bench.scale)))
    return await compare(bench, "depend", _depend, crowd, "partitions of the history", {f"depend() on {AFTER:,}": BAR})


@asynccontextmanager
async def _depend(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    if crowd:
        # The schema's clock is set back, so that it creates partitions of the past.
        await stage.db.execute(
            "SELECT set_config('pgworkd.clock', (now() - $1 * interval '1 day')::text, false)", crowd
        )
        await stage.db.execute("SELECT pgworkd.ensure_partitions($1)", crowd - 1)
        await stage.db.execute("RESET pgworkd.clock")
    await stage.fill("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1::int)", AFTER)
    claimed = await Pool(stage, await stage.worker(), "q").claim(AFTER)
    claimed += await Pool(stage, await stage.worker(), "q").claim(AFTER)  # over a Unix socket 500 are the most
    ids = [each.id for each in claimed]
    assert len(ids) == AFTER
    await stage.db.execute("SELECT pgworkd.settle_completed($1, $2, $3)", ids, [1] * AFTER, ["null"] * AFTER)
    await stage.db.execute("ANALYZE")
    job = await stage.db.fetchval("SELECT pgworkd.new_id()")
    insert = ("INSERT INTO pgworkd.jobs (id, queue) VALUES ($1, 'q')", job)
    depend = ("SELECT pgworkd.depend($1, $2)", job, ids)
    yield {f"depend() on {AFTER:,}": partial(stage.took_ms, insert, depend)}


async def dependents_row(bench: Bench) -> list[Line]:
    """The settle of one job with 100,000 dependents, against the same with 1,000."""
    crowd = bench.jobs(DEPENDENTS, 2 * PAGE)
    bars = {"settle of one job": BAR}
    of = "wait for it"
    return await compare(bench, "dependents", _dependents, crowd, of, bars, base=PAGE, rounds=SLOW_ROUNDS)


@asynccontextmanager
async def _dependents(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    await stage.fill("INSERT INTO pgworkd.jobs (queue) VALUES ('q')")
    (job,) = await Pool(stage, await stage.worker(), "q").claim(1)
    await stage.fill(
        """WITH made AS (
               INSERT INTO pgworkd.jobs (queue, status, waiting_on)
               SELECT 'r', 'blocked', 1 FROM generate_series(1, $2::int) RETURNING id)
           INSERT INTO pgworkd.job_dependencies (job_id, depends_on) SELECT m.id, $1 FROM made m""",
        job.id,
        crowd,
    )
    await stage.db.execute("ANALYZE pgworkd.jobs, pgworkd.job_dependencies")
    settle = "SELECT pgworkd.settle_completed($1, '{1}', '{NULL}')"
    yield {"settle of one job": stage.call(settle, [job.id])}


async def insert_row(bench: Bench) -> list[Line]:
    """200,000 rows in one INSERT with 500 polling pools and no statistics, against the same with statistics."""
    rows = bench.jobs(ROWS)
    bars = {f"INSERT of {rows:,} rows": BAR}
    of = "pools awake and no statistics, against the same with"
    return await compare(bench, "insert", _insert, POOLS, of, bars, rounds=SLOW_ROUNDS)


@asynccontextmanager
async def _insert(stage: Stage, crowd: int) -> AsyncIterator[Mapping[str, Cost]]:
    rows = stage.bench.jobs(ROWS)
    insert = "INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1::int)"
    tables = ("jobs", "pools")
    for table in tables:
        await stage.db.execute(f"ALTER TABLE pgworkd.{table} SET (autovacuum_enabled = off)")
    await stage.fill(
        """INSERT INTO pgworkd.pools (worker_id, queue, concurrency, idle)
           SELECT i, 'q', 1, false FROM generate_series(1, $1::int) i UNION ALL SELECT 1, 'other', 1, true""",
        POOLS,
    )
    if not crowd:
        await stage.fill(insert, rows)
        await stage.db.execute("ANALYZE pgworkd.jobs, pgworkd.pools")

    async def cost() -> float:
        await stage.db.execute("TRUNCATE pgworkd.jobs")
        return await stage.took_ms((insert, rows))

    yield {f"INSERT of {rows:,} rows": cost}


async def burst_row(bench: Bench) -> list[Line]:
    """Latency at 600 jobs per second, 15 every 25 ms, of a daemon after 20,000 jobs at once, and of a fresh one."""
    burst, seconds = bench.jobs(BURST), bench.seconds(STEADY_S, 0.5)
    bench.say(f"burst: {BATCH / EVERY_S:g} jobs a second for {seconds:g} s, after {burst:,} at once and fresh")
    ways = {"after": partial(_steady, bench, burst, seconds), "fresh": partial(_steady, bench, 0, seconds)}
    found = await interleave(ways, min(bench.rounds, SLOW_ROUNDS))
    what, note = f"p50 at {BATCH / EVERY_S:g}/s, in batches", f"after {burst:,} at once, against a fresh daemon"
    return [Line("burst", what, "ms", found["after"], found["fresh"], "ms", LATENCY, note)]


async def _steady(bench: Bench, burst: int, seconds: float) -> float:
    """The median of the waits from before the INSERT to the handler, in ms."""
    await bench.server.template(TEMPLATE, lambda dsn: executed(dsn, schema.text()))
    insert = (
        "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'latency', $1::text::jsonb FROM generate_series(1, $2::int)"
    )
    async with (
        bench.server.database(TEMPLATE) as dsn,
        bench.server.connected(dsn) as connection,
        bench.fleet(daemon("latency=10"), dsn) as (programs, tallies),
    ):
        await calm(connection, "pgworkd.jobs")
        await until(partial(ready, connection, 1), "the daemon listens", programs, every_s=0.05)
        total = 0
        for count, batches in ((burst, 1 if burst else 0), (1, 20), (BATCH, round(seconds / EVERY_S))):
            began, skipped = time.monotonic(), total
            for number in range(batches):
                await anyio.sleep(max(0.0, began + number * EVERY_S - time.monotonic()))
                await connection.execute(insert, json.dumps({"inserted_ns": time.monotonic_ns()}), count)
                total += count
            await until(lambda all_=total: tallies.calls() >= all_, f"{total:,} jobs run", programs, limit_s=120)
        (noted,) = tallies.notes().values()
    return percentile(noted[skipped:], 50) / 1e6
