"""The views: a worker whose lease has expired is no longer shown, even when no daemon is left to mark it lost."""

from __future__ import annotations

import pytest

from tests.kits.verbs import Db, claim, clock, heartbeat, one, set_pool, worker

pytestmark = pytest.mark.usefixtures("t0")


async def test_dead_workers_are_not_shown_as_live_when_no_daemon_is_left(db: Db) -> None:
    gone, alive, lost = await worker(db, 30), await worker(db, 60), await worker(db, 60)
    for worker_id in (gone, alive, lost):
        await set_pool(db, worker_id)
    await set_pool(db, gone, "r")
    await one(db)
    await claim(db, gone)
    await db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock() WHERE id = $1", lost)
    queues = "SELECT queue, workers, slots FROM pgworkd.queue_stats ORDER BY queue"
    states = "SELECT id, state, running FROM pgworkd.worker_stats ORDER BY id"
    await clock(29.999, db)
    assert [tuple(row) for row in await db.fetch(queues)] == [("q", 2, 2), ("r", 1, 1)]
    assert [tuple(row) for row in await db.fetch(states)] == [
        (gone, "running", 1), (alive, "running", 0), (lost, "lost", 0)
    ]  # fmt: skip
    await clock(30, db)  # its lease has expired
    assert [tuple(row) for row in await db.fetch(queues)] == [("q", 1, 1)]
    assert [row["state"] for row in await db.fetch(states)] == ["lost", "running", "lost"]
    assert await heartbeat(db, gone) is not None, "nobody has taken its jobs: it was only late"
    assert [tuple(row) for row in await db.fetch(queues)] == [("q", 2, 2), ("r", 1, 1)]
    await clock(3600, db)
    assert [tuple(row) for row in await db.fetch(queues)] == [("q", 0, 0)]
    assert {row["state"] for row in await db.fetch(states)} == {"lost"}
