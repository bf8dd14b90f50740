"""Counts of durations by bounds."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.core.histogram import BOUNDS_S, Histogram

durations = st.lists(st.one_of(st.floats(-10, 20_000), st.sampled_from([0.0, *BOUNDS_S])), max_size=60)


@given(durations)
def test_each_duration_is_counted_below_the_first_bound_that_is_not_smaller(durations_s: list[float]) -> None:
    found, one_by_one, wanted = Histogram(), Histogram(), [0] * (len(BOUNDS_S) + 1)
    for duration_s in durations_s:
        wanted[bisect_left(BOUNDS_S, duration_s)] += 1
        one_by_one.observe(duration_s)
    found.observe_all(list(durations_s))
    assert found.counts == one_by_one.counts == wanted
    assert found.sum_s == pytest.approx(sum(d for d in durations_s if d > 0))
