"""Looking up an id in a history of more than a year takes few locks: a transaction keeps all that it takes."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import anyio
import pytest

from pgworkd.admin import queries, refusals
from tests.kits.batches import depend
from tests.kits.verbs import Db, one

pytestmark = pytest.mark.slow("a history of more than a year")

DAYS = 400
LOCKS = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()"
FEW = 160
"""Of 2,000: some days around one, each a table and four indexes, and what each statement locks anyway."""
ROW = """
    INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures, queue,
                                       kind, payload, errors)
    VALUES ($1, $2, now(), now(), 'completed', 0, 1, 0, 'q', 'k', '{}', '[]')"""
QUESTIONS = {
    "result_of": "SELECT id FROM pgworkd.result_of($1) WHERE status = 'completed'",
    "became_all": "SELECT id FROM pgworkd.became_all($1) WHERE status = 'completed'",
    "jobs_of": "SELECT id FROM pgworkd.jobs_of($1)",
    "await_results": "SELECT * FROM pgworkd.await_results($1, 'c', 60)",
    "a job": queries.ONE_JOB.replace("$1", "($1::uuid[])[1]"),
    "statuses": queries.STATUSES,
    "queues": queries.QUEUES_OF,
    "enqueue_once": "SELECT pgworkd.enqueue_once(i, 'q', '{}') FROM unnest($1::uuid[]) i",
    "refusals": f"SELECT id FROM ({refusals.SQL}) x (id, status, c, k, d) WHERE status <> 'unknown'",  # noqa: S608 - ours
}


def made(days_ago: float) -> uuid.UUID:
    """An id of version 7 that says so."""
    ms = int((datetime.now(UTC) - timedelta(days=days_ago)).timestamp() * 1000)
    return uuid.UUID(f"{ms:012x}7{uuid.uuid4().hex[13:]}")


@pytest.fixture
async def long(db: Db) -> Db:
    """A session in a database with that many days."""
    await db.execute("SELECT set_config('pgworkd.clock', (now() - interval '390 days')::text, false)")
    await db.execute("SELECT pgworkd.ensure_partitions(366)")
    await db.execute("SELECT set_config('pgworkd.clock', (now() - interval '30 days')::text, false)")
    await db.execute("SELECT pgworkd.ensure_partitions(40)")
    await db.execute("RESET pgworkd.clock")
    return db


async def asked(db: Db, question: str, ids: list[uuid.UUID]) -> tuple[int, int]:
    """Rows found, and locks taken."""
    async with db.transaction():
        rows = await db.fetch(question, ids)
        return len(rows), await db.fetchval(LOCKS)


async def test_an_id_is_looked_for_in_few_days(long: Db) -> None:
    """Of version 7: made now, or long ago and done soon or late; and without a time."""
    finished = {
        "soon": (made(200), 200.0),
        "later": (made(200), 195.0),
        "much later": (made(300), 20.0),
        "of no time": (uuid.uuid4(), 100.0),
        "restored": (made(3000), 2999.0),
    }
    for job_id, days_ago in finished.values():
        await long.execute(ROW, job_id, datetime.now(UTC) - timedelta(days=days_ago))
    there = {which: job_id for which, (job_id, _) in finished.items()}
    too_many = []
    for name, question in QUESTIONS.items():
        not_there = {"new": made(0), "new, and of no time": uuid.uuid4()}
        for which, job_id in (there | not_there).items():
            found, locks = await asked(long, question, [job_id])
            assert found == (which in there or name in ("enqueue_once", "await_results")), (name, which)
            too_many += [(name, which, locks)] if locks > FEW else []
    assert "\n".join(map(str, too_many)).splitlines() == []
    async with long.transaction():
        assert await depend(long, await one(long), *there.values()) == 0
        assert await long.fetchval(LOCKS) < 2 * FEW


async def test_days_that_are_looked_through_are_locked_some_at_a_time(long: Db, other: Db) -> None:
    """Not all at once: the table of locks has some 6,400 places, for all sessions together."""
    pid, seen = await long.fetchval("SELECT pg_backend_pid()"), []

    async def watch() -> None:
        while True:
            seen.append(await other.fetchval("SELECT count(*) FROM pg_locks WHERE pid = $1", pid))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await asked(long, QUESTIONS["result_of"], [uuid.uuid4()])
        tasks.cancel_scope.cancel()
    assert 50 < max(seen) <= FEW
