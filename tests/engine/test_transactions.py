"""job.transaction(): one per run, in the event loop of its handler; wrong use is refused at once and reported."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
import anyio.to_thread
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import LeaseLost, UsageError
from tests.kits.daemon import cancel, insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("each way in which a transaction of a job may end")


@pytest.fixture
async def notes(db: asyncpg.Connection[Any]) -> asyncpg.Connection[Any]:
    await db.execute("CREATE TABLE notes (n int)")
    return db


async def _second(job: Job) -> None:
    for n in range(3):
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO notes VALUES ($1)", n)


async def _nested(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
        async with job.transaction() as other:
            await other.execute("INSERT INTO notes VALUES (1)")


async def _side_by_side(job: Job) -> None:
    async def write(n: int) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO notes VALUES ($1)", n)
            await anyio.sleep(0.05)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(write, 0)
        tasks.start_soon(write, 1)


async def _fails_afterwards(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
    raise ValueError("after the block")


@pytest.mark.parametrize(
    ("handle", "ending", "written", "said"),
    [
        (_second, "completed", [0], "is completed by its job.transaction() already"),
        (_nested, "dead", [], "is in a job.transaction()"),
        (_side_by_side, "dead", [], "is in a job.transaction()"),
        (_fails_afterwards, "completed", [0], "ValueError: after the block"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_second_transaction_or_a_late_failure_is_reported(
    dsn: str, notes: asyncpg.Connection[Any], handle: Any, ending: str, written: list[int], said: str
) -> None:
    app = App()
    app.handler("q", max_attempts=1)(handle)
    async with running(app, dsn) as (_, seen):
        job_id = await insert(notes, "q")
        await until(waits_for_status(notes, job_id, ending))
        if ending == "completed":
            facts = await seen.wait(events.JOB_RAISED, job_id=str(job_id))
            assert said in facts["error"]
            assert f"in {handle.__name__}" in facts["exception"]
        else:
            assert said in await notes.fetchval("SELECT errors::text FROM pgworkd.jobs")
            assert seen.all(events.JOB_RAISED) == []
    assert [row[0] for row in await notes.fetch("SELECT n FROM notes ORDER BY n")] == written


@pytest.mark.fast
async def test_a_rolled_back_transaction_may_be_followed_by_another(dsn: str, notes: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", max_attempts=1)
    async def handle(job: Job) -> None:
        try:
            async with job.transaction() as connection:
                await connection.execute("INSERT INTO notes VALUES (0)")
                raise ValueError("no")
        except ValueError:
            async with job.transaction() as connection:
                await connection.execute("INSERT INTO notes VALUES (1)")

    async with running(app, dsn) as (_, seen):
        await until(waits_for_status(notes, await insert(notes, "q"), "completed"))
        assert seen.all(events.JOB_RAISED) == []
    assert [row[0] for row in await notes.fetch("SELECT n FROM notes")] == [1]


# Fewer connections than slots.


async def test_waiting_for_a_connection_is_no_failure_and_not_counted_as_runtime(
    dsn: str, notes: asyncpg.Connection[Any]
) -> None:
    """20 slots, 2 connections: the last run waits longer than the connect timeout and than its own timeout."""
    app, most, now = App(), 0, 0

    @app.handler("q", concurrency=20, max_attempts=1, timeout_s=1.5)
    async def handle(job: Job) -> None:
        nonlocal most, now
        async with job.transaction() as connection:
            now += 1
            most = max(most, now)
            await connection.execute("INSERT INTO notes VALUES (1)")
            await anyio.sleep(0.25)
            now -= 1

    connection = ConnectionOptions(dsn, connect_timeout_s=1, command_timeout_s=5)
    async with running(app, dsn, transactions_max=2, connection=connection) as (_, seen):
        await notes.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 20)")
        await until(lambda: notes.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status <> 'dead')"))
        assert seen.all(events.JOB_DEAD) == []
    assert await notes.fetchval("SELECT count(*) FROM notes") == 20
    assert most == 2


async def test_a_run_cancelled_while_waiting_for_a_connection_takes_none(
    dsn: str, notes: asyncpg.Connection[Any]
) -> None:
    app, go_on = App(), anyio.Event()

    @app.handler("q", concurrency=10)
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await go_on.wait()
            await connection.execute("INSERT INTO notes VALUES (1)")

    async with running(app, dsn, transactions_max=1) as (daemon, seen):
        ids = [await insert(notes, "q") for _ in range(4)]
        await seen.wait(events.JOB_STARTED, count=4)
        await until(lambda: any(held.in_transaction for held in daemon.in_flight))
        await cancel(notes, *ids[1:])
        for job_id in ids[1:]:
            await until(waits_for_status(notes, job_id, "cancelled"))
        go_on.set()
        await until(waits_for_status(notes, ids[0], "completed"))
        await until(waits_for_status(notes, await insert(notes, "q"), "completed"))


# Outside the event loop.


async def _open(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")


def _in_a_thread(job: Job) -> None:
    asyncio.run(_open(job))


async def _in_a_loop_of_a_thread(job: Job) -> None:
    await anyio.to_thread.run_sync(_in_a_thread, job)


def in_a_process(job: Job) -> None:
    asyncio.run(_open(job))


@pytest.mark.fast
@pytest.mark.parametrize("handle", [_in_a_thread, _in_a_loop_of_a_thread, in_a_process])
async def test_a_transaction_outside_the_event_loop_is_refused_at_once(
    dsn: str, notes: asyncpg.Connection[Any], handle: Any
) -> None:
    """It used to block all slots of other queues, whose transactions wait for the same connections."""
    app = App()
    options: dict[str, Any] = {"run_in": "process"} if handle is in_a_process else {}
    app.handler("odd", max_attempts=1, **options)(handle)
    app.handler("other", concurrency=20)(_open)
    async with running(app, dsn, transactions_max=2) as (_, _):
        odd = [await insert(notes, "odd") for _ in range(5)]
        await notes.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'other' FROM generate_series(1, 40)")
        for job_id in odd:
            await until(waits_for_status(notes, job_id, "dead"))
        await until(lambda: notes.fetchval("SELECT count(*) = 40 FROM notes"))
    errors = [row[0] for row in await notes.fetch("SELECT DISTINCT split_part(error, ' ', 1) FROM pgworkd.jobs")]
    assert errors == ["pgworkd.errors.UsageError:"]
    text = await notes.fetchval("SELECT error FROM pgworkd.jobs LIMIT 1")
    assert "on a connection of its own, idempotently" in text


async def test_a_job_that_no_daemon_runs_has_no_transaction() -> None:
    job = Job(
        id=None, queue="q", kind="q", attempt=1, failures=0, max_attempts=3, payload={}, created_at=None, run_at=None
    )  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="async def"):
        async with job.transaction():
            pass
    transaction: Any = job.transaction()
    with pytest.raises(UsageError, match="async def"), transaction:  # as a thread writes it
        pass
    job.opener = lambda _: contextlib.nullcontext()
    with pytest.raises(UsageError, match="write `async with job"), transaction:
        pass


@pytest.mark.parametrize("command", ["COMMIT", "ROLLBACK"])
async def test_a_transaction_ended_by_its_handler_completes_nothing(
    dsn: str, notes: asyncpg.Connection[Any], command: str
) -> None:
    app = App()

    @app.handler("q", max_attempts=1)
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO notes VALUES (1)")
            await connection.execute(command)

    async with running(app, dsn):
        job_id = await insert(notes, "q")
        await until(waits_for_status(notes, job_id, "dead"))
    assert "COMMIT or ROLLBACK" in await notes.fetchval("SELECT error FROM pgworkd.jobs")


@pytest.mark.fast
@pytest.mark.parametrize("deletes", [False, True])
async def test_a_lost_lease_caused_by_the_handler_itself_is_a_failure(
    dsn: str, notes: asyncpg.Connection[Any], deletes: bool
) -> None:
    """It raises LeaseLost, or deletes its own row so that we raise it, which rolls the deletion back."""
    app, runs = App(), list[int]()

    @app.handler("q", max_attempts=1)
    async def handle(job: Job) -> None:
        runs.append(job.attempt)
        async with job.transaction() as connection:
            if not deletes:
                raise LeaseLost("says the handler")
            await connection.execute("DELETE FROM pgworkd.jobs WHERE id = $1", job.id)

    async with running(app, dsn):
        job_id = await insert(notes, "q")
        await until(waits_for_status(notes, job_id, "dead"))
    assert runs == [1]
