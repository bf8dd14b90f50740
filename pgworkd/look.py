"""One query for all sleeping pools, now and then: what is due, or will be. It covers lost notifications."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from .errors import PgworkdError
from .events import Events
from .outage import Outage
from .pool import Fleet, Pool
from .store import Store

COST_SHARE = 0.1
"""Of the time at most: while vacuum is held back, even the first due row can be behind millions of dead ones."""
PAUSE_S_MAX = 10.0
"""Inserts that are due later than that send no notice."""


class Look:
    """Tells each sleeping pool when its next job is due."""

    def __init__(self, store: Store, pools: Mapping[str, Pool], fleet: Fleet, events_: Events, poll_s: float) -> None:
        self._store = store
        self._pools = pools
        self._fleet = fleet
        self._outage = Outage("look", events_)
        self._poll_s = poll_s
        self._took_s = 0.0  # the last look

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            await anyio.sleep(await self._turn())

    async def _turn(self) -> float:
        sleepers = [pool for pool in self._pools.values() if pool.asleep and not pool.paused]
        if not sleepers or not self._fleet.may_claim:
            return self._poll_s
        began = anyio.current_time()
        try:
            due = await self._store.next_due([pool.queue for pool in sleepers])
        except PgworkdError as error:
            return self._outage.failed(error)
        self._outage.passed()
        for pool in sleepers:
            pool.expect(due.get(pool.queue))
        # One that took long may have waited behind a claim: only two in a row say that looking is expensive.
        last_s, self._took_s = self._took_s, anyio.current_time() - began
        return max(self._poll_s, min(last_s, self._took_s, PAUSE_S_MAX * COST_SHARE) / COST_SHARE)
