"""How far back a daemon searches for orphaned attempts: to the last search, and fully as often as is cheap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from pgworkd.core.events import Events
from pgworkd.engine.attempts import InFlight
from pgworkd.engine.counters import Counters
from pgworkd.engine.life.maintenance import (
    ORPHANS_COST_SHARE,
    ORPHANS_OVERLAP_S,
    ORPHANS_PAUSE_S_MAX,
    Maintenance,
    Periods,
)
from pgworkd.engine.shared import Shared
from pgworkd.errors import DatabaseBusy
from tests.simulation.loop import SimulationLoop, simulate

PERIOD_S, AGE_S = 30.0, 90.0


def searches(
    took_s: Callable[[int], float], fails: Sequence[int] = (), seconds: float = 3000
) -> list[tuple[float, Any]]:
    """When each search started, and how far it reached back; a full search takes `took_s`."""
    made: list[tuple[float, Any]] = []

    async def running_of(worker_id: int, age_s: float, age_max_s: float | None, queues: Any) -> list[Any]:
        assert (worker_id, age_s) == (1, AGE_S)
        assert queues == (None if age_max_s is None else ["q"])
        made.append((anyio.current_time(), age_max_s))
        if age_max_s is None:
            await anyio.sleep(took_s(len(made)))
        if len(made) in fails:
            raise DatabaseBusy("it took too long")
        return []

    async def run(_: SimulationLoop) -> None:
        store: Any = SimpleNamespace(running_of=running_of, answers=0)
        owner: Any = SimpleNamespace(worker_id=1, may_claim=True, queues=["q"])
        signals: Any = SimpleNamespace(tasks=(), sample_due=None)
        nobody: Any = None
        events = Events()
        maintenance = Maintenance(
            store,
            nobody,
            signals,
            owner,
            Shared(InFlight(), events, Counters(events)),
            periods=Periods(orphans_s=PERIOD_S),
            command_timeout_s=AGE_S / 3,
            on_dead=lambda _: None,
        )
        with anyio.move_on_after(seconds):
            await maintenance._repeat(maintenance._orphans)

    simulate(0, run)
    return made


def test_every_search_is_full_while_that_is_cheap() -> None:
    assert {age_max_s for _, age_max_s in searches(lambda _: 0.002)} == {None}


def test_an_expensive_search_reaches_back_to_the_previous_one() -> None:
    made = searches(lambda _: 0.05)
    assert sum(age_max_s is None for _, age_max_s in made) == pytest.approx(3000 * ORPHANS_COST_SHARE / 0.05, abs=3)
    for (before, _), (began, age_max_s) in pairwise(made):
        assert began - before < PERIOD_S + 0.1
        assert age_max_s is None or age_max_s == pytest.approx(began - before + AGE_S + ORPHANS_OVERLAP_S)


def test_a_full_search_is_made_periodically_whatever_its_cost() -> None:
    whole = [began for began, age_max_s in searches(lambda _: 9.0) if age_max_s is None]
    assert max(later - earlier for earlier, later in pairwise(whole)) < ORPHANS_PAUSE_S_MAX + 2 * PERIOD_S


def test_one_slow_search_does_not_delay_the_next_full_one() -> None:
    assert {age_max_s for _, age_max_s in searches(lambda number: 9.0 if number == 5 else 0.002)} == {None}


def test_the_search_after_a_failed_one_covers_its_range() -> None:
    """A failed search does not count; until one has succeeded, each is a full one."""
    made = searches(lambda _: 30.0, fails=(1, 2, 3, 5), seconds=400)
    assert [age_max_s is None for _, age_max_s in made][:4] == [True] * 4
    assert made[4][1] is not None
    assert made[5][1] == pytest.approx(made[5][0] - made[3][0] + AGE_S + ORPHANS_OVERLAP_S)
