"""Checks of arguments before they are sent to the database; UsageError names the argument and what is allowed."""

from __future__ import annotations

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
        raise UsageError(f"{value[:100]!a} is not a name: it contains a NUL character or half a character")
    return value


def identity(value: object, what: str) -> UUID:
    """The id of a job or batch."""
    if not isinstance(value, UUID):
        raise UsageError(f"{what} is a {type(value).__name__}: pass a UUID, as returned by enqueue() and batch()")
    return value


def text(value: str, what: str, chars_max: int) -> str:
    """A name or key to store: 1 to `chars_max` characters."""
    if not 1 <= len(value) <= chars_max:
        raise UsageError(f"{what} has {len(value):,} characters: 1 to {chars_max} are allowed")
    name(value)
    return value


def whole(number: int, what: str, low: int, high: int) -> int:
    """A whole number between the two, both included."""
    if not low <= number <= high:
        raise UsageError(f"{what} is out of bounds: {low} to {high} are allowed")
    return number


def instant(value: datetime, what: str) -> str:
    """An instant as text for Postgres; it must have a time zone, and lie in 1970 to 2199."""
    if value.utcoffset() is None:
        raise UsageError(f"{what} has no time zone: pass a datetime with tzinfo")
    if not _FIRST <= value < _END:
        raise UsageError(f"{what} is {value.isoformat()}: 1970 to 2199 are allowed")
    return value.astimezone(UTC).isoformat()
