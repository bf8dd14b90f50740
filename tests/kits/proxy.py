"""A TCP proxy in front of Postgres, in the test's own process, that delays, throttles, drops, refuses and cuts.

    async with Proxy(dsn) as proxy:
        connection = await asyncpg.connect(proxy.dsn)
        proxy.mode = "blackhole"  # and so on; see Proxy
        proxy.cut()

To cut at an exact place of the protocol, set `on_message` before the connection is made.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args
from urllib.parse import urlsplit, urlunsplit

import anyio

from pgworkd.conformance.relay import KEEPALIVE_S as KEEPALIVE_S
from pgworkd.conformance.relay import Link, Relay, Side

Mode = Literal["pass", "delay", "hold", "blackhole", "halfopen", "refuse"]
_UNTYPED = {80877103: "ssl", 80877104: "gss", 80877102: "cancel"}  # any other value: the version of a startup


class Message(NamedTuple):
    """One message of the protocol (v3), about to be forwarded.

    `number`: 1, 2, ... over all connections and both directions, as they arrive. `side`: who sent it. `kind`: its type
    letter, or startup, ssl (the request and its answer), gss, cancel. `connection`: 1, 2, ... as they were accepted.
    """

    number: int
    side: Side
    kind: str
    connection: int


class Proxy(Relay):
    """A relay (see its MODES for what four of the modes do) with two more modes, which speaks the protocol.

    delay: each chunk waits `delay_s`, in both directions, in order. hold: nothing is forwarded and nothing closed until
    the mode changes; then the data received meanwhile is delivered, however late.
    """

    modes = get_args(Mode)

    def __init__(self, dsn: str, *, port: int = 0) -> None:
        """`dsn` must name a host; `port`: to listen on, 0 for a free one."""
        self.delay_s = 0.0
        self.bytes_per_s = math.inf
        """Bytes per second of all connections together, in each direction; may be set at any time."""
        self._free_at = {"client": 0.0, "server": 0.0}  # on the loop's clock: when everything sent so far has passed
        self.on_message: Callable[[Message], bool] | None = None
        """Called for each message; False cuts its connection before it is forwarded.

        Connections made while it is None are never parsed.
        """
        parts = urlsplit(dsn)
        if parts.hostname is None:
            raise ValueError("the DSN names no host")
        self.left: set[int] = set()
        """Local ports of closed connections to the server, which may not have noticed their end yet."""
        self._held = anyio.Event()
        """Set when held data may be forwarded."""
        self._messages = 0
        super().__init__((parts.hostname, parts.port or 5432), port=port)
        login = parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{self.port}"))

    async def silence(self, for_s: float) -> None:
        """Waits until no message has passed for `for_s` seconds."""
        seen = -1
        while seen != self._messages:
            seen = self._messages
            await anyio.sleep(for_s)

    def switch(self, mode: str) -> None:
        if mode == "hold" != self._mode:
            self._held = anyio.Event()
        super().switch(mode)
        if mode != "hold":
            self._held.set()

    def link(self, number: int, client: socket.socket) -> Link:
        return _Parsed(number, client) if self.on_message is not None else Link(number, client)

    def reached(self, link: Link) -> None:
        self.left.discard(link.port)

    def ended(self, link: Link) -> None:
        self.left |= {link.port} - {0}

    async def until_it_may_pass(self, link: Link, side: Side, data: bytes) -> None:
        if self._mode == "delay":
            await anyio.sleep(self.delay_s)
        if self._mode == "hold":
            await self._held.wait()
        await super().until_it_may_pass(link, side, data)

    async def admitted(self, link: Link, side: Side, data: bytes) -> tuple[bytes, bool]:
        passed, cut = self._ask(link, side, data) if isinstance(link, _Parsed) else (data, False)
        if self.bytes_per_s != math.inf:
            now = asyncio.get_running_loop().time()
            self._free_at[side] = max(now, self._free_at[side]) + len(passed) / self.bytes_per_s
            await anyio.sleep(self._free_at[side] - now)
        return passed, cut

    def _ask(self, link: _Parsed, side: Side, data: bytes) -> tuple[bytes, bool]:
        """The part of the data that may pass, and whether to cut the connection after it."""
        passed = bytearray()
        for kind, piece in link.pieces(side, data):
            if kind:
                self._messages += 1
                message = Message(self._messages, side, kind, link.number)
                if self.on_message is not None and not self.on_message(message):
                    return bytes(passed), True
            passed += piece
        return bytes(passed), False


class _Parsed(Link):
    """A connection whose messages are told apart."""

    def __init__(self, number: int, client: socket.socket) -> None:
        super().__init__(number, client)
        self._frames = {"client": _Frames(untyped=True), "server": _Frames(untyped=False)}

    def pieces(self, side: Side, data: bytes) -> Iterator[tuple[str, bytes]]:
        """The data in pieces; the first piece of each message carries its kind, the others none."""
        for kind, piece in self._frames[side].pieces(data):
            if side == "client" and kind in ("ssl", "gss"):
                self._frames["server"].answers = True
            yield kind, piece


class _Frames:
    """Finds where messages begin in what one side sends. Holds back no more than an incomplete head."""

    def __init__(self, *, untyped: bool) -> None:
        self.answers = False
        """The next byte is the complete reply to a request for encryption."""
        self._untyped = untyped  # the next message has no type letter
        self._head = b""
        self._left = 0  # remaining bytes of the current message

    def pieces(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        data = self._head + data
        self._head = b""
        while data:
            kind = ""
            if self.answers:
                if data[:1] == b"S":
                    raise ValueError("TLS cannot be looked into: add sslmode=disable to the DSN")
                self.answers, self._left, kind = False, 1, "ssl"
            elif not self._left:
                if len(data) < (8 if self._untyped else 5):
                    self._head = data
                    return
                kind = self._begin(data)
            yield kind, data[: self._left]
            data, self._left = data[self._left :], max(0, self._left - len(data))

    def _begin(self, data: bytes) -> str:
        if not self._untyped:
            self._left = 1 + int.from_bytes(data[1:5])
            return chr(data[0])
        self._left = int.from_bytes(data[:4])
        kind = _UNTYPED.get(int.from_bytes(data[4:8]), "startup")
        self._untyped = kind in ("ssl", "gss")
        return kind
