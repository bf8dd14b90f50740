"""Keys and limits under any interleaving of sessions, with rollbacks, crashes and changed limits at every step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.models import QUICK, Step, playing

from .flow_world import FlowWorld

SETTLES = ["complete", "fail", "fail", "release", "release", "end", "complete", "complete"]
PLAIN = ["insert", "insert", "claim", "claim", "claim", "tick", "commit", "rollback", "cancel", "retry", "crash"]
LIMITS = {"max_running": 2, "limit_per_key": 1}
RATES: dict[str, Any] = {
    "rate": 5,
    "rate_period_s": 1.0,
    "rate_burst": 3,
    "rate_per_key": 2,
    "rate_per_key_period_s": 1.0,
    "rate_per_key_burst": 2,
}


def steps(whats: list[str], keys: list[str]) -> st.SearchStrategy[list[Step]]:
    """Generates schedules: most begin with jobs that compete."""
    step = st.builds(
        Step,
        session=st.integers(0, 2),
        what=st.sampled_from(whats),
        which=st.floats(0, 1, allow_nan=False),
        key=st.sampled_from(keys),
        open=st.booleans(),
    )
    first = st.builds(
        Step, st.integers(0, 2), st.just("insert"), st.floats(0, 1), st.just(False), st.sampled_from(keys)
    )
    heads, tails = st.lists(first, min_size=1, max_size=4), st.lists(step, min_size=12, max_size=28)
    return st.builds(lambda head, tail: head + tail, heads, tails)


def _holds(server_dsn: str, whats: list[str], keys: list[str], limits: dict[str, Any]) -> None:
    with playing(server_dsn, FlowWorld) as play:
        QUICK(given(steps=steps(whats, keys))(lambda steps: play(steps, limits)))()


def test_jobs_of_a_serialize_key_run_one_at_a_time_in_order_and_none_is_stuck(server_dsn: str) -> None:
    _holds(server_dsn, PLAIN + SETTLES, ["a-", "a-", "b-", "--"], {})


def test_keys_whose_jobs_are_edited_make_progress(server_dsn: str) -> None:
    _holds(server_dsn, [*PLAIN, *SETTLES, "edit", "edit"], ["a-", "a-", "b-"], {})


def test_keys_make_progress_after_a_row_was_locked(server_dsn: str) -> None:
    _holds(server_dsn, [*PLAIN, *SETTLES, "lock", "lock"], ["a-", "a-", "b-"], {})


def test_limits_hold_in_every_snapshot_while_they_change(server_dsn: str) -> None:
    _holds(server_dsn, [*PLAIN, *SETTLES, "limits"], ["-x", "-y", "--", "ax", "ay"], LIMITS)


@pytest.mark.parametrize("more", [{}, LIMITS, {"fair": True}])
def test_rates_hold_in_every_window(server_dsn: str, more: dict[str, Any]) -> None:
    _holds(server_dsn, PLAIN + SETTLES, ["-x", "-y", "--", "ax", "ay"], RATES | more)
