"""A queue in trouble: it is paused while both its daemons run, goes on with less, and stays so after a restart. And one
that a running daemon takes on for a while."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import asyncpg

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.database.connection import ConnectionOptions
from pgworkd.words import events
from tests.kit import insert, running, status, until, waits_for_status

RUNNING = "SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'"


class Downstream:
    """The service that the jobs call. It is broken at first; then it stands so many calls at once."""

    def __init__(self) -> None:
        self.broken = True
        self.calls = self.most = 0
        self.open = anyio.Event()

    async def call(self) -> None:
        if self.broken:
            raise ConnectionError("the service is down")
        self.calls += 1
        self.most = max(self.most, self.calls)
        await self.open.wait()
        self.calls -= 1


async def test_a_queue_in_trouble_is_paused_lowered_and_resumed(dsn: str, db: asyncpg.Connection[Any]) -> None:
    service = Downstream()
    app = App()

    @app.handler("embedding", concurrency=10, max_attempts=100, backoff=0.01)
    async def embed() -> None:
        await service.call()

    async with contextlib.AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Admin(ConnectionOptions(dsn)))
        both = [(await stack.enter_async_context(running(app, dsn, shutdown_s=0)))[1] for _ in range(2)]
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'embedding' FROM generate_series(1, 60)")
        for seen in both:
            await seen.wait(events.JOB_FAILED)

        # Every call fails, and each failure spends a job's budget: nobody must call any more.
        await admin.queues.pause("embedding")
        for seen in both:
            await seen.wait(events.QUEUE_SETTINGS, paused=True)
        await until(lambda: db.fetchval(f"SELECT ({RUNNING}) = 0"))
        failures = await db.fetchval("SELECT sum(failures) FROM pgworkd.jobs")

        # The service comes back, weaker: two calls from each daemon are what it stands; who fails now waits longer.
        service.broken = False
        await admin.queues.set("embedding", {"concurrency": 2, "backoff_s": 60})
        for seen in both:
            await seen.wait(events.QUEUE_SETTINGS, concurrency=2, paused=True)
        assert await db.fetchval("SELECT sum(failures) FROM pgworkd.jobs") == failures, "nobody called in the pause"
        await admin.queues.resume("embedding")
        await until(lambda: _calls(service, 4))

    # Both daemons have been stopped, for a new release, say: what was running went back. The row still holds.
    service.most = service.calls = 0
    async with running(app, dsn) as (_, one), running(app, dsn) as (_, two):
        await until(lambda: _calls(service, 4))
        service.open.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        for seen in (one, two):
            assert seen.all(events.QUEUE_SETTINGS)[0]["changed"] == {"concurrency": 2, "backoff_s": 60}
    assert service.most == 4
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed'") == 60


async def test_a_daemon_takes_on_another_queue_and_gives_one_up(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """For a night of reindexing, say: without a restart, and without losing what was in its hands."""
    app, indexed = App(), []

    @app.handler("embedding", concurrency=2)
    async def embed() -> None: ...

    @app.handler("reindex", concurrency=2)
    async def reindex(payload: dict[str, Any]) -> None:
        indexed.append(payload["page"])

    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'reindex', jsonb_build_object('page', n)"
        " FROM generate_series(1, 20) n"
    )
    async with running(app, dsn, queues={"embedding": None}) as (daemon, _):
        await until(waits_for_status(db, await insert(db, "embedding"), "completed"))
        assert indexed == [], "nobody serves that queue"
        daemon.add_queue("reindex", 5)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        await daemon.remove_queue("reindex")
        late = await insert(db, "reindex", '{"page": 21}')
        await until(waits_for_status(db, await insert(db, "embedding"), "completed"))
        assert await status(db, late) == "pending"
    assert sorted(indexed) == list(range(1, 21))


async def _calls(service: Downstream, count: int) -> bool:
    return service.calls == count
