"""What a simulated daemon calls of the database: the methods of `Store` and `HeartbeatStore`, with their contracts."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID

from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.core.fence import Fence, Settling
from pgworkd.core.job import Ending
from pgworkd.core.source import Instructions, Occurrence

from .network import LINK, Network, SimulatedLink, SimulatedListener
from .table import Row


class Watcher:
    """Observes the claims and settles of a daemon, as they are called. (The world overrides these.)"""

    def ordered(self, order: ClaimOrder) -> None:
        """A claim is about to be sent."""

    def claimed(self, claims: Claims) -> None:
        """A claim has taken effect."""

    def settling(self, verb: str, count: int) -> None:
        """A settle of that many outcomes is about to be sent."""

    def settled(self, verb: str, count: int) -> None:
        """The settle has returned, successfully or not."""


class SimulatedStore:
    """Stands in for `Store`."""

    options = LINK

    def __init__(self, network: Network, watcher: Watcher, signals: object) -> None:
        self._network = network
        self._table = network.table
        self._watcher = watcher
        self._settles, self._rest, self._looks = (SimulatedLink(network) for _ in range(3))
        self._claims = collections.defaultdict[str, SimulatedLink](lambda: SimulatedLink(network))  # each may be slow
        self.listener, self.signals = SimulatedListener(network), signals
        self._answers = 0

    @property
    def answers(self) -> int:
        self._answers += 1
        return self._answers

    async def verify(self) -> None:
        """The simulated schema is always current."""

    def heartbeats(self, _limit_s: float) -> SimulatedLeaseStore:
        return SimulatedLeaseStore(self._network)

    async def close(self) -> None:
        pass

    async def register(
        self, _name: str, _pid: int, _version: str, lease_s: float, _kinds: Sequence[str], _kind: str
    ) -> int:
        return await self._rest.call("register", lambda: self._table.register(lease_s))

    async def set_pool(
        self, worker_id: int, queue: str, concurrency: int, *, idle: bool, code: tuple[int, str]
    ) -> None:
        await self._claims[queue].call("set_pool", lambda: self._table.set_pool(worker_id, queue, idle=idle))

    async def drop_pool(self, worker_id: int, queue: str) -> None:
        await self._claims[queue].call("drop_pool", lambda: self._table.pools.pop((worker_id, queue), None))

    async def sign_off(self, worker_id: int) -> bool:
        return await self._rest.call("sign_off", lambda: self._table.sign_off(worker_id))

    async def tend_connections(self, worker_id: int) -> None:
        """Nothing to do: the simulation has no query plans and no idle connections."""

    async def claim(self, order: ClaimOrder) -> Claims:
        self._watcher.ordered(order)
        return await self._claims[order.queue].call("claim", lambda: self._seen(self._table.claim(order)))

    def _seen(self, claims: Claims) -> Claims:
        self._watcher.claimed(claims)
        return claims

    async def next_due(self, queues: Sequence[str], *_: object) -> dict[str, float]:
        return await self._looks.call("next_due", lambda: self._table.next_due(queues))

    async def settle(
        self,
        ending: Ending,
        settles: Sequence[Settling],
        _following: Sequence[Occurrence] = (),
        *,
        skip_locked: bool = False,
        deferred: bool = False,
    ) -> dict[UUID, str]:
        outcomes = {each.fence: each.outcome for each in settles}
        verb = "ended" if ending in (Ending.CANCELLED, Ending.EXPIRED) else ending.value
        self._watcher.settling(verb, len(settles))
        try:
            return await self._settles.call(verb, lambda: self._table.settle(ending, outcomes, skip_locked=skip_locked))
        finally:
            self._watcher.settled(verb, len(settles))

    async def running(self, fences: Sequence[Fence]) -> set[UUID]:
        rows = await self._settles.call("running", lambda: self._table.still_running(fences))
        return {row.id for row in rows}

    async def settled(self, fences: Sequence[Fence]) -> dict[UUID, str]:
        return {}  # what has become of them does not matter to the simulation

    # Maintenance

    async def running_of(self, worker_id: int, age_s: float, *_: object) -> list[tuple[UUID, int]]:
        def old() -> list[Row]:
            return [row for row in self._table.running_of(worker_id) if row.started_at < self._table.now - age_s]

        return [(row.id, row.attempt) for row in await self._rest.call("running_of", old)]

    async def rescue(self, *_: object) -> list[Any]:
        return []  # in the simulation another daemon does that

    async def schedules(self, *_: object) -> list[Any]:
        return []

    report_refused = kept_longer = schedules

    async def declare_rules(self, worker_id: int | None, rules: dict[str, Any]) -> list[Any]:
        return []

    async def expire(self, limit: int = 1000) -> list[Any]:
        return []

    async def apply_effects(self, limit: int = 1000) -> int:
        return 0

    async def advance_operations(self, limit: int = 500) -> None:
        """Nobody starts one."""

    unblock = ensure_partitions = ensure_today = open_sessions = apply_effects

    async def prune(self, keep_days: int, keep_dead_days: int, limit: int = 5000) -> tuple[int, int]:
        return 0, 0

    async def drop_partition(self, keep_days: int) -> bool:
        return False


class SimulatedLeaseStore:
    """Stands in for `HeartbeatStore`."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def heartbeat(self, worker_id: int, _state: str) -> bool:
        return await self._network.call("heartbeat", lambda: self._network.table.renew(worker_id) is not None)

    async def instructions(self, worker_id: int, queues: Collection[str]) -> Instructions:
        return await self._network.call("wanted", lambda: self._wanted(worker_id, frozenset(queues)))

    def _wanted(self, worker_id: int, queues: frozenset[str]) -> Instructions:
        table = self._network.table
        cancels = [(row.id, row.attempt) for row in table.running_of(worker_id) if row.cancel_requested]
        return Instructions(
            cancels, {name: row.told() for name, row in table.queues.items() if name in queues}, asked=queues
        )

    async def close(self) -> None:
        pass
