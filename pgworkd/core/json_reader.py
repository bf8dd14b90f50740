"""JSON read strictly, payloads and results as the text that they are.

Refused, beside what is no JSON: duplicate keys, of which two readers may take different ones (RFC 7493), NaN and
infinity, more than DEPTH_MAX levels.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from json.decoder import scanstring  # type: ignore[attr-defined] # C, with a fallback in Python
from typing import Any, NoReturn

from pgworkd.core import payload
from pgworkd.core.json_text import JsonText
from pgworkd.errors import InvalidPayload

DEPTH_MAX = 16
"""Levels around payloads, which may have 64 of their own."""
MEMBERS_MAX = 10_000
"""Members of an object around payloads: each that is unknown is an error to tell."""
RAW = frozenset({"payload", "meta", "result"})
"""Members whose values are passed on as text."""
RAW_EACH = frozenset({"payloads"})
"""Members whose values are lists of values that are passed on as text."""
_RAW_NAMES = [f'"{name}"' for name in RAW | RAW_EACH]
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')
_ODD = re.compile(r"\\u[dD][89a-fA-F]|[0-9][eE][-+]?[0-9]{3}")
"""A surrogate, which may be alone; an exponent, which may be too large."""
_SPACE = re.compile(r"[ \t\n\r]*")
_COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
_NAME = re.compile(r'"([^"\\\x00-\x1f]*)"[ \t\n\r]*:[ \t\n\r]*')
"""A name without escapes, and what is between it and its value."""


def read(text: str) -> Any:
    """The value of a text; members of RAW, unless null, as JsonText. ValueError says what is wrong, and where."""
    if "\\" not in text and not any(name in text for name in _RAW_NAMES):  # nothing is passed on: C does it in one go
        with contextlib.suppress(ValueError, RecursionError):  # of which the reader tells the place
            value = _DECODER.decode(text)
            if _fits(value, DEPTH_MAX):
                return value
    return _Reader(text).whole()


def _fits(value: Any, depth: int) -> bool:
    """Whether a text has no more than this many levels, and no object too many members."""
    if isinstance(value, dict | list):
        if (value and depth == 1) or (isinstance(value, dict) and len(value) > MEMBERS_MAX):
            return False
        for each in value.values() if isinstance(value, dict) else value:
            if isinstance(each, dict | list) and not _fits(each, depth - 1):
                return False
    return True


def check_bounds(text: JsonText, what: str) -> None:
    """Raises InvalidPayload, whose path starts with `what`, for text that cannot be stored.

    As `payload.encode` does for any value, but without reading a text of which it is plain that it can.
    """
    if len(text) > payload.BYTES_MAX // 4 and len(text.encode(errors="surrogatepass")) > payload.BYTES_MAX:
        raise InvalidPayload(what, f"takes more than the {payload.BYTES_MAX:,} bytes that are allowed")
    depth = deepest = 0
    for bracket in _BRACKET.findall(text) if text.count("[") + text.count("{") > payload.DEPTH_MAX else ():
        depth += 1 if bracket in "[{" else -1 if bracket in "]}" else 0
        deepest = max(deepest, depth)
    if deepest > payload.DEPTH_MAX:
        raise InvalidPayload(what, f"has {deepest:,} levels, {payload.DEPTH_MAX} are allowed")
    if _ODD.search(text) or payload.is_suspicious(text):
        payload.encode(text, what, object_only=False)


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
        try:
            value, self._at = _SCAN(self._text, self._at)
        except StopIteration:
            raise ValueError("a value is expected") from None
        return value

    def _object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self._at += 1
        self._space()
        if self._take("}"):
            return found
        while True:
            name = self._name()
            if name in found:
                raise ValueError(f"two members are named {name[:100]!r}")
            if len(found) == MEMBERS_MAX:
                raise ValueError(f"an object has more than {MEMBERS_MAX:,} members")
            found[name] = self._member(name, depth - 1)
            if self._ends("}", "a comma or }"):
                return found

    def _name(self) -> str:
        """Reads the name of a member; goes on to its value."""
        if (plain := _NAME.match(self._text, self._at)) is not None:
            self._at = plain.end()
            return plain[1]
        self._expect('"', "a name in quotes")
        name: str
        name, self._at = scanstring(self._text, self._at, True)
        self._space()
        self._expect(":", "a colon")
        self._space()
        return name

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
            if self._ends("]", "a comma or ]"):
                return found

    def _ends(self, last: str, expected: str) -> bool:
        """Whether a member or element was the last one; goes on to the next."""
        if (comma := _COMMA.match(self._text, self._at)) is not None:
            self._at = comma.end()
            return False
        self._space()
        if self._take(last):
            return True
        self._expect(",", expected)
        return False

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
        elif why.startswith("Exceeds the limit"):
            why = f"an integer may have {sys.get_int_max_str_digits():,} digits"
        line, column = self._text.count("\n", 0, at) + 1, at - self._text.rfind("\n", 0, at)
        raise ValueError(f"{why} (line {line}, column {column})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two members are named {next(n for n in names if names.count(n) > 1)[:100]!r}")
    return found


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON: write null or text")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused)
_SCAN = _DECODER.scan_once  # type: ignore[attr-defined] # what raw_decode() calls
_RAW_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refused, parse_int=lambda _: 0, parse_float=lambda _: 0.0
)
"""A decoder for values that are passed on as text: numbers in them are not converted."""
