"""Asleep or awake: notified while little happens, polling while much does."""

from __future__ import annotations

import pytest

from pgworkd.attention import (
    AWAKE_LEAST_S,
    BUSY_PER_S_LEAST,
    DROWSY_S,
    NOTIFIED_PER_S_MAX,
    POLL_CAP_S,
    POLL_FIRST_S,
    Attention,
    Next,
)

LONG_AFTER = 100.0


def asleep(now: float = 0.0) -> Attention:
    attention = Attention()
    attention.told(now, asleep=True)
    return attention


def awake(now: float = 0.0) -> Attention:
    """A pool that was asleep until then."""
    attention = asleep(now)
    attention.told(now, asleep=False)
    return attention


def flood(attention: Attention, count: int, *, since: float, until: float) -> None:
    for n in range(count):
        attention.heard(since + (until - since) * n / (count - 1))


def test_at_first_the_database_knows_nothing() -> None:
    assert Attention().announced is None
    assert asleep().announced is True
    assert awake().announced is False


# Asleep


@pytest.mark.parametrize("claimed", [0, 1, 7])
def test_a_sleeper_waits_until_it_is_woken(claimed: int) -> None:
    assert asleep().after_claim(claimed, LONG_AFTER, full=False) == Next(None)


def test_one_full_claim_is_followed_by_the_next_at_once() -> None:
    attention = asleep()
    assert attention.after_claim(5, LONG_AFTER, full=True) == Next(0.0)
    assert attention.after_claim(4, LONG_AFTER, full=False) == Next(None)
    assert attention.after_claim(5, LONG_AFTER, full=True) == Next(0.0), "it takes two in a row"


def test_two_full_claims_in_a_row_wake_it_up() -> None:
    attention = asleep()
    attention.after_claim(5, LONG_AFTER, full=True)
    assert attention.after_claim(5, LONG_AFTER, full=True) == Next(0.0, asleep=False)


def test_a_flood_of_notifications_wakes_it_up() -> None:
    attention = asleep()
    flood(attention, NOTIFIED_PER_S_MAX, since=LONG_AFTER, until=LONG_AFTER + 0.9)
    assert attention.after_claim(1, LONG_AFTER + 0.99, full=False) == Next(None, asleep=False)


def test_so_many_notifications_in_more_than_a_second_are_no_flood() -> None:
    attention = asleep()
    flood(attention, NOTIFIED_PER_S_MAX, since=LONG_AFTER, until=LONG_AFTER + 0.9)
    assert attention.after_claim(1, LONG_AFTER + 1.01, full=False) == Next(None)
    attention = asleep()
    flood(attention, NOTIFIED_PER_S_MAX - 1, since=LONG_AFTER, until=LONG_AFTER + 0.1)
    assert attention.after_claim(1, LONG_AFTER + 0.1, full=False) == Next(None)


def test_one_that_fell_asleep_just_now_polls_on_for_a_while() -> None:
    attention = asleep(LONG_AFTER)
    for claimed in (0, 3, 0):
        assert attention.after_claim(claimed, LONG_AFTER + DROWSY_S - 0.01, full=False) == Next(POLL_CAP_S)
    assert attention.after_claim(5, LONG_AFTER + DROWSY_S - 0.01, full=True) == Next(0.0)
    assert attention.after_claim(0, LONG_AFTER + DROWSY_S + 0.01, full=False) == Next(None)


# Awake


def test_it_polls_at_doubling_intervals_up_to_the_cap_while_it_finds_nothing() -> None:
    attention = awake()
    delays = [attention.after_claim(0, 0.01, full=False).delay_s for _ in range(100)]
    assert delays[:4] == [2 * POLL_FIRST_S, 4 * POLL_FIRST_S, 8 * POLL_FIRST_S, POLL_CAP_S]
    assert set(delays[3:]) == {POLL_CAP_S}


def test_it_polls_soon_again_when_it_has_found_something() -> None:
    attention = awake()
    for _ in range(10):
        attention.after_claim(0, 0.01, full=False)
    assert attention.after_claim(1, 0.01, full=False) == Next(POLL_FIRST_S)
    assert attention.after_claim(0, 0.01, full=False) == Next(2 * POLL_FIRST_S)


def test_after_a_full_claim_it_goes_on_at_once_however_calm_it_was() -> None:
    assert awake().after_claim(5, LONG_AFTER, full=True) == Next(0.0)


def test_when_calm_it_falls_asleep_and_claims_once_more_at_once() -> None:
    attention = awake()
    assert attention.after_claim(1, AWAKE_LEAST_S - 0.01, full=False).asleep is None
    assert attention.after_claim(1, AWAKE_LEAST_S + 0.01, full=False) == Next(0.0, asleep=True)


def test_when_busy_it_stays_awake_and_counts_anew() -> None:
    attention = awake()
    assert attention.after_claim(BUSY_PER_S_LEAST + 50, 1.01, full=False) == Next(POLL_FIRST_S)
    assert attention.after_claim(BUSY_PER_S_LEAST - 40, 1.9, full=False) == Next(POLL_FIRST_S)
    assert attention.after_claim(0, 2.02, full=False) == Next(0.0, asleep=True)


def test_what_full_claims_brought_counts_too() -> None:
    attention = awake()
    attention.after_claim(2 * BUSY_PER_S_LEAST, 0.5, full=True)
    assert attention.after_claim(0, 1.01, full=False).asleep is None


def test_busy_is_a_rate_not_a_number() -> None:
    """Five seconds without a claim, then a few more than one second asks for: that is calm."""
    assert awake().after_claim(BUSY_PER_S_LEAST + 5, 5.0, full=False) == Next(0.0, asleep=True)


def test_what_was_claimed_asleep_does_not_keep_it_awake() -> None:
    attention = asleep()
    attention.after_claim(1000, 1.0, full=True)
    attention.told(LONG_AFTER, asleep=False)
    assert attention.after_claim(0, LONG_AFTER + AWAKE_LEAST_S - 0.01, full=False).asleep is None
    assert attention.after_claim(0, LONG_AFTER + AWAKE_LEAST_S, full=False).asleep is True


def test_notifications_from_before_do_not_wake_it_again() -> None:
    attention = awake()
    flood(attention, NOTIFIED_PER_S_MAX, since=0.5, until=1.2)
    assert attention.after_claim(0, 1.3, full=False) == Next(0.0, asleep=True)
    attention.told(1.3, asleep=True)
    assert attention.after_claim(0, 1.31, full=False) == Next(POLL_CAP_S)


def test_to_be_told_the_same_again_is_not_to_wake_up() -> None:
    """An announcement that is repeated (a new worker id) does not lengthen the time awake."""
    attention = awake()
    attention.told(0.9, asleep=False)
    assert attention.after_claim(0, AWAKE_LEAST_S + 0.01, full=False) == Next(0.0, asleep=True)
