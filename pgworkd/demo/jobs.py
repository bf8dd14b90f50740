"""The demo's application: it makes text files searchable. A first example of handlers.

The application, in `demo.demo`, inserts an `index`, a `compress` and a `notify` job for each file, and `count` jobs in
batches. `refresh` recurs, `crash` always fails, and `notify` does no work: it simulates errors, to be retried.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from pgworkd import App, Backoff, Job, PermanentError, RetryAfter

TABLES = """
CREATE SCHEMA IF NOT EXISTS demo;
CREATE TABLE IF NOT EXISTS demo.documents (path text PRIMARY KEY, words tsvector NOT NULL);
CREATE TABLE IF NOT EXISTS demo.reports (batch_id uuid PRIMARY KEY, files int NOT NULL, words bigint NOT NULL);
CREATE MATERIALIZED VIEW IF NOT EXISTS demo.vocabulary AS SELECT * FROM ts_stat('SELECT words FROM demo.documents');
"""
SOON = Backoff(base_s=0.2, factor=2, cap_s=2)  # the default, from 30 s on, is longer than most demos

app = App()


@dataclass(frozen=True, slots=True)
class File:
    """The payload of the jobs that work on one file."""

    path: str


@app.handler("index", concurrency=8, timeout_s=30, backoff=SOON)
async def index(file: File, job: Job) -> None:
    """Stores the words for full-text search and completes the job: both, or neither."""
    try:
        text = await anyio.Path(file.path).read_text(errors="replace")
    except FileNotFoundError as error:
        raise PermanentError("the file is gone") from error  # no retry would find it
    async with job.transaction() as connection:
        job.result = await connection.fetchval(
            """INSERT INTO demo.documents (path, words) VALUES ($1, to_tsvector('simple', $2))
               ON CONFLICT (path) DO UPDATE SET words = excluded.words RETURNING length(words)""",
            file.path,
            text,
        )


@app.handler("compress", concurrency=4, backoff=SOON)
def compress(file: File) -> dict[str, int]:
    """Reports how much smaller the file could be. A plain `def` runs in a thread."""
    content = Path(file.path).read_bytes()
    return {"bytes": len(content), "compressed": len(zlib.compress(content, level=9))}


@app.handler("count", concurrency=2, run_in="process", timeout_s=30, backoff=SOON)
def count(file: File) -> dict[str, Any]:
    """Counts words in Python, on another core."""
    words = Counter(re.findall(r"\w+", Path(file.path).read_text(errors="replace").lower()))
    return {"words": words.total(), "most_common": words.most_common(3)}


@app.handler("crash", queue="count", run_in="process", backoff=SOON)
def crash() -> None:
    """Ends its process, as a bug in native code would: only this job fails, and is dead after three attempts."""
    os._exit(7)


@app.handler("report", concurrency=1, backoff=SOON)
async def report(payload: dict[str, Any], job: Job) -> None:
    """Stores how many words the files of a batch have."""
    async with job.transaction() as connection:
        job.result = await connection.fetchval(
            """INSERT INTO demo.reports SELECT $1::text::uuid, count(*), coalesce(sum((result->>'words')::int), 0)
               FROM pgworkd.batch_results($1::text::uuid) RETURNING words""",
            payload["batch"]["id"],
        )


@app.handler("notify", concurrency=4, max_attempts=5, backoff=SOON)
async def notify(file: File, job: Job) -> str:
    """Stands in for a call to another service: the first attempt of every third job fails."""
    if job.attempt == 1 and job.id.int % 3 == 0:
        raise RetryAfter(0.5, "simulated: the mail server is busy")
    return f"announced {file.path} at attempt {job.attempt}"


@app.handler("refresh", concurrency=1, every=2, backoff=SOON)
async def refresh(job: Job) -> None:
    """Brings a materialized view up to date; its result is the number of different words."""
    async with job.transaction() as connection:
        await connection.execute("REFRESH MATERIALIZED VIEW demo.vocabulary")
        job.result = await connection.fetchval("SELECT count(*) FROM demo.vocabulary")
