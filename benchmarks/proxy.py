"""pg-boss' HTTP proxy beside our gateway: the same callers claim and complete jobs of the same number.

Its package is installed from npm with the peers. PGWORKD_BENCH_PROXY names a built checkout of it instead.
"""

from __future__ import annotations

import os
from functools import partial

from .bench import Bench, calm
from .gateway import CLIENTS, JOBS_PER_S, SECONDS, Calls, answers, called, jobs_through_gateway, log
from .measure import Bar, Line, interleave
from .processes import BenchmarkError, Program, running, until
from .rivals import proxy_command
from .scrape import free_port
from .systems import System


async def proxy_row(bench: Bench) -> list[Line]:
    """Claim and complete, one by one and by the hundred, through our gateway and through pg-boss' proxy."""
    boss = next((peer for peer in bench.peers if peer.name == "pg-boss"), None)
    if boss is None:
        raise BenchmarkError("pg-boss is not there: add --peers")
    command = proxy_command(bench.scratch, os.environ.get("PGWORKD_BENCH_PROXY"))
    seconds = bench.seconds(SECONDS, 2.0)
    lines = []
    for what, clients, unit in (("single", CLIENTS, "one by one"), ("batched", 4, "by the hundred")):
        bench.say(f"proxy: {clients} clients, {unit}, for {seconds:g} s")
        measured = {
            "pgworkd": partial(jobs_through_gateway, bench, what, clients, seconds),
            "pg-boss proxy": partial(_jobs_through_proxy, bench, boss, command, f"proxied-{what}", clients, seconds),
        }
        found = await interleave(measured, bench.rounds, bench.say)
        ours, theirs = ([each.jobs_per_s for each in found[name]] for name in measured)
        title = f"claim and complete over HTTP, {unit}"
        lines.append(Line("proxy", title, "jobs/s", ours, theirs, "pg-boss proxy", Bar("at least", 2.0)))
    return lines


async def _jobs_through_proxy(
    bench: Bench, boss: System, command: list[str], what: str, clients: int, seconds: float
) -> Calls:
    await bench.server.template(boss.template, boss.make)
    async with bench.server.database(boss.template) as dsn, bench.server.connected(dsn) as connection:
        await boss.load(bench, dsn, int(JOBS_PER_S * seconds * (5 if what == "proxied-batched" else 1)))
        await calm(connection, boss.table)
        port = free_port()
        environ = {"DATABASE_URL": dsn, "PORT": str(port), "HOST": "127.0.0.1", "NODE_ENV": "production"}
        environ |= {"PGBOSS_PROXY_REQUEST_LOGGER": "false"}
        async with running(command, environ, log(bench, "proxy")) as program:
            found = await _measured(bench, program, f"http://127.0.0.1:{port}", what, clients, seconds)
        if not await connection.fetchval(boss.left_sql):
            raise BenchmarkError(f"{what}: no job was left: give it more")
    return found


async def _measured(bench: Bench, program: Program, url: str, what: str, clients: int, seconds: float) -> Calls:
    await until(partial(answers, url, "/api/isInstalled"), "the proxy answers", [program], every_s=0.1)
    found = await called(bench, what, url, clients, seconds)
    program.check()
    return found
