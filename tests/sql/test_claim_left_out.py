"""claim() leaves kinds to other workers at no cost to the other kinds, and returns how far it has scanned."""

from __future__ import annotations

import json
import random
import uuid
from typing import Any

import pytest

from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.database.store import CLAIM as FULL_CLAIM
from pgworkd.engine.claim.claim_cursor import ClaimCursor
from tests.kits.flow import settings
from tests.kits.sessions import NO_STATISTICS, blocks
from tests.kits.verbs import Db, at, clock, complete, insert, one, set_pool, worker

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]
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
async def test_excluded_kinds_are_not_claimed(db: Db, keys: dict[str, Any], settings: str | None) -> None:
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
    assert taken == ([] if "serialize_key" in keys else [own])  # the key belongs to the first job, whoever runs it
    if "losses" in keys:
        worker_id = await worker(db)  # of suspects, each worker runs one
    assert unnamed in await claimed(db, worker_id) or "serialize_key" in keys
    assert new in await claimed(db, await worker(db), without=())


async def test_many_excluded_jobs_do_not_slow_claims_of_other_kinds(db: Db) -> None:
    worker_id, cursor = await worker(db), ClaimCursor()
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


class Pool:
    """Claims of one pool that excludes the kind `new`, as a daemon makes them, without sweeps in between."""

    def __init__(self, db: Db, worker_id: int) -> None:
        self.db, self.worker_id, self.cursor, self.now = db, worker_id, ClaimCursor(), 0.0
        self.cursor.start(0.0)
        self.cursor.claimed([], 0.0, 0.0, full=False)

    async def claim(self, limit: int = 20) -> tuple[int, set[uuid.UUID]]:
        """The pages that it touches, and the ids."""
        self.now += 0.001
        start, keyed = self.cursor.start(self.now), self.cursor.keyed()
        order = ClaimOrder(self.worker_id, "q", limit, (), (), *start, ["new"], *keyed)
        pages = await blocks(self.db, FULL_CLAIM, *order, None)
        claims = Claims.read([tuple(row) for row in await self.db.fetch(FULL_CLAIM, *order, None)])
        self.cursor.claimed(claims, self.now, 0.0, full=len(claims) == limit, places=claims.places)
        self.cursor.passed(claims.passed)
        return pages, {row.id for row in claims}


MANY = """INSERT INTO pgworkd.jobs (queue, kind, run_at, priority, {column})
    SELECT 'q', $1, $2, $3, {value} FROM generate_series(1, $4::int) n RETURNING id"""


async def many(db: Db, kind: str, jobs: int, at_s: float, key: tuple[str, str], priority: int = 0) -> set[uuid.UUID]:
    """Inserts this many jobs of that kind, with `key`: a column and an expression of n."""
    rows = await db.fetch(MANY.format(column=key[0], value=key[1]), kind, at(at_s), priority, jobs)
    return {row["id"] for row in rows}


LIMITED: dict[str, Any] = {"max_running": 1_000_000}
KEYS = {
    "a serialize_key each": ({}, ("serialize_key", "'k' || n")),
    "five serialize_keys": ({}, ("serialize_key", "'k' || n % 5")),
    "no key": ({}, ("serialize_key", "NULL")),
    "a thousand limit_keys": ({}, ("limit_key", "'k' || n % 1000")),
    "limit_keys in a limited queue": (LIMITED, ("limit_key", "'k' || n % 1000")),
    "no key in a limited queue": (LIMITED, ("limit_key", "NULL")),
}
"""The excluded jobs, and the queue's settings."""


@pytest.mark.parametrize("crowd", KEYS)
@pytest.mark.parametrize("room", [10, 20], ids=["all the room there is", "more room"])
async def test_many_excluded_jobs_hardly_slow_claims_of_jobs_with_keys(db: Db, crowd: str, room: int) -> None:
    await db.execute(NO_STATISTICS)
    limits, key = KEYS[crowd]
    if limits:
        await settings(db, **limits)
    pool = Pool(db, await worker(db))
    alone, beside = 0, 0
    for second in range(1, 9):
        await clock(second, db)
        own = await many(db, "old", 10, second, (key[0], f"'own {second}' || n"))
        pages, taken = await pool.claim(room)
        assert taken == own
        if second < 5:
            alone = pages
            continue
        beside = pages
        if second == 5:
            for priority in (3, 0):
                await many(db, "new", 10_000, second, key, priority)
    assert beside <= 1.5 * alone + 60


TURNS: dict[str, dict[str, Any]] = {
    "fair": {"fair": True},
    "a limit per key": {"limit_per_key": 100},
    "a rate per key": {"rate_per_key": 1000, "rate_per_key_period_s": 1, "rate_per_key_burst": 1000},
}
CROWDS = {
    "a thousand keys": ("limit_key", "'k' || n % 1000"),
    "our key": ("limit_key", "'own 1'"),
    "no key": ("limit_key", "NULL"),
}


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("room", [10, 20], ids=["all the room there is", "more room"])
async def test_many_excluded_jobs_hardly_slow_round_robin_claims(db: Db, crowd: str, turns: str, room: int) -> None:
    await db.execute(NO_STATISTICS)
    await settings(db, **TURNS[turns])
    pool = Pool(db, await worker(db))
    alone, beside = 0, 0
    for second in range(1, 10):
        await clock(second, db)
        own = await many(db, "old", 8, second, ("limit_key", "'own ' || n"))
        own |= await many(db, "old", 1, second, ("limit_key", "NULL"))
        own |= await many(db, "old", 1, second, ("serialize_key", f"'{second}'"))
        pages, taken = await pool.claim(room)
        assert taken == own
        if second < 5:
            alone = pages
            continue
        beside = pages
        if second == 5:
            for priority in (3, 0):
                await many(db, "new", 4_000, second, CROWDS[crowd], priority)
    assert beside <= 1.5 * alone + 100


@pytest.mark.parametrize("turns", [{"fair": True}, {"limit_per_key": 2}])
@pytest.mark.parametrize("seed", range(4))
async def test_round_robin_is_unaffected_by_excluded_jobs(db: Db, turns: dict[str, Any], seed: int) -> None:
    """Two queues with the same jobs; one also has jobs of excluded kinds."""
    draw, worker_id = random.Random(seed), await worker(db, 3600)  # noqa: S311 - replayed by its seed
    for queue in ("q", "r"):
        await settings(db, queue, **turns)
    sql = "SELECT id, payload FROM pgworkd.claim($1, $2, $3, p_without => '{new,newer}', p_places => $4)"
    places = {"q": "{}", "r": "{}"}
    orders: dict[str, list[str]] = {"q": [], "r": []}
    for step in range(60):
        await clock(step, db)
        for n in range(draw.choice([0, 1, 5])):
            what = {
                "kind": draw.choice(["old", "older", None]),
                "limit_key": draw.choice([None, "a", "b", "c", "d"]),
                "serialize_key": draw.choice([None, None, "s"]),
                "priority": draw.choice([0, 0, -(2**31), 2**31 - 1]),
                "run_at": at(step + draw.choice([0, 0, 7])),
                "payload": json.dumps({"n": f"{step}-{n}"}),
            }
            for queue in ("q", "r"):
                await one(db, queue, **what)
            key = draw.choice(["a", "c", "e", None])
            await one(db, kind="new", limit_key=key, priority=what["priority"], run_at=at(step))
            await one(db, kind="newer", limit_key=f"x{step}", run_at=at(step))
        limit = draw.choice([1, 2, 3, 10])
        for queue in ("q", "r"):
            ids, taken = [], []
            for row in await db.fetch(sql, worker_id, queue, limit, places[queue]):
                if row["id"] is not None:
                    ids.append(row["id"])
                    taken.append(json.loads(row["payload"])["n"])
                elif row["payload"] is not None:
                    places[queue] = row["payload"]
            await complete(db, ids)
            orders[queue] += sorted(taken)  # the rows of one claim come in any order
        assert orders["q"] == orders["r"]
    assert len(orders["q"]) > 40


@pytest.mark.parametrize("kinds", [1, 150, 1000])
async def test_round_robin_finds_each_key_however_many_jobs_are_excluded(db: Db, kinds: int) -> None:
    """Also with too many kinds for an index scan each: it takes more claims, each from where the last one stopped."""
    await settings(db, fair=True)
    worker_id = await worker(db)
    await many(db, "new", 4000, -5, ("limit_key", "'k' || lpad(n::text, 5, '0')"))
    await db.execute("UPDATE pgworkd.jobs SET kind = 'new ' || right(limit_key, 5)::int % $1", kinds)
    own = set()
    for key in ("k00777x", "k02222x", "k03333x", "z"):
        own |= await many(db, "old", 1, -1, ("limit_key", f"'{key}'"))
    await many(db, "new 0", 1, -5, ("limit_key", "'z'"))  # before one that may be claimed
    without = [f"new {n}" for n in range(kinds)]
    taken: set[uuid.UUID] = set()
    for _ in range(len(own) if kinds < 1000 else 10):
        rows = await db.fetch("SELECT id FROM pgworkd.claim($1, 'q', 1, p_without => $2)", worker_id, without)
        taken |= {row["id"] for row in rows if row["id"] is not None}
    assert taken == own


async def test_jobs_with_keys_are_claimed_once_their_kind_is_no_longer_excluded(db: Db) -> None:
    pool = Pool(db, await worker(db))
    left = await many(db, "new", 30, -5, ("serialize_key", "'k' || n"))
    own = await many(db, "old", 1, -3, ("serialize_key", "'own'"))
    assert (await pool.claim())[1] == own
    assert (await pool.claim())[1] == set()
    await db.execute("UPDATE pgworkd.jobs SET kind = 'old'")
    pool.cursor.rewind(0.0)  # as with a pool that excludes fewer kinds than before
    assert (await pool.claim(50))[1] == left


async def test_kinds_elsewhere_returns_the_kinds_of_live_workers_of_the_queue(db: Db) -> None:
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


@pytest.mark.parametrize(
    ("kind", "but", "knows"),
    [
        ("remote", "true", ["x", "z"]),
        ("remote", "requested = 'quiet'", []),
        ("remote", "state = 'stopping'", []),
        ("remote", "lost_at = pgworkd.clock()", []),
        ("remote", "kinds = '{z}'", ["z"]),
        ("gateway", "true", []),
        ("daemon", "true", []),
    ],
)
async def test_a_remote_worker_that_does_not_say_what_it_knows_may_know_any_kind(
    db: Db, kind: str, but: str, knows: list[str]
) -> None:
    sql = "SELECT pgworkd.register($1, 1, 'v', 30, gen_random_uuid(), $2, $3)"
    mine = await db.fetchval(sql, "a", ["y"], "daemon")
    theirs = await db.fetchval(sql, "b", None, kind)
    for each in (mine, theirs):
        await set_pool(db, each, "q")
    if but != "true":
        await db.execute(f"UPDATE pgworkd.workers SET {but} WHERE id = $1", theirs)  # noqa: S608
    found = await db.fetchval("SELECT pgworkd.kinds_elsewhere($1, 'q', '{x,z}')", mine)
    assert sorted(found) == knows
