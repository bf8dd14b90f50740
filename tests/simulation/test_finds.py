"""Regressions found by the simulation, each as its smallest schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.simulation.loop import simulate
from tests.simulation.network import CALM, Weather
from tests.simulation.plans import Act, Doing, Profile, draw
from tests.simulation.world import World

pytestmark = pytest.mark.slow("whole days of a fleet in simulated time")

NO_SETTLES = Weather(refused_share=1.0, verbs=("completed",))


def burst(at_s: float, count: int, *, takes_s: float = 0.001) -> Act:
    jobs = [{"doings": [Doing("ok", takes_s)], "timeout_s": None} for _ in range(count)]
    return Act(at_s, "insert", {"queue": "q0", "priority": 0, "due_in_s": 0, "jobs": jobs})


def play_acts(*acts: Act, weather: Weather = CALM) -> None:
    any_plan = draw(Profile(), random.Random(0))  # noqa: S311 - repeatable
    plan = replace(any_plan, slots={"q0": 5}, acts=list(acts), weather=weather)
    simulate(0, lambda loop: World(loop, plan).live())


def test_a_due_job_does_not_busy_loop_while_a_claim_waits_for_a_settle() -> None:
    """At a limit the claim waits some 20 ms for the next settle; with a due job it used to busy-loop for that time."""
    play_acts(Act(0.0, "set", {"queue": "q0", "max_running": 3}), burst(0.1, 6), weather=NO_SETTLES)
