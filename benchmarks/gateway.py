"""The gateway: claims and settles over HTTP, a remote daemon's latency, and what waiting workers cost the database."""

from __future__ import annotations

import contextlib
import http.client
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from pgworkd.admin import Admin
from pgworkd.bench.measure import Times
from pgworkd.database.connection import ConnectionOptions

from .bench import PGWORKD, Bench, calm, daemon
from .drain import drain, rates
from .footprint import REPORTED_S
from .latency import timed
from .measure import Bar, Line, Rates, interleave
from .processes import BenchmarkError, Program, running, until
from .scrape import free_port
from .systems import ours

CLIENTS, SECONDS = 16, 8.0
JOBS_PER_S = 6_000
"""More than can be done: jobs to fill the table with, per second of a measurement."""
DRAINED = 30_000
WORKERS, IDLE_S = 2_000, 30.0
LATENCIES = 300


@dataclass(frozen=True, slots=True)
class Calls:
    """One measurement of callers."""

    requests_per_s: float
    jobs_per_s: float

    def __str__(self) -> str:
        return f"{self.requests_per_s:,.0f} requests/s, {self.jobs_per_s:,.0f} jobs/s"


@contextlib.asynccontextmanager
async def serving(bench: Bench, dsn: str) -> AsyncIterator[tuple[str, str, Program]]:
    """`pgworkd serve` on that database; its address, a token, and the program."""
    async with Admin(ConnectionOptions(dsn)) as admin:
        token = str(await admin.tokens.add("bench", {"work": None, "enqueue": None}))
    port = free_port()
    command = [PGWORKD, "serve", "--listen", f"127.0.0.1:{port}"]
    environ = {"PGWORKD_DSN": dsn, "PGWORKD_LOG_LEVEL": "warning", "PGWORKD_HTTP_WAITERS_MAX": "10000"}
    environ |= {"PGWORKD_HTTP_REQUESTS_PER_S": "1000000"}
    async with running(command, environ, log(bench, "gateway")) as program:
        url = f"http://127.0.0.1:{port}"
        await until(partial(answers, url, "/healthz"), "the gateway answers", [program], every_s=0.1)
        yield url, token, program


def log(bench: Bench, name: str) -> Path:
    """Where a program writes."""
    folder = bench.scratch / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"


async def answers(url: str, path: str) -> bool:
    """Whether that page is there."""

    def ask() -> bool:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=2)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    return await run_sync(ask)


async def called(bench: Bench, what: str, url: str, clients: int, seconds: float, token: str = "") -> Calls:
    """What callers get done; see `caller`."""
    command = [sys.executable, "-m", "benchmarks.caller", what, url, str(clients), str(seconds)]
    async with running(command + [token] * bool(token), {}, log(bench, "caller")) as program:
        requests, jobs, took_s = map(float, (await program.finished()).split())
    return Calls(requests / took_s, jobs / took_s)


async def _empty(bench: Bench, seconds: float) -> Calls:
    """An empty route of the same process model."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.empty_route", str(port)]
    async with running(command, {}, log(bench, "empty")) as program:
        url = f"http://127.0.0.1:{port}"
        await until(partial(answers, url, "/"), "the empty route answers", [program], every_s=0.1)
        return await called(bench, "empty", url, CLIENTS, seconds)


async def jobs_through_gateway(bench: Bench, what: str, clients: int, seconds: float) -> Calls:
    """Claims and settles of jobs that are due."""
    system = ours()
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await system.load(bench, dsn, int(JOBS_PER_S * seconds * (5 if what == "batched" else 1)))
        await calm(connection, system.table)
        async with serving(bench, dsn) as (url, token, program):
            found = await called(bench, what, url, clients, seconds, token)
            program.check()
        if not await connection.fetchval(system.left_sql):
            raise BenchmarkError(f"{what}: no job was left: give it more")
    return found


async def _waits(bench: Bench, jobs: int, *, remote: bool) -> Times:
    """How long each of some jobs waits for the handler of a daemon, one with the database or one with a gateway."""
    system = ours(queue="latency", slots=10)
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await calm(connection, system.table)
        if not remote:
            async with bench.fleet(system.command, dsn) as (programs, tallies):
                return await timed(connection, programs, tallies, system, jobs)
        async with serving(bench, dsn) as (url, token, _):
            command = [*daemon("latency=10"), "--remote", url]
            async with bench.fleet(command, "", environ={"PGWORKD_TOKEN": token}) as (programs, tallies):
                return await timed(connection, programs, tallies, system, jobs)


async def _idle(bench: Bench, seconds: float, workers: int) -> float:
    """Transactions per second of a gateway with so many workers that wait and beat."""
    system = ours()
    sql = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1"
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.without_autovacuum(),
        bench.server.database(system.template) as dsn,
        bench.server.connected(bench.server.dsn) as elsewhere,
        serving(bench, dsn) as (url, token, _),
    ):
        waits_s = REPORTED_S * 2 + seconds
        command = [sys.executable, "-m", "benchmarks.caller", "idle", url, str(workers), str(waits_s), token]
        async with running(command, {}, log(bench, "idle")) as program:
            await until(lambda: "ready" in program.log.read_text(), "all workers wait", [program], every_s=0.1)
            await anyio.sleep(REPORTED_S)
            database = dsn.rpartition("/")[2]
            before, began = await elsewhere.fetchval(sql, database), anyio.current_time()
            await anyio.sleep(seconds)
            after = await elsewhere.fetchval(sql, database)
            program.check()
            return float(after - before) / (anyio.current_time() - began)


async def http_row(bench: Bench) -> list[Line]:
    """Claims and settles one by one against an empty route, in batches against a daemon; a remote daemon's latency."""
    seconds, jobs = bench.seconds(SECONDS, 2.0), bench.jobs(LATENCIES, 50)
    bench.say(f"http: {CLIENTS} clients for {seconds:g} s")
    found = await interleave(
        {
            "one by one": partial(jobs_through_gateway, bench, "single", CLIENTS, seconds),
            "enqueued": partial(jobs_through_gateway, bench, "enqueueing", CLIENTS, seconds),
            "empty route": partial(_empty, bench, seconds),
            "batched": partial(jobs_through_gateway, bench, "batched", CLIENTS, seconds),
        },
        bench.rounds,
        bench.say,
    )
    daemons = await interleave({"daemon": partial(drain, bench, ours(), bench.jobs(DRAINED))}, bench.rounds, bench.say)
    waits = await interleave(
        {"remote": partial(_waits, bench, jobs, remote=True), "native": partial(_waits, bench, jobs, remote=False)},
        bench.rounds,
        bench.say,
    )
    p50 = {name: [each.at(50) for each in samples] for name, samples in waits.items()}
    single, empty, batched = found["one by one"], found["empty route"], found["batched"]
    per_s = partial(Line, "http", unit="requests/s", reference=[each.requests_per_s for each in empty])
    drained = rates(daemons["daemon"])
    bench.rates.append(
        Rates(
            "over HTTP",
            "jobs/s",
            {"one by one": _per_s(single), "batches of 100": _per_s(batched), "daemon": drained},
        )
    )
    return [
        per_s(
            what="claim and complete, one by one, 16 clients",
            ours=[each.requests_per_s for each in single],
            against="empty route",
            bar=Bar("at least", 0.5),
        ),
        per_s(
            what="create a job, one by one, 16 clients",
            ours=[each.requests_per_s for each in found["enqueued"]],
            against="empty route",
            bar=Bar("at least", 0.45),
        ),
        Line("http", "in batches of 100", "jobs/s", _per_s(batched), drained, "daemon", Bar("at least", 0.3)),
        Line("http", "insert to remote handler, p50", "ms", p50["remote"], p50["native"], "native", Bar("at most", 3)),
    ]


def _per_s(samples: Sequence[Calls]) -> list[float]:
    return [each.jobs_per_s for each in samples]


async def waiters_row(bench: Bench) -> list[Line]:
    """What 2,000 workers that wait and beat cost the database."""
    seconds, workers = bench.seconds(IDLE_S, 10.0), WORKERS
    bench.say(f"waiters: {workers:,} workers that wait, for {seconds:g} s")
    found = (await interleave({"pgworkd": partial(_idle, bench, seconds, workers)}, bench.rounds, bench.say))["pgworkd"]
    what = f"transactions a second of {workers:,} workers"
    return [Line("waiters", what, "/s", found, bar=Bar("at most", 3))]
