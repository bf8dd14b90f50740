"""What `--debug-http` logs of requests and answers: never a token, the secret of a worker, or an assignment."""

from __future__ import annotations

import re
from collections.abc import Callable

from pgworkd import log

LogHttp = Callable[[dict[str, object]], None]
"""Logs the facts of a request and its answer."""
BODY_BYTES = 2_000
"""Bytes of each body that are logged."""
_SECRETS = re.compile(r'(pgw_[a-z0-9]{1,32}_|\ba1_|"secret"\s*:\s*")[A-Za-z0-9_-]+')


def without_secrets(text: str) -> str:
    """The text with `***` for each secret."""
    return _SECRETS.sub(r"\1***", text)


def body_text(body: bytes | bytearray) -> str:
    """The beginning of a body, without secrets."""
    return without_secrets(body[:BODY_BYTES].decode(errors="replace"))


def log_request(facts: dict[str, object]) -> None:
    """Logs a request that came in."""
    log.logger().info("http.request", **facts)


def log_sent(facts: dict[str, object]) -> None:
    """Logs a request that was sent."""
    log.logger().info("http.sent", **facts)
