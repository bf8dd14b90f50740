"""What is served where: /metrics, /healthz and /readyz on a port; the same numbers as JSON to a parent process."""

from __future__ import annotations

import contextlib
import json
import socket
import uuid
from collections.abc import Iterator

import anyio

from pgworkd.core.address import Address, parse_address
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import UsageError
from pgworkd.metrics.daemon import DaemonSource
from pgworkd.metrics.own import of_application
from pgworkd.metrics.page import OPENMETRICS, TEXT, MetricsPage, accepts_openmetrics
from pgworkd.metrics.samples import Check, Source, dumped
from pgworkd.metrics.server import PageServer, Reply, listen, listen_at
from pgworkd.settings.file import quoted

SNAPSHOT = "/snapshot"
_JSON, _PLAIN = "application/json; charset=utf-8", "text/plain; charset=utf-8"
_ALIVE = Reply(200, _PLAIN, b"alive\n")


class MetricsPages:
    """The pages of one source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._page = MetricsPage()
        self._identity = uuid.uuid4().hex

    def respond(self, path: str, accept: list[str]) -> Reply | None:
        """The page of that path."""
        if path == "/healthz":
            return Reply(503, _PLAIN, f"{sick}\n".encode()) if (sick := self._source.sick()) else _ALIVE
        if path == "/readyz":
            return readiness(self._source.checks())
        if path == "/metrics":
            openmetrics = accepts_openmetrics(accept)
            body = self._page.write(self._source.samples(), openmetrics=openmetrics, more=of_application)
            return Reply(200, OPENMETRICS if openmetrics else TEXT, body)
        return None

    def report(self, path: str, _: list[str]) -> Reply | None:
        """The snapshot for a parent process."""
        if path != SNAPSHOT:
            return None
        return Reply(200, _JSON, dumped(self._identity, self._source.samples(), self._source.checks()))


def readiness(checks: list[Check]) -> Reply:
    """The answer about these checks: 200 if all are well, else 503; the body has each of them."""
    ready = bool(checks) and all(check.ok for check in checks)
    body = {"ready": ready, "checks": {name: {"ok": ok, "says": says} for name, ok, says in checks}}
    return Reply(200 if ready else 503, _JSON, json.dumps(body, indent=1).encode() + b"\n")


def bound(listener: socket.socket) -> Address:
    """The address that a TCP socket has got."""
    host, port = listener.getsockname()[:2]
    return Address(str(host), int(port))


@contextlib.contextmanager
def served(source: Source, listener: socket.socket) -> Iterator[None]:
    """Serves the pages on this socket while the block lasts, and closes it."""
    with PageServer(listener, MetricsPages(source).respond).running():
        yield


@contextlib.contextmanager
def reporting(source: Source, name: str) -> Iterator[None]:
    """Reports to a parent process on the Unix socket of this name while the block lasts. Raises OSError."""
    with PageServer(listen_at(name), MetricsPages(source).report).running():
        yield


class MetricsPart:
    """A part of a daemon in a program of one's own: `Daemon(app, options, parts=(MetricsPart("127.0.0.1:9464"),))`."""

    def __init__(self, address: str) -> None:
        """Listens at once; UsageError if the address is none, or cannot be had."""
        try:
            parsed = parse_address(address)
        except ValueError as error:
            raise UsageError(f"the address {quoted(address)} {error}") from None
        self._listener = listen(parsed, "MetricsPart")
        self.address = bound(self._listener)
        """The address on which it listens; with port 0 the one that was found."""

    async def run(self, daemon: Daemon) -> None:
        """Serves until cancelled."""
        with served(DaemonSource(daemon), self._listener):
            await anyio.sleep_forever()
