"""How many jobs to claim beyond the free slots, so that no slot waits for a claim and no daemon hoards."""

from __future__ import annotations

import math
import time

AHEAD_MAX = 2_000
WORTHWHILE = 0.2
"""Jobs ahead, by the law: for less, slots wait for claims a tenth of the time at most."""
WEIGHT = 0.2
"""Of the newest measurement in each moving average."""


class Pace:
    """Little's law: what is finished while a claim is under way has to be there before it is back.

    Twice that is claimed ahead, of the rate that was measured or that the slots can reach at all, whichever is lower.
    Jobs that take long come out at nothing: they would wait here while another daemon has slots.
    """

    def __init__(self) -> None:
        self.ahead = 0
        """Jobs to claim beyond the free slots."""
        self._claim_s = 0.0
        self._rate = 0.0
        self._run_s: float | None = None
        self._counted = 0
        self._counted_at = time.monotonic()

    def claimed(self, took_s: float, finished: int, run_s: float, concurrency: int) -> None:
        """After each claim: how long it took, how many jobs have finished so far and how long the last one ran."""
        now = time.monotonic()
        count, elapsed_s = finished - self._counted, now - self._counted_at
        self._counted, self._counted_at = finished, now
        self._claim_s += WEIGHT * (took_s - self._claim_s)
        if not count:
            return
        self._run_s = run_s if self._run_s is None else self._run_s + WEIGHT * (run_s - self._run_s)
        rate = count / max(elapsed_s, 1e-6)
        self._rate += WEIGHT * (rate - self._rate)
        reachable = concurrency / max(self._run_s, 1e-6)
        ahead = 2 * self._claim_s * min(self._rate, reachable)
        self.ahead = min(AHEAD_MAX, math.ceil(ahead)) if ahead >= WORTHWHILE else 0

    def stalled(self, since_s: float) -> None:
        """Nothing that was claimed ahead has begun for so long: these jobs take longer than we thought."""
        self._run_s = max(self._run_s or 0.0, since_s)
        self.ahead = 0
