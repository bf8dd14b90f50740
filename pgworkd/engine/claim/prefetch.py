"""How many jobs to claim beyond the free slots, so that no slot waits for a claim and no daemon hoards jobs."""

from __future__ import annotations

import math
import time

AHEAD_MAX = 2_000
CLAIMS_AHEAD = 4
"""Prefetch what finishes during this many claims: with less, slots wait whenever a claim takes longer than usual."""
WORTHWHILE = 0.1
"""Prefetch only if a claim takes at least this share of a run: else it is not worth keeping jobs from others."""
WEIGHT = 0.2
"""Weight of the newest measurement in each moving average."""


class Prefetch:
    """Little's law: as many jobs as finish while a claim is under way must be here before it returns.

    The prefetch is several times that, at the measured rate or the maximum rate of the slots, whichever is lower.
    For long jobs it is zero: they would wait here while another daemon has free slots. Slots that ran dry could have
    done more than was measured: then the prefetch doubles, up to what they can reach.
    """

    def __init__(self) -> None:
        self.ahead = 0
        """Jobs to claim beyond the free slots."""
        self._claim_s: float | None = None
        self._rate = 0.0
        self._run_s: float | None = None
        self._counted = 0
        self._counted_at = time.monotonic()

    def claimed(self, took_s: float, finished: int, run_s: float, concurrency: int, *, dry: bool) -> None:
        """Learns from a claim: its duration, how many jobs have finished so far, and how long the last one ran.

        `dry`: no job was left here when it returned.
        """
        now = time.monotonic()
        count, elapsed_s = finished - self._counted, now - self._counted_at
        self._counted, self._counted_at = finished, now
        known_s = took_s if self._claim_s is None else self._claim_s
        # One that took very long, as the first one does, is an exception: it counts little, and not for long.
        self._claim_s = _average(known_s, min(took_s, 10 * known_s), WEIGHT if took_s > known_s else 0.5)
        if not count:
            return
        self._run_s = _average(self._run_s, run_s)
        self._rate += WEIGHT * (count / max(elapsed_s, 1e-6) - self._rate)
        reachable = CLAIMS_AHEAD * self._claim_s * concurrency / max(self._run_s, 1e-6)
        measured = CLAIMS_AHEAD * self._claim_s * self._rate
        ahead = min(reachable, max(measured, 2.0 * (self.ahead + concurrency)) if dry else measured)
        self.ahead = min(AHEAD_MAX, math.ceil(ahead)) if self._claim_s >= WORTHWHILE * self._run_s else 0

    def stalled(self, run_s: float) -> None:
        """Claims less ahead: jobs hardly start, and take longer than assumed, about `run_s` seconds each."""
        self._run_s = max(self._run_s or 0.0, run_s)
        self.ahead = 0


def _average(known: float | None, new: float, weight: float = WEIGHT) -> float:
    return new if known is None else known + weight * (new - known)
