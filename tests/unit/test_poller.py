"""How often due jobs are polled for idle pools: once per period, less often if polls are expensive, but bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from pgworkd.core.events import Events
from pgworkd.engine.wake.poller import COST_SHARE, HEAD_COST_SHARE, HEAD_PAUSE_S_MAX, OVERLAP_S, PAUSE_S_MAX, Poller
from pgworkd.errors import DatabaseUnavailable
from tests.simulation.loop import SimulationLoop, simulate

POLL_S = 2.0


def idle_pool() -> Any:
    """A pool that waits for a notification."""
    return SimpleNamespace(
        queue="q", is_idle=True, paused=False, rewound=False, priorities=[5, 0], expect=lambda _: None
    )


def pauses(took_s: Callable[[int], float]) -> list[float]:
    """The pauses, in seconds, between the polls of some minutes, each of which takes `took_s`."""
    begun: list[float] = []
    ended: list[float] = []

    async def next_due(*_: Sequence[object]) -> dict[str, float]:
        begun.append(anyio.current_time())
        await anyio.sleep(took_s(len(begun)))
        ended.append(anyio.current_time())
        return {}

    async def run(_: SimulationLoop) -> None:
        pool = idle_pool()
        store: Any = SimpleNamespace(next_due=next_due)
        fleet: Any = SimpleNamespace(may_claim=True)
        with anyio.move_on_after(200):
            await Poller(store, {"q": pool}, fleet, Events(), POLL_S).run()

    simulate(0, run)
    return [later - earlier for earlier, later in zip(ended, begun[1:], strict=False)]


def test_a_cheap_poll_runs_once_per_period() -> None:
    found = pauses(lambda _: 0.01)
    assert len(found) > 90
    assert found == pytest.approx([POLL_S] * len(found), abs=0.01)


def test_one_slow_poll_does_not_delay_the_next() -> None:
    """It waited behind a stuck claim; the polls after it would otherwise wait ten times as long."""
    assert max(pauses(lambda number: 3.0 if number == 5 else 0.01)) < POLL_S + 0.01


def test_an_expensive_poll_takes_a_bounded_share_of_time() -> None:
    found = pauses(lambda _: 0.5)
    assert found[3:] == pytest.approx([0.5 / COST_SHARE] * len(found[3:]), abs=0.01)


def test_idle_pools_are_polled_for_every_ten_seconds_whatever_the_cost() -> None:
    """Inserts due later than in ten seconds send no notification and rely on this."""
    found = pauses(lambda _: 9.0)
    assert PAUSE_S_MAX == 10
    assert max(found) < PAUSE_S_MAX + 0.01
    assert all(pause_s > POLL_S for pause_s, _ in pairwise(found[1:]))


def ages(
    took_s: float, due: Callable[[int], dict[str, float]] = lambda _: {}, rewound: int = 0
) -> list[tuple[float, float | None]]:
    """When each poll started, and how far it reached back; one from the head takes `took_s`."""
    made: list[tuple[float, float | None]] = []
    pool = idle_pool()

    async def next_due(queues: Sequence[str], ages_s: Sequence[float | None], known: Any) -> dict[str, float]:
        assert (queues, known) == (["q"], [[5, 0]])
        made.append((anyio.current_time(), ages_s[0]))
        if ages_s[0] is None:
            await anyio.sleep(took_s)
        pool.rewound = len(made) == rewound
        return due(len(made))

    async def run(_: SimulationLoop) -> None:
        store: Any = SimpleNamespace(next_due=next_due)
        fleet: Any = SimpleNamespace(may_claim=True)
        with anyio.move_on_after(300):
            await Poller(store, {"q": pool}, fleet, Events(), POLL_S).run()

    simulate(0, run)
    return made


def test_every_poll_starts_at_the_head_while_that_is_cheap() -> None:
    assert {age_s for _, age_s in ages(0.01)} == {None}


def test_an_expensive_poll_reaches_back_to_the_last_one_and_rarely_to_the_head() -> None:
    for took_s, pause_s in ((0.1, 0.1 / HEAD_COST_SHARE), (9.0, HEAD_PAUSE_S_MAX)):
        made = ages(took_s)
        heads = [began for began, age_s in made if age_s is None][2:]
        assert len(heads) > 2
        assert all(pause_s <= later - earlier < pause_s + 2 * POLL_S for earlier, later in pairwise(heads))
        for (before, _), (began, age_s) in pairwise(made):
            assert age_s is None or age_s == pytest.approx(began - before + OVERLAP_S)


def test_a_poll_reaches_back_to_due_jobs_that_were_left_unclaimed() -> None:
    """Such as jobs over a limit: no notification is sent when they can run."""
    made = ages(1.0, lambda number: {"q": -30.0} if number < 6 else {"q": 5.0})
    assert made[4][1] is not None
    assert made[5][1] == pytest.approx(made[5][0] - made[4][0] + 30 + OVERLAP_S)
    assert made[7][1] == pytest.approx(made[7][0] - made[6][0] + OVERLAP_S)


def test_a_poll_after_a_rewind_starts_at_the_head() -> None:
    made = ages(1.0, rewound=5)
    assert made[4][1] is not None
    assert made[5][1] is None
    assert made[6][1] is not None


async def test_a_poll_that_fails_is_noted_until_one_succeeds_or_none_is_needed() -> None:
    """A pool that is idle makes no claim that could fail."""
    outcomes: list[Any] = [DatabaseUnavailable("away"), {}, DatabaseUnavailable("away")]
    pool, noted = idle_pool(), list[tuple[str, str]]()

    async def next_due(*_: object) -> dict[str, float]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return dict(outcome)

    refusals: Any = SimpleNamespace(
        failed=lambda part, *_: noted.append((part, "failed")), passed=lambda part: noted.append((part, "passed"))
    )
    store: Any = SimpleNamespace(next_due=next_due)
    fleet: Any = SimpleNamespace(may_claim=True)
    poller = Poller(store, {"q": pool}, fleet, Events(), POLL_S, refusals)
    for _ in range(3):
        await poller._iteration()
    pool.is_idle = False
    await poller._iteration()
    assert noted == [("poller", "failed"), ("poller", "passed"), ("poller", "failed"), ("poller", "passed")]
