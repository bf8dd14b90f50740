"""Idle or polling: notified at a low rate of jobs, polling at a high one, and always one of the two."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.engine.claim.poll_mode import (
    FOUND_PER_S_LEAST,
    NOTIFIED_PER_S_MAX,
    POLL_CAP_S,
    POLL_FIRST_S,
    POLL_ON_S,
    POLLING_LEAST_S,
    SLEEP_S_MAX,
    PollMode,
)
from tests.kits.models import examples

LONG_AFTER = 100.0


def idle(now: float = 0.0) -> PollMode:
    mode = PollMode()
    mode.record_announcement(now, idle=True)
    return mode


def polling(now: float = 0.0) -> PollMode:
    """A pool that was idle until then."""
    mode = idle(now)
    mode.record_announcement(now, idle=False)
    return mode


def iteration(mode: PollMode, claimed: int, now: float, *, full: bool = False) -> tuple[float, bool | None]:
    """One iteration of a pool: seconds to the next, and what was announced."""
    announced = mode.after_claim(claimed, now, full=full)
    if announced is not None:
        mode.record_announcement(now, idle=announced)
    return mode.sleep_s(mode.next_claim_s(now)), announced


def flood(mode: PollMode, count: int, *, since: float, until: float) -> None:
    for n in range(count):
        mode.notified(since + (until - since) * n / (count - 1))


def test_initially_nothing_is_announced() -> None:
    assert PollMode().announced is None
    assert idle().announced is True
    assert polling().announced is False


# The rule

steps = st.tuples(
    st.sampled_from(["claim", "full claim", "empty claim", "notified", "flood", "forgotten", "idle", "polling"]),
    st.floats(0.0, 3.0),
)


@given(st.lists(steps, max_size=40), st.sampled_from([0.0, 0.3, math.inf]))
@examples(500)
def test_a_pool_not_announced_as_idle_always_has_a_next_iteration(
    history: list[tuple[str, float]], wish_s: float
) -> None:
    mode, now = PollMode(), 0.0
    for step, after_s in history:
        now += after_s
        delay_s = wish_s
        match step:
            case "claim" | "full claim" | "empty claim":
                delay_s, _ = iteration(mode, int(step != "empty claim"), now, full=step == "full claim")
            case "notified":
                mode.notified(now)
            case "flood":
                flood(mode, NOTIFIED_PER_S_MAX, since=now, until=now + 0.5)
                delay_s, _ = iteration(mode, 1, now + 0.6)
            case "forgotten":
                mode.announced = None
            case "idle" | "polling":
                mode.record_announcement(now, idle=step == "idle")
        assert mode.announced is True or mode.sleep_s(delay_s) <= SLEEP_S_MAX


# Idle


@pytest.mark.parametrize("claimed", [0, 1, 7])
def test_an_idle_pool_waits_until_it_is_notified(claimed: int) -> None:
    assert iteration(idle(), claimed, LONG_AFTER) == (math.inf, None)


def test_a_full_claim_is_followed_by_another_immediately() -> None:
    mode = idle()
    assert iteration(mode, 5, LONG_AFTER, full=True) == (0.0, None)
    assert iteration(mode, 4, LONG_AFTER) == (math.inf, None)
    assert iteration(mode, 5, LONG_AFTER, full=True) == (0.0, None), "it takes two in a row"


def test_two_full_claims_in_a_row_start_polling() -> None:
    mode = idle()
    iteration(mode, 5, LONG_AFTER, full=True)
    assert iteration(mode, 5, LONG_AFTER, full=True) == (0.0, False)


def test_a_flood_of_notifications_starts_polling_immediately() -> None:
    mode = idle()
    flood(mode, NOTIFIED_PER_S_MAX, since=LONG_AFTER, until=LONG_AFTER + 0.9)
    assert iteration(mode, 1, LONG_AFTER + 0.99) == (POLL_FIRST_S, False)


def test_the_same_notifications_over_more_than_a_second_are_not_a_flood() -> None:
    mode = idle()
    flood(mode, NOTIFIED_PER_S_MAX, since=LONG_AFTER, until=LONG_AFTER + 0.9)
    assert iteration(mode, 1, LONG_AFTER + 1.01) == (math.inf, None)
    mode = idle()
    flood(mode, NOTIFIED_PER_S_MAX - 1, since=LONG_AFTER, until=LONG_AFTER + 0.1)
    assert iteration(mode, 1, LONG_AFTER + 0.1) == (math.inf, None)


def test_a_pool_that_just_became_idle_keeps_polling_for_a_while() -> None:
    mode = idle(LONG_AFTER)
    for claimed in (0, 3, 0):
        assert iteration(mode, claimed, LONG_AFTER + POLL_ON_S - 0.01) == (POLL_CAP_S, None)
    assert iteration(mode, 5, LONG_AFTER + POLL_ON_S - 0.01, full=True) == (0.0, None)
    assert iteration(mode, 0, LONG_AFTER + POLL_ON_S + 0.01) == (math.inf, None)


# Polling


def test_poll_intervals_double_up_to_the_cap_while_no_job_is_found() -> None:
    mode = polling()
    delays = [iteration(mode, 0, 0.01)[0] for _ in range(100)]
    assert delays[:4] == [2 * POLL_FIRST_S, 4 * POLL_FIRST_S, 8 * POLL_FIRST_S, POLL_CAP_S]
    assert set(delays[3:]) == {POLL_CAP_S}


def test_finding_a_job_resets_the_poll_interval() -> None:
    mode = polling()
    for _ in range(10):
        iteration(mode, 0, 0.01)
    assert iteration(mode, 1, 0.01) == (POLL_FIRST_S, None)
    assert iteration(mode, 0, 0.01) == (2 * POLL_FIRST_S, None)


def test_while_polling_a_full_claim_is_followed_by_another_immediately() -> None:
    assert iteration(polling(), 5, LONG_AFTER, full=True) == (0.0, None)


def test_a_calm_pool_is_announced_idle_and_claims_once_more() -> None:
    mode = polling()
    assert iteration(mode, 1, POLLING_LEAST_S - 0.01)[1] is None
    assert iteration(mode, 1, POLLING_LEAST_S + 0.01) == (0.0, True)
    assert iteration(mode, 0, POLLING_LEAST_S + 0.02) == (POLL_CAP_S, None)


def find(mode: PollMode, count: int, jobs: int, at: float) -> None:
    """That many claims, each of which finds that many jobs."""
    for _ in range(count):
        iteration(mode, jobs, at)


def test_a_busy_pool_keeps_polling_and_restarts_its_count() -> None:
    mode = polling()
    find(mode, FOUND_PER_S_LEAST + 50, 1, 0.9)
    assert iteration(mode, 1, 1.01) == (POLL_FIRST_S, None)
    find(mode, FOUND_PER_S_LEAST - 40, 1, 1.9)
    assert iteration(mode, 0, 2.02) == (0.0, True)


def test_a_batch_counts_once_whatever_its_size() -> None:
    """Each would send one notification: many jobs in few batches are served faster by those."""
    mode = polling()
    find(mode, FOUND_PER_S_LEAST // 2, 50, 0.9)
    assert iteration(mode, 0, 1.01) == (0.0, True)


@pytest.mark.parametrize("rate", [40, 90, 105, 200])
def test_the_mode_depends_on_the_current_rate_and_not_on_history(rate: int) -> None:
    """After some seconds at one rate of statements, a pool that was idle and one that was polling behave alike."""
    ends = []
    for mode in (idle(), polling()):
        announced = []
        for n in range(rate * 10):
            now = n / rate
            if mode.announced:
                mode.notified(now)
            iteration(mode, 1, now)
            announced.append(mode.announced)
        half = announced[len(announced) // 2 :]
        ends.append(sum(map(bool, half)) / len(half))
    assert abs(ends[0] - ends[1]) < 0.15


def test_busy_is_defined_by_a_rate_and_not_a_count() -> None:
    """Five seconds without a job, then a few more than the threshold of one second: still calm."""
    mode = polling()
    find(mode, FOUND_PER_S_LEAST + 5, 1, 0.5)
    assert iteration(mode, 1, 5.0) == (0.0, True)


def test_jobs_claimed_while_idle_do_not_keep_the_pool_polling() -> None:
    mode = idle()
    find(mode, 1000, 1, 1.0)
    mode.record_announcement(LONG_AFTER, idle=False)
    assert iteration(mode, 0, LONG_AFTER + POLLING_LEAST_S - 0.01)[1] is None
    assert iteration(mode, 0, LONG_AFTER + POLLING_LEAST_S)[1] is True


def test_old_notifications_do_not_restart_polling() -> None:
    mode = polling()
    flood(mode, NOTIFIED_PER_S_MAX, since=0.5, until=1.2)
    assert iteration(mode, 0, 1.3) == (0.0, True)
    assert iteration(mode, 0, 1.31) == (POLL_CAP_S, None)


def test_a_repeated_announcement_does_not_restart_the_period() -> None:
    """A repeated announcement (a new worker id) does not extend the polling period."""
    mode = polling()
    mode.record_announcement(0.9, idle=False)
    assert iteration(mode, 0, POLLING_LEAST_S + 0.01) == (0.0, True)
