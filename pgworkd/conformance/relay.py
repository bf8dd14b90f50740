"""A TCP relay in this process that drops, refuses, resets and holds back: the network between a worker and a gateway.

async with Relay(("127.0.0.1", 8080)) as relay:
    relay.mode = "blackhole"  # see MODES; clients connect to relay.port
    relay.cut()
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from types import TracebackType
from typing import Literal, Self

import anyio
from anyio.abc import TaskGroup

from pgworkd.errors import UsageError

MODES: tuple[str, ...] = ("pass", "blackhole", "halfopen", "refuse")
"""pass: transparent. refuse: new connections are reset, existing ones keep working.

blackhole: nothing is forwarded and nothing closed, new connections are accepted; data received meanwhile is dropped, so
those connections stay dead when the mode is "pass" again, and the server notices only by its keepalives. halfopen:
data from the client is delivered, replies of the server are dropped, and their connections stay dead.
"""
Side = Literal["client", "server"]
CHUNK_BYTES = 64 * 1024
KEEPALIVE_S = 25.0
"""Seconds until a server ends the session of a silently lost client: as with pgworkd's keepalives, 10 s + 3 x 5 s."""
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER 0: close() discards everything and sends RST
_REQUEST = re.compile(rb"[A-Z]+ /")


class Link:
    """One connection through a relay: a client's socket, and its socket to the server."""

    def __init__(self, number: int, client: socket.socket) -> None:
        self.number = number
        self.client = client
        self.server: socket.socket | None = None
        self.scope = anyio.CancelScope()
        self.over = False
        self.waits = False
        """The answer to its last request is held back."""
        self.lost: set[Side] = set()
        """Sides whose data is dropped for good."""
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

    def end(self, side: Side) -> socket.socket | None:
        """The socket of one side; None: there is no connection to the server."""
        return self.client if side == "client" else self.server

    def lose_all(self) -> None:
        """Marks the connection as dead, in both directions."""
        self.lost |= {"client", "server"}

    def reset(self) -> None:
        """Closes the connection abruptly, on both sides."""
        self.over = True
        for end in (self.client, self.server):
            if end is not None:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.scope.cancel()

    def close(self) -> None:
        """Closes both sockets."""
        for end in (self.client, self.server):
            if end is not None:
                end.close()


class Relay:
    """Listens on 127.0.0.1, always on the same port; all connections are reset at the end."""

    modes = MODES

    def __init__(self, target: tuple[str, int], *, port: int = 0) -> None:
        """`target`: host and port of the server; `port`: to listen on, 0 for a free one."""
        self._target = target
        self._mode = "pass"
        self._http_may_pass = anyio.Event()
        self._held_http = self._cut_http = b""
        self._links: list[Link] = []
        self._accepted = 0
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    @property
    def mode(self) -> str:
        """One of `modes`; may be set at any time."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in self.modes:
            raise UsageError(f"mode {mode!r}: give one of {', '.join(self.modes)}")
        self.switch(mode)

    def switch(self, mode: str) -> None:
        """Changes the mode."""
        self._mode = mode
        if mode == "blackhole":
            for link in self._links:
                link.lose_all()

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
        return len(self._links)

    def cut(self) -> int:
        """Resets all open connections on both sides; returns their number."""
        present = list(self._links)
        for link in present:
            link.reset()
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
            link = self.link(self._accepted, client)
            self._links.append(link)
            if self._mode == "refuse":
                link.reset()
            if self._mode == "blackhole":
                link.lose_all()
            self._tasks.start_soon(self._serve, link)

    def link(self, number: int, client: socket.socket) -> Link:
        """The connection that was accepted as the `number`-th, from 1."""
        return Link(number, client)

    async def _serve(self, link: Link) -> None:
        try:
            with link.scope:
                if not link.lost and not await link.reach(self._target):
                    return
                self.reached(link)
                async with anyio.create_task_group() as both:
                    both.start_soon(self._pump, link, "client", "server")
                    if link.server is not None:
                        both.start_soon(self._pump, link, "server", "client")
        finally:
            self.ended(link)
            link.close()
            self._links.remove(link)

    def reached(self, link: Link) -> None:
        """Called when a connection has one to the server, or is dead."""

    def ended(self, link: Link) -> None:
        """Called before the sockets of a connection are closed."""

    async def _pump(self, link: Link, side: Side, other: Side) -> None:
        """Forwards data from `side` to the other, until its end of stream."""
        loop = asyncio.get_running_loop()
        source, sink = link.end(side), link.end(other)
        try:
            while source is not None and (data := await loop.sock_recv(source, CHUNK_BYTES)):
                await self.until_it_may_pass(link, side, data)
                if self._mode == "halfopen" and side == "server":
                    link.lost.add(side)
                if link.over:
                    return
                if side not in link.lost and sink is not None:
                    passed, cut = await self.admitted(link, side, data)
                    await loop.sock_sendall(sink, passed)
                    if cut:
                        link.reset()
            if side not in link.lost and sink is not None:
                sink.shutdown(socket.SHUT_WR)
        except OSError:  # one end was reset: reset the other, unless the mode hides it
            if side not in link.lost:
                link.reset()
        if side == "client" and side in link.lost:
            await anyio.sleep(KEEPALIVE_S)
            link.reset()

    async def until_it_may_pass(self, link: Link, side: Side, data: bytes) -> None:
        """Waits while data is held back."""
        if side == "client" and _REQUEST.match(data):
            link.waits = bool(self._held_http) and data.startswith(self._held_http)
            if self._cut_http and data.startswith(self._cut_http):
                link.reset()
        if side == "server" and link.waits:
            await self._http_may_pass.wait()

    async def admitted(self, link: Link, side: Side, data: bytes) -> tuple[bytes, bool]:
        """The part of the data that may pass, and whether to cut the connection after it."""
        del link, side
        return data, False


def _prepare(end: socket.socket) -> None:
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
