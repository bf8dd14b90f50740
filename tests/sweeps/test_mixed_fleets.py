"""Two versions of an application and its settings side by side: each job runs once, and promptly."""

from __future__ import annotations

import os
from typing import Any

import asyncpg
import pytest

from .mixed_fleets import Situation

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

SEEDS = 60 if os.environ.get("PGWORKD_TEST_SWEEPS") == "all" else 8


@pytest.mark.parametrize("seed", range(SEEDS))
async def test_each_job_runs_once_and_promptly(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # During a restart no daemon handles some kinds for a moment.
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.DELAY_S", 1.0)
    monkeypatch.setattr("pgworkd.engine.run.unknown_kinds.RECHECK_S", 1.0)
    await Situation.of(seed).play(dsn, db)
