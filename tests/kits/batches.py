"""Batches and dependencies in SQL: trees of batches, jobs that wait for others, and independent counts of both."""

from __future__ import annotations

import json
import uuid
from typing import Any

import anyio
import asyncpg

from tests.kits.verbs import Db, claim, complete, one

COUNTED = """
    SELECT b.id, b.name::text, p.total, p.completed, p.dead, p.cancelled,
           (SELECT count(*) FROM pgworkd.all_jobs j WHERE j.batch_id = b.id) AS rows,
           (SELECT count(*) FROM pgworkd.all_jobs j WHERE j.batch_id = b.id AND j.status = 'completed') AS n_completed,
           (SELECT count(*) FROM pgworkd.all_jobs j
            WHERE j.batch_id = b.id AND j.status IN ('dead', 'discarded')) AS n_dead,
           (SELECT count(*) FROM pgworkd.all_jobs j
            WHERE j.batch_id = b.id AND j.status IN ('cancelled', 'expired')) AS n_cancelled
    FROM pgworkd.batches b JOIN pgworkd.batch_progress p ON p.id = b.id
"""
LIVE = "('blocked', 'pending', 'running', 'failed')"


async def batch(db: Db, name: str = "b", queue: str | None = "q", **options: Any) -> uuid.UUID:
    """create_batch; the id of the new one. Callbacks may be given as dicts."""
    row = await create(db, name, queue, **options)
    assert row["created"]
    return uuid.UUID(str(row["id"]))


async def create(db: Db, name: str = "b", queue: str | None = "q", **options: Any) -> asyncpg.Record:
    """create_batch; its result."""
    values = [json.dumps(value) if isinstance(value, dict) else value for value in options.values()]
    named = "".join(f", p_{option} => ${number}" for number, option in enumerate(options, 3))
    row = await db.fetchrow(f"SELECT * FROM pgworkd.create_batch($1, $2{named})", name, queue, *values)  # noqa: S608
    assert row is not None
    return row


async def add(db: Db, batch_id: uuid.UUID, count: int = 1, payload: Any = None, **options: Any) -> list[uuid.UUID]:
    """add_jobs; the ids."""
    named = "".join(f", p_{option} => ${number}" for number, option in enumerate(options, 3))
    payloads = [json.dumps(payload if payload is not None else {"n": n}) for n in range(count)]
    ids = await db.fetchval(f"SELECT pgworkd.add_jobs($1, $2{named})", batch_id, payloads, *options.values())
    return list(ids)


async def seal(db: Db, *ids: uuid.UUID) -> list[bool]:
    """seal_batch of each."""
    return [await db.fetchval("SELECT pgworkd.seal_batch($1)", batch_id) for batch_id in ids]


async def sealed(db: Db, count: int = 1, name: str = "b", queue: str = "q", **options: Any) -> tuple[Any, Any]:
    """A root with jobs, sealed; its id and theirs."""
    batch_id = await batch(db, name, queue, **options)
    ids = await add(db, batch_id, count)
    await seal(db, batch_id)
    return batch_id, ids


async def progress(db: Db, batch_id: uuid.UUID) -> dict[str, Any]:
    """The batch's row of batch_progress."""
    row = await db.fetchrow("SELECT * FROM pgworkd.batch_progress WHERE id = $1", batch_id)
    assert row is not None
    return dict(row)


async def state(db: Db, *ids: uuid.UUID) -> list[str]:
    """The states of batches."""
    return [(await progress(db, batch_id))["state"] for batch_id in ids]


async def counts(db: Db, batch_id: uuid.UUID) -> tuple[int, int, int, int]:
    """(total, completed, dead, cancelled) of a batch."""
    row = await progress(db, batch_id)
    return row["total"], row["completed"], row["dead"], row["cancelled"]


async def calls(db: Db, queue: str = "done") -> list[dict[str, Any]]:
    """The payloads of the jobs in a queue, in order: callbacks."""
    rows = await db.fetch("SELECT payload FROM pgworkd.all_jobs WHERE queue = $1 ORDER BY created_at, id", queue)
    return [json.loads(row["payload"]) for row in rows]


async def cancel_batch(db: Db, batch_id: uuid.UUID, limit: int = 1000) -> tuple[int, int, bool]:
    """cancel_batch; the numbers of jobs cancelled and requested, and whether there are more."""
    row = await db.fetchrow("SELECT * FROM pgworkd.cancel_batch($1, $2)", batch_id, limit)
    assert row is not None
    return row["cancelled"], row["requested"], row["more"]


async def run(db: Db, worker_id: int, limit: int = 10, queue: str = "q", result: str | None = None) -> list[uuid.UUID]:
    """Claims once, and completes the jobs; their ids."""
    rows = await claim(db, worker_id, limit, queue)
    ids = [row["id"] for row in rows]
    assert await complete(db, ids, [row["attempt"] for row in rows], [result] * len(ids)) == set(ids)
    return ids


async def counted(db: Db) -> None:
    """Every counter of every batch equals a count of the rows, and finished batches have no live job."""
    for row in await db.fetch(COUNTED):
        said = (row["total"], row["completed"], row["dead"], row["cancelled"])
        assert said == (row["rows"], row["n_completed"], row["n_dead"], row["n_cancelled"]), dict(row)
    wrong = await db.fetch(
        "SELECT b.id FROM pgworkd.batches b JOIN pgworkd.jobs j ON j.batch_id = b.id "  # noqa: S608 - names are ours
        f"WHERE b.finished_at IS NOT NULL AND j.status IN {LIVE}"
    )
    assert wrong == [], "finished, with live jobs"


# Jobs that depend on others, and why they are blocked

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


# Jobs with many dependents, and maintenance page by page

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


async def counts_of(db: Db, queue: str = "then") -> dict[str, int]:
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
