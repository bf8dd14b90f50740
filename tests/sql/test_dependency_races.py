"""Declaring a dependency while the other job ends: no outcome is missed, no open transaction delays a settle."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits.batches import add, after, batch, blocked, counted, exact, mend, seal, state
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import NEVER, Db, cancel, claim, complete, end, fail, insert_running, one, retry, statuses, worker

from .conftest import Connect

pytestmark = [pytest.mark.usefixtures("t0"), pytest.mark.slow("several sessions in each order")]

ENDS = ["COMMIT", "ROLLBACK"]


async def _dies(db: Db, ids: list[uuid.UUID]) -> Any:
    return await fail(db, ids, permanent=True)


async def test_no_settle_waits_for_a_transaction_that_creates_dependents(db: Db, other: Db) -> None:
    ids = await insert_running(db, 4)
    waits = await after(db, ids[0], queue="then")
    async with other.transaction():
        last = await after(other, *ids, queue="then")
        with anyio.fail_after(5):
            await complete(db, ids[:1])
            await fail(db, ids[1:2], permanent=True)
            await end(db, ids[2:3])
            await complete(db, ids[3:])
    assert await statuses(db, [waits]) == ["pending"]
    assert (await blocked(db, last))[0] == 2, "one is dead, one was cancelled"
    await exact(db)


@pytest.mark.parametrize("end_with", ENDS)
@pytest.mark.parametrize("settle", [complete, _dies, end])
@pytest.mark.parametrize("on_failed", ["wait", "run", "cancel"])
async def test_the_commit_of_a_dependency_waits_for_an_uncommitted_settle(
    db: Db, other: Db, third: Db, settle: Callable[..., Awaitable[Any]], on_failed: str, end_with: str
) -> None:
    (first,) = await insert_running(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await settle(db, [first])
        await other.execute("BEGIN")
        last = await after(other, first, on_failed=on_failed)
        committing = Later(tasks, other.execute("COMMIT"))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        await committing.answer()
    if end_with == "ROLLBACK":
        assert await statuses(db, [last]) == ["blocked"]
        await settle(db, [first])
    await mend(db)
    expected = (
        "pending" if settle is complete else {"wait": "blocked", "run": "pending", "cancel": "cancelled"}[on_failed]
    )
    assert await statuses(db, [last]) == [expected]
    await exact(db)


@pytest.mark.parametrize("end_with", ENDS)
async def test_a_settle_concurrent_with_the_commit_of_a_dependency_waits_and_sees_it(
    db: Db, other: Db, third: Db, end_with: str
) -> None:
    (first,) = await insert_running(db)
    async with anyio.create_task_group() as tasks:
        await other.execute("BEGIN")
        last = await after(other, first)
        await other.execute("SET CONSTRAINTS ALL IMMEDIATE")  # as far as a commit proceeds
        settling = Later(tasks, complete(db, [first]))
        await waits_for_lock(third, db)
        await other.execute(end_with)
        assert await settling.answer() == {first}
    assert await statuses(db, [last]) == ["pending" if end_with == "COMMIT" else None]
    await exact(db)


@pytest.mark.parametrize("end_with", ENDS)
async def test_the_last_two_dependencies_end_at_the_same_instant(db: Db, other: Db, third: Db, end_with: str) -> None:
    first, second = await insert_running(db, 2)
    last = await after(db, first, second)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete(db, [first])
        await db.execute("SET CONSTRAINTS ALL IMMEDIATE")
        settling = Later(tasks, complete(other, [second]))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        await settling.answer()
    if end_with == "ROLLBACK":
        assert await statuses(db, [last]) == ["blocked"]
        await complete(db, [first])
    assert await statuses(db, [last]) == ["pending"]
    await exact(db)


async def test_settles_of_the_same_dependents_in_any_order_do_not_deadlock(db: Db, connect: Connect) -> None:
    firsts = await insert_running(db, 40)
    lasts = [await after(db, *firsts[:: 1 + n % 3], queue="then") for n in range(12)]
    sessions = [await connect() for _ in range(4)]
    for session in sessions:
        await session.execute("SET deadlock_timeout = '10ms'")

    async def settle(number: int) -> None:
        mine = firsts[number::4]
        for job_id in mine if number % 2 else reversed(mine):
            await complete(sessions[number], [job_id])

    await asyncio.gather(*(settle(n) for n in range(4)))
    assert set(await statuses(db, lasts)) == {"pending"}
    await exact(db)


# Operators concurrent with settles


@pytest.mark.parametrize("verb", ["cancel", "undepend"])
@pytest.mark.parametrize("end_with", ENDS)
async def test_a_settle_waits_for_an_operator_who_has_locked_a_dependent(
    db: Db, other: Db, third: Db, verb: str, end_with: str
) -> None:
    (first,) = await insert_running(db)
    last = await after(db, first)
    async with anyio.create_task_group() as tasks:
        await other.execute("BEGIN")
        await other.execute(f"SELECT pgworkd.{verb}($1)", [last])
        settling = Later(tasks, complete(db, [first]))
        await waits_for_lock(third, db)
        await other.execute(end_with)
        assert await settling.answer() == {first}
    expected = "cancelled" if verb == "cancel" and end_with == "COMMIT" else "pending"
    assert await statuses(db, [last]) == [expected]
    await exact(db)


async def test_a_dependent_that_is_locked_when_a_job_dies_is_found_by_maintenance(db: Db, other: Db) -> None:
    """A settle that archives jobs may hold trees, and waits for no row."""
    (first,) = await insert_running(db)
    last = await after(db, first, on_failed="run")
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", last)
        with anyio.fail_after(5):
            await fail(db, [first], permanent=True)
    assert (await blocked(db, last))[0] == 1
    assert await mend(db) == 1
    assert await statuses(db, [last]) == ["pending"]
    await exact(db)


async def test_cancelling_both_ends_during_a_settle_does_not_deadlock(db: Db, other: Db, third: Db) -> None:
    """The settle holds the first and needs the last; the cancel locks the last, and then the first."""
    last_id, first_id = uuid.UUID(int=1), uuid.UUID(int=2)
    await one(db, id=first_id)
    await claim(db, await worker(db))
    await after(db, first_id, id=last_id)
    await other.execute("SET deadlock_timeout = '10ms'")
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await complete(db, [first_id])
        cancelling = Later(tasks, cancel(other, last_id, first_id))
        await waits_for_lock(third, other)
        with anyio.fail_after(5):
            await db.execute("COMMIT")
        await cancelling.answer()
    await mend(db)
    assert await statuses(db, [first_id, last_id]) == ["completed", "cancelled"]
    await exact(db)


# Under REPEATABLE READ


@pytest.mark.parametrize("settle", [complete, _dies])
async def test_an_old_snapshot_that_creates_a_dependent_must_retry(
    db: Db, other: Db, settle: Callable[..., Awaitable[Any]]
) -> None:
    first, second = await insert_running(db, 2)
    await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await after(other, first, second)
    await settle(db, [first])
    with pytest.raises(asyncpg.SerializationError):
        await other.execute("COMMIT")
    await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    last = await after(other, second)
    await other.execute("COMMIT")
    await complete(db, [second])
    assert await statuses(db, [last]) == ["pending"]
    await exact(db)


async def test_a_settle_with_an_old_snapshot_misses_no_dependent(db: Db, other: Db) -> None:
    """A handler's own transaction may have any isolation level."""
    (first,) = await insert_running(db)
    await other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await other.fetchval("SELECT count(*) FROM pgworkd.jobs")
    last = await after(db, first)
    await complete(other, [first])
    await other.execute("COMMIT")
    assert await statuses(db, [first, last]) == ["completed", "blocked"]
    assert await mend(db) == 1
    assert await statuses(db, [last]) == ["pending"]
    await exact(db)


# A queue without history; batches


async def test_an_outcome_that_was_not_recorded_is_refused_at_the_commit(db: Db, other: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0)")
    first, second = await insert_running(db, 2)
    await other.execute("BEGIN")
    await after(other, first, queue="then")
    await complete(db, [first])
    with pytest.raises(asyncpg.PostgresError, match="nothing says how") as caught:
        await other.execute("COMMIT")
    assert caught.value.sqlstate == NEVER
    await other.execute("BEGIN")
    anyway = await after(other, second, on_failed="run", queue="then")
    await complete(db, [second])
    await other.execute("COMMIT")
    assert await statuses(db, [anyway]) == ["pending"]
    await exact(db)


@pytest.mark.parametrize("seal_first", [False, True])
async def test_a_transaction_that_seals_a_tree_and_depends_on_its_job_locks_in_order(
    db: Db, other: Db, third: Db, *, seal_first: bool
) -> None:
    """The settle holds the job and needs the root."""
    root = await batch(db)
    (first,) = await add(db, root)
    await claim(db, await worker(db))
    await other.execute("SET deadlock_timeout = '10ms'; SET lock_timeout = '5s'")
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", first)
        await other.execute("BEGIN")
        if seal_first:
            await seal(other, root)
        last = await after(other, first, queue="then")
        if not seal_first:
            await seal(other, root)
        committing = Later(tasks, other.execute("COMMIT"))
        await waits_for_lock(third, other)
        with anyio.fail_after(5):
            await complete(db, [first])
            await db.execute("COMMIT")
        await committing.answer()
    assert await statuses(db, [last]) == ["pending"]
    assert await state(db, root) == ["completed"]
    await exact(db)
    await counted(db)


async def test_a_handlers_transaction_may_settle_seal_and_create_dependents(db: Db) -> None:
    root = await batch(db)
    first, second = await add(db, root, 2)
    await claim(db, await worker(db))
    async with db.transaction():
        last = await after(db, first, second, queue="then")
        await complete(db, [first])
        await seal(db, root)
        await complete(db, [second])
    assert await statuses(db, [last]) == ["pending"]
    assert await state(db, root) == ["completed"]
    await exact(db)
    await counted(db)


async def test_a_retry_concurrent_with_a_new_dependent(db: Db, other: Db) -> None:
    (first,) = await insert_running(db)
    await fail(db, [first], permanent=True)
    await other.execute("BEGIN")
    last = await after(other, first, queue="then")
    await retry(db, first)
    await other.execute("COMMIT")
    (row,) = await claim(db, await worker(db))
    await complete(db, [first], row["attempt"])
    assert await statuses(db, [last]) == ["pending"]
    await exact(db)
