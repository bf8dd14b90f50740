"""Operators use SQL: pause, resume, change concurrency; and malformed notifications."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life.daemon import Daemon
from tests.kits.apps import Gauge
from tests.kits.daemon import Recorder, insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("queues that drain, and daemons that stop")


async def test_running_jobs_of_a_paused_queue_continue(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, gauge = App(), Gauge()

    @app.handler("q", concurrency=2)
    async def handle() -> None:
        await gauge()

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q")
        await gauge.shows(1)
        await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', 'infinity')")
        await seen.wait(events.QUEUE_SETTINGS, paused=True)
        gauge.go_on.set()
        await until(waits_for_status(db, job_id, "completed"))


async def _set_concurrency(db: asyncpg.Connection[Any], concurrency: int | None, daemon: Daemon) -> None:
    await db.execute(
        "INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', $1) "
        "ON CONFLICT (name) DO UPDATE SET concurrency = excluded.concurrency",
        concurrency,
    )

    async def follows() -> bool:
        return daemon.pools["q"].concurrency == (concurrency or 2)

    await until(follows)


@pytest.mark.parametrize("to", [1, 3])
async def test_lower_concurrency_for_an_idle_pool_leaves_no_job_behind(
    dsn: str, db: asyncpg.Connection[Any], to: int
) -> None:
    """Five runners are idle when the limit falls: the one that is woken must not exit without starting the job."""
    app, gauge = App(), Gauge()

    @app.handler("q", concurrency=5)
    async def handle() -> None:
        await gauge()

    async with running(app, dsn) as (daemon, _):
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 5)")
        await gauge.shows(5)
        gauge.go_on.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        gauge.go_on, gauge.most = anyio.Event(), 0
        await _set_concurrency(db, to, daemon)
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 5)")
        await gauge.shows(to)
        gauge.go_on.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=4)
        assert gauge.most == to


async def test_constant_concurrency_changes_lose_no_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", concurrency=5)
    async def handle() -> None:
        await anyio.sleep(0.001)

    async with running(app, dsn, heartbeat_s=0.02) as (daemon, seen):
        inserted = 0
        for concurrency in (1, 20, 2, 1, 50, 3, 10, 1):
            await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 50)")
            inserted += 50
            await _set_concurrency(db, concurrency, daemon)
            await seen.wait(events.JOB_COMPLETED, count=inserted // 2)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=5)
        await seen.wait(events.JOB_COMPLETED, count=inserted)
        assert len(seen.all(events.JOB_COMPLETED)) == inserted


NOISE = [
    "",
    "hello",
    "null",
    "7",
    '"q"',
    "[]",
    "[" * 7000,
    "7" * 7000,
    '{"queue": 7}',
    '{"queue": ["q"]}',
    '{"queue": "no such queue"}',
    '{"worker": "1"}',
    '{"worker": true}',
    '{"worker": 1e400}',
    '{"worker": 99999999999999999999}',
    '{"schedules": "yes"}',
    '{"queue": "q", "more": {}}',
    '{"other": "\\ud800"}',
]


async def test_malformed_notifications_are_ignored(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, raised = App(), []

    @app.handler("q")
    async def handle() -> None:
        return None

    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with running(app, dsn) as (daemon, seen):
        for payload in NOISE:
            await db.execute("SELECT pg_notify('pgworkd', $1)", payload)
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert daemon.worker.may_claim
        assert _alarms(seen) == []
    assert raised == []


def _alarms(seen: Recorder) -> list[str]:
    return [
        name
        for name, _ in seen.seen
        if name in (events.DATABASE_UNAVAILABLE, events.LEASE_LOST, events.MAINTENANCE_FAILED)
    ]
