"""What `pgworkd bench` says of its figures: a table of cases, and the numbers that each sentence must name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pgworkd.bench import cpu
from pgworkd.bench.cpu import Reading, used
from pgworkd.bench.figures import BulkFigures, Drain, Figures, Held, Spread
from pgworkd.bench.phases import Plan
from pgworkd.bench.verdict import judge
from pgworkd.cli.bench import RANGES


def spread(p50_ms: float) -> Spread:
    return Spread(p50_ms, 2 * p50_ms, 3 * p50_ms, 100)


def figures(
    *,
    trip_ms: float = 0.1,
    commit_ms: float = 0.3,
    unsynced_ms: float = 0.2,
    held: Held | None = None,
    **drain: Any,
) -> Figures:
    """10,000 jobs in one second on 4 cores; all else is fast and idle unless given."""
    shown = Drain(10_000, 1.0, 0.3, 0.3, 0.2, 0.3, complete=True)
    return Figures(
        round_trip=spread(trip_ms),
        single=spread(commit_ms),
        single_unsynced=spread(unsynced_ms),
        bulk=BulkFigures(10_000, 0.5),
        drain=dataclasses.replace(shown, **drain),
        latency=spread(1.0),
        held=held,
        cores=4,
    )


REMOTE = {"server_s": None, "busiest_s": None, "host_share": None}


@pytest.mark.parametrize(
    ("given", "drain", "enqueue", "named"),
    [
        ({"worker_s": 0.97}, "worker", "none", ["97% of a core", "97 us per job", "--processes"]),
        ({"worker_s": 0.97, **REMOTE}, "worker", "none", ["97% of a core"]),
        ({"worker_s": 0.97, "commit_ms": 9.0}, "worker", "fsync", ["97% of a core", "8.8 ms are fsync"]),
        ({"busiest_s": 0.9, "server_s": 1.2}, "server", "none", ["90% of a core", "120 us per job", "used 30%"]),
        ({"host_share": 0.99, "worker_s": 0.8, "server_s": 2.8}, "machine", "none", ["4 cores", "99% busy"]),
        ({"host_share": 0.99}, "others", "none", ["was 99% busy", "only 15%", "measure again"]),
        ({"commit_ms": 8.2}, "fsync", "fsync", ["8.0 ms", "0.1 ms", "disk", "8.2 ms", "many at once"]),
        ({"commit_ms": 8.2, **REMOTE}, "fsync", "fsync", ["8.0 ms"]),
        ({"trip_ms": 20.0, "commit_ms": 21.0, "unsynced_ms": 20.5}, "network", "network", ["20.0 ms", "nearer"]),
        ({"trip_ms": 2.0, "commit_ms": 9.0, "unsynced_ms": 2.1}, "fsync", "fsync", ["6.9 ms", "2.0 ms"]),
        ({**REMOTE}, "server", "none", ["by elimination", "30% of a core", "0.10 ms", "not visible"]),
        ({}, "unknown", "none", ["30% of a core", "0.10 ms", "busiest session used 20%", "pg_stat_activity"]),
        ({"commit_ms": 0.1}, "unknown", "none", ["waits 0.00 ms"]),
        ({"worker_s": 0.9, "held": Held("pid 7 (x, idle)", 75.0)}, "worker", "none", ["pid 7 (x, idle)", "75 s"]),
    ],
)
def test_the_verdict_names_the_limit_and_its_figures(
    given: dict[str, Any], drain: str, enqueue: str, named: list[str]
) -> None:
    found = judge(figures(**given))
    assert (found.drain, found.enqueue) == (drain, enqueue)
    assert not [text for text in [*named, "10,000 jobs/s"] if text not in found.sentence], found.sentence
    assert found.sentence.endswith(".")
    assert "\n" not in found.sentence


def test_a_held_transaction_is_named_without_control_characters() -> None:
    assert "\x1b" not in judge(figures(held=Held("pid 7 (\x1b[2J)", 75.0))).sentence


def test_percentiles_are_by_nearest_rank() -> None:
    assert Spread.of([0.004, 0.001, 0.002, 0.003]) == Spread(2.0, 4.0, 4.0, 4)
    assert Spread.of([0.001]) == Spread(1.0, 1.0, 1.0, 1)


@pytest.mark.parametrize("jobs", [*RANGES["jobs"], 101, 999, 20_000])
def test_the_phases_write_as_many_jobs_as_were_asked_for(jobs: int) -> None:
    plan = Plan(jobs, 30.0, 200, 10)
    assert 2 * plan.singles + plan.latencies + plan.bulk == jobs
    assert min(plan.singles, plan.latencies, plan.bulk) >= 10


def test_cpu_is_that_of_all_sessions_and_new_ones_count_whole() -> None:
    before, after = Reading(1.0, {1: 5.0}, (10.0, 20.0)), Reading(1.5, {1: 5.25, 2: 0.75}, (11.0, 22.0))
    assert used(before, after) == (0.5, 1.0, 0.75, 0.5)
    assert used(before._replace(sessions_s=None), after) == (0.5, None, None, None)


def test_the_cpu_of_a_process_that_is_not_postgres_is_not_that_of_the_server() -> None:
    assert cpu.read([1]).sessions_s is None
    assert cpu.read([]).sessions_s is None
