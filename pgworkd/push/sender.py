"""Sends messages, within bounds of time and size; no redirect, no proxy, no cookie, no compression."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult

import anyio
import httpcore

from pgworkd.core.payload import BYTES_MAX, clean_text
from pgworkd.push.answer import EndpointAnswer
from pgworkd.push.connections import Connections
from pgworkd.push.guard import PORTS, AddressRefused, GuardedNetwork, Resolve, look_up

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
        network = GuardedNetwork(allow_private=allow_private, resolve=resolve)
        self._connections = Connections(tls or ssl.create_default_context(), network)

    async def close(self) -> None:
        """Closes all connections."""
        await self._connections.close()

    async def sweep(self) -> None:
        """Closes connections that have been idle for too long; to be called now and then."""
        await self._connections.sweep()

    async def post(
        self, url: SplitResult, headers: Mapping[str, str], content: bytes, limit_s: float
    ) -> EndpointAnswer:
        """Sends a message; the answer, at most 1 MiB. Raises NotDelivered or PerhapsDelivered, within `limit_s`, too.

        `url`: of `guard.check_url`.
        """
        sent = False

        async def trace(event: str, _: Mapping[str, Any]) -> None:
            nonlocal sent
            sent = sent or event.startswith("http11.send_request_headers")

        try:
            with anyio.move_on_after(limit_s), _errors():
                return await self._answer(url, headers, content, {"trace": trace})
            raise NotDelivered(f"no answer within {limit_s:g} s")
        except NotDelivered as error:
            if sent and not isinstance(error.__cause__, httpcore.LocalProtocolError):  # that is: a header is refused
                raise PerhapsDelivered(f"{error}; it may have been done") from error
            raise

    async def _answer(
        self, url: SplitResult, headers: Mapping[str, str], content: bytes, extensions: dict[str, Any]
    ) -> EndpointAnswer:
        target = (url.path or "/") + (f"?{url.query}" if url.query else "")
        to = httpcore.URL(scheme=url.scheme, host=url.hostname or "", port=url.port or PORTS[url.scheme], target=target)
        named = {"host": url.netloc, "content-length": str(len(content)), **headers}
        sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        request = httpcore.Request("POST", to, headers=sent, content=content, extensions=extensions)
        async with self._connections.send(request) as answer:
            found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answer.headers}
            read, is_whole = await _read(answer)
            return EndpointAnswer(answer.status, found, read, is_whole)


async def _read(answer: httpcore.Response) -> tuple[bytes, bool]:
    """Reads the body; whether that is all of it."""
    parts, size = [], 0
    async for part in answer.aiter_stream():
        parts.append(part)
        size += len(part)
        if size > BYTES_MAX:
            return b"".join(parts)[:BYTES_MAX], False
    return b"".join(parts), True


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Errors of connections as NotDelivered, with what they say."""
    try:
        yield
    except AddressRefused as error:
        raise NotDelivered(str(error)) from error
    except (
        httpcore.NetworkError,
        httpcore.TimeoutException,
        httpcore.ProtocolError,
        httpcore.UnsupportedProtocol,
        OSError,
    ) as error:
        said = clean_text(str(error) or type(error).__name__, SAID_BYTES_MAX)
        raise NotDelivered(f"the connection failed: {said}") from error
