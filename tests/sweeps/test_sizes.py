"""Whatever the sizes, slots and connection: jobs make progress, other queues keep running, memory is bounded."""

from __future__ import annotations

import pytest

from .sizes import LARGEST, Situation, play

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

SITUATIONS = [
    Situation(0, LARGEST, 1_000, 1e6, 10),  # in sequence these would delay all else for half a minute
    Situation(LARGEST, 0, 1_000, 2.5e6, 5),
    Situation(130_000, 130_000, 100, 1e6, 5),
    Situation(3_000, 3_000, 1_000, 1e6, 5),
]


@pytest.mark.parametrize("situation", SITUATIONS, ids=repr)
async def test_jobs_of_any_size_make_progress(situation: Situation, dsn: str) -> None:
    assert not await play(situation, dsn)
