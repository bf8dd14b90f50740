"""Whatever a handler, a hook or a row does: the attempt ends and says why, the daemon lives and runs the next job."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest
from pydantic import BaseModel, field_validator

from pgworkd import events
from pgworkd.app import App, DeadJob
from pgworkd.errors import LeaseLost, PermanentError, Snooze
from pgworkd.job import Job
from tests.kit import insert, running, until, waits_for_status

Handle = Callable[[], Awaitable[Any]]


async def dead_end(dsn: str, db: asyncpg.Connection[Any], handle: Callable[..., Any]) -> asyncpg.Record:
    """Runs one job that has one attempt, then another job in the same slot; the row of the first, which is dead."""
    app = App()
    app.handler("odd", queue="q", concurrency=1, max_attempts=1)(handle)

    @app.handler("next", queue="q")
    async def following() -> str:
        await anyio.sleep(0.001)
        return "alive"

    async with running(app, dsn) as (daemon, seen):
        odd, after = await insert(db, "q", kind="odd"), await insert(db, "q", kind="next")
        await until(waits_for_status(db, after, "completed"))
        await until(waits_for_status(db, odd, "dead"))
        assert daemon.membership.may_claim
        assert len(seen.all(events.JOB_STARTED)) == 2
    row = await db.fetchrow("SELECT attempts, failures, error, errors FROM pgworkd.jobs WHERE id = $1", odd)
    assert row is not None
    assert (row["attempts"], row["failures"]) == (1, 1)
    (entry,) = json.loads(row["errors"])
    assert entry["attempt"] == 1
    assert entry["worker"] == "test"
    return row


RAISED: dict[str, tuple[Callable[[], BaseException], str]] = {
    "exit": (lambda: SystemExit(3), "SystemExit: 3"),
    "interrupt": (KeyboardInterrupt, "KeyboardInterrupt"),
    "generator exit": (GeneratorExit, "GeneratorExit"),
    "a bare cancellation": (asyncio.CancelledError, "asyncio.exceptions.CancelledError"),
    "a time-out of its own": (lambda: TimeoutError("mine"), "TimeoutError: mine"),
    "recursion": (lambda: RecursionError("too deep"), "RecursionError: too deep"),
    "a group": (
        lambda: ExceptionGroup("both", [ValueError("a"), KeyError("b")]),
        "ExceptionGroup: both (2 sub-exceptions): ValueError: a; KeyError: 'b'",
    ),
    "a group around an interrupt": (
        lambda: BaseExceptionGroup("all", [KeyboardInterrupt(), SystemExit(1)]),
        "BaseExceptionGroup: all (2 sub-exceptions): KeyboardInterrupt; SystemExit: 1",
    ),
    "stop iteration": (StopIteration, "StopIteration"),
}


@pytest.mark.parametrize("name", RAISED)
async def test_what_a_coroutine_raises_fails_the_attempt(dsn: str, db: asyncpg.Connection[Any], name: str) -> None:
    make, error = RAISED[name]

    async def handle() -> None:
        raise make()

    row = await dead_end(dsn, db, handle)
    assert row["error"].endswith(error)
    assert "in handle" in json.loads(row["errors"])[0]["traceback"]


@pytest.mark.parametrize("name", RAISED)
async def test_what_a_thread_raises_fails_the_attempt(dsn: str, db: asyncpg.Connection[Any], name: str) -> None:
    make, error = RAISED[name]

    def handle() -> None:
        raise make()

    row = await dead_end(dsn, db, handle)
    assert row["error"].endswith(error)


def _cancel_this_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def _cancels_itself_and_waits() -> None:
    _cancel_this_task()
    await anyio.sleep(10)


async def _cancels_itself_twice() -> None:
    _cancel_this_task()
    try:
        await anyio.sleep(10)
    finally:
        _cancel_this_task()


async def _cancels_itself_and_raises() -> None:
    _cancel_this_task()
    raise ValueError("and raises")


async def _cancels_itself_within_a_group() -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 10)
        _cancel_this_task()


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        (_cancels_itself_and_waits, "asyncio.exceptions.CancelledError"),
        (_cancels_itself_twice, "asyncio.exceptions.CancelledError"),
        (_cancels_itself_and_raises, "ValueError: and raises"),
        (_cancels_itself_within_a_group, "asyncio.exceptions.CancelledError"),
    ],
)
async def test_a_handler_that_cancels_its_own_task_ends_only_its_attempt(
    dsn: str, db: asyncpg.Connection[Any], handle: Handle, error: str
) -> None:
    assert (await dead_end(dsn, db, handle))["error"].startswith(error)


async def test_a_handler_that_cancels_its_own_task_and_returns_has_returned(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app = App()

    @app.handler("q", concurrency=1)
    async def handle() -> str:
        _cancel_this_task()
        return "done"

    async with running(app, dsn) as (daemon, _):
        for _ in range(3):
            await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert daemon.membership.may_claim


async def test_a_cancel_scope_left_open_harms_no_later_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("odd", queue="q", concurrency=1)
    async def odd() -> None:
        anyio.CancelScope(deadline=anyio.current_time() + 0.001).__enter__()

    @app.handler("next", queue="q")
    async def following() -> None:
        await anyio.sleep(0.01)  # the forgotten scope would strike here

    async with running(app, dsn) as (daemon, _):
        for kind in ("odd", "next", "odd", "next"):
            await until(waits_for_status(db, await insert(db, "q", kind=kind), "completed"))
        assert daemon.membership.may_claim


class _Mute(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise RuntimeError("no words")


class _Rude(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit(1)


def _text_of(size: int) -> Callable[[], Exception]:
    return lambda: ValueError("x" * size)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (_Mute, f"{__name__}._Mute: (its str() raised RuntimeError)"),
        (_Rude, f"{__name__}._Rude: (its str() raised SystemExit)"),
        (lambda: ValueError("nul \0 and \ud800"), r"ValueError: nul \x00 and \ud800"),
        (_text_of(50 * 1024 * 1024), "ValueError: " + "x" * 4081 + "…"),
    ],
    ids=["str() raises", "str() exits", "nul and surrogate", "50 MB"],
)
async def test_an_exception_that_is_hard_to_write_down_is_written_down(
    dsn: str, db: asyncpg.Connection[Any], make: Callable[[], Exception], error: str
) -> None:
    async def handle() -> None:
        raise make()

    row = await dead_end(dsn, db, handle)
    assert row["error"] == error
    assert len(row["error"].encode()) <= 4096
    assert len(row["errors"]) < 64 * 1024


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (object(), "result is of type object, which JSON does not know"),
        ({"found": {1, 2}}, "result.found is of type set, which JSON does not know: pass a list"),
        ("x" * (1024 * 1024), "result takes 1,048,578 bytes"),
        ({"mean": float("nan")}, "result.mean is nan, which JSON does not know"),
        (float("inf"), "result is inf, which JSON does not know"),
        (["a\0b"], "result[0] holds a NUL character"),
        ("\ud800", "result holds a lone surrogate"),
        ({1: 2}, "result has a key of type int"),
        (10**5000, "result is an integer of more than 4300 digits"),
    ],
    ids=["object", "set", "too large", "NaN", "infinity", "NUL", "surrogate", "key", "integer"],
)
@pytest.mark.parametrize("mode", ["loop", "thread"])
async def test_a_result_that_cannot_be_stored_fails_the_attempt(
    dsn: str, db: asyncpg.Connection[Any], result: object, error: str, mode: str
) -> None:
    async def in_loop() -> object:
        return result

    def in_thread() -> object:
        return result

    row = await dead_end(dsn, db, in_loop if mode == "loop" else in_thread)
    assert row["error"].startswith(f"pgworkd.errors.InvalidPayload: {error}")


# What someone may write into the table by SQL.


class Note(BaseModel):
    note: int

    @field_validator("note")
    @classmethod
    def odd_ones_raise(cls, note: int) -> int:
        if note == 13:
            raise ZeroDivisionError("a validator with a defect")
        return note


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ('{"note": ' + "7" * 5000 + "}", "InvalidPayload: payload cannot be read"),
        ('{"note": ' + "[" * 1000 + "]" * 1000 + "}", "InvalidPayload: payload cannot be read"),
        ('{"note": ' + '{"a":' * 70 + "1" + "}" * 71, "InvalidPayload: payload.note.a"),
        ('{"note": "seven"}', "ValidationError: 1 validation error for Note"),
        ("{}", "ValidationError: 1 validation error for Note"),
    ],
    ids=["5,000 digits", "1,000 levels", "70 levels", "wrong type", "missing"],
)
async def test_a_payload_that_cannot_be_read_is_dead_at_once_and_its_batch_completes(
    dsn: str, db: asyncpg.Connection[Any], payload: str, error: str
) -> None:
    app = App()
    ran: list[int] = []

    @app.handler("q")
    async def handle(note: Note) -> None:
        ran.append(note.note)

    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, payload) "
        "SELECT 'q', CASE n WHEN 3 THEN $1::text ELSE '{\"note\": 1}' END::jsonb FROM generate_series(1, 6) n",
        payload,
    )
    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, count=5)
        await seen.wait(events.JOB_DEAD)
    (row,) = await db.fetch("SELECT status::text, attempts, failures, error FROM pgworkd.jobs")
    assert (row["status"], row["attempts"], row["failures"]) == ("dead", 1, 1)
    assert error in row["error"]
    assert ran == [1] * 5
    assert await db.fetchval("SELECT max(attempts) FROM pgworkd.finished_jobs") == 1


async def test_a_validator_that_raises_something_else_fails_the_attempt(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", max_attempts=1)
    async def handle(note: Note) -> None:
        return None

    async with running(app, dsn):
        odd, fine = await insert(db, "q", '{"note": 13}'), await insert(db, "q", '{"note": 1}')
        await until(waits_for_status(db, fine, "completed"))
        await until(waits_for_status(db, odd, "dead"))
    assert "a validator with a defect" in await db.fetchval("SELECT error FROM pgworkd.jobs")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("meta", '\'{"n": ' + "7" * 5000 + "}'"),
        ("meta", '\'{"n": ' + "[" * 1000 + "]" * 1000 + "}'"),
        ("created_at", "'-infinity'"),
        ("created_at", "'infinity'"),
        ("created_at", "'0044-03-15 BC'"),
        ("created_at", "'29000-01-01'"),
        ("occurrence", "'infinity'"),
        ("attempts", "2147483647"),
        ("attempts", "-2147483648"),
        ("failures", "2147483647"),
        ("losses", "2147483647"),
        ("errors", "'{}'"),
        ("errors", "'7'"),
        ("timeout_s", "1e-30"),
        ("priority", "-2147483648"),
    ],
)
async def test_an_odd_value_in_any_column_is_refused_or_harms_only_its_own_job(
    dsn: str, db: asyncpg.Connection[Any], column: str, value: str
) -> None:
    app = App()

    @app.handler("q", concurrency=2)
    async def handle(payload: dict[str, Any], job: Job) -> None:
        await anyio.sleep(0.001)
        if payload:
            raise PermanentError(f"odd, attempt {job.attempt}")

    refused: asyncpg.PostgresError | None = None
    try:
        await db.execute(f"INSERT INTO pgworkd.jobs (queue, payload, {column}) VALUES ('q', '{{\"odd\": 1}}', {value})")  # noqa: S608
    except asyncpg.PostgresError as error:
        refused = error
    assert refused is None or isinstance(refused, asyncpg.CheckViolationError), refused
    async with running(app, dsn) as (daemon, seen):
        for _ in range(3):
            await until(waits_for_status(db, await insert(db, "q"), "completed"), limit_s=4)
        if refused is None:
            # It ran, as the odd job it is, and is no one's any more.
            over = "SELECT bool_and(status IN ('failed', 'dead')) FROM pgworkd.jobs"
            await until(lambda: db.fetchval(over), limit_s=4)
        assert daemon.membership.may_claim
        # Nor may it stand in the way of the chores: all of them see this row as well.
        assert seen.all(events.CHORE_FAILED) == []


@pytest.mark.parametrize("kind", ["os.system", "os:system", "tests.kit:insert", "__import__", "'; DROP"])
async def test_a_kind_is_only_ever_looked_up_among_the_handlers(
    dsn: str, db: asyncpg.Connection[Any], kind: str
) -> None:
    """An unknown one goes back unspent, says why, and harms none of its batch."""
    app = App()

    @app.handler("q")
    async def handle() -> None:
        return None

    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, kind) "
        "SELECT 'q', CASE n WHEN 2 THEN $1 ELSE NULL END FROM generate_series(1, 4) n",
        kind,
    )
    async with running(app, dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, count=3)
        released = await seen.wait(events.JOB_RELEASED, kind=kind)
        assert released["reason"] == f"no handler for kind {kind!r}"
        assert released["delay_s"] > 1
    row = await db.fetchrow("SELECT status::text, attempts, failures, error, run_at > now() AS later FROM pgworkd.jobs")
    assert row is not None
    assert tuple(row) == ("pending", 1, 0, f"no handler for kind {kind!r}", True)


async def test_a_job_that_expires_before_it_starts_never_runs(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app, ran = App(), []

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> None:
        ran.append(payload["name"])

    async with running(app, dsn):
        now = await db.fetchval("SELECT now()")
        late = await insert(db, "q", '{"name": "late"}', expires_at=now - timedelta(milliseconds=1))
        early = await insert(db, "q", '{"name": "early"}', expires_at=now + timedelta(hours=1))
        await until(waits_for_status(db, early, "completed"))
        await until(waits_for_status(db, late, "expired"))
    assert ran == ["early"]
    row = await db.fetchrow("SELECT attempts, error FROM pgworkd.finished_jobs WHERE id = $1", late)
    assert row is not None
    assert tuple(row) == (0, "expired before it could start")


async def test_the_rows_own_timeout_beats_the_handlers(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("patient", queue="q", timeout_s=3600, max_attempts=1)
    async def patient() -> None:
        await anyio.sleep_forever()

    @app.handler("hasty", queue="q", timeout_s=0.01, max_attempts=1)
    async def hasty() -> str:
        await anyio.sleep(0.05)
        return "took its time"

    async with running(app, dsn):
        shorter = await insert(db, "q", kind="patient", timeout_s=0.05)
        longer = await insert(db, "q", kind="hasty", timeout_s=60)
        await until(waits_for_status(db, shorter, "dead"))
        await until(waits_for_status(db, longer, "completed"))
    assert await db.fetchval("SELECT error FROM pgworkd.jobs") == "Timeout: no result within 0.05 s"


# Someone else ends the attempt while its handler runs.

TAKEN = {
    "deleted": "DELETE FROM pgworkd.jobs",
    "truncated": "TRUNCATE pgworkd.jobs",
    "rescued": "UPDATE pgworkd.jobs SET status = 'failed', worker_id = NULL, run_at = now() + interval '1 h'",
    "claimed again": "UPDATE pgworkd.jobs SET attempts = attempts + 1",
    "cancelled and buried": "SELECT pgworkd.bury(array_agg(id), 'cancelled', NULL) FROM pgworkd.jobs",
}


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.parametrize("ending", ["return", "raise", "snooze"])
async def test_an_attempt_that_was_taken_away_changes_nothing_and_is_reported_stale(
    dsn: str, db: asyncpg.Connection[Any], how: str, ending: str
) -> None:
    app, go_on = App(), anyio.Event()

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> str:
        if payload:
            await go_on.wait()
            if ending != "return":
                raise Snooze(1) if ending == "snooze" else ValueError("too late")
        return "done"

    async with running(app, dsn) as (daemon, seen):
        job_id = await insert(db, "q", '{"wait": true}')
        await seen.wait(events.JOB_STARTED)
        await db.execute(TAKEN[how])
        before = await db.fetch("SELECT * FROM pgworkd.all_jobs")
        go_on.set()
        stale = await seen.wait(events.JOB_STALE)
        assert (stale["job_id"], stale["attempt"]) == (str(job_id), 1)
        assert await db.fetch("SELECT * FROM pgworkd.all_jobs") == before
        await until(waits_for_status(db, await insert(db, "q"), "completed"))
        assert daemon.membership.may_claim
        await db.execute("DELETE FROM pgworkd.jobs")  # lets the daemon sign off


@pytest.mark.parametrize("how", TAKEN)
async def test_a_transaction_of_an_attempt_that_was_taken_away_writes_nothing(
    dsn: str, db: asyncpg.Connection[Any], how: str
) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")
    app, written, go_on, raised = App(), anyio.Event(), anyio.Event(), []

    @app.handler("q")
    async def handle(job: Job) -> None:
        try:
            async with job.transaction() as connection:
                await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
                written.set()
                await go_on.wait()
        except LeaseLost as error:
            raised.append(error)
            raise

    async with running(app, dsn) as (daemon, seen):
        job_id = await insert(db, "q")
        await written.wait()
        await db.execute(TAKEN[how])
        before = await db.fetch("SELECT * FROM pgworkd.all_jobs")
        go_on.set()
        await seen.wait(events.JOB_STALE, job_id=str(job_id))
        assert await db.fetch("SELECT * FROM pgworkd.all_jobs") == before
        assert daemon.membership.may_claim
        await db.execute("DELETE FROM pgworkd.jobs")
    assert len(raised) == 1
    assert await db.fetchval("SELECT count(*) FROM payments") == 0


async def test_a_time_out_after_the_transaction_has_committed_changes_nothing(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")
    app = App()

    @app.handler("q", timeout_s=0.2)
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
            job.result = "paid"
        await anyio.sleep_forever()

    async with running(app, dsn) as (_, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_COMPLETED, job_id=str(job_id))
        assert seen.all(events.JOB_STALE) == []
    assert await db.fetchval("SELECT result FROM pgworkd.finished_jobs") == '"paid"'
    assert await db.fetchval("SELECT count(*) FROM payments") == 1


async def test_a_time_out_inside_the_transaction_rolls_it_back(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")
    app = App()

    @app.handler("q", timeout_s=0.2, max_attempts=1)
    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
            await connection.execute("SELECT pg_sleep(60)")

    async with running(app, dsn):
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "dead"))
    assert await db.fetchval("SELECT error FROM pgworkd.jobs") == "Timeout: no result within 0.2 s"
    assert await db.fetchval("SELECT count(*) FROM payments") == 0


@pytest.mark.parametrize("result", [{1, 2}, "x" * (2 << 20)], ids=["set", "too large"])
async def test_a_result_that_cannot_be_stored_rolls_the_transaction_back(
    dsn: str, db: asyncpg.Connection[Any], result: object
) -> None:
    await db.execute("CREATE TABLE payments (job uuid)")

    async def handle(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO payments VALUES ($1)", job.id)
            job.result = result

    row = await dead_end(dsn, db, handle)
    assert "InvalidPayload: result" in row["error"]
    assert await db.fetchval("SELECT count(*) FROM payments") == 0


# What a hook does.


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
async def test_whatever_a_dead_hook_raises_is_only_reported(
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
        _cancel_this_task()
        if ending == "raises":
            raise ValueError("and raises")
        if ending == "waits":
            await anyio.sleep(10)

    async with running(app, dsn) as (daemon, _):
        ids = [str(await insert(db, "q", '{"die": true}')) for _ in range(2)]
        await until(lambda: _truth(sorted(called) == ids), limit_s=4)
        await until(waits_for_status(db, await insert(db, "q"), "completed"), limit_s=4)
        assert daemon.membership.may_claim


_tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


async def test_what_a_job_puts_into_its_context_is_gone_in_the_next(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Request ids, tenants, locales: frameworks keep them in context variables, log lines show them."""
    app = App()

    @app.handler("q", concurrency=1)
    async def handle(payload: dict[str, Any]) -> str:
        before = _tenant.get()
        _tenant.set(payload["tenant"])
        return before

    async with running(app, dsn):
        for tenant in ("a", "b", "c"):
            job_id = await insert(db, "q", json.dumps({"tenant": tenant}))
            await until(waits_for_status(db, job_id, "completed"))
    assert await db.fetchval("SELECT array_agg(DISTINCT result::text) FROM pgworkd.finished_jobs") == ['"nobody"']


async def test_the_loop_stays_quick_while_the_history_of_an_error_is_written(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """A message of 50 MB is cut before anything is done with it."""

    async def handle() -> None:
        began = time.perf_counter()
        try:
            raise ValueError("y" * (50 << 20)) from RuntimeError("z\ud800" * (10 << 20))
        finally:
            assert time.perf_counter() - began < 1

    row = await dead_end(dsn, db, handle)
    assert row["error"].startswith("ValueError: yyy")


async def _truth(value: Any) -> Any:
    return value
