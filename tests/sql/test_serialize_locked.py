"""Keys whose first waiter is locked by another session: no job overtakes it, and it is promoted soon after."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.flow import line, run_all, take_ids
from tests.kits.verbs import Db, complete, statuses, worker

pytestmark = pytest.mark.usefixtures("t0")

APPLY = "SELECT pgworkd.apply_effects()"


@pytest.mark.parametrize("lock", ["FOR UPDATE", "FOR KEY SHARE"])
async def test_the_next_waiter_of_a_key_does_not_overtake_a_locked_first_one(db: Db, other: Db, lock: str) -> None:
    worker_id = await worker(db)
    first, second, third = await line(db, "k", "k", "k")
    assert await take_ids(db, worker_id) == [first]
    async with other.transaction():
        await other.execute(f"SELECT FROM pgworkd.jobs WHERE id = $1 {lock}", second)
        assert await complete(db, [first]) == {first}
        for _ in range(3):
            assert await statuses(db, [second, third]) == ["blocked", "blocked"], "the third must not go first"
            assert await db.fetchval(APPLY) == 1
    assert await db.fetchval(APPLY) == 0
    assert await statuses(db, [second, third]) == ["pending", "blocked"]
    assert await run_all(db, worker_id) == [second, third]


async def test_a_locked_waiter_is_reported_once_and_other_keys_make_progress(db: Db, other: Db, third: Db) -> None:
    worker_id = await worker(db)
    holders = await line(db, "k", "l")
    locked, free = await line(db, "k", "l")
    assert await take_ids(db, worker_id) == holders
    told: list[str] = []

    def hear(*heard: Any) -> None:
        if "effects" in heard[-1]:
            told.append(heard[-1])

    await third.add_listener("pgworkd", hear)
    async with other.transaction():
        await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", locked)
        assert await complete(db, holders) == set(holders)
        assert await statuses(db, [locked, free]) == ["blocked", "pending"]
        for _ in range(5):
            assert await db.fetchval(APPLY) == 1
    await third.fetchval("SELECT 1")
    assert len(told) == 1, "daemons would tell each other for ever"
    assert await db.fetchval(APPLY) == 0
    assert await statuses(db, [locked]) == ["pending"]
