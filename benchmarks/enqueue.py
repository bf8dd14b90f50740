"""Enqueueing: what the trigger costs single inserts, and bulk enqueueing against a bare COPY."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg

from pgworkd.client import NewJob, enqueue_many

from .bare import DSN
from .bench import Bench, calm, daemon
from .measure import Bar, Line, interleave
from .processes import BenchmarkError, running, until
from .systems import filling, ours

CLIENTS, SECONDS = 16, 3.0
TRACED_CALLS, TRACED_BAR = 1500, Bar("at most", 1.02)
NAPS_PER_S = 10_000
"""Upper bound of the daemon's rate: a backlog of this many jobs per second keeps it busy throughout."""
MANY = 100_000


async def inserts_row(bench: Bench) -> list[Line]:
    """16 clients inserting single rows: the table as it is against the same with its trigger disabled.

    First while the daemon works on a backlog of the same queue, equally busy either way. Then without a backlog:
    only the inserts keep it busy, and without the trigger it finds those only by polling.
    """
    seconds = bench.seconds(SECONDS, 0.5)
    lines = []
    for busy, what, bar in (
        (True, f"{CLIENTS} clients, daemon busy with a backlog", Bar("at least", 0.85)),
        (False, f"{CLIENTS} clients, daemon busy with what they insert", None),
    ):
        bench.say(f"inserts: {what}")
        contenders = {
            "trigger": partial(_inserts, bench, seconds, busy=busy, trigger=True),
            "no trigger": partial(_inserts, bench, seconds, busy=busy, trigger=False),
        }
        found = await interleave(contenders, bench.rounds, bench.say)
        lines.append(Line("inserts", what, "rows/s", found["trigger"], found["no trigger"], "no trigger", bar))
    return lines


async def _inserts(bench: Bench, seconds: float, *, busy: bool, trigger: bool) -> float:
    """Rows per second that the clients inserted."""
    queue = "nap" if busy else "bench"
    system = ours()
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        if not trigger:
            await connection.execute("ALTER TABLE pgworkd.jobs DISABLE TRIGGER jobs_inserted")
        loaded = int(NAPS_PER_S * (seconds + 3)) if busy else 1
        await connection.execute(filling(f"'{queue}'"), loaded)
        await calm(connection, "pgworkd.jobs")
        async with bench.fleet(daemon("nap=10", "bench=100"), dsn) as (programs, tallies):
            await until(lambda: tallies.calls() >= min(loaded, 500), "the daemon is busy", programs)
            command = [sys.executable, "-m", "benchmarks.clients", queue, str(CLIENTS), str(seconds)]
            async with running(command, {DSN: dsn}, bench.scratch / "logs" / "clients.log") as clients:
                rows, took_s = (await clients.finished()).split()
            if busy and tallies.calls() >= loaded:
                raise BenchmarkError("the backlog was over before the clients were: the daemon was not busy")
            for program in programs:
                await program.stop()
            calls, left = tallies.calls(), await connection.fetchval("SELECT count(*) FROM pgworkd.jobs")
            if calls + left != loaded + int(rows):
                raise BenchmarkError(f"{loaded} + {rows} jobs were inserted; {calls} ran and {left} are left")
    return float(int(rows) / float(took_s))


async def many_row(bench: Bench) -> list[Line]:
    """client.enqueue_many against COPY of the same rows into the same table; nothing else runs.

    COPY gets payloads that are text already, enqueue_many the objects, which it checks and encodes. The second line
    lets COPY's side encode them too, as any application has to.
    """
    jobs = bench.jobs(MANY)
    bench.say(f"many: {jobs:,} jobs in one call")
    ways: dict[str, Callable[[Any, int], Awaitable[float]]] = {
        "enqueue_many": _enqueue_many,
        "COPY": partial(_copy, encode=False),
        "COPY and json.dumps": partial(_copy, encode=True),
    }
    found = await interleave(
        {name: partial(_many, bench, jobs, way) for name, way in ways.items()}, bench.rounds, bench.say
    )
    line = partial(Line, "many", f"enqueue_many of {jobs:,}", "rows/s", found["enqueue_many"])
    return [
        line(found["COPY"], "bare COPY", Bar("at least", 0.5)),
        line(found["COPY and json.dumps"], "COPY + json.dumps"),
    ]


async def _many(bench: Bench, jobs: int, way: Callable[[Any, int], Awaitable[float]]) -> float:
    system = ours()
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await calm(connection, "pgworkd.jobs")
        took_s = await way(connection, jobs)
        if (stored := await connection.fetchval("SELECT count(*) FROM pgworkd.jobs")) != jobs:
            raise BenchmarkError(f"{stored} of {jobs} jobs were stored")
    return jobs / took_s


def _payloads(jobs: int) -> list[dict[str, Any]]:
    return [{"number": 1000000 + number, "text": "x" * 70} for number in range(jobs)]


async def _enqueue_many(connection: asyncpg.Connection[Any], jobs: int) -> float:
    """Seconds for the call."""
    new = [NewJob("bench", payload) for payload in _payloads(jobs)]
    began = time.monotonic()
    await enqueue_many(connection, new)
    return time.monotonic() - began


async def _copy(connection: asyncpg.Connection[Any], jobs: int, *, encode: bool) -> float:
    """Seconds for the COPY, and for encoding the payloads if asked to."""
    payloads = _payloads(jobs)
    began = time.monotonic()
    rows = [("bench", json.dumps(payload)) for payload in payloads]
    began = began if encode else time.monotonic()
    await connection.copy_records_to_table(
        "jobs", schema_name="pgworkd", columns=["queue", "payload"], records=rows, timeout=600
    )
    return time.monotonic() - began


async def traces_row(bench: Bench) -> list[Line]:
    """What a trace costs an enqueue: in a span, without one, without OpenTelemetry, and without asking for it.

    One connection, each call a transaction; no daemon runs. See `traced`.
    """
    calls = bench.jobs(TRACED_CALLS)
    bench.say(f"traces: {calls:,} enqueues of each sort")
    found = await interleave({"traces": partial(_traced, bench, calls)}, bench.rounds, bench.say)
    took = {name: [sample[name] for sample in found["traces"]] for name in found["traces"][0]}
    line = partial(Line, "traces", unit="us")
    return [
        line("enqueue in a span", ours=took["traced"], reference=took["absent"], against="off", bar=TRACED_BAR),
        line("the same, but no span is made", ours=took["no SDK"], reference=took["absent"], against="off"),
        line("no current span", ours=took["no span"], reference=took["absent"], against="off"),
        line("off: OpenTelemetry is not imported", ours=took["absent"], reference=took["unasked"], against="no check"),
    ]


async def _traced(bench: Bench, calls: int) -> dict[str, float]:
    system = ours()
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await calm(connection, "pgworkd.jobs")
        logs = bench.scratch / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.traced", str(calls)]
        async with running(command, {DSN: dsn}, logs / "traced.log") as application:
            took: dict[str, float] = json.loads(await application.finished())
    return took
