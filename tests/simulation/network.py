"""The network between a simulated daemon and the table, with everything that can go wrong on it.

One call at a time on each connection, never cancelled half-way; `DatabaseUnavailable` before the call took effect or
after it; slow replies, at most until the call's timeout; notifications that arrive twice or never.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from pgworkd.core.claims import Claims
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import DatabaseUnavailable

from .table import Table

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


def _short(answer: object) -> str:
    match answer:
        case Claims():
            return " ".join(f"{job.id.int}:{job.attempt}" for job in answer)
        case list() | dict() | tuple():
            return str(len(answer))
        case _:
            return ""
