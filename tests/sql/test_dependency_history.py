"""Depending on finished jobs reads the days on which they can have ended, and finds them wherever they are."""

from __future__ import annotations

import uuid

import pytest

from tests.kits.batches import depend
from tests.kits.verbs import Db, claim_ids, complete, insert, one, worker

pytestmark = pytest.mark.slow("thousands of rows for each case: what they cost has to show")

DAYS = 60
LOCKED = """SELECT count(DISTINCT c.oid) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
            WHERE l.pid = pg_backend_pid() AND c.relname ~ '^finished_jobs_2.......$'"""


async def old_days(db: Db) -> None:
    """Creates partitions of days long ago."""
    await db.execute("SELECT set_config('pgworkd.clock', (now() - interval '90 days')::text, false)")
    await db.execute("SELECT pgworkd.ensure_partitions($1)", DAYS - 1)
    await db.execute("RESET pgworkd.clock")


async def finish(db: Db, ids: list[uuid.UUID]) -> None:
    assert set(await claim_ids(db, await worker(db), len(ids))) == set(ids)
    await complete(db, ids)


async def test_depending_on_a_finished_job_locks_only_partitions_since_its_creation(db: Db) -> None:
    await old_days(db)
    ids = await insert(db, 100)
    await finish(db, ids)
    async with db.transaction():
        assert await depend(db, await one(db), *ids) == 0
        assert await db.fetchval(LOCKED) <= 10, "yesterday, today, the week to come"


@pytest.mark.parametrize(
    "question",
    [
        "SELECT pgworkd.became(($1::uuid[])[1])",
        "SELECT pgworkd.became(($1::uuid[])[101])",
        "SELECT * FROM pgworkd.result_of($1)",
        "SELECT * FROM pgworkd.await_results($1, 'c', 60)",
        "SELECT * FROM pgworkd.await_results(($1::uuid[])[101:], 'c', 60)",
    ],
)
async def test_querying_a_finished_job_locks_only_partitions_since_its_creation(db: Db, question: str) -> None:
    await old_days(db)
    ids = await insert(db, 100)
    await finish(db, ids)
    waiting = await one(db)
    async with db.transaction():
        await db.fetch(question, [*ids, waiting])
        assert await db.fetchval(LOCKED) <= 10, "yesterday, today, the week to come"


async def test_committing_a_dependency_locks_only_partitions_since_its_creation(db: Db) -> None:
    await old_days(db)
    live = await insert(db, 3)
    async with db.transaction():
        assert await depend(db, await one(db), *live) == 3
        await db.execute("SET CONSTRAINTS ALL IMMEDIATE")
        assert await db.fetchval(LOCKED) <= 10


@pytest.mark.parametrize(
    "job_id",
    [
        uuid.UUID("01000000-0000-7000-8000-000000000000"),  # created in 2004, according to its id
        uuid.UUID("ff000000-0000-7000-8000-000000000000"),  # created in the future
        uuid.UUID("00000000-0000-4000-8000-000000000000"),  # an id without a time
    ],
)
async def test_a_finished_job_is_found_whatever_time_its_id_encodes(db: Db, job_id: uuid.UUID) -> None:
    await old_days(db)
    await one(db, id=job_id)
    await finish(db, [job_id])
    others = await insert(db, 2)
    await finish(db, others)
    async with db.transaction():
        assert await depend(db, await one(db), job_id, *others) == 0
    ids = [job_id, *others, await one(db)]
    rows = await db.fetch("SELECT id, status FROM pgworkd.result_of($1)", ids)
    assert sorted(map(tuple, rows)) == sorted([*((each, "completed") for each in ids[:3]), (ids[3], "pending")])
    assert await db.fetchval("SELECT pgworkd.became($1)", job_id) == "completed"


async def test_became_all_agrees_with_became_of_each_job(db: Db) -> None:
    done, cancelled, discarded, waiting = await insert(db, 4)
    await db.execute("SELECT pgworkd.cancel(ARRAY[$1::uuid])", cancelled)
    await db.execute("UPDATE pgworkd.jobs SET status = 'dead', failed_at = now() WHERE id = $1", discarded)
    await db.execute("SELECT pgworkd.discard(ARRAY[$1::uuid])", discarded)
    worker_id = await worker(db)
    await claim_ids(db, worker_id, 1)
    await complete(db, [done])
    ids = [done, cancelled, discarded, waiting, uuid.uuid4(), await db.fetchval("SELECT pgworkd.new_id()")]
    for some in (ids, ids[:4], ids[3:4], []):
        all_ = await db.fetch("SELECT id, status FROM pgworkd.became_all($1) ORDER BY 1", some)
        each = await db.fetch("SELECT i AS id, pgworkd.became(i) AS status FROM unnest($1::uuid[]) i ORDER BY 1", some)
        assert all_ == each
