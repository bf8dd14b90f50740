"""The delay before a retry: the policy, its declarations, and that it is within bounds for any input."""

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd import Backoff
from pgworkd.core.backoff import STEPS_MAX
from pgworkd.errors import DELAY_S_MAX, UsageError


def middle() -> float:
    """The random number that means no jitter."""
    return 0.5


def test_default_delays_are_30_s_5_min_and_30_min():
    assert [Backoff().delay_s(n, middle) for n in (1, 2, 3, 4, 10**9)] == [30, 300, 1800, 1800, 1800]


def test_jitter_is_at_most_ten_percent_either_way():
    assert Backoff().delay_s(1, lambda: 0.0) == pytest.approx(27)
    assert Backoff().delay_s(1, lambda: 1.0) == pytest.approx(33)
    assert Backoff(jitter=0).delay_s(1, lambda: 0.9) == 30
    drawn = {Backoff().delay_s(1) for _ in range(20)}
    assert len(drawn) > 1, "without an rng of the caller's the delays must differ too"
    assert all(27 <= delay_s <= 33 for delay_s in drawn)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (None, [30, 300, 1800]),
        (Backoff(base_s=1, factor=2), [1, 2, 4, 8]),
        ({"base_s": 1, "factor": 3, "cap_s": 5}, [1, 3, 5, 5]),
        ({"base_s": 100, "cap_s": 5}, [5, 5]),
        ({"base_s": 0}, [0, 0, 0]),
        ({"factor": 1}, [30, 30, 30]),
        ({}, [30, 300, 1800]),
        ([5, 60.5, timedelta(minutes=10)], [5, 60.5, 600, 600]),
        ((0,), [0, 0]),
        (15, [15, 15]),
        (0, [0]),
        (timedelta(hours=1), [3600, 3600]),
        (lambda failures: failures * 7, [7, 14, 21]),
        (lambda failures: timedelta(minutes=failures), [60, 120]),
        (lambda _: -5, [0]),
        (lambda _: 10**400, [DELAY_S_MAX]),
        (lambda _: timedelta.max, [DELAY_S_MAX]),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][:30],
)
def test_backoff_is_declared_as_number_list_or_function(policy, expected):
    backoff = Backoff.parse(policy)
    assert [backoff.delay_s(n, middle) for n in range(1, len(expected) + 1)] == pytest.approx(expected)


def test_out_of_range_failure_counts_are_clamped():
    assert [Backoff.parse([5, 60]).delay_s(n, middle) for n in (-7, 0, 1, 10**9)] == [5, 5, 5, 60]
    assert Backoff().delay_s(0, middle) == 30
    assert Backoff(base_s=0).delay_s(10**9, middle) == 0


def test_a_backoff_functions_delay_is_used_without_jitter():
    assert Backoff.parse(lambda _: 100).delay_s(1, lambda: 1.0) == 100


async def coroutine(failures: int) -> float:
    return failures


@pytest.mark.parametrize(
    "policy",
    [
        [],
        [1, "2"],
        [1, -1],
        [math.nan],
        [1] * (STEPS_MAX + 1),
        -1,
        math.inf,
        DELAY_S_MAX + 1,
        10**400,
        True,
        "30s",
        {30},
        {"base": 30},
        {1: 30},
        {"rule": print},
        {"base_s": "30"},
        {"base_s": math.nan},
        {"cap_s": -1},
        {"factor": 0.5},
        {"factor": math.inf},
        {"factor": None},
        {"jitter": 1.5},
        {"jitter": True},
        timedelta(-1),
        coroutine,
        int,
    ],
    ids=lambda value: str(value).partition(" at 0x")[0][:30],
)
def test_an_invalid_backoff_is_rejected_when_the_handler_is_declared(policy):
    with pytest.raises(UsageError, match="backoff"):
        Backoff.parse(policy)


def failing(_: int) -> float:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (lambda _: math.nan, "ValueError"),
        (lambda _: -math.inf, "ValueError"),
        (lambda _: None, "TypeError"),
        (lambda _: "30", "TypeError"),
        (lambda _: True, "TypeError"),
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (lambda: 1, "TypeError"),
        (failing, "SystemExit"),
    ],
    ids=["nan", "inf", "None", "text", "bool", "raises", "arguments", "exits"],
)
def test_a_failing_backoff_function_falls_back_to_the_default_and_is_reported(rule, reason):
    told: list[str] = []
    assert Backoff.parse(rule).delay_s(2, middle, told.append) == 300
    assert len(told) == 1
    assert reason in told[0]
    assert Backoff.parse(rule).delay_s(2, middle) == 300


@given(
    base_s=st.floats(0, DELAY_S_MAX),
    factor=st.floats(1, 1000),
    cap_s=st.floats(0, DELAY_S_MAX),
    jitter=st.floats(0, 1),
    failures=st.integers(-1, 10**9),
    drawn=st.floats(0, 1, exclude_max=True),
)
def test_every_delay_is_finite_and_within_bounds(base_s, factor, cap_s, jitter, failures, drawn):
    delay_s = Backoff(base_s, factor, cap_s, jitter).delay_s(failures, lambda: drawn)
    assert 0 <= delay_s <= min(cap_s * (1 + jitter), DELAY_S_MAX)


@given(base_s=st.floats(0.001, 1e6), factor=st.floats(1, 1000), failures=st.integers(1, 10**6))
def test_without_jitter_delays_never_decrease(base_s, factor, failures):
    backoff = Backoff(base_s, factor, DELAY_S_MAX, jitter=0)
    assert backoff.delay_s(failures, middle) <= backoff.delay_s(failures + 1, middle)


@pytest.mark.parametrize("factor", [2, 1000, 1.5, 1])
def test_any_number_of_failures_is_answered_at_once(factor: float) -> None:
    """A row may have any; and the numbers of a setting are often ints, whose powers grow without bound."""
    policy = Backoff(base_s=30, factor=factor, cap_s=1800, jitter=0)
    for failures in (10_000, 2_147_483_647):
        assert policy.delay_s(failures) == (30 if factor == 1 else 1800)
