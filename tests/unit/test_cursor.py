"""Where claims start: after the rows already claimed, with sweeps for rows that are committed late."""

from __future__ import annotations

import math
from collections.abc import Callable
from uuid import UUID

import pytest

from pgworkd.core.claims import ClaimedJob
from pgworkd.engine.claim.claim_cursor import (
    COST_SHARE,
    LEVELS,
    PERIOD_FIRST_S,
    PRIORITIES_MAX,
    REACH_PERIODS,
    RENEW_EVERY,
    ClaimCursor,
    Keyed,
    Start,
)

HEAD_S = PERIOD_FIRST_S * 2 ** (LEVELS - 1)
HEAD = Start([], [], [])
T = 1_700_000_000.0
QUICK_S = 0.001


def row(run_at: float, number: int = 1, *, priority: int = 0, losses: int = 0) -> ClaimedJob:
    """A claimed row; `number` is its id."""
    return ClaimedJob(UUID(int=number), "k", "{}", 1, 0, 3, None, priority, losses, run_at, run_at, None, None, None)


def claim(cursor: ClaimCursor, now: float, *rows: ClaimedJob, took_s: float = QUICK_S, full: bool = False) -> Start:
    """One claim at that time with that result; returns where it started."""
    start = cursor.start(now)
    cursor.claimed(rows, now + took_s, took_s, full=full)
    return start


def swept(*rows: ClaimedJob, now: float = 0.0) -> ClaimCursor:
    """A cursor that has claimed these rows from the head at `now`: no sweep is due before 20 ms later."""
    cursor = ClaimCursor()
    assert claim(cursor, now, *rows) == HEAD
    return cursor


def place(cursor: ClaimCursor, now: float = 0.005) -> dict[int, tuple[float, int]]:
    """Where a claim starts at a time without a sweep: (run_at, id) by priority."""
    start = cursor.start(now)
    return {p: (run_at, at.int) for p, run_at, at in zip(*start, strict=True)}


def reach(cursor: ClaimCursor, now: float, took_s: float = QUICK_S) -> float | None:
    """How far before T a claim at this time starts, for a cursor whose position is T; None: at the head."""
    start = claim(cursor, now, took_s=took_s)
    return None if start == HEAD else T - start.run_ats[0]


def test_the_first_claim_begins_at_the_head() -> None:
    assert ClaimCursor().start(0.0) == HEAD
    assert ClaimCursor().start(1e6) == HEAD


def test_a_claim_starts_after_the_last_claimed_row_of_each_priority() -> None:
    cursor = swept(row(T, 9, priority=5), row(T + 1, 3, priority=5), row(T - 7, 4), row(T + 2, 8, priority=-1))
    assert cursor.start(0.005) == Start([5, 0, -1], [T + 1, T - 7, T + 2], [UUID(int=3), UUID(int=4), UUID(int=8)])


def test_rows_with_equal_run_at_are_ordered_by_id() -> None:
    cursor = swept(row(T, 5))
    claim(cursor, 0.002, row(T, 3))
    assert place(cursor) == {0: (T, 5)}
    claim(cursor, 0.006, row(T, 6))
    assert place(cursor, 0.008) == {0: (T, 6)}


def test_an_empty_claim_moves_no_position() -> None:
    cursor = swept(row(T, 5), row(T - 1, 6, priority=-1))
    before = place(cursor)
    claim(cursor, 0.005)
    assert place(cursor, 0.008) == before == {0: (T, 5), -1: (T - 1, 6)}


def test_a_partial_sweep_moves_no_position_back() -> None:
    cursor = swept(row(T, 5), row(T, 6, priority=-1))
    start = claim(cursor, 0.03, row(T - 0.01, 1), row(T - 0.01, 2, priority=-1))
    assert max(start.run_ats) <= T - PERIOD_FIRST_S
    assert place(cursor, 0.035) == {0: (T, 5), -1: (T, 6)}


def test_a_full_sweep_is_continued_from_its_last_row() -> None:
    """There may be more late rows after its last row, but only of the last priority that it reached."""
    cursor = swept(row(T, 5, priority=1), row(T, 6))
    claim(cursor, 0.03, row(T - 0.01, 1, priority=1), row(T - 0.01, 2), full=True)
    assert place(cursor, 0.035) == {1: (T, 5), 0: (T - 0.01, 2)}


def test_a_claim_from_the_head_resets_every_position_even_backwards() -> None:
    """The database's clock was set back: new rows lie before everything that was claimed."""
    cursor = swept(row(T, 5, priority=1), row(T, 6))
    assert claim(cursor, HEAD_S + 1, row(T - 3600, 1, priority=1), row(T - 3601, 2)) == HEAD
    assert place(cursor, HEAD_S + 1.005) == {1: (T - 3600, 1), 0: (T - 3601, 2)}


@pytest.mark.parametrize("full", [False, True])
def test_suspects_do_not_move_positions(*, full: bool) -> None:
    cursor = swept(row(T + 9, 9, priority=7, losses=2), row(T, 5), row(T + 5, 6, losses=2))
    assert place(cursor) == {0: (T, 5)}
    claim(cursor, 0.005, row(T - 1, 7, losses=2), row(T + 1, 8), row(T + 5, 6, priority=-1, losses=2), full=full)
    assert place(cursor, 0.008) == {0: (T + 1, 8)}


def test_the_most_recently_used_priorities_are_remembered_up_to_the_limit() -> None:
    cursor = swept(*(row(T, n + 1, priority=-n) for n in range(PRIORITIES_MAX)))
    known = [-n for n in range(PRIORITIES_MAX)]
    assert cursor.start(0.005).priorities == known
    claim(cursor, 0.006, *(row(T, 99, priority=priority) for priority in known if priority != -7))
    claim(cursor, 0.007, row(T, 99, priority=-PRIORITIES_MAX))
    known.remove(-7)
    assert cursor.start(0.008).priorities == [*known, -PRIORITIES_MAX]
    cursor.rewind(T - 1)  # also when all places have moved back in between
    claim(cursor, 0.009, *(row(T, 99, priority=priority) for priority in [*known[1:], 5]))
    assert cursor.start(0.011).priorities == [5, *known[1:], -PRIORITIES_MAX]


# Sweeps


def test_a_sweep_reaches_further_back_the_longer_ago_the_last_one_was() -> None:
    for level in range(LEVELS - 1):
        cursor = swept(row(T))
        period_s = PERIOD_FIRST_S * 2**level
        assert (reach(cursor, period_s * 0.99) or 0.0) <= period_s * 1.001
        cursor = swept(row(T))
        start = cursor.start(period_s + 2 * QUICK_S)
        assert T - start.run_ats[0] >= period_s * 0.999
        assert start.ids == [UUID(int=0)]
    assert reach(swept(row(T)), HEAD_S * 0.99) is not None
    assert reach(swept(row(T)), HEAD_S + 2 * QUICK_S) is None


def test_sweeps_cycle_through_all_reaches_and_a_far_one_covers_nearer_ones() -> None:
    """Per period of the head: one sweep to the head, one half as far, two a quarter as far, and so on."""
    cursor = swept(row(T))
    seen: dict[float | None, int] = {}
    now = 0.0
    while now < 10 * HEAD_S:
        now += 0.005
        far = reach(cursor, now)
        if far != 0.0:
            key = None if far is None else round(far, 4)
            seen[key] = seen.get(key, 0) + 1
    assert 8 <= seen.pop(None) <= 10
    assert len(seen) == LEVELS - 1
    counts = [count for _, count in sorted(seen.items(), reverse=True)]
    for nth, count in enumerate(counts):
        assert 0.5 * 10 * 2**nth <= count <= 10 * 2**nth, counts


@pytest.mark.parametrize("level", range(LEVELS))
def test_a_row_committed_late_is_found_soon_while_the_position_advances(level: int) -> None:
    """Its transaction took 5 ms and commits just after a sweep, in a queue whose position is always now."""
    cursor, now = swept(row(T)), PERIOD_FIRST_S * 2**level + 2 * QUICK_S
    claim(cursor, now, row(T + now))
    committed_at, run_at = now + 0.001, T + now - 0.005
    while True:
        now += 0.002
        assert now < committed_at + 0.1, "due for 100 ms, and not found"
        start = claim(cursor, now, row(T + now))
        if start == HEAD or start.run_ats[0] < run_at:
            return


def test_an_unanswered_claim_is_repeated_from_the_same_position() -> None:
    cursor = ClaimCursor()
    assert cursor.start(0.0) == cursor.start(0.001) == HEAD
    cursor.claimed([row(T)], 0.002, QUICK_S, full=False)
    assert cursor.start(0.003) != HEAD


# Rewinds and rechecks


def test_a_rewind_moves_back_only_positions_past_it() -> None:
    cursor = swept(row(T, 5, priority=1), row(T - 50, 6), row(T - 40, 7, priority=-1))
    cursor.rewind(T - 45)
    assert place(cursor) == {1: (T - 45, 0), 0: (T - 50, 6), -1: (T - 45, 0)}
    claim(cursor, 0.006, row(T - 45, 3, priority=1))
    assert place(cursor, 0.008)[1] == (T - 45, 3)
    cursor = swept(row(T, 5))
    cursor.rewind(T)
    assert place(cursor) == {0: (T, 0)}, "a row of the same instant may have a smaller id"


def test_a_rewind_without_positions_does_nothing() -> None:
    cursor = ClaimCursor()
    cursor.rewind(T)
    assert cursor.start(0.0) == HEAD
    assert place(swept(row(T, 5))) == {0: (T, 5)}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("known", [True, False])
def test_a_rewind_during_a_claim_is_applied_after_it(*, known: bool, full: bool) -> None:
    """The claim may have read before the row was committed: two backdated inserts in a row cause that."""
    cursor = swept(row(T, 5)) if known else ClaimCursor()
    cursor.start(0.005)
    cursor.rewind(T - 3600)
    cursor.rewind(T - 60)
    cursor.claimed([row(T + 1, 6)], 0.006, QUICK_S, full=full)
    assert place(cursor, 0.008) == {0: (T - 3600, 0)}
    claim(cursor, 0.009, row(T - 3600, 7), row(T + 2, 8))
    assert place(cursor, 0.011) == {0: (T + 2, 8)}, "once is enough"


def test_a_recheck_starts_one_claim_at_the_head_immediately() -> None:
    cursor = swept(row(T))
    cursor.recheck_head(1.0)
    assert claim(cursor, 1.0) == HEAD
    assert claim(cursor, 1.002) != HEAD
    assert claim(cursor, 1.0 + HEAD_S / 2) != HEAD
    assert claim(cursor, 1.1 + HEAD_S) == HEAD


def test_a_recheck_is_deferred_for_an_expensive_queue() -> None:
    cursor = ClaimCursor()
    claim(cursor, 0.0, row(T), took_s=0.2)
    again_s = 0.2 + 0.2 / COST_SHARE
    cursor.recheck_head(1.0)
    assert claim(cursor, again_s - 0.01) != HEAD
    cursor.recheck_head(again_s - 0.005)
    assert claim(cursor, again_s + 0.001) == HEAD


def test_a_recheck_never_delays_a_sweep() -> None:
    cursor = ClaimCursor()
    claim(cursor, 0.0, row(T), took_s=1.0)
    cursor.recheck_head(19.0)
    assert claim(cursor, 1.001 + 1.0 / COST_SHARE, took_s=1.0) == HEAD
    cursor = swept(row(T))
    cursor.recheck_head(1.0)
    cursor.recheck_head(5.0)
    assert claim(cursor, 5.0) == HEAD


# What sweeps cost


def test_the_cost_of_a_sweep_is_its_time_beyond_a_normal_claim() -> None:
    """If every claim takes 100 ms, sweeps cost no more than others: after a while nearly every claim is a sweep."""
    cursor, now, sweeps = swept(row(T)), 0.0, 0
    for _ in range(1000):
        now += 0.11
        sweeps += reach(cursor, now, took_s=0.1) != 0.0
    assert sweeps >= 500


@pytest.mark.parametrize("level", range(LEVELS))
def test_one_slow_sweep_does_not_disable_its_reach(level: int) -> None:
    """The database stalled for a second, once. A cheap sweep further back proves the nearer ones cheap."""
    cursor, now = swept(row(T)), PERIOD_FIRST_S * 2**level + 2 * QUICK_S
    slow = reach(cursor, now, took_s=1.0)
    assert slow != 0.0
    seen, again_s = 0, 1.2 / COST_SHARE
    while now < 2 * again_s:
        now += 0.01
        seen += reach(cursor, now) == slow and now > again_s
    assert seen >= 0.2 * again_s / (PERIOD_FIRST_S * 2**level)


@pytest.mark.parametrize(
    ("cost_s", "share"),
    [
        (lambda far_s: 0.5, 0.15),
        (lambda far_s: min(1.0, far_s / HEAD_S), 0.3),
        (lambda far_s: 1.0 if far_s == math.inf else 0.0, 0.06),
    ],
    ids=["all the same", "by reach", "only the head"],
)
def test_expensive_sweeps_take_a_bounded_share_of_time(cost_s: Callable[[float], float], share: float) -> None:
    cursor, now, spent_s, heads = swept(row(T)), 1.0, 0.0, 0
    while now < 600.0:
        start = cursor.start(now)
        far_s = math.inf if start == HEAD else T - start.run_ats[0]
        took_s = QUICK_S + (cost_s(far_s) if far_s else 0.0)
        now += took_s
        cursor.claimed([], now, took_s, full=False)
        spent_s += took_s - QUICK_S
        heads += start == HEAD
        now += 0.01
    assert spent_s <= share * now
    assert heads >= now / (1.3 * max(HEAD_S, cost_s(math.inf) / COST_SHARE)), "rarely, but not never"


# Jobs with keys


def test_the_position_for_keyed_jobs_is_passed_back_to_the_next_claim() -> None:
    cursor = ClaimCursor()
    cursor.start(0.0)
    assert cursor.keyed() == Keyed("{}", None, None, renew=True)
    cursor.claimed([row(T)], QUICK_S, QUICK_S, full=False, places="A")
    assert cursor.start(0.005) == HEAD, "its rows say nothing of the jobs without keys"
    assert cursor.keyed() == Keyed("A", 0.0, None, renew=False)
    cursor.claimed([row(T)] * RENEW_EVERY, 0.005, QUICK_S, full=False, places="A")
    cursor.start(0.03)
    assert cursor.keyed() == Keyed("A", REACH_PERIODS * PERIOD_FIRST_S, None, renew=True)


def test_a_rewind_for_keyed_jobs_lasts_until_a_claim_has_applied_it() -> None:
    cursor = ClaimCursor()
    cursor.start(0.0)
    cursor.claimed([row(T)], QUICK_S, QUICK_S, full=False, places="A")
    cursor.rewind(T - 5)
    cursor.rewind(T - 3)
    cursor.start(0.005)
    assert cursor.keyed() == Keyed("A", 0.0, T - 5, renew=True)
    cursor.claimed([], 0.005, QUICK_S, full=False)  # the queue was paused, or at its limits
    cursor.start(0.006)
    assert cursor.keyed().since == T - 5
    cursor.rewind(T - 1)  # while that claim is made
    cursor.claimed([], 0.006, QUICK_S, full=False, places="B")
    cursor.start(0.007)
    assert cursor.keyed() == Keyed("B", 0.0, T - 1, renew=True)
    cursor.claimed([], 0.007, QUICK_S, full=False, places="C")
    cursor.start(0.008)
    assert cursor.keyed().since is None
