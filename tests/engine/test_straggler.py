"""A job that is committed after younger ones were claimed waits about as long as its transaction took."""

from __future__ import annotations

from collections import Counter
from typing import Any

import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from tests.kits.daemon import insert, running, until, waits_for_status

SLOW_POLL = {"poll_s": 60.0, "heartbeat_s": 20.0, "lease_s": 60.0}
"""Periods so long that a job found only by a poll is too late for any test here."""


async def test_an_idle_pool_finds_a_job_that_was_committed_late(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit sends its notification, but the row lies behind the pool's claim cursor."""
    monkeypatch.setattr("pgworkd.engine.claim.poll_mode.POLL_ON_S", 0.0)  # for a while it would find the job by polling
    app, ran = App(), Counter[Any]()

    @app.handler("q")
    async def handle(job: Job) -> None:
        ran[job.id] += 1

    slow = await asyncpg.connect(dsn)
    async with running(app, dsn, **SLOW_POLL) as (_, seen):
        await until(lambda: db.fetchval("SELECT idle FROM pgworkd.pools WHERE queue = 'q'"))
        await slow.execute("BEGIN")
        late = await insert(slow, "q")
        for n in range(1, 51):
            await insert(db, "q")
            await seen.wait(events.JOB_STARTED, count=n)
        await slow.execute("COMMIT")
        await until(waits_for_status(db, late, "completed"), limit_s=2)
    slow.terminate()
    assert ran[late] == 1
