"""python -m benchmarks.signals: what statistics cost a drain, and what samples of a long queue cost, as ratios.

Each pair drains the same jobs with `statistics` on and off, alternately; CPU is that of worker and server per job. With
`statistics` on the daemon is scraped, too. The first row is a short drain, over before the first sample; the second
lasts long enough for samples, for several appends of queue_minutes, and for many scrapes. The third drains one queue
beside another that holds `--waiting` jobs which are not due: its rate with and without samples, which read all of
them, and how often samples are taken.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from dataclasses import replace

import asyncpg
import uvloop

from .bench import Bench
from .drain import Drain, drain
from .scrape import free_port, scraped
from .server import Server, default_scratch, embedded
from .systems import System, executed, ours

JOBS, JOBS_LONG, JOBS_BESIDE = 50_000, 2_000_000, 300_000
"""The second and third drain are to last as long as several samples are apart."""
SCRAPE_EVERY_S = 5.0
"""Three times as often as Prometheus does by default."""
_LEFT = "FROM pgworkd.jobs WHERE queue = 'bench' AND status IN ('pending', 'running', 'failed', 'blocked')"
_FILL = """
    INSERT INTO pgworkd.jobs (queue, run_at) SELECT 'later', now() + interval '1 day' FROM generate_series(1, {});
    ANALYZE pgworkd.jobs"""
_SAMPLES = "SELECT took_s, at FROM pgworkd.samples ORDER BY at"


def _system(switch: str, waiting: int) -> System:
    """The worker with statistics on or off, on a database with that many jobs that wait in another queue."""
    plain = ours()

    async def make(dsn: str) -> None:
        await plain.make(dsn)
        if waiting:
            await executed(dsn, _FILL.format(waiting))

    environ = {**plain.environ, "PGWORKD_STATISTICS": switch}
    return replace(
        plain,
        template=f"{plain.template}_{waiting}",
        make=make,
        environ=environ,
        left_sql=f"SELECT EXISTS (SELECT {_LEFT})",
        remaining_sql=f"SELECT count(*) {_LEFT}",
    )


async def _took_s(bench: Bench, waiting: int) -> float:
    """Seconds that one sample of that many jobs takes, nothing else running."""
    system = _system("on", waiting)
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn:
        connection = await asyncpg.connect(dsn)
        try:
            await connection.fetchval("SELECT pgworkd.sample_queues()")
            return float((await connection.fetchrow(_SAMPLES))["took_s"])
        finally:
            await connection.close()


async def _drained(bench: Bench, switch: str, waiting: int, jobs: int) -> Drain:
    """One drain; with statistics on, it is scraped."""
    system = _system(switch, waiting)
    if switch == "off":
        return await drain(bench, system, jobs)
    port = free_port()
    listening = replace(system, command=[*system.command, f"--metrics-listen=127.0.0.1:{port}"])
    async with scraped(port, [], SCRAPE_EVERY_S):
        return await drain(bench, listening, jobs)


async def compare(dsn: str, pairs: int, waiting: int, bench_scratch: argparse.Namespace) -> None:
    """Prints two lines per row."""
    server = Server(dsn)
    await server.start()
    bench = Bench(server, bench_scratch.scratch, bench_scratch.scale, pairs)
    try:
        rows = [
            ("drain", 0, JOBS),
            ("long drain", 0, JOBS_LONG),
            (f"drain beside {waiting:,}", waiting, JOBS_BESIDE),
        ]
        if bench_scratch.only:
            rows = [row for row in rows if row[0].startswith(bench_scratch.only)]
        for row, jobs_waiting, jobs in rows:
            cost: dict[str, list[float]] = {"on": [], "off": []}
            rate: dict[str, list[float]] = {"on": [], "off": []}
            for number in range(pairs):
                for switch in ("on", "off") if number % 2 else ("off", "on"):
                    found = await _drained(bench, switch, jobs_waiting, bench.jobs(jobs))
                    cost[switch].append(found.worker_us + (found.server_us or 0.0))
                    rate[switch].append(found.rate)
            for what, by, unit in (("CPU", cost, "us per job"), ("rate", rate, "jobs/s")):
                ratios = sorted(a / b for a, b in zip(by["on"], by["off"], strict=True))
                print(
                    f"{row:24} {what:5} {statistics.median(ratios):6.3f} ({ratios[0]:.2f}..{ratios[-1]:.2f}) "
                    f"{statistics.median(by['on']):10.1f} {statistics.median(by['off']):10.1f}  {unit}",
                    flush=True,
                )
        took_s = await _took_s(bench, waiting)
        print(f"a sample of {waiting:,} jobs takes {took_s:.2f} s: one every {max(5, 20 * took_s):.0f} s")
    finally:
        await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--waiting", type=int, default=1_000_000)
    parser.add_argument("--only", default="", help="the rows that begin with this: drain, long, drain beside")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--scratch", default=default_scratch())
    asked = parser.parse_args()
    with embedded(asked.scratch, None) as dsn, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare(dsn, asked.pairs, asked.waiting, asked))


if __name__ == "__main__":
    main()
