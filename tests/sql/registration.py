"""What tests ask of a worker's registration."""

from __future__ import annotations

import uuid

from .verbs import Db


async def token(db: Db, worker_id: int) -> uuid.UUID | None:
    """Of the worker's registration; None: it has none."""
    # The operator by its full name: some callers have a hostile search_path.
    sql = "SELECT token FROM pgworkd.workers WHERE id OPERATOR(pg_catalog.=) $1"
    found: uuid.UUID | None = await db.fetchval(sql, worker_id)
    return found


async def sign_off(db: Db, worker_id: int) -> bool:
    """Ends a worker; False if it still has running jobs."""
    return bool(await db.fetchval("SELECT pgworkd.sign_off($1, $2)", worker_id, await token(db, worker_id)))
