"""Serialize keys with several daemons: one job at a time, in order, without delay, even if a daemon dies."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from tests.kits import process
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.flow import Log, all_finished, fill, fleet

pytestmark = pytest.mark.slow("limits of a fleet, watched while hundreds of jobs run")

LEASE = {"lease_s": 1.0, "heartbeat_s": 0.2}


def _in_order(log: Log, key: str, count: int) -> None:
    runs = log.of(key)
    assert [run.number for run in runs] == list(range(1, count + 1))
    for run, following in pairwise(runs):
        assert run.ended <= following.began, "two at once"


@pytest.mark.parametrize("daemons", ["a", "abc"])
async def test_the_next_job_of_a_key_starts_at_once(dsn: str, db: asyncpg.Connection[Any], daemons: str) -> None:
    """Without a poll in between: a single one would take longer."""
    log = Log()
    async with fleet(log, dsn, daemons, poll_s=5.0):
        await fill(db, 50, "serialize_key", "k")
        await all_finished(db)
    _in_order(log, "k", 50)
    assert log.took() < 5


async def test_jobs_skipped_because_of_a_lock_are_unblocked_by_maintenance(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    log = Log()
    go_on = anyio.Event()
    app = App()

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> None:
        if payload["n"] == 1:
            await go_on.wait()
        log.runs.append(payload["n"])

    async with running(app, dsn):
        await fill(db, 3, "serialize_key", "k")
        await until(lambda: db.fetchval("SELECT count(*) = 2 FROM pgworkd.jobs WHERE status = 'blocked'"))
        async with db.transaction():
            await db.execute("SELECT FROM pgworkd.jobs WHERE status = 'blocked' FOR UPDATE")
            go_on.set()
            await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.finished_jobs"))
        await all_finished(db)
    assert log.runs == [1, 2, 3]


async def test_the_keys_of_a_killed_daemon_continue_in_order(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute(process.TABLES)
    app, ran = App(), []

    @app.handler("work", concurrency=100)
    async def work(payload: dict[str, Any], job: Job) -> None:
        ran.append((payload["key"], payload["n"], job.attempt))
        await anyio.sleep(0.002)

    keys = "abcd"
    ids = [
        await insert(db, "work", json.dumps({"key": key, "n": n, "gate": "never"}), serialize_key=key)
        for n in range(1, 5)
        for key in keys
    ]
    with process.daemon_process(dsn, **LEASE) as first:
        await until(lambda: db.fetchval("SELECT count(*) = 4 FROM runs"))
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == 4
        async with running(app, dsn, **LEASE) as (_, seen):
            first.kill()
            first.wait()
            await seen.wait(events.JOB_LOST, count=4)
            for job_id in ids:
                await until(waits_for_status(db, job_id, "completed"))
    for key in keys:
        assert [run[1:] for run in ran if run[0] == key] == [(1, 2), (2, 1), (3, 1), (4, 1)]
    assert await db.fetchval("SELECT count(*) FROM runs") == 4, "the first daemon began nothing more"
