"""One caller beside others: streams that never end beside clients and workers; one follower of lists, and a hundred."""

from __future__ import annotations

import sys
from functools import partial

import anyio

from pgworkd.admin import Admin
from pgworkd.database.connection import ConnectionOptions

from .bench import Bench
from .gateway import log, serving
from .measure import Bar, Line, interleave
from .processes import cpu_s, running, until
from .systems import ours

SECONDS, CLIENTS, WORKERS, STREAMS, FOLLOWERS = 10.0, 16, 200, 20, 100
_CHURN = "INSERT INTO pgworkd.jobs (queue, run_at) VALUES ('churn', now() + interval '1 hour')"


async def _others(bench: Bench, seconds: float, streams: str) -> list[float]:
    """The p99 in ms of clients that create jobs, and of workers' beats, beside streams of another caller, if any."""
    system = ours()
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, serving(bench, dsn) as (url, token, _):
        async with Admin(ConnectionOptions(dsn)) as admin:
            other = str(await admin.tokens.add("hostile", {"enqueue": None}))
        command = [sys.executable, "-m", "benchmarks.hogs_caller"]
        hostile = [*command, streams or "none", url, str(STREAMS), str(seconds + 60), other]
        fair = [*command, "fair", url, f"{CLIENTS}+{WORKERS}", str(seconds), token]
        async with running(hostile, {}, log(bench, "hostile")) as hogs:
            await until(lambda: "ready" in hogs.log.read_text(), "the streams are open", [hogs], every_s=0.1)
            async with running(fair, {}, log(bench, "fair")) as program:
                return [float(each) for each in (await program.finished()).split()]


async def _followed(bench: Bench, seconds: float, followers: int) -> float:
    """CPU seconds of a gateway, by second, with so many followers of lists that change all the time."""
    system = ours()
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        serving(bench, dsn) as (url, _, program),
    ):
        async with Admin(ConnectionOptions(dsn)) as admin:
            token = str(await admin.tokens.add("reader", {"read": None}))
        command = [sys.executable, "-m", "benchmarks.hogs_caller", "follow", url]
        command += [str(followers), str(seconds + 60), token]
        async with running(command, {}, log(bench, "followers")) as callers:
            await until(lambda: "ready" in callers.log.read_text(), "all follow", [callers], every_s=0.1)
            before, began = cpu_s(program.pid), anyio.current_time()
            while anyio.current_time() < began + seconds:
                await connection.execute(_CHURN)
                await anyio.sleep(0.2)
            return (cpu_s(program.pid) - before) / (anyio.current_time() - began)


async def hogs_row(bench: Bench) -> list[Line]:
    """What one caller costs the others."""
    seconds = bench.seconds(SECONDS, 3.0)
    bench.say(f"hogs: {CLIENTS} clients and {WORKERS} workers beside {STREAMS} streams, for {seconds:g} s")
    contenders = {name: partial(_others, bench, seconds, name) for name in ("", "drip", "flood")}
    found = await interleave(contenders, bench.rounds, bench.say)
    lists = await interleave(
        {str(count): partial(_followed, bench, seconds, count) for count in (1, FOLLOWERS)}, bench.rounds, bench.say
    )
    lines = []
    for name, said in (("drip", "slow"), ("flood", "fast")):
        for at, what in ((0, "create a job, p99"), (1, "beat, p99")):
            title = f"{what}, beside {STREAMS} {said} streams"
            ours_, alone = [each[at] for each in found[name]], [each[at] for each in found[""]]
            lines.append(Line("hogs", title, "ms", ours_, alone, "without", Bar("at most", 2)))
    title = f"CPU of a gateway with {FOLLOWERS} followers of /v1/events"
    lines.append(Line("hogs", title, "s/s", lists[str(FOLLOWERS)], lists["1"], "one", Bar("at most", 1.2)))
    return lines
