"""Counts of durations by fixed bounds, the same in memory, in `queue_minutes` and in metrics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_STEPS = (1, 1.26, 1.59, 2, 2.51, 3.16, 3.98, 5, 6.3, 7.94)
BOUNDS_S = (*(float(f"{step}e{power}") for power in range(-3, 4) for step in _STEPS), 10_000.0)
"""Upper bounds in seconds, each included in its count; the last count has none. As `histogram_bounds()` in SQL.

Each is at most 1.264 times the one before, so that a percentile up to the 95th, on a straight line between two, is at
most 25 % too high.
"""


def percentile(counts: Sequence[int], share: float) -> float | None:
    """The duration, in seconds, that this share (0 to 1) of the counts do not exceed; as `percentile()` in SQL.

    On a straight line between two bounds; for the last count its lower bound. None: nothing was counted.
    """
    rank, below = share * sum(counts), 0
    for place, count in enumerate(counts):
        if count and below + count >= rank:
            if place == len(BOUNDS_S):
                return BOUNDS_S[-1]
            low = BOUNDS_S[place - 1] if place else 0.0
            return low + (BOUNDS_S[place] - low) * max(rank - below, 0.0) / count
        below += count
    return None


class Histogram:
    """How many durations were observed below each bound, and their sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        """Durations per bound, not cumulative, and those above the last bound."""
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Counts one duration, in seconds; a negative one (the clock was set) as 0."""
        self.observe_all([duration_s])

    def observe_all(self, durations_s: list[float]) -> None:
        """Counts durations; sorts the list, as a sorted one takes a search per count that rises, not per duration."""
        durations_s.sort()
        below, upto = 0, 0
        while below < len(durations_s):
            place = bisect_left(BOUNDS_S, durations_s[below])
            upto = len(durations_s) if place == len(BOUNDS_S) else bisect_right(durations_s, BOUNDS_S[place], below)
            self.counts[place] += upto - below
            below = upto
        self.sum_s += sum(durations_s[bisect_left(durations_s, 0.0) :])
