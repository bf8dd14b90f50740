"""A short chaos run; `python -m tests.chaos` does longer ones."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import report
from tests.chaos.drive import Plan, run, workplace

pytestmark = pytest.mark.slow("daemons under faults")

GATEWAY_KINDS = """
    kill kill_gateway kill_gateway_at_a_point freeze_gateway_long terminate_gateway blackhole_gateway postgres_down
    all_gateways_away
""".split()
KINDS = ("kill", "freeze_long", "blackhole_long", "postgres_down", "terminate", "terminate_sessions", "block_loop")


@pytest.mark.parametrize("gateways", [0, 2])
async def test_a_short_chaos_run_has_no_violations(request: pytest.FixtureRequest, gateways: int) -> None:
    pg_bin, kinds = request.config.getoption("--pg-bin"), GATEWAY_KINDS if gateways else KINDS
    count = len(kinds)
    plan = Plan(jobs=600, daemons=3, faults=count, for_s=3.0 * count, kinds=kinds, pg_bin=pg_bin, gateways=gateways)
    said: list[str] = []
    with workplace() as directory:
        lines, violations = report(await run(plan, directory, said.append))
    assert violations == 0, "\n".join([*said, *lines])
