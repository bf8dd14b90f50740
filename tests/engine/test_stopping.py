"""How a run is asked to stop, what it may still do, and what its return value means then."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.core.job import Reason
from pgworkd.engine.life.daemon import Daemon
from tests.kits.daemon import cancel, insert, running, status, until, waits_for_status

pytestmark = pytest.mark.slow("stops, with a daemon for each")

REASONS = ["timeout", "cancel", "stop", "fence"]
ENDINGS = {"timeout": "dead", "cancel": "cancelled", "stop": "pending", "fence": "pending"}
"""The status of a job with one failure that is ended for this reason."""


async def end_by(reason: str, daemon: Daemon, db: asyncpg.Connection[Any], job_id: Any) -> None:
    """Asks the run of that job to stop; a timeout comes by itself."""
    if reason == "cancel":
        await cancel(db, job_id)
    elif reason == "stop":
        daemon.request_stop(now=True)
    elif reason == "fence":
        daemon.request_stop()  # otherwise it would be claimed again
        daemon.in_flight.stop_all(Reason.FENCE)


@pytest.fixture(autouse=True)
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In production threads are checked every 0.5 s."""
    monkeypatch.setattr("pgworkd.engine.settle.job_events.CHECK_S", 0.02)


class _Resource:
    """A resource whose cleanup awaits."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *error: object) -> None:
        await anyio.sleep(0.05)
        self.steps.append("exit")


@pytest.mark.parametrize("reason", REASONS)
async def test_awaits_in_finally_and_aexit_are_not_interrupted(
    dsn: str, db: asyncpg.Connection[Any], reason: str
) -> None:
    app, steps = App(), list[str]()

    @app.handler("q", max_attempts=2, backoff=3600)
    async def handle() -> None:
        async with _Resource(steps), contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(anyio.sleep, 0.01)
            try:
                await anyio.sleep_forever()
            finally:
                for step in range(3):
                    await anyio.sleep(0.02)
                    steps.append(f"finally {step}")

    async with running(app, dsn, cancel_grace_s=5) as (daemon, seen):
        job_id = await insert(db, "q", **({"timeout_s": 0.1} if reason == "timeout" else {}))
        await seen.wait(events.JOB_STARTED)
        await end_by(reason, daemon, db, job_id)
        await until(waits_for_status(db, job_id, {**ENDINGS, "timeout": "failed"}[reason]))
    assert steps == ["finally 0", "finally 1", "finally 2", "exit"]


@pytest.mark.fast
@pytest.mark.parametrize("reason", ["timeout", "cancel", "stop"])
async def test_a_cleanup_beyond_its_grace_is_interrupted(dsn: str, db: asyncpg.Connection[Any], reason: str) -> None:
    app, cut = App(), list[str]()

    @app.handler("q", max_attempts=1)
    async def handle(job: Job) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                cut.append("cut")
                raise

    async with running(app, dsn, cancel_grace_s=0.1, end_process=pytest.fail) as (daemon, seen):
        job_id = await insert(db, "q", **({"timeout_s": 0.05} if reason == "timeout" else {}))
        await seen.wait(events.JOB_STARTED)
        await end_by(reason, daemon, db, job_id)
        await until(waits_for_status(db, job_id, {**ENDINGS, "stop": "dead"}[reason]), limit_s=3)
    assert cut == ["cut"]


async def test_a_handler_that_swallows_cancellations_fails_and_burns_no_cpu(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app, let_go, swallowed = App(), anyio.Event(), 0

    @app.handler("q", max_attempts=1, timeout_s=0.05)
    async def handle() -> str:
        nonlocal swallowed
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                swallowed += 1
        return "as if nothing had happened"

    async with running(app, dsn, cancel_grace_s=0.1) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        await until(lambda: swallowed >= 2)
        began_s, began_cpu_s, began_at = time.monotonic(), time.process_time(), swallowed
        await anyio.sleep(0.5)
        took_s = time.monotonic() - began_s
        assert swallowed - began_at <= 2 + took_s / 0.1
        assert time.process_time() - began_cpu_s < 0.6 * took_s
        assert await status(db, job_id) == "running"
        let_go.set()
        await until(waits_for_status(db, job_id, "dead"))
    assert await db.fetchval("SELECT error FROM pgworkd.jobs") == "Timeout: no result within 0.05 s"


@pytest.mark.fast
async def test_a_shielded_step_finishes_before_the_cancellation(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, steps = App(), list[str]()

    @app.handler("q", max_attempts=1)
    async def handle() -> None:
        with anyio.CancelScope(shield=True):
            for step in range(5):
                await anyio.sleep(0.02)
                steps.append(str(step))
        await anyio.sleep_forever()

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        await cancel(db, job_id)
        await until(waits_for_status(db, job_id, "cancelled"))
    assert steps == ["0", "1", "2", "3", "4"]


# What a return means.


@pytest.mark.parametrize("how", ["thread", "loop"])
@pytest.mark.parametrize("says", ["nothing", "done", "done with a result", "done, and is cut off"])
@pytest.mark.parametrize("reason", REASONS)
async def test_a_return_after_a_stop_request_completes_only_if_declared(
    dsn: str, db: asyncpg.Connection[Any], reason: str, says: str, how: str
) -> None:
    app = App()

    def say(job: Job) -> str | None:
        if says != "nothing":
            job.done("said" if says == "done with a result" else None)
        if says == "done, and is cut off":
            job.check()
        return None if says == "done with a result" else "returned"

    async def in_loop(job: Job) -> str | None:
        with contextlib.suppress(asyncio.CancelledError):
            await anyio.sleep_forever()
        return say(job)

    def in_thread(job: Job) -> str | None:
        assert job.stopping.wait(10)
        return say(job)

    app.handler("q", max_attempts=3, backoff=3600)(in_loop if how == "loop" else in_thread)
    async with running(app, dsn) as (daemon, seen):
        job_id = await insert(db, "q", **({"timeout_s": 0.05} if reason == "timeout" else {}))
        await seen.wait(events.JOB_STARTED)
        await end_by(reason, daemon, db, job_id)
        ending = {**ENDINGS, "timeout": "failed"}[reason] if says == "nothing" else "completed"
        await until(waits_for_status(db, job_id, ending))
    if says != "nothing":
        result = {"done": '"returned"', "done with a result": '"said"', "done, and is cut off": None}[says]
        assert await db.fetchval("SELECT result::text FROM pgworkd.finished_jobs") == result


async def test_the_return_of_a_thread_without_a_job_argument_counts(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, entered, go_on = App(), threading.Event(), threading.Event()

    @app.handler("q")
    def handle() -> str:
        entered.set()
        assert go_on.wait(10)
        return "all of it"

    async with running(app, dsn, cancel_grace_s=5) as (daemon, seen):
        job_id = await insert(db, "q")
        await until(entered.is_set)
        daemon.request_stop(now=True)
        await until(lambda: all(held.reason for held in daemon.in_flight))
        go_on.set()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
    assert await status(db, job_id) == "completed"


async def test_a_coroutine_that_returns_before_its_cancellation_has_completed(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Its awaited event came in the same iteration of the event loop as the stop."""
    app, came = App(), anyio.Event()

    @app.handler("q")
    async def handle() -> str:
        await came.wait()
        return "all of it"

    async with running(app, dsn) as (daemon, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        await anyio.sleep(0.02)
        came.set()
        daemon.in_flight.stop_all(Reason.CANCEL)
        await until(waits_for_status(db, job_id, "completed"), limit_s=3)


async def test_check_does_nothing_before_a_stop_is_requested(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q")
    async def handle(job: Job) -> str:
        job.check()
        await anyio.to_thread.run_sync(job.check)
        return "fine"

    async with running(app, dsn):
        await until(waits_for_status(db, await insert(db, "q"), "completed"))


# At most once.


@pytest.mark.parametrize("how", ["loop", "thread", "process"])
@pytest.mark.parametrize("reason", ["stop", "fence"])
async def test_at_most_once_jobs_end_dead_if_started_and_are_released_if_not(
    dsn: str, db: asyncpg.Connection[Any], reason: str, how: str
) -> None:
    app, began = App(), list[Any]()

    async def charge(job: Job) -> None:
        began.append(job.id)
        await anyio.sleep_forever()

    def charge_in_thread(job: Job) -> None:
        began.append(job.id)
        assert job.stopping.wait(10)

    options: dict[str, Any] = {"run_in": "process"} if how == "process" else {}
    handle = {"loop": charge, "thread": charge_in_thread, "process": sleep_in_process}[how]
    app.handler("q", concurrency=1, max_attempts=1, **options)(handle)
    async with running(app, dsn) as (daemon, seen):
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 3)")
        started = await seen.wait(events.JOB_STARTED)
        await until(lambda: daemon.running == 1)
        if how != "process":
            await until(lambda: began)
        await end_by(reason, daemon, db, None)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status = 'running')"))
        dead = await seen.wait(events.JOB_DEAD)
    rows = await db.fetch("SELECT id::text, status::text, failures, error FROM pgworkd.jobs ORDER BY status <> 'dead'")
    text = {"stop": "the daemon stops", "fence": "the worker could not renew its lease"}[reason]
    error = f"Stopped: {text}; the job has begun and may run only once (max_attempts is 1)"
    assert tuple(rows[0]) == (started["job_id"], "dead", 1, error)
    assert dead["job_id"] == started["job_id"]
    assert [tuple(row)[1:] for row in rows[1:]] == [("pending", 0, None)] * 2
    assert len(seen.all(events.JOB_STARTED)) == 1


def sleep_in_process() -> None:
    time.sleep(30)
