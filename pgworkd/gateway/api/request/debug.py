"""What `--debug-http` logs of a request: never a token, the secret of a worker, or an assignment."""

from __future__ import annotations

import re
from typing import Any

from pgworkd import log

BODY_BYTES = 2_000
"""Bytes of each body that are logged."""
_SECRETS = re.compile(r'(pgw_[a-z0-9]{1,32}_|\ba1_|"secret"\s*:\s*")[A-Za-z0-9_-]+')


class Seen:
    """The first bytes of the bodies of one request and its answer."""

    def __init__(self, receive: Any, send: Any) -> None:
        self._receive, self._send = receive, send
        self._request, self._answer = bytearray(), bytearray()

    async def receive(self) -> Any:
        """Receives for ASGI, and keeps the first bytes."""
        message = await self._receive()
        _add(self._request, message)
        return message

    async def send(self, message: Any) -> None:
        """Sends for ASGI, and keeps the first bytes."""
        _add(self._answer, message)
        await self._send(message)

    def facts(self) -> dict[str, object]:
        """The bodies as facts for the log."""
        return {name: _text(body) for name, body in (("request", self._request), ("answer", self._answer)) if body}


def without_secrets(text: str) -> str:
    """The text with `***` for each secret."""
    return _SECRETS.sub(r"\1***", text)


def log_request(facts: dict[str, object]) -> None:
    """Logs a request."""
    log.logger().info("http.request", **facts)


def _add(body: bytearray, message: Any) -> None:
    body += message.get("body", b"")[: BODY_BYTES - len(body)]


def _text(body: bytearray) -> str:
    return without_secrets(body.decode(errors="replace"))
