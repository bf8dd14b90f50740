"""The dashboard: how long its pages take in a large database beside a drain, and what those who watch cost."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import asyncpg
from anyio.to_thread import run_sync

from pgworkd.bench.measure import Drain, percentile

from .bench import PGWORKD, Bench
from .drain import race
from .gateway import answers, log
from .measure import Bar, Line, interleave
from .pressure import HISTORY_SQL
from .processes import BenchmarkError, Program, running, until
from .scrape import free_port
from .systems import executed, ours

LIVE, FINISHED, JOBS = 1_000_000, 10_000_000, 200_000
LOADS, VIEWERS, WATCHED_S, RETRIED = 50, 100, 20.0, 50_000
PAGES = (
    ("overview", "/"),
    ("queues", "/queues"),
    ("queue", "/queues/live7"),
    ("jobs", "/jobs"),
    ("jobs of a queue that failed", "/jobs?queue=live7&status=failed"),
    ("jobs of a key", "/jobs?queue=live7&key=key507"),
    ("jobs of a kind", "/jobs?kind=kind33"),
    ("job", "/jobs/{job}"),
    ("dead", "/dead"),
    ("batches", "/batches"),
    ("schedules", "/schedules"),
    ("workers", "/workers"),
    ("audit", "/audit"),
)
"""What is looked at; {job}: one that is blocked."""
_WORKER = """INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)
    VALUES ('other', 1, '0', 3600, now() + interval '1 day')"""
# Of 50 queues with 200 kinds and 10,000 keys: 45 % are due or will be, 20 % wait for a retry, 20 % for their key, which
# one of those holds, 15 % are dead; one in a thousand runs.
_LIVE_SQL = """
    INSERT INTO pgworkd.jobs (queue, kind, payload, status, run_at, attempts, failures, started_at, failed_at, error,
        errors, worker_id, serialize_key, limit_key)
    SELECT 'live' || i / 20 % 50, 'kind' || i % 200, jsonb_build_object('number', i, 'text', repeat('x', 70)), s.status,
        now() + CASE WHEN i % 3 = 0 THEN i % 86400 ELSE -(i % 3600) END * interval '1 s',
        s.ran, s.failed, CASE WHEN s.ran > 0 THEN now() - interval '1 h' END,
        CASE WHEN s.failed > 0 THEN now() - (i %% 86400) * interval '1 s' END,
        CASE WHEN s.failed > 0 THEN s.error END,
        CASE WHEN s.failed > 0 THEN jsonb_build_array(jsonb_build_object('type', 'ValueError', 'message', s.error))
             ELSE '[]' END,
        CASE WHEN s.status = 'running' THEN (SELECT min(id) FROM pgworkd.workers) END,
        CASE WHEN s.status = 'blocked' OR i % 20 = 9 AND s.status = 'failed' THEN 'line' || i / 20 END,
        'key' || i % 10000
    FROM (SELECT i, CASE WHEN i % 1000 = 0 THEN 'running' WHEN i % 20 < 9 THEN 'pending' WHEN i % 20 < 13 THEN 'failed'
                         WHEN i % 20 < 17 THEN 'blocked' ELSE 'dead' END::pgworkd.job_status AS status,
             (i % 1000 = 0 OR i % 20 BETWEEN 9 AND 12 OR i % 20 > 16)::int AS ran,
             (i % 1000 <> 0 AND (i % 20 BETWEEN 9 AND 12 OR i % 20 > 16))::int AS failed,
             'order of shop' || chr(97 + i % 20) || ' is refused' AS error
          FROM generate_series(1, %d) AS i) s"""
_DEATHS_SQL = """
    INSERT INTO pgworkd.deaths (job_id, attempt, at, queue, kind, error_type, error)
    SELECT id, attempts, failed_at, queue, coalesce(kind, queue), 'ValueError', error
    FROM pgworkd.jobs WHERE status = 'dead'
    ON CONFLICT DO NOTHING"""


_DEAD_SQL = """
    INSERT INTO pgworkd.jobs (queue, status, attempts, failures, started_at, failed_at, error, errors)
    SELECT 'refused', 'dead', 1, 1, now(), now(), 'the order is refused', '[{"type": "ValueError"}]'
    FROM generate_series(1, %d)"""
_WAITED_SQL = "SELECT max(extract(epoch FROM clock_timestamp() - waitstart))::float8 FROM pg_locks WHERE NOT granted"


@contextlib.asynccontextmanager
async def _pages(bench: Bench, dsn: str) -> AsyncIterator[tuple[int, Program]]:
    """`pgworkd serve --with dashboard` for anyone on that database: its port, and the program."""
    port = free_port()
    command = [PGWORKD, "serve", "--with", "dashboard", "--auth", "none", "--listen", f"127.0.0.1:{port}"]
    async with running(command, {"PGWORKD_DSN": dsn, "PGWORKD_LOG_LEVEL": "warning"}, log(bench, "pages")) as program:
        at = f"http://127.0.0.1:{port}"
        await until(partial(answers, at, "/healthz"), "the dashboard answers", [program], every_s=0.1)
        yield port, program


def _loaded(port: int, path: str) -> tuple[float, int]:
    """Milliseconds from the connection to the last byte of a page, and its bytes."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        page = answer.read()
    finally:
        connection.close()
    if answer.status != 200 or b"Not read:" in page:
        raise BenchmarkError(f"{path} answers {answer.status}: {page[:2000].decode(errors='replace')}")
    return (time.perf_counter() - began) * 1000, len(page)


async def _count_deaths(connection: asyncpg.Connection[Any]) -> None:
    """Puts all deaths into their groups."""
    while await connection.fetchval("SELECT EXISTS (SELECT FROM pgworkd.deaths WHERE group_id IS NULL)"):
        await connection.fetch("SELECT * FROM pgworkd.count_deaths(10000)")


@contextlib.asynccontextmanager
async def _pages_beside_drain(bench: Bench, dsn: str, jobs: int) -> AsyncIterator[int]:
    """The port of the dashboard, while a fleet drains jobs, which are refilled."""
    async with (
        bench.fleet(ours().command, dsn) as (programs, tallies),
        _pages(bench, dsn) as (port, _),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(_refilled, bench, dsn, jobs)
        await until(lambda: tallies.first_ns() is not None, "the drain begins", programs)
        yield port
        tasks.cancel_scope.cancel()


async def pages_row(bench: Bench) -> list[Line]:
    """The time of each page in a database of a million live jobs and ten million finished ones, beside a drain."""
    live, finished, jobs = bench.jobs(LIVE, 1000), bench.jobs(FINISHED, 1000), bench.jobs(JOBS)
    system = ours()
    bench.say(f"pages: {live:,} live jobs, {finished:,} finished ones, {LOADS} loads of each page")
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        fill = (HISTORY_SQL % (finished, finished), _WORKER, _LIVE_SQL.replace("%d", str(live)).replace("%%", "%"))
        await executed(dsn, "SET session_replication_role = replica;" + ";".join(fill), _DEATHS_SQL)
        await _count_deaths(connection)
        await connection.execute("VACUUM ANALYZE")
        await system.load(bench, dsn, jobs)
        job = await connection.fetchval("SELECT id FROM pgworkd.jobs WHERE status = 'blocked' LIMIT 1")
        took: dict[str, list[float]] = {}
        async with _pages_beside_drain(bench, dsn, jobs) as port:
            for name, path in PAGES:
                found = [await run_sync(_loaded, port, path.format(job=job)) for _ in range(LOADS)]
                took[name] = [each for each, _ in found]
                bench.say(f"  {name}: p95 {percentile(took[name], 95):.0f} ms, {found[-1][1] / 1000:.0f} kB")
    lines = [(percentile(each, 95), name) for name, each in took.items()]
    note = ", ".join(f"{name} {ms:.0f}" for ms, name in sorted(lines, reverse=True))
    return [Line("pages", "the slowest page, p95", "ms", [max(lines)[0]], bar=Bar("at most", 300), note=note)]


async def retried_row(bench: Bench) -> list[Line]:
    """How long anybody waits for a lock while a group of dead jobs is retried from its page, beside a drain."""
    count, jobs = bench.jobs(RETRIED, 2000), bench.jobs(JOBS)
    system = ours()
    bench.say(f"retried: {count:,} dead jobs by one press, beside a drain")
    await bench.server.template(system.template, system.make)
    async with bench.server.database(system.template) as dsn, bench.server.connected(dsn) as connection:
        await executed(dsn, _DEAD_SQL % count, _DEATHS_SQL)
        await _count_deaths(connection)
        await system.load(bench, dsn, jobs)
        group = await connection.fetchval("SELECT id FROM pgworkd.error_groups WHERE queue = 'refused'")
        async with _pages_beside_drain(bench, dsn, jobs) as port:
            began = time.perf_counter()
            await run_sync(_pressed, port, f"/dead/{group}/retry")
            waits, left = [0.0], count
            while left:
                waits.append(await connection.fetchval(_WAITED_SQL) or 0.0)
                left = count - await connection.fetchval("SELECT sum(done)::int FROM pgworkd.operations")
            took_s = time.perf_counter() - began
    note = f"{count:,} jobs in {took_s:.1f} s, looked at {len(waits):,} times"
    longest = 1000 * max(waits)
    return [Line("retried", "longest wait for a lock", "ms", [longest], bar=Bar("at most", 100), note=note)]


def _pressed(port: int, path: str) -> None:
    """Sends the form of a button."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", path, "back=%2Fdead", {"Content-Type": "application/x-www-form-urlencoded"})
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if (answer.status, answer.getheader("Location")) != (303, "/operations"):
        raise BenchmarkError(f"{path} answers {answer.status}, and leads to {answer.getheader('Location')}")


async def _refilled(bench: Bench, dsn: str, jobs: int) -> None:
    """Adds jobs to drain, as long as it is not cancelled."""
    while True:
        await anyio.sleep(jobs / 100_000)
        await ours().load(bench, dsn, jobs // 10)


@contextlib.asynccontextmanager
async def _watched(port: int, path: str, viewers: int) -> AsyncIterator[list[int]]:
    """So many open pages, which follow; the bytes that they have received."""
    received = [0] * viewers

    async def follow(number: int) -> None:
        async with await anyio.connect_tcp("127.0.0.1", port) as stream:
            await stream.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n".encode())
            async for chunk in stream:
                received[number] += len(chunk)

    async with anyio.create_task_group() as tasks:
        for number in range(viewers):
            tasks.start_soon(follow, number)
        with anyio.fail_after(60):
            while not all(received):
                await anyio.sleep(0.05)
        yield received
        tasks.cancel_scope.cancel()


async def _drained(bench: Bench, jobs: int, viewers: int) -> Drain:
    """A drain with so many open overviews, and a gateway that serves them; without viewers, with an idle one."""
    system = ours()
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        _pages(bench, dsn) as (port, _),
    ):
        await system.load(bench, dsn, jobs)
        await connection.execute("VACUUM ANALYZE pgworkd.jobs")
        async with _watched(port, "/", viewers):
            return await race(bench, system, dsn, connection, loaded=jobs)


async def _statements(bench: Bench, viewers: int) -> float:
    """Transactions a second of so many open overviews of an idle fleet."""
    system, sql = ours(), "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    seconds = bench.seconds(WATCHED_S, 6.0)
    await bench.server.template(system.template, system.make)
    async with (
        bench.server.without_autovacuum(),
        bench.server.database(system.template) as dsn,
        bench.server.connected(dsn) as connection,
        _pages(bench, dsn) as (port, _),
        _watched(port, "/", viewers),
    ):
        await anyio.sleep(3)
        before = await connection.fetchval(sql)
        await anyio.sleep(seconds)
        return (int(await connection.fetchval(sql)) - int(before)) / seconds


async def viewers_row(bench: Bench) -> list[Line]:
    """What a hundred open pages cost a drain, and the database."""
    jobs = bench.jobs(JOBS)
    bench.say(f"viewers: {jobs:,} jobs with {VIEWERS} open overviews and without")
    contenders = {str(count): partial(_drained, bench, jobs, count) for count in (VIEWERS, 0)}
    found = await interleave(contenders, bench.rounds, bench.say)
    cost = {name: [each.worker_us + (each.server_us or 0.0) for each in drains] for name, drains in found.items()}
    tabs = {str(count): partial(_statements, bench, count) for count in (VIEWERS, 1)}
    asked = await interleave(tabs, bench.rounds, bench.say)
    return [
        Line(
            "viewers",
            f"CPU of worker and server per job, {VIEWERS} viewers",
            "us/job",
            cost[str(VIEWERS)],
            cost["0"],
            "none",
            Bar("at most", 1.03),
        ),
        Line(
            "viewers",
            f"transactions of {VIEWERS} open pages",
            "/s",
            asked[str(VIEWERS)],
            asked["1"],
            "one page",
            Bar("at most", 1.10),
        ),
    ]
