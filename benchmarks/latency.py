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
from .systems import System, bare_loop, ours
from .tally import Tallies

JOBS, EVERY_S = 500, 0.02
_WARM_UP = 10
"""Jobs before those that count: the first ones find cold caches on both sides."""


async def ready(connection: asyncpg.Connection[Any], pools: int, workers: int = 1) -> bool:
    """True once our daemons are listening: their pools are registered as idle."""
    # Before version 3 of the schema, with which this may be compared, the column was `asleep`.
    idle = "coalesce(to_jsonb(p) ->> 'idle', to_jsonb(p) ->> 'asleep')::boolean"
    sql = f"SELECT count(*) FILTER (WHERE {idle}) >= $1 AND count(DISTINCT worker_id) >= $2 FROM pgworkd.pools p"  # noqa: S608
    return bool(await connection.fetchval(sql, pools, workers))


async def waits(bench: Bench, system: System, jobs: int) -> Times:
    """Inserts one job every 20 ms into an idle worker's queue; returns how long each waited."""
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        bench.fleet(system.command, dsn, environ=system.environ) as (programs, tallies),
    ):
        await calm(connection, system.table)
        return await timed(connection, programs, tallies, system, jobs)


async def timed(
    connection: asyncpg.Connection[Any], programs: Sequence[Program], tallies: Tallies, system: System, jobs: int
) -> Times:
    """Inserts one job every 20 ms, and returns how long each waited for its handler; begins once one has run."""
    insert = await connection.prepare(system.insert_sql)

    async def add(number: int) -> None:
        payload = {"number": 1000000 + number, "text": "x" * 40, "inserted_ns": 10**18}
        payload["inserted_ns"] = time.monotonic_ns()
        await insert.fetch(json.dumps(payload))

    await add(0)
    await until(lambda: tallies.calls() == 1, f"{system.name} runs a job", programs, every_s=0.05)
    began, total = time.monotonic(), jobs + _WARM_UP
    for number in range(1, total):
        await anyio.sleep(max(0.0, began + number * EVERY_S - time.monotonic()))
        await add(number)
    await until(lambda: tallies.calls() >= total, f"{system.name} runs {total} jobs", programs, limit_s=30)
    (noted,) = tallies.notes().values()
    if len(noted) != total:
        raise BenchmarkError(f"{system.name}: {len(noted)} runs of {total} jobs")
    return Times([ns / 1e6 for ns in noted[_WARM_UP:]])


async def latency_row(bench: Bench) -> list[Line]:
    """An idle daemon against a bare LISTEN-claim-run loop whose table notifies at every insert, and against peers."""
    jobs = bench.jobs(JOBS, 50)
    bench.say(f"latency: {jobs} jobs, one every {EVERY_S * 1000:g} ms")
    systems = {each.name: each for each in (ours(queue="latency", slots=10), bare_loop("latency"))}
    systems |= {peer.name: peer for peer in bench.peers if peer.insert_sql}
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
            {f"{name} p{percent}": at[name][percent] for name in list(systems)[:2] for percent in (50, 99)},
        )
    )
    lines = [
        Line("latency", f"p{percent}", "ms", at["pgworkd"][percent], at["bare loop"][percent], "bare loop", bar)
        for percent, bar in bars.items()
    ]
    return lines + [Line("latency", "p50", "ms", at["pgworkd"][50], at[name][50], name) for name in list(systems)[2:]]
