"""A TCP proxy in front of Postgres, in the test's own process, that delays, throttles, drops, refuses and cuts.

    async with Proxy(dsn) as proxy:
        connection = await asyncpg.connect(proxy.dsn)
        proxy.mode = "blackhole"  # and so on; see Mode
        proxy.cut()

To cut at an exact place of the protocol, set `on_message` before the connection is made.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import struct
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Literal, NamedTuple, Self, get_args
from urllib.parse import urlsplit, urlunsplit

import anyio
from anyio.abc import TaskGroup

Mode = Literal["pass", "delay", "hold", "blackhole", "halfopen", "refuse"]
"""pass: transparent. delay: each chunk waits `delay_s`, in both directions, in order. hold: nothing is
forwarded and nothing closed until the mode changes; then the data received meanwhile is delivered, however late.

blackhole: nothing is forwarded and nothing closed, new connections are accepted; data received meanwhile is dropped, so
those connections stay dead when the mode is "pass" again, and the server notices only by its keepalives. halfopen:
data from the client is delivered, replies of the server are dropped, and their connections stay dead. refuse: new
connections are reset, existing ones keep working.
"""
Side = Literal["client", "server"]

CHUNK_BYTES = 64 * 1024
KEEPALIVE_S = 25.0
"""Seconds until a server ends the session of a silently lost client, with pgworkd's keepalives: 10 s + 3 x 5 s."""
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER 0: close() discards everything and sends RST
_REQUEST = re.compile(rb"[A-Z]+ /")
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


class Proxy:
    """Listens on 127.0.0.1, always on the same port; all connections are reset at the end."""

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
        self._target = (parts.hostname, parts.port or 5432)
        self._mode: Mode = "pass"
        self._held = anyio.Event()
        """Set when held data may be forwarded."""
        self._http_may_pass = anyio.Event()
        self._held_http = self._cut_http = b""
        self._present: list[_Connection] = []
        self._accepted = self._messages = 0
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        login = parts.netloc.rpartition("@")[0]
        self.dsn = urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{self.port}"))

    async def silence(self, for_s: float) -> None:
        """Waits until no message has passed for `for_s` seconds."""
        seen = -1
        while seen != self._messages:
            seen = self._messages
            await anyio.sleep(for_s)

    @property
    def mode(self) -> Mode:
        """May be set at any time."""
        return self._mode

    @mode.setter
    def mode(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"there is no mode {mode!r}")
        if mode == "hold" != self._mode:
            self._held = anyio.Event()
        self._mode = mode
        if mode != "hold":
            self._held.set()
        if mode == "blackhole":
            for connection in self._present:
                connection.lose_all()

    def hold_answers(self, request: bytes) -> None:
        """Holds back the answers to HTTP requests that begin so, until `pass_http`."""
        self._http_may_pass, self._held_http = anyio.Event(), request

    def cut_requests(self, request: bytes) -> None:
        """Resets connections in the place of HTTP requests that begin so, until `pass_http`."""
        self._cut_http = request

    def pass_http(self) -> None:
        """Lets all requests and answers pass, those that were held back first."""
        self._held_http = self._cut_http = b""
        self._http_may_pass.set()

    @property
    def connections(self) -> int:
        """The number of open connections, dead ones included."""
        return len(self._present)

    def cut(self) -> int:
        """Resets all open connections on both sides; returns their number."""
        present = list(self._present)
        for connection in present:
            connection.reset()
        return len(present)

    async def __aenter__(self) -> Self:
        self._tasks: TaskGroup = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)  # the block's exception propagates by itself, not in a group
        finally:
            self._listener.close()

    async def _accept(self) -> None:
        while True:
            client, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            self._accepted += 1
            connection = _Connection(self._accepted, client, parsed=self.on_message is not None)
            self._present.append(connection)
            if self._mode == "refuse":
                connection.reset()
            if self._mode == "blackhole":
                connection.lose_all()
            self._tasks.start_soon(self._serve, connection)

    async def _serve(self, connection: _Connection) -> None:
        try:
            with connection.scope:
                if not connection.lost and not await connection.reach(self._target):
                    return
                self.left.discard(connection.port)
                async with anyio.create_task_group() as both:
                    both.start_soon(self._pump, connection, "client")
                    if connection.server is not None:
                        both.start_soon(self._pump, connection, "server")
        finally:
            self.left |= {connection.port} - {0}
            connection.close()
            self._present.remove(connection)

    async def _pump(self, connection: _Connection, side: Side) -> None:
        """Forwards data from `side`, until its end of stream."""
        loop = asyncio.get_running_loop()
        source, sink = connection.ends(side)
        try:
            while data := await loop.sock_recv(source, CHUNK_BYTES):
                await self._until_it_may_pass(connection, side, data)
                if self._mode == "halfopen" and side == "server":
                    connection.lost.add(side)
                if connection.over:
                    return
                if side not in connection.lost and sink is not None:
                    passed, cut = self._ask(connection, side, data)
                    await self._let_pass(side, len(passed))
                    await loop.sock_sendall(sink, passed)
                    if cut:
                        connection.reset()
            if side not in connection.lost and sink is not None:
                sink.shutdown(socket.SHUT_WR)
        except OSError:  # one end was reset: reset the other, unless the mode hides it
            if side not in connection.lost:
                connection.reset()
        if side == "client" and side in connection.lost:
            await anyio.sleep(KEEPALIVE_S)
            connection.reset()

    async def _until_it_may_pass(self, connection: _Connection, side: Side, data: bytes) -> None:
        if self._mode == "delay":
            await anyio.sleep(self.delay_s)
        if self._mode == "hold":
            await self._held.wait()
        if side == "client" and _REQUEST.match(data):
            connection.waits = bool(self._held_http) and data.startswith(self._held_http)
            if self._cut_http and data.startswith(self._cut_http):
                connection.reset()
        if side == "server" and connection.waits:
            await self._http_may_pass.wait()

    async def _let_pass(self, side: Side, count: int) -> None:
        if self.bytes_per_s == math.inf:
            return
        now = asyncio.get_running_loop().time()
        self._free_at[side] = max(now, self._free_at[side]) + count / self.bytes_per_s
        await anyio.sleep(self._free_at[side] - now)

    def _ask(self, connection: _Connection, side: Side, data: bytes) -> tuple[bytes, bool]:
        """The part of the data that may pass, and whether to cut the connection after it."""
        if not connection.parsed:
            return data, False
        passed = bytearray()
        for kind, piece in connection.pieces(side, data):
            if kind:
                self._messages += 1
                message = Message(self._messages, side, kind, connection.number)
                if self.on_message is not None and not self.on_message(message):
                    return bytes(passed), True
            passed += piece
        return bytes(passed), False


class _Connection:
    """A client's socket, and its socket to the server."""

    def __init__(self, number: int, client: socket.socket, *, parsed: bool) -> None:
        self.number = number
        self.client = client
        self.server: socket.socket | None = None
        self.parsed = parsed
        self.scope = anyio.CancelScope()
        self.over = False
        self.waits = False
        """The answer to its last request is held back."""
        self.lost: set[Side] = set()
        """Sides whose data is dropped for good."""
        self._frames = {"client": _Frames(untyped=True), "server": _Frames(untyped=False)}
        _prepare(client)

    async def reach(self, target: tuple[str, int]) -> bool:
        """Connects to the server; False: it cannot be reached, and the client is reset."""
        self.server = socket.socket()
        _prepare(self.server)
        try:
            await asyncio.get_running_loop().sock_connect(self.server, target)
        except OSError:
            self.reset()
        return not self.over

    @property
    def port(self) -> int:
        """The local port of the server connection; 0 if there is none."""
        return 0 if self.server is None else int(self.server.getsockname()[1])

    def ends(self, side: Side) -> tuple[socket.socket, socket.socket | None]:
        """The socket to read `side` from, and the one to write to."""
        if side == "client":
            return self.client, self.server
        assert self.server is not None
        return self.server, self.client

    def lose_all(self) -> None:
        """Marks the connection as dead, in both directions."""
        self.lost |= {"client", "server"}

    def pieces(self, side: Side, data: bytes) -> Iterator[tuple[str, bytes]]:
        """The data in pieces; the first piece of each message carries its kind, the others none."""
        for kind, piece in self._frames[side].pieces(data):
            if side == "client" and kind in ("ssl", "gss"):
                self._frames["server"].answers = True
            yield kind, piece

    def reset(self) -> None:
        """Closes it abruptly, on both sides."""
        self.over = True
        for end in (self.client, self.server):
            if end is not None:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.scope.cancel()

    def close(self) -> None:
        for end in (self.client, self.server):
            if end is not None:
                end.close()


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


def _prepare(end: socket.socket) -> None:
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
