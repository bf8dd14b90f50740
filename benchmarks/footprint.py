"""Resources of an idle daemon, and the growth of its memory under load."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import asyncpg

from .bench import Bench, daemon
from .handlers import TEN
from .latency import ready
from .measure import Bar, Line, interleave
from .processes import BenchmarkError, Program, cpu_s, rss_mb, until
from .systems import filling, ours
from .tally import Tallies

IDLE_S, MEMORY_S = 30.0, 10.0
JOBS_PER_S, EVERY_S = 10_000, 0.02
SETTLED_S = 3.0
"""Seconds to skip after the start: a daemon then runs its hourly maintenance."""
REPORTED_S = 11.0
"""An idle session reports its statistics to the server within ten seconds (PGSTAT_IDLE_INTERVAL)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """MB of an idle daemon, and its largest growth under load."""

    idle_mb: float
    growth_mb: float
    jobs_per_s: float

    def __str__(self) -> str:
        return f"{self.idle_mb:.1f} MB idle, +{self.growth_mb:.1f} MB with {self.jobs_per_s:,.0f} jobs/s"


@dataclass(frozen=True, slots=True)
class Idle:
    """Transactions per second, and the daemon's share of a core in %."""

    queries_per_s: float
    cpu_percent: float

    def __str__(self) -> str:
        return f"{self.queries_per_s:.2f} transactions/s, {self.cpu_percent:.3f} % of a core"


@asynccontextmanager
async def _settled(bench: Bench, after_s: float = SETTLED_S) -> AsyncIterator[tuple[str, Program, Tallies]]:
    """A daemon with ten queues that has started and become idle, and the DSN of its database."""
    system = ours()
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.fleet(daemon(app="ten"), dsn) as (programs, tallies),
    ):
        async with bench.server.connected(dsn) as connection:
            await until(partial(ready, connection, len(TEN)), "the daemon listens", programs, every_s=0.05)
        await anyio.sleep(after_s)
        yield dsn, programs[0], tallies


async def memory_row(bench: Bench) -> list[Line]:
    """Resident memory of an idle daemon with ten queues; its growth while 10,000 no-op jobs a second pass."""
    seconds = bench.seconds(MEMORY_S, 1.0)
    bench.say(f"memory: ten queues, idle and with {JOBS_PER_S:,} jobs/s for {seconds:g} s")
    found = (await interleave({"pgworkd": partial(_memory, bench, seconds)}, bench.rounds, bench.say))["pgworkd"]
    passed = min(each.jobs_per_s for each in found)
    note = f"{passed:,.0f} jobs/s passed" if passed < 0.9 * JOBS_PER_S else ""
    return [
        Line("memory", "idle daemon, ten queues", "MB", [x.idle_mb for x in found], bar=Bar("at most", 60)),
        Line(
            "memory",
            f"growth with {JOBS_PER_S:,} jobs/s",
            "MB",
            [x.growth_mb for x in found],
            bar=Bar("at most", 40),
            note=note,
        ),
    ]


async def _memory(bench: Bench, seconds: float) -> Memory:
    async with _settled(bench) as (dsn, program, tallies), bench.server.connected(dsn) as connection:
        idle = most = rss_mb(program.pid)
        at_once = int(JOBS_PER_S * EVERY_S)
        insert = await connection.prepare(filling(f"'ten' || i % {len(TEN)}"))
        began, inserted = time.monotonic(), 0
        while (now_s := time.monotonic() - began) < seconds:
            await insert.fetch(at_once)
            inserted += at_once
            most = max(most, rss_mb(program.pid))
            await anyio.sleep(max(0.0, inserted / JOBS_PER_S - now_s))
        await until(lambda: tallies.calls() >= inserted, f"{inserted} jobs run", [program], every_s=0.02)
        took_s = time.monotonic() - began
        most = max(most, rss_mb(program.pid))
        if await program.stop() != 0 or tallies.calls() != inserted:
            raise BenchmarkError(f"{inserted} jobs, {tallies.calls()} handler calls:\n{program.tail()}")
    return Memory(idle, most - idle, inserted / took_s)


async def idle_row(bench: Bench) -> list[Line]:
    """Database and CPU load of an idle daemon with ten queues."""
    seconds = bench.seconds(IDLE_S, 5.0)
    bench.say(f"idle: ten queues and nothing to do, for {seconds:g} s")
    found = (await interleave({"pgworkd": partial(_idle, bench, seconds)}, bench.rounds, bench.say))["pgworkd"]
    return [
        Line("idle", "transactions a second, in total", "/s", [x.queries_per_s for x in found], bar=Bar("at most", 1)),
        Line("idle", "CPU of the daemon, % of a core", "%", [x.cpu_percent for x in found], bar=Bar("at most", 0.3)),
    ]


async def _idle(bench: Bench, seconds: float) -> Idle:
    # Counted by the server: every statement of an idle daemon is a transaction. Autovacuum's count as well.
    sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1"
    async with (
        bench.server.without_autovacuum(),
        _settled(bench, REPORTED_S) as (dsn, program, _),
        bench.server.connected(bench.server.dsn) as elsewhere,  # its own transactions count for another database
    ):
        database = dsn.rpartition("/")[2]
        before, cpu_before, began = await elsewhere.fetchval(sql, database), cpu_s(program.pid), time.monotonic()
        await anyio.sleep(seconds)
        program.check()
        took_s, cpu_after = time.monotonic() - began, cpu_s(program.pid)
        # A session that ends reports at once. At the beginning a few statements may not have been reported yet and
        # count as too many, against us.
        program.kill()
        await until(partial(_alone, elsewhere, database), "the daemon's sessions end", every_s=0.05, limit_s=30)
        after = await elsewhere.fetchval(sql, database)
    return Idle((after - before) / took_s, (cpu_after - cpu_before) / took_s * 100)


async def _alone(connection: asyncpg.Connection[Any], database: str) -> bool:
    sql = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = $1)"
    return bool(await connection.fetchval(sql, database))
