"""The end of a shutdown: what the daemon leaves to others, and what it reports."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.heartbeat_store import HeartbeatStore
from pgworkd.database.store import Store
from pgworkd.errors import OutcomeUnknown
from tests.kits.daemon import insert, running, status, until
from tests.kits.proxy import Proxy

STRAY = """INSERT INTO pgworkd.jobs (queue, status, worker_id, attempts, started_at)
    VALUES ('elsewhere', 'running', $1, 1, pgworkd.clock())"""
"""A job that runs under the name of a worker that does not know it."""


def app_of_one() -> App:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        await anyio.sleep_forever()

    return app


async def test_jobs_claimed_only_in_the_database_are_released_at_a_stop(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The response of a claim was lost: otherwise the job would wait for the lease to expire and count as lost."""
    async with running(app_of_one(), dsn) as (daemon, seen):
        await db.execute(STRAY, daemon.worker_id)
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
        assert seen.all(events.ORPHANS_RELEASED) == [{"count": 1}]
    rows = await db.fetch("SELECT status, losses, failures FROM pgworkd.jobs")
    assert [tuple(row) for row in rows] == [("pending", 0, 0)]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0


async def test_a_sign_off_whose_response_is_lost_is_retried(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, sign_off = 0, Store.sign_off

    async def lost_at_first(self: Store, worker_id: int) -> bool:
        nonlocal calls
        calls += 1
        signed_off = await sign_off(self, worker_id)
        if calls == 1:
            raise OutcomeUnknown("no answer")
        return signed_off

    monkeypatch.setattr(Store, "sign_off", lost_at_first)
    async with running(app_of_one(), dsn) as (daemon, seen):
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert calls == 2
    assert seen.all(events.SHUTDOWN_INCOMPLETE) == []


async def test_a_lost_worker_with_no_jobs_exits_with_0(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its jobs have been rescued by others: nothing is left behind."""

    async def unanswered(*_: Any) -> bool:
        raise OutcomeUnknown("no answer")

    async with running(app_of_one(), dsn) as (daemon, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        monkeypatch.setattr(HeartbeatStore, "heartbeat", unanswered)  # so that it does not notice
        await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
        await db.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL, started_at = NULL")
        daemon.request_stop(now=True)
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert await status(db, job_id) == "pending"


async def test_a_stopping_daemon_does_not_register_again(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Its jobs under the old id are stale, and it will claim nothing under a new one."""
    app, release = App(), anyio.Event()

    @app.handler("q")
    async def handle() -> None:
        with anyio.CancelScope(shield=True):
            await release.wait()

    async with running(app, dsn) as (daemon, seen):
        await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPING)
        await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
        await db.execute("UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL, started_at = NULL")
        await seen.wait(events.LEASE_LOST)
        release.set()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert await db.fetch("SELECT lost_at IS NULL FROM pgworkd.workers") == [(False,)]


async def test_a_stop_without_a_database_response_is_reported_and_exits_with_1(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgworkd.engine.life.shutdown.FLUSH_GRACE_S", 0.3)
    async with Proxy(dsn) as proxy:
        connection = ConnectionOptions(proxy.dsn, connect_timeout_s=0.2, command_timeout_s=0.2)
        async with running(app_of_one(), proxy.dsn, connection=connection) as (daemon, seen):
            proxy.mode = "refuse"
            proxy.cut()
            daemon.request_stop()
            await seen.wait(events.DAEMON_STOPPED, exit_code=1)
            said = seen.all(events.SHUTDOWN_INCOMPLETE)
    assert len(said) == 1
    assert said[0]["reason"].startswith("could not sign off: no connection to the database")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 1


async def test_a_stop_that_leaves_running_jobs_is_reported_and_exits_with_1(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: Any) -> list[Any]:
        return []

    async with running(app_of_one(), dsn) as (daemon, seen):
        monkeypatch.setattr(daemon._store, "running_of", nothing)
        await db.execute(STRAY, daemon.worker_id)
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=1)
        assert seen.all(events.SHUTDOWN_INCOMPLETE) == [
            {"reason": "its jobs stay running in the database until its lease expires, and are rescued then"}
        ]
    await until(lambda: db.fetchval("SELECT count(*) = 1 FROM pgworkd.jobs WHERE status = 'running'"))
