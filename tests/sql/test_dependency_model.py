"""Jobs that depend on others under any interleaving of sessions, with rollbacks, crashes, retries and old snapshots."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.kits.models import QUICK, playing

from .test_batch_model import steps
from .wait_world import WaitWorld

ADDS = ["insert", "after", "after", "after"]
RUNS = ["claim", "claim", "claim", "complete", "complete", "complete", "complete", "fail", "release", "end"]
ENDS = ["commit", "rollback", "rollback", "tick", "crash", "expire"]
MORE = ["old", "old", "cancel", "retry", "retry", "undepend", "edit", "mend"]


@pytest.mark.parametrize("more", [[], MORE], ids=["runs", "more"])
def test_no_job_runs_too_early_and_none_stays_blocked_for_ever(server_dsn: str, more: list[str]) -> None:
    with playing(server_dsn, WaitWorld) as play:
        QUICK(given(steps=steps([*ADDS, *RUNS, *ENDS, *more]))(lambda steps: play(steps)))()  # noqa: PLW0108 - by name
