"""Jobs with many dependents, in SQL, and maintenance page by page."""

from __future__ import annotations

import uuid
from typing import Any

import anyio

from tests.kits.verbs import Db

MANY, PAGE = 5_000, 500
DEPENDENTS = """
    WITH made AS (
        INSERT INTO pgworkd.jobs (queue, status, waiting_on)
        SELECT $3, 'blocked', cardinality($1::uuid[]) FROM generate_series(1, $2::int) RETURNING id
    ), waits AS (
        INSERT INTO pgworkd.job_dependencies (job_id, depends_on, on_failed_dependency)
        SELECT m.id, u.id, $4 FROM made m, unnest($1::uuid[]) AS u (id)
    )
    SELECT id FROM made
"""
COUNTS = "SELECT status::text, count(*) FROM pgworkd.all_jobs WHERE queue = $1 GROUP BY 1"
WAITERS = "SELECT job_id FROM pgworkd.job_dependencies WHERE depends_on = $1 ORDER BY job_id"
# A start that came twice or too early would leave a dependent that waits although it is not blocked, or vice versa.
TORN = "SELECT id FROM pgworkd.jobs WHERE (status = 'blocked') <> (waiting_on > 0)"


async def crowd(
    db: Db, *parents: uuid.UUID, count: int = MANY, queue: str = "then", on_failed: str = "wait"
) -> list[Any]:
    """Inserts jobs that depend on all of `parents`; their ids in order."""
    return sorted(row["id"] for row in await db.fetch(DEPENDENTS, list(parents), count, queue, on_failed))


async def page(db: Db, limit: int = PAGE) -> int | None:
    """One call of maintenance; what it returns."""
    return await db.fetchval("SELECT pgworkd.apply_effects($1)", limit)  # type: ignore[no-any-return]


async def pages(db: Db, limit: int = PAGE, most: int = 3 * MANY // PAGE) -> int:
    """Runs maintenance until nothing is left, or what is left cannot be done now; the number of calls."""
    for number in range(1, most):
        left = await page(db, limit)
        assert left is not None, "nobody else is there"
        assert await db.fetch(TORN) == []
        if left >= 0:
            return number
    raise AssertionError("it goes on and on")


async def counts(db: Db, queue: str = "then") -> dict[str, int]:
    """The number of jobs of a queue by status."""
    return {row[0]: row[1] for row in await db.fetch(COUNTS, queue)}


async def effects(db: Db) -> int:
    """The number of deferred effects."""
    return int(await db.fetchval("SELECT count(*) FROM pgworkd.pending_effects"))


async def keeps_nothing(db: Db, queue: str = "q") -> None:
    """Makes the queue keep no history."""
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ($1, 0)", queue)


async def alone(db: Db) -> None:
    """Returns when no other session holds the lock of this part of maintenance."""
    with anyio.fail_after(10):
        while not await db.fetchval("SELECT pg_try_advisory_xact_lock(1886873445, 7)"):
            await anyio.sleep(0.01)
