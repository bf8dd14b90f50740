"""Several daemons and slow jobs: is any slot idle while a job is due, does any daemon claim more than it can run?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import asyncpg

from .bench import Bench, daemon, stop_all
from .latency import ready
from .measure import Bar, Line, interleave, longest_idle_s
from .processes import BenchmarkError, until
from .systems import ours
from .tally import Tallies

DAEMONS, SLOTS, JOBS = 4, 10, 400
EVERY_S = 0.1
"""Interval between samples of the jobs per daemon."""


@dataclass(frozen=True, slots=True)
class Slow:
    """One round: idle ms of the worst slot, and the most jobs that any daemon had in flight."""

    idle_ms: float
    held: int
    took_s: float

    def __str__(self) -> str:
        return f"{self.idle_ms:.1f} ms idle at worst, {self.held} jobs held at most, {self.took_s:.2f} s in all"


async def slow_row(bench: Bench) -> list[Line]:
    """400 jobs of 1 s at once for 4 daemons of 10 slots each: ideally ten waves of exactly 1 s."""
    jobs = bench.jobs(JOBS)
    bench.say(f"slow: {jobs} jobs of 1 s, {DAEMONS} daemons of {SLOTS} slots")
    found = (await interleave({"pgworkd": partial(_slow, bench, jobs)}, bench.rounds, bench.say))["pgworkd"]
    waves = -(-jobs // (DAEMONS * SLOTS))
    line = partial(Line, "slow")
    return [
        line(
            "longest time a slot is idle while a job is due", "ms", [x.idle_ms for x in found], bar=Bar("at most", 50)
        ),
        line(
            f"most jobs that a daemon of {SLOTS} slots holds",
            "jobs",
            [x.held for x in found],
            bar=Bar("at most", SLOTS),
            note="claimed and not ended; what has ended and is about to be settled takes no slot",
        ),
        line(f"{jobs} jobs of 1 s on {DAEMONS * SLOTS} slots", "s", [x.took_s for x in found], [float(waves)], "ideal"),
    ]


async def _slow(bench: Bench, jobs: int) -> Slow:
    system, most = ours(queue="slow"), 0
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        bench.fleet(daemon(f"slow={SLOTS}"), dsn, count=DAEMONS) as (programs, tallies),
    ):
        await until(partial(ready, connection, DAEMONS, DAEMONS), "the daemons listen", programs, every_s=0.05)
        await anyio.sleep(1.0)  # until the daemons' startup work is done
        await system.load(bench, dsn, jobs)
        due_at = anyio.current_time()
        limit = due_at + 30 + 4 * jobs / (DAEMONS * SLOTS)
        while sum(len(noted) for noted in tallies.notes().values()) < 2 * jobs:
            most = max(most, await _most_held(connection, tallies))
            if anyio.current_time() > limit:
                raise BenchmarkError(f"{tallies.calls()} of {jobs} slow jobs have begun, and it takes too long")
            await anyio.sleep(EVERY_S)
        await stop_all(programs)
        left = await connection.fetchval("SELECT count(*) FROM pgworkd.jobs")
        if tallies.calls() != jobs or left:
            raise BenchmarkError(f"{jobs} slow jobs: {tallies.calls()} handler calls, {left} left")
        runs = [
            [(began / 1e9, ended / 1e9) for began, ended in zip(noted[::2], noted[1::2], strict=True)]
            for noted in tallies.notes().values()
        ]
    last_end = max(end for each in runs for _, end in each)
    return Slow(longest_idle_s(runs, SLOTS, due_at) * 1000, most, last_end - due_at)


async def _most_held(connection: asyncpg.Connection[Any], tallies: Tallies) -> int:
    """The most jobs that any daemon has claimed and not finished; 0 if handlers ended during the sample.

    `running` in the table overstates it: a job whose handler has ended stays so until it is settled, a moment after
    its slot went to the next job. Those are the jobs that the daemon has finished but the history lacks.
    """
    sql = """SELECT w.pid, (SELECT count(*) FROM pgworkd.jobs j WHERE j.worker_id = w.id),
                    (SELECT count(*) FROM pgworkd.finished_jobs f WHERE f.worker_id = w.id) FROM pgworkd.workers w"""
    before = tallies.notes()
    rows = await connection.fetch(sql)
    if tallies.notes() != before:
        return 0
    return max((claimed - max(0, len(before.get(pid, ())) // 2 - done) for pid, claimed, done in rows), default=0)
