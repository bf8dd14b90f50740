"""Whether a pool waits for notifications or polls.

A NOTIFY wakes an idle pool in a millisecond, but under heavy traffic it only holds up the commits that send it. So a
pool is announced as idle, and inserts notify it, unless it sees heavy traffic: then it announces that it is polling,
and polls. Pure bookkeeping: times are on the loop's clock, in seconds.

The invariant: **a pool that is not announced as idle always has a next iteration.** Nothing notifies such a pool, and
the poller does not ask on its behalf. `sleep_s` therefore bounds every sleep of a pool, whatever its reason.
"""

from __future__ import annotations

import math
from collections import deque

NOTIFIED_PER_S_MAX = 100
"""With more notifications per second, polling is cheaper."""
FOUND_PER_S_LEAST = NOTIFIED_PER_S_MAX
"""If fewer claims per second of polling found jobs, notifications are faster: there would have been about as many. The
same threshold in both directions, so that history does not matter. (Claims, not jobs: an insert of many is one.)"""
POLL_FIRST_S, POLL_CAP_S = 0.005, 0.05
"""Waits of a polling pool whose claims find nothing: they double from the first to the cap."""
SLEEP_S_MAX = 1.0
"""The longest sleep of a pool that is not announced as idle, whatever it waits for."""
POLLING_LEAST_S = 1.0
"""A pool stays in polling mode for at least this many seconds."""
POLL_ON_S = 1.0
"""A pool that has been announced as idle polls on for this many seconds: a transaction that inserted before sent no
NOTIFY, and commits unnoticed. The job of one that stays open for longer is found by the poller."""


class PollMode:
    """One pool's mode as announced to the database, and its traffic since."""

    def __init__(self) -> None:
        self.announced: bool | None = None
        """The mode that is announced: True: idle (notified), False: polling; None: nothing is announced."""
        self._polling_since = 0.0
        self._found_polling = 0  # claims that found jobs while polling
        self._poll_on_until = 0.0
        self._unchecked = False
        self._empty_claims = 0
        self._full_claims = 0
        self._notified_at: deque[float] = deque(maxlen=NOTIFIED_PER_S_MAX)

    def notified(self, now: float) -> None:
        """Counts a notification."""
        self._notified_at.append(now)

    def record_announcement(self, now: float, *, idle: bool) -> None:
        """Notes that the announcement is stored in the database."""
        if self.announced is True and not idle:
            self._polling_since, self._found_polling = now, 0
        # Jobs inserted just before that sent no NOTIFY: one more claim, at once.
        self._unchecked = idle and self.announced is False
        self.announced = idle
        self._poll_on_until = now + POLL_ON_S

    def after_claim(self, claimed: int, now: float, *, full: bool) -> bool | None:
        """What to announce after a claim of that many jobs (True: idle, False: polling; None: no change).

        `full`: there may be more jobs.
        """
        self._unchecked = False
        self._full_claims = self._full_claims + 1 if full else 0
        self._empty_claims = 0 if claimed else self._empty_claims + 1
        self._found_polling += claimed > 0
        if self.announced:
            flooded = len(self._notified_at) == NOTIFIED_PER_S_MAX and now - self._notified_at[0] < 1.0
            return False if flooded or self._full_claims >= 2 else None
        if full or now - self._polling_since < POLLING_LEAST_S:
            return None
        calm = self._found_polling < FOUND_PER_S_LEAST * (now - self._polling_since)
        self._polling_since, self._found_polling = now, 0
        if not calm:
            return None
        self._notified_at.clear()
        return True

    def next_claim_s(self, now: float) -> float:
        """Seconds until the next claim, after any announcement `after_claim` asked for; infinite: when notified."""
        if self._full_claims:
            return 0.0
        if self.announced:
            if self._unchecked:
                return 0.0
            return POLL_CAP_S if now < self._poll_on_until else math.inf
        return min(POLL_CAP_S, POLL_FIRST_S * 2.0 ** min(self._empty_claims, 10))

    def sleep_s(self, delay_s: float) -> float:
        """How long a pool that wants to sleep for `delay_s` may sleep."""
        return delay_s if self.announced else min(delay_s, SLEEP_S_MAX)

    def polls_on(self, now: float) -> bool:
        """True if jobs may be there without a notification."""
        return not self.announced or self._unchecked or now < self._poll_on_until
