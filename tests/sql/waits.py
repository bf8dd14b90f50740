"""Dependencies in SQL: jobs that depend on others, why they are blocked, and an independent count."""

from __future__ import annotations

import uuid
from typing import Any

from tests.kits.verbs import Db, claim, complete, one

WRONG = """
    SELECT j.id, j.status::text, j.waiting_on, e.edges
    FROM pgworkd.jobs j
    CROSS JOIN LATERAL (SELECT count(*) AS edges FROM pgworkd.job_dependencies d WHERE d.job_id = j.id) e
    WHERE j.waiting_on > 0 AND j.waiting_on <> e.edges
"""
LEFT = "SELECT job_id FROM pgworkd.job_dependencies WHERE unchecked OR job_id NOT IN (SELECT id FROM pgworkd.jobs)"


async def depend(db: Db, job_id: uuid.UUID, *after: uuid.UUID, on_failed: str = "wait") -> int:
    """depend; the number of dependencies that it added."""
    return int(await db.fetchval("SELECT pgworkd.depend($1, $2, $3)", job_id, after, on_failed))


async def after(db: Db, *others: uuid.UUID, on_failed: str = "wait", **columns: Any) -> uuid.UUID:
    """Inserts a job that depends on others, in one transaction; its id."""
    begins = not db.is_in_transaction()
    if begins:
        await db.execute("BEGIN")
    job_id = await one(db, **columns)
    await depend(db, job_id, *others, on_failed=on_failed)
    if begins:
        await db.execute("COMMIT")
    return job_id


async def mend(db: Db) -> int:
    """mend_dependencies; the number of jobs it changed."""
    return int(await db.fetchval("SELECT pgworkd.mend_dependencies()"))


async def undepend(db: Db, *ids: uuid.UUID) -> list[uuid.UUID]:
    """undepend; the ids it changed."""
    return list(await db.fetchval("SELECT pgworkd.undepend($1)", ids))


async def blocked(db: Db, job_id: uuid.UUID) -> tuple[int, str, uuid.UUID | None]:
    """(waiting_on, reason, stuck_on) of a blocked job."""
    row = await db.fetchrow("SELECT waiting_on, reason, stuck_on FROM pgworkd.blocked_jobs WHERE id = $1", job_id)
    assert row is not None, f"{job_id} is not blocked"
    return row["waiting_on"], row["reason"], row["stuck_on"]


async def exact(db: Db) -> None:
    """Every counter equals a count of the rows; after maintenance, nothing is left over."""
    assert [dict(row) for row in await db.fetch(WRONG)] == []
    await mend(db)
    assert [dict(row) for row in await db.fetch(WRONG)] == []
    assert await db.fetch(LEFT) == []


async def run_one(db: Db, worker_id: int, job_id: uuid.UUID, queue: str = "q") -> None:
    """Claims the only job that can run, and completes it."""
    rows = await claim(db, worker_id, 10, queue)
    assert [row["id"] for row in rows] == [job_id]
    assert await complete(db, [job_id], rows[0]["attempt"]) == {job_id}
