"""What `--debug-bodies` logs of a request that comes in."""

from __future__ import annotations

from typing import Any

from pgworkd.log.http import BODY_BYTES, body_text


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
        return {name: body_text(body) for name, body in (("request", self._request), ("answer", self._answer)) if body}


def _add(body: bytearray, message: Any) -> None:
    body += message.get("body", b"")[: BODY_BYTES - len(body)]
