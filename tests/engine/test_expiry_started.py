"""A job expires unless its handler has been called by then: claimed, given back or lost with its worker, it has not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.database.store import Store
from tests.kits.daemon import daemon_of, insert, running, status, until, waits_for_status

SOON = "clock_timestamp() + interval '1 s'"


class Slot:
    """An application with one slot, that a first job keeps until `free` is set; quick jobs are claimed ahead for it."""

    def __init__(self) -> None:
        self.app, self.free, self.ran = App(), anyio.Event(), list[Any]()

        @self.app.handler("q", concurrency=1)
        async def handle(payload: dict[str, Any], job: Job) -> None:
            self.ran.append(job.id)
            if payload.get("waits"):
                await self.free.wait()


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """Another session."""
    connection = await asyncpg.connect(dsn)
    yield connection
    connection.terminate()


async def claimed_ahead(db: asyncpg.Connection[Any], slot: Slot, expires: str = SOON) -> Any:
    """A job that can expire, claimed while another one keeps the slot; its id."""
    for _ in range(300):  # quick ones, so that it is worth while to claim ahead
        await insert(db, "q")
    await insert(db, "q", '{"waits": true}')
    job_id = await expiring(db, expires)
    await until(lambda: status_is(db, job_id, "running"))
    return job_id


async def expiring(db: asyncpg.Connection[Any], expires: str = SOON, kind: str = "q") -> Any:
    """A job that expires then; its id."""
    sql = f"INSERT INTO pgworkd.jobs (queue, kind, expires_at) VALUES ('q', $1, {expires}) RETURNING id"  # noqa: S608
    return await db.fetchval(sql, kind)


async def status_is(db: asyncpg.Connection[Any], job_id: Any, wanted: str) -> bool:
    """True if that is its status now."""
    return await status(db, job_id) == wanted


async def passed(db: asyncpg.Connection[Any], job_id: Any) -> None:
    """Waits until its expires_at has passed."""
    await until(
        lambda: db.fetchval("SELECT expires_at < clock_timestamp() FROM pgworkd.all_jobs WHERE id = $1", job_id)
    )


@pytest.mark.parametrize("then", ["it waits for a slot", "the daemon stops", "the worker is lost"])
async def test_a_job_that_was_claimed_ahead_expires(dsn: str, db: asyncpg.Connection[Any], then: str) -> None:
    slot, ended = Slot(), list[str]()
    async with daemon_of(slot.app, dsn, ended, lease_s=3.0) as (daemon, seen):
        job_id = await claimed_ahead(db, slot)
        if then == "the worker is lost":
            await db.execute("UPDATE pgworkd.workers SET token = gen_random_uuid(), lease_until = clock_timestamp()")
        await passed(db, job_id)
        if then == "it waits for a slot":
            slot.free.set()
            await seen.wait(events.JOBS_EXPIRED, job_id=str(job_id))
        elif then == "the daemon stops":
            daemon.request_stop(now=True)
    async with running(slot.app, dsn):
        await until(waits_for_status(db, job_id, "expired"))
    assert job_id not in slot.ran


async def test_a_job_that_a_stop_gave_back_while_its_payload_was_read_expires(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read it says that it is about to begin; the handler was not called all the same."""
    slot, ended, read, go_on, payloads = Slot(), list[str](), anyio.Event(), anyio.Event(), Store.payloads

    async def slow(self: Store, ids: Any, *args: Any, **how: Any) -> Any:
        found = await payloads(self, ids, *args, **how)
        read.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(Store, "payloads", slow)
    async with daemon_of(slot.app, dsn, ended) as (daemon, seen):
        job_id = await expiring(db)
        await read.wait()
        daemon.request_stop(now=True)
        await seen.wait(events.DAEMON_STOPPING)
        go_on.set()
    await passed(db, job_id)
    async with running(slot.app, dsn):
        await until(waits_for_status(db, job_id, "expired"))
    assert slot.ran == []


async def test_a_job_of_a_kind_that_a_worker_does_not_know_expires(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    slot, read, payloads = Slot(), list[Any](), Store.payloads

    async def noted(self: Store, ids: Any, *args: Any, **how: Any) -> Any:
        read.extend(ids)
        return await payloads(self, ids, *args, **how)

    monkeypatch.setattr(Store, "payloads", noted)
    async with running(slot.app, dsn) as (_, seen):
        job_id = await expiring(db, kind="new")
        await seen.wait(events.JOB_RELEASED, job_id=str(job_id))
        await until(waits_for_status(db, job_id, "expired"))
    assert job_id not in read, "a job whose payload is read is about to begin"


async def test_a_job_that_has_begun_is_retried_after_its_expiry(
    dsn: str, db: asyncpg.Connection[Any], other: asyncpg.Connection[Any]
) -> None:
    app, runs = App(), list[int]()

    @app.handler("q", backoff=0.01)
    async def handle(job: Job) -> None:
        runs.append(job.attempt)
        if job.attempt == 1:
            await passed(other, job.id)
            raise RuntimeError("again")

    job_id = await expiring(db)
    async with running(app, dsn):
        await until(waits_for_status(db, job_id, "completed"))
    assert runs == [1, 2]


async def test_a_job_that_is_locked_when_it_is_to_begin_holds_up_no_other(
    dsn: str, db: asyncpg.Connection[Any], other: asyncpg.Connection[Any]
) -> None:
    slot = Slot()
    async with running(slot.app, dsn):
        locked = await claimed_ahead(db, slot, expires="'2150-01-01Z'")
        await other.execute("BEGIN")
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", locked)
        later = await expiring(db, "'2150-01-01Z'")
        slot.free.set()
        await until(waits_for_status(db, later, "completed"))
        assert locked not in slot.ran
        await other.execute("COMMIT")
        await until(waits_for_status(db, locked, "completed"))
    assert slot.ran.count(locked) == 1
