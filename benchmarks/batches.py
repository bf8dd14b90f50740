"""The cost of batches: the same jobs with and without a batch, and how long daemons wait for its counters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import asyncpg

from pgworkd.bench.measure import Drain

from .bench import Bench
from .drain import JOBS, drain, rates
from .measure import Bar, Line, interleave
from .systems import PAYLOAD_SQL, System, ours

DAEMONS, SHARED = 4, 100_000
LOOK_S = 0.005

_BATCH = "SELECT pgworkd.create_batch('bench', 'bench')"
_ADD = f"""
    WITH batch AS MATERIALIZED (
        SELECT b.id, pgworkd.add_jobs(b.id, (SELECT array_agg({PAYLOAD_SQL}) FROM generate_series(1, $1::int) AS i))
        FROM pgworkd.batches b)
    SELECT pgworkd.seal_batch(id) FROM batch"""  # noqa: S608 - ours
_WAIT = """SELECT coalesce(max(extract(epoch FROM clock_timestamp() - waitstart)), 0)::float8 * 1000
    FROM pg_locks WHERE NOT granted AND locktype IN ('transactionid', 'tuple', 'advisory')"""


@dataclass(frozen=True, slots=True)
class Shared:
    """One drain by several daemons, and the longest wait of any of their transactions for another's lock."""

    drained: Drain
    wait_ms: float

    def __str__(self) -> str:
        return f"{self.drained}, {self.wait_ms:.1f} ms for a lock at worst"


def batched() -> System:
    """Our worker on one sealed batch with all jobs."""
    return ours("batched", insert=_ADD, more=_BATCH)


async def batches_row(bench: Bench) -> list[Line]:
    """One daemon on one batch, and four on a larger one, whose lock serializes all its settles."""
    jobs = bench.jobs(JOBS)
    bench.say(f"batches: {jobs:,} jobs in one batch and in none")
    alone = await interleave(
        {"batched": partial(drain, bench, batched(), jobs), "plain": partial(drain, bench, ours(), jobs)},
        bench.rounds,
        bench.say,
    )
    jobs = bench.jobs(SHARED)
    bench.say(f"batches: {jobs:,} jobs in one batch and in none, {DAEMONS} daemons")
    shared = await interleave(
        {
            "batched": partial(_shared, bench, batched(), jobs),
            "plain": partial(_shared, bench, ours(), jobs),
        },
        bench.rounds,
        bench.say,
    )
    line = partial(Line, "batches", against="no batch")
    four = {name: rates([sample.drained for sample in samples]) for name, samples in shared.items()}
    waits = {name: [sample.wait_ms for sample in samples] for name, samples in shared.items()}
    return [
        line(
            what="all in one batch, one daemon",
            unit="jobs/s",
            ours=rates(alone["batched"]),
            reference=rates(alone["plain"]),
            bar=Bar("at least", 0.6),
        ),
        line(
            what=f"{jobs:,} in one batch, {DAEMONS} daemons",
            unit="jobs/s",
            ours=four["batched"],
            reference=four["plain"],
        ),
        Line("batches", "the longest wait for a lock meanwhile", "ms", waits["batched"], bar=Bar("at most", 100)),
    ]


async def _shared(bench: Bench, system: System, jobs: int) -> Shared:
    """A drain by several daemons while their lock waits are sampled."""
    worst_ms = 0.0

    async def look(connection: asyncpg.Connection[Any]) -> None:
        nonlocal worst_ms
        while True:
            worst_ms = max(worst_ms, await connection.fetchval(_WAIT))
            await anyio.sleep(LOOK_S)

    async with bench.server.connected(bench.server.dsn) as connection, anyio.create_task_group() as tasks:
        tasks.start_soon(look, connection)
        drained = await drain(bench, system, jobs, workers=DAEMONS)
        tasks.cancel_scope.cancel()
    return Shared(drained, worst_ms)
