"""Where a running attempt is: asked by SQL, answered by its worker, whatever keeps the handler busy."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import asyncpg
import psycopg
import pytest

from pgworkd import App
from pgworkd.admin import Admin
from pgworkd.admin.stacks import Stack
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life import stack_answers
from pgworkd.engine.run import child_stacks
from pgworkd.errors import NoStack
from tests.kits.daemon import insert, running, status, until, waits_for_status

SECRET = "s3cr3t-value"
HEARD = {"heartbeat_s": 900.0, "lease_s": 3600.0}
"""So that what is answered soon was not answered by the next heartbeat."""


def line_of(function: Callable[..., Any], text: str) -> int:
    """The line in this file, within that function, which has this text."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    first = function.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines, 1) if number > first and text in line)


async def asked(dsn: str, job_id: UUID) -> Stack:
    """Asks, and returns the answer."""
    async with Admin(ConnectionOptions(dsn, by="ada")) as admin:
        await admin.jobs.ask_stack(job_id)

        async def answered() -> Stack | None:
            found = await admin.jobs.stack(job_id)
            return found if found is not None and found.stack is not None else None

        return await until(answered)


async def deep(password: str, gate: anyio.Event) -> None:
    await gate.wait()  # here it waits


async def test_a_coroutine_is_told_with_all_that_it_awaits(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, gate = App(), anyio.Event()

    @app.handler("q", concurrency=3)
    async def handle(payload: dict[str, str]) -> None:
        await deep(payload["password"], gate)

    async with running(app, dsn, **HEARD) as (_, seen):
        await insert(db, "q")  # it stands in the same line of the same code
        job_id = await insert(db, "q", json.dumps({"password": SECRET}))
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        found = await asked(dsn, job_id)
        gate.set()
    stack = found.stack or ""
    assert re.match(r"running for \d+\.\d s, in the event loop, waiting:\n", stack)
    at = stack.index(f'"{__file__}", line {line_of(deep, "here it waits")}, in deep')
    assert stack.index(", in handle\n") < at < stack.index(" in wait\n"), "outermost first"
    assert "await gate.wait()" in stack
    assert "/pgworkd/engine/" not in stack, "it begins with the handler"
    assert SECRET not in stack
    assert (found.attempt, found.worker, found.asked_by, found.running) == (1, "test", "ada", True)


async def test_tasks_that_a_handler_has_started_are_told_too(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, gate, other = App(), anyio.Event(), anyio.Event()

    async def child() -> None:
        await gate.wait()

    @app.handler("q")
    async def handle() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(stack_answers.TASKS_MAX + 2):
                tasks.create_task(child())

    @app.handler("others")
    async def beside() -> None:
        await other.wait()

    async with running(app, dsn, **HEARD) as (_, seen):
        await insert(db, "others")
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED, count=2)
        stack = (await asked(dsn, job_id)).stack or ""
        gate.set()
        other.set()
    assert stack.count("in a task that it has started, waiting:\n") == stack.count(", in child\n") == 10
    assert stack.endswith("and in 2 more tasks\n")
    assert ", in beside\n" not in stack


@pytest.mark.parametrize("how", ["loops", "sleeps"])
async def test_a_handler_that_blocks_the_loop_is_told(dsn: str, db: asyncpg.Connection[Any], how: str) -> None:
    app, told, gate = App(), list[str](), anyio.Event()
    over, blocks = threading.Event(), threading.Event()

    @app.handler("waits")
    async def waits() -> None:
        await gate.wait()

    @app.handler("q")
    async def handle() -> None:
        blocks.set()
        spin()

    def spin() -> None:
        while not over.is_set():  # for ever
            if how == "sleeps":
                over.wait(0.01)

    def asks(*ids: UUID) -> None:
        """Asks from a thread: the loop of this test is the one that is blocked."""
        with psycopg.connect(dsn, autocommit=True) as connection:
            blocks.wait(10)
            time.sleep(1.5)  # until the watch knows
            for job_id in ids:
                connection.execute("SELECT pgworkd.ask_stack(%s)", [job_id])
            for job_id in ids:
                found, until_s = None, time.monotonic() + 15
                while found is None and time.monotonic() < until_s:
                    row = connection.execute(
                        "SELECT stack FROM pgworkd.stack_requests WHERE job_id = %s", [job_id]
                    ).fetchone()
                    found = row and row[0]
                    time.sleep(0.02)
                told.append(found or "nothing")
        over.set()

    async with running(app, dsn, heartbeat_s=0.2, loop_limit_s=0.0) as (_, seen):
        waiting = await insert(db, "waits")
        await seen.wait(events.JOB_STARTED)
        job_id = await db.fetchval("SELECT pgworkd.new_id()")
        thread = threading.Thread(target=asks, args=(job_id, waiting))
        thread.start()
        await insert(db, "q", id=job_id)
        await until(waits_for_status(db, job_id, "completed"))
        gate.set()
        await anyio.to_thread.run_sync(thread.join)
    stack, beside = told
    assert re.match(
        r"running for \d\.\d s, in the event loop, running now, which it has blocked for \d\.\d s:\n", stack
    )
    assert f'"{__file__}", line ' in stack
    assert stack.index(", in handle\n") < stack.index(", in spin\n")
    assert "/pgworkd/engine/" not in stack
    assert "in the event loop, waiting:\n" in beside
    assert ", in waits\n" in beside
    assert re.search(r"the event loop has been blocked for \d\.\d s by a job of kind 'q' in queue 'q'\n$", beside)


async def test_a_handler_in_a_thread_is_told(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, over = App(), threading.Event()

    @app.handler("q")
    def handle() -> None:
        asyncio.run(inner())

    async def inner() -> None:
        while not over.is_set():  # blocks a loop of its own
            pass

    async with running(app, dsn, **HEARD) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        stack = (await asked(dsn, job_id)).stack or ""
        over.set()
    assert re.match(
        r"running for \d+\.\d s, in a thread:\n  File \"[^\"]+test_stacks\.py\", line \d+, in handle\n", stack
    )
    assert stack.index(", in handle\n") < stack.index(", in inner\n")


# At the top level of a module: the child imports them from here.


def spins(payload: dict[str, str]) -> None:
    Path(payload["began"]).touch()
    while not Path(payload["over"]).exists():
        pass


def holds_the_lock(payload: dict[str, str]) -> None:
    Path(payload["began"]).touch()
    re.match(r"(a+)+$", "a" * 80 + "b")  # for ever, and lets no other thread run


@pytest.mark.slow("processes of their own")
async def test_a_handler_in_a_process_is_told(dsn: str, db: asyncpg.Connection[Any], tmp_path: Path) -> None:
    app, began, over = App(), tmp_path / "began", tmp_path / "over"
    payload = {"began": str(began), "over": str(over), "password": SECRET}
    app.handler("q", run_in="process")(spins)
    async with running(app, dsn, **HEARD) as (_, seen):
        for turn in (1, 2):  # the second is run by the same process
            job_id = await insert(db, "q", json.dumps(payload))
            await until(began.exists)
            stack = (await asked(dsn, job_id)).stack or ""
            over.touch()
            await seen.wait(events.JOB_COMPLETED, count=turn)
            began.unlink()
            over.unlink()
            head = r"running for \d+\.\d s, in process \d+:\n  File \"[^\"]+test_stacks\.py\", line \d+, in spins\n"
            assert re.match(head, stack), stack
            assert SECRET not in stack


@pytest.mark.slow("processes of their own")
async def test_a_process_without_the_interpreter_lock_does_not_answer(
    dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_stacks, "LIMIT_S", 0.3)
    app, began = App(), tmp_path / "began"
    app.handler("q", run_in="process")(holds_the_lock)
    async with running(app, dsn, **HEARD, shutdown_s=0.1) as (_, seen):
        job_id = await insert(db, "q", json.dumps({"began": str(began)}))
        await until(began.exists)
        stack = (await asked(dsn, job_id)).stack or ""
        await db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", job_id)
        await seen.wait(events.JOB_CANCELLED)
    assert "it does not answer within 0.3 s" in stack
    assert "interpreter lock" in stack


async def test_a_worker_may_tell_nothing(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, gate = App(), anyio.Event()

    @app.handler("q")
    async def handle() -> None:
        await gate.wait()

    async with running(app, dsn, **HEARD, stacks=False) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        assert (await asked(dsn, job_id)).stack == stack_answers.OFF
        gate.set()


async def test_only_a_job_that_runs_has_a_stack(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, gate = App(), anyio.Event()

    @app.handler("q")
    async def handle() -> None:
        await gate.wait()

    async with running(app, dsn, queues={"q": 1}) as (_, seen), Admin(ConnectionOptions(dsn)) as admin:
        waiting, unknown = await insert(db, "elsewhere"), UUID(int=7)
        for job_id, is_ in ((waiting, "pending"), (unknown, "unknown")):
            with pytest.raises(NoStack, match=f"job {job_id} is {is_}: only a running job has a stack"):
                await admin.jobs.ask_stack(job_id)
            assert await admin.jobs.stack(job_id) is None
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        gate.set()
        await until(waits_for_status(db, job_id, "completed"))
        with pytest.raises(NoStack, match=f"job {job_id} is completed"):
            await admin.jobs.ask_stack(job_id)


async def test_who_asks_is_told_that_the_job_has_ended_meanwhile(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The request comes after the worker has settled the attempt, as it does if that ends just before the heartbeat."""
    app, gate = App(), anyio.Event()

    @app.handler("q")
    async def handle() -> None:
        await gate.wait()

    async with running(app, dsn, heartbeat_s=0.2) as (daemon, seen), Admin(ConnectionOptions(dsn)) as admin:
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        daemon.in_flight.remove([attempt := next(iter(daemon.in_flight))])
        assert (await asked(dsn, job_id)).stack == "it has ended: its outcome is stored, or about to be\n"
        daemon.in_flight.add([attempt])
        gate.set()
        await until(waits_for_status(db, job_id, "completed"))
        found = await admin.jobs.stack(job_id)
        assert found is not None
        assert not found.running
        assert not found.awaited


async def test_what_goes_wrong_is_the_answer_and_the_lease_goes_on(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, gate = App(), anyio.Event()
    release = threading.Event()

    @app.handler("q")
    async def handle() -> None:
        await gate.wait()

    def raises(*_: Any) -> str:
        raise RuntimeError("no such luck")

    def hangs(*_: Any) -> str:
        release.wait(20)
        return "late"

    monkeypatch.setattr(stack_answers, "LIMIT_S", 0.5)
    async with running(app, dsn, heartbeat_s=0.2) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED)
        monkeypatch.setattr(stack_answers, "steps_of", raises)
        assert (await asked(dsn, job_id)).stack == "not found: RuntimeError: no such luck\n"
        monkeypatch.setattr(stack_answers, "steps_of", hangs)
        before = await db.fetchval("SELECT seen_at FROM pgworkd.workers")
        found = await asked(dsn, job_id)
        assert found.stack is not None
        assert found.stack.startswith("not found within 0.5 s")
        assert await db.fetchval("SELECT seen_at > $1 FROM pgworkd.workers", before)
        assert seen.all(events.LEASE_FENCED) == []
        release.set()
        gate.set()
    assert await status(db, job_id) == "completed"
