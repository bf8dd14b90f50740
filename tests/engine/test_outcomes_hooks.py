"""Whatever a hook does: it is only reported, and the daemon runs the next job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, DeadJob
from pgworkd.core import events
from tests.kits.apps import cancel_this_task
from tests.kits.daemon import insert, running, until, waits_for_status


class _Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("not even this")


@pytest.mark.parametrize(
    "make",
    [
        RuntimeError,
        SystemExit,
        KeyboardInterrupt,
        asyncio.CancelledError,
        _Unspeakable,
        lambda: BaseExceptionGroup("g", [SystemExit()]),
    ],
    ids=["error", "exit", "interrupt", "cancellation", "unspeakable", "group"],
)
async def test_an_exception_in_a_dead_hook_is_only_reported(
    dsn: str, db: asyncpg.Connection[Any], make: Callable[[], BaseException]
) -> None:
    app, told = App(), []

    @app.handler("q", max_attempts=1)
    async def handle(payload: dict[str, Any]) -> None:
        await anyio.sleep(0.001)
        if payload:
            raise ValueError("dead")

    @app.on_dead
    async def bad(_: DeadJob) -> None:
        raise make()

    @app.on_dead
    def good(dead: DeadJob) -> None:
        told.append(dead.id)

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q", '{"die": true}')
        failed = await seen.wait(events.HOOK_FAILED)
        assert "bad" in failed["hook"]
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert told == [str(job_id)]


@pytest.mark.parametrize("ending", ["returns", "raises", "waits"])
async def test_a_dead_hook_that_cancels_its_own_task_ends_only_itself(
    dsn: str, db: asyncpg.Connection[Any], ending: str
) -> None:
    app, called = App(), []

    @app.handler("q", max_attempts=1)
    async def handle(payload: dict[str, Any]) -> None:
        if payload:
            raise ValueError("dead")

    @app.on_dead
    async def odd(dead: DeadJob) -> None:
        called.append(dead.id)
        cancel_this_task()
        if ending == "raises":
            raise ValueError("and raises")
        if ending == "waits":
            await anyio.sleep(10)

    async with running(app, dsn) as (daemon, _):
        ids = [str(await insert(db, "q", '{"die": true}')) for _ in range(2)]
        await until(lambda: sorted(called) == ids, limit_s=4)
        await until(waits_for_status(db, await insert(db, "q"), "completed"), limit_s=4)
        assert daemon.worker.may_claim
