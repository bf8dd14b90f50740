"""Entries of the audit as pages tell them: what was changed, from what to what."""

from __future__ import annotations

import json
from typing import NamedTuple

CHARS_MAX, MEMBERS_MAX = 200, 20
"""Characters of a value that are shown, and members of an entry."""


class Change(NamedTuple):
    """A member of an entry: what it was and what it is, as short JSON; None: there was none, or is none.

    `is_same`: it is only named, such as the schedule that was changed.
    """

    name: str
    before: str | None
    after: str | None
    is_same: bool = False


class Changes(NamedTuple):
    """The members of an entry, what is only named first; `more`: how many others there are."""

    members: list[Change]
    more: int


def changes(before: object, after: object) -> Changes:
    """What differs between both sides of an entry."""
    old, new = (side if isinstance(side, dict) else {"": side} for side in (before, after))
    found = []
    for name in dict.fromkeys([*old, *new]):
        was, is_now = (_short(side[name]) if name in side else None for side in (old, new))
        is_same = name in old and name in new and old[name] == new[name]
        found.append(Change(name[:CHARS_MAX], was, is_now, is_same))
    found.sort(key=lambda each: not each.is_same)
    return Changes(found[:MEMBERS_MAX], max(0, len(found) - MEMBERS_MAX))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= CHARS_MAX else f"{text[:CHARS_MAX]} … ({len(text):,} characters)"
