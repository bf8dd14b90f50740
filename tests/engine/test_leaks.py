"""After a thousand jobs of every outcome nothing leaks: no task, no thread, no connection, no open file."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import PermanentError, Snooze
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("enough starts, stops and jobs to see whether something is left behind")

JOBS = 1_000
FATES = ["return", "raise", "permanent", "snooze", "time out", "be cancelled", "transaction", "roll back", "unstorable"]


async def _meet(fate: str, job: Job) -> Any:
    match fate:
        case "raise":
            raise ValueError("no")
        case "permanent":
            raise PermanentError("never")
        case "snooze" if job.attempt == 1:
            raise Snooze(0.01)
        case "be cancelled":
            await anyio.sleep(0.05)
        case "unstorable":
            return object()
    return "done"


async def _meet_in_transaction(fate: str, job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("SELECT 1")
        if fate == "time out":
            await connection.execute("SELECT pg_sleep(10)")
        if fate == "roll back":
            raise ValueError("roll back")


def app_of_all_fates() -> App:
    app = App()

    @app.handler("loop", concurrency=50, max_attempts=2, backoff=0.01)
    async def in_loop(payload: dict[str, Any], job: Job) -> Any:
        if payload["fate"] in ("time out", "transaction", "roll back"):
            return await _meet_in_transaction(payload["fate"], job)
        return await _meet(payload["fate"], job)

    @app.handler("thread", concurrency=10, max_attempts=1)
    def in_thread(payload: dict[str, Any], job: Job) -> Any:
        if payload["fate"] in ("raise", "permanent"):
            raise ValueError("no")
        if payload["fate"] == "be cancelled":
            job.stopping.wait(0.01)
        return "done"

    return app


def open_files() -> list[str]:
    """The open files of this process by name; sockets and pipes by their kind."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory itself
            names.append(str(fd.readlink()).split(":")[0])
    return sorted(names)


class Footprint:
    """The resources of a daemon at one moment."""

    def __init__(self, connections: int) -> None:
        self.tasks = sorted(task.get_name() for task in asyncio.all_tasks())
        self.files = open_files()
        self.connections = connections


CONNECTIONS = """SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend'"""


async def _footprint(db: asyncpg.Connection[Any]) -> Footprint:
    gc.collect()
    return Footprint(await db.fetchval(CONNECTIONS))


async def _warm_up(daemon: Daemon, db: asyncpg.Connection[Any]) -> None:
    """Every slot has run a job; all connections and the pool for transactions are open."""
    await db.execute(
        'INSERT INTO pgworkd.jobs (queue, payload) SELECT q, \'{"fate": "be cancelled"}\' '
        "FROM unnest(ARRAY['loop', 'thread']) q, generate_series(1, 150)"
    )
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, payload) "
        "SELECT 'loop', '{\"fate\": \"transaction\"}' FROM generate_series(1, 150)"
    )
    await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))

    async def nothing_runs() -> bool:  # its transaction completes a job before its handler returns
        return daemon.running == 0

    await until(nothing_runs)
    await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.samples"))  # the last of its connections is open


async def test_a_thousand_jobs_with_all_outcomes_leak_nothing(dsn: str, db: asyncpg.Connection[Any]) -> None:
    rng = random.Random(7)  # noqa: S311 - a fixed mixture
    before_all = await _footprint(db)
    async with running(app_of_all_fates(), dsn, transactions_max=5) as (daemon, _):
        await _warm_up(daemon, db)
        before = await _footprint(db)
        queues = rng.choices(["loop", "thread"], [4, 1], k=JOBS)
        fates = [rng.choice(FATES) for _ in queues]
        await db.executemany(
            "INSERT INTO pgworkd.jobs (queue, payload, timeout_s) VALUES ($1, $2, $3)",
            [
                (q, json.dumps({"fate": f}), 0.03 if f == "time out" else None)
                for q, f in zip(queues, fates, strict=True)
            ],
        )
        while await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status <> 'dead'"):
            await db.execute(
                "SELECT pgworkd.cancel(array_agg(id)) FROM (SELECT id FROM pgworkd.jobs "
                "WHERE payload->>'fate' = 'be cancelled' AND status IN ('running', 'pending') LIMIT 20) x"
            )
            await anyio.sleep(0.02)
        assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == JOBS + 450
        statuses = dict(await db.fetch("SELECT status::text, count(*) FROM pgworkd.all_jobs GROUP BY 1"))
        assert statuses.keys() == {"completed", "cancelled", "dead"}
        assert min(statuses.values()) > 20
        assert len(daemon.in_flight) == 0

        # Tasks of finished runners and idle threads may come and go, but there must be no more than before.
        # A connection that was given up, and replaced, ends when its server process notices.
        await until(lambda: db.fetchval(f"SELECT ({CONNECTIONS}) <= {before.connections}"))
        after = await _footprint(db)
        assert len(after.tasks) <= len(before.tasks), (before.tasks, after.tasks)
        assert len(after.files) <= len(before.files), (before.files, after.files)
    await until(lambda: db.fetchval(f"SELECT ({CONNECTIONS}) <= {before_all.connections}"))
    after_all = await _footprint(db)
    assert after_all.tasks == before_all.tasks
    assert after_all.files == before_all.files


def die_in_a_child() -> None:
    os._exit(1)


def sleep_in_a_child() -> None:
    time.sleep(30)


async def test_killed_and_crashed_processes_leave_no_file_and_no_zombie(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()
    app.handler("die", run_in="process", concurrency=2, max_attempts=1)(die_in_a_child)
    app.handler("sleep", run_in="process", concurrency=2, max_attempts=1, timeout_s=0.3)(sleep_in_a_child)
    before = await _footprint(db)
    async with running(app, dsn):
        for _ in range(3):
            for queue in ("die", "sleep"):
                await until(waits_for_status(db, await insert(db, queue), "dead"))
    await until(lambda: db.fetchval(f"SELECT ({CONNECTIONS}) <= {before.connections}"))
    after = await _footprint(db)
    assert after.files == before.files
    assert after.tasks == before.tasks


async def test_twenty_starts_and_stops_leak_nothing(dsn: str, db: asyncpg.Connection[Any]) -> None:
    before = await _footprint(db)
    for _ in range(20):
        async with running(app_of_all_fates(), dsn):
            await until(waits_for_status(db, await insert(db, "loop", '{"fate": "transaction"}'), "completed"))
    await until(lambda: db.fetchval(f"SELECT ({CONNECTIONS}) <= {before.connections}"))
    after = await _footprint(db)
    assert after.tasks == before.tasks
    assert after.files == before.files
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0
