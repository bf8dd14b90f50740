"""Two databases, one with the crowd, and the same calls timed alternately on both."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import asyncpg

from benchmarks.bench import Bench
from benchmarks.measure import Bar, Line, interleave, middle
from benchmarks.processes import BenchmarkError
from benchmarks.systems import executed
from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.database import schema
from pgworkd.database.store import CLAIM
from pgworkd.engine.claim.claim_cursor import ClaimCursor

Db: TypeAlias = "asyncpg.Connection[Any]"
Cost: TypeAlias = Callable[[], Awaitable[float]]
"""Does the work once and undoes it; returns the ms it took."""

BAR, LIMITED = Bar("at most", 1.5), Bar("at most", 3)
"""Of most, and of claims where keys or limits count."""
SLOW_ROUNDS = 3
"""Number of samples of operations that take seconds."""
TEMPLATE = "cliffs"


@dataclass(frozen=True, slots=True)
class Stage:
    """A database and the session that works in it."""

    bench: Bench
    dsn: str
    db: Db

    async def fill(self, sql: str, *args: object) -> None:
        """Runs a statement that inserts rows, without triggers."""
        await self.db.execute("SET session_replication_role = replica")
        await self.db.execute(sql, *args)
        await self.db.execute("RESET session_replication_role")

    async def worker(self) -> int:
        """Registers a worker with a long lease."""
        return int(await self.db.fetchval("SELECT pgworkd.register('cliffs', 1, 'v', 3600)"))

    async def took_ms(self, *calls: tuple[Any, ...]) -> float:
        """How long these statements, each with its arguments, take in one transaction, which is rolled back."""
        await self.db.execute("BEGIN")
        try:
            began = time.perf_counter()
            for sql, *args in calls:
                await self.db.fetch(sql, *args)
            return (time.perf_counter() - began) * 1000
        finally:
            await self.db.execute("ROLLBACK")

    def call(self, sql: str, *args: object) -> Cost:
        """`took_ms` of one statement."""
        return lambda: self.took_ms((sql, *args))

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[None]:
        """Holds a snapshot, so that vacuum keeps the index entries of finished jobs."""
        async with self.bench.server.connected(self.dsn) as holder:
            await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await holder.fetchval("SELECT count(*) FROM pgworkd.jobs")
            yield

    async def ran(self, worker: int, count: int, columns: str = "", values: str = "") -> None:
        """Inserts jobs of queue `q` that were due an hour ago, ran half an hour ago, and are finished.

        `columns` and `values` begin with a comma and are SQL in terms of `i`, the job's number.
        """
        await self.fill(
            f"""INSERT INTO pgworkd.jobs (queue, run_at{columns})
                SELECT 'q', now() - interval '1 h' + i * interval '1 us'{values}
                FROM generate_series(1, $1::int) i""",  # noqa: S608 - ours
            count,
        )
        await self.fill(
            """UPDATE pgworkd.jobs SET status = 'running', worker_id = $1, attempts = 1,
               started_at = now() - interval '30 min' WHERE queue = 'q'""",
            worker,
        )
        await self.fill("DELETE FROM pgworkd.jobs WHERE queue = 'q'")


@dataclass(slots=True)
class Pool:
    """Claims as a daemon's pool does, from its current position; no sweep is due."""

    stage: Stage
    worker: int
    queue: str
    left_out: tuple[str, ...] = ()
    _cursor: ClaimCursor = field(default_factory=ClaimCursor)
    _now: float = 0.0

    async def claim(self, limit: int) -> Claims:
        """Claims, and advances the position."""
        found = await self._claim(limit)
        self._cursor.claimed(found, self._now, 0.0, full=len(found) >= limit, places=found.places)
        self._cursor.passed(found.passed)
        self._now = 0.001  # the first claim started at the head; the next sweep is due after 20 ms
        return found

    async def advance(self, limit: int, expected: int) -> None:
        """Claims until it has that many jobs, and once more where kinds are left out, to get past those."""
        taken, claims = 0, 0
        while taken < expected:
            taken, claims = taken + len(await self.claim(limit)), claims + 1
            if claims > 1000:
                raise BenchmarkError(f"{self.queue}: {taken} of {expected} jobs in {claims} claims")
        if self.left_out:
            await self.claim(limit)

    def cost(self, limit: int, expected: int) -> Cost:
        """The cost of one claim, which must take that many jobs."""

        async def once() -> float:
            return await self._undone(limit, expected, 1)

        return once

    def cost_of_all(self, limit: int, expected: int) -> Cost:
        """The cost of claims from the current position of this pool until they have taken that many jobs."""

        async def once() -> float:
            return await self._undone(limit, expected, 5000)

        return once

    async def _undone(self, limit: int, expected: int, most: int) -> float:
        taken = claims = 0
        await self.stage.db.execute("BEGIN")
        try:
            began = time.perf_counter()
            while claims < most and (not claims or taken < expected):
                taken, claims = taken + len(await self._claim(limit)), claims + 1
            took_ms = (time.perf_counter() - began) * 1000
        finally:
            await self.stage.db.execute("ROLLBACK")
        if taken != expected:
            raise BenchmarkError(f"{self.queue}: {taken} of {expected} jobs in {claims} claims")
        return took_ms

    async def _claim(self, limit: int) -> Claims:
        start, keyed = self._cursor.start(self._now), self._cursor.keyed()
        order = ClaimOrder(self.worker, self.queue, limit, (), (), *start, self.left_out)
        order = order._replace(places=keyed.places, reach_s=keyed.reach_s, since=keyed.since, renew=keyed.renew)
        return Claims.read(await self.stage.db.fetch(CLAIM, *order, None))


Scene: TypeAlias = Callable[[Stage, int], AbstractAsyncContextManager[Mapping[str, Cost]]]
"""Makes a crowd of that size and what stands beside it; what is to be measured there, by name."""


async def compare(
    bench: Bench,
    row: str,
    scene: Scene,
    crowd: int,
    of: str,
    bars: Mapping[str, Bar],
    *,
    base: int = 0,
    rounds: int | None = None,
) -> list[Line]:
    """One line for each cost that the scene has: beside a crowd `of` that, and without it (or beside `base`)."""
    bench.say(f"{row}: {crowd:,} {of}")
    lines = []
    async with (
        _stage(bench) as alone,
        _stage(bench) as beside,
        scene(alone, base) as without,
        scene(beside, crowd) as there,
    ):
        await alone.db.execute("CHECKPOINT")
        for what, bar in bars.items():
            costs = {"alone": partial(_often, without[what]), "beside": partial(_often, there[what])}
            await interleave(costs, 1)  # plans, and pages into the cache
            found = await interleave(costs, min(bench.rounds, rounds or bench.rounds))
            note = f"{crowd:,} {of}" + (f", against {base:,}" if base else "")
            lines.append(Line(row, what, "ms", found["beside"], found["alone"], "ms", bar, note))
    return lines


async def _often(cost: Cost) -> float:
    """The median of as many samples as take 20 ms, of nine at most: what takes less than one is easily disturbed."""
    samples: list[float] = []
    while len(samples) < 9 and sum(samples) < 20:
        samples.append(await cost())
    return middle(samples)


@asynccontextmanager
async def _stage(bench: Bench) -> AsyncIterator[Stage]:
    await bench.server.template(TEMPLATE, lambda dsn: executed(dsn, schema.text()))
    async with bench.server.database(TEMPLATE) as dsn, bench.server.connected(dsn) as db:
        yield Stage(bench, dsn, db)
