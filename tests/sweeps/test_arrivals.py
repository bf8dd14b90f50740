"""At every arrival rate and pattern, no due job waits beside an idle slot, and none is left at the end."""

from __future__ import annotations

import pytest

from .arrivals import Situation, pause_min_s, play

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

SINGLE_INSERTS = [Situation(rate, seconds=3.0) for rate in (60, 95, 110, 140, 190, 260, 380, 700, 2000)]
OTHERS = [
    Situation(110, "poisson", took_ms=5),
    Situation(190, "bursts", took_ms=20, slots=50),
    Situation(600, "bursts", daemons=3),
    Situation(260, "even", 3.0, daemons=2, pause_s=pause_min_s()),
    Situation(140, backlog=3000),
    Situation(700, "poisson", backlog=500, daemons=2, took_ms=1),
    Situation(150, took_ms=60, slots=50, mode="thread"),
    Situation(30, "bursts", took_ms=20, slots=2, mode="process"),
]


@pytest.mark.parametrize("situation", [*SINGLE_INSERTS, *OTHERS], ids=repr)
async def test_no_due_job_waits_beside_an_idle_slot(situation: Situation, dsn: str) -> None:
    assert not await play(situation, dsn)
