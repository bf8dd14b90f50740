"""Names in paths. They may contain anything, and the framework takes a path apart at each `/` and at line ends.

So a character of a name that would mean something there is replaced before routes are matched, and put back after it.
"""

from __future__ import annotations

import re
from urllib.parse import quote

_MARK = "\ue000"
_OF = {"/": "s", "\n": "n", "\r": "r", _MARK: "m"}
_CHARS = {code: char for char, code in _OF.items()}
_ANY = re.compile(f"[/\n\r{_MARK}]")
_MARKED = re.compile(f"{_MARK}([snrm])")


def marked(part: str) -> str:
    """A part of a path, decoded, as routes can match it."""
    return _ANY.sub(lambda found: _MARK + _OF[found[0]], part)


def encoded(text: str) -> str:
    """A marked path as one reads it: these characters as in a URL."""
    return _MARKED.sub(lambda found: quote(_CHARS[found[1]], safe=""), text)


def as_sent(path: str) -> str:
    """A marked path as its address has it."""
    return "/".join(quote(plain(part), safe="") for part in path.split("/"))


def plain(text: str) -> str:
    """The name that a marked part stands for."""
    return _MARKED.sub(lambda found: _CHARS[found[1]], text)
