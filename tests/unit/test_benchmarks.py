"""The benchmarks judge correctly, reject invalid runs, and chart what they report."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import asyncpg
import pytest

from benchmarks import chart, report, timeline
from benchmarks.bench import Bench
from benchmarks.drain import drain, drain_row
from benchmarks.measure import Bar, Line, Rates, interleave, longest_idle_s
from benchmarks.processes import BenchmarkError
from benchmarks.server import Server
from benchmarks.systems import ours, verify
from benchmarks.tally import Tallies, Tally

SVG = "{http://www.w3.org/2000/svg}"


# Statistics and judging


@pytest.mark.parametrize(
    ("bar", "reached", "holds"),
    [
        (Bar("at least", 0.6), 0.6, True),
        (Bar("at least", 0.6), 0.59, False),
        (Bar("at least", 0.6), 5.0, True),
        (Bar("at most", 1.2), 1.2, True),
        (Bar("at most", 1.2), 1.21, False),
        (Bar("at most", 1.2), 0.1, True),
        (Bar("at least", 0.6), math.nan, False),
        (Bar("at most", 1.2), math.nan, False),
    ],
)
def test_each_bar_is_judged_in_its_own_direction(bar: Bar, reached: float, holds: bool) -> None:
    assert bar.holds(reached) is holds


def test_a_line_is_judged_by_its_ratio_or_by_its_value_without_a_reference() -> None:
    beside = Line("drain", "x", "jobs/s", [60.0, 61.0, 10.0], [100.0], "bare", Bar("at least", 0.6))
    assert (beside.reached, beside.verdict) == (0.6, "holds")
    alone = Line("memory", "x", "MB", [61.0], bar=Bar("at most", 60))
    assert (alone.reached, alone.verdict) == (61.0, "missed")
    assert Line("keyed", "x", "jobs/s", [1.0], [2.0]).verdict == ""


async def test_contenders_take_turns_at_being_first() -> None:
    order: list[str] = []

    def contender(name: str) -> Any:
        async def run() -> int:
            order.append(name)
            return len(order)

        return run

    found = await interleave({name: contender(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_the_longest_idle_time_of_any_slot_is_found() -> None:
    waves = [(0.01, 1.0), (0.02, 1.0), (1.03, 2.0), (1.01, 2.0)]
    assert longest_idle_s([waves], 2, 0.0) == pytest.approx(0.03)
    late = [(0.2, 1.0), (0.0, 1.0), (1.0, 2.0), (1.0, 2.0)]
    assert longest_idle_s([late], 2, 0.0) == pytest.approx(0.2)
    # The second daemon was idle from the end of its only run until the first one started the last job.
    assert longest_idle_s([[(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)], [(0.0, 0.5)]], 1, 0.0) == pytest.approx(1.5)
    assert longest_idle_s([[(0.0, 1.0), (1.0, 2.0)], []], 1, 0.0) == pytest.approx(1.0)
    # No job is due any more once the last one has started.
    assert longest_idle_s([[(0.0, 1.0)], [(0.0, 9.0)]], 1, 0.0) == 0.0


# Report and chart


def _lines() -> list[Line]:
    return [
        Line("drain", 'kept <b> & "more"', "jobs/s", [90_123.0, 95_000.0], [150_000.0], "bare", Bar("at least", 0.6)),
        Line("latency", "p99", "ms", [9.0], [1.0], "bare", Bar("at most", 2)),
        Line("memory", "idle", "MB", [math.nan], bar=Bar("at most", 60)),
        Line("keyed", "no bar", "jobs/s", [1.0], [1.0], "none"),
    ]


def test_the_chart_is_well_formed_and_labelled() -> None:
    rates = [Rates("drain & more", "jobs/s", {"pgworkd": [90_000.0], "bare <loop>": [150_000.0], "none": []})]
    text = chart.svg("Title & co", "today", _lines(), rates)
    root = ElementTree.fromstring(text)  # noqa: S314 - our own text
    said = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert {"Title & co", "today", "drain & more, jobs/s", "bare <loop>", "90,000", "150,000"} <= set(said)
    assert any("kept <b>" in each for each in said)
    assert any("missed" in each for each in said)
    assert any("holds" in each for each in said)
    assert "prefers-color-scheme: dark" in text
    widths = [float(rect.attrib["width"]) for rect in root.iter(f"{SVG}rect")]
    assert all(0 < width <= chart.PLOT for width in widths)


def test_the_report_is_json_with_all_samples(tmp_path: Path) -> None:
    report.write_json(tmp_path / "found.json", report.document(_lines(), [], {"rounds": 2}, {"peer": "1.0"}))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["lines"][0]["ours"] == [90_123.0, 95_000.0]
    assert [line["verdict"] for line in found["lines"]] == ["holds", "missed", "missed", ""]
    assert found["versions"]["peer"] == "1.0"
    assert {"cpu", "cores", "memory_gib"} <= found["machine"].keys()


# Processes


def test_the_driver_reads_a_workers_counters(tmp_path: Path) -> None:
    tally, seen = Tally(str(tmp_path)), Tallies(tmp_path)
    assert (seen.calls(), seen.first_ns()) == (0, None)
    tally.called()
    tally.called()
    tally.note(5, -6)
    assert seen.calls() == 2
    assert (seen.first_ns() or 0) > 0
    assert seen.notes() == {os.getpid(): [5, -6]}


# The whole


@pytest.fixture
async def bench(server_dsn: str, tmp_path: Path) -> AsyncIterator[Bench]:
    """A run of one round with a few hundred jobs on the tests' server."""
    server = Server(server_dsn)
    await server.start()
    yield Bench(server, tmp_path, scale=0.004, rounds=1, say=lambda _: None)
    await server.close()


@pytest.mark.slow("a whole measurement, though a small one")
async def test_the_drain_row_measures_and_cleans_up(bench: Bench, server_dsn: str) -> None:
    lines = await drain_row(bench)
    assert [(line.bar is not None, bool(line.verdict)) for line in lines] == [(True, True)] * 3 + [(False, False)]
    assert all(line.reached > 0 for line in lines)
    (sample,) = bench.kept["drain"]["pgworkd"]
    assert sample.worker_us > 0
    await bench.server.close()
    connection = await asyncpg.connect(server_dsn)
    assert await connection.fetchval("SELECT count(*) FROM pg_database WHERE datname LIKE 'pgworkd_bench_%'") == 0
    await connection.close()


async def test_a_worker_that_cannot_start_fails_the_row(bench: Bench) -> None:
    broken = replace(ours(), command=[sys.executable, "-c", "raise SystemExit('no worker')"])
    with pytest.raises(BenchmarkError, match="no worker"):
        await drain(bench, broken, 100)


async def test_lost_and_duplicate_runs_invalidate_a_measurement(db: asyncpg.Connection[Any]) -> None:
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'bench' FROM generate_series(1, 3)")
    since = datetime.now(UTC)
    await verify(ours(), db, 0, 3, since)
    with pytest.raises(BenchmarkError, match="5 handler calls for 7 of 10"):
        await verify(ours(), db, 5, 10, since)  # lost, or never run
    with pytest.raises(BenchmarkError, match="8 handler calls for 7 of 10"):
        await verify(ours(), db, 8, 10, since)  # one ran twice
    with pytest.raises(BenchmarkError, match="0 completed jobs in the history"):
        await verify(ours(), db, 7, 10, since)


# The timeline


def test_a_timeline_tells_who_ran_and_who_waited_for_a_core() -> None:
    ms = 1_000_000
    worker = timeline.Process("worker", [(n / 1000, n * ms // 2, n * ms // 4) for n in range(1000)])
    idle = timeline.Process("idle <session>", [(n / 1000, 7, 7) for n in range(1000)])
    half_idle = timeline.Process("claim", [(n / 1000, max(0, n - 500) * ms, 0) for n in range(1000)])
    assert worker.shares(0.1, 0.9) == pytest.approx((0.5, 0.25))
    assert half_idle.shares(0.0, 0.4) == (0.0, 0.0)
    assert half_idle.shares(2.0, 3.0) == (0.0, 0.0)
    rows = timeline.table([worker, idle, half_idle], 0.0, 0.999).splitlines()
    assert [row.split()[0] for row in rows[1:-1]] == ["worker", "claim"]
    assert rows[-1].startswith("1.00 cores")
    picture = ElementTree.fromstring(timeline.svg([worker, idle, half_idle], 0.4))  # noqa: S314 - our own text
    names = [each.text for each in picture.iter(f"{SVG}text")][1:]
    assert names == ["worker", "claim"]
    orange = [float(each.get("height", 0)) for each in picture.iter(f"{SVG}rect") if each.get("fill") == "#d1642a"]
    assert max(orange) == pytest.approx(11, abs=3), "a quarter of a lane"
