"""The demo's handlers: each does real work whose outcome can be checked.

embedding      reads a text file, hashes its words into 256 dimensions, stores the vector in the same
               transaction that completes the job; files over 32 KiB are processed in another process
inference      finds the three most similar files by cosine similarity, in SQL
ocr            draws a file's name with a built-in font into a 1-bit bitmap, shifts it, adds noise, and
               recognises it by comparison with the font; reports the number of wrong characters
notification   POSTs to the unreliable downstream; 429, 500 and timeouts are handled as in production
agent          surveys a directory: inserts jobs for its files, snoozes until they have finished, continues
maintenance    every two seconds: ANALYZE, and a row with the counts
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.to_thread

from pgworkd.demo.downstream import post
from pgworkd.engine.registry import App
from pgworkd.errors import PermanentError, RetryAfter, Snooze
from pgworkd.words.backoff import Backoff
from pgworkd.words.job import Job
from pgworkd.words.validation import counted

DIMENSIONS = 256
FILE_BYTES_MAX = 1024 * 1024
LOOP_BYTES_MAX = 32 * 1024
"""A larger file would block the event loop for too long: it is tokenised in another process."""
FILES_MAX = 500
ENTRIES_MAX = 20_000
SURVEY_FILES_MAX, SURVEY_LARGE_MAX = 40, 2
NAME_CHARS_MAX = 24
NOISE = 0.05
EVERY_S = 2
RETRIES = Backoff(base_s=0.2, factor=2, cap_s=2)
QUEUES = {"embedding": 10, "inference": 3, "ocr": 4, "notification": 8, "agent": 2, "maintenance": 1}
UNKNOWN_KIND = "agent_of_tomorrow"
_NOT_TEXT_DIRS = {"node_modules", "__pycache__", "venv"}
_WORD = re.compile(r"[^\W_]+")

TABLES = """
CREATE SCHEMA IF NOT EXISTS demo;
CREATE TABLE IF NOT EXISTS demo.embeddings (path text PRIMARY KEY, tokens int NOT NULL, vector real[] NOT NULL);
CREATE TABLE IF NOT EXISTS demo.neighbours
    (path text PRIMARY KEY, others text[] NOT NULL, similarities real[] NOT NULL);
CREATE TABLE IF NOT EXISTS demo.counts (at timestamptz PRIMARY KEY, embeddings int NOT NULL, neighbours int NOT NULL);
"""
_STORE = """INSERT INTO demo.embeddings (path, tokens, vector) VALUES ($1, $2, $3)
    ON CONFLICT (path) DO UPDATE SET tokens = excluded.tokens, vector = excluded.vector"""
_NEAREST = """SELECT other.path, sum(a * b) AS similarity
    FROM demo.embeddings mine, demo.embeddings other, unnest(mine.vector, other.vector) AS u (a, b)
    WHERE mine.path = $1 AND other.path <> $1 GROUP BY other.path ORDER BY similarity DESC, other.path LIMIT 3"""
_KEEP_NEAREST = """INSERT INTO demo.neighbours (path, others, similarities) VALUES ($1, $2, $3)
    ON CONFLICT (path) DO UPDATE SET others = excluded.others, similarities = excluded.similarities"""


@dataclass(frozen=True, slots=True)
class File:
    """A file or directory to process, by its absolute path."""

    path: str


@dataclass(frozen=True, slots=True)
class Survey:
    """A directory under survey and the jobs that were inserted for its files."""

    path: str
    jobs: list[str]


@dataclass(frozen=True, slots=True)
class Note:
    """A notice for the downstream."""

    text: str


# Files and vectors.


def text_files(root: Path, *, deep: bool = True) -> list[tuple[Path, int]]:
    """Readable text files below `root` with their sizes, at most FILES_MAX: no links, nothing hidden or binary."""
    found: list[tuple[Path, int]] = []
    entries, device = 0, _device(root)
    for directory, names, files in os.walk(root):
        # Not into other file systems such as /proc, nor into a database, which may be the demo's own.
        is_other = "pgdata" in names or _device(Path(directory)) != device
        deeper = [] if is_other or not deep else names
        names[:] = sorted(n for n in deeper if not n.startswith(".") and n not in _NOT_TEXT_DIRS)
        taken = [] if is_other else sorted(n for n in files if not n.startswith("."))
        paths = [Path(directory, name) for name in taken]
        sized = ((path, _text_size(path)) for path in paths[: FILES_MAX - len(found)])
        found += [(path, size) for path, size in sized if size]
        entries += 1 + len(taken)
        if len(found) >= FILES_MAX or entries >= ENTRIES_MAX:
            break
    return found


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None


def _text_size(path: Path) -> int:
    """The size of a readable text file; 0 for anything else."""
    try:
        str(path).encode()  # a name that is not UTF-8 cannot be in a payload
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode) or not 0 < facts.st_size <= FILE_BYTES_MAX:
            return 0
        with path.open("rb") as file:
            return 0 if b"\0" in file.read(4096) else facts.st_size
    except (OSError, UnicodeEncodeError):
        return 0


def read_text(path: str) -> str:
    """The text of a file, up to FILE_BYTES_MAX; PermanentError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(FILE_BYTES_MAX).decode("utf-8", "replace")
    except OSError as error:
        raise PermanentError(f"the file cannot be read: {error.strerror}") from error


def embedding_of(text: str) -> tuple[int, list[float]]:
    """The number of words, and a vector of length 1: each word adds 1 + log(count) at the place its CRC-32 names."""
    words = Counter(word.lower() for word in _WORD.findall(text))
    vector = [0.0] * DIMENSIONS
    for word, count in words.items():
        crc = zlib.crc32(word.encode())
        vector[crc % DIMENSIONS] += (1 + math.log(count)) * (1 if crc & 0x80000000 else -1)
    length = math.sqrt(sum(x * x for x in vector)) or 1.0
    return words.total(), [x / length for x in vector]


# Reading: 5 x 7 pixels per character, a row of five as one digit of base 32.

_FONT_TEXT = """A ehhvhhh B uhhuhhu C ehggghe D sihhhis E vgguggv F vgguggg G ehgnhhf H hhhvhhh I e44444e J 72222ic
K hikokih L ggggggv M hrllhhh N hhpljhh O ehhhhhe P uhhuggg Q ehhhlid R uhhukih S fgge11u T v444444 U hhhhhhe
V hhhhha4 W hhhllla X hha4ahh Y hhha444 Z v1248gv 0 ehjlphe 1 4c4444e 2 eh1248v 3 v2421he 4 26aiv22 5 vgu11he
6 68guhhe 7 v124888 8 ehhehhe 9 ehhf12c . 00000cc _ 000000v - 000v000 + 044v440 ? eh12404"""
FONT = {mark: [int(row, 32) for row in rows] for mark, rows in zip(*[iter(_FONT_TEXT.split())] * 2, strict=True)}
_GLYPHS = {mark: sum(row << 5 * y for y, row in enumerate(rows)) for mark, rows in FONT.items()}
CELL, MARGIN, HEIGHT = 6, 4, 7


def draw(text: str, rng: random.Random, noise: float = NOISE) -> list[int]:
    """`text`, of characters of FONT only, as rows of pixels: randomly placed in the margin, with some pixels flipped.

    A row is an int; its highest bit is the leftmost pixel.
    """
    down, right = rng.randrange(MARGIN + 1), rng.randrange(MARGIN + 1)
    bitmap = []
    for y in range(HEIGHT + MARGIN):
        line = 0
        for mark in text:
            line = line << CELL | (FONT[mark][y - down] << 1 if 0 <= y - down < HEIGHT else 0)
        line <<= MARGIN - right
        bitmap.append(line ^ sum(1 << x for x in range(len(text) * CELL + MARGIN) if rng.random() < noise))
    return bitmap


def recognise(bitmap: list[int], characters: int) -> str:
    """The text of a bitmap with this number of characters: the shift and the glyphs that differ least from it."""
    best = (math.inf, "")
    for down in range(MARGIN + 1):
        for right in range(MARGIN + 1):
            rows = [line >> MARGIN - right for line in bitmap[down : down + HEIGHT]]
            difference, text = 0.0, ""
            for cell in reversed(range(characters)):
                seen = sum((row >> cell * CELL + 1 & 31) << 5 * y for y, row in enumerate(rows))
                distance, mark = min(((seen ^ glyph).bit_count(), mark) for mark, glyph in _GLYPHS.items())
                difference, text = difference + distance, text + mark
            best = min(best, (difference, text))
    return best[1]


# The handlers.


async def embed(file: File, job: Job) -> None:
    """Stores the vector and completes the job in one transaction."""
    text = await anyio.to_thread.run_sync(read_text, file.path)
    tokens, vector = embedding_of(text[:LOOP_BYTES_MAX])
    async with job.transaction() as db:
        await db.execute(_STORE, file.path, tokens, vector)
        job.result = {"tokens": tokens}


def embed_large(file: File) -> dict[str, Any]:
    """Runs in another process; the survey that waits for it stores its result."""
    tokens, vector = embedding_of(read_text(file.path))
    return {"tokens": tokens, "vector": vector}


async def nearest(file: File, job: Job) -> None:
    """Finds the three most similar files; snoozes until this file has a vector."""
    async with job.transaction() as db:
        if not await db.fetchval("SELECT count(*) FROM demo.embeddings WHERE path = $1", file.path):
            if job.attempt > 100:
                raise PermanentError("this file has no vector")
            raise Snooze(0.5)
        rows = await db.fetch(_NEAREST, file.path)
        await db.execute(_KEEP_NEAREST, file.path, [r[0] for r in rows], [r[1] for r in rows])
        job.result = {"nearest": [Path(r[0]).name for r in rows]}


def crash(file: File) -> None:
    """A poison job: ends its process, as a bug in native code would."""
    os._exit(len(file.path) % 100 + 1)


def read_name(file: File, job: Job) -> dict[str, Any]:
    """Draws the file's name and recognises it; runs in a thread, because it is CPU-bound."""
    name = Path(file.path).name.upper()[:NAME_CHARS_MAX]
    drawn = "".join(mark if mark in FONT else "?" for mark in name)
    rng = random.Random(f"{job.id} {job.attempt}")  # noqa: S311 # nosec B311 # noise
    read = recognise(draw(drawn, rng), len(drawn))
    return {"drawn": drawn, "read": read, "wrong": sum(a != b for a, b in zip(drawn, read, strict=True))}


async def notify(note: Note, job: Job, port: int) -> dict[str, Any]:
    """Sends the notice with the job's id as Idempotency-Key, so that repetitions are recognised."""
    answer = await post(port, "/notices", json.dumps({"text": note.text}).encode(), str(job.id))
    if answer.status == 429:
        raise RetryAfter(float(answer.headers.get("retry-after", "1")), "the downstream is busy (429)")
    if answer.status != 200:
        raise RuntimeError(f"the downstream answered {answer.status}")
    return {"status": answer.status}


async def survey(directory: File, job: Job) -> None:
    """Inserts a job for each file of a directory, and one that gathers their results."""
    files = await anyio.to_thread.run_sync(lambda: text_files(Path(directory.path), deep=False))
    chosen = list(_some(files))
    async with job.transaction() as db:
        rows = await db.fetch(
            """INSERT INTO pgworkd.jobs (queue, kind, payload)
               SELECT 'embedding', kind, jsonb_build_object('path', path)
               FROM unnest($1::text[], $2::text[]) AS f (path, kind) RETURNING id::text""",
            [path for path, _ in chosen],
            [kind for _, kind in chosen],
        )
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, kind, payload) VALUES ('agent', 'agent_gather', $1)",
            json.dumps({"path": directory.path, "jobs": [r[0] for r in rows]}),
        )
        job.result = {"files": len(files), "taken": len(rows)}


def _some(files: list[tuple[Path, int]]) -> Iterator[tuple[str, str]]:
    """(path, kind) of the files of one survey."""
    large = 0
    for path, size in files[:SURVEY_FILES_MAX]:
        if size <= LOOP_BYTES_MAX:
            yield str(path), "embedding"
        elif large < SURVEY_LARGE_MAX:
            large += 1
            yield str(path), "embedding_large"


async def gather(work: Survey, job: Job) -> None:
    """Snoozes until a survey's jobs have finished; then stores the vectors of large files and inserts further jobs."""
    async with job.transaction() as db:
        if await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE id = ANY ($1) AND status <> 'dead'", work.jobs):
            raise Snooze(0.25)
        rows = await db.fetch(
            """SELECT payload->>'path', result FROM pgworkd.finished_jobs
               WHERE id = ANY ($1) AND kind = 'embedding_large' AND status = 'completed' ORDER BY 1""",
            work.jobs,
        )
        for path, result in rows:
            found = json.loads(result)
            await db.execute(_STORE, path, found["tokens"], found["vector"])
        await db.execute(
            """INSERT INTO pgworkd.jobs (queue, payload)
               SELECT 'inference', payload FROM pgworkd.finished_jobs WHERE id = ANY ($1) AND status = 'completed'
               UNION ALL SELECT 'notification', jsonb_build_object('text', $2::text)""",
            work.jobs,
            f"surveyed {Path(work.path).name}: {counted(len(work.jobs), 'file')}",
        )
        job.result = {"large": len(rows)}


async def maintain(job: Job) -> None:
    """Updates the planner's statistics and stores the counts in a table."""
    async with job.transaction() as db:
        await db.execute("ANALYZE demo.embeddings, demo.neighbours")
        await db.execute(
            """INSERT INTO demo.counts (at, embeddings, neighbours)
               SELECT clock_timestamp(), (SELECT count(*) FROM demo.embeddings),
                      (SELECT count(*) FROM demo.neighbours)"""
        )


def demo_app(port: int) -> App:
    """The handlers of the six queues; notifications go to this port of the loopback."""
    app = App()
    limits = QUEUES

    async def notify_here(note: Note, job: Job) -> dict[str, Any]:
        return await notify(note, job, port)

    app.handler("embedding", concurrency=limits["embedding"], backoff=RETRIES)(embed)
    app.handler("embedding_large", queue="embedding", run_in="process", backoff=RETRIES)(embed_large)
    app.handler("inference", concurrency=limits["inference"], backoff=RETRIES)(nearest)
    app.handler("inference_crash", queue="inference", run_in="process", backoff=RETRIES)(crash)
    app.handler("ocr", concurrency=limits["ocr"], backoff=RETRIES)(read_name)
    app.handler("notification", concurrency=limits["notification"], max_attempts=5, timeout_s=0.5, backoff=RETRIES)(
        notify_here
    )
    app.handler("agent", concurrency=limits["agent"], backoff=RETRIES)(survey)
    app.handler("agent_gather", queue="agent", backoff=RETRIES)(gather)
    app.handler("maintenance", concurrency=limits["maintenance"], every=EVERY_S, backoff=RETRIES)(maintain)
    return app
