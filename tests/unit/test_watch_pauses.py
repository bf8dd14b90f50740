"""How often a gateway looks for what its workers do not know that they run: within seconds, unless that costs much."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from pgworkd.core.events import Events
from pgworkd.gateway.workers.watch import PAUSE_S_MAX, PERIOD_S, Watch
from tests.simulation.loop import SimulationLoop, simulate


class OneWorker(list[Any]):
    """The workers of a gateway that knows one, which runs nothing."""

    def forget_silent(self) -> None: ...

    def compare(self, *_: Any) -> None: ...


def pauses(took_s: float, seconds: float) -> list[float]:
    """Between the begins of two looks each."""
    began: list[float] = []

    async def work_of(_: Any) -> tuple[dict[int, dict[str, int]], list[Any]]:
        began.append(anyio.current_time())
        await anyio.sleep(took_s)
        return {}, []

    async def run(_: SimulationLoop) -> None:
        store: Any = SimpleNamespace(work_of=work_of)
        workers: Any = OneWorker([SimpleNamespace(id=1, slots={}, is_full=False, not_listed=lambda _: [])])
        with anyio.move_on_after(seconds):
            await Watch(store, workers, Events(), lambda _: None, lambda _: None).run()

    simulate(0, run)
    return [after - before for before, after in pairwise(began)]


@pytest.mark.parametrize(
    ("took_s", "at_most_s"),
    [(0.001, PERIOD_S), (0.05, PERIOD_S), (0.1, 2 * PERIOD_S), (1.0, 20 * PERIOD_S), (60.0, PAUSE_S_MAX)],
)
def test_a_look_takes_a_hundredth_of_the_time_at_most_and_comes_within_seconds(took_s: float, at_most_s: float) -> None:
    found = pauses(took_s, 20 * PAUSE_S_MAX)
    assert max(found) <= at_most_s + took_s + 0.01
    assert found[-1] >= min(100 * took_s, PAUSE_S_MAX)
