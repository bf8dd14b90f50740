"""claim() with cursors, for jobs with keys: it takes what a claim from the head takes, at a constant cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import uuid
from typing import Any

import asyncpg
import pytest

from tests.kits.sessions import NO_STATISTICS, blocks
from tests.kits.verbs import T0, Db, at, cancel, clock, complete, fail, insert, one, release, retry, set_pool, worker

from .conftest import Connect

pytestmark = [
    pytest.mark.usefixtures("t0"),
    pytest.mark.slow("thousands of rows for each case: what they cost has to show"),
]

CLAIM = """SELECT id, attempt, serialize_key, payload
           FROM pgworkd.claim($1, 'q', $2, p_places => $3, p_reach_s => $4, p_since => $5, p_without => $6)"""
LINES = {
    "a key for each job": "'k' || n",
    "five keys": "'k' || n % 5",
    "plain jobs beside": "CASE WHEN n % 2 = 1 THEN 'k' || n END",
}
HEAD = "SELECT id, attempt FROM pgworkd.claim($1, 'q', $2, p_without => $3) WHERE id IS NOT NULL"


class Claimer:
    """The claims of one pool: what one returns is passed to the next."""

    def __init__(self, db: Db, worker_id: int) -> None:
        self.db, self.worker_id = db, worker_id
        self.places = "{}"
        self.since: float | None = None
        self.without: list[str] = []

    def arguments(self, limit: int, reach_s: float | None = 0.0) -> list[Any]:
        return [self.worker_id, limit, self.places, reach_s, self.since, self.without]

    def leave_out(self, *kinds: str) -> None:
        """Excludes these kinds from now on; those excluded before may be claimed again."""
        if set(self.without) - set(kinds):
            self.since = 0.0
        self.without = list(kinds)

    async def claim(self, limit: int = 10, reach_s: float | None = 0.0) -> list[tuple[uuid.UUID, int]]:
        rows = await self.db.fetch(CLAIM, *self.arguments(limit, reach_s))
        for row in rows:
            if row["id"] is None and row["payload"] is not None:
                self.places, self.since = row["payload"], None
        return [(row["id"], row["attempt"]) for row in rows if row["id"] is not None]

    def heard(self, *args: Any) -> None:
        """Handles a notification: a job has become claimable that was due at that time."""
        run_at = json.loads(args[3]).get("run_at")
        if run_at is not None:
            self.since = run_at if self.since is None else min(self.since, run_at)


class World:
    """Jobs with keys and without, in one queue; one session, so that nothing is committed late."""

    def __init__(self, db: Db, worker_id: int, seed: int, kinds: list[str | None]) -> None:
        self.kinds = kinds
        self.db, self.random, self.now = db, random.Random(seed), 0.0  # noqa: S311 - replayed by its seed
        self.claimer = Claimer(db, worker_id)
        self.running: list[tuple[uuid.UUID, int]] = []

    async def tick(self) -> None:
        """Time passes between any two steps: at one instant the id decides, and the next id cannot be predicted."""
        self.now += self.random.choice([0.001, 0.001, 0.1, 1])
        await clock(self.now, self.db)
        await asyncio.sleep(0)

    async def step(self) -> None:
        await self.tick()
        deeds = [self.insert] * 3 + [self.claim] * 4 + [self.end] * 4 + [self.meddle]
        with contextlib.suppress(asyncpg.RaiseError):
            await self.random.choice(deeds)()

    async def insert(self) -> None:
        draw = self.random
        for _ in range(draw.choice([1, 3, 12])):
            await one(
                self.db,
                serialize_key=draw.choice([None, "k1", "k1", "k2", "k3", "k4"]),
                limit_key=draw.choice([None, None, None, "l"]),
                kind=draw.choice(self.kinds),
                priority=draw.choice([0, 0, 0, 5, -3]),
                run_at=at(self.now + draw.choice([0, 0, 0.5, 3])),
                yields=draw.random() < 0.2,
                max_attempts=50,
            )
            await self.tick()

    async def claim(self) -> None:
        """Claims the same jobs, in the same order, as a claim from the head."""
        limit = self.random.choice([1, 1, 2, 5, 30])
        if self.random.random() < 0.2:
            self.claimer.leave_out(*self.random.sample(self.kinds[1:], self.random.randrange(len(self.kinds))))
        head = (HEAD, self.claimer.worker_id, limit, self.claimer.without)
        transaction = self.db.transaction()
        await transaction.start()
        expected = [(row["id"], row["attempt"]) for row in await self.db.fetch(*head)]
        await transaction.rollback()
        reach_s = self.random.choice([0.0, 0.0, 0.0, 0.0, 0.04, 1.0, None])
        taken = await self.claimer.claim(limit, reach_s)
        assert taken == expected, (self.claimer.places, reach_s)
        self.running += taken

    async def end(self) -> None:
        self.random.shuffle(self.running)
        ending, self.running = self.running[:3], self.running[3:]
        for job_id, attempt in ending:
            match self.random.choice("ccccfrs"):
                case "c":
                    await complete(self.db, [job_id], attempt)
                case "f":
                    await fail(self.db, [job_id], attempt, delay_s=self.random.choice([0, 0.5, 2]))
                case "r":
                    await release(self.db, [job_id], attempt)
                case _:
                    await release(self.db, [job_id], attempt, delay_s=self.random.choice([0, 0.5, 2]))
            await self.tick()

    async def meddle(self) -> None:
        waiting = await self.db.fetch(
            "SELECT id FROM pgworkd.jobs WHERE status IN ('blocked', 'pending', 'failed') ORDER BY id"
        )
        if not waiting:
            return
        job_id = self.random.choice(waiting)["id"]
        match self.random.choice("ceepr"):
            case "c":
                await cancel(self.db, job_id)
            case "e":
                run_at = at(self.now + self.random.choice([-5, -1, 0, 2]))
                await self.db.execute("SELECT pgworkd.edit($1, p_run_at => $2)", job_id, run_at)
            case "p":
                await self.db.execute(
                    "SELECT pgworkd.edit($1, p_priority => $2)", job_id, self.random.choice([-3, 0, 5])
                )
            case _:
                await retry(self.db, job_id)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kinds", [[None], [None, "a", "b"]], ids=["one kind", "some left out"])
async def test_claims_from_cursors_take_the_same_jobs_as_claims_from_the_head(
    db: Db, kinds: list[str | None], seed: int
) -> None:
    worker_id = await worker(db, 3600)
    await set_pool(db, worker_id, idle=False)
    world = World(db, worker_id, seed, kinds)
    await db.add_listener("pgworkd", world.claimer.heard)
    for _ in range(150):
        await world.step()
    while world.running:  # the rest, to the end
        await world.end()
        await world.claim()


async def test_a_job_promoted_behind_the_cursor_is_claimed(db: Db) -> None:
    claimer = Claimer(db, await worker(db))
    first, second, third = [await one(db, serialize_key="k", run_at=at(n)) for n in (-9, -8, -7)]
    other = await one(db, serialize_key="other", run_at=at(-1))
    assert [job for job, _ in await claimer.claim()] == [first, other]
    for done, following in ((first, second), (second, third)):
        await complete(db, [done])
        assert [job for job, _ in await claimer.claim()] == [following]


async def test_a_job_promoted_by_a_late_commit_is_found_by_going_back(db: Db, other: Db) -> None:
    claimer = Claimer(db, await worker(db))
    first, second = [await one(db, serialize_key="k", run_at=at(n)) for n in (-9, -8)]
    assert [job for job, _ in await claimer.claim()] == [first]
    late = other.transaction()
    await late.start()
    await other.execute("SELECT pgworkd.set_no_wait('on')")
    await complete(other, [first])
    await clock(1, db, other)
    between = await one(db, serialize_key="x", run_at=at(1))
    assert [job for job, _ in await claimer.claim()] == [between]
    await late.commit()
    assert await claimer.claim() == []
    await clock(1.5, db)
    assert [job for job, _ in await claimer.claim(reach_s=2.0)] == [second]


async def test_a_clock_set_back_hides_nothing_from_a_claim_from_the_head(db: Db) -> None:
    claimer = Claimer(db, await worker(db, 3600))
    await clock(600, db)
    first, second = [await one(db, serialize_key="k", run_at=at(n)) for n in (598, 599)]
    assert [job for job, _ in await claimer.claim()] == [first]
    await clock(0, db)
    late = await one(db, serialize_key="x", run_at=at(0))
    await complete(db, [first])
    assert [job for job, _ in await claimer.claim(reach_s=None)] == [late]
    after = await one(db, serialize_key="y", run_at=at(1))
    await clock(2, db)
    assert [job for job, _ in await claimer.claim()] == [after], "it goes by the clock again"
    await clock(600, db)
    assert [job for job, _ in await claimer.claim()] == [second]


async def test_cursors_have_the_same_text_under_any_session_settings(db: Db) -> None:
    claimer = Claimer(db, await worker(db))
    await db.execute("SET DateStyle = 'SQL, DMY'; SET extra_float_digits = -15; SET IntervalStyle = 'iso_8601'")
    ids = [await one(db, serialize_key=f"k{n}", run_at=at(-1 + n * 1e-6)) for n in range(5)]
    assert [[job for job, _ in await claimer.claim(1)] for _ in ids] == [[job] for job in ids]
    assert str(int((at(-1).timestamp()) * 1_000_000) + 4) in claimer.places


@pytest.mark.parametrize("lines", LINES)
async def test_finished_jobs_do_not_slow_a_claim_while_vacuum_is_held_back(
    db: Db, connect: Connect, lines: str
) -> None:
    """With few waiters per key, with many of which every one was blocked and promoted, and beside jobs without keys."""
    await db.execute(NO_STATISTICS)
    worker_id, holder = await worker(db, 3600), await connect()
    claimer = Claimer(db, worker_id)
    sql = f"""INSERT INTO pgworkd.jobs (queue, serialize_key, run_at)
              SELECT 'q', {LINES[lines]}, $1::timestamptz + n * interval '1 us'
              FROM generate_series(1, $2::int) n"""  # noqa: S608
    await db.execute(sql, T0, 10)
    await clock(1, db)
    await complete(db, [job for job, _ in await claimer.claim(1)])
    alone = await blocks(db, CLAIM, *claimer.arguments(1))
    await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    await holder.fetchval("SELECT count(*) FROM pgworkd.jobs")
    await db.execute(sql, at(1), 1500)
    now, costs = 2.0, []
    while True:
        now += 0.01
        await clock(now, db)
        taken = await claimer.claim(20)
        if not taken:
            break
        await complete(db, [job for job, _ in taken])
        if len(costs) < 400:
            costs.append(await blocks(db, CLAIM, *claimer.arguments(1)))
    await insert(db, 3, serialize_key=None, run_at=at(now))
    await db.execute(sql, at(now), 3)
    await clock(now + 1, db)
    from_the_head = await blocks(db, HEAD, worker_id, 1, [])
    now_s = [await blocks(db, CLAIM, *claimer.arguments(1)) for _ in range(2)]
    assert max(now_s) <= 3 * alone + 60, (alone, now_s, from_the_head)
    assert from_the_head > 2 * max(now_s), "nothing was held back"
