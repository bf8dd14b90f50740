"""Draining a full table: jobs per second, and the CPU cost per job of worker and server.

The clock runs from the first handler call until no job waits or runs. So the start of the worker is not
counted, nor is its first claim, for any contender.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from typing import Any

import asyncpg

from pgworkd.bench.measure import Drain

from .bench import Bench, calm, stop_all
from .measure import Bar, Line, Rates, interleave
from .processes import BenchmarkError, cpu_s, running, until
from .systems import System, bare_loop, ours, verify, without_history

JOBS = 50_000
NAPS_PER_S = 10_000.0
"""The rate of ten slots that await 1 ms each, without any overhead."""


async def drain(bench: Bench, system: System, jobs: int, *, workers: int = 1) -> Drain:
    """One drain of `jobs` jobs in a fresh database by `workers` workers."""
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await system.load(bench, dsn, jobs)
        await calm(connection, system.table)
        return await race(bench, system, dsn, connection, loaded=jobs, workers=workers)


async def race(
    bench: Bench,
    system: System,
    dsn: str,
    connection: asyncpg.Connection[Any],
    *,
    loaded: int,
    begin: int = 0,
    end: int | None = None,
    workers: int = 1,
) -> Drain:
    """Drains a table that holds `loaded` jobs.

    With `end`, the rate is that between the handler calls number `begin` (0: the first) and `end`, and the worker is
    stopped then: by calls, because the end of a drain cannot be observed while jobs remain.
    """
    since: datetime = await connection.fetchval("SELECT clock_timestamp()")
    last = loaded if end is None else end
    environ = {**system.environ, "PGWORKD_BENCH_JOBS": str(last)}
    async with bench.fleet(system.command, dsn, count=workers, environ=environ) as (programs, tallies):
        await until(lambda: tallies.first_ns() is not None, f"{system.name} calls its first handler", programs)
        began_ns, from_calls = tallies.first_ns() or 0, 0
        if begin:
            began_ns = await until(lambda: tallies.calls() >= begin, f"{system.name} runs {begin} jobs", programs)
            from_calls = tallies.calls()
        before = sum(cpu_s(each.pid) for each in programs), bench.server.cpu_s()
        ended_ns = await until(lambda: tallies.calls() >= last, f"{system.name} runs {last} jobs", programs)
        calls = tallies.calls()
        if end is None:
            ended_ns = await until(partial(_empty, system, connection), f"{system.name} completes its jobs", programs)
        after = sum(cpu_s(each.pid) for each in programs), bench.server.cpu_s()
        if system.ours:
            await stop_all(programs)
        else:
            await programs[0].stop()
        await verify(system, connection, tallies.calls(), loaded, since)
    server_s = None if after[1] is None or before[1] is None else after[1] - before[1]
    return Drain(calls - from_calls, (ended_ns - began_ns) / 1e9, after[0] - before[0], server_s)


async def _empty(system: System, connection: asyncpg.Connection[Any]) -> bool:
    return not await connection.fetchval(system.left_sql)


async def naps(bench: Bench, jobs: int) -> Drain:
    """The rate of tasks that only await 1 ms: no jobs, no database."""
    command = [sys.executable, "-m", "benchmarks.bare", "naps", str(jobs), "10"]
    async with running(command, {}, bench.scratch / "logs" / "naps.log") as program:
        return Drain(jobs, jobs / float(await program.finished()))


def rates(samples: Sequence[Drain]) -> list[float]:
    """Jobs per second of each sample."""
    return [sample.rate for sample in samples]


async def _races(bench: Bench) -> dict[str, list[Drain]]:
    """The drains of no-op jobs, of all systems side by side; measured once, reported by two rows."""
    if "drain" not in bench.kept:
        jobs = bench.jobs(JOBS)
        systems = [ours(), without_history(), bare_loop(), *bench.peers]
        bench.say(f"drain: {jobs:,} no-op jobs")
        contenders = {each.name: partial(drain, bench, each, max(100, int(jobs * each.share))) for each in systems}
        bench.kept["drain"] = await interleave(contenders, bench.rounds, bench.say)
    found: dict[str, list[Drain]] = bench.kept["drain"]
    return found


async def drain_row(bench: Bench) -> list[Line]:
    """No-op jobs with history and without against the bare loop, with history against peers; and jobs of 1 ms."""
    found = await _races(bench)
    with_history, bare = rates(found["pgworkd"]), rates(found["bare loop"])
    line = partial(Line, "drain", unit="jobs/s")
    lines = [
        line(what="history kept", ours=with_history, reference=bare, against="bare loop", bar=Bar("at least", 0.60)),
        line(
            what="history off (keep_s = 0)",
            ours=rates(found["pgworkd keep_s=0"]),
            reference=bare,
            against="bare loop",
            bar=Bar("at least", 0.70),
        ),
    ]
    bars = {"graphile-tuned": 1.15, "pgqueuer": 2.5}
    for peer in bench.peers:
        bar = Bar("at least", bars[peer.name]) if peer.name in bars else None
        lines.append(
            line(what="history kept", ours=with_history, reference=rates(found[peer.name]), against=peer.name, bar=bar)
        )
    shown = {("pgworkd (history)" if name == "pgworkd" else name): rates(each) for name, each in found.items()}
    bench.rates.append(Rates(f"{bench.jobs(JOBS):,} no-op jobs, one worker process", "jobs/s", dict(shown)))
    return lines + await _nap_lines(bench)


async def _nap_lines(bench: Bench) -> list[Line]:
    jobs = bench.jobs(30_000, 500)
    bench.say(f"drain: {jobs:,} jobs that await 1 ms, 10 at once")
    ten = ours(queue="nap", slots=10)
    found = await interleave(
        {"pgworkd": partial(drain, bench, ten, jobs), "timer alone": partial(naps, bench, jobs)},
        bench.rounds,
        bench.say,
    )
    line = partial(Line, "drain", unit="jobs/s", ours=rates(found["pgworkd"]))
    return [
        line(
            what="10 at once, 1 ms of awaiting each",
            reference=[NAPS_PER_S],
            against="ideal",
            bar=Bar("at least", 0.90),
        ),
        line(
            what="the same, beside the event loop's timer alone",
            reference=rates(found["timer alone"]),
            against="10 tasks asleep",
        ),
    ]


async def cost_row(bench: Bench) -> list[Line]:
    """CPU per job, worker and server each, from the drains of no-op jobs."""
    found = await _races(bench)
    lines = []
    for name in ("pgworkd", "pgworkd keep_s=0"):
        for who in ("worker", "server"):
            mine = [each.worker_us if who == "worker" else each.server_us for each in found[name]]
            for other in [bare_loop().name, *(peer.name for peer in bench.peers if name == "pgworkd")]:
                theirs = [each.worker_us if who == "worker" else each.server_us for each in found[other]]
                if None not in mine and None not in theirs:
                    what = f"{who}, history {'off' if name != 'pgworkd' else 'kept'}"
                    known = partial(Line, "cost", what, "us/job", against=other)
                    lines.append(
                        known(ours=[x for x in mine if x is not None], reference=[x for x in theirs if x is not None])
                    )
    if not lines:
        raise BenchmarkError("no drain told what it cost")
    return lines
