"""How long an idle worker takes to start a job: from just before the INSERT to the first line of the handler."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import asyncpg

from pgworkd.bench.measure import Times

from .bench import Bench, calm
from .measure import Bar, Line, Rates, interleave
from .processes import BenchmarkError, Program, until
from .systems import System, bare_loop, named, ours
from .tally import Tallies

JOBS, EVERY_S = 500, 0.02
_WARM_UP = 10
"""Jobs before those that count: the first ones find cold caches on both sides."""
_INSERT = {
    "pgworkd": "INSERT INTO pgworkd.jobs (queue, payload) VALUES ('latency', $1::text::jsonb)",
    "bare loop": "INSERT INTO narrow (queue, payload) VALUES ('bench', $1::text::jsonb)",
}


async def ready(connection: asyncpg.Connection[Any], pools: int, workers: int = 1) -> bool:
    """True once our daemons are listening: their pools are registered as idle."""
    # Before version 3 of the schema, with which this may be compared, the column was `asleep`.
    idle = "coalesce(to_jsonb(p) ->> 'idle', to_jsonb(p) ->> 'asleep')::boolean"
    sql = f"SELECT count(*) FILTER (WHERE {idle}) >= $1 AND count(DISTINCT worker_id) >= $2 FROM pgworkd.pools p"  # noqa: S608
    return bool(await connection.fetchval(sql, pools, workers))


async def _listening(connection: asyncpg.Connection[Any]) -> bool:
    """True once the bare loop has executed LISTEN and polled once."""
    sql = """SELECT count(*) FILTER (WHERE query ILIKE 'LISTEN%') > 0
                    AND count(*) FILTER (WHERE query LIKE '%narrow%') > 0
             FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND state = 'idle'"""
    return bool(await connection.fetchval(sql))


async def waits(bench: Bench, system: System, jobs: int) -> Times:
    """Inserts one job every 20 ms into an idle worker's queue; returns how long each waited."""
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        bench.fleet(system.command, dsn) as (programs, tallies),
    ):
        await calm(connection, system.table)
        listens = partial(ready, connection, 1) if system.ours else partial(_listening, connection)
        await until(listens, f"{system.name} listens", programs, every_s=0.05)
        return await timed(connection, programs, tallies, system.name, jobs)


async def timed(
    connection: asyncpg.Connection[Any], programs: Sequence[Program], tallies: Tallies, name: str, jobs: int
) -> Times:
    """Inserts one job every 20 ms, and returns how long each waited for its handler."""
    insert = await connection.prepare(_INSERT[name])
    began, total = time.monotonic(), jobs + _WARM_UP
    for number in range(total):
        await anyio.sleep(max(0.0, began + number * EVERY_S - time.monotonic()))
        payload = {"number": 1000000 + number, "text": "x" * 40, "inserted_ns": 10**18}
        payload["inserted_ns"] = time.monotonic_ns()
        await insert.fetch(json.dumps(payload))
    await until(lambda: tallies.calls() >= total, f"{name} runs {total} jobs", programs, limit_s=30)
    (noted,) = tallies.notes().values()
    if len(noted) != total:
        raise BenchmarkError(f"{name}: {len(noted)} runs of {total} jobs")
    return Times([ns / 1e6 for ns in noted[_WARM_UP:]])


async def latency_row(bench: Bench) -> list[Line]:
    """An idle daemon against a bare LISTEN-claim-run loop whose table notifies at every insert."""
    jobs = bench.jobs(JOBS, 50)
    bench.say(f"latency: {jobs} jobs, one every {EVERY_S * 1000:g} ms")
    systems = {"pgworkd": ours(queue="latency", slots=10), "bare loop": named(bare_loop("latency"), "bare loop")}
    found = await interleave(
        {name: partial(waits, bench, system, jobs) for name, system in systems.items()}, bench.rounds, bench.say
    )
    bars = {50: Bar("at most", 1.2), 95: None, 99: Bar("at most", 2.0)}
    at = {
        name: {percent: [each.at(percent) for each in samples] for percent in bars} for name, samples in found.items()
    }
    bench.rates.append(
        Rates(
            "latency of an idle worker (less is better)",
            "ms",
            {f"{name} p{percent}": at[name][percent] for name in systems for percent in (50, 99)},
        )
    )
    return [
        Line("latency", f"p{percent}", "ms", at["pgworkd"][percent], at["bare loop"][percent], "bare loop", bar)
        for percent, bar in bars.items()
    ]
