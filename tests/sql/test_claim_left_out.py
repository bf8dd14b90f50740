"""claim() leaves kinds to other workers, at no price to the others, and says how far it has come."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from pgworkd.cursor import Cursor

from .verbs import NO_STATISTICS, Db, at, blocks, clock, insert, one, set_pool, worker

pytestmark = pytest.mark.usefixtures("t0")
CLAIM = "SELECT * FROM pgworkd.claim($1, 'q', $2, '{}', '{}', $3, $4, $5, NULL, $6)"


async def claimed(db: Db, worker_id: int, limit: int = 10, without: tuple[str, ...] = ("new",)) -> list[uuid.UUID]:
    """The ids that are claimed from the head, without these kinds."""
    rows = await db.fetch(CLAIM, worker_id, limit, [], [], [], without)
    return [row["id"] for row in rows if row["id"] is not None]


@pytest.mark.parametrize("settings", [None, '{"max_running": 50}', '{"fair": true}', '{"limit_per_key": 50}'])
@pytest.mark.parametrize(
    "keys",
    [{}, {"limit_key": "k"}, {"serialize_key": "k"}, {"losses": 2}],
    ids=["plain", "limited", "serial", "suspect"],
)
async def test_kinds_that_are_left_out_are_not_claimed(db: Db, keys: dict[str, Any], settings: str | None) -> None:
    if settings is not None:
        await db.execute("SELECT pgworkd.set_queue('q', $1)", settings)
    worker_id = await worker(db)
    new = await one(db, kind="new", priority=1, **keys)
    own = await one(db, kind="old", **keys)
    unnamed = await one(db, **keys)
    await claimed(db, worker_id, without=("new", "old", "q"))
    running = "SELECT coalesce(array_agg(id), '{}') FROM pgworkd.jobs WHERE status = 'running'"
    assert await db.fetchval(running) == []
    taken = await claimed(db, worker_id, without=("new", "q"))
    assert taken == ([] if "serialize_key" in keys else [own])  # the key is the first job's, whoever runs it
    if "losses" in keys:
        worker_id = await worker(db)  # of suspects, each runs one
    assert unnamed in await claimed(db, worker_id) or "serialize_key" in keys
    assert new in await claimed(db, await worker(db), without=())


async def test_a_crowd_that_is_left_out_costs_own_kinds_nothing(db: Db) -> None:
    worker_id, cursor = await worker(db), Cursor()
    await db.execute(NO_STATISTICS)
    for kind in ("old", "new"):
        await insert(db, 1, kind=kind, priority=5)
    await claimed(db, worker_id)
    own = await insert(db, 5, kind="old", run_at=at(-5))

    async def cost(now: float) -> tuple[int, list[Any]]:
        order = (worker_id, 10, *cursor.start(now), ["new"])
        pages = await blocks(db, CLAIM, *order)
        return pages, await db.fetch(CLAIM, *order)

    cursor.start(0.0)
    cursor.claimed([], 0.0, 0.0, full=False)  # the next sweeps come later
    alone, rows = await cost(0.001)
    assert {row["id"] for row in rows if row["id"]} == set(own)
    for priority in (0, 3):
        await insert(db, 20_000, kind="new", run_at=at(-4), priority=priority)
    _, rows = await cost(0.002)
    cursor.passed([(row["priority"], row["run_at"]) for row in rows if row["id"] is None])
    own = await insert(db, 5, kind="old", run_at=at(0))
    beside, rows = await cost(0.003)
    assert {row["id"] for row in rows if row["id"]} == set(own)
    assert beside <= 1.5 * alone + 20


async def test_who_has_a_handler_is_told_of_living_workers_of_the_queue(db: Db) -> None:
    sql = "SELECT pgworkd.register($1, 1, 'v', 30, gen_random_uuid(), $2)"
    mine, theirs = [await db.fetchval(sql, name, kinds) for name, kinds in (("a", ["x"]), ("b", ["y", "z"]))]
    silent = await worker(db)
    for each, queue in ((mine, "q"), (theirs, "q"), (silent, "q"), (theirs, "r")):
        await set_pool(db, each, queue)

    async def elsewhere(queue: str = "q") -> list[str]:
        return list(await db.fetchval("SELECT pgworkd.kinds_elsewhere($1, $2, '{x,z}')", mine, queue))

    assert await elsewhere() == ["z"]
    assert await elsewhere("s") == []
    for change, back in (
        ("state = 'stopping'", "state = 'running'"),
        ("lost_at = pgworkd.clock()", "lost_at = NULL"),
        ("kinds = '{y}'", "kinds = '{y,z}'"),
    ):
        await db.execute(f"UPDATE pgworkd.workers SET {change} WHERE id = $1", theirs)  # noqa: S608
        assert await elsewhere() == []
        await db.execute(f"UPDATE pgworkd.workers SET {back} WHERE id = $1", theirs)  # noqa: S608
    await clock(31, db)
    assert await elsewhere() == []
