"""A filter by what payloads have in them: terms such as `order.id:7 to.name:"Ann Lee"`."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from pgworkd.core import validation
from pgworkd.errors import UsageError

CHARS_MAX, TERMS_MAX = 1000, 10
"""Characters of a filter, and its terms."""
_TERM = re.compile(r'\s*([^\s:"]+):("(?:[^"\\]|\\.)*"|[^\s"]\S*)(?=\s|$)')
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?", re.ASCII)
_GIVE = 'payload: give terms as order.id:7 paid:true to:ann to:"Ann Lee" to:"7", with spaces between them'


class PayloadTerm(NamedTuple):
    """A member of a payload, by the names and indexes that lead to it with dots between, and its value as JSON."""

    path: str
    value: str


def payload_terms(text: str) -> tuple[PayloadTerm, ...] | None:
    """The terms of a filter, all of which are to match; None: there are none.

    7 matches the number, "7" the text; true, false and null match these, and all else text. A member that is not there
    matches nothing. Raises UsageError for what is no such filter.
    """
    if len(text) > CHARS_MAX:
        raise UsageError(f"payload: the filter has {len(text):,} characters, {CHARS_MAX:,} are allowed")
    found, place = list[PayloadTerm](), 0
    while text[place:].strip():
        term = _TERM.match(text, place)
        if term is None or "" in term[1].split("."):
            raise UsageError(f"{_GIVE}: {text[place:].strip()[:50]!a} is none")
        found.append(PayloadTerm(_stored(term[1]), _value(term[2])))
        place = term.end()
    if len(found) > TERMS_MAX:
        raise UsageError(f"payload: the filter has {len(found)} terms, {TERMS_MAX} are allowed")
    return tuple(found) or None


def _value(text: str) -> str:
    if text in ("true", "false", "null") or _NUMBER.fullmatch(text):
        return text
    if text.startswith(("{", "[")):
        raise UsageError(f"{_GIVE}: objects and lists cannot be compared, {text[:50]!a}")
    try:
        found = json.loads(text) if text.startswith('"') else text
    except ValueError as error:
        raise UsageError(f"{_GIVE}: {text[:50]!a} is no text as in JSON: {error}") from None
    return json.dumps(_stored(found), ensure_ascii=False)


def _stored(text: str) -> str:
    """The text. Raises UsageError for what no payload can have in it."""
    try:
        validation.name(text)
    except UsageError as error:
        raise UsageError(f"payload: {error}") from None
    return text
