"""Connections that are kept, by where they lead: the last one used is used next.

The pool of httpcore looks at each of its connections for each request, which is most of the work when a hundred are
under way; here a request takes one from the end of a list, and puts it back.
"""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import AsyncIterator

import anyio
import httpcore

IDLE_MAX, IDLE_S = 100, 20.0
"""Idle connections that are kept to one place, and for how long."""
CLOSE_S = 1.0
"""A connection that does not close within this is left to the system."""


class Connections:
    """The connections of one event loop; each is used by one request at a time."""

    def __init__(self, tls: ssl.SSLContext, network: httpcore.AsyncNetworkBackend) -> None:
        self._tls, self._network = tls, network
        self._idle: dict[bytes, list[httpcore.AsyncHTTPConnection]] = {}
        self._closed = False

    @contextlib.asynccontextmanager
    async def send(self, request: httpcore.Request) -> AsyncIterator[httpcore.Response]:
        """Sends a request; the answer, whose body is to be read in the block. Raises the errors of httpcore."""
        place = b"%s %s %d" % (request.url.scheme, request.url.host, request.url.port or 0)
        connection = await self._taken(place) or httpcore.AsyncHTTPConnection(
            request.url.origin, ssl_context=self._tls, keepalive_expiry=IDLE_S, network_backend=self._network
        )
        is_sound = False
        try:
            answer = await connection.handle_async_request(request)
            is_sound = not _has_more(answer)
            try:
                yield answer
            finally:
                with anyio.move_on_after(CLOSE_S, shield=True):
                    await answer.aclose()
        finally:
            await self._leave(place, connection, is_sound=is_sound)

    async def _taken(self, place: bytes) -> httpcore.AsyncHTTPConnection | None:
        """A connection that is open still; those that the other side has closed, or that are too old, are closed."""
        idle = self._idle.get(place, [])
        while idle:
            connection = idle.pop()
            if connection.is_available() and not connection.has_expired():
                return connection
            await _close(connection)
        return None

    async def _leave(self, place: bytes, connection: httpcore.AsyncHTTPConnection, *, is_sound: bool) -> None:
        """Keeps a connection for the next request, unless it is of no use any more."""
        idle = self._idle.setdefault(place, [])
        if is_sound and connection.is_idle() and len(idle) < IDLE_MAX and not self._closed:
            idle.append(connection)
        else:
            await _close(connection)

    async def sweep(self) -> None:
        """Closes connections that are idle for too long, or closed by the other side; to be called now and then."""
        for idle in self._idle.values():
            expired = [connection for connection in idle if connection.has_expired()]
            idle[:] = [connection for connection in idle if connection not in expired]
            for connection in expired:
                await _close(connection)

    async def close(self) -> None:
        """Closes all idle connections; those in use are closed after their request."""
        self._closed = True
        for idle in self._idle.values():
            while idle:
                await _close(idle.pop())


def _has_more(answer: httpcore.Response) -> bool:
    """True for an answer with a body where none may be: it would be taken for the beginning of the next answer."""
    declared = {name.lower(): value for name, value in answer.headers}
    length = declared.get(b"content-length", b"0")
    return answer.status in (204, 304) and (length.strip() != b"0" or b"transfer-encoding" in declared)


async def _close(connection: httpcore.AsyncHTTPConnection) -> None:
    with anyio.move_on_after(CLOSE_S, shield=True), contextlib.suppress(httpcore.NetworkError, OSError):
        await connection.aclose()
