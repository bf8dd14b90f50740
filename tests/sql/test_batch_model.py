"""Batches under any interleaving of sessions, with rollbacks, crashes and cancellations at every step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kits.models import QUICK, Step, playing

from .tree_world import TreeWorld

ADDS = ["add", "add", "insert", "insert", "child", "seal", "seal"]
RUNS = ["claim", "claim", "claim", "complete", "complete", "complete", "complete", "fail", "release", "end"]
ENDS = ["commit", "rollback", "rollback", "tick", "crash", "expire", "unblock"]
STOPS = ["cancel", "retry", "retry", "cancel_batch"]


def steps(whats: list[str]) -> st.SearchStrategy[list[Step]]:
    """Generates schedules of steps."""
    step = st.builds(
        Step,
        session=st.integers(0, 2),
        what=st.sampled_from(whats),
        which=st.floats(0, 1, allow_nan=False),
        open=st.booleans(),
    )
    return st.lists(step, min_size=15, max_size=40)


@pytest.mark.parametrize("more", [[], [*STOPS, *STOPS, "root"]], ids=["runs", "stops"])
def test_counters_are_exact_and_every_tree_finishes_and_calls_back_once(server_dsn: str, more: list[str]) -> None:
    with playing(server_dsn, TreeWorld) as play:
        QUICK(given(steps=steps([*ADDS, *RUNS, *ENDS, *more]))(lambda steps: play(steps)))()  # noqa: PLW0108 - by name
