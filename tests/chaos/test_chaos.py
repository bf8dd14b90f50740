"""A short chaos run; `python -m tests.chaos` does longer ones."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import report
from tests.chaos.drive import Plan, run, workplace

KINDS = ("kill", "freeze_long", "blackhole_long", "postgres_down", "terminate", "terminate_sessions", "block_loop")


async def test_a_short_chaos_run_has_no_violations(request: pytest.FixtureRequest) -> None:
    pg_bin = request.config.getoption("--pg-bin")
    plan = Plan(jobs=600, daemons=3, faults=len(KINDS), for_s=21.0, kinds=KINDS, pg_bin=pg_bin)
    said: list[str] = []
    with workplace() as directory:
        lines, violations = report(await run(plan, directory, said.append))
    assert violations == 0, "\n".join([*said, *lines])
