"""The attempts that end here: as they were claimed here, or, through another gateway, as the database has them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from uuid import UUID

from pgworkd.database.remote_store import Held, RemoteStore
from pgworkd.engine.attempts import Attempt
from pgworkd.remote.workers import RemoteWorkers


class Attempts:
    """Finds them."""

    def __init__(self, store: RemoteStore, workers: RemoteWorkers) -> None:
        self._store, self._workers = store, workers

    async def of(self, held: Sequence[Held]) -> dict[UUID, Attempt]:
        """The attempts by job; one that runs no more may be missing. Raises PgworkdError."""
        found, elsewhere = dict[UUID, Attempt](), list[Held]()
        for each in held:
            if (attempt := self._workers.attempt(each)) is None:
                elsewhere.append(each)
            else:
                found[each.job_id] = attempt
        if elsewhere:
            now, workers = time.monotonic(), {each.job_id: each.worker_id for each in elsewhere}
            for queue, age_s, claimed in await self._store.claimed(elsewhere):
                attempt = found[claimed.id] = Attempt(claimed, queue, workers[claimed.id])
                attempt.started = now - age_s
        return found
