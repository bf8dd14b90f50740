"""The connections between a simulated daemon and the table, with everything that can go wrong on them.

It has the methods of `Store`, `HeartbeatStore` and `Listener` that a daemon calls, with their contracts: one call at a
time on each connection, never cancelled half-way; `DatabaseUnavailable` before the call took effect or after it;
slow replies, at most until the call's timeout.
"""

from __future__ import annotations

import asyncio
import collections
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

import anyio

from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.heartbeat_store import Instructions
from pgworkd.database.schedule_store import Occurrence
from pgworkd.database.store import ClaimOrder, Claims, FailedAttempt
from pgworkd.errors import DatabaseUnavailable

from .table import Row, Table

CONNECT_S = COMMAND_S = 1.0
"""Timeouts of the connections."""
LINK = ConnectionOptions("postgresql://simulation/none", CONNECT_S, COMMAND_S)
T = TypeVar("T")


@dataclass(frozen=True)
class Weather:
    """The condition of the network. Shares are of calls, from 0 to 1; times in seconds."""

    latency_s: float = 0.002
    slow_share: float = 0.0
    slow_s: float = 0.3
    refused_share: float = 0.0
    """The call fails without effect."""
    lost_share: float = 0.0
    """The call takes effect and its reply is lost."""
    hung_share: float = 0.0
    """The call times out; whether it took effect is random."""
    notice_lost_share: float = 0.0
    notice_twice_share: float = 0.0
    verbs: tuple[str, ...] = ()
    """Faults hit only calls of these names; empty: all calls."""

    def is_bad_for(self, verb: str) -> bool:
        return not self.verbs or verb in self.verbs


CALM = Weather()


@dataclass
class Network:
    """The single network to the table, for all connections of all stores."""

    table: Table
    random: random.Random
    note: Callable[[str], None]
    weather: Weather = CALM
    outage: bool = False
    bad_at: float = -math.inf
    """When a call last failed or was slow, on the loop's clock."""
    lines: dict[int, tuple[Callable[[str], None], Callable[[], None]]] = field(default_factory=dict)
    """Listeners: callbacks for a notification and for the end of the connection."""

    async def call(self, verb: str, act: Callable[[], T]) -> T:
        """One call on a connection locked by the caller. Raises DatabaseUnavailable, and what the table raises."""
        chance, weather = self.random.random, self.weather
        bad = weather.is_bad_for(verb)
        before_s, after_s = chance() * weather.latency_s, chance() * weather.latency_s
        if bad and chance() < weather.slow_share:
            before_s += chance() * weather.slow_s
            after_s += chance() * weather.slow_s
            self._went_wrong()
        if bad and chance() < weather.hung_share:
            await self._hang(verb, act)
        await anyio.sleep(before_s)
        if self.outage or (bad and chance() < weather.refused_share):
            self._went_wrong()
            self.note(f"{verb} refused")
            raise DatabaseUnavailable("refused, for the simulation")
        answer = act()
        self.note(f"{verb} {_short(answer)}")
        await anyio.sleep(after_s)
        if self.outage or (bad and chance() < weather.lost_share):
            self._went_wrong()
            self.note(f"{verb} answer lost")
            raise DatabaseUnavailable("the answer was lost, for the simulation")
        return answer

    async def _hang(self, verb: str, act: Callable[[], Any]) -> None:
        self._went_wrong()
        before_s = self.random.random() * COMMAND_S
        await anyio.sleep(before_s)
        if self.random.random() < 0.5 and not self.outage:
            act()
        await anyio.sleep(COMMAND_S - before_s)
        self._went_wrong()
        self.note(f"{verb} timed out")
        raise DatabaseUnavailable("the database did not answer in time, for the simulation")

    def _went_wrong(self) -> None:
        self.bad_at = anyio.current_time()

    def notify(self, message: dict[str, object]) -> None:
        """A NOTIFY: arrives after a moment, perhaps twice, perhaps never."""
        for line in sorted(self.lines):
            for _ in range(2 if self.random.random() < self.weather.notice_twice_share else 1):
                if self.random.random() >= self.weather.notice_lost_share:
                    self._deliver(line, json.dumps(message))

    def _deliver(self, line: int, payload: str) -> None:
        def arrive() -> None:
            if line in self.lines:
                self.lines[line][0](payload)

        asyncio.get_running_loop().call_later(self.random.random() * 2 * self.weather.latency_s, arrive)

    def cut(self) -> None:
        """All listener connections end."""
        for _, cut in self.lines.values():
            cut()
        self.lines.clear()


class SimulatedLink:
    """One call at a time, shielded from cancellation."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._lock = anyio.Lock(fast_acquire=True)

    async def call(self, verb: str, act: Callable[[], T]) -> T:
        async with self._lock:
            with anyio.CancelScope(shield=True):
                return await self._network.call(verb, act)


class SimulatedListener:
    """Stands in for `Listener`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._count = 0

    @asynccontextmanager
    async def listen(
        self, _: str, heard: Callable[[str], None], cut: Callable[[], None]
    ) -> AsyncIterator[Callable[[], Any]]:
        network, line = self._network, self._count
        self._count += 1

        async def probe() -> None:
            await network.call("probe", lambda: None)
            if line not in network.lines:
                raise DatabaseUnavailable("the listening connection was closed")

        def listens() -> None:
            network.lines[line] = (heard, cut)

        try:
            await network.call("listen", listens)
            yield probe
        finally:
            network.lines.pop(line, None)


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
        **_skip: bool,
    ) -> list[UUID]:
        return await self._settle("completed", len(ids), lambda: self._table.completed(ids, attempts))

    async def settle_failed(
        self,
        failed: Sequence[FailedAttempt],
        following: Sequence[Occurrence] = (),
        worker_id: int | None = None,
        **_skip: bool,
    ) -> dict[UUID, str]:
        return await self._settle("failed", len(failed), lambda: self._table.failed(failed))

    async def settle_released(
        self,
        ids: Sequence[UUID],
        attempts: Sequence[int],
        delays_s: Sequence[float | None],
        _: Sequence[str | None],
        worker_id: int | None = None,
        **_skip: bool,
    ) -> set[UUID]:
        released = await self._settle("released", len(ids), lambda: self._table.released(ids, attempts, delays_s))
        return set(released)

    async def settle_ended(
        self,
        ids: Sequence[UUID],
        attempts: Sequence[int],
        statuses: Sequence[str],
        _: Sequence[str | None],
        worker_id: int | None = None,
        **_skip: bool,
    ) -> set[UUID]:
        return set(await self._settle("ended", len(ids), lambda: self._table.ended(ids, attempts, statuses)))

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

    async def declare_schedules(self, worker_id: int, names: list[str]) -> dict[str, bool]:
        return {}

    async def expire(self, limit: int = 1000) -> list[Any]:
        return []

    async def apply_effects(self, limit: int = 1000) -> int:
        return 0

    unblock = ensure_partitions = apply_effects

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


def _short(answer: object) -> str:
    match answer:
        case Claims():
            return " ".join(f"{job.id.int}:{job.attempt}" for job in answer)
        case list() | dict() | tuple():
            return str(len(answer))
        case _:
            return ""
