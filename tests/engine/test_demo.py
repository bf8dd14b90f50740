"""`pgworkd demo`: runs on real files, and its summary is correct."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from pgworkd.demo import demo, jobs
from pgworkd.demo.view import DemoTally, differences, verdict
from pgworkd.embedded import EmbeddedMissing, EmbeddedPostgres, EmbeddedUnavailable
from pgworkd.errors import PgworkdError, UsageError

pytestmark = pytest.mark.slow("whole demos, each with a server of its own")

# The demo, run twice on the same data; then its database is checked.

TEXTS = {
    "apples.txt": "Red apples and green apples grow on old trees.\n",
    "pears.txt": "Green pears and old apples grow on trees. Größe: 7 m.\n",
    "sub/engine.py": "def claim(queue):\n    return queue[0]\n",
    "large.txt": "".join(f"word{n} " for n in range(5_000)),
}


@dataclasses.dataclass
class Outcome:
    """Two runs of the demo and the resulting database."""

    codes: list[int]
    outputs: list[str]
    files: Path
    dsn: str


class Impatient(io.StringIO):
    """Presses Ctrl-C as soon as it reads something."""

    def write(self, text: str) -> int:
        if not self.getvalue():
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    # Not below tmp_path: as root, pytest makes that inaccessible to the user that runs the server.
    parent = Path(tempfile.mkdtemp(prefix="pgworkd-test-"))
    parent.chmod(0o755)
    files = parent / "files"
    for name, text in TEXTS.items():
        (files / name).parent.mkdir(parents=True, exist_ok=True)
        (files / name).write_text(text, encoding="utf-8")
    (files / "binary.dat").write_bytes(b"\x7fELF\0\1")
    codes, outputs = [], []
    runs: list[tuple[float | None, io.StringIO]] = [(2.2, io.StringIO()), (None, Impatient())]
    for seconds, output in runs:
        with contextlib.redirect_stdout(output):
            codes.append(demo.main(seconds=seconds, data_dir=parent / "data", path=files))
        outputs.append(output.getvalue())
    with EmbeddedPostgres(parent / "data") as server:
        yield Outcome(codes, outputs, files, server.dsn())
    shutil.rmtree(parent)


@pytest.fixture
async def left(outcome: Outcome) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(outcome.dsn)
    yield connection
    connection.terminate()


def test_the_demo_succeeds_and_its_numbers_add_up(outcome: Outcome) -> None:
    assert outcome.codes == [0, 0], outcome.outputs
    for output in outcome.outputs:
        last = output.splitlines()[-1]
        sums = re.match(r"it adds up: (\d+) inserted = (.*?);", last)
        assert sums is not None, last
        parts = [int(number) for number in re.findall(r"(\d+) [a-z]+", sums[2])]
        assert int(sums[1]) == sum(parts) > 0

        lines = output.splitlines()
        table = lines[next(n for n, line in enumerate(lines) if line.startswith("  queue ")) :]
        rows = [line.split() for line in table if re.match(r"  [a-z]+ +\d", line)]
        assert {row[0]: int(row[1]) for row in rows} == jobs.app.queues()
        reported = re.search(r"(\d+) completed, (\d+) dead, (\d+) failures$", last)
        assert reported is not None, last
        completed, dead, failures = (sum(int(row[n]) for row in rows) for n in (6, 5, 7))
        assert completed == int(reported[1])
        if output is outcome.outputs[0]:  # the second shows the dead of the first, too
            assert (dead, failures) == (int(reported[2]), int(reported[3]) - int(reported[2]))
        assert all(len(line) <= 80 for line in table[: len(rows) + 2])


async def test_the_poison_job_is_dead_and_the_unknown_kind_is_not_counted(left: asyncpg.Connection[Any]) -> None:
    query = "SELECT status::text, failures, attempts, error FROM pgworkd.all_jobs WHERE kind = $1 ORDER BY id"
    poisoned = (await left.fetch(query, "crash"))[0]
    assert tuple(poisoned)[:3] == ("dead", 3, 3)
    assert "ended with exit code 7" in poisoned["error"]
    unknown = (await left.fetch(query, demo.UNKNOWN_KIND))[0]
    assert tuple(unknown[:2]) == ("pending", 0)
    assert unknown["error"] == f"no handler for kind '{demo.UNKNOWN_KIND}'"


# Failures.


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_impossible_durations_are_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="--seconds"):
        demo.main(seconds=seconds, data_dir=None, path=None)


def test_a_path_without_text_files_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match=r"--path .*: give a directory with text files"):
            demo.main(seconds=1, data_dir=None, path=path)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EmbeddedUnavailable("no memory"), PgworkdError),
        (EmbeddedMissing("pip install it"), UsageError),
        (PermissionError(13, "Permission denied"), UsageError),
    ],
)
def test_a_server_that_does_not_start_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, expected: type[Exception]
) -> None:
    def start(_: EmbeddedPostgres) -> None:
        raise error

    monkeypatch.setattr(EmbeddedPostgres, "start", start)
    (tmp_path / "text").write_text("some text")
    with pytest.raises(expected, match=r"no memory|pip install it|Permission denied") as caught:
        demo.main(seconds=1, data_dir=None, path=tmp_path)
    assert isinstance(caught.value, UsageError) is (expected is UsageError)


async def test_jobs_that_the_daemon_does_not_report_are_detected(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DemoTally, "__call__", lambda *_: None)
    monkeypatch.setattr(demo, "DRAIN_S", 0.0)
    (tmp_path / "text").write_text("some text")
    assert await demo.Demo(dsn, [tmp_path / "text"], 2.0).run() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"DOES NOT ADD UP: completed: [1-9]\d* in the tables, 0 reported by the daemon", last)


def test_each_mismatch_of_the_summary_is_found() -> None:
    sound: dict[str, Any] = {
        "inserted": 4,
        "found": {"completed": 2, "dead": 1, "pending": 1},
        "stored": {"completed": 5, "dead": 1, "failures": 4},
        "reported": {"completed": 5, "dead": 1, "failures": 4},
        "exit_code": 0,
    }
    assert differences(**sound) == []
    assert verdict(4, sound["found"], sound["reported"]) == (
        "it adds up: 4 inserted = 2 completed + 1 dead + 1 pending; "
        "reported, with batches and schedule: 5 completed, 1 dead, 4 failures"
    )
    changes: list[tuple[dict[str, Any], str]] = [
        ({"inserted": 5}, "5 inserted, 4 found"),
        ({"found": {**sound["found"], "pending": 2}}, "4 inserted, 5 found"),
        ({"found": {"completed": 2, "dead": 1, "missing": 1}}, "4 inserted, 3 found"),
        ({"found": {**sound["found"], "missing": 1}}, "4 inserted, 4 found"),
        ({"stored": {**sound["stored"], "failures": 5}}, "failures: 5 in the tables, 4 reported by the daemon"),
        ({"reported": {**sound["reported"], "completed": 1}}, "completed: 5 in the tables, 1 reported by the daemon"),
        ({"reported": {**sound["reported"], "dead": 0}}, "dead: 1 in the tables, 0 reported by the daemon"),
        ({"exit_code": 1}, "the daemon ended with exit code 1"),
    ]
    for change, message in changes:
        assert differences(**{**sound, **change}) == [message]
