"""A job that ends dead, and a check that the daemon survives it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anyio
import asyncpg

from pgworkd import App
from pgworkd.words import events
from tests.kits.daemon import insert, running, until, waits_for_status


async def dead_end(dsn: str, db: asyncpg.Connection[Any], handle: Callable[..., Any], **options: Any) -> asyncpg.Record:
    """Runs a job with one attempt, then another job in the same slot; the row of the first, which is dead."""
    app = App()
    app.handler("odd", queue="q", concurrency=1, max_attempts=1, **options)(handle)

    @app.handler("next", queue="q")
    async def following() -> str:
        await anyio.sleep(0.001)
        return "alive"

    async with running(app, dsn) as (daemon, seen):
        odd, after = await insert(db, "q", kind="odd"), await insert(db, "q", kind="next")
        await until(waits_for_status(db, after, "completed"))
        await until(waits_for_status(db, odd, "dead"))
        assert daemon.worker.may_claim
        assert len(seen.all(events.JOB_STARTED)) == 2
    row = await db.fetchrow("SELECT attempts, failures, error, errors FROM pgworkd.jobs WHERE id = $1", odd)
    assert row is not None
    assert (row["attempts"], row["failures"]) == (1, 1)
    (entry,) = json.loads(row["errors"])
    assert entry["attempt"] == 1
    assert entry["worker"] == "test"
    return row


def cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
