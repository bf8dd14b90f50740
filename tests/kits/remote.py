"""Remote workers as SQL: what a gateway calls on their behalf."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.kits.verbs import Db, token


class Waiter(NamedTuple):
    """One claim that waits for jobs."""

    worker: int
    limit: int = 1
    lease_s: float | None = None


async def registered(db: Db, kind: str = "remote", lease_s: float = 30, name: str = "r") -> int:
    """Registers a worker of that kind; its id."""
    return int(await db.fetchval("SELECT pgworkd.register($1, 1, 'v', $2, p_kind => $3)", name, lease_s, kind))


async def standing(db: Db) -> int:
    """The id of the standing worker."""
    return int(await db.fetchval("SELECT id FROM pgworkd.standing_worker()"))


async def beat(db: Db, *workers: int) -> dict[int, str]:
    """Renews the leases of these workers; the outcome by worker."""
    tokens = [await token(db, worker) or uuid.uuid4() for worker in workers]
    sql = "SELECT worker, outcome FROM pgworkd.heartbeats($1, $2, $3)"
    rows = await db.fetch(sql, workers, tokens, ["running"] * len(workers))
    assert len(rows) == len(workers)
    return {row["worker"]: row["outcome"] for row in rows}


async def claim_rows(
    db: Db, *waiters: Waiter, queue: str = "q", assignment: uuid.UUID | None = None, tokens: Sequence[Any] | None = None
) -> list[Any]:
    """claim_for(); its rows."""
    given = tokens or [await token(db, waiter.worker) or uuid.uuid4() for waiter in waiters]
    return await db.fetch(
        "SELECT * FROM pgworkd.claim_for($1, $2, $3, $4, $5, $6, $7)",
        [each.worker for each in waiters],
        given,
        [each.limit for each in waiters],
        [each.lease_s for each in waiters],
        await standing(db),
        assignment or uuid.uuid4(),
        queue,
    )


async def claim_for(db: Db, *waiters: Waiter, queue: str = "q") -> dict[int, list[uuid.UUID]]:
    """claim_for(); the ids by worker, in order."""
    found: dict[int, list[uuid.UUID]] = defaultdict(list)
    for row in await claim_rows(db, *waiters, queue=queue):
        if row["id"] is not None:
            found[row["worker"]].append(row["id"])
    return dict(found)


async def overdue(db: Db, limit: int = 1000) -> dict[uuid.UUID, str]:
    """fail_overdue(); the new status by id of what it failed."""
    return {row["id"]: row["status"] for row in await db.fetch("SELECT * FROM pgworkd.fail_overdue($1)", limit)}


async def extend(db: Db, job_id: uuid.UUID, attempt: int = 1, lease_s: float | None = None) -> float | None:
    """extend() of one attempt; the seconds left. Raises KeyError if it no longer runs."""
    rows = await db.fetch("SELECT id, left_s FROM pgworkd.extend($1, $2, $3)", [job_id], [attempt], [lease_s])
    found = {row["id"]: row["left_s"] for row in rows}
    left_s: float | None = found[job_id]
    return left_s
