"""settle_and_claim(): both or neither, in one transaction."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from .verbs import (
    LEASE_GONE,
    Db,
    at,
    claim,
    claim_ids,
    clock,
    heartbeat,
    insert,
    live,
    one,
    over,
    release,
    rescue,
    statuses,
    worker,
)

pytestmark = pytest.mark.usefixtures("t0")

SQL = "SELECT * FROM pgworkd.settle_and_claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"


async def settle_and_claim(
    db: Db,
    worker_id: int,
    ids: Sequence[uuid.UUID],
    *,
    attempts: Sequence[int] | None = None,
    results: Sequence[str | None] | None = None,
    limit: int = 10,
    queue: str = "q",
    kinds: tuple[Sequence[str], Sequence[int]] = ((), ()),
    places: tuple[Sequence[int], Sequence[float], Sequence[uuid.UUID]] = ((), (), ()),
) -> tuple[list[uuid.UUID], list[asyncpg.Record]]:
    """What it settled, and the rows it claimed."""
    settled = ids, attempts or [1] * len(ids), results or [None] * len(ids)
    first, *claimed = await db.fetch(SQL, *settled, worker_id, queue, limit, *kinds, *places)
    assert all(value is None for name, value in first.items() if name != "won"), "the first row is about the settle"
    assert all(row["won"] is None for row in claimed)
    return first["won"], claimed


async def test_the_first_row_says_what_was_settled_and_the_others_what_was_claimed(db: Db) -> None:
    worker_id = await worker(db)
    done = await insert(db, 2)
    assert await claim_ids(db, worker_id) == done
    low, high = await one(db, kind="k", payload='{"n": 1}', run_at=at(-5)), await one(db, priority=4)
    won, rows = await settle_and_claim(db, worker_id, done, results=['{"r": 1}', None])
    assert set(won) == set(done)
    assert [row["id"] for row in rows] == [high, low]
    expected: dict[str, Any] = {
        "won": None,
        "id": low,
        "kind": "k",
        "payload": '{"n": 1}',
        "attempt": 1,
        "failures": 0,
        "max_attempts": 3,
        "timeout_s": None,
        "priority": 0,
        "losses": 0,
        "run_at": at(-5).timestamp(),
        "created_at": at(0).timestamp(),
        "schedule": None,
        "occurrence": None,
        "meta": None,
        "serialize_key": None,
    }
    assert dict(rows[1]) == expected
    assert (await over(db, done[0]))["result"] == '{"r": 1}'
    assert [(await over(db, job))["status"] for job in done] == ["completed"] * 2
    job = await live(db, high)
    assert (job["status"], job["worker_id"], job["attempts"]) == ("running", worker_id, 1)


async def test_the_claim_keeps_to_its_limit_its_budgets_and_its_places(db: Db) -> None:
    worker_id = await worker(db)
    old = await one(db, run_at=at(-9))
    ids = [await one(db, kind="k", run_at=at(n - 5)) for n in range(4)]
    places = [0], [at(-5).timestamp()], [ids[0]]
    won, rows = await settle_and_claim(db, worker_id, [], limit=2, kinds=(["k"], [8]), places=places)
    assert won == []
    assert [(row["id"], row["max_attempts"]) for row in rows] == [(ids[1], 8), (ids[2], 8)]
    assert await statuses(db, [old, *ids]) == ["pending", "pending", "running", "running", "pending"]


async def test_with_nothing_to_claim_there_is_still_the_first_row(db: Db) -> None:
    worker_id = await worker(db)
    done = await one(db)
    await claim(db, worker_id)
    assert await settle_and_claim(db, worker_id, [done]) == ([done], [])


async def test_a_stale_attempt_is_not_settled_but_the_claim_goes_on(db: Db) -> None:
    worker_id = await worker(db)
    ours, taken = await insert(db, 2)
    await claim(db, worker_id)
    await release(db, [taken])
    assert await claim_ids(db, await worker(db)) == [taken]
    new = await one(db)
    won, rows = await settle_and_claim(db, worker_id, [taken, ours])
    assert won == [ours]
    assert [row["id"] for row in rows] == [new]
    assert (await live(db, taken))["attempts"] == 2
    assert await statuses(db, [ours, taken]) == ["completed", "running"]


async def test_a_job_that_is_settled_is_not_claimed_by_the_same_call(db: Db) -> None:
    worker_id = await worker(db)
    given_back = await one(db)
    await claim(db, worker_id)
    await release(db, [given_back])
    won, rows = await settle_and_claim(db, worker_id, [given_back])
    assert won == []
    assert [(row["id"], row["attempt"]) for row in rows] == [(given_back, 2)]


@pytest.mark.parametrize("how", ["expired", "lost", "unknown"])
async def test_without_a_lease_nothing_is_settled_either(db: Db, how: str) -> None:
    worker_id = await worker(db, 10)
    done = await one(db)
    await claim(db, worker_id)
    waiting = await one(db)
    if how == "expired":
        await clock(10, db)
    elif how == "lost":
        await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock()")
    with pytest.raises(asyncpg.PostgresError) as caught:
        await settle_and_claim(db, 4711 if how == "unknown" else worker_id, [done])
    assert caught.value.sqlstate == LEASE_GONE
    assert await statuses(db, [done, waiting]) == ["running", "pending"]


async def test_in_a_paused_queue_it_settles_and_claims_nothing(db: Db) -> None:
    worker_id = await worker(db)
    done = await one(db)
    await claim(db, worker_id)
    waiting = await one(db)
    await db.execute("INSERT INTO pgworkd.queues (name, paused_until) VALUES ('q', 'infinity')")
    assert await settle_and_claim(db, worker_id, [done]) == ([done], [])
    assert await statuses(db, [done, waiting]) == ["completed", "pending"]


@pytest.mark.parametrize("bad", ["{", "", '"\\u0000"'], ids=["cut", "empty", "nul"])
async def test_a_bad_result_changes_nothing_at_all(db: Db, bad: str) -> None:
    worker_id = await worker(db)
    done = await insert(db, 3)
    await claim(db, worker_id)
    waiting = await one(db)
    with pytest.raises(asyncpg.DataError):
        await settle_and_claim(db, worker_id, done, results=["1", bad, "2"])
    assert await statuses(db, [*done, waiting]) == ["running"] * 3 + ["pending"]
    assert (await live(db, waiting))["attempts"] == 0


async def test_in_a_queue_that_keeps_nothing_the_job_is_simply_gone(db: Db) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 0), ('r', 60)")
    worker_id = await worker(db)
    done, kept = await one(db), await one(db, "r")
    await claim(db, worker_id)
    await claim(db, worker_id, queue="r")
    new = await one(db)
    won, rows = await settle_and_claim(db, worker_id, [done, kept])
    assert set(won) == {done, kept}
    assert [row["id"] for row in rows] == [new]
    assert await statuses(db, [done, kept, new]) == [None, "completed", "running"]


async def test_a_suspect_that_is_settled_makes_way_for_the_next(db: Db) -> None:
    """The claim looks after the settle: one suspect at a time still goes on without a pause."""
    worker_id = await worker(db)
    first, second = await insert(db, 2, losses=2)
    assert await claim_ids(db, worker_id) == [first]
    won, rows = await settle_and_claim(db, worker_id, [first])
    assert won == [first]
    assert [row["id"] for row in rows] == [second]


async def test_a_rollback_undoes_both(db: Db) -> None:
    worker_id = await worker(db)
    done = await one(db)
    await claim(db, worker_id)
    waiting = await one(db)
    await db.execute("BEGIN")
    won, rows = await settle_and_claim(db, worker_id, [done])
    assert (won, [row["id"] for row in rows]) == ([done], [waiting])
    await db.execute("ROLLBACK")
    assert await statuses(db, [done, waiting]) == ["running", "pending"]


async def test_a_rescue_leaves_a_worker_alone_that_settles_and_claims(db: Db, other: Db) -> None:
    victim, rescuer = await worker(db, 5), await worker(db, 60)
    done = await one(db)
    assert await claim_ids(db, victim) == [done]
    for seconds in (25, 50, 60):
        await clock(seconds, db)
        await heartbeat(db, rescuer)
    await other.execute("BEGIN")
    assert await settle_and_claim(other, victim, [done]) == ([done], [])
    await db.execute("SET statement_timeout = '2s'")
    assert await rescue(db, rescuer) == {}
    await other.execute("COMMIT")
    assert await statuses(db, [done]) == ["completed"]
