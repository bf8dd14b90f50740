"""Dependents in pages, with others beside them: locked or refusing ones, small and large effects, cancelled ones."""

from __future__ import annotations

import pytest

from tests.kits.batches import (
    MANY,
    PAGE,
    WAITERS,
    counts_of,
    crowd,
    effects,
    exact,
    mend,
    page,
    pages,
)
from tests.kits.sessions import Notices, refuse, refused_rows
from tests.kits.verbs import Db, complete, fail, insert_running

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]


async def test_locked_dependents_are_retried_later_and_do_not_delay_others(db: Db, other: Db) -> None:
    (first,) = await insert_running(db)
    await crowd(db, first)
    await complete(db, [first])
    waiting = [row[0] for row in await db.fetch(WAITERS, first)]
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = ANY ($1) FOR UPDATE", waiting[: 2 * PAGE])
        await pages(db)
        assert await counts_of(db) == {"pending": MANY - 2 * PAGE, "blocked": 2 * PAGE}
        for _ in range(5):  # round after round, each with its pause
            assert (await page(db) or 0) != 0
        assert await mend(db) == 0
        oldest = await db.fetchval("SELECT min(put_off_at) FROM pgworkd.pending_effects")
        assert oldest == await db.fetchval("SELECT pgworkd.clock()"), "the time of the end, not of the last try"
    while await effects(db):
        await pages(db)
    assert await counts_of(db) == {"pending": MANY}
    await exact(db)


async def test_one_dependent_that_refuses_does_not_delay_the_others(db: Db) -> None:
    (first,) = await insert_running(db)
    await crowd(db, first)
    await complete(db, [first])
    waiting = [row[0] for row in await db.fetch(WAITERS, first)]
    for bad in (waiting[3], waiting[PAGE - 1], waiting[-1]):
        await refuse(db, bad)
    await pages(db)
    assert await counts_of(db) == {"pending": MANY - 3, "blocked": 3}
    assert await refused_rows(db) == {
        "apply_effects": {str(bad) for bad in (waiting[3], waiting[PAGE - 1], waiting[-1])}
    }
    assert await effects(db) == 1
    assert await mend(db) == 0, "still not taken for one that has vanished"


async def test_a_job_with_few_dependents_does_not_wait_for_one_with_many(db: Db) -> None:
    firsts = await insert_running(db, 3)
    await crowd(db, firsts[0], queue="large")
    for first in firsts[1:]:
        await crowd(db, first, count=1_010, queue="small")
    for first in firsts:
        await complete(db, [first])
    for _ in range(3):
        await page(db)
    assert await counts_of(db, "small") == {"pending": 2_020}
    assert (await counts_of(db, "large"))["blocked"] > 0
    await pages(db)
    assert await counts_of(db, "large") == {"pending": MANY}


async def test_many_dependents_of_a_dead_job_are_cancelled_in_steps_with_their_own(db: Db) -> None:
    (first,) = await insert_running(db)
    ids = await crowd(db, first, count=2_500, queue="one", on_failed="cancel")
    for parent in ids[:2]:
        await crowd(db, parent, count=1_200, queue="two", on_failed="cancel")
        await crowd(db, parent, count=1_200, queue="run", on_failed="run")
    await fail(db, [first], permanent=True)
    assert await mend(db) == 0, "it is left to the pages"
    await pages(db)
    assert await counts_of(db, "one") == {"cancelled": 2_500}
    while await mend(db) or await effects(db):
        await pages(db)
    assert await counts_of(db, "one") == {"cancelled": 2_500}
    assert await counts_of(db, "two") == {"cancelled": 2_400}
    assert await counts_of(db, "run") == {"pending": 2_400}
    await exact(db)


async def test_maintenance_skips_locked_and_refusing_dependents_step_by_step(db: Db, other: Db) -> None:
    (first,) = await insert_running(db)
    ids = await crowd(db, first, count=300, on_failed="cancel")
    await fail(db, [first], permanent=True)
    await refuse(db, ids[0])
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = ANY ($1) FOR UPDATE", ids[1:100])
        assert sum([await db.fetchval("SELECT pgworkd.mend_dependencies(50)") for _ in range(6)]) == 200
    assert sum([await db.fetchval("SELECT pgworkd.mend_dependencies(50)") for _ in range(3)]) == 99
    assert await counts_of(db) == {"cancelled": 299, "blocked": 1}
    assert await refused_rows(db) == {"mend_dependencies": {str(ids[0])}}


async def test_daemons_are_notified_once_of_many_dependents(db: Db, notices: Notices) -> None:
    (first,) = await insert_running(db)
    await crowd(db, first)
    await complete(db, [first])
    assert {"effects": True} in await notices.heard()
    await pages(db)
    assert {"effects": True} not in await notices.heard()


async def test_the_end_of_a_job_with_few_dependents_leaves_no_pending_effects(db: Db) -> None:
    firsts = await insert_running(db, 300)
    await crowd(db, *firsts[:100], count=14)
    for first in firsts[100:200]:
        await crowd(db, first, count=3, queue="each")
    await crowd(db, firsts[200], count=900, queue="wait")
    await complete(db, firsts[:200])
    assert await counts_of(db) == {"pending": 14}
    assert await counts_of(db, "each") == {"pending": 300}
    assert await fail(db, firsts[200:], permanent=True)
    assert await effects(db) == 0
    await exact(db)
