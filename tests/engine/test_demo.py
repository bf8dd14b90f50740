"""`pgworkd demo`: runs on real files, does what it says, and its summary adds up."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import random
import re
import shutil
import signal
import tempfile
import zlib
from collections.abc import AsyncIterator, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import demo, demo_jobs
from pgworkd.demo_downstream import Answer, Downstream, post
from pgworkd.demo_view import Balance, Tally, printable, verdict
from pgworkd.embedded import EmbeddedPostgres, EmbeddedUnavailable
from pgworkd.errors import PermanentError, PgworkdError, UsageError

# The demo itself, run twice on the same data; what it left behind is looked at.

TEXTS = {
    "apples.txt": "Red apples and green apples grow on old trees.\n",
    "pears.txt": "Green pears and old apples grow on trees. Größe: 7 m.\n",
    "sub/engine.py": "def claim(queue):\n    return queue.pop()\n",
    "large.txt": "".join(f"word{n} " for n in range(5_000)),
}


@dataclasses.dataclass
class Outcome:
    """Two runs of the demo, and the database they leave."""

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
    # Not below tmp_path: for root, pytest closes that to the user that runs the server.
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


def test_the_demo_ends_well_and_its_numbers_add_up(outcome: Outcome) -> None:
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
        assert set(rows) == {*demo_jobs.QUEUES, "all"}
        assert all(inserted == sum(states) for inserted, *states in rows.values())
        assert [sum(column) for column in zip(*(rows[q] for q in demo_jobs.QUEUES), strict=True)] == rows["all"]
        assert all(len(line) <= 80 for line in table[: table.index("")])
    assert "carried over from an earlier run" in outcome.outputs[1]


async def test_a_stored_vector_is_the_one_we_compute_ourselves(outcome: Outcome, left: asyncpg.Connection[Any]) -> None:
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


async def test_the_poisoned_job_is_dead_and_the_unknown_kind_waits_unspent(left: asyncpg.Connection[Any]) -> None:
    query = "SELECT status::text, attempts, failures, error FROM pgworkd.all_jobs WHERE kind = $1 ORDER BY id"
    poisoned = (await left.fetch(query, "inference_crash"))[0]
    assert tuple(poisoned)[:3] == ("dead", 3, 3)
    assert "ended with exit code" in poisoned["error"]
    unknown = (await left.fetch(query, demo_jobs.UNKNOWN_KIND))[0]
    assert tuple(unknown) == ("pending", 1, 0, f"no handler for kind '{demo_jobs.UNKNOWN_KIND}'")


async def test_the_recurring_job_ran_and_files_were_surveyed(left: asyncpg.Connection[Any]) -> None:
    assert await left.fetchval("SELECT max(embeddings) FROM demo.counts") >= 1
    done = "SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed' AND coalesce(kind, queue) = $1"
    for kind in ("maintenance", "agent", "agent_gather", "embedding_large", "ocr", "notification"):
        assert await left.fetchval(done, kind) >= 1, kind


async def test_what_ocr_read_is_counted_honestly(left: asyncpg.Connection[Any]) -> None:
    rows = await left.fetch("SELECT result FROM pgworkd.finished_jobs WHERE queue = 'ocr' AND status = 'completed'")
    for result in (json.loads(row[0]) for row in rows):
        assert result["drawn"] in {Path(name).name.upper() for name in TEXTS}
        assert result["wrong"] == sum(a != b for a, b in zip(result["drawn"], result["read"], strict=True))


# What ends it badly.


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
def test_a_server_that_does_not_start_is_told_in_our_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, expected: type[Exception]
) -> None:
    def start(_: EmbeddedPostgres) -> None:
        raise error

    monkeypatch.setattr(EmbeddedPostgres, "start", start)
    with pytest.raises(expected, match=r"pip install it|Permission denied"):
        demo.main(seconds=1, data_dir=None, path=tmp_path)


async def test_a_daemon_that_keeps_quiet_is_found_out(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Tally, "__call__", lambda *_: None)
    monkeypatch.setattr(demo, "DRAIN_S", 0.0)
    assert await demo.Demo(dsn, tmp_path, 0.2).run() == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"DOES NOT ADD UP: completed: [1-9]\d* in the tables, 0 reported by the daemon", last)


def test_each_difference_is_found() -> None:
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


# The parts.


def test_only_readable_text_is_taken(tmp_path: Path) -> None:
    wanted = [tmp_path / "a.txt", tmp_path / "deep" / "b.md"]
    unwanted = ("zero", ".hidden", ".git/config", "node_modules/x.js", "data/pgdata/PG_VERSION", "data/password")
    for path in [*wanted, *(tmp_path / name for name in unwanted)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if path.name == "zero" else "some text")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "huge").write_bytes(b"x" * (demo_jobs.FILE_BYTES_MAX + 1))
    (tmp_path / "link").symlink_to(wanted[0])
    (tmp_path / "name-\udcff").write_text("its name is not UTF-8")
    os.mkfifo(tmp_path / "fifo")
    assert [path for path, _ in demo_jobs.text_files(tmp_path)] == wanted
    assert demo_jobs.text_files(tmp_path, deep=False) == [(wanted[0], 9)]
    assert demo_jobs.text_files(tmp_path / "gone") == []


def test_a_file_that_is_gone_is_a_permanent_error_and_odd_bytes_are_not(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="No such file"):
        demo_jobs.read_text(str(tmp_path / "gone"))
    (tmp_path / "odd").write_bytes(b"caf\xe9 \xff\xfe bar")
    assert demo_jobs.embedding_of(demo_jobs.read_text(str(tmp_path / "odd")))[0] == 2


def test_text_without_words_has_the_vector_of_zeros() -> None:
    assert demo_jobs.embedding_of("-- !!") == (0, [0.0] * 256)


def test_every_drawn_text_is_recognised_without_noise() -> None:
    rng = random.Random(1)  # noqa: S311
    for mark in demo_jobs.FONT:
        assert demo_jobs.recognise(demo_jobs.draw(mark * 3, rng, noise=0), 3) == mark * 3
    for _ in range(50):
        text = "".join(rng.choices(list(demo_jobs.FONT), k=rng.randint(1, 24)))
        assert demo_jobs.recognise(demo_jobs.draw(text, rng, noise=0), len(text)) == text


def test_noise_is_mostly_seen_through_and_too_much_is_not() -> None:
    def share_wrong(noise: float) -> float:
        rng = random.Random(2)  # noqa: S311
        wrong = 0
        for _ in range(40):
            text = "".join(rng.choices(list(demo_jobs.FONT), k=10))
            read = demo_jobs.recognise(demo_jobs.draw(text, rng, noise), 10)
            wrong += sum(a != b for a, b in zip(text, read, strict=True))
        return wrong / 400

    assert share_wrong(demo_jobs.NOISE) < 0.05
    assert share_wrong(0.5) > 0.8  # it recognises; it does not know


def test_the_glyphs_differ() -> None:
    shapes = [tuple(rows) for rows in demo_jobs.FONT.values()]
    assert all(len(rows) == demo_jobs.HEIGHT and max(rows) < 32 for rows in shapes)
    for one, other in combinations(shapes, 2):
        assert sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True)) >= 2


@contextlib.asynccontextmanager
async def serving(*moods: str, slow_s: float = 30.0) -> AsyncIterator[Downstream]:
    downstream = Downstream(iter(moods), slow_s)
    async with anyio.create_task_group() as tasks:
        await tasks.start(downstream.serve)
        with anyio.fail_after(10):
            yield downstream
        tasks.cancel_scope.cancel()


async def test_the_downstream_answers_as_its_mood_is() -> None:
    async with serving("ok", "busy", "broken", "ok") as downstream:
        answers: list[Answer] = [await post(downstream.port, "/x", b"{}", key) for key in ("a", "b", "c", "a")]
    assert [answer.status for answer in answers] == [200, 429, 500, 200]
    assert answers[1].headers["retry-after"] == "1"
    assert downstream.accepted == {"a"}
    assert downstream.answered == {"ok": 2, "busy": 1, "broken": 1}


async def test_a_slow_answer_that_nobody_waits_for_takes_nothing() -> None:
    async with serving("slow", "ok") as downstream:
        with anyio.move_on_after(0.02) as patience:
            await post(downstream.port, "/x", b"{}", "late")
        assert patience.cancelled_caught
        while not downstream.answered:
            await anyio.sleep(0.001)
        assert downstream.answered == {"slow": 1}
        assert downstream.accepted == set()


async def test_a_slow_answer_reaches_who_waits() -> None:
    async with serving("slow", slow_s=0.01) as downstream:
        assert (await post(downstream.port, "/x", b"{}", "patient")).status == 200
        assert downstream.accepted == {"patient"}


@pytest.mark.parametrize(
    "request_text",
    [
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n",  # no key
        b"POST / HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 99999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nX: " + b"x" * 10_000,
    ],
)
async def test_the_downstream_refuses_what_it_cannot_read(request_text: bytes) -> None:
    async with serving("ok") as downstream:
        async with await anyio.connect_tcp("127.0.0.1", downstream.port) as stream:
            await stream.send(request_text)
            assert (await stream.receive()).startswith(b"HTTP/1.1 400 ")
        assert downstream.answered == {"bad": 1}
        assert (await post(downstream.port, "/x", b"{}", "next")).status == 200


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 2", b"HTTP/1.1 abc\r\n\r\n"])
async def test_a_server_that_does_not_answer_properly_is_a_connection_error(answer: bytes) -> None:
    async def talk(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            if answer:
                await stream.send(answer)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)  # noqa: S610
        tasks.start_soon(listener.serve, talk)
        with pytest.raises(ConnectionError, match="the downstream"):
            await post(port, "/x", b"{}", "k")
        tasks.cancel_scope.cancel()


async def test_what_is_shown_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\\x0a"
    tally = Tally()
    facts = {"queue": "ocr", "kind": "\x1b]0;x\x07", "attempt": 1, "error": "line\nbreak"}
    tally("job.failed", facts)
    assert tally.latest[0].isprintable()
    assert tally.retries == {"ocr": 1}
