"""What a release does not know it does not decide, whatever is started and stopped in a rolling deployment."""

from __future__ import annotations

import os
from typing import Any

import asyncpg
import pytest

from .releases import Situation

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

SEEDS = 100 if os.environ.get("PGWORKD_TEST_SWEEPS") == "all" else 12


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_a_deployment_keeps_budgets_order_expiry_and_ends_with_the_new_rule(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.DELAY_S", 0.5)  # and that at most
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.RECHECK_S", 0.5)
    await Situation.of(seed).play(dsn, db)
