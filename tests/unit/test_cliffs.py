"""The benchmark of performance cliffs: a missed bar is reported, and a row that cannot be measured fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from benchmarks.bench import Bench
from benchmarks.cliffs import __main__ as cliffs
from benchmarks.cliffs.stage import BAR
from benchmarks.measure import Line
from benchmarks.processes import BenchmarkError
from benchmarks.server import Server

pytestmark = pytest.mark.slow("whole measurements, though small ones")


@pytest.fixture
async def bench(server_dsn: str, tmp_path: Path) -> AsyncIterator[Bench]:
    """A run of one round beside crowds of a hundred, on the tests' server."""
    server = Server(server_dsn)
    await server.start()
    yield Bench(server, tmp_path, scale=0.001, rounds=1, say=lambda _: None)
    await server.close()


@pytest.mark.parametrize(
    ("row", "lines"),
    [("turns", 2), ("running", 2), ("keyed", 1), ("heartbeat", 4), ("priorities", 1), ("settings", 2), ("depth", 2),
     ("depend", 1), ("parking", 1), ("leftout", 3)],
)  # fmt: skip
async def test_a_row_measures_with_and_without_the_crowd(bench: Bench, row: str, lines: int) -> None:
    found = await cliffs.ROWS[row](bench)
    assert len({(line.what, line.note) for line in found}) == lines
    for line in found:
        assert (line.row, line.unit, len(line.ours), len(line.reference)) == (row, "ms", 1, 1)
        assert line.reached > 0
        assert line.verdict


async def test_a_missed_bar_is_not_an_error_but_a_failed_row_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def missed(_: Bench) -> list[Line]:
        return [Line("settings", "a claim", "ms", [4.0], [2.0], "ms", BAR)]

    async def broken(_: Bench) -> list[Line]:
        raise BenchmarkError("3 of 10 jobs")

    async def refused(_: Bench) -> list[Line]:
        raise asyncpg.UndefinedFunctionError("no such function")

    for row, what in {"settings": missed, "turns": broken, "depth": refused}.items():
        monkeypatch.setitem(cliffs.ROWS, row, what)
    assert await cliffs.measure(bench, ["settings"]) == 0
    said = capsys.readouterr().out
    assert all(word in said for word in ("beside", "alone", "a claim", "4 ms", "2 ms", "≤ 1.5", "missed"))
    assert await cliffs.measure(bench, ["turns", "settings", "depth"]) == 2
    said = capsys.readouterr().out
    assert all(word in said for word in ("3 of 10 jobs", "no such function", "a claim"))
