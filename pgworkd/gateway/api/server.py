"""Serving an application: uvicorn, with limits on how long and how large the head of a request may be.

uvicorn's own parsers bound the time between two requests, and that of none in between: a client that sends a byte a
minute would keep its connection for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pgworkd.gateway.api.request.bounds import HEADER_BYTES_MAX
from pgworkd.gateway.api.request.caller import FROM_PROXY, HAS_ARRIVED, IS_CLOSING, ON_CLOSING
from pgworkd.process import forks

HEAD_S = 15.0
"""Time limit for the arrival of a request's head, in seconds, from its connection or the answer before it."""
IDLE_S = 75.0
"""A connection without a request is closed after this many seconds: later than proxies in front do."""
HEAD_BYTES_MAX = 2 * HEADER_BYTES_MAX
"""A head that is not complete after this many bytes, or one read more, closes its connection."""
HALF_CLOSED_S = 10.0
"""A caller that has closed its side is answered for this long."""
_PREFIX = re.compile(rb"(/[A-Za-z0-9._~-]{1,100}){1,10}")
_SINGLE = frozenset({b"host", b"authorization", b"pgworkd-secret", b"idempotency-key"})
LINGER_S = 1.0
"""The rest of a body whose request has been answered is read for this long, so that its caller gets the answer."""
BACKLOG = 1024


class _Joined:
    """A transport that sends what is written in one turn of the loop together: uvicorn writes head and body apart.

    That would be two system calls for each answer, and two packets, for each of which its reader wakes.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop, self._head = transport, loop, b""
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Writes for asyncio: of two pieces the first one waits for the second, or for the end of this turn."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._head = data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Closes for asyncio when all has been sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class Protocol(HttpToolsProtocol):
    """The protocol of one connection, with bounds on the time and size of a head. An offer to upgrade is declined."""

    _in_body = _is_half_closed = False
    _on_closing: list[Callable[[], None]]
    """Called when the caller of the request under way closes its side."""
    _head_bytes = 0
    """At least 1 while the head of a request has begun and is not complete."""
    _head_began = _message_ended = False
    _deadline: asyncio.TimerHandle | None = None

    @property
    def _notes(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.scope)

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for the first request; asyncio's hook."""
        forks.keep_private(transport.get_extra_info("socket"))
        super().connection_made(cast("asyncio.Transport", _Joined(transport, self.loop)))
        self._expect(HEAD_S)

    def data_received(self, data: bytes) -> None:
        """Parses what arrives, and bounds a head that is not complete; asyncio's hook."""
        self._unset_keepalive_if_required()
        self._message_ended = False
        self._feed(data)
        if self._in_body:
            return
        if self._message_ended:  # how much of this piece came after it is not known: one piece is not counted
            self._head_bytes = int(self._head_began)
        else:
            self._head_bytes += len(data)
        if self._head_bytes > HEAD_BYTES_MAX:
            self.transport.close()
        elif self._head_bytes and self._deadline is None:  # the rest of the head is due
            self._expect(HEAD_S)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.parser.get_method() == b"CONNECT":
                self.send_400_response("CONNECT is for proxies.")
            else:
                self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Reads a request as if it had not offered another protocol, as RFC 9110 (7.8) allows. JVMs always offer h2c.

        httptools has stopped before the body, with which the `rest` begins.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._feed(b"\r\n".join((b"%b %b HTTP/%b" % (method, self.url, version), *kept, b"", rest)))

    def _should_upgrade(self) -> bool:
        """Whether uvicorn leaves a request that offers an upgrade alone: `_decline_upgrade` reads it again."""
        return True

    def on_message_begin(self) -> None:
        """Notes that a head has begun; httptools' hook."""
        self._head_began = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Notes that the head is complete; httptools' hook."""
        if self.parser.should_upgrade():
            return
        self._head_began, self._head_bytes, self._in_body = False, 0, True
        self._expect(None)
        self._notes[IS_CLOSING] = self._is_closing
        self._notes[ON_CLOSING] = self._on_closing = []
        self._check_head()
        self._take_prefix()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Notes that the body is complete; httptools' hook."""
        if self.parser.should_upgrade():
            return
        self._message_ended, self._in_body = True, False
        self._expect(None)
        self._notes[HAS_ARRIVED] = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Bounds the rest of a body that nobody wants any more; uvicorn's hook."""
        super().on_response_complete()
        if self._in_body:
            self._expect(LINGER_S)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answers what has arrived, to a caller that has said that nothing more will come; asyncio's hook.

        One that has gone looks the same. So nothing is kept for long, and what waits ends.
        """
        if self.cycle is None or self.cycle.response_complete or self._in_body:
            return None
        self._is_half_closed, self.cycle.keep_alive = True, False
        self._expect(HALF_CLOSED_S)
        for call in self._on_closing:
            call()
        return True

    def _is_closing(self) -> bool:
        return self._is_half_closed or self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait for a request; asyncio's hook."""
        self._expect(None)
        super().connection_lost(exc)

    def _check_head(self) -> None:
        """Raises ValueError, for which httptools has the request refused, if readers may take it for different ones.

        RFC 9112: 3.2 two hosts, 3.2.2 a target such as http://host/path names the host, 6.1 codings other than chunked.
        """
        single = [name for name, _ in self.headers if name in _SINGLE]
        for name, value in self.headers:
            if name == b"transfer-encoding" and value.lower() != b"chunked":
                raise ValueError("a transfer coding that is not read here")
        if len(single) > len(set(single)):
            raise ValueError("two headers of which readers may take different ones")
        if not self.url.startswith((b"/", b"*")):
            host = re.split(rb"[/?#]", self.url.partition(b"://")[2], maxsplit=1)[0]
            self.headers[:] = [*((name, value) for name, value in self.headers if name != b"host"), (b"host", host)]

    def _take_prefix(self) -> None:
        """Notes that a proxy that we trust sends this, and below which path it serves us: for the links in answers."""
        trusted = getattr(self.app, "trusted_hosts", ())  # of uvicorn's layer for proxies, if there is one
        if self.client is not None and self.client[0] in trusted:
            told = [value.rstrip(b"/") for name, value in self.headers if name == b"x-forwarded-prefix"]
            self.root_path = told[0].decode() if told and _PREFIX.fullmatch(told[0]) else ""
            self._notes["root_path"] = self.root_path
            self._notes[FROM_PROXY] = True

    def _expect(self, within_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if within_s is None else self.loop.call_later(within_s, self._too_late)

    def _too_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: `request_stop` stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals; uvicorn's hook."""
        yield

    def request_stop(self, *, now: bool = False) -> None:
        """Accepts no more requests, and ends when those under way are answered; `now`: at once."""
        self.should_exit = True
        self.force_exit = self.force_exit or now


def _is_news(record: logging.LogRecord) -> bool:
    """False for the stack of a request that a stop has cut off: uvicorn has said how many there are."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def server(app: Any, shutdown_s: float, proxies: tuple[str, ...] = ()) -> Server:
    """A server of the application. `proxies`: addresses whose X-Forwarded-For names the caller.

    At a stop, requests under way are answered within `shutdown_s` seconds.
    """
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.WARNING)  # our own events say when it listens and stops
    logger.addFilter(_is_news)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        loop="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=bool(proxies),
        forwarded_allow_ips=list(proxies),
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=max(1, int(shutdown_s)),
        backlog=BACKLOG,
    )
    return Server(config)
