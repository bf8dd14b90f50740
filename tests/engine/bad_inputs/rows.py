"""Bad inputs 1 to 15: values that another client writes into rows, bypassing the checks in Python."""

from __future__ import annotations

import logging
import sys
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job, log
from pgworkd.core import events
from pgworkd.engine.run.unknown_kinds import FIRST_S
from pgworkd.errors import RetryAfter
from tests.engine.bad_inputs import Case, Check, among_good_ones, column, dead_payload, refused
from tests.kits.daemon import insert, status, until, waits_for_status
from tests.kits.verbs import Db, clock, rescue, steady, worker

NAME = "name_must_have_1_to_200_characters"
OBJECT = "value_must_be_a_json_object"
SIZE = "value_must_not_exceed_1_mib"
INSTANT = "instant_must_lie_between_1970_and_2200"
ATTEMPTS = "max_attempts_must_be_1_to_1000"
ENDED = "a_job_is_ended_by_cancel_status_must_be_of_a_live_one"
RUNNING = "running_jobs_and_only_they_have_a_worker"
UNREADABLE = "payload cannot be read"


async def kind_null(dsn: str, db: Db) -> None:
    app, ran = App(), anyio.Event()
    app.handler("q")(ran.set)
    async with among_good_ones(dsn, db, app, kind=None) as (odd, _, seen):
        await seen.wait(events.JOB_COMPLETED, job_id=str(odd), kind="q")
    assert ran.is_set()


def unknown_kind(kind: str, module: str) -> Check:
    """`module`, which the kind seems to name, is not imported."""

    async def check(dsn: str, db: Db) -> None:
        was_there = module in sys.modules
        message = f"no handler for kind {kind!r}"
        async with among_good_ones(dsn, db, App(), kind=kind) as (odd, _, seen):
            released = await seen.wait(events.JOB_RELEASED)
            await until(waits_for_status(db, odd, "pending"))
        assert (released["job_id"], released["reason"]) == (str(odd), message)
        assert released["delay_s"] == FIRST_S
        assert events.JOB_RELEASED not in log.below_level(logging.getLevelName(logging.INFO))
        row = await db.fetchrow("SELECT attempts, failures, error, errors FROM pgworkd.jobs WHERE id = $1", odd)
        assert tuple(row or ()) == (len(seen.all(events.JOB_RELEASED)), 0, message, "[]"), "each time is one event"
        assert (module in sys.modules) == was_there

    return check


def backoff(answer: Any, wait_s: tuple[float, float], hook_error: str | None) -> Check:
    """A job whose backoff function returns this waits between the two; an error of the function is reported."""

    async def check(dsn: str, db: Db) -> None:
        app = App()

        @app.handler("odd", queue="q", backoff=lambda _: answer)
        async def handle(job: Job) -> None:
            if job.attempt == 1:
                raise ValueError("no")

        async with among_good_ones(dsn, db, app, kind="odd") as (odd, _, seen):
            failed = await seen.wait(events.JOB_FAILED, job_id=str(odd))
            if wait_s == (0, 0):
                await seen.wait(events.JOB_COMPLETED, job_id=str(odd))
        assert wait_s[0] <= failed["retry_in_s"] <= wait_s[1]
        assert [f["error"] for f in seen.all(events.HOOK_FAILED)] == ([] if hook_error is None else [hook_error])

    return check


def retry_after(delay: float) -> Check:
    async def check(dsn: str, db: Db) -> None:
        app = App()

        @app.handler("odd", queue="q", backoff=60)
        async def handle() -> None:
            raise RetryAfter(delay)

        async with among_good_ones(dsn, db, app, kind="odd") as (odd, _, seen):
            failed = await seen.wait(events.JOB_FAILED, job_id=str(odd))
        assert failed["retry_in_s"] == pytest.approx(60, rel=0.11)
        error = f"RetryAfter delay is {delay}: give 0 to 31622400 seconds (366 days)"
        assert (
            await db.fetchval("SELECT error FROM pgworkd.jobs WHERE id = $1", odd)
            == f"pgworkd.errors.UsageError: {error}"
        )

    return check


async def old_running_row(_: str, db: Db) -> None:
    await clock(0, db)
    rescuer = await worker(db)
    job_id = await insert(db, "q", status="running", worker_id=4711)
    await steady(db, rescuer)  # from here on the restored worker has the time of one lease to renew
    assert await rescue(db, rescuer) == {}
    await steady(db, rescuer, since=60, until=91)
    assert set(await rescue(db, rescuer)) == {job_id}
    assert await status(db, job_id) == "failed"


async def finished_without_instant(_: str, db: Db) -> None:
    await insert(db, "q")
    with pytest.raises(asyncpg.NotNullViolationError) as caught:
        await db.execute("""
            INSERT INTO pgworkd.finished_jobs
                   (id, run_at, created_at, status, priority, attempts, failures, queue, payload, errors)
            SELECT id, run_at, created_at, 'completed', 0, 1, 0, queue, payload, errors FROM pgworkd.jobs""")
    assert caught.value.column_name == "finished_at"


CASES = [
    Case(1, "1e5000", dead_payload('{"n": 1e5000}', UNREADABLE)),
    Case(1, "an integer of 5,000 digits", dead_payload('{"n": ' + "7" * 5000 + "}", UNREADABLE)),
    Case(2, "an array 1,000 deep", dead_payload('{"n": ' + "[" * 1000 + "]" * 1000 + "}", UNREADABLE)),
    Case(2, "an array 65 deep", dead_payload('{"n": ' + "[" * 65 + "]" * 65 + "}", "payload.n[0]")),
    Case(2, "an array 100,000 deep", column("payload", "(repeat('[', 100000) || repeat(']', 100000))::jsonb", "54001")),
    Case(3, "a payload of 10 MB", column("payload", "jsonb_build_object('x', repeat('a', 10000000))", "23514", SIZE)),
    Case(3, "a payload of 100 MB", column("payload", "jsonb_build_object('x', repeat('a', 100000000))", "23514", SIZE)),
    Case(4, "run_at BC", column("run_at", "'0044-03-15 BC'", "23514", INSTANT)),
    Case(4, "run_at in the year 294276", column("run_at", "'294276-12-31'", "23514", INSTANT)),
    Case(5, "run_at infinity", column("run_at", "'infinity'", "23514", INSTANT)),
    Case(5, "run_at -infinity", column("run_at", "'-infinity'", "23514", INSTANT)),
    Case(6, "queue NULL", refused("INSERT INTO pgworkd.jobs (queue) VALUES (NULL)", "23502", message='column "queue"')),
    Case(6, "payload NULL", column("payload", "NULL", "23502", message='column "payload"')),
    Case(6, "kind NULL is the queue's own handler", kind_null),
    *[
        Case(7, f"payload {value}", column("payload", f"'{value}'", "23514", OBJECT))
        for value in ("null", '"text"', "7", "true", "[]")
    ],
    Case(8, "an empty kind", column("kind", "''", "23514", NAME)),
    Case(8, "a kind of 201 characters", column("kind", "repeat('x', 201)", "23514", NAME)),
    Case(9, "an unknown kind", unknown_kind("unheard of", "unheard of")),
    Case(10, "kind os.system", unknown_kind("os.system", "os")),
    Case(10, "kind a.b:c", unknown_kind("this:c", "this")),
    Case(10, "kind __import__", unknown_kind("__import__", "this")),
    Case(10, "kind '; DROP", unknown_kind("'; DROP", "this")),
    Case(11, "priority 2^31", column("priority", "2147483648", "22003")),
    Case(11, "priority -2^31 - 1", column("priority", "-2147483649", "22003")),
    Case(12, "max_attempts 0", column("max_attempts", "0", "23514", ATTEMPTS)),
    Case(12, "max_attempts -1", column("max_attempts", "-1", "23514", ATTEMPTS)),
    Case(12, "max_attempts 1001", column("max_attempts", "1001", "23514", ATTEMPTS)),
    Case(12, "max_attempts 2^31", column("max_attempts", "2147483648", "22003")),
    *[
        Case(
            13,
            f"a queue's {name} {value}",
            refused(f"INSERT INTO pgworkd.queues (name, {name}) VALUES ('q', '{value}')", "23514", constraint),  # noqa: S608
        )
        for name, constraint in (
            ("backoff_s", "backoff_must_be_0_to_366_days"),
            ("backoff_factor", "backoff_factor_must_be_1_to_1000"),
            ("backoff_cap_s", "backoff_cap_must_be_0_to_366_days"),
        )
        for value in ("infinity", "NaN", "-1")
    ],
    *[
        Case(
            13,
            f"a backoff function says {answer}",
            backoff(answer, (27, 33), "backoff function failed (ValueError), the default policy is used"),
        )
        for answer in (float("inf"), float("nan"))
    ],
    Case(13, "a backoff function says -1", backoff(-1, (0, 0), None)),
    Case(13, "a backoff function says 1e300", backoff(1e300, (366 * 86400, 366 * 86400), None)),
    *[Case(13, f"RetryAfter({delay})", retry_after(delay)) for delay in (float("inf"), float("nan"))],
    Case(14, "running without a worker", column("status", "'running'", "23514", RUNNING)),
    Case(14, "a worker without running", column("worker_id", "7", "23514", RUNNING)),
    Case(14, "running under a worker that never was", old_running_row),
    Case(15, "finished without finished_at", finished_without_instant),
    *[
        Case(15, f"{value} among live jobs", column("status", f"'{value}'", "23514", ENDED))
        for value in ("completed", "cancelled", "expired")
    ],
]
