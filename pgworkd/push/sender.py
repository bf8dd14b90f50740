"""Sends messages, within bounds of time and size; no redirect, no proxy, no cookie, no compression."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from urllib.parse import SplitResult

import anyio
import h11

from pgworkd.core.look_up import look_up
from pgworkd.core.payload import clean_text
from pgworkd.push.answer import EndpointAnswer
from pgworkd.push.connections import Broken, Connections
from pgworkd.push.guard import AddressRefused, ConnectionFailed, Network, Resolve

SAID_BYTES_MAX = 300


class NotDelivered(Exception):  # noqa: N818 - what happened
    """The error of a request of which no byte was sent: the receiver does not know of it."""


class PerhapsDelivered(Exception):  # noqa: N818
    """The error of a request that was sent, or part of it, without a whole answer: it may have been done."""


class Sender:
    """Sends messages, from one event loop. `allow_private`: also to addresses that are not of the public internet."""

    def __init__(
        self, *, allow_private: bool = False, tls: ssl.SSLContext | None = None, resolve: Resolve = look_up
    ) -> None:
        """`tls`: what certificates are trusted, by default those of the system; `resolve`: looks up names."""
        network = Network(allow_private=allow_private, resolve=resolve)
        self._connections = Connections(tls or ssl.create_default_context(), network)

    def close(self) -> None:
        """Closes all connections."""
        self._connections.close()

    def sweep(self) -> None:
        """Closes connections that have been idle for too long; to be called now and then."""
        self._connections.sweep()

    async def post(
        self, url: SplitResult, headers: Mapping[str, str], content: bytes, limit_s: float, *, once: bool = False
    ) -> EndpointAnswer:
        """Sends a message; the answer, at most 1 MiB. Raises NotDelivered or PerhapsDelivered, within `limit_s`, too.

        `url`: of `guard.check_url`. `once`: what it asks for may be done once only, so it is sent over a connection of
        its own: the receiver may just be closing one that was kept, and then it is not known whether it was read.
        """
        request, sent = _request(url, headers, content), False
        try:
            with anyio.move_on_after(limit_s):
                async with self._connections.lend(url, anew=once) as connection:
                    sent = True
                    return await connection.post(request, content)
            error, said = None, f"no answer within {limit_s:g} s"
        except AddressRefused as refused:
            raise NotDelivered(str(refused)) from refused
        except (Broken, ConnectionFailed, OSError) as failed:
            error, said = failed, f"the connection failed: {_cleaned(failed)}"
        if sent:
            raise PerhapsDelivered(f"{said}; it may have been done") from error
        raise NotDelivered(said) from error


def _request(url: SplitResult, headers: Mapping[str, str], content: bytes) -> h11.Request:
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    named = {"host": url.netloc, "content-length": str(len(content)), **headers}
    try:
        return h11.Request(
            method="POST",
            target=target,
            headers=[(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()],
        )
    except h11.LocalProtocolError as error:
        raise NotDelivered(f"a header cannot be sent: {_cleaned(error)}") from error


def _cleaned(error: Exception) -> str:
    return clean_text(str(error) or type(error).__name__, SAID_BYTES_MAX)
