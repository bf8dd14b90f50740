"""A claim that is slow or waits for a lock delays only its own queue."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.database import claim_connections
from pgworkd.database.claim_connections import CONNECTIONS_MAX, ClaimConnections
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import OutcomeUnknown
from tests.kits.daemon import Recorder, insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("claims that are given up, and orphans")

WITHIN_S = 1.0
JOBS = 10
"""Of the queue that is not slow, one after another."""
_CLAIMING = """SELECT count(*) FROM pg_stat_activity
    WHERE application_name = 'pgworkd claim' AND datname = current_database()"""
_WAITING = f"{_CLAIMING} AND wait_event_type = 'Lock'"
_CUT = _CLAIMING.replace("count(*)", "count(pg_terminate_backend(pid))")
LIMITED = "INSERT INTO pgworkd.queues (name, max_running) VALUES ($1, 5)"
RATED = "INSERT INTO pgworkd.queues (name, rate, rate_period_s) VALUES ($1, 1000, 1)"
HELD = {
    "the lock of a limited queue": (LIMITED, "SELECT pgworkd.lock_queue($1)"),
    "the row of its rate": (RATED, "SELECT FROM pgworkd.rates WHERE queue = $1 FOR UPDATE"),
}


def app_of(*queues: str) -> App:
    app = App()

    async def handle() -> None:
        return None

    for queue in queues:
        app.handler(queue, concurrency=3)(handle)
    return app


@contextlib.asynccontextmanager
async def holding(dsn: str, sql: str, *queues: str) -> AsyncIterator[None]:
    """An open transaction of another session that has executed `sql` for each of these queues."""
    holder = await asyncpg.connect(dsn)
    await holder.execute("BEGIN")
    try:
        for queue in queues:
            await holder.execute(sql, queue)
        yield
    finally:
        await holder.execute("ROLLBACK")
        await holder.close()


async def run_one_by_one(db: asyncpg.Connection[Any], seen: Recorder, queue: str) -> None:
    for _ in range(JOBS):
        job = await insert(db, queue)
        with anyio.fail_after(WITHIN_S):
            await seen.wait(events.JOB_STARTED, job_id=str(job))


@pytest.mark.parametrize("held", HELD)
async def test_a_claim_that_waits_for_a_lock_delays_no_other_queue(
    dsn: str, db: asyncpg.Connection[Any], held: str
) -> None:
    prepare, lock = HELD[held]
    await db.execute(prepare, "slow")
    async with running(app_of("slow", "other"), dsn) as (_, seen):
        await until(waits_for_status(db, await insert(db, "slow"), "completed"))
        async with holding(dsn, lock, "slow"):
            late = await insert(db, "slow")
            await until(lambda: db.fetchval(_WAITING))
            await run_one_by_one(db, seen, "other")
            assert await db.fetchval(_WAITING) == 1, "all of them have run while the claim was waiting"
            due = await insert(db, "other", run_at=await db.fetchval("SELECT now() + interval '0.3 s'"))
            with anyio.fail_after(0.3 + WITHIN_S):
                await seen.wait(events.JOB_STARTED, job_id=str(due))
        await until(waits_for_status(db, late, "completed"))
    assert seen.all(events.DATABASE_UNAVAILABLE) == []
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.all_jobs") == 1


async def test_slow_claims_get_connections_of_their_own_that_close_when_idle(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_connections, "IDLE_S", 0.5)
    slow = [f"slow {n}" for n in range(CONNECTIONS_MAX - 1)]
    await db.executemany(LIMITED, [(queue,) for queue in slow])
    async with running(app_of("other", *slow), dsn) as (_, seen):
        async with holding(dsn, "SELECT pgworkd.lock_queue($1)", *slow):
            late = [await insert(db, queue) for queue in slow]
            await until(lambda: db.fetchval(f"SELECT ({_WAITING}) = $1", len(slow)))
            await run_one_by_one(db, seen, "other")
            assert await db.fetchval(_CLAIMING) == CONNECTIONS_MAX
        for job in late:
            await until(waits_for_status(db, job, "completed"))
        await until(lambda: db.fetchval(f"SELECT ({_CLAIMING}) = 1"))
        await run_one_by_one(db, seen, "other")
        async with holding(dsn, "SELECT pgworkd.lock_queue($1)", slow[0]):
            await insert(db, slow[0])
            await until(lambda: db.fetchval(_WAITING))
            await run_one_by_one(db, seen, "other")
    assert seen.all(events.DATABASE_UNAVAILABLE) == []


async def test_a_daemon_of_one_queue_uses_one_connection_for_claims(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute(LIMITED, "q")
    async with running(app_of("q"), dsn) as (daemon, seen):
        async with holding(dsn, "SELECT pgworkd.lock_queue($1)", "q"):
            late = await insert(db, "q")
            await until(lambda: db.fetchval(_WAITING))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(daemon._store.next_due, ["q"], [None], [[0]])
                with anyio.move_on_after(5 * claim_connections.SLOW_S):  # long enough for a second one to be opened
                    await until(lambda: db.fetchval(f"SELECT ({_CLAIMING}) > 1"))
                    raise AssertionError("a second connection")
                tasks.cancel_scope.cancel()
        await seen.wait(events.JOB_COMPLETED, job_id=str(late))


async def test_slow_claims_that_are_cut_off_lose_no_job_and_run_none_twice(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    slow = ["slow 1", "slow 2"]
    await db.executemany(LIMITED, [(queue,) for queue in slow])
    async with running(app_of("other", *slow), dsn) as (_, seen):
        async with holding(dsn, "SELECT pgworkd.lock_queue($1)", *slow):
            late = [await insert(db, queue) for queue in slow]
            for _ in range(2):
                await until(lambda: db.fetchval(f"SELECT ({_WAITING}) = 2"))
                await db.execute(_CUT)
                await run_one_by_one(db, seen, "other")
        for job in late:
            await until(waits_for_status(db, job, "completed"))
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.all_jobs") == 1


async def test_jobs_of_a_claim_whose_response_was_lost_are_released(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []
    take = ClaimConnections._take

    async def take_and_lose_an_answer(self: ClaimConnections) -> Any:
        connection = await take(self)
        if connection is not self._all[0]:

            async def fetch(sql: str, *args: object) -> Any:
                rows = await type(connection).fetch(connection, sql, *args)
                if lost or not any(row[0] for row in rows) or "claim" not in sql:
                    return rows
                lost.extend(str(row[0]) for row in rows)
                raise OutcomeUnknown("cut")

            monkeypatch.setattr(connection, "fetch", fetch)
        return connection

    monkeypatch.setattr(ClaimConnections, "_take", take_and_lose_an_answer)
    await db.execute(LIMITED, "slow")
    connection = ConnectionOptions(dsn, command_timeout_s=0.5)
    async with running(app_of("slow", "other"), dsn, connection=connection) as (_, seen):
        async with holding(dsn, "SELECT pgworkd.lock_queue($1)", "slow"):
            await insert(db, "slow")
            while not lost:
                await until(lambda: db.fetchval(_WAITING))
                await until(waits_for_status(db, await insert(db, "other"), "completed"))
        await seen.wait(events.ORPHANS_RELEASED)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
    rows = await db.fetch("SELECT id, attempts, failures FROM pgworkd.all_jobs WHERE attempts > 1")
    assert [(str(row["id"]), row["attempts"], row["failures"]) for row in rows] == [(job, 2, 0) for job in lost]
