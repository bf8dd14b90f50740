"""Dedupe keys that are kept after their job or tree has finished: listing them, and freeing one early."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd.admin.keys import KEPT
from tests.kits.batches import batch, cancel_batch, create, run, seal, sealed
from tests.kits.sessions import Later, blocks, rows_read, waits_for_lock
from tests.kits.verbs import T0, Db, at, cancel, claim_ids, clock, complete, enqueue, fail, one, retry, statuses, worker

from .test_dedupe import ENDS, UNTIL, dead, ended, is_free, kept, keyed

pytestmark = pytest.mark.usefixtures("t0")


async def listed(db: Db) -> list[tuple[Any, ...]]:
    """(queue, dedupe_key, until, id, batch, became) of each."""
    return [tuple(row) for row in await db.fetch("SELECT * FROM pgworkd.kept_keys")]


async def free(db: Db, queue: str = "q", key: str = "k") -> bool:
    return bool(await db.fetchval("SELECT pgworkd.free_key($1, $2, 'ada')", queue, key))


async def free_of_batch(db: Db, name: str = "b", key: str = "k") -> bool:
    return bool(await db.fetchval("SELECT pgworkd.free_batch_key($1, $2, 'ada')", name, key))


async def kept_by_batch(db: Db, key: str = "k", *, dies: bool = False) -> uuid.UUID:
    """A tree that has finished and keeps its key."""
    batch_id, ids = await sealed(db, 1, dedupe_key=key, dedupe_until=UNTIL)
    worker_id = await worker(db)
    if dies:
        assert await claim_ids(db, worker_id) == ids
        await fail(db, ids, permanent=True)
    else:
        assert await run(db, worker_id) == ids
    return uuid.UUID(str(batch_id))


async def notes(db: Db) -> list[tuple[Any, ...]]:
    """(who, queue, job_id, before, after) of every key that was freed."""
    await db.execute("SET timezone = 'UTC'")
    rows = await db.fetch(
        "SELECT who, queue, job_id, before, after FROM pgworkd.audit WHERE what = 'free_key' ORDER BY id"
    )
    return [(*row[:3], json.loads(row[3]), json.loads(row[4])) for row in rows]


# The list


@pytest.mark.parametrize("how", ENDS)
async def test_a_kept_key_is_listed_with_the_outcome_of_its_job(db: Db, how: str) -> None:
    job_id = await ended(db, how)
    assert await listed(db) == [("q", "k", UNTIL, job_id, None, how.split()[0])]
    await clock(3600, db)
    assert await listed(db) == [], "it is free, also before a daemon has come by"


async def test_a_kept_key_of_a_queue_without_history_is_listed_as_gone(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    job_id = await kept(db)
    assert await listed(db) == [("q", "k", UNTIL, job_id, None, "gone")]


@pytest.mark.parametrize(("dies", "became"), [(False, "completed"), (True, "completed with failures")])
async def test_a_tree_that_keeps_its_key_is_listed_with_its_outcome(db: Db, dies: bool, became: str) -> None:
    batch_id = await kept_by_batch(db, dies=dies)
    assert await listed(db) == [("q", "k", UNTIL, batch_id, "b", became)]
    await clock(3600, db)
    assert await listed(db) == []


async def test_keys_of_live_and_dead_jobs_are_not_listed(db: Db) -> None:
    await dead(db, UNTIL)
    await keyed(db, until=UNTIL)
    cancelled = await keyed(db, "other", UNTIL)
    await cancel(db, cancelled)
    assert [row[1] for row in await listed(db)] == ["other"]
    await batch(db, dedupe_key="k", dedupe_until=UNTIL)
    stopped, _ = await sealed(db, 1, "stopped", dedupe_key="k", dedupe_until=UNTIL)
    await cancel_batch(db, stopped)
    assert [row[1] for row in await listed(db)] == ["other"], "a tree that is cancelled frees its key"


# Freeing one


async def test_a_freed_key_can_be_taken_at_once_and_the_audit_records_the_actor(db: Db) -> None:
    job_id, other_id = await kept(db), await kept(db, "other")
    assert await free(db)
    assert [row[3] for row in await listed(db)] == [other_id]
    before = {"dedupe_key": "k", "dedupe_until": UNTIL.isoformat()}
    assert await notes(db) == [("ada", "q", job_id, before, dict.fromkeys(before))]
    new = await one(db, dedupe_key="k")
    assert await statuses(db, [job_id, new]) == ["completed", "pending"]
    assert not await free(db), "that of a live job is not freed"
    assert len(await notes(db)) == 1
    assert await db.fetchval("SELECT dedupe_key FROM pgworkd.jobs WHERE id = $1", new) == "k"


@pytest.mark.parametrize("state", ["pending", "running", "failed", "blocked"])
async def test_the_key_of_a_live_job_is_not_freed(db: Db, state: str) -> None:
    columns = {"serialize_key": "s"} if state == "blocked" else {}
    if state == "blocked":
        await one(db, **columns)
        worker_id = await worker(db)
        assert len(await claim_ids(db, worker_id)) == 1
        job_id = await keyed(db, until=UNTIL, **columns)
        assert await claim_ids(db, worker_id) == []
    else:
        job_id = await keyed(db, until=UNTIL)
        if state != "pending":
            assert await claim_ids(db, await worker(db)) == [job_id]
        if state == "failed":
            await fail(db, [job_id])
    assert await statuses(db, [job_id]) == [state]
    assert not await free(db)
    assert (await statuses(db, [job_id]), await is_free(db)) == ([state], False)
    assert await notes(db) == []


async def test_freeing_a_key_that_is_free_changes_nothing(db: Db) -> None:
    await dead(db, UNTIL)
    assert [await free(db), await free(db, "other"), await free(db, key="nobody's")] == [False] * 3
    await db.execute("DELETE FROM pgworkd.jobs")
    await kept(db)
    await clock(3600, db)
    assert not await free(db), "its time is over"
    assert await notes(db) == []


async def test_a_dead_job_can_be_retried_once_its_key_is_freed(db: Db) -> None:
    job_id = await dead(db)
    await kept(db)
    with pytest.raises(asyncpg.UniqueViolationError):
        await retry(db, job_id)
    assert await free(db)
    assert await retry(db, job_id) == {job_id}


async def test_the_key_of_a_finished_tree_is_freed(db: Db) -> None:
    first = await kept_by_batch(db)
    assert not (await create(db, dedupe_key="k"))["created"]
    assert not await free(db), "it is no job's"
    assert await free_of_batch(db)
    assert await listed(db) == []
    before = {"batch": str(first), "dedupe_key": "k", "dedupe_until": UNTIL.isoformat()}
    after = {"batch": str(first), "dedupe_key": None, "dedupe_until": None}
    assert await notes(db) == [("ada", "q", None, before, after)]
    second = await create(db, dedupe_key="k", dedupe_until=UNTIL)
    assert second["created"]
    assert not await free_of_batch(db), "the second has not finished"
    await seal(db, second["id"])
    assert [row[3] for row in await listed(db)] == [second["id"]]
    assert len(await notes(db)) == 1


async def test_a_key_may_be_kept_for_as_long_as_its_tree(db: Db) -> None:
    """It does not hold up the end of the tree's retention, as a time does."""
    forever = datetime.max.replace(tzinfo=UTC)
    first, _ = await sealed(db, 1, dedupe_key="k", dedupe_until=forever)
    timed, _ = await sealed(db, 1, "timed", dedupe_key="k", dedupe_until=at(20 * 86_400))
    await run(db, await worker(db))
    assert await db.fetchval("SELECT dedupe_until = 'infinity' FROM pgworkd.batches WHERE id = $1", first)
    for days, deleted in ((6, 0), (8, 1)):
        await clock(days * 86_400, db)
        assert (await create(db, dedupe_key="k", dedupe_until=forever))["id"] == first
        await db.execute("SELECT pgworkd.prune(7, 30)")
        assert await db.fetchval("SELECT count(*) FROM pgworkd.batches") == 2 - deleted
    assert await db.fetchval("SELECT id FROM pgworkd.batches") == timed
    assert (await create(db, dedupe_key="k", dedupe_until=forever))["created"]


async def test_the_key_is_freed_in_each_queue(db: Db) -> None:
    for queue in ("q", "other"):
        made = await create(db, queue=queue, dedupe_key="k", dedupe_until=UNTIL)
        assert made["created"]
        await seal(db, made["id"])
    assert len(await listed(db)) == 2
    assert await free_of_batch(db)
    assert await listed(db) == []
    assert len(await notes(db)) == 2


async def test_a_reopened_tree_holds_its_key_again_if_nobody_took_it(db: Db) -> None:
    batch_id = await kept_by_batch(db, dies=True)
    job_id = await db.fetchval("SELECT id FROM pgworkd.jobs WHERE batch_id = $1", batch_id)
    assert await free_of_batch(db)
    assert await retry(db, job_id) == {job_id}
    assert (await create(db, dedupe_key="k"))["id"] == batch_id
    assert not await free_of_batch(db)


# Several sessions


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_concurrent_enqueue_waits_for_the_session_that_frees_the_key(
    db: Db, other: Db, third: Db, end: str
) -> None:
    job_id = await kept(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await free(db)
        inserting = Later(tasks, enqueue(other, "skip", dedupe_key="k"))
        await waits_for_lock(third, other)
        await db.execute(end)
        found, created, _ = await inserting.answer()
    assert created == (end == "COMMIT")
    assert (found == job_id) == (end == "ROLLBACK")
    assert len(await notes(db)) == (end == "COMMIT")


async def test_a_concurrent_plain_insert_waits_for_the_session_that_frees_the_key(db: Db, other: Db, third: Db) -> None:
    await kept(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await free(db)
        inserting = Later(tasks, one(other, dedupe_key="k"))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        await inserting.answer()


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_job_that_takes_a_key_the_instant_it_expires_keeps_it(db: Db, other: Db, third: Db, end: str) -> None:
    """The session that frees it has an earlier clock, and must not free a key that belongs to a live job by then."""
    await kept(db)
    await clock(3600, db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        new = await one(db, dedupe_key="k")
        freeing = Later(tasks, free(other))
        await waits_for_lock(third, other)
        await db.execute(end)
        assert await freeing.answer() == (end == "ROLLBACK")
    assert await statuses(db, [new]) == (["pending"] if end == "COMMIT" else [None])
    assert len(await notes(db)) == (end == "ROLLBACK")


async def test_of_two_sessions_that_free_a_key_one_succeeds(db: Db, other: Db, third: Db) -> None:
    await kept(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await free(db)
        second = Later(tasks, free(other))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await second.answer() is False
    assert len(await notes(db)) == 1


async def test_a_job_that_finishes_concurrently_keeps_its_key(db: Db, other: Db) -> None:
    """Its settle has not been committed: the key belongs to a live job, and freeing it does not wait."""
    job_id = await keyed(db, until=UNTIL)
    assert await claim_ids(db, await worker(db)) == [job_id]
    await db.execute("BEGIN")
    await complete(db, [job_id])
    with anyio.fail_after(10):
        assert await free(other) is False
    await db.execute("COMMIT")
    assert await free(other) is True


async def test_a_tree_reopened_concurrently_keeps_its_key(db: Db, other: Db, third: Db) -> None:
    batch_id = await kept_by_batch(db, dies=True)
    job_id = await db.fetchval("SELECT id FROM pgworkd.jobs WHERE batch_id = $1", batch_id)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        assert await retry(db, job_id) == {job_id}
        freeing = Later(tasks, free_of_batch(other))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await freeing.answer() is False
    assert await db.fetchval("SELECT dedupe_until FROM pgworkd.batches WHERE id = $1", batch_id) == UNTIL


async def test_a_concurrent_create_batch_gets_the_old_batch_or_a_new_one(db: Db, other: Db) -> None:
    batch_id = await kept_by_batch(db)
    await db.execute("BEGIN")
    assert await free_of_batch(db)
    assert (await create(other, dedupe_key="k"))["id"] == batch_id, "as long as it is not committed"
    await db.execute("COMMIT")
    assert (await create(other, dedupe_key="k"))["created"]


# Cost


async def test_neither_listing_nor_freeing_keys_reads_the_backlog(db: Db) -> None:
    """Nor, once statistics know that there are many, do all kept keys slow a list of a few."""
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, dedupe_key) SELECT 'q', 'live ' || i FROM generate_series(1, 30000) i"
    )
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, dedupe_key, dedupe_until, status) SELECT 'q', 'kept ' || i,"
        " $1::timestamptz + make_interval(secs => i), 'completed' FROM generate_series(1, 20000) i",
        T0,
    )
    for analyzed in (False, True):
        if analyzed:
            await db.execute("ANALYZE pgworkd.jobs")
        for key in (None, "kept 7"):
            async with db.transaction():
                scanned, fetched = await rows_read(db)
                found = await db.fetch(KEPT, "q", key, 20)
                now_scanned, now_fetched = await rows_read(db)
            assert found[0]["dedupe_key"] == (key or "kept 20000")
            assert now_scanned == scanned, "it reads the table from one end to the other"
            assert now_fetched - fetched <= (100 if analyzed or key else 50_000), (analyzed, key)
        for key in ("kept 9", "live 9", "nobody's"):
            assert await blocks(db, "SELECT pgworkd.free_key('q', $1)", key) <= 40, key
