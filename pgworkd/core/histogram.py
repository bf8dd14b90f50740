"""Counts of durations by fixed bounds, the same in memory, in `queue_minutes` and in metrics."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

BOUNDS_S = (*(float(f"{digit}e{power}") for power in range(-3, 4) for digit in (1, 2, 5)), 10_000.0)
"""Upper bounds in seconds, each included in its count; the last count has none. As `histogram_bounds()` in SQL."""


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
        """Counts durations; sorts the list, since counting a sorted one takes a search per bound, not per duration."""
        durations_s.sort()
        below = 0
        counts = self.counts
        for place, bound in enumerate(BOUNDS_S):
            if below == len(durations_s):
                break
            upto = bisect_right(durations_s, bound, below)
            counts[place] += upto - below
            below = upto
        counts[-1] += len(durations_s) - below
        self.sum_s += sum(durations_s[bisect_left(durations_s, 0.0) :])
