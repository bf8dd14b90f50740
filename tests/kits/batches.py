"""Batches in SQL: trees of them, jobs in them, and an independent count of outcomes."""

from __future__ import annotations

import json
import uuid
from typing import Any

import asyncpg

from tests.kits.verbs import Db, claim, complete

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
