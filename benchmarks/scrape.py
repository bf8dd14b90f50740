"""Metrics: how long a scrape takes, and what it costs a daemon that works at full speed."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

import anyio

from pgworkd.bench.measure import Drain, percentile

from .bench import Bench, daemon
from .drain import drain, rates
from .measure import Bar, Line, interleave
from .processes import until
from .systems import System, filling, ours
from .tally import Tallies

JOBS = 100_000
SCRAPES = 50
EVERY_S = 1.0
"""Fifteen times as often as Prometheus does by default."""


def _wide(queues: int, kinds: int, name: str, *flags: str) -> System:
    """Our worker with so many queues and kinds, on jobs of all of them in turn."""
    at = f"'q' || i % {queues}"
    insert = filling(at, columns=", kind", values=f", {at} || 'k' || (i / {queues}) % {kinds}")
    completed = "SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed' AND finished_at >= $1"
    system = ours(name, insert=insert)
    command = daemon(app=f"q{queues}k{kinds}")
    command = [word.replace("benchmarks.handlers", "benchmarks.wide") for word in command]
    return replace(system, command=[*command, *flags], completed_sql=completed)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _scrape(port: int) -> tuple[float, int]:
    """Milliseconds of one scrape, from the connection to the last byte, and the lines of its page."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        page = connection.getresponse().read()
    finally:
        connection.close()
    return (time.perf_counter() - began) * 1000, page.count(b"\n")


@asynccontextmanager
async def scraped(port: int, took_ms: list[float], every_s: float = EVERY_S) -> AsyncIterator[None]:
    """Scrapes at that interval while the block lasts, and adds the time of each to `took_ms`."""

    async def scrape() -> None:
        while True:
            with suppress(OSError):  # it has not started, or has ended
                took_ms.append((await anyio.to_thread.run_sync(_scrape, port))[0])
            await anyio.sleep(every_s)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(scrape)
        yield
        tasks.cancel_scope.cancel()


async def _watched_drain(bench: Bench, jobs: int, took_ms: list[float]) -> Drain:
    port = free_port()
    system = _wide(200, 50, "scraped", f"--metrics-listen=127.0.0.1:{port}")
    async with scraped(port, took_ms):
        return await drain(bench, system, jobs)


async def _idle_scrapes(bench: Bench) -> float:
    """The median time of a scrape of 20 queues with 10 kinds each, all of which have run jobs, in ms."""
    port = free_port()
    system = _wide(20, 10, "idle", f"--metrics-listen=127.0.0.1:{port}")
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.fleet(system.command, dsn) as (programs, tallies):
        await system.load(bench, dsn, 2_000)
        await until(partial(_ran, tallies, 2_000), "the jobs run", programs, every_s=0.02)
        await anyio.sleep(0.5)
        found = [_scrape(port) for _ in range(SCRAPES)]
        bench.say(f"  a page of {found[-1][1]:,} lines, the slowest in {max(found)[0]:.1f} ms")
        await programs[0].stop()
    return percentile([each for each, _ in found], 50)


def _ran(tallies: Tallies, jobs: int) -> bool:
    return tallies.calls() >= jobs


async def scrape_row(bench: Bench) -> list[Line]:
    """The time of a scrape; the rate of a drain that is scraped every second beside one that has no port."""
    bench.say(f"scrape: 20 queues of 10 kinds, {SCRAPES} scrapes")
    idle = (await interleave({"idle": partial(_idle_scrapes, bench)}, bench.rounds, bench.say))["idle"]
    jobs, took_ms = bench.jobs(JOBS), list[float]()
    bench.say(f"scrape: {jobs:,} jobs of 200 queues with 50 kinds each, scraped every {EVERY_S:g} s")
    found = await interleave(
        {
            "scraped": partial(_watched_drain, bench, jobs, took_ms),
            "no port": partial(drain, bench, _wide(200, 50, "no port"), jobs),
        },
        bench.rounds,
        bench.say,
    )
    note = f"{len(took_ms)} scrapes, {percentile(took_ms, 50):.0f} ms each (median)"
    return [
        Line("scrape", "20 queues of 10 kinds, idle, p50", "ms", idle, bar=Bar("at most", 20)),
        Line(
            "scrape",
            "drain of 200 queues of 50 kinds, scraped every second",
            "jobs/s",
            rates(found["scraped"]),
            reference=rates(found["no port"]),
            against="without a port",
            bar=Bar("at least", 0.97),
            note=note,
        ),
    ]
