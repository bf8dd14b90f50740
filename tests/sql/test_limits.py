"""Limits over the whole fleet: a maximum of running jobs, of a queue or of each limit_key."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from tests.kits.flow import line, run_all, settings, take_ids
from tests.kits.sessions import Later, Notices, waits_for_lock
from tests.kits.verbs import Db, at, cancel, complete, end, fail, insert, one, release, rescue, set_pool, steady, worker

pytestmark = pytest.mark.usefixtures("t0")


# At most N running jobs


async def test_no_more_than_max_running_jobs_run_whatever_worker_claims(db: Db, other: Db) -> None:
    one_worker, another = await worker(db), await worker(db)
    await settings(db, max_running=3)
    ids = await insert(db, 8)
    assert await take_ids(db, one_worker, 2) == ids[:2]
    assert await take_ids(other, another) == ids[2:3]
    assert await take_ids(db, one_worker) == []
    await complete(db, ids[:1])
    assert await take_ids(other, another) == ids[3:4]


@pytest.mark.parametrize("key", [None, "k"], ids=["plain", "with a key beside them"])
async def test_a_limit_applies_across_all_priorities(db: Db, key: str | None) -> None:
    worker_id = await worker(db)
    await settings(db, max_running=3)
    if key:
        await one(db, limit_key=key, priority=-9)
    ids = [await one(db, priority=priority) for priority in (3, 2, 1, 0)]
    assert await take_ids(db, worker_id) == ids[:3]
    assert await take_ids(db, worker_id) == []
    await complete(db, ids[:1])
    assert await take_ids(db, worker_id) == ids[3:]


async def test_jobs_of_other_queues_do_not_count(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, max_running=1)
    (first, _), others = await insert(db, 2), await insert(db, 3, "r")
    assert await take_ids(db, worker_id, queue="r") == others
    assert await take_ids(db, worker_id) == [first]


@pytest.mark.parametrize("how", ["failed", "dead", "released", "snoozed", "ended", "cancel asked", "lost"])
async def test_every_outcome_frees_capacity(db: Db, how: str) -> None:
    victim, rescuer = await worker(db), await worker(db)
    await settings(db, max_running=1)
    first, second = await insert(db, 2)
    assert await take_ids(db, victim) == [first]
    match how:
        case "failed" | "dead":
            await fail(db, [first], permanent=how == "dead")
        case "released" | "snoozed":
            await release(db, [first], delay_s=60 if how == "snoozed" else None)
        case "ended":
            await end(db, [first])
        case "cancel asked":
            await cancel(db, first)
            assert await take_ids(db, victim) == [], "it still runs"
            await fail(db, [first])
        case _:
            await steady(db, rescuer)
            await rescue(db, rescuer)
    expected = first if how in ("released", "lost") else second
    assert await take_ids(db, rescuer) == [expected]
    assert await take_ids(db, rescuer) == []


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_concurrent_claims_share_the_remaining_capacity(db: Db, other: Db, third: Db, end_with: str) -> None:
    one_worker, another = await worker(db), await worker(db)
    await settings(db, max_running=3)
    ids = await insert(db, 5)
    await db.execute("BEGIN")
    assert await take_ids(db, one_worker, 2) == ids[:2]
    async with anyio.create_task_group() as tasks:
        claimed = Later(tasks, take_ids(other, another))
        await waits_for_lock(third, other)
        await db.execute(end_with)
        assert await claimed.answer() == (ids[2:3] if end_with == "COMMIT" else ids[:3])


LIMITS_BESIDE: list[dict[str, Any]] = [
    {"rate": 100, "rate_period_s": 1.0},
    {"limit_per_key": 9},
    {"fair": True},
]


@pytest.mark.parametrize("more", [{}, *LIMITS_BESIDE], ids=["no other limit", "rate", "limit_per_key", "fair"])
async def test_a_concurrent_claim_of_a_limited_queue_waits_for_the_first(
    db: Db, other: Db, third: Db, more: dict[str, Any]
) -> None:
    one_worker, another = await worker(db), await worker(db)
    await settings(db, max_running=3, **more)
    ids = await insert(db, 9)
    assert await take_ids(other, another, 2) == ids[:2]
    await db.execute("BEGIN")
    assert await take_ids(db, one_worker) == ids[2:3]
    await complete(other, ids[:2])
    async with anyio.create_task_group() as tasks:
        claimed = Later(tasks, take_ids(other, another, 2))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        assert await claimed.answer() == ids[3:5]


@pytest.mark.parametrize("end_with", ["COMMIT", "ROLLBACK"])
async def test_a_job_counts_until_its_settle_commits(db: Db, other: Db, end_with: str) -> None:
    worker_id = await worker(db)
    await settings(db, max_running=1)
    first, second = await insert(db, 2)
    await take_ids(db, worker_id)
    await db.execute("BEGIN")
    await complete(db, [first])
    assert await take_ids(other, worker_id) == []
    await db.execute(end_with)
    assert await take_ids(other, worker_id) == ([second] if end_with == "COMMIT" else [])


async def test_a_limit_can_change_while_jobs_run(db: Db) -> None:
    worker_id = await worker(db)
    ids = await insert(db, 10)
    assert await take_ids(db, worker_id, 4) == ids[:4]
    await settings(db, max_running=3)
    assert await take_ids(db, worker_id) == []
    await complete(db, ids[:2])
    assert await take_ids(db, worker_id) == ids[4:5]
    await settings(db, max_running=None)
    assert await take_ids(db, worker_id) == ids[5:]


async def test_suspects_count_like_other_jobs(db: Db) -> None:
    worker_id, another = await worker(db), await worker(db)
    await settings(db, max_running=2, limit_per_key=1)
    suspects = await insert(db, 2, losses=2, limit_key="a")
    (plain,) = await insert(db, 1)
    assert await take_ids(db, worker_id) == [suspects[0], plain]
    assert await take_ids(db, another) == []
    await complete(db, [plain])
    assert await take_ids(db, another) == [], "its limit_key is full"
    await complete(db, suspects[:1])
    assert await take_ids(db, another) == suspects[1:]


# At most N running jobs of a key


async def test_each_limit_key_has_its_own_limit(db: Db, other: Db) -> None:
    one_worker, another = await worker(db), await worker(db)
    await settings(db, limit_per_key=2)
    a, b = await insert(db, 5, limit_key="a"), await insert(db, 1, limit_key="b")
    plain = await insert(db, 3)
    assert set(await take_ids(db, one_worker)) == {*a[:2], *b, *plain}
    assert await take_ids(other, another) == []
    await complete(db, a[:1])
    assert await take_ids(other, another) == a[2:3]


async def test_a_full_key_never_hides_one_with_capacity(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, limit_per_key=1)
    for number in range(400):
        await insert(db, 2, limit_key=f"k{number:03}")
    taken: set[object] = set()
    for _ in range(40):
        taken |= set(await take_ids(db, worker_id, 20))
    assert len(taken) == 400
    assert await db.fetchval("SELECT max(n) FROM (SELECT count(*) AS n FROM pgworkd.jobs WHERE status = 'running'"
                             " GROUP BY limit_key) x") == 1  # fmt: skip
    (last,) = await insert(db, 1, limit_key="zzz")
    for _ in range(10):
        taken |= set(await take_ids(db, worker_id, 1))
    assert last in taken


async def test_a_job_may_have_a_limit_key_and_a_serialize_key(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, limit_per_key=1)
    first, second = await line(db, "s", limit_key="a"), await line(db, "s", limit_key="b")
    third = await line(db, "t", limit_key="a")
    assert await take_ids(db, worker_id) == first, "the second waits for its turn, the third for room"
    await complete(db, first)
    assert set(await take_ids(db, worker_id)) == {*second, *third}


async def test_a_first_job_at_its_limit_delays_its_serialize_key_and_nothing_else(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, limit_per_key=1)
    (busy,) = await insert(db, 1, limit_key="a")
    assert await take_ids(db, worker_id) == [busy]
    head, behind = await line(db, "s", limit_key="a"), await line(db, "s", limit_key="b")
    (free,) = await insert(db, 1, limit_key="c")
    assert await take_ids(db, worker_id) == [free]
    await complete(db, [busy])
    assert await take_ids(db, worker_id) == head
    await complete(db, head)
    assert await take_ids(db, worker_id) == behind


async def test_a_job_without_a_limit_key_is_never_delayed_by_jobs_with_one(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, limit_per_key=1, rate_per_key=1, rate_per_key_period_s=3600.0)
    await insert(db, 50, limit_key="a")
    plain = await insert(db, 5)
    assert set(plain) < set(await take_ids(db, worker_id))


# Notifications


async def test_idle_pools_are_notified_when_capacity_is_freed(db: Db, notices: Notices) -> None:
    worker_id = await worker(db)
    await set_pool(db, worker_id)
    await settings(db, max_running=1)
    first, *_ = await insert(db, 3)
    await take_ids(db, worker_id)
    await notices.heard()
    await complete(db, [first])
    assert await notices.queues() == ["q"]


# Bounds


@pytest.mark.parametrize("column", ["max_running", "limit_per_key", "rate", "rate_burst", "rate_per_key"])
@pytest.mark.parametrize("value", [0, -1, 1_000_001])
async def test_a_limit_out_of_bounds_is_refused(db: Db, column: str, value: int) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="limit_must_be_1_to_a_million"):
        await settings(db, **{column: value})


@pytest.mark.parametrize("columns", [{"rate": 5}, {"rate_period_s": 1.0}, {"rate_burst": 3}, {"rate_per_key": 5},
                                     {"rate_per_key_period_s": 2.0}, {"rate_per_key_burst": 1}])  # fmt: skip
async def test_a_rate_and_its_period_must_be_set_together(db: Db, columns: dict[str, float]) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="rate"):
        await settings(db, **columns)


async def test_the_maximum_limits_work(db: Db) -> None:
    worker_id = await worker(db)
    most = 1_000_000
    await settings(db, max_running=most, limit_per_key=most, rate=most, rate_period_s=0.001, rate_burst=most,
                   rate_per_key=most, rate_per_key_period_s=31622400.0, rate_per_key_burst=most)  # fmt: skip
    ids = await insert(db, 20, limit_key="a")
    assert await run_all(db, worker_id, limit=7) == ids


async def test_next_due_finds_the_earliest_of_many_priorities(db: Db) -> None:
    for priority in range(120):
        await one(db, limit_key="a", priority=priority, run_at=at(500 + priority))
    await one(db, limit_key="a", priority=-1, run_at=at(7))
    assert (await db.fetch("SELECT * FROM pgworkd.next_due('{q}')"))[0]["due_in_s"] == 7
