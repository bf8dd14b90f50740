"""Bodies of requests: JSON read strictly (see `words.json_reader`), within a size and a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread
from fastapi import Request
from starlette.requests import ClientDisconnect

from pgworkd.core import json_reader
from pgworkd.gateway.api.request.caller import CALLER, HAS_ARRIVED
from pgworkd.gateway.api.request.problems import Problem

BODY_S = 30.0
"""Time limit for the arrival of a body, in seconds."""
BODY_BYTES_MAX = 2 * 1024 * 1024
BULK_BYTES_MAX = 16 * 1024 * 1024
CLOSE = {"Connection": "close"}
"""Headers of an answer after which the connection is closed: what is left of a refused body is not read."""


LARGE_BYTES = 128 * 1024
"""A body of this size is read in a thread: it would hold up all others for as long as that takes."""
_ONE_EACH: WeakValueDictionary[str, anyio.CapacityLimiter] = WeakValueDictionary()
"""By caller: its large bodies are read one after the other."""
T = TypeVar("T")


async def apart(call: Callable[[], T], request: Request) -> T:
    """The result of a call that goes through a request's body; from a thread if that is large."""
    if len(getattr(request, "_body", b"")) < LARGE_BYTES:
        return call()
    own = _ONE_EACH.setdefault(CALLER.get(), anyio.CapacityLimiter(1))
    return await anyio.to_thread.run_sync(call, limiter=own)


async def read_body(request: Request, bytes_max: int = BODY_BYTES_MAX) -> bytes:
    """The whole body. Raises Problem for one that is too large or arrives too slowly."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > bytes_max:
        said = f"the body has {int(length):,} bytes, {bytes_max:,} are allowed"
        raise Problem("body-too-large", said, headers=CLOSE)
    if HAS_ARRIVED in request.scope:
        return await _received(request, bytes_max)
    with anyio.move_on_after(BODY_S):
        return await _received(request, bytes_max)
    raise Problem("body-too-slow", f"the body did not arrive within {BODY_S:g} s", headers=CLOSE)


async def _received(request: Request, bytes_max: int) -> bytes:
    parts, size, is_last = list[bytes](), 0, False
    while not is_last:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body, is_last = message.get("body", b""), not message.get("more_body", False)
        size += len(body)
        if size > bytes_max:
            said = f"the body has more than the {bytes_max:,} bytes that are allowed"
            raise Problem("body-too-large", said, headers=CLOSE)
        parts.append(body)
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
        """Reads the whole body; see `read_body`."""
        if not hasattr(self, "_body"):
            self._body = await read_body(self, self.bytes_max)
        return self._body

    async def json(self) -> Any:
        """The value of the body; see `parse`."""
        return parse(await self.body())


class BulkRequest(JsonRequest):
    """A request whose body may be large."""

    bytes_max = BULK_BYTES_MAX
