"""Daemons of each previous version work while their database is migrated: nothing is lost, and nothing runs twice.

Their code comes from this project's history; without it the tests are skipped.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits import process
from tests.kits.daemon import until
from tests.kits.planting import ROOT
from tests.kits.schema import catalog, differences
from tests.sql.versions import schema_of, stored

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

LAST_OF = {
    1: "1f3217520b0f5843b360e4a73cc150d758b60d70",
    2: "4028d746da5250ff073889e846a50aae9b0b5ecf",
    3: "b3e8768f5dd376a5c3d51aa57e6a891890fe327b",
}
"""The last commit whose schema was of each version."""
OLDEST = "4d5d168ee6025d35b6b5465904d23bdfae31266c"
"""The oldest that anybody else has installed, two days before the last of version 1."""
MANY = 200
"""After so many rounds the producer is slower: what it inserts while nobody claims has to be worked off by the test."""
PERIOD_S = 2.0
PATIENCE_S = 60.0


@pytest.fixture(params=LAST_OF)
def version(request: pytest.FixtureRequest) -> int:
    """Each version that can be migrated."""
    return int(request.param)


@pytest.fixture
def tree(tmp_path: Path, version: int) -> Path:
    """The project at the last commit of that version."""
    return tree_of(LAST_OF[version], tmp_path)


def tree_of(commit: str, tmp_path: Path) -> Path:
    """The project at that commit."""
    git = shutil.which("git")
    if git is None:
        pytest.skip("there is no git")
    archive = subprocess.run([git, "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip("the history of this project is not here")
    directory = tmp_path / "tree"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(directory, filter="data")
    return directory


@pytest.fixture
async def old(empty_dsn: str, version: int) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A session in a database of that version."""
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute(schema_of(version))
    await connection.execute(process.TABLES)
    yield connection
    connection.terminate()


@pytest.fixture
async def session(empty_dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A session in an empty database."""
    connection = await asyncpg.connect(empty_dsn)
    yield connection
    connection.terminate()


@pytest.fixture
async def application(empty_dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A session of an application in the same database."""
    connection = await asyncpg.connect(empty_dsn)
    yield connection
    connection.terminate()


@contextlib.contextmanager
def daemon(tree: Path, dsn: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon of tests/process.py of that tree, with the code of that tree; killed at the end."""
    runs = log.with_suffix(".runs")
    runs.touch()
    env = {"PYTHONPATH": str(tree), "RUNS_FILE": str(runs), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    module = "tests.process" if (tree / "tests" / "process.py").exists() else "tests.kits.process"
    command = [sys.executable, "-m", module, dsn, "lease_s=60"]
    with log.open("wb") as written:
        started = subprocess.Popen(command, cwd=tree, env=env, stderr=written)
        try:
            yield started
        finally:
            started.kill()
            started.wait()


class Producer:
    """An application that keeps inserting jobs of many kinds and records which were acknowledged.

    With the client of that version, from before migrating until the end.
    """

    def __init__(self, tree: Path, dsn: str, directory: Path) -> None:
        self._tree, self._written, self._errors = tree, directory / "acknowledged", directory / "producer.log"
        self._command = [sys.executable, "-c", _PRODUCER, dsn]
        self._env = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[], None]]:
        """Yields what stops it, after the jobs that it is inserting; killed at the end."""
        with self._written.open("wb") as out, self._errors.open("wb") as errors:
            process_ = subprocess.Popen(
                self._command, cwd=self._tree, env=self._env, stdin=subprocess.PIPE, stdout=out, stderr=errors
            )

        def stop() -> None:
            process_.communicate(timeout=PATIENCE_S)
            assert process_.returncode == 0, self._errors.read_text()

        with process_:
            try:
                yield stop
            finally:
                process_.kill()

    @property
    def acknowledged(self) -> list[uuid.UUID]:
        """The ids of these jobs."""
        return [uuid.UUID(line) for line in self._written.read_text().splitlines()]


_PRODUCER = f"""
import select, sys
import anyio, asyncpg
from pgworkd.client import enqueue
try:
    from pgworkd.client import batch
except ImportError:  # version 1
    from pgworkd.batches import batch

async def produce(db, n):
    key = {{"serialize_key": f"line-{{n % 3}}"}} if n % 4 == 0 else {{}}
    first = await enqueue(db, "work", {{"n": n}}, **key)
    async with db.transaction():
        second = await enqueue(db, "work", {{"n": n}}, dedupe_key=f"once-{{n}}", after=[first])
    print(first, second, sep="\\n")
    if n % 10 == 0:
        tree = await batch(db, f"batch {{n}}", queue="work", on_complete={{"queue": "told"}})
        print(*await tree.add([{{"n": n}}] * 5), sep="\\n")
        await tree.seal()

async def main():
    db, n = await asyncpg.connect(sys.argv[1]), 0
    while not select.select([sys.stdin], [], [], 0.01 if n < {MANY} else 0.2)[0]:
        n += 1
        await produce(db, n)
    await db.close()

anyio.run(main)
"""


async def test_no_job_is_lost_when_migrating_under_daemons_of_a_previous_version(
    tree: Path,
    version: int,
    empty_dsn: str,
    old: asyncpg.Connection[Any],
    db: asyncpg.Connection[Any],
    tmp_path: Path,
) -> None:
    gated = [row[0] for row in await old.fetch(_GATED, json.dumps({"gate": "open"}))]
    producer = Producer(tree, empty_dsn, tmp_path)
    logs = [tmp_path / f"{n}.log" for n in range(3)]
    with daemon(tree, empty_dsn, logs[0]) as first, daemon(tree, empty_dsn, logs[1]) as second:
        await until(lambda: old.fetchval(_RUNNING, gated), PATIENCE_S)
        with producer.running() as stop:
            await anyio.sleep(PERIOD_S)
            await until(lambda: old.fetchval("SELECT count(*) > 50 FROM runs WHERE ended IS NOT NULL"), PATIENCE_S)
            assert await schema.migrate(ConnectionOptions(empty_dsn)) == (version, schema.VERSION)
            await until(lambda: all("schema.newer" in log.read_text() for log in logs[:2]), PATIENCE_S)
            await old.execute("INSERT INTO gates VALUES ('open')")
            await until(lambda: old.fetchval(_COMPLETED, gated, [first.pid, second.pid]), PATIENCE_S)
            await until(lambda: old.fetchval(_IDLE), PATIENCE_S)
            claimed = await old.fetchval(_CLAIMS)
            await anyio.sleep(0.5)  # five polls
            assert await old.fetchval(_CLAIMS) == claimed, "they claim no more"
            with daemon(ROOT, empty_dsn, logs[2]):
                await anyio.sleep(PERIOD_S)
                for process_ in (first, second):
                    process_.send_signal(signal.SIGTERM)
                assert [await anyio.to_thread.run_sync(p.wait, PATIENCE_S) for p in (first, second)] == [0, 0]
                await anyio.to_thread.run_sync(stop)
                await until(
                    lambda: old.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE dedupe_until IS NULL)")
                )
    await _nothing_was_lost(old, [*gated, *producer.acknowledged])
    for log in logs:
        failures = [line for line in log.read_text().splitlines() if line.startswith(_BAD)]
        assert failures == [], failures[:3]
    await old.execute("DROP TRIGGER given_back ON pgworkd.jobs")
    assert differences(await catalog(old), await catalog(db)) == []


async def test_no_job_is_lost_when_migrating_under_daemons_of_the_oldest_schema(
    empty_dsn: str, session: asyncpg.Connection[Any], application: asyncpg.Connection[Any], tmp_path: Path
) -> None:
    """They lose the function that renews their lease, and go on settling until it ends."""
    tree, logs, stop = tree_of(OLDEST, tmp_path), [tmp_path / f"{n}.log" for n in range(2)], anyio.Event()
    (oldest,) = (script for name, script in stored().items() if name.endswith("4fc6acb.sql"))  # the one at OLDEST
    await session.execute(oldest)
    await session.execute(process.TABLES)
    acknowledged: list[Any] = []

    async def produce() -> None:
        while not stop.is_set():
            acknowledged.append(await application.fetchval(_INSERTED))
            await anyio.sleep(0.005)

    with daemon(tree, empty_dsn, logs[0]) as first:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(produce)
            await until(lambda: session.fetchval("SELECT count(*) > 200 FROM runs WHERE ended IS NOT NULL"), PATIENCE_S)
            assert await schema.migrate(ConnectionOptions(empty_dsn)) == (1, schema.VERSION)
            await until(lambda: session.fetchval(_IDLE), PATIENCE_S)
            with daemon(ROOT, empty_dsn, logs[1]):
                first.send_signal(signal.SIGTERM)
                await anyio.to_thread.run_sync(first.wait, PATIENCE_S)
                stop.set()
                await until(lambda: session.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), PATIENCE_S)
    ended = Counter(row[0] for row in await session.fetch("SELECT job FROM runs WHERE ended IS NOT NULL"))
    assert ended == Counter(acknowledged)
    finished = await session.fetch("SELECT id FROM pgworkd.finished_jobs WHERE status = 'completed'")
    assert Counter(row[0] for row in finished) == ended


_INSERTED = "INSERT INTO pgworkd.jobs (queue) VALUES ('work') RETURNING id"


async def _nothing_was_lost(old: asyncpg.Connection[Any], acknowledged: list[Any]) -> None:
    """Every acknowledged job has completed and ran to completion once."""
    finished = {row["id"]: row for row in await old.fetch(process.EXPLAINED)}
    assert len(acknowledged) > 50
    assert {finished[id_]["status"] for id_ in acknowledged} == {"completed"}
    odd = [row for row in finished.values() if row["attempts"] != 1 + row["given_back"] or row["lost"]]
    assert odd == [], "each attempt but the last was given back"
    ended = Counter(row[0] for row in await old.fetch("SELECT job FROM runs WHERE ended IS NOT NULL"))
    assert ended == Counter(acknowledged)
    assert await old.fetchval("SELECT count(*) = 0 FROM pgworkd.batches WHERE tree_finished_at IS NULL")
    assert await old.fetchval(_CALLED) == 0, "each tree has called back once"


_GATED = "INSERT INTO pgworkd.jobs (queue, payload) SELECT 'work', $1 FROM generate_series(1, 20) RETURNING id"
_RUNNING = "SELECT count(*) = 20 FROM runs WHERE job = ANY ($1)"
_IDLE = """
    SELECT count(*) FILTER (WHERE status = 'pending') > 0 AND count(*) FILTER (WHERE status = 'running') = 0
    FROM pgworkd.jobs"""
_CLAIMS = "SELECT (SELECT sum(attempts) FROM pgworkd.jobs) + (SELECT sum(attempts) FROM pgworkd.finished_jobs)"
_COMPLETED = """
    SELECT (SELECT count(*) = 20 FROM pgworkd.finished_jobs WHERE id = ANY ($1) AND status = 'completed')
       AND (SELECT bool_and(pid = ANY ($2)) FROM runs WHERE job = ANY ($1))"""
_CALLED = """
    SELECT (SELECT count(*) FROM pgworkd.batches WHERE parent_id IS NULL)
         - (SELECT count(*) FROM pgworkd.finished_jobs WHERE queue = 'told')"""
_BAD = tuple(
    "job.failed job.lost settle.refused database.away daemon.failed Traceback outcome.rejected outcomes.rejected "
    "database.unavailable".split()
)
