"""report_progress: how far a running job is, apart from its row, fenced, bounded, and deleted with its attempt."""

from __future__ import annotations

import uuid
from typing import Any

import asyncpg
import pytest

from tests.kits.verbs import Db, at, clock, complete, fail, insert_running, live, release, retry, worker

pytestmark = pytest.mark.usefixtures("t0")

LONG = "x" * 501


async def report(
    db: Db, job_id: uuid.UUID, done: float, message: str | None = None, attempt: int = 1
) -> list[uuid.UUID]:
    """report_progress of one job; the ids it was stored for."""
    sql = "SELECT pgworkd.report_progress($1, $2, $3, $4)"
    return list(await db.fetchval(sql, [job_id], [attempt], [done], [message]))


async def shown(db: Db) -> list[tuple[Any, ...]]:
    """What the view shows: (id, attempt, done, message)."""
    return [tuple(row) for row in await db.fetch("SELECT id, attempt, done, message FROM pgworkd.job_progress")]


async def test_the_latest_report_is_shown_and_the_job_row_is_unchanged(db: Db) -> None:
    (job_id,) = await insert_running(db)
    before = dict(await live(db, job_id))
    place = await db.fetchval("SELECT ctid FROM pgworkd.jobs")
    assert await report(db, job_id, 0.25, "page 3") == [job_id]
    await clock(5, db)
    assert await report(db, job_id, 0.5) == [job_id]
    assert await shown(db) == [(job_id, 1, 0.5, None)]
    assert dict(await live(db, job_id)) == before
    assert await db.fetchval("SELECT ctid FROM pgworkd.jobs") == place
    (row,) = await db.fetch("SELECT * FROM pgworkd.job_progress")
    assert (row["at"], row["queue"], row["kind"], row["claimed_at"]) == (at(5), "q", "q", at(0))


async def test_many_reports_in_one_call_and_long_messages_are_truncated(db: Db) -> None:
    ids = await insert_running(db, 3)
    sql = "SELECT pgworkd.report_progress($1, '{1,1,7}', '{0,1,0.5}', $2)"
    assert sorted(await db.fetchval(sql, ids, [LONG, None, "of another attempt"])) == sorted(ids[:2])
    assert sorted(await shown(db)) == sorted([(ids[0], 1, 0.0, "x" * 500), (ids[1], 1, 1.0, None)])


@pytest.mark.parametrize("settle", [complete, fail, release])
async def test_progress_of_a_finished_job_is_not_shown_and_is_refused(db: Db, settle: Any) -> None:
    (job_id,) = await insert_running(db)
    await report(db, job_id, 0.5)
    await settle(db, [job_id])
    assert await shown(db) == []
    assert await report(db, job_id, 0.6) == []
    assert await report(db, uuid.uuid4(), 0.6) == []


async def test_a_new_attempt_starts_without_progress(db: Db) -> None:
    (job_id,) = await insert_running(db)
    await report(db, job_id, 0.9, "nearly")
    await fail(db, [job_id])
    await retry(db, job_id)
    await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 1)", await worker(db))
    assert await shown(db) == []
    assert await report(db, job_id, 1, "late", attempt=1) == []
    assert await report(db, job_id, 0.1, attempt=2) == [job_id]
    assert await shown(db) == [(job_id, 2, pytest.approx(0.1), None)]


@pytest.mark.parametrize("done", [-0.01, 1.01, float("nan"), float("inf")])
async def test_progress_outside_0_to_1_is_refused(db: Db, done: float) -> None:
    (job_id,) = await insert_running(db)
    with pytest.raises(asyncpg.CheckViolationError, match="done_must_be_0_to_1"):
        await report(db, job_id, done)


async def test_progress_rows_of_ended_attempts_are_deleted(db: Db) -> None:
    first, second, third = await insert_running(db, 3)
    for job_id in (first, second, third):
        await report(db, job_id, 0.5)
    await complete(db, [first])
    await fail(db, [second])
    await retry(db, second)
    await db.fetch("SELECT * FROM pgworkd.claim($1, 'q', 1)", await worker(db))
    await db.execute("SELECT pgworkd.prune(7, 30, 1)")
    assert await db.fetchval("SELECT count(*) FROM pgworkd.progress") == 2
    await db.execute("SELECT pgworkd.prune(7, 30)")
    assert await db.fetchval("SELECT array_agg(job_id) FROM pgworkd.progress") == [third]


async def test_reporting_progress_does_not_wait_for_a_lock_on_the_job(db: Db, other: Db) -> None:
    (job_id,) = await insert_running(db)
    await other.execute("BEGIN")
    await other.execute("SELECT FROM pgworkd.jobs FOR UPDATE")
    await db.execute("SET statement_timeout = '2s'")
    assert await report(db, job_id, 0.5) == [job_id]
    await other.execute("ROLLBACK")
