"""Bodies of requests: JSON read strictly (see `words.json_reader`), within a size and a time."""

from __future__ import annotations

from typing import Any

import anyio
from fastapi import Request
from fastapi.routing import APIRoute

from pgworkd.http.request.gateway import gateway_of
from pgworkd.http.request.problems import Problem
from pgworkd.words import json_reader
from pgworkd.words.validation import closest

BODY_S = 30.0
"""Within this time a body must have arrived, in seconds."""
BODY_BYTES_MAX = 2 * 1024 * 1024
BULK_BYTES_MAX = 16 * 1024 * 1024
CLOSE = {"Connection": "close"}
"""What is left of such a body is not read."""


async def read_body(request: Request, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The whole body. Raises Problem for one that is too large or arrives too slowly."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > bytes_max:
        said = f"the body has {int(length):,} bytes, {bytes_max:,} are allowed"
        raise Problem("body-too-large", said, headers=CLOSE)
    parts, size = [], 0
    with anyio.move_on_after(BODY_S) as limit:
        async for part in request.stream():
            size += len(part)
            if size > bytes_max:
                said = f"the body has more than the {bytes_max:,} bytes that are allowed"
                raise Problem("body-too-large", said, headers=CLOSE)
            parts.append(part)
    if limit.cancelled_caught:
        raise Problem("body-too-slow", f"the body did not arrive within {BODY_S:g} s", headers=CLOSE)
    return b"".join(parts)


def parse(data: bytes) -> Any:
    """The value of a body; see `json_reader`. Raises Problem for what is not JSON."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Problem("not-json", f"the body is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    try:
        return json_reader.read(text)
    except ValueError as error:
        raise Problem("not-json", f"the body is not valid JSON: {error}") from None


class JsonRequest(Request):
    """A request whose body is read by this module."""

    bytes_max = BODY_BYTES_MAX

    async def body(self) -> bytes:
        """The whole body; see `read_body`."""
        if not hasattr(self, "_body"):
            self._body = await read_body(self, self.bytes_max)
        return self._body

    async def json(self) -> Any:
        """Its value; see `parse`."""
        return parse(await self.body())


class BulkRequest(JsonRequest):
    """One that may be large."""

    bytes_max = BULK_BYTES_MAX


def _check_query(request: Request, known: set[str]) -> None:
    """Problem for a parameter that the route does not have: `?dryrun=true` must not do what `?dry_run=true` counts."""
    unknown = [name for name in request.query_params if name not in known]
    if unknown:
        name = unknown[0][:100]
        found = closest(name, known)
        hint = f"did you mean {found}?" if found else f"it takes {', '.join(sorted(known))}" if known else "remove it"
        raise Problem(
            "invalid", errors=[{"in": f"query/{name}", "detail": f"this route has no such parameter: {hint}"}]
        )


class Route(APIRoute):
    """A route that finds out who calls before it reads a body, and reads it as this module does."""

    request_class: type[JsonRequest] = JsonRequest

    def get_route_handler(self) -> Any:
        """FastAPI's hook for a request class of one's own."""
        handle = super().get_route_handler()
        known = {str(field.alias) for field in self.dependant.query_params}

        async def handler(request: Request) -> Any:
            ours = self.request_class(request.scope, request.receive)
            ours.state.access = await gateway_of(ours).access(ours)
            if ours.scope["query_string"]:
                _check_query(ours, known)
            return await handle(ours)

        return handler


class BulkRoute(Route):
    """The same for large bodies."""

    request_class = BulkRequest
