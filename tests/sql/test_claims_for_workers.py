"""Claims on behalf of several workers: each gets what the database gave it, and no other."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.claims import ClaimOrder
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.remote_store import ClaimWaiter, RemoteStore
from tests.kits.models import examples
from tests.kits.verbs import Db

WAITERS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=5)
"""(limit, whether its attempts have a lease of their own) of each."""
JOBS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([0, 0, 2]), st.sampled_from([None, "a", "b"])), max_size=12
)
"""(priority, losses, limit_key) of each; who was lost twice is a suspect, and takes a claim of its own."""
_INSERT = """INSERT INTO pgworkd.jobs (queue, priority, losses, limit_key)
    SELECT $1, u.* FROM unnest($2::int[], $3::int[], $4::text[]) u"""
_GIVEN = """SELECT id, worker_id, lease_s::float8, attempts FROM pgworkd.jobs
    WHERE queue = $1 AND status = 'running'"""


async def test_who_got_a_job_is_who_the_database_says(dsn: str, db: Db) -> None:
    drawn: list[Any] = []

    @examples(60)
    @given(WAITERS, JOBS)
    def collect(waiters: list[tuple[int, bool]], jobs: list[tuple[int, int, str | None]]) -> None:
        drawn.append((waiters, jobs))

    collect()
    store = RemoteStore(ConnectionOptions(dsn), lambda: 1)
    try:
        for number, (waiters, jobs) in enumerate(drawn):
            await _deal(store, db, f"q{number}", waiters, jobs)
    finally:
        await store.close()


async def _deal(store: RemoteStore, db: Db, queue: str, asking: Any, jobs: Any) -> None:
    """Claims until nothing is left; the seconds of a lease of its own say whose it is."""
    if jobs:
        await db.execute(_INSERT, queue, *zip(*jobs, strict=True))
    standing = await store.standing_worker()
    waiters = [
        ClaimWaiter(await store.register(f"{queue} {n}", "v", 30), limit, 60.0 + n if own else None, n)
        for n, (limit, own) in enumerate(asking)
    ]
    limits = {each.worker_id: each.limit for each in waiters}
    told: dict[uuid.UUID, tuple[int, int]] = {}
    for _ in range(len(jobs) + 1):
        found = await store.claim_for(waiters, ClaimOrder(0, queue, 0), standing, uuid.uuid4())
        assert found.lost == []
        assert all(count <= limits[worker] for worker, count in Counter(found.workers).items())
        assert not told.keys() & {each.id for each in found.claims}, "claimed twice"
        told |= {each.id: (worker, each.attempt) for each, worker in zip(found.claims, found.workers, strict=True)}
    said = {
        job_id: (worker_id if worker_id != standing else waiters[int(lease_s) - 60].worker_id, attempt)
        for job_id, worker_id, lease_s, attempt in await db.fetch(_GIVEN, queue)
    }
    assert told == said
