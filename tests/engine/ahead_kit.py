"""A queue whose jobs are quick and then suddenly block, so that prefetched jobs can be observed."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.engine.claim import pool
from pgworkd.engine.life.daemon import Daemon
from tests.engine.test_control import Gauge
from tests.kits.daemon import Recorder, running, until

QUICK = 1500
"""Enough of them for a daemon to learn how quick they are."""

_FILL = """INSERT INTO pgworkd.jobs (queue, run_at, payload)
    SELECT 'q', now() - interval '2 s', '{}'::jsonb FROM generate_series(1, $1::int)
    UNION ALL SELECT 'q', now() - interval '1 s', '{"wait": true}' FROM generate_series(1, $2::int)"""
_QUICK_OVER = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE payload = '{}')"
RUNNING = "SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'"


class Waiters:
    """An app with one queue, `q`: jobs return at once or, if their payload asks for it, when they are released."""

    def __init__(self, concurrency: int, quick_s: float | None = None) -> None:
        """`quick_s`: the duration of quick jobs; None: they return without an await."""
        self.app = App()
        self.gauge = Gauge()
        self.began: Counter[Any] = Counter()
        self.returned: Counter[Any] = Counter()

        @self.app.handler("q", concurrency=concurrency)
        async def handle(payload: dict[str, Any], job: Job) -> None:
            self.began[job.id] += 1
            if payload:
                await self.gauge()
            elif quick_s is not None:
                await anyio.sleep(quick_s)
            self.returned[job.id] += 1


def never_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetched jobs are kept, however long they wait."""
    monkeypatch.setattr(pool, "STALL_S", 60.0)


def stalls_now(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on prefetched jobs wait no longer than in production."""
    monkeypatch.setattr(pool, "STALL_S", 0.05)
    queue = daemon.pools["q"]
    queue._begun, queue._begun_at = queue._executor.begun, anyio.current_time()
    queue.claim_soon()


async def fill(db: asyncpg.Connection[Any], quick: int, waiting: int) -> None:
    """Quick jobs, followed by jobs that block."""
    await db.execute(_FILL, quick, waiting)


async def settled_in(db: asyncpg.Connection[Any], daemon: Daemon) -> int:
    """Waits until the quick jobs are finished and no claim is in progress; the number of running rows."""
    await until(lambda: db.fetchval(_QUICK_OVER), limit_s=4)
    queue, rows = daemon.pools["q"], list[int]()

    async def steady() -> bool:
        if queue._claiming:
            rows.clear()
        rows.append(await db.fetchval(RUNNING))
        if queue._claiming:
            rows.clear()
        return len(rows) > 3 and len(set(rows[-4:])) == 1

    await until(steady, limit_s=2)
    return rows[-1]


@contextlib.asynccontextmanager
async def claimed_ahead(
    waiters: Waiters, dsn: str, db: asyncpg.Connection[Any], *, waiting: int = 1000, **changes: Any
) -> AsyncIterator[tuple[Daemon, Recorder, int]]:
    """A daemon whose slots are all taken by blocked jobs, and how many jobs it has prefetched.

    The test has to patch `STALL_S`, or they are released before it can check.
    """
    await fill(db, QUICK, waiting)
    concurrency = waiters.app.slots(None)["q"]
    async with running(waiters.app, dsn, **{"shutdown_s": 0.5} | changes) as (daemon, seen):
        await waiters.gauge.shows(concurrency)
        ahead = await settled_in(db, daemon) - concurrency
        assert ahead > 0, "nothing was claimed ahead"
        assert daemon.running == concurrency
        yield daemon, seen, ahead


async def set_concurrency(db: asyncpg.Connection[Any], concurrency: int, daemon: Daemon) -> None:
    """Writes to the table like an operator; returns when the change has taken effect in the daemon."""
    await db.execute(
        "INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', $1) "
        "ON CONFLICT (name) DO UPDATE SET concurrency = excluded.concurrency",
        concurrency,
    )

    async def follows() -> bool:
        return daemon.pools["q"].concurrency == concurrency

    await until(follows)
