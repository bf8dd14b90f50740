"""Whatever someone writes into the table by SQL: it affects only its own job, the daemon keeps running."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import anyio
import asyncpg
import pytest
from pydantic import BaseModel, field_validator

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.errors import PermanentError
from tests.kits.daemon import insert, running, until, waits_for_status


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
        ('{"note": "seven"}', "ValidationError: 1 validation error for Note"),
        ("{}", "ValidationError: 1 validation error for Note"),
    ],
    ids=["wrong type", "missing"],
)
async def test_an_invalid_payload_is_dead_at_once_and_its_batch_completes(
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


async def test_an_unexpected_exception_in_a_validator_fails_the_attempt(dsn: str, db: asyncpg.Connection[Any]) -> None:
    app = App()

    @app.handler("q", max_attempts=1)
    async def handle(note: Note) -> None:
        return None

    async with running(app, dsn):
        odd, fine = await insert(db, "q", '{"note": 13}'), await insert(db, "q", '{"note": 1}')
        await until(waits_for_status(db, fine, "completed"))
        await until(waits_for_status(db, odd, "dead"))
    assert "a validator with a defect" in await db.fetchval("SELECT error FROM pgworkd.jobs")


@pytest.mark.slow("each odd value in each column")
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("meta", '\'{"n": ' + "7" * 5000 + "}'"),
        ("meta", '\'{"n": ' + "[" * 1000 + "]" * 1000 + "}'"),
        ("attempts", "2147483647"),
        ("attempts", "-2147483648"),
        ("failures", "2147483647"),
        ("losses", "2147483647"),
        ("timeout_s", "1e-30"),
        ("priority", "-2147483648"),
    ],
)
async def test_an_odd_value_in_any_column_is_refused_or_affects_only_its_job(
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
            # The odd job ran, and no worker has it any more.
            over = "SELECT bool_and(status IN ('failed', 'dead')) FROM pgworkd.jobs"
            await until(lambda: db.fetchval(over), limit_s=4)
        assert daemon.worker.may_claim
        # Nor may it block maintenance, whose tasks all see this row as well.
        assert seen.all(events.MAINTENANCE_FAILED) == []


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


async def test_the_timeout_of_the_row_overrides_that_of_the_handler(dsn: str, db: asyncpg.Connection[Any]) -> None:
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
