"""One query for all sleeping pools, now and then: what is due, or will be. It covers lost notifications.

While some transaction holds back vacuum, the first job that waits may be behind the index entries of all that have ever
run. So a look begins a little before the last one, or at what was due and left then. Now and then it begins at the head
all the same: jobs may have been committed late, and their notification lost.
"""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from pgworkd.database.reconnect import Outage
from pgworkd.database.store import Store
from pgworkd.engine.claim.pool import ClaimingWorker, Pool
from pgworkd.errors import PgworkdError
from pgworkd.words.events import Events

COST_SHARE = 0.1
"""Of the time at most."""
PAUSE_S_MAX = 10.0
"""Inserts that are due later than that send no notice."""
OVERLAP_S = 10.0
"""Before the last look: what was committed that late is found although its notification was lost."""
HEAD_COST_SHARE = 0.01
"""Of the time, for looks from the head."""
HEAD_PAUSE_S_MAX = 60.0
"""Between two of those."""


class Poller:
    """Tells each sleeping pool when its next job is due."""

    def __init__(
        self, store: Store, pools: Mapping[str, Pool], worker: ClaimingWorker, events_: Events, poll_s: float
    ) -> None:
        self._store = store
        self._pools = pools
        self._worker = worker
        self._outage = Outage("look", events_)
        self._poll_s = poll_s
        self._took_s = 0.0  # the last look
        self._head_took_s = 0.0  # the last one from the head
        self._head_at = 0.0  # when the next one is due
        self._since: dict[str, float] = {}  # by queue, on the loop's clock: nothing waits that was due before

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await anyio.sleep(await self._iteration())

    async def _iteration(self) -> float:
        sleepers = [pool for pool in self._pools.values() if pool.is_idle and not pool.paused]
        if not sleepers or not self._worker.may_claim:
            return self._poll_s
        began = anyio.current_time()
        from_head = began >= self._head_at
        ages_s = [None if from_head else self._age_s(pool, began) for pool in sleepers]
        for pool in sleepers:
            pool.rewound = False  # before the answer: it may not know of what is said meanwhile
        try:
            due = await self._store.next_due(
                [pool.queue for pool in sleepers], ages_s, [pool.priorities for pool in sleepers]
            )
        except PgworkdError as error:
            self._since.clear()
            return self._outage.failed(error)
        finally:
            took_s = anyio.current_time() - began
            # One that took long may have waited behind a claim: only two in a row say that looking is expensive.
            last_s, self._took_s = self._took_s, took_s
            if from_head:
                pause_s = min(self._head_took_s, took_s) / HEAD_COST_SHARE
                self._head_took_s, self._head_at = took_s, began + min(pause_s, HEAD_PAUSE_S_MAX)
        self._outage.passed()
        for pool in sleepers:
            pool.expect(due.get(pool.queue))
            self._since[pool.queue] = began + min(due.get(pool.queue, 0.0), 0.0)
        return max(self._poll_s, min(last_s, self._took_s, PAUSE_S_MAX * COST_SHARE) / COST_SHARE)

    def _age_s(self, pool: Pool, now: float) -> float | None:
        """What the next look need not go back beyond; None: it begins at the head."""
        since = None if pool.rewound else self._since.get(pool.queue)
        return None if since is None else now - since + OVERLAP_S
