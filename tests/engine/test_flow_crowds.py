"""A job with many dependents: settling it stays quick, the dependents follow page by page."""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life import maintenance
from pgworkd.errors import PermanentError
from tests.kits.batches import counts_of, crowd, effects, exact
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("thousands of dependents")

MANY = 5_000


def _app(go_on: anyio.Event) -> App:
    app = App()

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> None:
        await go_on.wait()
        if payload.get("dies"):
            raise PermanentError("as asked")

    @app.handler("other")
    async def other() -> None:
        return None

    return app


@pytest.mark.parametrize("daemons", [1, 2])
@pytest.mark.parametrize(("payload", "reached"), [("{}", ("wait", "cancel", "run")), ('{"dies": true}', ("run",))])
async def test_all_dependents_of_a_job_follow_their_own_rule(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, payload: str, reached: Any, daemons: int
) -> None:
    """The queue keeps no history, and maintenance runs continuously."""
    monkeypatch.setattr(maintenance, "EFFECTS_MAX", 100)
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    first = await insert(db, "q", payload)
    for rule in ("wait", "cancel", "run"):
        await crowd(db, first, count=MANY // 3, queue=rule, on_failed=rule)
    go_on = anyio.Event()
    async with contextlib.AsyncExitStack() as stack:
        seen = [(await stack.enter_async_context(running(_app(go_on), dsn)))[1] for _ in range(daemons)]
        go_on.set()
        for rule, at_last in (("wait", "blocked"), ("cancel", "cancelled"), ("run", "pending")):
            expected = {"pending" if rule in reached else at_last: MANY // 3}
            await until(lambda rule=rule, expected=expected: _are(db, rule, expected))
        await until(lambda: _nothing_deferred(db))
        await until(waits_for_status(db, await insert(db, "other"), "completed"))
        for recorder in seen:
            assert recorder.all(events.DATABASE_UNAVAILABLE) + recorder.all(events.MAINTENANCE_FAILED) == []
    await exact(db)


async def test_the_next_page_of_dependents_is_processed_at_once(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a retry after a lock takes a minute, and a poll without a notification an hour."""
    monkeypatch.setattr(maintenance, "EFFECTS_MAX", 100)
    monkeypatch.setattr(maintenance, "AGAIN_FIRST_S", 60.0)
    monkeypatch.setattr(maintenance, "AGAIN_CAP_S", 60.0)
    first = await insert(db, "q")
    await crowd(db, first, count=MANY)
    go_on = anyio.Event()
    go_on.set()
    async with running(_app(go_on), dsn, periods=maintenance.Periods(expire_s=3600)):
        await until(lambda: _are(db, "then", {"pending": MANY}))
        await until(lambda: _nothing_deferred(db))
    await exact(db)


async def _are(db: asyncpg.Connection[Any], queue: str, expected: dict[str, int]) -> bool:
    return await counts_of(db, queue) == expected


async def _nothing_deferred(db: asyncpg.Connection[Any]) -> bool:
    return await effects(db) == 0
