"""Which jobs cannot be depended on, and when it is too late to declare a dependency."""

from __future__ import annotations

import itertools
import uuid

import asyncpg
import pytest

from tests.kits.batches import after, depend, exact
from tests.kits.verbs import NEVER, Db, at, cancel, clock, complete, fail, insert, insert_running, one, statuses

pytestmark = pytest.mark.usefixtures("t0")


async def _refused(db: Db, *others: uuid.UUID, job_id: uuid.UUID | None = None, on_failed: str = "wait") -> str:
    """The message and hint of the refusal, for a new job or this one; nothing of it is stored."""
    with pytest.raises(asyncpg.PostgresError) as caught:
        async with db.transaction():
            await depend(db, await one(db) if job_id is None else job_id, *others, on_failed=on_failed)
    assert caught.value.sqlstate == NEVER
    return f"{caught.value.args[0]} | {caught.value.hint}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("NULL, '{}'", "p_job must not be NULL"),
        ("pgworkd.new_id(), NULL", "p_after must not be, or contain, NULL"),
        ("pgworkd.new_id(), '{NULL}'", "p_after must not be, or contain, NULL"),
        ("pgworkd.new_id(), '{}', NULL", "p_on_failed_dependency must be wait, cancel or run"),
        ("pgworkd.new_id(), '{}', 'never'", "p_on_failed_dependency must be wait, cancel or run"),
        (
            "pgworkd.new_id(), array_fill(pgworkd.new_id(), '{10001}')",
            "p_after has more than 10000 jobs: add them by several calls",
        ),
    ],
)
async def test_invalid_arguments_are_refused(db: Db, arguments: str, message: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError) as caught:
        await db.execute(f"SELECT pgworkd.depend({arguments})")
    assert caught.value.args[0] == message


@pytest.mark.parametrize("on_failed", ["wait", "cancel", "run"])
async def test_a_job_cannot_depend_on_itself_or_on_a_missing_job(db: Db, on_failed: str) -> None:
    missing = uuid.uuid4()
    assert f"{missing}, which does not exist | Check the id" in await _refused(db, missing, on_failed=on_failed)
    async with db.transaction():
        job_id = await one(db)
        assert "cannot wait for itself | Leave it out" in await _refused(db, job_id, job_id=job_id, on_failed=on_failed)
    assert await statuses(db, [job_id]) == ["pending"]


@pytest.mark.parametrize("length", [1, 2, 3, 40])
async def test_a_cycle_of_any_length_is_refused(db: Db, length: int) -> None:
    async with db.transaction():
        ids = await insert(db, length + 1)
        for before, following in itertools.pairwise(ids):
            await depend(db, following, before)
        said = await _refused(db, ids[-1], job_id=ids[0])
        assert "would wait, by way of others, for itself | " in said
    assert await statuses(db, ids) == ["pending"] + ["blocked"] * length
    await exact(db)


@pytest.mark.parametrize("status", ["pending", "running", "dead", "completed", "unknown"])
async def test_dependencies_cannot_be_added_once_others_can_see_the_job(db: Db, status: str) -> None:
    other = await one(db, queue="other")
    (job_id,) = await insert(db, 1) if status == "pending" else await insert_running(db)
    if status == "dead":
        await fail(db, [job_id], permanent=True)
    elif status == "completed":
        await complete(db, [job_id])
    elif status == "unknown":
        job_id = uuid.uuid4()
    said = await _refused(db, other, job_id=job_id)
    assert f"job {job_id} was not inserted by this transaction | Say what a job waits for in the transaction" in said


async def test_a_job_that_can_no_longer_complete_is_refused(db: Db) -> None:
    gone, late = await one(db), await one(db, expires_at=at(1))
    discarded, dead = await insert_running(db, 2, queue="dead")
    await cancel(db, gone)
    await fail(db, [discarded], permanent=True)
    await fail(db, [dead], permanent=True)
    await db.execute("SELECT pgworkd.discard($1)", [discarded])
    await clock(2, db)
    await db.execute("SELECT pgworkd.expire()")
    ways = {gone: "was cancelled", late: "has expired", discarded: "was discarded", dead: "is dead"}
    for other, why in ways.items():
        for on_failed in ("wait", "cancel"):
            if (other, on_failed) != (dead, "wait"):  # it may be retried
                said = await _refused(db, other, on_failed=on_failed)
                assert f"{other}, which {why} | It will not complete: leave it out" in said
        assert await statuses(db, [await after(db, other, on_failed="run")]) == ["pending"]
    assert await statuses(db, [await after(db, dead)]) == ["blocked"]


async def test_one_invalid_dependency_among_many_refuses_all(db: Db) -> None:
    ids = await insert(db, 5)
    await _refused(db, *ids, uuid.uuid4())
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 5


async def test_a_finished_job_that_only_keeps_its_key_counts_as_finished(db: Db) -> None:
    """Such a row of `jobs` holds the dedupe_key and is no longer a job."""
    (job_id,) = await insert_running(db, dedupe_key="d", dedupe_until=at(100))
    await complete(db, [job_id])
    assert await statuses(db, [await after(db, job_id)]) == ["pending"]


async def test_a_manual_update_cannot_block_a_job_without_a_reason(db: Db) -> None:
    for sql in ("SET waiting_on = 1", "SET status = 'blocked'"):
        job_id = await one(db)
        with pytest.raises(asyncpg.CheckViolationError, match="blocked_jobs_need_a_serialize_key_or_depend"):
            await db.execute(f"UPDATE pgworkd.jobs {sql} WHERE id = $1", job_id)
