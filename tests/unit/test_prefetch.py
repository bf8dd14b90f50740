"""How many jobs to prefetch: Little's law, and none for slow jobs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pgworkd.engine.claim import prefetch
from pgworkd.engine.claim.prefetch import AHEAD_MAX, Prefetch


class Rig:
    """A prefetch, its clock, and the pool that reports its claims."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.finished = 0
        self.pace: Prefetch

    def claim(
        self, every_s: float, count: int, *, took_s: float, run_s: float, concurrency: int, dry: bool = False
    ) -> int:
        """One claim, `every_s` after the last, with `count` more jobs finished; how many to claim ahead now."""
        self.now += every_s
        self.finished += count
        self.pace.claimed(took_s, self.finished, run_s, concurrency, dry=dry)
        return self.pace.ahead

    def steady(
        self, every_s: float, count: int, *, took_s: float, run_s: float, concurrency: int, dry: bool = False
    ) -> int:
        """Many such claims."""
        for _ in range(50):
            self.claim(every_s, count, took_s=took_s, run_s=run_s, concurrency=concurrency, dry=dry)
        return self.pace.ahead


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig()
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(monotonic=lambda: made.now))
    made.pace = Prefetch()
    return made


def test_initially_nothing_is_prefetched(rig: Rig) -> None:
    assert rig.pace.ahead == 0
    assert rig.claim(0.01, 0, took_s=0.005, run_s=0.0, concurrency=100) == 0


def test_prefetch_is_four_times_the_jobs_finished_during_a_claim(rig: Rig) -> None:
    """2,000 jobs per second, and a claim of 5 ms: 10 are finished meanwhile."""
    assert rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100) in (40, 41)


def test_the_estimated_rate_is_limited_by_the_slots(rig: Rig) -> None:
    """20 slots of 50 ms do at most 400 per second, whatever a short sample shows."""
    assert rig.steady(0.001, 20, took_s=0.01, run_s=0.05, concurrency=20) in (16, 17)


def test_the_prefetch_is_limited_by_the_measured_rate(rig: Rig) -> None:
    """10,000 slots of 10 ms, but jobs come at 100 per second."""
    assert rig.steady(0.1, 10, took_s=0.01, run_s=0.01, concurrency=10_000) in (4, 5)


def test_starved_slots_double_the_prefetch_up_to_their_maximum_rate(rig: Rig) -> None:
    """50 slots of 1 ms reach 50,000 per second, so 2,000 in four times the 10 ms of a claim."""
    seen = [rig.claim(0.01, 1, took_s=0.01, run_s=0.001, concurrency=50, dry=True) for _ in range(6)]
    assert seen[:4] == [100, 300, 700, 1500]
    assert set(seen[4:]) <= {2000}


def test_once_slots_are_no_longer_starved_the_measured_rate_applies(rig: Rig) -> None:
    rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100, dry=True)
    assert rig.claim(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100) in (40, 41)


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize("count", [1, 10])
def test_one_second_jobs_are_not_prefetched_even_after_a_burst(rig: Rig, count: int, *, dry: bool) -> None:
    """Ten slots finish at the same moment: that is not a sustained rate."""
    for _ in range(20):
        assert rig.claim(0.99, 0, took_s=0.005, run_s=1.0, concurrency=10, dry=dry) == 0
        assert rig.claim(0.001, count, took_s=0.005, run_s=1.0, concurrency=10, dry=dry) == 0
        assert rig.claim(0.0, 10 - count, took_s=0.005, run_s=1.0, concurrency=10, dry=dry) == 0


def test_one_minute_jobs_are_not_prefetched_by_a_thousand_slots(rig: Rig) -> None:
    assert rig.steady(0.06, 1, took_s=0.005, run_s=60.0, concurrency=1000) == 0
    assert rig.steady(0.06, 1, took_s=0.005, run_s=60.0, concurrency=1000, dry=True) == 0


def test_a_single_fast_job_among_slow_ones_does_not_start_prefetching(rig: Rig) -> None:
    rig.steady(0.1, 1, took_s=0.005, run_s=1.0, concurrency=10)
    assert rig.claim(0.1, 1, took_s=0.005, run_s=0.0001, concurrency=10) == 0


def test_prefetch_is_zero_below_the_threshold_and_at_least_one_above(rig: Rig) -> None:
    assert rig.steady(0.1, 1, took_s=0.0009, run_s=0.01, concurrency=10) == 0
    assert rig.steady(0.1, 1, took_s=0.0011, run_s=0.01, concurrency=10) == 1


def test_prefetch_is_capped(rig: Rig) -> None:
    assert rig.steady(0.1, 10_000, took_s=0.5, run_s=0.0001, concurrency=1000) == AHEAD_MAX == 2000
    assert rig.steady(0.1, 10_000, took_s=0.5, run_s=0.0001, concurrency=1000, dry=True) == AHEAD_MAX


def test_a_slower_database_increases_the_prefetch(rig: Rig) -> None:
    first = rig.steady(0.01, 20, took_s=0.001, run_s=0.001, concurrency=100)
    assert rig.steady(0.01, 20, took_s=0.02, run_s=0.001, concurrency=100) >= 15 * first > 0


def test_one_slow_claim_hardly_changes_the_prefetch(rig: Rig) -> None:
    before = rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100)
    rig.claim(0.01, 20, took_s=1.0, run_s=0.001, concurrency=100)
    assert rig.claim(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100) <= 2 * before


def test_a_claim_during_which_no_job_finished_changes_nothing(rig: Rig) -> None:
    before = rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100)
    assert rig.claim(5.0, 0, took_s=0.005, run_s=0.001, concurrency=100) == before


def test_jobs_that_become_slow_are_no_longer_prefetched(rig: Rig) -> None:
    assert rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=10) > 0
    assert rig.steady(1.0, 10, took_s=0.005, run_s=1.0, concurrency=10) == 0


def test_a_stall_stops_prefetching_at_once_and_for_the_next_claims(rig: Rig) -> None:
    assert rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=10) > 0
    rig.pace.stalled(0.5)
    assert rig.pace.ahead == 0
    assert rig.claim(0.01, 20, took_s=0.005, run_s=0.001, concurrency=10) < 5, "it has learnt how long they take"


def test_a_stall_before_the_first_finished_job_is_remembered(rig: Rig) -> None:
    rig.pace.stalled(1.0)
    assert rig.claim(0.01, 20, took_s=0.005, run_s=0.01, concurrency=10) == 0


def test_a_short_stall_does_not_make_slow_jobs_look_fast(rig: Rig) -> None:
    rig.steady(0.1, 1, took_s=0.005, run_s=1.0, concurrency=10)
    rig.pace.stalled(0.05)
    for _ in range(5):
        assert rig.claim(0.0, 10, took_s=0.005, run_s=1.0, concurrency=10) == 0


def test_fast_jobs_are_prefetched_again_after_a_stall(rig: Rig) -> None:
    before = rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100)
    rig.pace.stalled(5.0)
    assert rig.steady(0.01, 20, took_s=0.005, run_s=0.001, concurrency=100) <= 2 * before
