"""serialize_key: one job at a time, in the order in which they are due, however the key is freed."""

from __future__ import annotations

import itertools
import uuid

import pytest

from tests.kits import verbs as v
from tests.kits.flow import expire, line, run_all, settings, take, take_ids, unblock
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

COUNT = "SELECT count(*) FROM pgworkd.jobs WHERE status = $1"


async def test_one_job_of_a_key_runs_and_the_next_is_blocked_until_it_finishes(db: Db) -> None:
    worker_id = await v.worker(db)
    first, second, third = await line(db, "k", "k", "k")
    assert await take_ids(db, worker_id) == [first]
    assert await v.statuses(db, [second, third]) == ["blocked", "blocked"]
    assert await v.complete(db, [first]) == {first}
    assert await v.statuses(db, [second, third]) == ["pending", "blocked"]
    assert await run_all(db, worker_id) == [second, third]


async def test_other_keys_and_the_same_key_of_another_queue_are_not_delayed(db: Db) -> None:
    worker_id = await v.worker(db)
    a, b = await line(db, "a", "b")
    plain = await v.one(db)
    (elsewhere,) = await line(db, "a", queue="r")
    assert await take_ids(db, worker_id) == [a, b, plain]
    assert await take_ids(db, worker_id, queue="r") == [elsewhere]


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_jobs_of_a_key_run_by_run_at_and_id_whatever_the_priority(db: Db, limit: int) -> None:
    worker_id = await v.worker(db)
    low = uuid.UUID(int=1), uuid.UUID(int=2)
    expected = [
        *await line(db, "k", run_at=v.at(-9), priority=-3),
        *await line(db, "k", run_at=v.at(-7), priority=0, id=low[0]),
        *await line(db, "k", run_at=v.at(-7), priority=8, id=low[1]),
        *await line(db, "k", run_at=v.at(-1), priority=2),
        *await line(db, "k", run_at=v.at(0), priority=5),
    ]
    assert await run_all(db, worker_id, limit=limit) == expected


async def test_a_delayed_job_waits_for_its_key_once_it_is_due(db: Db) -> None:
    worker_id = await v.worker(db)
    (delayed,) = await line(db, "k", run_at=v.at(5))
    first, second, third = (*await line(db, "k", run_at=v.at(-2)), *await line(db, "k", "k"))
    assert await take_ids(db, worker_id) == [first]
    await v.complete(db, [first])
    await v.clock(5, db)
    (late,) = await line(db, "k", run_at=v.at(4))
    assert await run_all(db, worker_id) == [second, third, late, delayed]


async def test_a_job_committed_late_takes_its_place_among_the_waiters(db: Db, other: Db) -> None:
    worker_id = await v.worker(db)
    await other.execute("BEGIN")
    (early,) = await line(other, "k", run_at=v.at(-5))
    first, second, third = await line(db, "k", "k", "k")
    assert await take_ids(db, worker_id) == [first]
    await other.execute("COMMIT")
    await v.complete(db, [first])
    assert await run_all(db, worker_id) == [early, second, third]


# Ways to free a key


async def test_a_failed_job_holds_its_key_until_its_retry(db: Db) -> None:
    worker_id = await v.worker(db)
    first, second = await line(db, "k", "k")
    await take_ids(db, worker_id)
    assert await v.fail(db, [first], delay_s=60) == {first: "failed"}
    assert await take_ids(db, worker_id) == []
    await v.clock(60, db)
    worker_id = await v.worker(db)
    assert await run_all(db, worker_id) == [first, second]


async def test_a_failed_job_that_yields_its_key_waits_for_it_again_when_due(db: Db) -> None:
    worker_id = await v.worker(db, 100)
    first, second, third = await line(db, "k", "k", "k", yields=True)
    await take_ids(db, worker_id)
    assert await v.fail(db, [first], delay_s=60) == {first: "failed"}
    assert await take_ids(db, worker_id) == [second]
    await v.clock(60, db)
    assert await take_ids(db, worker_id) == []
    assert await v.complete(db, [second]) == {second}
    assert await run_all(db, worker_id) == [third, first]


@pytest.mark.parametrize("how", ["dead", "cancelled", "expired", "released", "snoozed", "cancel asked, then failed"])
async def test_every_outcome_hands_the_key_on(db: Db, how: str) -> None:
    worker_id = await v.worker(db)
    first, second = await line(db, "k", "k")
    assert await take_ids(db, worker_id) == [first]
    match how:
        case "dead":
            assert await v.fail(db, [first], permanent=True) == {first: "dead"}
        case "cancelled" | "expired":
            await v.end(db, [first], status=how)
        case "released":
            await v.release(db, [first])
        case "snoozed":
            await v.release(db, [first], delay_s=10)
        case _:
            assert await v.cancel(db, first) == {first: "requested"}
            assert await v.fail(db, [first]) == {first: "cancelled"}
    assert await run_all(db, worker_id) == ([first, second] if how == "released" else [second])


async def test_a_queue_without_history_hands_keys_on_too(db: Db) -> None:
    worker_id = await v.worker(db)
    await settings(db, keep_s=0)
    ids = await line(db, "k", "k", "k", "k")
    assert await take_ids(db, worker_id) == ids[:1]
    await v.complete(db, ids[:1])
    assert await take_ids(db, worker_id) == ids[1:2]
    await v.end(db, ids[1:2])
    assert await run_all(db, worker_id) == ids[2:]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.all_jobs") == 0


async def test_a_dead_job_does_not_hold_its_key_and_is_last_when_retried(db: Db) -> None:
    worker_id = await v.worker(db)
    first, second = await line(db, "k", "k", run_at=v.at(-1))
    await take_ids(db, worker_id)
    await v.fail(db, [first], permanent=True)
    assert await take_ids(db, worker_id) == [second]
    assert await v.retry(db, first) == {first}
    assert await take_ids(db, worker_id) == []
    await v.complete(db, [second])
    assert await run_all(db, worker_id) == [first]


@pytest.mark.parametrize("yields", [False, True])
async def test_a_failed_job_retried_now_keeps_or_takes_its_place(db: Db, *, yields: bool) -> None:
    worker_id = await v.worker(db)
    first, second, third = await line(db, "k", "k", "k", yields=yields, run_at=v.at(-1))
    await take_ids(db, worker_id)
    await v.fail(db, [first], delay_s=60)
    if yields:
        assert await take_ids(db, worker_id) == [second]
    assert await v.retry(db, first) == {first}
    if yields:
        assert await take_ids(db, worker_id) == []
        await v.complete(db, [second])
        assert await run_all(db, worker_id) == [third, first]
    else:
        assert await run_all(db, worker_id) == [first, second, third]


@pytest.mark.parametrize("how", ["cancel", "expire"])
@pytest.mark.parametrize("head", ["pending", "blocked"])
async def test_the_first_waiter_of_a_key_may_be_cancelled_or_expire(db: Db, how: str, head: str) -> None:
    worker_id = await v.worker(db)
    ids = await line(db, "k", "k", expires_at=v.at(5) if how == "expire" else None)
    ids += await line(db, "k", "k")
    assert await take_ids(db, worker_id) == ids[:1]
    if head == "pending":
        await v.complete(db, ids[:1])
    await v.clock(5, db)
    if how == "cancel":
        assert await v.cancel(db, ids[1]) == {ids[1]: "cancelled"}
    else:
        assert await expire(db) == 1
    if head == "blocked":
        await v.complete(db, ids[:1])
    assert await run_all(db, worker_id) == ids[2:]


async def test_expired_waiters_are_skipped_before_expire_removes_them(db: Db) -> None:
    worker_id = await v.worker(db)
    (first,) = await line(db, "k")
    old = await line(db, "k", "k", "k", expires_at=v.at(5))
    (last,) = await line(db, "k")
    assert await take_ids(db, worker_id) == [first]
    await v.clock(6, db)
    await v.complete(db, [first])
    assert await take_ids(db, worker_id) == [last]
    assert await expire(db) == 3
    assert await v.statuses(db, old) == ["expired"] * 3


async def test_a_job_of_a_lost_worker_holds_its_key_until_it_finishes(db: Db) -> None:
    victim, rescuer = await v.worker(db), await v.worker(db)
    first, second = await line(db, "k", "k")
    assert await take_ids(db, victim) == [first]
    await v.steady(db, rescuer)
    assert await v.rescue(db, rescuer) == {first: "failed"}
    assert await take_ids(db, rescuer) == [first]
    assert await take_ids(db, rescuer) == []
    await v.complete(db, [first], 2)
    assert await run_all(db, rescuer) == [second]


@pytest.mark.parametrize("how", ["dead", "cancelled", "yields"])
async def test_rescue_hands_on_the_key_of_a_job_that_ends_or_yields(db: Db, how: str) -> None:
    victim, rescuer = await v.worker(db), await v.worker(db)
    (first,) = await line(db, "k", max_attempts=1 if how == "dead" else 3, yields=how == "yields")
    (second,) = await line(db, "k")
    assert await take_ids(db, victim) == [first]
    assert await take_ids(db, victim) == []
    if how == "cancelled":
        await v.cancel(db, first)
    await v.steady(db, rescuer)
    # It was due before the other, so a retry that yields comes first all the same.
    assert await v.rescue(db, rescuer) == {first: "failed" if how == "yields" else how}
    assert await run_all(db, rescuer) == ([first, second] if how == "yields" else [second])


async def test_suspects_wait_for_their_keys_and_hold_them(db: Db) -> None:
    worker_id, another = await v.worker(db), await v.worker(db)
    first, second = await line(db, "k", "k")
    assert await take_ids(db, worker_id) == [first]
    (suspect,) = await line(db, "k", losses=2, run_at=v.at(-1))
    plain = await v.one(db, losses=2)
    assert await take_ids(db, worker_id) == [plain], "one suspect whose key is not free must not hold up the next"
    assert await take_ids(db, another) == []
    await v.complete(db, [first])
    assert await take_ids(db, another) == [suspect]
    assert await take_ids(db, worker_id) == []
    await v.complete(db, [suspect])
    assert await take_ids(db, worker_id) == [second]


async def test_a_claim_returns_its_limit_although_it_must_block_many_jobs(db: Db) -> None:
    worker_id = await v.worker(db)
    ids = await line(db, "k") + await v.insert(db, 300, serialize_key="k")
    plain = await v.insert(db, 3)
    assert await take_ids(db, worker_id, 4) == [ids[0], *plain]
    assert await db.fetchval(COUNT, "blocked") == 300
    await v.complete(db, ids[:1])
    assert await db.fetchval(COUNT, "blocked") == 299, "one key, one that may run"


async def test_jobs_without_a_key_pass_those_being_blocked(db: Db) -> None:
    """Many waiters arrive at once: each claim blocks some of them, and takes the jobs behind them all the same."""
    worker_id = await v.worker(db)
    await line(db, "s", run_at=v.at(-9))
    assert len(await take_ids(db, worker_id)) == 1
    await v.insert(db, 20_000, serialize_key="s", run_at=v.at(-8))
    plain = await v.insert(db, 20, run_at=v.at(-1))
    other = await v.one(db, serialize_key="t", run_at=v.at(-1))
    parked = "SELECT count(*) FROM pgworkd.jobs WHERE status = 'blocked'"
    taken = await take(db, worker_id, 10)
    assert taken.ids == plain[:10]
    assert (await take(db, worker_id, 5)).ids == plain[10:15]
    assert await db.fetchval(parked) <= 2 * 2500
    ids: list[uuid.UUID] = []
    for _ in range(12):
        taken = await take(db, worker_id, 10)
        ids += taken.ids
        if other in ids:
            break
        assert taken.again_s == pytest.approx(0.02), "there is more to come"
    assert set(ids) == {*plain[15:], other}
    assert await db.fetchval(parked) == 20_000


async def test_unblock_repairs_rows_changed_by_hand_and_leaves_the_rest(db: Db) -> None:
    worker_id = await v.worker(db)
    held, moved = await line(db, "a", "b")
    await take_ids(db, worker_id)
    behind_held, behind_moved = await line(db, "a", "b")
    await take_ids(db, worker_id)
    await db.execute("UPDATE pgworkd.jobs SET serialize_key = 'c' WHERE id = $1", moved)
    assert await unblock(db) == 1
    assert await v.statuses(db, [behind_held, behind_moved]) == ["blocked", "pending"]
    assert await take_ids(db, worker_id) == [behind_moved]
    assert await v.statuses(db, [held, moved]) == ["running", "running"]


async def test_keys_are_repaired_in_steps(db: Db) -> None:
    """For any number of keys: each step continues where the one before stopped."""
    ids = {}
    for queue, key in itertools.product(("q", "r"), ("a", "b", "c", "d", "e")):
        (ids[queue, key],) = await v.insert(db, 1, queue, serialize_key=key, status="blocked")
    held = [("q", "b"), ("r", "e")]
    worker_id = await v.worker(db)
    for queue, key in held:
        await v.one(db, queue, serialize_key=key, status="running", worker_id=worker_id, run_at=v.at(-1), attempts=1)
    step: tuple[int, str | None, str | None] = (0, "", "")
    seen = []
    while step[1] is not None:
        row = await db.fetchrow(
            "SELECT promoted, last_queue, last_key FROM pgworkd.unblock_lines($1, $2, 3)", *step[1:]
        )
        assert row is not None
        step = tuple(row)
        seen.append(step)
    assert [last for _, *last in seen] == [["q", "c"], ["r", "a"], ["r", "d"], [None, None]]
    assert [promoted for promoted, *_ in seen] == [2, 3, 3, 0]
    pending = await db.fetch("SELECT queue, serialize_key FROM pgworkd.jobs WHERE status = 'blocked' ORDER BY 1, 2")
    assert [tuple(row) for row in pending] == held
