"""What `pgworkd bench` says of its figures: a table of cases, and the numbers that each sentence must name."""

from __future__ import annotations

from typing import Any

import pytest

from pgworkd.bench.measure import Drain, Times, sessions_s
from pgworkd.bench.run import Plan
from pgworkd.bench.verdict import Figures, judge
from pgworkd.cli.bench import RANGES


def figures(*, trip_ms: float = 0.1, commit_ms: float = 0.3, unsynced_ms: float = 0.2, **given: Any) -> Figures:
    """10,000 jobs in one second on 4 cores; all else is fast and idle unless given."""
    drain = Drain(10_000, 1.0, given.pop("worker_s", 0.3), given.pop("server_s", 0.3))
    times = Times([trip_ms]), Times([commit_ms]), Times([unsynced_ms])
    others = {"complete": True, "busiest_s": 0.2, "host_share": 0.3, "latency": Times([1.0]), "held": None, "cores": 4}
    return Figures(*times, bulk=Drain(10_000, 0.5), drain=drain, **(others | given))


REMOTE = {"server_s": None, "busiest_s": None, "host_share": None}


@pytest.mark.parametrize(
    ("given", "limit", "named"),
    [
        ({"worker_s": 0.97}, "worker", ["97% of a core", "97 us per job", "--processes"]),
        ({"worker_s": 0.97, **REMOTE}, "worker", ["97% of a core"]),
        ({"worker_s": 0.97, "commit_ms": 9.0}, "worker", ["97% of a core"]),
        ({"busiest_s": 0.9, "server_s": 1.2}, "server", ["90% of a core", "120 us per job", "used 30%"]),
        ({"host_share": 0.99, "worker_s": 0.8, "server_s": 2.8}, "machine", ["4 cores", "99% busy", "this run 90%"]),
        ({"host_share": 0.99}, "machine", ["99% busy", "with this run 15%", "what else runs here"]),
        ({"commit_ms": 8.2}, "fsync", ["waits 8.00 ms", "0.10 ms", "disk"]),
        ({"commit_ms": 8.2, **REMOTE}, "fsync", ["8.00 ms"]),
        ({"trip_ms": 20.0, "commit_ms": 21.0, "unsynced_ms": 20.5}, "network", ["20.00 ms", "nearer"]),
        ({"trip_ms": 2.0, "commit_ms": 9.0, "unsynced_ms": 2.1}, "fsync", ["6.90 ms", "2.00 ms"]),
        ({**REMOTE}, "server", ["30% of a core", "0.10 ms", "not visible"]),
        ({}, "unknown", ["30% of a core", "0.10 ms", "busiest session used 20%", "pg_stat_activity"]),
        ({"commit_ms": 0.1}, "unknown", ["waits 0.00 ms"]),
        ({"worker_s": 0.9, "held": ("pid 7 (x, idle)", 75.0)}, "worker", ["pid 7 (x, idle)", "75 s"]),
    ],
)
def test_the_verdict_names_the_limit_and_its_figures(given: dict[str, Any], limit: str, named: list[str]) -> None:
    found, sentence = judge(figures(**given))
    assert found == limit
    assert not [text for text in [*named, "10,000 jobs/s"] if text not in sentence], sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_held_transaction_is_named_without_control_characters() -> None:
    assert "\x1b" not in judge(figures(held=("pid 7 (\x1b[2J)", 75.0)))[1]


@pytest.mark.parametrize("jobs", [*RANGES["jobs"], 101, 999, 20_000])
def test_the_phases_write_as_many_jobs_as_were_asked_for(jobs: int) -> None:
    plan = Plan(jobs, 30.0, 200, 10)
    assert 2 * plan.singles + plan.latencies + plan.bulk == jobs
    assert min(plan.singles, plan.latencies, plan.bulk) >= 10


def test_the_cpu_of_a_process_that_is_not_postgres_is_not_that_of_the_server() -> None:
    assert sessions_s([1]) is None
    assert sessions_s([]) is None
