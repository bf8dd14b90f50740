"""Each statement of a daemon fails with errors of every class, once and for a while."""

from __future__ import annotations

import os

import asyncpg
import pytest

from .errors import CODES, Fault, faults, play, statements
from .together import play_together

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

FAULTS = faults() if os.environ.get("PGWORKD_TEST_SWEEPS") == "all" else faults()[: 2 * len(statements())]
"""The release run has all of them: each statement with each code."""
TOGETHER = 5


def test_any_slice_of_the_cases_covers_every_error_code() -> None:
    assert {(fault.code, fault.always) for fault in FAULTS} == {(code, always) for code in CODES for always in (0, 1)}
    assert {fault.function for fault in FAULTS} == set(statements())
    assert {"claim", "settle_completed", "settle_failed", "rescue", "ensure_schedules", "wanted"} <= set(statements())


@pytest.mark.parametrize("first", range(0, len(FAULTS), TOGETHER))
async def test_no_error_loses_jobs_stalls_a_queue_or_is_retried_without_delay(first: int, server_dsn: str) -> None:
    async def one(fault: Fault, dsn: str) -> list[str]:
        db = await asyncpg.connect(dsn)
        try:
            return await play(fault, db, dsn)
        finally:
            await db.close()

    assert not await play_together(one, FAULTS[first : first + TOGETHER], server_dsn, f"errors_{first}")
