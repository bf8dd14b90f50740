"""A pool whose jobs run in the transactions in which they are claimed: one job a claim, and none ahead."""

from __future__ import annotations

from typing import Any

from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.database.store import Store
from pgworkd.engine.claim.pool import Pool, SentClaim


class OwnPool(Pool):
    """`Pool` for handlers with `transaction=True`."""

    def __init__(self, *parts: Any, database: Store) -> None:
        """`database`: where to claim."""
        super().__init__(*parts)
        self._database = database

    def _capacity(self) -> int:
        return min(1, self._executor.free, super()._capacity())

    @property
    def _ahead(self) -> int:
        return 0

    async def _send(self, order: ClaimOrder) -> Claims:
        return await self._database.claim_open(order)

    def _take(self, sent: SentClaim, claimed: Claims) -> None:
        super()._take(sent, claimed)
        if claimed.own is not None and not any(attempt.own is claimed.own for attempt in self._in_flight):
            claimed.own.abandon()  # the last run of the job here is still being settled
