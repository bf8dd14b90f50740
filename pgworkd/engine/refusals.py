"""Which claims the database refuses, since when, and why: for the log, STATUS and /readyz."""

from __future__ import annotations

import time
from typing import NamedTuple

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.validation import counted
from pgworkd.errors import DatabaseBusy, DatabaseError

REFUSED_S = 5.0
"""A failure that passes within this time is not reported."""


class Refusal(NamedTuple):
    """A part whose calls have failed since `since`, on the monotonic clock; `error`: the last one."""

    since: float
    error: Exception


class Refusals:
    """The refusals of one process. Written in its loop, read from any thread."""

    def __init__(self, events_: Events) -> None:
        self._events = events_
        self._by_part: dict[str, Refusal] = {}
        self._told_since: float | None = None

    def failed(self, part: str, error: Exception, sent_at: float) -> None:
        """Notes that a call of a part (a queue, or the poller), sent at that time, has failed."""
        since = known.since if (known := self._by_part.get(part)) is not None else sent_at
        self._by_part[part] = Refusal(since, error)
        if self._told_since is None and (refused_s := time.monotonic() - since) >= REFUSED_S:
            self._told_since = since
            self._events.emit(events.CLAIMS_REFUSED, part=part, error=str(error), since_s=round(refused_s, 3))

    def passed(self, part: str) -> None:
        """Notes that a call of a part has succeeded, or that there will be none."""
        if self._by_part.pop(part, None) is None or self._told_since is None or self._reported():
            return
        refused_s, self._told_since = time.monotonic() - self._told_since, None
        self._events.emit(events.CLAIMS_RESUMED, refused_s=round(refused_s, 3))

    @property
    def lasting_s(self) -> float:
        """For how many seconds calls of some part have failed, without one that has succeeded; 0: none fails."""
        now = time.monotonic()
        return max([now - each.since for each in list(self._by_part.values())], default=0.0)

    def text(self, *, unavailable: bool = False) -> str:
        """A line on what is refused for longer than REFUSED_S; empty: nothing.

        `unavailable`: only what is because the database cannot be reached or refuses the connection.
        """
        found = [each for each in self._reported() if not (unavailable and isinstance(each[1].error, _ANSWERS))]
        if not found:
            return ""
        _, (since, error) = min(found, key=lambda each: each[1].since)
        of = f" (in {counted(len(found), 'queue')})" if len(found) > 1 else ""
        return f"claims refused for {time.monotonic() - since:.0f} s{of}: {' '.join(str(error).split())[:300]}"

    def _reported(self) -> list[tuple[str, Refusal]]:
        now = time.monotonic()
        return [each for each in list(self._by_part.items()) if now - each[1].since >= REFUSED_S]


_ANSWERS = (DatabaseBusy, DatabaseError)
