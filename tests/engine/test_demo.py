"""`pgworkd demo`: runs on real files, and its summary is correct."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from pgworkd.demo import demo, jobs
from pgworkd.demo.view import Balance, Tally, verdict
from pgworkd.embedded import EmbeddedPostgres, EmbeddedUnavailable
from pgworkd.errors import PgworkdError, UsageError

# The demo, run twice on the same data; then its database is checked.

TEXTS = {
    "apples.txt": "Red apples and green apples grow on old trees.\n",
    "pears.txt": "Green pears and old apples grow on trees. Größe: 7 m.\n",
    "sub/engine.py": "def claim(queue):\n    return queue.pop()\n",
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
        table = lines[next(n for n, line in enumerate(lines) if line.startswith("queue ")) :]
        rows = {cells[0]: [int(c) for c in cells[1:7]] for cells in map(str.split, table[1 : table.index("")])}
        assert set(rows) == {*jobs.QUEUES, "all"}
        assert all(inserted == sum(states) for inserted, *states in rows.values())
        assert [sum(column) for column in zip(*(rows[q] for q in jobs.QUEUES), strict=True)] == rows["all"]
        assert all(len(line) <= 80 for line in table[: table.index("")])
    assert "carried over from an earlier run" in outcome.outputs[1]


async def test_a_stored_vector_equals_the_one_computed_here(outcome: Outcome, left: asyncpg.Connection[Any]) -> None:
    for name in ("pears.txt", "large.txt"):
        counts: dict[str, int] = {}
        for word in re.split(r"[^a-zA-Zäöüß0-9]+", TEXTS[name].strip(" \n.")):
            counts[word.lower()] = counts.get(word.lower(), 0) + 1
        expected = [0.0] * 256
        for word, count in counts.items():
            number = zlib.crc32(word.encode())
            expected[number % 256] += (1.0 if number >= 2**31 else -1.0) * (1 + math.log(count))
        norm = math.hypot(*expected)

        row = await left.fetchrow("SELECT * FROM demo.embeddings WHERE path = $1", str(outcome.files / name))
        assert row is not None
        assert row["tokens"] == sum(counts.values())
        assert row["vector"] == pytest.approx([x / norm for x in expected], abs=1e-6)
    stored = {row[0] for row in await left.fetch("SELECT path FROM demo.embeddings")}
    assert stored == {str(outcome.files / name) for name in TEXTS}


async def test_neighbours_are_the_most_similar_files(outcome: Outcome, left: asyncpg.Connection[Any]) -> None:
    row = await left.fetchrow("SELECT * FROM demo.neighbours WHERE path = $1", str(outcome.files / "apples.txt"))
    assert row is not None
    assert row["others"][0] == str(outcome.files / "pears.txt")
    vectors = {r["path"]: r["vector"] for r in await left.fetch("SELECT path, vector FROM demo.embeddings")}
    mine = vectors[row["path"]]
    cosine = sum(a * b for a, b in zip(mine, vectors[row["others"][0]], strict=True))
    assert row["similarities"][0] == pytest.approx(cosine, abs=1e-5)
    assert row["similarities"] == sorted(row["similarities"], reverse=True)


async def test_the_poison_job_is_dead_and_the_unknown_kind_is_not_counted(left: asyncpg.Connection[Any]) -> None:
    query = "SELECT status::text, attempts, failures, error FROM pgworkd.all_jobs WHERE kind = $1 ORDER BY id"
    poisoned = (await left.fetch(query, "inference_crash"))[0]
    assert tuple(poisoned)[:3] == ("dead", 3, 3)
    assert "ended with exit code" in poisoned["error"]
    unknown = (await left.fetch(query, jobs.UNKNOWN_KIND))[0]
    assert tuple(unknown) == ("pending", 1, 0, f"no handler for kind '{jobs.UNKNOWN_KIND}'")


async def test_the_recurring_job_ran_and_files_were_surveyed(left: asyncpg.Connection[Any]) -> None:
    assert await left.fetchval("SELECT max(embeddings) FROM demo.counts") >= 1
    done = "SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed' AND coalesce(kind, queue) = $1"
    for kind in ("maintenance", "agent", "agent_gather", "embedding_large", "ocr", "notification"):
        assert await left.fetchval(done, kind) >= 1, kind


async def test_the_wrong_characters_of_ocr_are_counted_correctly(left: asyncpg.Connection[Any]) -> None:
    rows = await left.fetch("SELECT result FROM pgworkd.finished_jobs WHERE queue = 'ocr' AND status = 'completed'")
    for result in (json.loads(row[0]) for row in rows):
        assert result["drawn"] in {Path(name).name.upper() for name in TEXTS}
        assert result["wrong"] == sum(a != b for a, b in zip(result["drawn"], result["read"], strict=True))


# Failures.


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf])
def test_impossible_durations_are_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="--seconds"):
        demo.main(seconds=seconds, data_dir=None, path=None)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--path"):
        demo.main(seconds=1, data_dir=None, path=tmp_path / "none")


@pytest.mark.parametrize(
    ("error", "expected"),
    [(EmbeddedUnavailable("pip install it"), PgworkdError), (PermissionError(13, "Permission denied"), UsageError)],
)
def test_a_server_that_does_not_start_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, expected: type[Exception]
) -> None:
    def start(_: EmbeddedPostgres) -> None:
        raise error

    monkeypatch.setattr(EmbeddedPostgres, "start", start)
    with pytest.raises(expected, match=r"pip install it|Permission denied"):
        demo.main(seconds=1, data_dir=None, path=tmp_path)


async def test_jobs_that_the_daemon_does_not_report_are_detected(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tally, "__call__", lambda *_: None)
    monkeypatch.setattr(demo, "DRAIN_S", 0.0)
    assert await demo.Demo(dsn, tmp_path, 2.0).run() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"DOES NOT ADD UP: completed: [1-9]\d* in the tables, 0 reported by the daemon", last)


def test_each_mismatch_of_the_summary_is_found() -> None:
    sound = Balance(
        inserted={"a": 3, "b": 1},
        found={("a", "completed"): 2, ("a", "dead"): 1, ("b", "pending"): 1},
        failures=4,
        reported={"completed": 2, "dead": 1, "failures": 4},
    )
    assert sound.differences() == []
    assert verdict(sound).startswith("it adds up: 4 inserted = 2 completed + 1 waiting + 1 dead;")
    changes: list[tuple[dict[str, Any], str]] = [
        ({"inserted": {"a": 4, "b": 1}}, "queue a: 4 inserted, 3 found"),
        ({"found": {**sound.found, ("b", "pending"): 2}}, "queue b: 1 inserted, 2 found"),
        ({"found": {**sound.found, ("b", "pending"): 0, ("b", "missing"): 1}}, "queue b: 1 inserted, 0 found"),
        ({"failures": 5}, "failures: 5 in the tables, 4 reported by the daemon"),
        ({"reported": {**sound.reported, "completed": 1}}, "completed: 2 in the tables, 1 reported by the daemon"),
        ({"reported": {**sound.reported, "dead": 0}}, "dead: 1 in the tables, 0 reported by the daemon"),
        ({"without_vector": 2}, "2 completed embeddings without a stored vector"),
        ({"exit_code": 1}, "the daemon ended with exit code 1"),
    ]
    for change, message in changes:
        wrong = dataclasses.replace(sound, **change)
        assert wrong.differences() == [message]
        assert verdict(wrong) == f"DOES NOT ADD UP: {message}"
