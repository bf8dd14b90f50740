"""One periodic query for all idle pools: when is the next job due? It covers lost notifications.

While some transaction holds back vacuum, the first job that waits may be behind the index entries of all that have ever
run. So a poll begins a little before the time of the last one, or at the jobs that were due and left then. From time to
time it begins at the head nevertheless: jobs may have been committed late, and their notification lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import anyio

from pgworkd.core.events import Events
from pgworkd.database.reconnect import Outage
from pgworkd.database.store import Store
from pgworkd.engine.claim.claim_loop import ClaimingWorker, ClaimLoop
from pgworkd.engine.refusals import Refusals
from pgworkd.errors import PgworkdError

PART = "poller"
COST_SHARE = 0.1
"""Maximum share of the time that polls may take."""
PAUSE_S_MAX = 10.0
"""Maximum pause on that account: inserts due later than this send no notification, and rely on the poll."""
OVERLAP_S = 10.0
"""A poll goes back this far before the last one: for jobs that were committed this late, their notification lost."""
HEAD_COST_SHARE = 0.01
"""Maximum share of the time for polls from the head."""
HEAD_PAUSE_S_MAX = 60.0
"""Maximum pause between two polls from the head."""


class Poller:
    """Tells each idle pool when its next job is due."""

    def __init__(
        self,
        store: Store,
        pools: Mapping[str, ClaimLoop],
        worker: ClaimingWorker,
        events_: Events,
        poll_s: float,
        refusals: Refusals | None = None,
    ) -> None:
        """`refusals`: where to note that a poll has failed."""
        self._refusals = refusals or Refusals(events_)
        self._store = store
        self._pools = pools
        self._worker = worker
        self._outage = Outage(PART, events_)
        self._poll_s = poll_s
        self._took_s = 0.0  # duration of the last poll
        self._head_took_s = 0.0  # duration of the last poll from the head
        self._head_at = 0.0  # when the next one from the head is due
        self._since: dict[str, float] = {}  # by queue, on the loop's clock: no job waits that was due before

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            await anyio.sleep(await self._iteration())

    async def _iteration(self) -> float:
        idle = [pool for pool in self._pools.values() if pool.is_idle and not pool.paused]
        if not idle or not self._worker.may_claim:
            self._refusals.passed(PART)
            return self._poll_s
        began, sent_at = anyio.current_time(), time.monotonic()
        from_head = began >= self._head_at
        ages_s = [None if from_head else self._age_s(pool, began) for pool in idle]
        for pool in idle:
            pool.rewound = False  # before the query: a rewind during it may be missing in its answer
        try:
            due = await self._store.next_due([pool.queue for pool in idle], ages_s, [pool.priorities for pool in idle])
        except PgworkdError as error:
            self._since.clear()
            self._refusals.failed(PART, error, sent_at)
            return self._outage.failed(error)
        finally:
            took_s = anyio.current_time() - began
            # One poll may have waited behind a claim: polling is expensive only if two in a row took long.
            last_s, self._took_s = self._took_s, took_s
            if from_head:
                pause_s = min(self._head_took_s, took_s) / HEAD_COST_SHARE
                self._head_took_s, self._head_at = took_s, began + min(pause_s, HEAD_PAUSE_S_MAX)
        self._outage.passed()
        self._refusals.passed(PART)
        for pool in idle:
            pool.expect(due.get(pool.queue))
            self._since[pool.queue] = began + min(due.get(pool.queue, 0.0), 0.0)
        return max(self._poll_s, min(last_s, self._took_s, PAUSE_S_MAX * COST_SHARE) / COST_SHARE)

    def _age_s(self, pool: ClaimLoop, now: float) -> float | None:
        """How far the next poll must go back, in seconds; None: it begins at the head."""
        since = None if pool.rewound else self._since.get(pool.queue)
        return None if since is None else now - since + OVERLAP_S
