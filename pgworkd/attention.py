"""Whether a pool waits for notifications or polls.

A NOTIFY wakes a sleeping pool in a millisecond, but under heavy traffic it only holds up the commits that send it. So a
pool is *asleep* in the database's eyes, and inserts notify it, unless it sees heavy traffic: then it says that it is
awake, and polls. Pure bookkeeping: times are on the loop's clock, in seconds.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

NOTIFIED_PER_S_MAX = 100
"""More notifications than that and polling is the cheaper way to hear."""
BUSY_PER_S_LEAST = 100
"""Fewer jobs than that, in a second awake, and being notified is the faster way to hear."""
POLL_FIRST_S, POLL_CAP_S = 0.005, 0.05
"""Waits of an awake pool that found nothing: they double from the first to the cap."""
AWAKE_LEAST_S = 1.0
DROWSY_S = 1.0
"""How long a pool that fell asleep polls on: a transaction that inserted while the pool was awake sent no NOTIFY, and
commits unheard. One that stays open for longer is found by the daemon's look."""


class Next(NamedTuple):
    """What to do after a claim."""

    delay_s: float | None
    """Until the next claim; None: until woken."""
    asleep: bool | None = None
    """What to announce first; None: nothing new."""


class Attention:
    """One pool's state, as the database has been told, and what it has seen since."""

    def __init__(self) -> None:
        self.announced: bool | None = None
        """Asleep or awake; None: the database knows nothing of us."""
        self._awake_since = 0.0
        self._claimed_awake = 0
        self._drowsy_until = 0.0
        self._empty_claims = 0
        self._full_claims = 0
        self._heard_at: deque[float] = deque(maxlen=NOTIFIED_PER_S_MAX)

    def heard(self, now: float) -> None:
        """A notification came."""
        self._heard_at.append(now)

    def told(self, now: float, *, asleep: bool) -> None:
        """The database has been told."""
        if self.announced is True and not asleep:
            self._awake_since, self._claimed_awake = now, 0
        self.announced = asleep
        self._drowsy_until = now + DROWSY_S

    def after_claim(self, claimed: int, now: float, *, full: bool) -> Next:
        """What to do after a claim of that many jobs; `full`: there may be more."""
        self._full_claims = self._full_claims + 1 if full else 0
        self._empty_claims = 0 if claimed else self._empty_claims + 1
        self._claimed_awake += claimed
        if self.announced:
            flooded = len(self._heard_at) == NOTIFIED_PER_S_MAX and now - self._heard_at[0] < 1.0
            delay_s = 0.0 if full else POLL_CAP_S if now < self._drowsy_until else None
            return Next(delay_s, asleep=False if flooded or self._full_claims >= 2 else None)
        if full:
            return Next(0.0)
        if now - self._awake_since >= AWAKE_LEAST_S:
            calm = self._claimed_awake < BUSY_PER_S_LEAST * (now - self._awake_since)
            self._awake_since, self._claimed_awake = now, 0
            if calm:
                self._heard_at.clear()
                return Next(0.0, asleep=True)  # once more: what was inserted before we said so sent no NOTIFY
        return Next(min(POLL_CAP_S, POLL_FIRST_S * 2.0 ** min(self._empty_claims, 10)))
