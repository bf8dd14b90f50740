"""The registration of a worker, for tests."""

from __future__ import annotations

import uuid

from tests.kits.verbs import Db


async def token(db: Db, worker_id: int) -> uuid.UUID | None:
    """The registration token of the worker; None: it has none."""
    # The operator is schema-qualified: some callers have a hostile search_path.
    sql = "SELECT token FROM pgworkd.workers WHERE id OPERATOR(pg_catalog.=) $1"
    found: uuid.UUID | None = await db.fetchval(sql, worker_id)
    return found


async def sign_off(db: Db, worker_id: int) -> bool:
    """Signs a worker off; False if it still has running jobs."""
    return bool(await db.fetchval("SELECT pgworkd.sign_off($1, $2)", worker_id, await token(db, worker_id)))
