"""Settings changed on running daemons: a failing queue is paused, throttled and resumed, and the settings survive a
restart; a queue is added to a running daemon and removed again."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import asyncpg

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from tests.kits.daemon import insert, running, status, until, waits_for_status

RUNNING = "SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'"


class Downstream:
    """The service that the jobs call: down at first; afterwards it counts the calls in progress, and their peak."""

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


async def test_a_failing_queue_is_paused_throttled_and_resumed_without_a_restart(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Both running daemons apply a pause, a lower concurrency and a longer backoff; all survive a restart."""
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

        # Every call fails, and each failure counts against max_attempts: pause the queue.
        await admin.queues.pause("embedding")
        for seen in both:
            await seen.wait(events.QUEUE_SETTINGS, paused=True)
        await until(lambda: db.fetchval(f"SELECT ({RUNNING}) = 0"))
        failures = await db.fetchval("SELECT sum(failures) FROM pgworkd.jobs")

        # The service is back with less capacity: at most two calls from each daemon, and a longer backoff.
        service.broken = False
        await admin.queues.set("embedding", {"concurrency": 2, "backoff_s": 60})
        for seen in both:
            await seen.wait(events.QUEUE_SETTINGS, concurrency=2, paused=True)
        assert await db.fetchval("SELECT sum(failures) FROM pgworkd.jobs") == failures, "nobody called in the pause"
        await admin.queues.resume("embedding")
        await until(lambda: _calls(service, 4))

    # Both daemons have restarted, as for a deploy: running jobs were released, and the row in `queues` still applies.
    service.most = service.calls = 0
    async with running(app, dsn) as (_, one), running(app, dsn) as (_, two):
        await until(lambda: _calls(service, 4))
        service.open.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        for seen in (one, two):
            assert seen.all(events.QUEUE_SETTINGS)[0]["changed"] == {"concurrency": 2, "backoff_s": 60}
    assert service.most == 4
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed'") == 60


async def test_a_running_daemon_adds_and_removes_a_queue(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """One night of reindexing: the queue is added and removed without a restart, and no job in flight is lost."""
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
