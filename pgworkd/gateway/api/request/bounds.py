"""What holds before any route: which host was called, from where, how large the headers are; and the path.

Names in paths may contain anything: a `/` in one is sent as %2F, which the framework would decode too early.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import unquote_to_bytes, urlsplit

from pgworkd.gateway.api.request.caller import IS_HEAD
from pgworkd.gateway.api.request.debug import Seen
from pgworkd.gateway.api.request.failures import answer_to
from pgworkd.gateway.api.request.names import encoded, marked
from pgworkd.gateway.api.request.problems import Problem
from pgworkd.log.http import without_secrets

HEADER_BYTES_MAX = 32 * 1024
PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that are served under any host: load balancers ask by address, and these tell nothing."""
_READS = {"GET", "HEAD", "OPTIONS"}
_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


class AsgiApp(Protocol):
    """An ASGI application."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""


class Bounds:
    """ASGI middleware. `hosts`: as of GatewayOptions; `log`: called after each request with its facts.

    `count`: called after each request with its scope, its status (0: no answer), and when it began, on the monotonic
    clock. `bodies`: the first bytes of both bodies are among the facts.
    """

    def __init__(
        self,
        app: AsgiApp,
        hosts: tuple[str, ...] | None,
        count: Callable[[Any, int, float], None],
        log: Callable[[dict[str, object]], None] | None = None,
        *,
        bodies: bool = False,
    ) -> None:
        self._app = app
        self._hosts = None if hosts is None or "*" in hosts else {host.lower() for host in hosts}
        self._count, self._log, self._bodies = count, log, bodies
        self._id, self._numbers = secrets.token_hex(4), itertools.count(1)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers a request, or passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        seen = Seen(receive, send) if self._bodies else None
        if seen is not None:
            receive, send = seen.receive, seen.send
        more = [*_HEADERS, (b"x-request-id", (request_id := f"{self._id}-{next(self._numbers):x}").encode())]

        async def sent(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = message.get("headers", ())
                keeps = any(name == b"cache-control" for name, _ in own)
                message["headers"] = [*own, *more[keeps:]]
            await send(message)

        try:
            self._check(scope)
            scope = {**scope, "path": _path(scope), "pgworkd.request_id": request_id}
            if scope["method"] == "HEAD" and _below(scope, scope["path"]) != "/v1/events":  # which would not end
                scope |= {"method": "GET", IS_HEAD: True}  # the server leaves the body out
            await self._app(scope, receive, sent)
        except Exception as error:
            if status:  # the answer has begun: the server cuts it off
                raise
            if (answer := answer_to(error, scope)) is not None:
                await answer(scope, receive, sent)
        finally:
            self._count(scope, status, began)
        if self._log is not None:
            self._log(
                {
                    "method": scope["method"],
                    "path": without_secrets(encoded(scope["path"])[:500]),
                    "status": status,
                    "took_s": round(time.monotonic() - began, 4),
                    "request_id": request_id,
                    **({} if seen is None else seen.facts()),
                }
            )

    def _check(self, scope: Any) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > HEADER_BYTES_MAX:
            raise Problem("headers-too-large")
        host = headers.get(b"host", b"").decode("latin-1").lower()
        path = _below(scope, scope["path"])
        is_probe = path in PROBES or (path == "/metrics" and not host)  # a browser sends a host
        if self._hosts is not None and _without_port(host) not in self._hosts and not is_probe:
            raise Problem(
                "wrong-host", f"{_without_port(host)[:200]!r} is not among the hosts of this gateway: see http_hosts"
            )
        if scope["method"] in _READS:
            return
        site = headers.get(b"sec-fetch-site", b"none").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        if site not in ("same-origin", "none") or (origin and urlsplit(origin).netloc != host):
            raise Problem("cross-site")


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() else host


def _below(scope: Any, path: str) -> str:
    """A path as of a gateway that is not mounted below another path."""
    return path.removeprefix(scope.get("root_path", ""))


def _path(scope: Any) -> str:
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    if b"%" not in raw and raw.isascii() and (plain := raw.partition(b"?")[0].decode()).isprintable():
        return plain  # nothing to decode: nearly all
    try:
        parts = [unquote_to_bytes(part).decode() for part in raw.partition(b"?")[0].split(b"/")]
    except UnicodeDecodeError:
        raise Problem("not-found", "the path is not UTF-8") from None
    if any("\0" in part for part in parts):
        raise Problem("not-found", "the path has a character that no name may have")
    return "/".join(map(marked, parts))
