"""Calls of a gateway, and what its answers mean.

Each call may be repeated. The exceptions are those of the database, so that the engine waits, repeats and reports as it
does with one: DatabaseUnavailable where the gateway cannot be reached, cannot reach its database, or is busy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx

from pgworkd.core import json_reader
from pgworkd.core.registration import token_of
from pgworkd.errors import (
    AccessRefused,
    DatabaseBusy,
    DatabaseError,
    DatabaseUnavailable,
    LeaseLost,
    OutcomeUnknown,
    PgworkdError,
    UsageError,
    WorkerLost,
)
from pgworkd.process import forks
from pgworkd.process.redaction import hide_secret, redact
from pgworkd.remote import environment

LEASE_S_MIN = 10.0
"""The shortest lease that a gateway accepts, in seconds."""
CONNECTIONS_MAX = 200
SAID_CHARS_MAX = 300
CONFLICT = "55000"
"""The SQLSTATE that stands for the problem `conflict`."""
_LOCKED = "55P03"


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """Where the gateway is. `url`: with the prefix under which it is mounted, if there is one. `token`: empty, none.

    `limit_s`: how long a call may take, beside the time for which it asks to wait.
    """

    url: str
    token: str = field(repr=False)
    limit_s: float = 10.0

    def __post_init__(self) -> None:
        """The token is a secret."""
        hide_secret(self.token)


class GatewayClient:
    """Calls one gateway, within one event loop."""

    def __init__(self, options: GatewayAddress, limit_s: float | None = None) -> None:
        """`limit_s`: in the place of that of the options."""
        self._options = options
        self._limit_s = limit_s or options.limit_s
        self._client: httpx.AsyncClient | None = None

    async def close(self) -> None:
        """Closes all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def call(
        self, method: str, path: str, body: object = None, *, worker_id: int | None = None, wait_s: float = 0.0
    ) -> Any:
        """The value of the answer to a request, payloads as text; `body`: a value, or JSON as bytes.

        worker_id: on whose behalf.

        Raises DatabaseUnavailable, or OutcomeUnknown where the request may have arrived; WorkerLost, LeaseLost; and
        UsageError or DatabaseError where a repetition would not help.
        """
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        if (secret := token_of(worker_id)) is not None:
            headers["Pgworkd-Secret"] = secret.hex
        limit_s = self._limit_s + wait_s
        sent = False
        try:
            with anyio.fail_after(limit_s):
                request = self._opened().build_request(
                    method,
                    self._url(path),
                    content=content,
                    headers=headers,
                    timeout=limit_s,
                    extensions={"trace": _keep_private},
                )
                sent = True
                answer = await self._opened().send(request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            through = environment.through(self._options.url)
            raise DatabaseUnavailable(f"no connection to the gateway{through}: {_said(error)}") from None
        except TimeoutError:
            kind = OutcomeUnknown if sent else DatabaseUnavailable
            raise kind(f"the gateway did not answer {method} {path} within {limit_s:g} s") from None
        except httpx.HTTPError as error:
            raise OutcomeUnknown(f"the connection to the gateway was lost: {_said(error)}") from None
        except (httpx.InvalidURL, UnicodeError) as error:
            raise UsageError(f"the address of the gateway is invalid: {_said(error)}") from None
        if answer.is_success:
            return _value(answer)
        raise problem(answer.status_code, _value(answer) if _is_problem(answer) else {}, _retry_after(answer))

    def _url(self, path: str) -> str:
        return self._options.url.rstrip("/") + path

    def _opened(self) -> httpx.AsyncClient:
        if self._client is None:
            limits = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=20)
            headers = {"Authorization": f"Bearer {self._options.token}"} if self._options.token else {}
            self._client = environment.client(self._options.url, headers=headers, timeout=self._limit_s, limits=limits)
        return self._client


async def _keep_private(event: str, facts: dict[str, Any]) -> None:
    """Called by httpcore with each step of a request."""
    if event == "connection.connect_tcp.complete":
        forks.keep_private(facts["return_value"].get_extra_info("socket"))


def problem(status: int, said: dict[str, Any], retry_after_s: str = "") -> PgworkdError:
    """The exception for an answer that is no success, or for the problem of one settle."""
    slug = str(said.get("type", "")).rpartition("/")[2]
    detail = said.get("detail") or said.get("title") or "no problem is named"
    text = f"{redact(str(detail))[:SAID_CHARS_MAX]} (HTTP {status})"
    match slug:
        case "worker-lost":
            return WorkerLost(text)
        case "stale-assignment":
            return LeaseLost(text)
        case "outcome-unknown":
            return OutcomeUnknown(text)
        case "busy":
            return DatabaseBusy(text, sqlstate=_LOCKED)
        case "timeout":
            return DatabaseBusy(text, sqlstate="57014")
        case "conflict":
            return DatabaseError(text, sqlstate=CONFLICT)
        case "invalid" | "not-json" | "body-too-large":
            faults = (
                f"{each.get('pointer') or each.get('in')}: {each.get('detail')}" for each in said.get("errors", ())
            )
            return DatabaseError("; ".join([text, *faults])[:SAID_CHARS_MAX], sqlstate="22023")
    if status in (401, 403, 404, 405, 421) or 300 <= status < 400:
        return AccessRefused(f"the gateway refuses: {text}; check the token and the address", status)
    wait = f"; it asks to wait {retry_after_s} s" if retry_after_s else ""
    return DatabaseUnavailable(f"the gateway cannot serve: {text}{wait}")


def _said(error: Exception) -> str:
    return redact(str(error) or type(error).__name__)[:SAID_CHARS_MAX]


def _is_problem(answer: httpx.Response) -> bool:
    return str(answer.headers.get("Content-Type", "")).startswith("application/problem+json")


def _retry_after(answer: httpx.Response) -> str:
    return str(answer.headers.get("Retry-After", ""))[:20]


def _value(answer: httpx.Response) -> Any:
    try:
        return json_reader.read(answer.content.decode())
    except ValueError:
        raise DatabaseUnavailable(f"the answer is no JSON (HTTP {answer.status_code}): is this a gateway?") from None
