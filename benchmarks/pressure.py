"""Throughput under adverse conditions: dead rows that vacuum may not remove, a large backlog, a long history."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from pgworkd.bench.measure import Drain
from pgworkd.database import schema

from .bench import Bench, calm
from .drain import JOBS, race, rates
from .measure import Bar, Line, interleave
from .systems import PAYLOAD_SQL, System, executed, ours

HELD_JOBS, HELD_LAST = 500_000, 50_000
BACKLOG = 1_000_000
FINISHED = 10_000_000
FINISHED_DISK_BYTES = 15 * 10**9
"""Disk space of the full history, its index and its WAL."""

# Due rows an hour back, the others a day ahead, of one queue, as if they had come one by one. Without the trigger,
# which would have nobody to notify, two million rows take half a minute.
_BACKLOG_SQL = f"""
    SET session_replication_role = replica;
    INSERT INTO pgworkd.jobs (queue, payload, run_at)
    SELECT 'bench', {PAYLOAD_SQL}, clock_timestamp() - interval '1 hour' + i * interval '1 ms'
    FROM generate_series(1, %d) AS i;
    INSERT INTO pgworkd.jobs (queue, payload, run_at)
    SELECT 'bench', {PAYLOAD_SQL}, clock_timestamp() + interval '1 day' + i * interval '1 ms'
    FROM generate_series(1, %d) AS i;
    RESET session_replication_role"""  # noqa: S608 - numbers only

# Evenly over the partitions of the last six days, in order of time, as it would have grown. `pgworkd.clock` sets
# the schema's clock back, so that it creates partitions of the past.
HISTORY_SQL = f"""
    SELECT set_config('pgworkd.clock', (now() - interval '6 days')::text, false);
    SELECT pgworkd.ensure_partitions(13);
    RESET pgworkd.clock;
    INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, started_at, status, priority, attempts,
        failures, max_attempts, worker_id, queue, payload, result, errors)
    SELECT pgworkd.new_id(), h.at, h.at - interval '3 s', h.at - interval '3 s', h.at - interval '1 s', 'completed', 0,
        1, 0, 3, 1, 'bench', h.payload, 'null', '[]'
    FROM (SELECT now() - interval '6 days' * (1 - i / %d.0) AS at, {PAYLOAD_SQL} AS payload
          FROM generate_series(1, %d) AS i) h"""  # noqa: S608 - numbers only


async def held_row(bench: Bench) -> list[Line]:
    """The last tenth of a long drain while a snapshot from before the first insert is held, against none."""
    jobs, last = bench.jobs(HELD_JOBS, 1000), bench.jobs(HELD_LAST)
    bench.say(f"held: the last {last:,} of {jobs:,} jobs, with and without an old snapshot")
    found = await interleave(
        {"held": partial(_held, bench, jobs, last, True), "free": partial(_held, bench, jobs, last, False)},
        bench.rounds,
        bench.say,
    )
    what = f"last {last:,} of {jobs:,}, snapshot open from the start"
    bar = Bar("at least", 0.85)
    return [Line("held", what, "jobs/s", rates(found["held"]), rates(found["free"]), "no snapshot", bar)]


async def _held(bench: Bench, jobs: int, last: int, held: bool) -> Drain:  # noqa: FBT001 - bound by name above
    system = ours()
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        bench.server.connected(dsn) as old,
    ):
        if held:
            await old.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await old.fetchval("SELECT count(*) FROM pgworkd.jobs")  # the snapshot is taken now, by this
        await system.load(bench, dsn, jobs)
        await calm(connection, system.table)
        return await race(bench, system, dsn, connection, loaded=jobs, begin=jobs - last, end=jobs)


async def backlog_row(bench: Bench) -> list[Line]:
    """The first 50,000 jobs of a table with a million due and a million future ones, against a table of 50,000."""
    first, many = bench.jobs(JOBS), bench.jobs(BACKLOG, 2000)
    bench.say(f"backlog: the first {first:,} of {many:,} due jobs, beside {many:,} future ones")
    contenders = {
        "full": partial(_first_of, bench, "backlog_full", first, many, many),
        "small": partial(_first_of, bench, "backlog_small", first, first, 0),
    }
    try:
        found = await interleave(contenders, bench.rounds, bench.say)
    finally:
        await bench.server.forget("backlog_full")
    what = f"first {first:,} with {many:,} due + {many:,} future"
    bar = Bar("at least", 0.85)
    return [Line("backlog", what, "jobs/s", rates(found["full"]), rates(found["small"]), f"{first:,} jobs", bar)]


async def _first_of(bench: Bench, template: str, first: int, due: int, future: int) -> Drain:
    fill = partial(executed_all, schema.text(), _BACKLOG_SQL % (due, future), "VACUUM ANALYZE pgworkd.jobs")
    await bench.server.template(template, fill)
    async with bench.server.database(template) as dsn, bench.server.connected(dsn) as connection:
        await calm(connection, "pgworkd.jobs")
        return await race(bench, ours(), dsn, connection, loaded=due + future, end=first)


def executed_all(*scripts_and_dsn: str) -> Awaitable[None]:
    """`executed` with the DSN last, so that the scripts can be bound."""
    *scripts, dsn = scripts_and_dsn
    return executed(dsn, *scripts)


async def finished_row(bench: Bench) -> list[Line]:
    """50,000 jobs with ten million rows of history, against the same without: one database each for all rounds."""
    free = shutil.disk_usage(bench.scratch).free
    rows = bench.jobs(int(FINISHED * min(1.0, free / FINISHED_DISK_BYTES)), 1000)
    jobs = bench.jobs(JOBS)
    note = f"only {free / 1e9:.0f} GB free: the history is scaled down" if free < FINISHED_DISK_BYTES else ""
    bench.say(f"finished: {jobs:,} jobs with {rows:,} rows of history and without {note}")
    async with AsyncExitStack() as stack:
        contenders: dict[str, Callable[[], Awaitable[Drain]]] = {}
        for name, scripts in {"history": [HISTORY_SQL % (rows, rows)], "none": []}.items():
            dsn, connection = await stack.enter_async_context(_kept_database(bench, ours(), scripts))
            contenders[name] = partial(_again, bench, ours(), dsn, connection, jobs)
        found = await interleave(contenders, bench.rounds, bench.say)
    what, bar = f"{rows:,} rows of history", Bar("at least", 0.90)
    return [Line("finished", what, "jobs/s", rates(found["history"]), rates(found["none"]), "no history", bar, note)]


@asynccontextmanager
async def _kept_database(bench: Bench, system: System, scripts: list[str]) -> AsyncIterator[tuple[str, Any]]:
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await executed(dsn, *scripts, "VACUUM ANALYZE")
        yield dsn, connection


async def _again(bench: Bench, system: System, dsn: str, connection: Any, jobs: int) -> Drain:
    await connection.execute("VACUUM pgworkd.jobs")  # of the rows of the round before
    await system.load(bench, dsn, jobs)
    await calm(connection, system.table)
    return await race(bench, system, dsn, connection, loaded=jobs)
