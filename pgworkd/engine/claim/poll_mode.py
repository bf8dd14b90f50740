"""Whether a pool waits for notifications or polls.

A NOTIFY wakes an idle pool in a millisecond, but under heavy traffic it only holds up the commits that send it. So a
pool is announced as idle, and inserts notify it, unless it sees heavy traffic: then it announces that it is polling,
and polls. Pure bookkeeping: times are on the loop's clock, in seconds.

The rule that nothing may break: **who is not announced as idle comes back by itself.** Nobody notifies such a pool, and
no one else asks on its behalf. `sleep_s` therefore bounds every rest of a pool, whatever led to it.
"""

from __future__ import annotations

import math
from collections import deque

NOTIFIED_PER_S_MAX = 100
"""With more notifications than that, polling is cheaper."""
FOUND_PER_S_LEAST = NOTIFIED_PER_S_MAX
"""With fewer claims that found something, in a second of polling, being notified is faster: as many notifications at
least would have come. The same number, so that it does not matter what came before. (Not jobs: a batch is one.)"""
POLL_FIRST_S, POLL_CAP_S = 0.005, 0.05
"""Waits of an awake pool that found nothing: they double from the first to the cap."""
SLEEP_S_MAX = 1.0
"""The longest rest of a pool that is not announced as idle, whatever it waits for."""
POLLING_LEAST_S = 1.0
POLL_ON_S = 1.0
"""How long a pool that fell asleep polls on: a transaction that inserted while the pool was awake sent no NOTIFY, and
commits unheard. One that stays open for longer is found by the daemon's look."""


class PollMode:
    """One pool's state, as the database has been told, and what it has seen since."""

    def __init__(self) -> None:
        self.announced: bool | None = None
        """Asleep or awake; None: the database knows nothing of us."""
        self._polling_since = 0.0
        self._found_polling = 0  # claims that found something
        self._poll_on_until = 0.0
        self._unchecked = False
        self._empty_claims = 0
        self._full_claims = 0
        self._notified_at: deque[float] = deque(maxlen=NOTIFIED_PER_S_MAX)

    def notified(self, now: float) -> None:
        """A notification came."""
        self._notified_at.append(now)

    def announce_done(self, now: float, *, idle: bool) -> None:
        """The database has been told."""
        if self.announced is True and not idle:
            self._polling_since, self._found_polling = now, 0
        # What was inserted just before we said that we are idle sent no NOTIFY: one more claim, at once.
        self._unchecked = idle and self.announced is False
        self.announced = idle
        self._poll_on_until = now + POLL_ON_S

    def after_claim(self, claimed: int, now: float, *, full: bool) -> bool | None:
        """What to announce after a claim of that many jobs (idle: True, polling: False), None: nothing new.

        `full`: there may be more.
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
        """Until the next claim, once what `after_claim` asked for is announced; infinite: when notified."""
        if self._full_claims:
            return 0.0
        if self.announced:
            if self._unchecked:
                return 0.0
            return POLL_CAP_S if now < self._poll_on_until else math.inf
        return min(POLL_CAP_S, POLL_FIRST_S * 2.0 ** min(self._empty_claims, 10))

    def sleep_s(self, delay_s: float) -> float:
        """How long a pool that would rest for that long may rest, whoever else might wake it."""
        return delay_s if self.announced else min(delay_s, SLEEP_S_MAX)
