"""Checks of arguments before they are sent to the database; UsageError names the argument and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from uuid import UUID

from pgworkd.errors import UsageError

ROWS_MAX = 1000
"""Maximum jobs per call, so that each is a short transaction."""
_FIRST, _END = datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


def counted(count: int, noun: str) -> str:
    """'1 job', '2 jobs', '1,000 batches'."""
    plural = noun + ("es" if noun.endswith(("s", "x", "ch", "sh")) else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def bounded(count: int) -> None:
    """Raises UsageError unless `count` is 1 to ROWS_MAX."""
    if not 1 <= count <= ROWS_MAX:
        raise UsageError(f"{counted(count, 'job')} at once: 1 to {ROWS_MAX:,} are allowed")


def name(value: str | None) -> str | None:
    """A name to search for. Raises UsageError for text that Postgres cannot store."""
    if value is not None and ("\0" in value or value.encode("utf-8", "replace").decode() != value):
        raise UsageError(f"{value[:100]!a} is not a valid name: it contains a NUL character or a lone surrogate")
    return value


def identity(value: object, what: str) -> UUID:
    """The id of a job or batch."""
    if not isinstance(value, UUID):
        raise UsageError(f"{what} is a {type(value).__name__}: pass a UUID, as returned by enqueue() and batch()")
    return value


def text(value: object, what: str, chars_max: int) -> str:
    """A name or key to store: text of 1 to `chars_max` characters that Postgres can store."""
    if not isinstance(value, str) or not 1 <= len(value) <= chars_max:
        raise UsageError(f"{what} must be text of 1 to {chars_max} characters")
    if not value.isprintable():  # neither is NUL or a lone surrogate: encode() names the place
        from pgworkd.core.payload import encode  # slow to import, and needed for an error only

        encode(value, what, object_only=False)
    return value


def one_of(value: str | None, what: str, known: Sequence[str]) -> None:
    """Raises UsageError unless the value is None or one of these."""
    if value is not None and value not in known:
        raise UsageError(f"{what} {value[:100]!r}: give one of {', '.join(known)}")


def whole(value: object, what: str, low: int, high: int) -> int:
    """An int between the two, both included."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{what} must be an int from {low} to {high}")
    return int(value)  # of an enum: psycopg takes no list of mixed types


def instant(value: object, what: str) -> str:
    """An instant in ISO 8601, UTC."""
    has_zone = isinstance(value, datetime) and value.utcoffset() is not None
    if not isinstance(value, datetime) or not has_zone or not _FIRST <= value < _END:
        said = "" if has_zone else ": without one it is ambiguous"
        raise UsageError(f"{what} must be a datetime from 1970 to 2199 with a time zone{said}")
    return value.astimezone(UTC).isoformat()


def closest(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """The one of the known names that a misspelt `name` most likely means; None if none is alike."""
    found = difflib.get_close_matches(name, list(known), 1, likeness)
    return found[0] if found else None
