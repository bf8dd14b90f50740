"""Push: deliveries a second beside a bare loop of httpx, and what one endpoint that hangs costs the others."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
from anyio.to_thread import run_sync

from .bench import PGWORKD, Bench, calm
from .gateway import answers, log
from .measure import Bar, Line, interleave
from .processes import BenchmarkError, Program, running, until
from .scrape import free_port
from .systems import ours

AT_ONCE, DELIVERIES = 100, 20_000
ENDPOINTS, PER_ENDPOINT, EVERY_S = 100, 40, 0.1
"""So many endpoints, jobs of each, and seconds between two of them: a load at which nobody waits for the machine."""
_ENDPOINT = """SELECT pgworkd.set_endpoint($1, jsonb_build_object('url', $2::text, 'allow_private', true,
    'secret_name', 'bench')), pgworkd.set_queue($1, jsonb_build_object('endpoint', $1::text, 'concurrency', $3::int))"""
SECRET = "whsec_YmVuY2htYXJrcywgd2hpY2ggYXJlIG5vIHNlY3JldA=="  # noqa: S105 # nosec B105 # as it says


class Receiving:
    """A receiver, and what it says."""

    def __init__(self, port: int, program: Program) -> None:
        self.url, self._program = f"http://127.0.0.1:{port}", program

    async def asked(self, path: str) -> dict[str, Any]:
        """The answer to GET."""

        def ask() -> dict[str, Any]:
            connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=10)
            with contextlib.closing(connection):
                connection.request("GET", path)
                found: dict[str, Any] = json.loads(connection.getresponse().read())
                return found

        self._program.check()
        return await run_sync(ask)

    async def has(self, count: int) -> bool:
        """Whether so many have come."""
        return int((await self.asked("/report"))["count"]) >= count


@contextlib.asynccontextmanager
async def _receiving(bench: Bench) -> AsyncIterator[Receiving]:
    port = free_port()
    async with running([sys.executable, "-m", "benchmarks.receiver", str(port)], {}, log(bench, "receiver")) as program:
        found = Receiving(port, program)
        await until(partial(answers, found.url, "/report"), "the receiver answers", [program], every_s=0.1)
        yield found


@contextlib.asynccontextmanager
async def _pushing(bench: Bench, dsn: str) -> AsyncIterator[Program]:
    environ = {"PGWORKD_DSN": dsn, "PGWORKD_LOG_LEVEL": "warning", "PGWORKD_SECRET_BENCH": SECRET}
    async with running([PGWORKD, "push"], environ, log(bench, "push")) as program:
        yield program


async def delivered(bench: Bench, jobs: int) -> float:
    """Deliveries a second, 100 at a time."""
    system = ours(queue="push")
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        _receiving(bench) as receiver,
    ):
        await system.load(bench, dsn, jobs)
        await connection.execute(_ENDPOINT, "push", f"{receiver.url}/done", AT_ONCE)
        await calm(connection, system.table)
        async with _pushing(bench, dsn) as program:
            await until(partial(receiver.has, jobs), "all jobs are delivered", [program], every_s=0.2)
            found = await receiver.asked("/report")
            if found["count"] != jobs:
                raise BenchmarkError(f"push: {found['count']} deliveries of {jobs} jobs")
    return float((jobs - 1) / found["took_s"])


async def _looped(bench: Bench, requests: int) -> float:
    """Requests a second of a loop of httpx, 100 at a time."""
    async with _receiving(bench) as receiver:
        command = [sys.executable, "-m", "benchmarks.httpx_loop", f"{receiver.url}/done", str(AT_ONCE), str(requests)]
        async with running(command, {}, log(bench, "httpx")) as program:
            await program.finished()
        found = await receiver.asked("/report")
        return float((found["count"] - 1) / found["took_s"])


async def _p99(bench: Bench, *, hangs: bool) -> float:
    """Milliseconds from due to received, for the slowest hundredth of the jobs of endpoints that answer."""
    system = ours(queue="push")
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        _receiving(bench) as receiver,
    ):
        for number in range(ENDPOINTS):
            path = "hang" if hangs and number == 0 else "done"
            await connection.execute(_ENDPOINT, f"push-{number}", f"{receiver.url}/{path}", 10)
        async with _pushing(bench, dsn) as program:
            insert = "INSERT INTO pgworkd.jobs (queue) SELECT 'push-' || n FROM generate_series($1::int, $2::int) n"
            await connection.execute(insert, 1, ENDPOINTS - 1)
            await until(partial(receiver.has, ENDPOINTS - 1), "all endpoints are served", [program], every_s=0.2)
            await receiver.asked("/reset")
            for _ in range(bench.jobs(PER_ENDPOINT, 10)):
                for tenth in range(10):  # as they would come, not all in one instant
                    await connection.execute(insert, tenth * ENDPOINTS // 10, (tenth + 1) * ENDPOINTS // 10 - 1)
                    await anyio.sleep(EVERY_S)
            count = bench.jobs(PER_ENDPOINT, 10) * (ENDPOINTS - hangs)
            await until(partial(receiver.has, count), "all jobs are delivered", [program], every_s=0.2)
            return float((await receiver.asked("/report"))["p99"])


async def push_row(bench: Bench) -> list[Line]:
    """Deliveries to a service that answers at once; and beside one that never does."""
    jobs = bench.jobs(DELIVERIES, 2_000)
    bench.say(f"push: {jobs:,} deliveries, {AT_ONCE} at a time")
    rates = await interleave(
        {"pgworkd": partial(delivered, bench, jobs), "httpx": partial(_looped, bench, jobs)}, bench.rounds, bench.say
    )
    waits = await interleave(
        {"one hangs": partial(_p99, bench, hangs=True), "none hangs": partial(_p99, bench, hangs=False)},
        bench.rounds,
        bench.say,
    )
    what = f"due to received, p99, beside one of {ENDPOINTS} endpoints that hangs"
    return [
        Line(
            "push",
            f"deliveries, {AT_ONCE} at a time",
            "requests/s",
            rates["pgworkd"],
            rates["httpx"],
            "a loop of httpx",
            Bar("at least", 0.5),
        ),
        Line("push", what, "ms", waits["one hangs"], waits["none hangs"], "none hangs", Bar("at most", 1.2)),
    ]
