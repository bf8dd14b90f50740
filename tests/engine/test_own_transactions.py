"""transaction=True: whatever a handler does to the transaction that has claimed its job, the job has one stated end."""

from __future__ import annotations

import contextlib
from typing import Any

import asyncpg
import pytest

from pgworkd import Job, PermanentError, Snooze
from pgworkd.core import events
from tests.kits.daemon import insert, status, until
from tests.kits.money import serving

pytestmark = pytest.mark.slow("each way in which a transaction may end")

Handle = Any


@pytest.fixture
async def notes(db: asyncpg.Connection[Any]) -> asyncpg.Connection[Any]:
    await db.execute("CREATE TABLE notes (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    return db


async def _write(job: Job, *then: str) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
        for sql in then:
            await connection.execute(sql)


async def _without_block() -> dict[str, int]:
    return {"n": 1}


async def _with_result(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
        job.result = {"n": 1}


async def _raises_afterwards(job: Job) -> None:
    await _write(job)
    raise ValueError("after the block")


async def _tries_again(job: Job) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO notes VALUES (1)")
            raise ZeroDivisionError
    await _write(job)


async def _gives_up(job: Job) -> None:
    await _write(job, "INSERT INTO notes VALUES (1)")
    raise AssertionError  # reported, and changes nothing


async def _permanent(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
        raise PermanentError("no such account")


async def _snoozes(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
        raise Snooze(3600)


async def _raises(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
        raise ValueError("no")


async def _too_slow(job: Job) -> None:
    await _write(job, "SELECT pg_sleep(60)")


async def _statement_timeout(job: Job) -> None:
    await _write(job, "SET LOCAL statement_timeout = 50", "SELECT pg_sleep(60)")


async def _twice_the_same(job: Job) -> None:
    await _write(job, "INSERT INTO notes VALUES (0)")


async def _commits(job: Job) -> None:
    await _write(job, "COMMIT")


async def _rolls_back(job: Job) -> None:
    await _write(job, "ROLLBACK")


async def _commits_and_begins(job: Job) -> None:
    await _write(job, "COMMIT", "BEGIN", "INSERT INTO notes VALUES (1)")


async def _rolls_back_and_begins(job: Job) -> None:
    await _write(job, "ROLLBACK", "BEGIN", "INSERT INTO notes VALUES (1)")


async def _kills_its_session(job: Job) -> None:
    await _write(job, "SELECT pg_terminate_backend(pg_backend_pid())")


async def _closes(job: Job) -> None:
    async with job.transaction() as connection:
        await connection.execute("INSERT INTO notes VALUES (0)")
        await connection.close()


async def _swallows(job: Job) -> None:
    with contextlib.suppress(Exception):
        await _write(job, "ROLLBACK")


async def _returns_what_is_no_result() -> str:
    return "x" * 3_000_000


WRONG_END = "COMMIT or ROLLBACK inside job.transaction()"
COUNTED = [  # handler, status, failures, written, error
    (_without_block, "completed", 0, [], None),
    (_with_result, "completed", 0, [0], None),
    (_raises_afterwards, "completed", 0, [0], None),
    (_tries_again, "completed", 0, [0], None),
    (_gives_up, "completed", 0, [0, 1], None),
    (_permanent, "dead", 1, [], "no such account"),
    (_snoozes, "pending", 0, [], None),
    (_raises, "failed", 1, [], "ValueError: no"),
    (_too_slow, "failed", 1, [], "no result within 0.3 s"),
    (_statement_timeout, "failed", 1, [], "statement timeout"),
    (_twice_the_same, "failed", 1, [], "duplicate key"),
    (_commits, "failed", 1, [0], WRONG_END),
    (_rolls_back, "failed", 1, [], WRONG_END),
    (_commits_and_begins, "completed", 0, [0, 1], None),
    (_rolls_back_and_begins, "failed", 1, [], "no longer ours"),
    (_kills_its_session, "failed", 1, [], "terminat"),
    (_closes, "failed", 1, [], "released back to the pool"),
    (_swallows, "completed", 0, [], None),
    (_returns_what_is_no_result, "failed", 1, [], "result"),
]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case[0].__name__)
async def test_each_end_of_a_run_has_one_stated_end_of_the_job(
    dsn: str, notes: asyncpg.Connection[Any], case: tuple[Handle, str, int, list[int], str | None]
) -> None:
    """Nothing is written unless the job is completed, except what the handler has committed itself."""
    handle, ending, failures, written, error = case
    async with serving(handle, dsn, notes, options={"timeout_s": 0.3 if handle is _too_slow else None}) as (
        daemon,
        seen,
    ):
        job_id = await insert(notes, "q")
        await until(lambda: sum(sum(k.ended.values()) for k in daemon.counters.kinds.values()))
        assert await status(notes, job_id) == ending
        row = await notes.fetchrow("SELECT attempts, failures, error FROM pgworkd.all_jobs WHERE id = $1", job_id)
        assert row is not None
        assert (row["attempts"], row["failures"]) == (1, failures)
        assert (error is None) == (row["error"] is None)
        assert (error or "") in (row["error"] or "")
        assert sorted(row[0] for row in await notes.fetch("SELECT n FROM notes")) == written
        assert daemon.counters.of("q", "q").ended[{"pending": "released"}.get(ending, ending)] == 1
        assert seen.all(events.JOB_STALE) == []
        assert len(seen.all(events.JOB_RAISED)) == (handle in (_raises_afterwards, _gives_up))
