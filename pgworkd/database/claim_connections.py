"""The connections on which a daemon claims: one, and more while a claim of another queue is slow.

Most claims take a few milliseconds and follow each other on one connection. A claim may also wait for a lock that an
application holds, or scan very many keys: then claims of other queues use another connection.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import anyio

from pgworkd.database.connection import Connection, ConnectionOptions, Row

CONNECTIONS_MAX = 4
"""Connections per daemon. With this many slow claims at once, others wait for the first of them to end."""
SLOW_S = 0.05
"""A call that the server has taken longer for is not waited for."""
IDLE_S = 60.0
"""An additional connection is closed after this many idle seconds."""


class ClaimConnections:
    """The connections for claims. Calls wait for each other in order, except for slow ones.

    At most one connection per queue, however many calls there are: a call that waits for a claim of its own queue would
    not gain from another connection.
    """

    def __init__(self, options: ConnectionOptions, queues: Callable[[], int]) -> None:
        """`queues` returns the number of queues to claim from; it is called at each call."""
        self._options = options
        self._queues = queues
        self._all = [_Connection(options) for _ in range(CONNECTIONS_MAX)]
        self._next = anyio.Lock(fast_acquire=True)  # its holder is the next to get a connection
        self._freed = anyio.Event()

    async def fetch(self, sql: str, *args: object) -> list[Row]:
        """All rows of one statement, which is a transaction of its own."""
        connection = self._take_first() or await self._take()
        try:
            return await connection.fetch(sql, *args)
        finally:
            self._release(connection)

    async def value(self, sql: str, *args: object) -> Any:
        """The first column of the first row; None if there is no row."""
        connection = self._take_first() or await self._take()
        try:
            return await connection.value(sql, *args)
        finally:
            self._release(connection)

    async def close_idle(self) -> None:
        """Closes idle additional connections, until cancelled."""
        while True:
            await anyio.sleep(IDLE_S / 4)
            for place, connection in enumerate(self._all):
                if place > 0 and not connection.taken and time.monotonic() - connection.used_at > IDLE_S:
                    self._all[place] = _Connection(self._options)  # replaced first: closing may take a while
                    await connection.close()

    async def close(self) -> None:
        """Closes all connections for claims."""
        for connection in self._all:
            await connection.close()

    def _take_first(self) -> _Connection | None:
        """The first connection if no one waits for it: the fast path, for every claim of a daemon that is not busy."""
        first = self._all[0]
        if first.taken or self._next.locked():
            return None
        first.taken = True
        return first

    async def _take(self) -> _Connection:
        async with self._next:
            while (connection := self._free()) is None:
                self._freed = anyio.Event()
                with anyio.move_on_after(SLOW_S):
                    await self._freed.wait()
            connection.taken = True
            return connection

    def _free(self) -> _Connection | None:
        for connection in self._all[: max(1, self._queues())]:
            if not connection.taken:
                return connection
            if time.monotonic() - connection.sent_at < SLOW_S:
                return None  # it is expected to be free soon
        return None

    def _release(self, connection: _Connection) -> None:
        connection.taken, connection.sent_at, connection.used_at = False, math.inf, time.monotonic()
        if self._next.locked():
            self._freed.set()


class _Connection(Connection):
    """A connection for claims, and its state. All times on the monotonic clock."""

    def __init__(self, options: ConnectionOptions) -> None:
        super().__init__(options, "claim")
        self.taken = False
        self.sent_at = math.inf
        """When the call under way was sent; infinite while connecting, where another connection would not help."""
        self.used_at = math.inf
        """When the last call ended; infinite: never used, so there is nothing to close."""

    async def _ready(self) -> Any:
        connection = await super()._ready()
        self.sent_at = time.monotonic()
        return connection
