"""Backoff between attempts to reach the database, and one event per outage.

One `Outage` per part of the daemon. It reports once that the database is unavailable and once that it has recovered, or
once that a statement failed where the database answers (a time-out, a lock, a rejection); in between it only computes
delays, so that an hour without a database is not an hour of log lines; a part may ask to be reminded. Parts that wait
here retry at once when any other part reports the recovery.
"""

from __future__ import annotations

import math
import random

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.errors import AccessRefused, DatabaseBusy, DatabaseError

FIRST_S = 0.1
CAP_S = 2.0
"""Claims must resume within seconds after the server is back, so the waits stay short; jitter spreads the fleet."""


class Outage:
    """The state of the database, as one part of the daemon sees it."""

    def __init__(self, part: str, events_: Events, *, remind_s: float = math.inf) -> None:
        """`remind_s`: report again after this many seconds, and when we are refused for another reason."""
        self._part = part
        self._events = events_
        self._remind_s = remind_s
        self._said, self._said_at, self._refused = "", -math.inf, False
        self._since: float | None = None
        self._failing = False  # calls are answered with errors: no outage
        self._delay_s = FIRST_S

    @property
    def on(self) -> bool:
        """True while calls fail."""
        return self._since is not None

    def failed(self, error: Exception) -> float:
        """Records a failed call; returns the seconds to wait before the next."""
        delay_s = self._delay_s * random.uniform(0.5, 1.5)  # noqa: S311 # nosec B311 # jitter, no secret
        if isinstance(error, (DatabaseBusy, DatabaseError)):
            if not self._failing:
                facts = {"part": self._part, "error": str(error), "retry_in_s": round(delay_s, 3)}
                self._events.emit(events.STATEMENT_FAILED, **facts)
            self._failing = True
        else:
            self._report(error, delay_s)
        self._delay_s = min(CAP_S, self._delay_s * 2)
        return delay_s

    def _report(self, error: Exception, delay_s: float) -> None:
        """Reports an outage once; again when the database begins to refuse us, or it is time for a reminder."""
        now_s, text, refused = anyio.current_time(), str(error), isinstance(error, AccessRefused)
        is_new = self._since is None or (refused and not self._refused)
        is_other = refused and text != self._said and self._remind_s < math.inf
        if is_new or is_other or now_s - self._said_at >= self._remind_s:
            self._said, self._said_at, self._refused = text, now_s, refused
            name = events.DATABASE_REFUSED if refused else events.DATABASE_UNAVAILABLE
            self._events.emit(name, part=self._part, error=text, retry_in_s=round(delay_s, 3))
        if self._since is None:
            self._since = now_s

    async def wait(self, error: Exception) -> None:
        """Records a failed call, and returns when it is time for the next."""
        delay_s, back = self.failed(error), anyio.Event()

        def on_event(name: str, _: object) -> None:
            if name == events.DATABASE_RECOVERED:
                back.set()

        self._events.listen(on_event)
        try:
            with anyio.move_on_after(delay_s):
                await back.wait()
        finally:
            self._events.unlisten(on_event)

    def passed(self) -> None:
        """Records a call that was answered."""
        if self._failing:
            self._failing, self._delay_s = False, FIRST_S
        if self._since is not None:
            outage_s = anyio.current_time() - self._since
            self._since = None
            self._delay_s = FIRST_S
            self._events.emit(events.DATABASE_RECOVERED, part=self._part, outage_s=round(outage_s, 3))
