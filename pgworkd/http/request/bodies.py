"""Bodies of requests: JSON read strictly, within a size and a time, payloads as the text they were sent as.

Refused as JSON, beside what is none: duplicate keys, of which two readers may take different ones (RFC 7493), NaN and
infinity, more than DEPTH_MAX levels.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined] # C, with a fallback in Python
from typing import Any, NoReturn

import anyio
from fastapi import Request
from fastapi.routing import APIRoute

from pgworkd.http.request.gateway import gateway_of
from pgworkd.http.request.problems import Problem
from pgworkd.words.json_text import JsonText

BODY_S = 30.0
"""Within this time a body must have arrived, in seconds."""
BODY_BYTES_MAX = 2 * 1024 * 1024
BULK_BYTES_MAX = 16 * 1024 * 1024
DEPTH_MAX = 16
"""Levels around payloads, which may have 64 of their own."""
RAW = frozenset({"payload", "meta", "result"})
"""Members whose values are passed on as text."""
RAW_EACH = frozenset({"payloads"})
"""Members whose values are lists of such."""
CLOSE = {"Connection": "close"}
"""What is left of such a body is not read."""
_SPACE = re.compile(r"[ \t\n\r]*")


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
    """The value of a body; members of RAW, unless null, as JsonText. Raises Problem for what is not JSON."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Problem("not-json", f"the body is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None
    return _Reader(text).whole()


class _Reader:
    """Reads one text. Values that are passed on are parsed too, to find where they end, but not kept."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def whole(self) -> Any:
        try:
            self._space()
            value = self._value(DEPTH_MAX)
            self._space()
        except (ValueError, RecursionError) as error:
            self._fail(error)
        if self._at != len(self._text):
            self._fail(ValueError("there is more behind its end"))
        return value

    def _value(self, depth: int) -> Any:
        if depth == 0:
            raise ValueError(f"it has more than {DEPTH_MAX} levels")
        first = self._text[self._at : self._at + 1]
        if first == "{":
            return self._object(depth)
        if first == "[":
            return self._list(depth, raw=False)
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return value

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._at += 1
        self._space()
        if self._take("}"):
            return found
        while True:
            self._expect('"', "a name in quotes")
            name, self._at = scanstring(self._text, self._at, True)
            self._space()
            self._expect(":", "a colon")
            self._space()
            if name in found:
                raise ValueError(f"two members are named {name[:100]!r}")
            found[name] = self._member(name, depth - 1)
            self._space()
            if self._take("}"):
                return found
            self._expect(",", "a comma or }")
            self._space()

    def _member(self, name: str, depth: int) -> Any:
        if name in RAW:
            return self._raw()
        if name in RAW_EACH and self._text[self._at : self._at + 1] == "[":
            return self._list(depth, raw=True)
        return self._value(depth)

    def _list(self, depth: int, *, raw: bool) -> list[Any]:
        found: list[Any] = []
        self._at += 1
        self._space()
        if self._take("]"):
            return found
        while True:
            found.append(self._raw() if raw else self._value(depth - 1))
            self._space()
            if self._take("]"):
                return found
            self._expect(",", "a comma or ]")
            self._space()

    def _raw(self) -> JsonText | None:
        start = self._at
        value, self._at = _RAW_DECODER.raw_decode(self._text, start)
        return None if value is None else JsonText(self._text[start : self._at])

    def _space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = self._at if found is None else found.end()

    def _take(self, char: str) -> bool:
        taken = self._text.startswith(char, self._at)
        self._at += taken
        return taken

    def _expect(self, char: str, what: str) -> None:
        if not self._take(char):
            raise ValueError(f"{what} is expected")

    def _fail(self, error: Exception) -> NoReturn:
        at, why = self._at, str(error)
        if isinstance(error, json.JSONDecodeError):
            at, why = error.pos, error.msg
        elif isinstance(error, RecursionError):
            why = "it is nested too deep"
        line, column = self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)
        raise Problem("not-json", f"the body is not valid JSON: {why} (line {line}, column {column})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two members are named {next(n for n in names if names.count(n) > 1)[:100]!r}")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON: write null or text")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused)
_RAW_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refused, parse_int=lambda _: 0, parse_float=lambda _: 0.0
)
"""Its numbers are not looked at."""


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


class Route(APIRoute):
    """A route that finds out who calls before it reads a body, and reads it as this module does."""

    request_class: type[JsonRequest] = JsonRequest

    def get_route_handler(self) -> Any:
        """FastAPI's hook for a request class of one's own."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Any:
            ours = self.request_class(request.scope, request.receive)
            ours.state.access = await gateway_of(ours).access(ours)
            return await handle(ours)

        return handler


class BulkRoute(Route):
    """The same for large bodies."""

    request_class = BulkRequest
