"""DBA operations beside two live daemons: every job runs once, and no queue stalls."""

from __future__ import annotations

import contextlib
from typing import Any

import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits.daemon import running, until

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

JOBS = 150
ACTS = {
    "vacuum full": "VACUUM FULL pgworkd.jobs",
    "vacuum full of the history": "VACUUM FULL pgworkd.finished_jobs_other",
    "reindex": "REINDEX TABLE pgworkd.jobs",
    "reindex concurrently": "REINDEX TABLE CONCURRENTLY pgworkd.jobs",
    "cluster": "CLUSTER pgworkd.jobs USING jobs_pkey",
    "analyze": "ANALYZE",
    "another index": "CREATE INDEX CONCURRENTLY theirs ON pgworkd.jobs (kind)",
    "migrate": "",
}


@pytest.mark.parametrize("act", ACTS)
async def test_every_job_runs_once_during_dba_operations(dsn: str, db: asyncpg.Connection[Any], act: str) -> None:
    app, ran = App(), list[str]()

    @app.handler("q", concurrency=10)
    async def handle(job: Job) -> None:
        ran.append(str(job.id))

    traffic = "INSERT INTO pgworkd.jobs (queue, serialize_key) SELECT 'q', 'k' || n % 20 FROM generate_series(1, $1) n"
    over = "SELECT count(*) = $1 FROM pgworkd.finished_jobs WHERE status = 'completed' AND attempts = 1"
    async with running(app, dsn) as (_, one), running(app, dsn) as (_, two):
        for round_ in range(1, 4):
            await db.execute(traffic, JOBS)
            if act == "migrate":
                await schema.migrate(ConnectionOptions(dsn), force=True)
            elif round_ == 1 or "another" not in act:
                # A plain REINDEX locks indexes in another order than their users: Postgres may cancel it as a deadlock.
                with contextlib.suppress(asyncpg.DeadlockDetectedError):
                    await db.execute(ACTS[act])
        await until(lambda: db.fetchval(over, 3 * JOBS))
        assert sorted(ran) == sorted(set(ran))
        for seen in (one, two):
            assert seen.all(events.LEASE_LOST) == seen.all(events.JOB_DEAD) == []
