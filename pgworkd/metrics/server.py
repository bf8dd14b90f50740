"""The HTTP server of metrics and health: a few threads that wait for connections, apart from the event loop.

A handler that computes in the event loop keeps Python's interpreter lock, and a thread waits up to 5 ms for it after
every call of the system. So a connection costs three of them (accept, receive, send), no thread is started for it, and
the answer is sent in one piece. The standard library reads the request.

Each thread serves one connection at a time, which is over after one answer or SERVED_S seconds: that bounds what
clients can take, however slow and many they are.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from pgworkd.core.address import Address
from pgworkd.core.log import logger as _logger
from pgworkd.errors import UsageError
from pgworkd.process import forks, local_sockets

THREADS = 4
BACKLOG = 64
SERVED_S = 3.0
"""How long one connection may take, in seconds, from its first byte to its last."""
REQUEST_BYTES_MAX = 16 * 1024
PIECE_BYTES = 256 * 1024
_WAIT = struct.pack("ll", 1, 0)  # of one call of the system: a second


class Reply(NamedTuple):
    """An answer to a request of a page."""

    status: int
    content_type: str
    body: bytes


Respond = Callable[[str, list[str]], "Reply | None"]
"""A function that answers a path, with the values of the header Accept; None: no such page. Called in threads."""


class PageServer:
    """Serves pages over HTTP from threads of its own, on a listening socket that it closes."""

    def __init__(self, listener: socket.socket, respond: Respond) -> None:
        self._listener = listener
        self._respond = respond
        self._closing = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"pgworkd http {number}", daemon=True)
            for number in range(1, THREADS + 1)
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serves while the block lasts."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._closing = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for a connection
            self._listener.close()
            for thread in self._threads:
                thread.join(0.1)

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    time.sleep(0.2)  # the connection keeps waiting
                continue
            forks.keep_private(connection)
            with connection, contextlib.suppress(OSError):
                if connection.family == socket.AF_UNIX and not local_sockets.is_trusted(connection):
                    continue
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # settimeout() would double the calls
                    connection.setsockopt(socket.SOL_SOCKET, option, _WAIT)
                _Request(connection, self._respond)


class _Incoming(io.RawIOBase):
    """The bytes that a client sends, up to a size and a time."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection, self._until, self._left = connection, until, REQUEST_BYTES_MAX

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0 or time.monotonic() > self._until:
            raise TimeoutError
        count = self._connection.recv_into(buffer)
        self._left -= count
        return count


class _Request(BaseHTTPRequestHandler):
    """A request and its answer. Nothing in it is trusted: the path is compared, Host is not looked at."""

    server_version, sys_version = "pgworkd", ""

    def __init__(self, connection: socket.socket, respond: Respond) -> None:
        self._respond = respond
        self._until = time.monotonic() + SERVED_S
        super().__init__(connection, None, None)  # type: ignore[arg-type] # peer and server, which only logs would need

    def setup(self) -> None:
        self.rfile = io.BufferedReader(_Incoming(self.request, self._until))
        self.wfile = self._answer = io.BytesIO()

    def finish(self) -> None:
        rest = memoryview(self._answer.getvalue())
        while rest and time.monotonic() < self._until:
            rest = rest[self.request.send(rest[:PIECE_BYTES]) :]

    def do_GET(self) -> None:
        try:
            answer = self._respond(self.path.partition("?")[0], self.headers.get_all("Accept", []))
        except Exception:  # noqa: BLE001 - the server goes on
            _logger().exception("metrics.failed", path=self.path[:100])
            answer = Reply(500, "text/plain; charset=utf-8", b"internal error: see the log\n")
        if answer is None:
            answer = Reply(404, "text/plain; charset=utf-8", b"there are /metrics, /healthz and /readyz\n")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815 - the standard library's name

    def _refuse(self) -> None:
        self.send_response(405)
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse  # noqa: N815

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what the standard library cannot read, in plain text, not its HTML; such as a TLS handshake."""
        self.close_connection = True
        body = f"{code} {message or ''}: speak plain HTTP/1.1 here\n".encode("latin-1", "replace")
        self.send_response(code, message)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing: there is a request every few seconds."""


def listen(address: Address, name: str) -> socket.socket:
    """A socket that listens there; UsageError if it cannot. `name`: the setting and where it comes from."""
    try:
        family, _, _, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"{name}: cannot listen on {address}: {_remedy(error)}") from None
    forks.keep_private(listener)
    return listener


def _remedy(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its host name is unknown: give an address of this host, for example 127.0.0.1"
    if error.errno == errno.EADDRINUSE:
        return "the port is in use: stop the program that has it, or give another port (0: any free one)"
    if error.errno == errno.EACCES:
        return "the port needs privileges: give one of 1024 or above"
    if error.errno == errno.EADDRNOTAVAIL:
        return "this host has no such address: give one that it has, or 0.0.0.0 for all"
    return f"{os.strerror(error.errno) if error.errno else error}: give another address"


def listen_at(name: str) -> socket.socket:
    """A Unix socket that listens under this name of `local_sockets`. Raises OSError."""
    listener = local_sockets.bound(name, socket.SOCK_STREAM)
    listener.listen(BACKLOG)
    return listener
