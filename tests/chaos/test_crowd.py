"""Contention: fifty daemons for one job, and a hundred thousand jobs due at one instant."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.database import schema
from pgworkd.embedded import EmbeddedPostgres
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.server import TEST_SETTINGS, create_database, create_template

pytestmark = pytest.mark.slow("daemons under faults")

DAEMONS, ONE_BY_ONE = 50, 20
CROWD = 100_000
LEASE = {"lease_s": 30.0, "heartbeat_s": 1.0}
"""A long lease: jobs claimed under an expired one are released, and fifty daemons in one process may be slow."""


def counting() -> tuple[App, Counter[UUID]]:
    app, ran = App(), Counter[UUID]()

    @app.handler("q", concurrency=50)
    async def handle(job: Job) -> None:
        ran[job.id] += 1

    return app, ran


async def test_one_of_fifty_daemons_claims_a_single_job(request: pytest.FixtureRequest) -> None:
    settings = {**TEST_SETTINGS, "max_connections": "400"}
    with EmbeddedPostgres(settings=settings, bin_dir=request.config.getoption("--pg-bin")) as server:
        await create_template(server.dsn(), schema.text())
        dsn = await create_database(server.dsn(), "crowd")
        app, ran = counting()
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(DAEMONS):
                await stack.enter_async_context(running(app, dsn, poll_s=2.0, **LEASE))
            db = await asyncpg.connect(dsn)
            for _ in range(ONE_BY_ONE):
                await until(waits_for_status(db, await insert(db, "q"), "completed"))
            rows = await db.fetch("SELECT id, attempts FROM pgworkd.finished_jobs")
            await db.close()
    assert len(rows) == ONE_BY_ONE
    assert {row["attempts"] for row in rows} == {1}
    assert ran == Counter(UUID(bytes=row["id"].bytes) for row in rows)


async def test_a_hundred_thousand_jobs_due_at_one_instant_all_run_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, ran = counting()
    async with running(app, dsn, **LEASE), running(app, dsn, **LEASE):
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, run_at) SELECT 'q', now() + interval '1 day' FROM generate_series(1, $1)",
            CROWD,
        )
        await db.execute("UPDATE pgworkd.jobs SET run_at = now() + interval '3 s'")
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=90)
    row = await db.fetchrow(
        "SELECT count(*) FILTER (WHERE started_at < run_at), count(DISTINCT run_at), max(failures)"
        " FROM pgworkd.finished_jobs"
    )
    assert tuple(row or ()) == (0, 1, 0)
    assert len(ran) == CROWD
    assert set(ran.values()) == {1}
