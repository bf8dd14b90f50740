"""Apps whose handlers are watched: they wait until they may go on, or one of them is odd among ordinary ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any
from uuid import UUID, uuid4

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.core.claims import ClaimedJob
from pgworkd.engine.attempts import Attempt
from pgworkd.engine.claim import pool
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.registry import Handler
from tests.kits.daemon import Recorder, cancel, insert, running, until, waits_for_status


def app_of_one() -> App:
    """One queue, `q`, whose jobs do nothing."""
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    return app


def registered(function: Callable[..., Any], **options: Any) -> Handler:
    """The function as a handler."""
    app = App()
    assert app.handler("k", **options)(function) is function, "the decorator leaves the function alone"
    assert app.handlers.keys() == {"k"}
    return app.handlers["k"]


# Handlers that wait


class Gauge:
    """The number of concurrent handlers: current and maximum."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.go_on = anyio.Event()

    async def __call__(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.go_on.wait()
        finally:
            self.now -= 1

    async def shows(self, count: int) -> None:
        async def fact() -> bool:
            return self.now == count

        await until(fact, limit_s=4)


class Sleepers:
    """Handlers that wait, and the outcome of each (job, attempt)."""

    def __init__(self) -> None:
        self.app = App()
        self.began: dict[tuple[UUID, int], float] = {}
        self.ended: dict[tuple[UUID, int], float] = {}
        self.returned: set[tuple[UUID, int]] = set()
        self.go_on = anyio.Event()
        self.together: Counter[UUID] = Counter()
        self.twice = 0

        @self.app.handler("q")
        async def handle(job: Job) -> None:
            run = (job.id, job.attempt)
            self.began[run] = time.monotonic()
            self.together[job.id] += 1
            self.twice += self.together[job.id] > 1
            try:
                await self.go_on.wait()
                self.returned.add(run)
            finally:
                self.together[job.id] -= 1
                self.ended[run] = time.monotonic()


# A queue whose jobs are quick and then suddenly block, so that prefetched jobs can be observed

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


# One odd job, and ordinary ones in the same slot

Handle = Callable[[], Awaitable[Any]]
FOLLOWING = 20

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


def this_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class Ordinary:
    """A queue with one slot, an odd kind of job, and an ordinary kind that checks the state of its task."""

    def __init__(self, handle: Callable[..., Awaitable[Any]], **options: Any) -> None:
        self.app = App()
        self.odd_tasks: list[asyncio.Task[Any]] = []
        self.tasks: list[asyncio.Task[Any]] = []

        async def odd(job: Job) -> Any:
            self.odd_tasks.append(this_task())
            return await handle()

        self.app.handler("odd", queue="q", concurrency=1, max_attempts=1, **options)(odd)
        self.app.handler("ordinary", queue="q", max_attempts=1)(self._handle)

    async def _handle(self) -> str:
        self.tasks.append(this_task())
        assert this_task().cancelling() == 0
        assert anyio.current_effective_deadline() == math.inf
        assert tenant.get() == "nobody"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 0)
        await anyio.sleep(0.001)
        return "fine"


async def run_ordinary(db: asyncpg.Connection[Any], count: int) -> None:
    """Inserts `count` ordinary jobs at once; each must complete."""
    ids = await db.fetch(
        "INSERT INTO pgworkd.jobs (queue, kind) SELECT 'q', 'ordinary' FROM generate_series(1, $1) RETURNING id", count
    )
    completed = "SELECT count(*) = $2 FROM pgworkd.finished_jobs WHERE id = ANY ($1) AND result = '\"fine\"'"
    await until(lambda: db.fetchval(completed, [row[0] for row in ids], count), limit_s=4)


def tasks_now() -> int:
    return len(asyncio.all_tasks())


async def outlived(
    dsn: str,
    db: asyncpg.Connection[Any],
    ordinary: Ordinary,
    ending: str,
    *,
    cancelled: bool = False,
    kept: bool | None = None,
    **columns: Any,
) -> str | None:
    """An odd job, then many ordinary ones; the error of the odd one. `kept`: whether its task runs them as well."""
    async with running(ordinary.app, dsn, shutdown_s=0.5, cancel_grace_s=0.2) as (daemon, seen):
        await run_ordinary(db, 2)
        before = tasks_now()
        odd = await insert(db, "q", kind="odd", **columns)
        if cancelled:
            await seen.wait(events.JOB_STARTED, job_id=str(odd))
            await cancel(db, odd)
        await until(waits_for_status(db, odd, ending), limit_s=3)
        ordinary.tasks.clear()
        await run_ordinary(db, FOLLOWING)
        assert daemon.worker.may_claim
        assert len(set(ordinary.tasks)) == 1, "ordinary jobs leave their task clean"
        assert kept is None or (ordinary.odd_tasks[0] in ordinary.tasks) is kept
        await until(lambda: tasks_now() <= before, limit_s=1)
        error = await db.fetchval("SELECT error FROM pgworkd.all_jobs WHERE id = $1", odd)
    return None if error is None else str(error)


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
    this_task().cancel()


# Attempts without an app


def claimed(job_id: UUID, attempt: int = 1) -> ClaimedJob:
    """A row as the claim returns it; only id and attempt matter here."""
    return ClaimedJob(
        id=job_id,
        kind="k",
        payload="{}",
        attempt=attempt,
        failures=0,
        max_attempts=3,
        timeout_s=None,
        priority=0,
        losses=0,
        run_at=0.0,
        created_at=0.0,
        schedule=None,
        occurrence=None,
        meta=None,
    )


def attempt_of(attempt: int = 1, job_id: UUID | None = None) -> Attempt:
    """An attempt that has not started."""
    return Attempt(claimed(job_id or uuid4(), attempt), "q")
