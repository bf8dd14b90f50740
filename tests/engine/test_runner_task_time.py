"""Tasks that run one job after another: late timeouts and cancellations, and user code around the call."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import asyncpg
import pytest
from pydantic import BaseModel, field_validator

from pgworkd import App
from pgworkd.core import events
from pgworkd.errors import Snooze
from tests.kits.apps import Ordinary, cancel_this_task, outlived, run_ordinary, tasks_now, tenant, this_task
from tests.kits.daemon import insert, running, until, waits_for_status

pytestmark = pytest.mark.slow("time-outs and grace periods, each in each mode")

# A timeout applies to one job only.


async def _returns() -> None:
    await anyio.lowlevel.checkpoint()


async def _raises() -> None:
    await anyio.lowlevel.checkpoint()
    raise ValueError("no")


async def _returns_at_once() -> None:
    return None


@pytest.mark.parametrize("set_by", ["the row", "the handler"])
@pytest.mark.parametrize(
    ("handle", "ending"), [(_returns, "completed"), (_raises, "dead"), (_returns_at_once, "completed")]
)
async def test_a_deadline_applies_to_its_own_job_only(
    dsn: str, db: asyncpg.Connection[Any], handle: Any, ending: str, set_by: str
) -> None:
    """Twenty jobs of a millisecond run in the same task until long after the deadline."""
    ordinary = Ordinary(handle, **({"timeout_s": 0.02} if set_by == "the handler" else {}))
    await outlived(dsn, db, ordinary, ending, kept=True, **({"timeout_s": 0.02} if set_by == "the row" else {}))


async def test_a_job_that_snoozes_before_its_deadline_leaves_none_behind(dsn: str, db: asyncpg.Connection[Any]) -> None:
    snoozed = 0

    async def handle() -> None:
        nonlocal snoozed
        snoozed += 1
        if snoozed < 5:
            raise Snooze(0.01)

    await outlived(dsn, db, Ordinary(handle), "completed", kept=True, timeout_s=0.03)
    assert snoozed == 5


async def test_each_of_many_jobs_in_one_task_has_its_own_deadline(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Neither that of the previous job nor that of the next."""
    app = App()
    left: list[float] = []

    @app.handler("q", concurrency=1, timeout_s=100)
    async def handle() -> None:
        left.append(anyio.current_effective_deadline() - anyio.current_time())

    wanted = [1000, 10, None, 1000, None, 10]
    async with running(app, dsn):
        for timeout_s in wanted:
            await until(waits_for_status(db, await insert(db, "q", timeout_s=timeout_s), "completed"))
    assert [round(s) for s in left] == [s or 100 for s in wanted]


# A timeout exactly while the handler finishes.


def _at_its_deadline(offset_s: float) -> Callable[[], Any]:
    """Its awaited event comes `offset_s` after the timeout, and one iteration of the event loop sees both."""

    async def handle() -> None:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[None] = loop.create_future()
        deadline = anyio.current_effective_deadline()
        loop.call_at(deadline + offset_s, lambda: came.done() or came.set_result(None))
        time.sleep(max(0.0, deadline + 0.01 - loop.time()))  # noqa: ASYNC251 - nothing is scheduled until both are due
        await came

    return handle


@pytest.mark.parametrize(
    ("offset_s", "ending", "error"),
    [(-0.005, "completed", None), (0.005, "dead", "Timeout: no result within 0.05 s")],
    ids=["just before", "just after"],
)
async def test_a_timeout_while_the_handler_finishes_is_either_of_the_two(
    dsn: str, db: asyncpg.Connection[Any], offset_s: float, ending: str, error: str | None
) -> None:
    ordinary = Ordinary(_at_its_deadline(offset_s))
    assert await outlived(dsn, db, ordinary, ending, kept=False, timeout_s=0.05) == error


async def _blocks() -> str:
    time.sleep(0.02)  # noqa: ASYNC251 - as handlers do
    return "late"


async def _blocks_and_waits() -> None:
    await _blocks()
    await anyio.sleep(0.01)


async def _blocks_and_raises() -> None:
    await _blocks()
    raise ValueError("late")


@pytest.mark.parametrize(
    ("handle", "ending", "kept", "error"),
    [
        (_blocks, "completed", True, None),
        (_blocks_and_raises, "dead", True, "ValueError: late"),
        (_blocks_and_waits, "dead", False, "Timeout: no result within 0.01 s"),
    ],
)
async def test_a_handler_that_blocks_past_its_deadline_may_still_complete(
    dsn: str, db: asyncpg.Connection[Any], handle: Any, ending: str, kept: bool, error: str | None
) -> None:
    """It could not be interrupted: what it returned or raised stands, unless it awaits something again."""
    assert await outlived(dsn, db, Ordinary(handle), ending, kept=kept, timeout_s=0.01) == error


async def test_jobs_that_take_exactly_their_timeout_complete_or_time_out(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", concurrency=3, max_attempts=1)
    async def handle() -> None:
        await anyio.sleep(0.01)

    async with running(app, dsn) as (daemon, seen):
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, timeout_s) "
            "SELECT 'q', 0.0095 + 0.00001 * n FROM generate_series(1, 150) n"
        )
        settled = "SELECT bool_and(status IN ('completed', 'dead')) FROM pgworkd.all_jobs"
        await until(lambda: db.fetchval(settled), limit_s=4)
        assert daemon.running == 0
        assert seen.all(events.JOB_STALE) == []
    rows = await db.fetch("SELECT status::text, left(error, 7), count(*) FROM pgworkd.all_jobs GROUP BY 1, 2")
    assert {tuple(row)[:2] for row in rows} <= {("completed", None), ("dead", "Timeout")}
    assert sum(row["count"] for row in rows) == 150


# A cancellation of the task after its job has finished.


@pytest.mark.parametrize("strikes", ["an idle task", "another job"])
async def test_a_late_cancellation_of_the_task_ends_at_most_one_other_job(
    dsn: str, db: asyncpg.Connection[Any], strikes: str
) -> None:
    """A timer that the handler forgot to stop."""
    app, tasks, struck = App(), [], anyio.Event()

    @app.handler("odd", queue="q", concurrency=1, max_attempts=2, backoff=0.01)
    async def odd() -> None:
        tasks.append(this_task())

    @app.handler("ordinary", queue="q", max_attempts=2, backoff=0.01)
    async def ordinary(payload: dict[str, Any]) -> str:
        if payload and not struck.is_set():
            await anyio.sleep_forever()
        await anyio.sleep(0.001)
        return "fine"

    async with running(app, dsn, shutdown_s=0.5) as (daemon, seen):
        await until(waits_for_status(db, await insert(db, "q", kind="odd"), "completed"))
        if strikes == "another job":
            await insert(db, "q", '{"wait": true}', kind="ordinary")
            await seen.wait(events.JOB_STARTED, kind="ordinary")
        struck.set()
        before = tasks_now()
        tasks[0].cancel()
        await until(lambda: tasks[0].done() or not tasks[0].cancelling(), limit_s=1)
        await run_ordinary(db, 20)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), limit_s=2)
        assert tasks_now() <= before
        assert daemon.worker.may_claim
        assert not daemon.stop_requested.is_set()


# User code around the call.


class _Touchy:
    """Like numpy's arrays and Django's lazy objects: comparing it may raise."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


async def test_a_context_variable_that_cannot_be_compared_harms_no_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    async def handle() -> None:
        tenant.set(_Touchy())  # type: ignore[arg-type]

    app = Ordinary(handle)
    before = tenant.set(_Touchy())  # type: ignore[arg-type]
    try:
        async with running(app.app, dsn, shutdown_s=0.5) as (daemon, _):
            for _ in range(2):
                await until(waits_for_status(db, await insert(db, "q", kind="odd"), "completed"), limit_s=2)
            assert daemon.worker.may_claim
    finally:
        tenant.reset(before)


class TooFar(BaseException):
    """Represents SystemExit and KeyboardInterrupt, which would end the event loop of the tests as well."""


class Note(BaseModel):
    how: str

    @field_validator("how")
    @classmethod
    def goes_too_far(cls, how: str) -> str:
        match how:
            case "base exception":
                raise TooFar(how)
            case "cancellation":
                raise asyncio.CancelledError
            case "cancel":
                cancel_this_task()
            case "variable":
                tenant.set("me")
            case "scope":
                anyio.CancelScope(deadline=anyio.current_time()).__enter__()
        return how


@pytest.mark.parametrize("how", ["base exception", "cancellation", "cancel", "variable", "scope"])
async def test_a_validator_that_raises_a_base_exception_harms_only_its_own_job(
    dsn: str, db: asyncpg.Connection[Any], how: str
) -> None:
    app = App()

    @app.handler("odd", queue="q", concurrency=1, max_attempts=1)
    async def odd(note: Note) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await anyio.lowlevel.checkpoint()

    ordinary = Ordinary(_returns)
    app.handler("ordinary", queue="q", max_attempts=1)(ordinary._handle)
    async with running(app, dsn, shutdown_s=0.5) as (daemon, _):
        job_id = await insert(db, "q", f'{{"how": "{how}"}}', kind="odd")
        over = "SELECT status IN ('dead', 'completed') FROM pgworkd.all_jobs WHERE id = $1"
        await until(lambda: db.fetchval(over, job_id), limit_s=2)
        await run_ordinary(db, 20)
        assert daemon.worker.may_claim
