"""The exceptions that handlers raise."""

import math
import pickle
from datetime import timedelta

import pytest

from pgworkd.errors import DELAY_S_MAX, PermanentError, RetryAfter, Snooze, UsageError


@pytest.mark.parametrize(
    ("delay", "delay_s"),
    [
        (0, 0.0),
        (1.5, 1.5),
        (timedelta(minutes=2), 120.0),
        (DELAY_S_MAX, DELAY_S_MAX),
        (timedelta(366), DELAY_S_MAX),
    ],
)
@pytest.mark.parametrize("kind", [Snooze, RetryAfter])
def test_delays_are_seconds_or_timedeltas_and_can_be_pickled(kind, delay, delay_s):
    error = pickle.loads(pickle.dumps(kind(delay)))  # noqa: S301
    assert error.delay_s == delay_s
    assert f"{delay_s:g} s" in str(error)


@pytest.mark.parametrize(
    "delay",
    [
        -1,
        -0.001,
        math.nan,
        math.inf,
        DELAY_S_MAX + 1,
        10**5000,
        True,
        "5",
        None,
        timedelta(-1),
        timedelta.max,
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("kind", [Snooze, RetryAfter])
def test_an_out_of_bounds_delay_is_rejected(kind, delay):
    with pytest.raises(UsageError, match=kind.__name__):
        kind(delay)


def test_exceptions_for_handlers_are_separate_from_pgworkds_errors():
    assert str(RetryAfter(5, "rate limited")) == "rate limited"
    for kind in (PermanentError, Snooze, RetryAfter):
        assert not issubclass(kind, UsageError.__base__)
