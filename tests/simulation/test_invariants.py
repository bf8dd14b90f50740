"""Each invariant in a few schedules: PGWORKD_SIMULATIONS sets their number, PGWORKD_SIMULATION_SEED the first seed.

`python -m tests.simulation` runs many more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.invariants import INVARIANTS, PLAYS, Failure, check

pytestmark = pytest.mark.slow("whole days of a fleet in simulated time")

ROOT = Path(__file__).parent.parent.parent
SCHEDULES = int(os.environ.get("PGWORKD_SIMULATIONS", "10"))
SEED = os.environ.get("PGWORKD_SIMULATION_SEED")
HASHES = """
from tests.simulation.invariants import PLAYS
for kind, play in PLAYS.items():
    print(kind, play(4).trace_hash)
"""


def hold(name: str) -> None:
    """Runs the schedules; a failure explains what did not hold, and how to reproduce it."""
    first = SCHEDULES * list(INVARIANTS).index(name)  # invariants that share a kind run different schedules of it
    for seed in range(first, first + SCHEDULES) if SEED is None else [int(SEED)]:
        played = check(name, seed)
        if isinstance(played, Failure):
            again = f"PGWORKD_SIMULATION_SEED={seed} python -m pytest tests/simulation -k {name}"
            pytest.fail(f"{played.said}\nits trace: {played.replay}\nas a test: {again}")


@pytest.mark.parametrize("name", INVARIANTS)
def test_invariant_holds(name: str) -> None:
    """The invariant as stated in `invariants.py`, in each of its schedules."""
    hold(name)


def test_a_failure_explains_how_to_reproduce_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgworkd.core.backoff.DELAY_S_MAX", 1.0)
    with pytest.raises(pytest.fail.Exception, match=r"python -m tests.simulation --invariant backoff --seed \d+"):
        hold("backoff")


def test_a_seed_gives_the_same_trace_in_another_process() -> None:
    """Independently of string hashes and object addresses."""
    runs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", HASHES]
        runs.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    said, again = (run.communicate()[0].splitlines() for run in runs)
    assert [run.returncode for run in runs] == [0, 0]
    assert said == again
    assert len(said) == len(PLAYS)
