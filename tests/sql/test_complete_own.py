"""A handler's own transaction that completed its job and stays open: it locks that job, and no other."""

from __future__ import annotations

import pytest

from tests.kits.flow import settings
from tests.kits.verbs import Db, claim, complete, fail, insert, one, release, rescue, statuses, worker

pytestmark = pytest.mark.usefixtures("t0")

COMPLETE = "SELECT pgworkd.complete_own(ARRAY[$1::uuid], '{1}', '{NULL}', NULL, NULL, NULL, NULL, NULL)"
PAST_LOCKS = "SELECT pgworkd.settle_completed($1, pgworkd.unlocked($1, $2), '{NULL}')"
WAIT_S_MAX = 2
EFFECTS = "SELECT pgworkd.apply_effects()"


@pytest.mark.parametrize("limits", [{}, {"fair": True}, {"max_running": 50}, {"limit_per_key": 50}], ids=str)
async def test_claims_and_settles_of_the_queue_proceed_while_the_transaction_is_open(
    db: Db, other: Db, limits: dict[str, object]
) -> None:
    if limits:
        await settings(db, **limits)
    worker_id = await worker(db)
    batch = await db.fetchval("SELECT id FROM pgworkd.create_batch('tree', 'q')")
    own = await one(db, serialize_key="own", limit_key="own", batch_id=batch)
    assert len(await claim(db, worker_id)) == 1
    waiting = [await one(db, serialize_key=f"k{n}", limit_key=f"l{n % 2}") for n in range(4)]
    in_tree = await one(db, batch_id=batch)
    behind = await one(db, serialize_key="own")
    async with db.transaction():
        (dependent,) = await insert(db)
        await db.execute("SELECT pgworkd.depend($1, ARRAY[$2::uuid])", dependent, own)
    await db.execute("SELECT pgworkd.seal_batch($1)", batch)
    await other.execute(f"SET lock_timeout = '{WAIT_S_MAX}s'")

    async with db.transaction():
        assert await db.fetchval(COMPLETE, own) == [own]
        assert {row["id"] for row in await claim(other, worker_id)} == {*waiting, in_tree}
        first, second, third, fourth = waiting
        assert await complete(other, [first]) == {first}
        assert await fail(other, [second], permanent=True) == {second: "dead"}
        assert await release(other, [third]) == {third}
        assert await other.fetchval(PAST_LOCKS, [own, in_tree], [1, 1]) == [in_tree]
        assert await rescue(other, worker_id) == {}
    assert await complete(db, [fourth]) == {fourth}
    while await db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.pending_effects)"):
        await db.execute(EFFECTS)
    claimed = {row["id"] for row in await claim(db, worker_id)}
    assert claimed == {third, behind, dependent}
    assert await complete(db, [third], 2) == {third}
    assert await statuses(db, [second]) == ["dead"]
    row = await db.fetchrow("SELECT completed, tree_finished_at IS NOT NULL AS over FROM pgworkd.batches")
    assert row is not None
    assert tuple(row) == (2, True)
