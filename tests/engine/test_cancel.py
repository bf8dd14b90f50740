"""Operators cancel by SQL: waiting jobs, and running handlers that react in different ways."""

from __future__ import annotations

import json
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import PermanentError, Snooze
from tests.kits.apps import Gauge
from tests.kits.daemon import cancel, insert, running, status, until, waits_for_status


async def test_a_waiting_job_is_cancelled_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, gauge = App(), Gauge()

    @app.handler("q", concurrency=1)
    async def handle() -> None:
        await gauge()

    async with running(app, dsn) as (_, seen):
        first, second = await insert(db, "q"), await insert(db, "q")
        await gauge.shows(1)
        assert await cancel(db, second) == {second: "cancelled"}
        assert await status(db, second) == "cancelled"
        assert await cancel(db, second) == {}
        gauge.go_on.set()
        await until(waits_for_status(db, first, "completed"))
        assert len(seen.all(events.JOB_STARTED)) == 1


async def test_a_running_handler_is_cancelled_within_a_second(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, cleaned_up = App(), []

    @app.handler("q")
    async def handle() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cleaned_up.append(True)

    # The worker reacts to the NOTIFY without waiting for its next heartbeat.
    async with running(app, dsn, heartbeat_s=900.0, lease_s=3600.0) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        assert await cancel(db, job_id) == {job_id: "requested"}
        asked = anyio.current_time()
        await until(waits_for_status(db, job_id, "cancelled"))
        assert anyio.current_time() - asked < 1
        cancelled = await seen.wait(events.JOB_CANCELLED, job_id=str(job_id))
        assert cancelled["reason"] == "cancelled on request"
    assert cleaned_up == [True]
    row = await db.fetchrow("SELECT attempts, failures, error FROM pgworkd.finished_jobs")
    assert row is not None
    assert tuple(row) == (1, 0, "cancelled on request")


@pytest.mark.parametrize(
    ("ending", "final"),
    [
        ("returns", "cancelled"),
        ("is done", "completed"),
        ("raises", "cancelled"),
        ("snoozes", "cancelled"),
        ("gives up", "cancelled"),
    ],
)
async def test_a_handler_may_handle_its_cancellation(
    dsn: str, db: asyncpg.Connection[Any], ending: str, final: str
) -> None:
    app = App()

    @app.handler("q")
    async def handle(job: Job) -> str:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            if ending == "is done":
                job.done()
            if ending == "raises":
                raise ValueError("in the clean-up") from None
            if ending == "snoozes":
                raise Snooze(1) from None
            if ending == "gives up":
                raise PermanentError("no use") from None
        return "finished all the same"

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        await cancel(db, job_id)
        await until(waits_for_status(db, job_id, final), limit_s=4)


async def test_a_thread_asked_to_cancel_is_cancelled_unless_it_reports_completion(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q")
    def handle(payload: dict[str, Any], job: Job) -> str:
        assert job.stopping.wait(10)
        if payload["how"] == "raises":
            raise RuntimeError("stopped")
        if payload["how"] == "checks":
            job.check()
        if payload["how"] == "is done":
            job.done()
        return "came home"

    async with running(app, dsn) as (_, seen):
        hows = ("raises", "checks", "returns", "is done")
        ids = [await insert(db, "q", json.dumps({"how": how})) for how in hows]
        await seen.wait(events.JOB_STARTED, count=4)
        await cancel(db, *ids)
        for job_id, ending in zip(ids, ["cancelled"] * 3 + ["completed"], strict=True):
            await until(waits_for_status(db, job_id, ending), limit_s=4)


async def test_a_cancel_whose_notification_was_lost_arrives_with_a_heartbeat(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        await anyio.sleep_forever()

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        await db.execute("UPDATE pgworkd.jobs SET cancel_requested_at = now()")
        await until(waits_for_status(db, job_id, "cancelled"), limit_s=2)
