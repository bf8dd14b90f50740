"""What a simulated daemon calls of the database: the methods of `Store` and `HeartbeatStore`, with their contracts."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Sequence
from typing import Any
from uuid import UUID

from pgworkd.database.heartbeat_store import Instructions
from pgworkd.database.schedule_store import Occurrence
from pgworkd.database.store import ClaimOrder, Claims, FailedAttempt

from .network import LINK, Network, SimulatedLink, SimulatedListener, T
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

    async def settle_completed(
        self,
        ids: Sequence[UUID],
        attempts: Sequence[int],
        *_: object,
        skip_locked: bool = False,
        **_how: bool,
    ) -> list[UUID]:
        return await self._settle(
            "completed", len(ids), lambda: self._table.completed(ids, attempts, skip_locked=skip_locked)
        )

    async def settle_failed(
        self,
        failed: Sequence[FailedAttempt],
        following: Sequence[Occurrence] = (),
        worker_id: int | None = None,
        skip_locked: bool = False,
        **_how: bool,
    ) -> dict[UUID, str]:
        return await self._settle("failed", len(failed), lambda: self._table.failed(failed, skip_locked=skip_locked))

    async def settle_released(
        self,
        ids: Sequence[UUID],
        attempts: Sequence[int],
        delays_s: Sequence[float | None],
        _: Sequence[str | None],
        worker_id: int | None = None,
        _begun: Sequence[bool] | None = None,
        skip_locked: bool = False,
        **_how: bool,
    ) -> set[UUID]:
        def act() -> list[UUID]:
            return self._table.released(ids, attempts, delays_s, skip_locked=skip_locked)

        return set(await self._settle("released", len(ids), act))

    async def settle_ended(
        self,
        ids: Sequence[UUID],
        attempts: Sequence[int],
        statuses: Sequence[str],
        _: Sequence[str | None],
        worker_id: int | None = None,
        skip_locked: bool = False,
        **_how: bool,
    ) -> set[UUID]:
        def act() -> list[UUID]:
            return self._table.ended(ids, attempts, statuses, skip_locked=skip_locked)

        return set(await self._settle("ended", len(ids), act))

    async def still_running(
        self, ids: Sequence[UUID], attempts: Sequence[int], worker_id: int | None = None
    ) -> set[UUID]:
        rows = await self._settles.call("still_running", lambda: self._table.still_running(ids, attempts))
        return {row.id for row in rows}

    async def _settle(self, verb: str, count: int, act: Callable[[], T]) -> T:
        self._watcher.settling(verb, count)
        try:
            return await self._settles.call(verb, act)
        finally:
            self._watcher.settled(verb, count)

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
