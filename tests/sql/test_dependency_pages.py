"""A job with many dependents: its settle handles some of them, maintenance the others page by page, each once."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from tests.kits import verbs as v
from tests.kits.batches import (
    MANY,
    PAGE,
    TORN,
    WAITERS,
    after,
    alone,
    counts_of,
    crowd,
    effects,
    exact,
    keeps_nothing,
    mend,
    page,
    pages,
    undepend,
)
from tests.kits.verbs import Db

from .conftest import Connect

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

RULES = ("wait", "cancel", "run")


# Ways in which a job ends


async def _dies(db: Db, job_id: uuid.UUID) -> None:
    assert await v.fail(db, [job_id], permanent=True) == {job_id: "dead"}


async def _is_lost(db: Db, job_id: uuid.UUID) -> None:
    await db.execute("UPDATE pgworkd.jobs SET max_attempts = 1 WHERE id = $1", job_id)
    await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
    assert await v.rescue(db, await v.worker(db)) == {job_id: "dead"}


async def _is_cancelled(db: Db, job_id: uuid.UUID) -> None:
    await v.end(db, [job_id])


async def _expires(db: Db, job_id: uuid.UUID) -> None:
    await v.end(db, [job_id], status="expired")


async def _completes(db: Db, job_id: uuid.UUID) -> None:
    assert await v.complete(db, [job_id]) == {job_id}


async def _completes_beside_locks(db: Db, job_id: uuid.UUID) -> None:
    """As with a settle that is run again because it met a lock."""
    sql = "SELECT pgworkd.settle_completed($1, pgworkd.unlocked($1, '{1}'), '{NULL}')"
    async with db.transaction():
        assert await db.fetchval(sql, [job_id]) == [job_id]


async def _is_discarded(db: Db, job_id: uuid.UUID) -> None:
    await _dies(db, job_id)
    await db.execute("SELECT pgworkd.discard($1)", [job_id])


WELL = [_completes, _completes_beside_locks]
BADLY = [_dies, _is_lost, _is_cancelled, _expires, _is_discarded]


@pytest.mark.parametrize("keep_s", [None, 0])
@pytest.mark.parametrize("ends", [*WELL, *BADLY])
async def test_every_outcome_reaches_every_dependent_by_its_rule(
    db: Db, ends: Callable[[Db, uuid.UUID], Awaitable[None]], keep_s: int | None
) -> None:
    """Each call handles a part, with maintenance in between."""
    if keep_s is not None:
        await keeps_nothing(db)
    (first,) = await v.insert_running(db)
    for rule in RULES:
        await crowd(db, first, count=MANY // 3, queue=rule, on_failed=rule)
    await ends(db, first)
    reached = [rule for rule in RULES if ends in WELL or rule == "run"]
    assert sum([(await counts_of(db, rule)).get("pending", 0) for rule in reached]) < MANY / 3
    assert await effects(db) >= 1
    for _ in range(3):
        left = await page(db)
        assert left is not None
        assert left < 0, "there is more"
        if ends in WELL:
            assert await mend(db) == 0, "it is left alone: this has completed"
    await pages(db)
    assert await effects(db) == 0
    while await mend(db):
        assert await db.fetch(TORN) == []
    await pages(db)
    bad = {"wait": "blocked", "cancel": "cancelled", "run": "pending"}
    for rule in RULES:
        assert await counts_of(db, rule) == {"pending" if ends in WELL else bad[rule]: MANY // 3}
    await exact(db)


async def test_a_settle_does_the_same_work_however_many_dependents_there_are(db: Db) -> None:
    """A fixed number of rows is read and written, however many dependents there are."""
    (first,) = await v.insert_running(db)
    await crowd(db, first)
    async with db.transaction():
        sql = "SELECT n_tup_upd + n_tup_del FROM pg_stat_xact_user_tables WHERE relid = $1::regclass"
        before = [await db.fetchval(sql, f"pgworkd.{table}") for table in ("jobs", "job_dependencies")]
        await v.complete(db, [first])
        done = [await db.fetchval(sql, f"pgworkd.{table}") for table in ("jobs", "job_dependencies")]
    for was, is_ in zip(before, done, strict=True):
        assert 1_000 <= is_ - was < 1_100
    assert await effects(db) == 1
    assert (await counts_of(db))["pending"] < 1_100


async def test_a_daemon_killed_between_or_within_pages_loses_nothing(db: Db, connect: Connect) -> None:
    (first,) = await v.insert_running(db)
    others = await v.insert_running(db, 2)
    await crowd(db, first, *others)
    await v.complete(db, [first, others[0]])
    for number in range(4):
        dying = await connect()
        await v.clock(0, dying)
        await page(dying)
        await dying.execute("BEGIN")
        await page(dying)  # this one is rolled back
        dying.terminate()
        await alone(db)
        waits = "SELECT count(*) FROM pgworkd.jobs WHERE queue = 'then' AND waiting_on = 3"
        assert await db.fetchval(waits) < MANY - number * PAGE / 2
        await exact(db)
    await pages(db, most=6 * MANY // PAGE)
    assert await effects(db) == 0
    assert await counts_of(db) == {"blocked": MANY}
    assert await db.fetchval("SELECT bool_and(waiting_on = 1) FROM pgworkd.jobs WHERE queue = 'then'")
    await v.complete(db, others[1:])
    await pages(db)
    assert await counts_of(db) == {"pending": MANY}
    await exact(db)


async def test_dependents_may_come_go_and_change_between_pages(db: Db) -> None:
    """Cancelled, released, deleted by hand; new dependents find that it has completed."""
    (first, other) = await v.insert_running(db, 2)
    ids = await crowd(db, first, other)
    await v.complete(db, [first])
    shuffled = [row[0] for row in await db.fetch(WAITERS, first)]
    random.Random(7).shuffle(shuffled)  # noqa: S311 - a test
    cancelled, freed, deleted = shuffled[:50], shuffled[50:100], shuffled[100:150]
    for part in range(5):
        await page(db)
        await v.cancel(db, *cancelled[part::5])
        await undepend(db, *freed[part::5])
        await db.execute("DELETE FROM pgworkd.jobs WHERE id = ANY ($1)", deleted[part::5])
        late = await after(db, first, queue="late")
        assert await db.fetchval("SELECT status FROM pgworkd.jobs WHERE id = $1", late) == "pending"
        await after(db, first, other, queue="then")
    await pages(db)
    assert await effects(db) == 0
    assert await counts_of(db) == {"blocked": MANY - 150 + 5, "cancelled": 50, "pending": 50}
    await exact(db)
    await v.complete(db, [other])
    await pages(db)
    assert await counts_of(db) == {"pending": MANY - 150 + 5 + 50, "cancelled": 50}
    assert set(ids) >= set(deleted)
    await exact(db)


async def test_depending_on_a_finished_job_without_history_is_refused(db: Db) -> None:
    await keeps_nothing(db)
    (first,) = await v.insert_running(db)
    await crowd(db, first)
    await v.complete(db, [first])
    reasons = await db.fetch("SELECT DISTINCT reason FROM pgworkd.blocked_jobs")
    assert [row[0] for row in reasons] == ["waits for 1 job"], "no reason to do anything"
    with pytest.raises(asyncpg.PostgresError, match="does not exist") as caught:
        await after(db, first)
    assert caught.value.sqlstate == v.NEVER
    await db.execute("ROLLBACK")
    await pages(db)
    assert await counts_of(db) == {"pending": MANY}


async def test_a_dependency_committed_as_the_job_ends_is_counted_once(db: Db, other: Db) -> None:
    """Committed between two pages; when it was declared, the outcome was not visible."""
    (first,) = await v.insert_running(db)
    await crowd(db, first)
    await other.execute("BEGIN")
    late = [await after(other, first, queue="late") for _ in range(3)]
    await v.complete(db, [first])
    await page(db)
    await other.execute("COMMIT")
    assert await counts_of(db, "late") == {"pending": len(late)}
    await pages(db)
    assert await counts_of(db) == {"pending": MANY}
    assert await counts_of(db, "late") == {"pending": len(late)}
    await exact(db)


async def test_a_job_retried_between_pages_has_not_ended_for_its_remaining_dependents(db: Db) -> None:
    """A dead job is retried between pages: a job that depends on it from now on waits for its next outcome."""
    (first,) = await v.insert_running(db)
    await crowd(db, first, on_failed="run")
    await _dies(db, first)
    await page(db)
    before = (await counts_of(db))["pending"]
    await v.retry(db, first)
    await after(db, first, on_failed="run", queue="late")
    await pages(db)
    assert await effects(db) == 0
    assert (await counts_of(db))["pending"] == before
    assert await counts_of(db, "late") == {"blocked": 1}
    await exact(db)
    assert await v.claim_ids(db, await v.worker(db)) == [first]
    await v.complete(db, [first], 2)
    await pages(db)
    assert await counts_of(db) == {"pending": MANY}
    assert await counts_of(db, "late") == {"pending": 1}
    await exact(db)


@pytest.mark.parametrize("on_failed", ["run", "cancel"])
async def test_a_death_a_retry_and_a_second_end_count_each_dependent_once(db: Db, on_failed: str) -> None:
    await keeps_nothing(db)
    (first, other) = await v.insert_running(db, 2)
    await crowd(db, first, other, on_failed=on_failed)
    await _dies(db, first)
    await page(db)
    await v.retry(db, first)
    gone = (await counts_of(db)).get("cancelled", 0)
    assert (gone > 0) == (on_failed == "cancel")
    assert await v.claim_ids(db, await v.worker(db)) == [first]
    await v.complete(db, [first], 2)
    assert await effects(db) == 2
    await page(db)
    assert await mend(db) == 0
    await pages(db)
    assert await db.fetchval("SELECT bool_and(waiting_on = 1) FROM pgworkd.jobs WHERE queue = 'then'")
    await v.complete(db, [other])
    await pages(db)
    assert await counts_of(db) == {"pending": MANY - gone} | ({"cancelled": gone} if gone else {})
    await exact(db)


async def test_a_dependent_of_a_dead_and_a_retried_job_still_waits_for_the_retried_one(db: Db) -> None:
    """The effects of both are deferred, and applied in one page."""
    (first, other) = await v.insert_running(db, 2)
    await crowd(db, first, other, on_failed="run")
    await _dies(db, first)
    await _dies(db, other)
    await v.retry(db, other)
    assert await effects(db) == 2
    before = await db.fetchval("SELECT count(*) FROM pgworkd.job_dependencies WHERE depends_on = $1", other)
    await pages(db)
    assert await effects(db) == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.job_dependencies WHERE depends_on = $1", first) == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.job_dependencies WHERE depends_on = $1", other) == before
    await exact(db)
