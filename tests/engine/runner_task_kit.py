"""One odd job followed by many ordinary ones in the same slot, each of which checks the state of its task."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.words import events
from tests.engine.test_cancel import cancel
from tests.kits.daemon import insert, running, until, waits_for_status

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
