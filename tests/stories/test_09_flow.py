"""Flow control in a shop: events of an account in order (serialize_key), a failed job that does not block its key
(on_retry), a partner's API with a concurrency and a rate limit, and tenants of very different size (fair)."""

from __future__ import annotations

import random
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.client import enqueue
from tests.kits.daemon import running, until
from tests.kits.flow import most_in_window

pytestmark = pytest.mark.slow("limits of a fleet, watched while hundreds of jobs run")

ALL_OVER = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"
STARTS = "SELECT started_at FROM pgworkd.finished_jobs WHERE queue = $1"
ACCOUNTS = [f"account {number}" for number in range(6)]


async def test_a_serialize_key_runs_the_events_of_an_account_one_at_a_time_in_order(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Three daemons, handlers of random duration, one event that fails at first: accounts get their events in order."""
    await db.execute("CREATE TABLE accounts (name text PRIMARY KEY, events int[] NOT NULL DEFAULT '{}')")
    await db.execute("INSERT INTO accounts (name) SELECT unnest($1::text[])", ACCOUNTS)
    busy: set[str] = set()

    def app() -> App:
        app = App()

        @app.handler("events", concurrency=8, backoff=0.05)
        async def apply(payload: dict[str, Any], job: Job) -> None:
            account, number = payload["account"], payload["number"]
            assert account not in busy, "two at once"
            busy.add(account)
            try:
                await anyio.sleep(random.random() * 0.004)  # noqa: S311 - any will do
                if (account, number, job.attempt) == (ACCOUNTS[0], 5, 1):
                    raise ConnectionError("the ledger is away")
                async with job.transaction() as connection:
                    await connection.execute(
                        "UPDATE accounts SET events = events || $2::int WHERE name = $1", account, number
                    )
            finally:
                busy.discard(account)

        return app

    async with running(app(), dsn), running(app(), dsn), running(app(), dsn):
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, serialize_key, payload)"
            " SELECT 'events', a, jsonb_build_object('account', a, 'number', n)"
            " FROM generate_series(1, 25) n, unnest($1::text[]) a ORDER BY n",
            ACCOUNTS,
        )
        await until(lambda: db.fetchval(ALL_OVER))
    assert [row["events"] for row in await db.fetch("SELECT events FROM accounts")] == [list(range(1, 26))] * 6


@pytest.mark.fast
async def test_with_on_retry_yield_a_failed_job_lets_the_next_of_its_key_run(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Still one at a time, but the failed job gives up its place: its retry runs after the jobs already due."""
    app, sent = App(), []

    @app.handler("parcels", concurrency=8, backoff=0.2)
    async def send(payload: dict[str, Any], job: Job) -> None:
        if (payload["number"], job.attempt) == (1, 1):
            raise ConnectionError("the door is locked")
        sent.append(payload["number"])

    for number in (1, 2, 3):
        await enqueue(db, "parcels", {"number": number}, serialize_key="customer 7", on_retry="yield")
    async with running(app, dsn):
        await until(lambda: db.fetchval(ALL_OVER))
    assert sent == [2, 3, 1]


@pytest.mark.fast
async def test_a_queue_runs_at_most_five_at_once_and_twenty_per_second(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Two daemons with twenty slots each, limited as a fleet by one row in `queues`; an UPDATE raises the limit."""
    await db.execute("INSERT INTO pgworkd.queues (name, max_running, rate, rate_period_s) VALUES ('partner', 5, 20, 1)")
    now = most = 0

    def app() -> App:
        app = App()

        @app.handler("partner", concurrency=20)
        async def call() -> None:
            nonlocal now, most
            now, most = now + 1, max(most, now + 1)
            await anyio.sleep(0.03)
            now -= 1

        return app

    calls = "INSERT INTO pgworkd.jobs (queue) SELECT 'partner' FROM generate_series(1, $1::int)"
    async with running(app(), dsn), running(app(), dsn):
        await db.execute(calls, 30)
        await until(lambda: db.fetchval(ALL_OVER))
        starts = [row["started_at"] for row in await db.fetch(STARTS, "partner")]
        for window_s in (0.2, 1.0):
            assert most_in_window(starts, window_s) <= 2 + 20 * window_s
        assert (max(starts) - min(starts)).total_seconds() < (30 - 2) / 20 * 1.3, "and it gets what it allows"
        # The partner has more capacity now: an UPDATE raises the limit, without a restart.
        await db.execute("UPDATE pgworkd.queues SET rate = 2000, rate_burst = 100 WHERE name = 'partner'")
        await db.execute(calls, 60)
        await until(lambda: db.fetchval(ALL_OVER), limit_s=2)
    assert most == 5


@pytest.mark.fast
async def test_a_big_tenant_does_not_starve_a_small_one(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A fair queue: ten jobs of a small tenant do not wait for the thousand of a big one that were enqueued first."""
    await db.execute("INSERT INTO pgworkd.queues (name, fair) VALUES ('reports', true)")
    app, done = App(), []

    @app.handler("reports", concurrency=4)
    async def report(payload: dict[str, Any]) -> None:
        await anyio.sleep(0.001)
        done.append(payload["tenant"])

    reports = """INSERT INTO pgworkd.jobs (queue, limit_key, payload)
        SELECT 'reports', $1::text, jsonb_build_object('tenant', $1::text) FROM generate_series(1, $2::int)"""
    await db.execute(reports, "big", 1000)
    await db.execute(reports, "small", 10)
    async with running(app, dsn):
        await until(lambda: db.fetchval(ALL_OVER))
    last_of_small = max(place for place, tenant in enumerate(done) if tenant == "small")
    assert len(done) == 1010
    assert last_of_small < 100
