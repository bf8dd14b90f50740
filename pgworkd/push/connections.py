"""Connections to receivers, each for one request at a time, and those that are kept, by where they lead.

HTTP is h11's, which reads what arrives when it arrives. A byte that comes when no answer is due ends its connection. A
second answer to one request that comes once the next request was sent cannot be told from the answer to that one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import select
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import SplitResult

import h11

from pgworkd.core.payload import BYTES_MAX
from pgworkd.process import forks
from pgworkd.push.answer import EndpointAnswer
from pgworkd.push.guard import PORTS, Network

HEAD_BYTES_MAX = 100 * 1024
IDLE_MAX, IDLE_S = 100, 20.0
"""Idle connections that are kept to one place, and for how long."""
EARLIER_S = 1.0
"""A connection that its receiver closes after a time, as it has said, is not used this many seconds before."""
_TIMEOUT = re.compile(r"(?:^|,)\s*timeout\s*=\s*\"?([0-9]{1,6})", re.IGNORECASE)
"""The time that the header Keep-Alive names (RFC 2068, 19.7.1.1), in seconds."""


class Broken(Exception):  # noqa: N818 - what happened
    """The connection has ended before the answer did, or what came is none."""


class HttpConnection(asyncio.Protocol):
    """One connection; made by its event loop."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT, HEAD_BYTES_MAX)
        self._transport: Any = None
        self._due: asyncio.Future[EndpointAnswer] | None = None
        """The answer, while one is due."""
        self._head: h11.Response | None = None
        self._body = bytearray()
        self.expires_at = 0.0
        """Not to be used from then on, by time.monotonic()."""

    async def post(self, request: h11.Request, content: bytes) -> EndpointAnswer:
        """Sends a request; the answer, of whose body BYTES_MAX are read. Raises Broken."""
        self._due = asyncio.get_running_loop().create_future()
        self._head, self._body = None, bytearray()
        parts = [self._http.send(each) for each in (request, h11.Data(content), h11.EndOfMessage())]
        self._transport.write(b"".join(part for part in parts if part))
        try:
            return await self._due
        finally:
            self._due = None

    @property
    def is_open(self) -> bool:
        """True while the next request may be sent."""
        return (
            self._http.our_state is h11.IDLE and not self._transport.is_closing() and time.monotonic() < self.expires_at
        )

    @property
    def is_quiet(self) -> bool:
        """True unless something has arrived that the loop has not read yet, such as the end of the connection."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: Any) -> None:
        """Keeps the transport."""
        forks.keep_private(transport.get_extra_info("socket"))
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Reads a part of the answer."""
        if self._due is None or self._due.done():
            self.close()
        else:
            self._read(data, self._due)

    def eof_received(self) -> None:
        """Reads the end of the connection, which may be that of an answer."""
        if self._due is not None and not self._due.done():
            self._read(b"", self._due)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait for an answer."""
        if self._due is not None and not self._due.done():
            self._due.set_exception(Broken(str(exc or "the receiver has closed it without an answer")))

    def _read(self, data: bytes, due: asyncio.Future[EndpointAnswer]) -> None:
        try:
            self._http.receive_data(data)
            while not due.done() and (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    self._head = event
                elif isinstance(event, h11.Data):
                    self._body += event.data
                    if len(self._body) > BYTES_MAX:
                        self._end(due, is_whole=False)
                elif isinstance(event, h11.EndOfMessage):
                    self._end(due, is_whole=True)
                elif isinstance(event, h11.ConnectionClosed):
                    raise h11.RemoteProtocolError("the receiver has closed it without an answer")
        except h11.RemoteProtocolError as error:
            due.set_exception(Broken(str(error)))
            self.close()

    def _end(self, due: asyncio.Future[EndpointAnswer], *, is_whole: bool) -> None:
        """Ends the answer; the connection, too, unless it is in order."""
        if self._head is None:
            raise h11.RemoteProtocolError("an answer without a head")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self._head.headers}
        status = self._head.status_code
        due.set_result(EndpointAnswer(status, headers, bytes(self._body[:BYTES_MAX]), is_whole))
        states = {self._http.our_state, self._http.their_state}
        is_read = states == {h11.DONE} and self._http.trailing_data == (b"", False)
        if not is_read or self._transport.get_write_buffer_size() or _has_more(status, headers):
            self.close()
            return
        self._http.start_next_cycle()
        told = _TIMEOUT.search(headers.get("keep-alive", ""))
        self.expires_at = time.monotonic() + min(IDLE_S, IDLE_S if told is None else int(told[1]) - EARLIER_S)


def _has_more(status: int, headers: dict[str, str]) -> bool:
    """True for an answer with a body where none may be, which has not arrived yet."""
    length = headers.get("content-length", "0").strip()
    return status in (204, 304) and (length != "0" or "transfer-encoding" in headers)


class Connections:
    """The connections of one event loop. The last one used is used next."""

    def __init__(self, tls: ssl.SSLContext, network: Network) -> None:
        self._tls, self._network = tls, network
        self._tls.set_alpn_protocols(["http/1.1"])
        self._idle: dict[tuple[str, str, int], list[HttpConnection]] = {}
        self._closed = False

    @contextlib.asynccontextmanager
    async def lend(self, url: SplitResult, *, anew: bool = False) -> AsyncIterator[HttpConnection]:
        """A connection for one request; `anew`: none that was kept. Raises what `Network.connect` does, or OSError."""
        place = url.scheme, url.hostname or "", url.port or PORTS[url.scheme]
        connection = (None if anew else self._kept(place)) or await self._opened(*place)
        try:
            yield connection
        finally:
            idle = self._idle.setdefault(place, [])
            if connection.is_open and len(idle) < IDLE_MAX and not self._closed:
                idle.append(connection)
            else:
                connection.close()

    def _kept(self, place: tuple[str, str, int]) -> HttpConnection | None:
        idle = self._idle.get(place, [])
        while idle:
            connection = idle.pop()
            if connection.is_open and connection.is_quiet:
                return connection
            connection.close()
        return None

    async def _opened(self, scheme: str, host: str, port: int) -> HttpConnection:
        made = await self._network.connect(host, port)
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": host} if scheme == "https" else {}
        try:
            _, connection = await asyncio.get_running_loop().create_connection(HttpConnection, sock=made, **tls)
        except BaseException:
            made.close()
            raise
        return connection

    def sweep(self) -> None:
        """Closes connections that are idle for too long, or closed by the other side; to be called now and then."""
        for idle in self._idle.values():
            for connection in [each for each in idle if not each.is_open]:
                idle.remove(connection)
                connection.close()

    def close(self) -> None:
        """Closes all idle connections; those in use are closed after their request."""
        self._closed = True
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
