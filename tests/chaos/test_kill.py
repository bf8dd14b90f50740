"""kill -9 with a thousand jobs in flight, and a server that crashes repeatedly."""

from __future__ import annotations

import json
import signal
from collections import Counter
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.database import schema
from pgworkd.embedded import EmbeddedPostgres
from tests.kits import process
from tests.kits.daemon import running, until
from tests.kits.server import create_database, create_template, start_test_server

pytestmark = pytest.mark.slow("daemons under faults")

IN_FLIGHT = 1_000
LEASE_S = 5.0


async def test_jobs_complete_after_two_kills_with_a_thousand_in_flight(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute(process.TABLES)
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'work', $1 FROM generate_series(1, 2500)",
        json.dumps({"gate": "open"}),
    )
    lease = {"lease_s": LEASE_S, "heartbeat_s": 1.0}
    killed: list[int] = []
    for round_ in (1, 2):
        with process.daemon_process(dsn, **lease) as victim:
            await until(lambda: db.fetchval("SELECT count(*) = $1 FROM runs WHERE pid = $2", IN_FLIGHT, victim.pid))
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            killed.append(victim.pid)
        lost_at = await db.fetchval("SELECT clock_timestamp()")
        if round_ == 1:
            assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == IN_FLIGHT

    await db.execute("INSERT INTO gates VALUES ('open')")
    with process.daemon_process(dsn, **lease):
        await until(
            lambda: db.fetchval(
                "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE worker_id IS NOT NULL AND started_at < $1)", lost_at
            ),
            limit_s=LEASE_S + 10,
        )
        taken_over_s = await db.fetchval("SELECT extract(epoch FROM clock_timestamp() - $1)::float8", lost_at)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=60)
    assert taken_over_s < LEASE_S + 10

    finished = await db.fetch(process.EXPLAINED)
    assert len(finished) == len({row["id"] for row in finished}) == 2500
    assert {row["status"] for row in finished} == {"completed"}
    runs = await db.fetch("SELECT job, attempt, pid, ended FROM runs")
    by_job = Counter(row["job"] for row in runs)
    for row in finished:
        # Each start beyond the first is explained by a lost attempt.
        assert row["failures"] == 0  # a lost attempt does not count as a failure
        assert row["attempts"] == 1 + row["lost"] + row["given_back"]
        assert by_job[row["id"]] <= 1 + row["lost"]
    # Runs of the killed daemons never ended; every job ended exactly once, on another daemon.
    assert all(row["ended"] is None for row in runs if row["pid"] in killed)
    assert Counter(row["job"] for row in runs if row["ended"] is not None) == Counter(row["id"] for row in finished)


async def test_no_job_is_lost_when_postgres_crashes_five_times_under_load() -> None:
    server = start_test_server()  # a server of its own, to be crashed
    try:
        await create_template(server.dsn(), schema.text())
        await _survive(server, await create_database(server.dsn(), "chaos"))
    finally:
        server.stop("immediate")


async def _survive(server: EmbeddedPostgres, dsn: str) -> None:
    ran: Counter[Any] = Counter()
    inserted: set[Any] = set()
    app, done = App(), anyio.Event()

    @app.handler("q", concurrency=50)
    async def handle(job: Job) -> None:
        ran[job.id, job.attempt] += 1
        await anyio.sleep(0.002)

    async def produce() -> None:
        """Inserts continuously; an insert counts only once its commit is acknowledged."""
        connection: asyncpg.Connection[Any] | None = None
        while not done.is_set():
            try:
                if connection is None or connection.is_closed():
                    connection = await asyncpg.connect(dsn, timeout=2)
                rows = await connection.fetch(
                    "INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 20) RETURNING id", timeout=2
                )
                inserted.update(row["id"] for row in rows)
                await anyio.sleep(0.01)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await anyio.sleep(0.02)
        if connection is not None:
            await connection.close()

    async with running(app, dsn, lease_s=30.0, heartbeat_s=2.0) as (daemon, _), anyio.create_task_group() as tasks:
        tasks.start_soon(produce)
        for _ in range(5):
            before = len(ran)
            await until(lambda before=before: _more(ran, before + 200))  # type: ignore[misc]
            await anyio.to_thread.run_sync(server.restart, "immediate")
            back = anyio.current_time()
            before = len(ran)
            await until(lambda before=before: _more(ran, before + 1), limit_s=5)  # type: ignore[misc]
            assert anyio.current_time() - back < 5
        done.set()
        db = await asyncpg.connect(dsn)
        # The daemon kept its lease throughout: no job was rescued, none ran twice.
        await until(
            lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status = 'pending')"), limit_s=30
        )
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=60)
        assert daemon.worker.may_claim
    rows = await db.fetch("SELECT id, status::text, attempts, failures FROM pgworkd.finished_jobs")
    finished = {row["id"]: row for row in rows}
    assert len(rows) == len(finished)
    assert inserted <= finished.keys(), "an acknowledged insert was lost"
    assert {row["status"] for row in rows} == {"completed"}
    assert max(row["failures"] for row in rows) == 0
    assert set(ran.values()) == {1}
    # A claim whose reply was lost uses up an attempt that never ran; no job ran twice.
    assert len({job for job, _ in ran}) == len(ran)
    await db.close()


async def _more(ran: Counter[Any], than: int) -> bool:
    return len(ran) >= than
