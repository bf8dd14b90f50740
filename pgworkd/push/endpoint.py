"""An endpoint: where the jobs of a queue are sent, checked before anything is sent there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from urllib.parse import SplitResult, quote

from pgworkd.core.validation import text
from pgworkd.errors import UsageError
from pgworkd.push.guard import check_url
from pgworkd.push.secrets import check_name

HEADERS_MAX, HEADER_CHARS_MAX = 20, 2_000
Mode = Literal["sync", "callback"]
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
"""The name of a header (RFC 9110, 5.6.2)."""
_VALUE = re.compile(r"[\x20-\x7e\x80-\xff]*")
_OURS = re.compile(
    r"(?i)host|content-.*|transfer-encoding|connection|keep-alive|upgrade|te|trailer|expect|proxy-.*|cookie|accept.*"
    r"|user-agent|webhook-.*|pgworkd-.*|traceparent|tracestate"
)
"""Headers that say how a message is sent, or that are ours."""
_PLACES = "{queue}, {kind} and {id}"
_PLACE, _BRACES = re.compile(r"\{(queue|kind|id)\}"), re.compile(r"\{[^{}]*\}|[{}]")
CALLBACK_S_MAX = 420.0
"""How long after the request began its callback may come, unless the receiver extends that."""
BOUNDS = {"timeout_s": (0.1, 3600.0), "callback_timeout_s": (10.0, CALLBACK_S_MAX)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A row of `endpoints`. Raises UsageError, which names the field and says what to write."""

    name: str
    url: str = field(repr=False)
    mode: Mode = "sync"
    timeout_s: float = 30.0
    callback_timeout_s: float = 300.0
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    secret_name: str | None = None
    unsigned: bool = False
    allow_private: bool = False
    strict_results: bool = False
    parts: SplitResult = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises UsageError for a value that is out of bounds."""
        text(self.name, "the endpoint's name", 200)
        object.__setattr__(self, "parts", check_url(self.url, allow_private=self.allow_private))
        _check_places(self.parts)
        if self.mode not in ("sync", "callback"):
            raise UsageError(f"mode {self.mode!r}: give sync or callback")
        for name, (low, high) in BOUNDS.items():
            if not low <= getattr(self, name) <= high:  # NaN is not, either
                raise UsageError(f"{name} is {getattr(self, name)!r}: give {low:g} to {high:,.0f} seconds")
        if self.mode == "callback" and self.timeout_s + self.callback_timeout_s > CALLBACK_S_MAX:
            both = f"timeout_s ({self.timeout_s:g}) and callback_timeout_s ({self.callback_timeout_s:g})"
            raise UsageError(f"{both} are more than {CALLBACK_S_MAX:g} s together: lower one; receivers may extend it")
        check_headers(self.headers)
        if self.secret_name is None and not self.unsigned:
            raise UsageError(
                "the requests would not be signed: give the name of a secret, or say unsigned (--unsigned)"
            )
        if self.secret_name is not None:
            if self.unsigned:
                raise UsageError("the endpoint has a secret, and is to be unsigned: give one of them")
            check_name(self.secret_name)

    def at(self, facts: Mapping[str, Any]) -> SplitResult:
        """Where a message about a job goes: with its facts in the places that path and query have for them.

        Raises UsageError for one that would lead elsewhere.
        """
        if "{" not in self.url:
            return self.parts
        return self.parts._replace(path=_filled(self.parts.path, facts), query=_filled(self.parts.query, facts))

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """An endpoint from the columns of its row, others than these left out; `headers` decoded."""
        return cls(**{name: row[name] for name in COLUMNS if name in row})


def _check_places(url: SplitResult) -> None:
    """Raises UsageError for braces that are no place for a fact, or stand where none may be."""
    for part in (url.path, url.query):
        for place in _BRACES.findall(part):
            if _PLACE.fullmatch(place) is None:
                raise UsageError(f"the URL has {place[:40]!r}: {_PLACES} are filled in; write others as %7B, %7D")
    if any(brace in url.netloc for brace in "{}"):
        raise UsageError("the URL's host has a brace: facts of jobs are filled in in the path and the query only")


def _filled(part: str, facts: Mapping[str, Any]) -> str:
    def fill(place: re.Match[str]) -> str:
        value = str(facts.get(place[1], place[0]))
        if value in (".", ".."):
            raise UsageError(f"{place[0]} is {value!r}, which would lead to another path")
        return quote(value, safe="")

    return _PLACE.sub(fill, part)


COLUMNS = (
    "name url mode timeout_s callback_timeout_s headers secret_name unsigned allow_private strict_results"
).split()
"""The columns of an endpoint that operators set."""


def check_headers(headers: Mapping[str, str]) -> None:
    """Raises UsageError for a header that cannot be sent, or is not an operator's to say."""
    if len(headers) > HEADERS_MAX:
        raise UsageError(f"there are {len(headers)} headers: {HEADERS_MAX} are allowed")
    lower = [name.lower() for name in headers]
    for name, value in headers.items():
        if not _HEADER.fullmatch(name):
            raise UsageError(f"the header {name[:80]!r} has a name that HTTP does not allow")
        if _OURS.fullmatch(name):
            raise UsageError(f"the header {name!r} is set by pgworkd, or by HTTP itself: leave it out")
        if not isinstance(value, str) or len(value) > HEADER_CHARS_MAX or not _VALUE.fullmatch(value):
            raise UsageError(
                f"the header {name!r} needs a text of at most {HEADER_CHARS_MAX:,} characters, without line ends"
            )
        if lower.count(name.lower()) > 1:
            raise UsageError(f"the header {name!r} is given twice")
