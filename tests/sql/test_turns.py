"""Fair queues: limit_keys are served round robin."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.kits.flow import line, run_all, settings, take, take_ids
from tests.kits.verbs import Db, at, clock, complete, insert, one, worker

pytestmark = pytest.mark.usefixtures("t0")


async def _keys(db: Db, ids: Sequence[uuid.UUID]) -> list[str]:
    rows = await db.fetch("SELECT id, coalesce(limit_key, '-') AS key FROM pgworkd.all_jobs WHERE id = ANY ($1)", ids)
    keys = {row["id"]: row["key"] for row in rows}
    return [keys[job_id] for job_id in ids]


async def _one_by_one(db: Db, worker_id: int, count: int) -> str:
    """The keys of the next starts, each job claimed and completed alone."""
    ids = []
    for _ in range(count):
        (job_id,) = await take_ids(db, worker_id, 1)
        await complete(db, [job_id])
        ids.append(job_id)
    return "".join(await _keys(db, ids))


# Fairness


async def test_keys_are_served_round_robin_however_many_jobs_each_has(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    await insert(db, 50, limit_key="a")
    await insert(db, 3, limit_key="b")
    await insert(db, 2, limit_key="c")
    assert await _one_by_one(db, worker_id, 10) == "abcabcabaa"


async def test_a_key_that_arrives_later_waits_for_at_most_one_round(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    for key in "bcd":
        await insert(db, 20, limit_key=key)
    assert await _one_by_one(db, worker_id, 4) == "bcdb"
    await insert(db, 1, limit_key="a")
    await insert(db, 1, limit_key="x")
    assert await _one_by_one(db, worker_id, 6) == "cdxabc"


async def test_jobs_without_a_key_count_as_one_more_key(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    await insert(db, 20, limit_key="a")
    await insert(db, 20, limit_key="b")
    await insert(db, 10)
    await line(db, "s", "t")
    assert await _one_by_one(db, worker_id, 9) == "ab-ab-ab-"


async def test_a_claim_of_many_jobs_gives_each_key_its_share(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    await insert(db, 100, limit_key="a")
    await insert(db, 100, limit_key="b")
    await insert(db, 3, limit_key="c")
    counts = Counter(await _keys(db, await take_ids(db, worker_id, 30)))
    assert counts["c"] == 3
    assert abs(counts["a"] - counts["b"]) <= 8
    assert counts.total() == 30, "what one does not use goes to the others"


async def test_the_round_continues_over_claims_of_any_size(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    for key in "abcdefg":
        await insert(db, 30, limit_key=key)
    counts: Counter[str] = Counter()
    for size in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3):
        counts += Counter(await _keys(db, await take_ids(db, worker_id, size)))
        assert max(counts.values()) - min(counts[key] for key in "abcdefg") <= 2
    assert counts.total() == 36


async def test_more_keys_than_one_claim_examines_are_all_served(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    keys = [f"k{number:03}" for number in range(100)]
    for key in keys:
        await insert(db, 2, limit_key=key)
    order: list[str] = []
    for _ in range(100):
        order += await _keys(db, await take_ids(db, worker_id, 1))
    assert order == keys


async def test_within_a_key_the_usual_order_applies(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    late = await one(db, limit_key="a", run_at=at(0))
    early = await one(db, limit_key="a", run_at=at(-5))
    urgent = await one(db, limit_key="a", priority=2, run_at=at(-1))
    await one(db, limit_key="a", priority=9, run_at=at(1))
    assert [await take_ids(db, worker_id, 1) for _ in range(3)] == [[urgent], [early], [late]]


@pytest.mark.parametrize("limits", [{"fair": True}, {"limit_per_key": 5}])
@pytest.mark.parametrize("room", [1, 2, 3])
async def test_jobs_with_a_serialize_key_alone_keep_their_place_among_those_without(
    db: Db, limits: dict[str, Any], room: int
) -> None:
    """Otherwise none of them would start while there is a backlog of jobs without any key."""
    worker_id = await worker(db)
    await settings(db, **limits)
    wanted = []
    for number in range(12):
        key = {"serialize_key": f"s{number}"} if number % 3 == 0 else {}
        wanted.append(await one(db, run_at=at(-60 + number), **key))
    started: list[uuid.UUID] = []
    while len(started) < len(wanted):
        taken = await take_ids(db, worker_id, room)
        await complete(db, taken)
        started += taken
    assert started == wanted


CROWD = """INSERT INTO pgworkd.jobs (queue, limit_key, run_at)
    SELECT 'q', 'k' || lpad(n::text, 6, '0'), $2 FROM generate_series(1, $1::int) n"""
"""One job of each of this many keys."""


@pytest.mark.parametrize("limits", [{"fair": True}, {"limit_per_key": 5}])
async def test_due_jobs_are_found_among_many_keys_without_any(db: Db, limits: dict[str, Any]) -> None:
    worker_id = await worker(db)
    await settings(db, **limits)
    await db.execute(CROWD, 20_000, at(3600))
    due = set()
    for number in range(0, 20_000, 200):
        due |= set(await insert(db, 1, limit_key=f"k{number:06}"))
    taken: list[uuid.UUID] = []
    for _ in range(6):
        taken += await take_ids(db, worker_id, 25)
    assert set(taken) == due


async def test_many_keys_do_not_hide_a_due_job_behind_a_long_backlog(db: Db) -> None:
    """The jobs that have been due longest are of two keys; the third's is behind them and behind keys with none due."""
    worker_id = await worker(db)
    await settings(db, fair=True)
    await db.execute(CROWD, 2000, at(3600))
    for key in ("k000300", "k000301"):
        await insert(db, 1000, limit_key=key, run_at=at(-60))
    last = await one(db, limit_key="k001700")
    taken: list[uuid.UUID] = []
    while last not in taken:
        assert len(taken) < 2 * 2000 / 100
        taken += await take_ids(db, worker_id, 1)
    keys = Counter(await _keys(db, taken))
    assert abs(keys["k000300"] - keys["k000301"]) <= 2, "those two share alike, whatever lies between them"


async def test_a_rolled_back_claim_does_not_advance_the_round(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    for key in "ab":
        await insert(db, 5, limit_key=key)
    await db.execute("BEGIN")
    assert await _keys(db, await take_ids(db, worker_id, 1)) == ["a"]
    await db.execute("ROLLBACK")
    assert await _one_by_one(db, worker_id, 3) == "aba"


async def test_round_robin_and_serialize_keys_together_leave_no_job_behind(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True, limit_per_key=2)
    expected = {key: [] for key in "stu"}
    for number in range(30):
        key = "stu"[number % 3]
        expected[key] += await line(db, key, limit_key="abcd"[number % 4], priority=number % 2)
    order = await run_all(db, worker_id, limit=4)
    assert len(order) == 30
    for key, ids in expected.items():
        assert [job_id for job_id in order if job_id in set(ids)] == ids, key


async def test_a_key_without_due_jobs_is_skipped(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    await insert(db, 5, limit_key="a", run_at=at(5))
    await insert(db, 5, limit_key="b", expires_at=at(0))
    await insert(db, 3, limit_key="c")
    assert await _one_by_one(db, worker_id, 3) == "ccc"
    assert await take_ids(db, worker_id) == []
    await clock(5, db)
    assert await _one_by_one(db, worker_id, 5) == "aaaaa"


async def test_many_keys_without_due_jobs_hide_no_due_job(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, fair=True)
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, limit_key, run_at) SELECT 'q', 'k' || n, $1 FROM generate_series(1, 2000) n",
        at(60),
    )
    (last,) = await insert(db, 1, limit_key="zz")
    for _ in range(30):
        taken = await take(db, worker_id, 1)
        if taken.ids:
            break
        assert taken.again_s is not None
        assert taken.again_s <= 0.05
    assert taken.ids == [last]


async def test_in_a_limited_queue_no_job_overtakes(db: Db) -> None:
    worker_id = await worker(db)
    await settings(db, max_running=100)
    old = await one(db, run_at=at(-3600))
    urgent = await one(db, priority=1)
    assert [await take_ids(db, worker_id, 1) for _ in range(2)] == [[urgent], [old]]
