"""The port of metrics and health: the HTTP server of the standard library, with limits that it does not have.

It runs in threads, apart from the event loop, and listens on a socket that it is given. At most CONNECTIONS are served
at a time, others wait to be accepted, and one that is not over after SERVED_S is cut off: that bounds what clients can
take, however slow and many they are.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from pgworkd.core.address import Address
from pgworkd.errors import UsageError
from pgworkd.log import logger as _logger
from pgworkd.process import forks, local_sockets

CONNECTIONS = 4
BACKLOG = 64
SERVED_S = 3.0
"""How long one connection may take, in seconds."""
CHECK_S = 0.5
"""How often connections that take longer are looked for, in seconds."""


PACKED_BYTES_MIN = 2_000
"""Pages from this size on are compressed for clients that take that."""


class Reply(NamedTuple):
    """An answer to a request of a page."""

    status: int
    content_type: str
    body: bytes


Respond = Callable[[str, list[str]], "Reply | None"]
"""A function that answers a path, with the values of the header Accept; None: no such page. Called in threads."""


class PageServer(ThreadingHTTPServer):
    """Serves pages over HTTP on a listening socket, which it closes."""

    def __init__(self, listener: socket.socket, respond: Respond) -> None:
        super().__init__(listener.getsockname(), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.respond = respond
        self._free = threading.Semaphore(CONNECTIONS)
        self._until: dict[Any, float] = {}
        """When each connection is cut off."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Serves while the block lasts."""
        threading.Thread(target=self.serve_forever, args=(CHECK_S,), name="pgworkd http", daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
            self._free.release()  # or for the end of one
            self.shutdown()
            self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection."""
        try:
            connection, peer = super().get_request()
        except OSError as error:
            if error.errno != errno.EINVAL:  # that the server ends
                time.sleep(0.2)  # perhaps all descriptors are used up: the connection keeps waiting
            raise
        forks.keep_private(connection)
        return connection, peer

    def verify_request(self, request: Any, _: Any) -> bool:
        """Whether the other side may ask."""
        return request.family != socket.AF_UNIX or local_sockets.is_trusted(request)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread, once there is one less than CONNECTIONS."""
        while not self._free.acquire(timeout=CHECK_S):
            self.service_actions()
        self._until[request] = time.monotonic() + SERVED_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Cuts off the connections that take too long: what their threads wait for fails."""
        for connection, until in list(self._until.items()):
            if until < time.monotonic():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        if self._until.pop(request, None) is not None:
            self._free.release()
        super().shutdown_request(request)

    def handle_error(self, *_: object) -> None:
        """A client that is gone, or was cut off, is not logged."""


class _Request(BaseHTTPRequestHandler):
    """A request and its answer. Nothing in it is trusted: the path is compared, Host is not looked at."""

    server: PageServer
    server_version, sys_version = "pgworkd", ""
    wbufsize = -1  # headers and page in one piece: each call of the system may wait for a handler that computes
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s: speak plain HTTP/1.1 here\n"  # a TLS handshake gets this

    def do_GET(self) -> None:
        try:
            answer = self.server.respond(self.path.partition("?")[0], self.headers.get_all("Accept", []))
        except Exception:  # noqa: BLE001 - the server goes on
            _logger().exception("metrics.failed", path=self.path[:100])
            answer = Reply(500, "text/plain; charset=utf-8", b"internal error: see the log\n")
        if answer is None:
            answer = Reply(404, "text/plain; charset=utf-8", b"there are /metrics, /healthz and /readyz\n")
        body, packs = answer.body, len(answer.body) >= PACKED_BYTES_MIN
        self.send_response(answer.status)
        if packs and takes_gzip(self.headers.get_all("Accept-Encoding", [])):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        if packs:
            self.send_header("Vary", "Accept-Encoding")
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the standard library's name

    def _refuse(self) -> None:
        self.send_response(405)
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Logs nothing: there is a request every few seconds."""


def takes_gzip(accepted: Iterable[str]) -> bool:
    """Whether a client takes gzip, by the values of its headers Accept-Encoding."""
    for each in ",".join(accepted).lower().split(","):
        coding, *parameters = each.replace(" ", "").split(";")
        if coding in ("gzip", "*"):
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


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
