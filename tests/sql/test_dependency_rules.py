"""What becomes of dependents when a dependency does not complete: they wait, are cancelled, or run anyway."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.kits import verbs as v
from tests.kits.batches import (
    add,
    after,
    batch,
    blocked,
    calls,
    cancel_batch,
    counted,
    depend,
    exact,
    mend,
    run_one,
    seal,
    state,
)
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

DAY = 86400


async def _dies(db: Db, job_id: uuid.UUID) -> None:
    await v.fail(db, [job_id], permanent=True)


async def _ends(db: Db, job_id: uuid.UUID) -> None:
    await v.end(db, [job_id])


async def _expires(db: Db, job_id: uuid.UUID) -> None:
    await v.end(db, [job_id], status="expired")


async def _is_lost(db: Db, job_id: uuid.UUID) -> None:
    """Lost with its worker, for the last time."""
    await db.execute("UPDATE pgworkd.jobs SET losses = 2 WHERE id = $1", job_id)
    rescuer = await v.worker(db)
    await v.steady(db, rescuer, until=60)
    assert await v.rescue(db, rescuer) == {job_id: "dead"}


async def _asked_to_stop(db: Db, job_id: uuid.UUID) -> None:
    """It failed and would be retried, but its cancellation was requested."""
    await v.cancel(db, job_id)
    await v.fail(db, [job_id])


WAYS = [_dies, _ends, _expires, _is_lost, _asked_to_stop]


@pytest.mark.parametrize("way", WAYS)
async def test_each_rule_applies_to_every_outcome_but_completed(
    db: Db, way: Callable[[Db, uuid.UUID], Awaitable[Any]]
) -> None:
    (first,) = await v.insert_running(db, max_attempts=5)
    other = await v.one(db, queue="other")
    rules = ("wait", "cancel", "run")
    waits, goes, runs = [await after(db, first, on_failed=rule, queue="then") for rule in rules]
    async with db.transaction():
        both = await v.one(db, queue="then")
        await depend(db, both, first, on_failed="run")
        await depend(db, both, other)
    await way(db, first)
    assert await v.statuses(db, [waits, goes, runs, both]) == ["blocked", "blocked", "pending", "blocked"]
    await mend(db)
    assert await v.statuses(db, [waits, goes, runs, both]) == ["blocked", "cancelled", "pending", "blocked"]
    assert (await blocked(db, waits))[2] == first
    assert (await blocked(db, both))[::2] == (1, None)
    await exact(db)


async def test_a_cancelled_dependent_applies_the_rules_of_its_own_dependents(db: Db) -> None:
    (first,) = await v.insert_running(db)
    chain = [first]
    for _ in range(60):
        chain.append(await after(db, chain[-1], on_failed="cancel"))
    runs, waits = await after(db, chain[-1], on_failed="run"), await after(db, chain[-1])
    await v.fail(db, [first], permanent=True)
    await mend(db)
    assert set(await v.statuses(db, chain[1:])) == {"cancelled"}
    assert await v.statuses(db, [runs, waits]) == ["pending", "blocked"]
    assert (await blocked(db, waits))[2] == chain[-1]
    error = await db.fetchval("SELECT DISTINCT error FROM pgworkd.finished_jobs")
    assert error == "a job that it depends on did not complete"
    await exact(db)


@pytest.mark.parametrize("how", ["discard", "prune", "cancel"])
async def test_a_dead_dependency_that_is_discarded_or_pruned(db: Db, how: str) -> None:
    (first,) = await v.insert_running(db)
    waits, runs = await after(db, first), await after(db, first, on_failed="run")
    await v.fail(db, [first], permanent=True)
    assert await v.statuses(db, [waits, runs]) == ["blocked", "pending"]
    if how == "prune":
        await v.clock(31 * DAY, db)
        await db.execute("SELECT pgworkd.prune(7, 30)")
    else:
        await db.execute(f"SELECT pgworkd.{how}($1)", [first])
    assert (await blocked(db, waits))[2] == first
    await v.cancel(db, waits)
    await exact(db)


async def test_a_dependency_in_a_queue_without_history_is_satisfied_too(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    first, second = await v.insert_running(db, 2)
    waits, goes = await after(db, first, queue="r"), await after(db, second, on_failed="cancel", queue="r")
    await v.complete(db, [first])
    await v.end(db, [second])
    await mend(db)
    assert await v.statuses(db, [waits, goes]) == ["pending", "cancelled"]
    await exact(db)


# Batches


async def test_a_blocked_job_of_a_batch_is_live_and_is_cancelled_with_the_batch(db: Db) -> None:
    (first,) = await v.insert_running(db, queue="first")
    root = await batch(db, on_complete={"queue": "done"})
    async with db.transaction():
        ids = await add(db, root, 2)
        await depend(db, ids[0], first)
    await seal(db, root)
    await run_one(db, await v.worker(db), ids[1])
    assert await state(db, root) == ["sealed"]
    await exact(db)
    assert await cancel_batch(db, root) == (1, 0, False)
    assert (await state(db, root))[0] == "cancelled"
    assert len(await calls(db)) == 1
    await exact(db)
    await counted(db)


@pytest.mark.parametrize("nested", [False, True])
async def test_a_cancelled_dependent_is_counted_in_its_own_batch(db: Db, *, nested: bool) -> None:
    roots = [await batch(db, name, on_complete={"queue": "done"}) for name in "ab"]
    (first,) = await add(db, roots[0])
    async with db.transaction():
        (second,) = await add(db, roots[0] if nested else roots[1])
        await depend(db, second, first, on_failed="cancel")
    await seal(db, *roots)
    assert await v.claim_ids(db, await v.worker(db)) == [first]
    await v.fail(db, [first], permanent=True)
    await mend(db)
    assert await v.statuses(db, [second]) == ["cancelled"]
    assert (await state(db, roots[0])) == ["completed with failures"]
    assert len(await calls(db)) == 2
    await exact(db)
    await counted(db)


async def test_cancelling_a_batch_releases_dependents_elsewhere(db: Db) -> None:
    root = await batch(db)
    first = await add(db, root, 3)
    runs, goes = await after(db, *first, on_failed="run"), await after(db, *first, on_failed="cancel")
    await cancel_batch(db, root)
    await mend(db)
    assert await v.statuses(db, [runs, goes]) == ["pending", "cancelled"]
    await exact(db)
    await counted(db)
