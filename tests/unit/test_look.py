"""How often sleeping pools are told what is due: once a period, more rarely where it is expensive, never too rarely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from pgworkd.events import Events
from pgworkd.look import COST_SHARE, PAUSE_S_MAX, Look
from tests.simulation.loop import SimulationLoop, simulate

POLL_S = 2.0


def pauses(took_s: Callable[[int], float]) -> list[float]:
    """Between the looks of some minutes, each of which takes so long; seconds."""
    begun: list[float] = []
    ended: list[float] = []

    async def next_due(_: Sequence[str]) -> dict[str, float]:
        begun.append(anyio.current_time())
        await anyio.sleep(took_s(len(begun)))
        ended.append(anyio.current_time())
        return {}

    async def run(_: SimulationLoop) -> None:
        pool: Any = SimpleNamespace(queue="q", asleep=True, paused=False, expect=lambda _: None)
        store: Any = SimpleNamespace(next_due=next_due)
        fleet: Any = SimpleNamespace(may_claim=True)
        with anyio.move_on_after(200):
            await Look(store, {"q": pool}, fleet, Events(), POLL_S).run()

    simulate(0, run)
    return [later - earlier for earlier, later in zip(ended, begun[1:], strict=False)]


def test_a_cheap_look_is_made_once_a_period() -> None:
    found = pauses(lambda _: 0.01)
    assert len(found) > 90
    assert found == pytest.approx([POLL_S] * len(found), abs=0.01)


def test_one_look_that_had_to_wait_does_not_put_off_the_next() -> None:
    """It waited behind a claim that hung, and made the looks after it wait ten times as long as itself."""
    assert max(pauses(lambda number: 3.0 if number == 5 else 0.01)) < POLL_S + 0.01


def test_an_expensive_look_takes_its_share_of_the_time() -> None:
    found = pauses(lambda _: 0.5)
    assert found[3:] == pytest.approx([0.5 / COST_SHARE] * len(found[3:]), abs=0.01)


def test_sleepers_are_told_every_ten_seconds_whatever_it_costs() -> None:
    """Inserts that are due later than in ten seconds send no notice: they count on it."""
    found = pauses(lambda _: 9.0)
    assert PAUSE_S_MAX == 10
    assert max(found) < PAUSE_S_MAX + 0.01
    assert all(pause_s > POLL_S for pause_s, _ in pairwise(found[1:]))
