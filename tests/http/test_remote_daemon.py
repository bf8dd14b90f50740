"""Daemons that work through a gateway: what is theirs alone. What they share with others: `test_remote_stories`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeAlias

import anyio
import asyncpg
import pytest

from pgworkd import App, Job, RetryAfter
from pgworkd.core import events
from tests.kits.daemon import cancel, insert, running, status, until, waits_for_status
from tests.kits.remote_daemon import remote_daemons

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")
Db: TypeAlias = "asyncpg.Connection[Any]"
LEASE = {"lease_s": 2.0, "heartbeat_s": 0.2}


@pytest.fixture(autouse=True)
async def url(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    async with remote_daemons(dsn, monkeypatch) as address:
        yield address


async def gone(db: Db, sql: str = "SELECT count(*) = 0 FROM pgworkd.workers WHERE kind = 'remote'") -> bool:
    return bool(await db.fetchval(sql))


async def test_it_is_a_worker_of_the_fleet_with_its_slots_and_signs_off(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("a", concurrency=3)
    async def a() -> None:
        return None

    @app.handler("b", concurrency=5)
    async def b() -> None:
        return None

    sql = """SELECT p.queue::text, p.concurrency FROM pgworkd.pools p JOIN pgworkd.workers w ON w.id = p.worker_id
             WHERE w.kind = 'remote' ORDER BY 1"""
    async with running(app, dsn) as (daemon, seen):
        assert [tuple(row) for row in await db.fetch(sql)] == [("a", 3), ("b", 5)]
        daemon.serve({"b": 7})
        await until(lambda: _rows(db, sql, [("b", 7)]))
        daemon.serve(None)
        await until(lambda: _rows(db, sql, [("a", 3), ("b", 5)]))
        for queue in "ab":
            await insert(db, queue)
        await seen.wait(events.JOB_COMPLETED, count=2)
    assert await gone(db)


async def _rows(db: Db, sql: str, wanted: list[Any]) -> bool:
    return [tuple(row) for row in await db.fetch(sql)] == wanted


async def test_payloads_results_and_facts_are_those_of_any_daemon(dsn: str, db: Db) -> None:
    app, got = App(), list[Job]()

    @app.handler("q", max_attempts=7)
    async def handle(payload: dict[str, Any], job: Job) -> Any:
        got.append(job)
        return payload

    payload = {"n": 12345678901234567890123, "f": 0.1, "text": "ü\u202e\U0001f600", "deep": {"a": [1, {"b": None}]}}
    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q", json.dumps(payload), priority=4)
        await seen.wait(events.JOB_COMPLETED)
    row = await db.fetchrow("SELECT * FROM pgworkd.finished_jobs WHERE id = $1", job_id)
    assert row is not None
    assert json.loads(row["result"]) == payload
    (job,) = got
    assert (job.id, job.queue, job.kind, job.attempt, job.failures, job.max_attempts) == (job_id, "q", "q", 1, 0, 7)
    assert job.payload == payload
    assert abs(job.created_at - row["created_at"]) < timedelta(milliseconds=1)


@pytest.mark.parametrize("max_attempts", [1, 2, 5])
async def test_max_attempts_of_the_code_are_in_force(dsn: str, db: Db, max_attempts: int) -> None:
    app = App()

    @app.handler("q", max_attempts=max_attempts, backoff=0.0)
    async def handle() -> None:
        raise RuntimeError("no")

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_DEAD, job_id=str(job_id))
    assert await db.fetchval("SELECT failures FROM pgworkd.jobs WHERE id = $1", job_id) == max_attempts


async def test_a_backoff_in_queues_overrides_the_codes_and_an_explicit_delay_does_not(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("q", backoff=3600.0)
    async def handle(payload: dict[str, Any]) -> None:
        if payload.get("after"):
            raise RetryAfter(500)
        raise RuntimeError("no")

    wait = "SELECT extract(epoch FROM run_at - pgworkd.clock())::float8 FROM pgworkd.jobs WHERE id = $1"
    async with running(app, dsn) as (daemon, seen):
        first = await insert(db, "q")
        await seen.wait(events.JOB_FAILED)
        assert await db.fetchval(wait, first) > 2000
        await db.execute("""SELECT pgworkd.set_queue('q', '{"backoff_s": 100, "backoff_factor": 1}')""")
        await until(lambda: daemon._queues.overrides.backoffs.get("q"))
        second, third = await insert(db, "q"), await insert(db, "q", '{"after": 1}')
        await seen.wait(events.JOB_FAILED, count=3)
        assert 60 < await db.fetchval(wait, second) < 140
        assert 440 < await db.fetchval(wait, third) < 560


async def test_a_cancel_arrives_at_once(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        await anyio.sleep_forever()

    async with running(app, dsn, heartbeat_s=0.9) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        await cancel(db, job_id)
        await seen.wait(events.JOB_CANCELLED)
    assert await status(db, job_id) == "cancelled"


async def test_progress_is_shown(dsn: str, db: Db) -> None:
    app, release = App(), anyio.Event()

    @app.handler("q")
    async def handle(job: Job) -> None:
        job.progress(0.25, "a quarter")
        await release.wait()

    async with running(app, dsn):
        await insert(db, "q")
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.progress WHERE message = 'a quarter'"))
        release.set()


async def test_a_long_run_keeps_its_lease_and_what_it_lists(dsn: str, db: Db) -> None:
    """Gateways give back what a worker does not list: a run longer than several beats must stay."""
    app = App()

    @app.handler("q")
    async def handle() -> None:
        await anyio.sleep(5)

    async with running(app, dsn, **LEASE) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED)
    assert await db.fetchval("SELECT attempts FROM pgworkd.finished_jobs WHERE id = $1", job_id) == 1


async def test_what_is_not_its_own_any_more_is_stopped_and_not_settled(dsn: str, db: Db) -> None:
    app, ended = App(), list[int]()

    @app.handler("q")
    async def handle(job: Job) -> None:
        if job.attempt == 1:
            with contextlib.suppress(asyncio.CancelledError):
                await anyio.sleep_forever()
            ended.append(job.attempt)

    async with running(app, dsn, heartbeat_s=0.2) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        taken = "status = 'pending', worker_id = NULL, started_at = NULL, run_at = now() + interval '1 h'"
        await db.execute(f"UPDATE pgworkd.jobs SET {taken} WHERE true")  # noqa: S608 - only a beat's answer tells
        await until(lambda: ended == [1])
        await db.execute("UPDATE pgworkd.jobs SET run_at = pgworkd.clock() WHERE true")
        await until(waits_for_status(db, job_id, "completed"))
    assert await db.fetchval("SELECT attempts FROM pgworkd.finished_jobs") == 2


async def test_a_locked_job_is_settled_when_it_is_free_and_holds_up_no_other(dsn: str, db: Db) -> None:
    app, release = App(), anyio.Event()

    @app.handler("q", concurrency=20)
    async def handle() -> None:
        await release.wait()

    other = await asyncpg.connect(dsn)
    try:
        async with running(app, dsn) as (_, seen):
            ids = [await insert(db, "q") for _ in range(10)]
            await seen.wait(events.JOB_STARTED, count=10)
            await other.execute("BEGIN")
            await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", ids[3])
            release.set()
            await seen.wait(events.JOB_COMPLETED, count=9)
            more = [await insert(db, "q") for _ in range(30)]
            await seen.wait(events.JOB_COMPLETED, count=39)
            assert await status(db, ids[3]) == "running"
            assert seen.all(events.JOB_STALE) == []
            await other.execute("COMMIT")
            await seen.wait(events.JOB_COMPLETED, count=40)
        assert [await status(db, job_id) for job_id in ids + more] == ["completed"] * 40
    finally:
        other.terminate()


async def test_a_result_that_cannot_be_stored_fails_its_job_alone(dsn: str, db: Db) -> None:
    """A number that takes a megabyte when Postgres prints it."""
    app, release = App(), anyio.Event()

    @app.handler("q", concurrency=20, max_attempts=1)
    async def handle(payload: dict[str, Any]) -> Any:
        await release.wait()
        return [1e308] * 7000 if payload.get("bad") else "fine"

    async with running(app, dsn) as (_, seen):
        ids = [await insert(db, "q", json.dumps({"bad": n == 4})) for n in range(10)]
        await seen.wait(events.JOB_STARTED, count=10)
        release.set()
        await seen.wait(events.JOB_DEAD)
        await seen.wait(events.JOB_COMPLETED, count=9)
    assert [await status(db, job_id) for job_id in ids] == ["completed"] * 4 + ["dead"] + ["completed"] * 5


async def test_a_payload_that_python_cannot_read_fails_its_job_alone(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("q", max_attempts=2, backoff=0.0)
    async def handle() -> None:
        return None

    ids = [await insert(db, "q", json.dumps({"n": 1})) for _ in range(4)]
    bad = await insert(db, "q", '{"n": ' + "9" * 5000 + "}")
    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_DEAD, job_id=str(bad))
        await seen.wait(events.JOB_COMPLETED, count=4)
    assert [await status(db, job_id) for job_id in [*ids, bad]] == ["completed"] * 4 + ["dead"]


async def test_a_stop_does_not_wait_for_its_claims(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    async with running(app, dsn, lease_s=60.0, heartbeat_s=20.0) as (daemon, seen):
        await until(lambda: db.fetchval("SELECT count(*) FROM pgworkd.pools WHERE queue = 'q' AND idle"))
        began = time.monotonic()
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED, exit_code=0)
        assert time.monotonic() - began < 5
    assert await gone(db)


@pytest.mark.parametrize("ask", ["quiet", "stop"])
async def test_an_operator_makes_it_quiet_or_stops_it(dsn: str, db: Db, ask: str) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    async with running(app, dsn) as (daemon, seen):
        worker = "SELECT pgworkd.ask_worker(id, $1) FROM pgworkd.workers WHERE kind = 'remote'"
        await db.fetch(worker, ask)
        await until(lambda: not daemon.worker.may_claim)
        if ask == "stop":
            await seen.wait(events.DAEMON_STOPPED, exit_code=0)
            return
        job_id = await insert(db, "q")
        await anyio.sleep(0.5)
        assert await status(db, job_id) == "pending"
        await db.fetch(worker, None)
        await until(waits_for_status(db, job_id, "completed"))


async def test_recurring_handlers_are_stored_and_run(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("tick", every=1.0, payload={"n": 1})
    async def tick(payload: dict[str, Any]) -> None:
        assert payload == {"n": 1}

    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, count=2)
    rows = await db.fetch("SELECT occurrence FROM pgworkd.finished_jobs ORDER BY occurrence")
    assert len({row["occurrence"] for row in rows}) == len(rows) >= 2


async def test_an_unknown_kind_is_given_back_with_a_reason(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q", kind="other")
        await seen.wait(events.JOB_RELEASED, job_id=str(job_id))
        row = await db.fetchrow("SELECT status::text, error, failures FROM pgworkd.jobs WHERE id = $1", job_id)
    assert row is not None
    assert tuple(row) == ("pending", "no handler for kind 'other'", 0)


async def test_a_transaction_says_that_there_is_no_database(dsn: str, db: Db) -> None:
    app = App()

    @app.handler("q", max_attempts=1)
    async def handle(job: Job) -> None:
        async with job.transaction():
            raise AssertionError

    async with running(app, dsn) as (_, seen):
        await insert(db, "q")
        assert "needs the database" in (await seen.wait(events.JOB_DEAD))["error"]
