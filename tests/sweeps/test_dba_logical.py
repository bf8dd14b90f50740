"""Logical replication and clock changes of the server, beside two live daemons: every job runs once."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.client import batch, enqueue
from pgworkd.core import events
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.embedded import EmbeddedPostgres
from tests.chaos import clocks
from tests.engine.test_dba import everything
from tests.kits.daemon import Recorder, running, until
from tests.kits.server import create_database, create_template, start_test_server

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

JOBS = 120
STEP_S = 600
OVER = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status <> 'completed' AND schedule IS NULL)"
DONE = "SELECT count(*) FROM pgworkd.finished_jobs WHERE payload->>'part' = $1 AND status = 'completed'"
TREES = "SELECT count(*) FROM pgworkd.batches WHERE completed = 4 AND finished_at IS NOT NULL"
TOO_OLD = "SELECT EXISTS (SELECT FROM pgworkd.finished_jobs WHERE keep_until <= clock_timestamp())"
COPIED = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"
CAUGHT_UP = "SELECT bool_and(confirmed_flush_lsn >= $1) FROM pg_replication_slots WHERE database = current_database()"
LOSE = """WITH w AS (INSERT INTO pgworkd.workers (name, pid, version, lease_s, lease_until)
              VALUES ('gone', 1, '', 2, clock_timestamp() + interval '2 s') RETURNING id)
    UPDATE pgworkd.jobs SET status = 'running', attempts = 1, worker_id = w.id FROM w WHERE jobs.id = $1"""


class Fleet:
    """An app, how often each of its jobs and occurrences ran, and what its daemons reported."""

    def __init__(self) -> None:
        self.app, self.runs, self.ended, self.seen = App(), Counter[Any](), list[str](), list[Recorder]()
        self.ticks, self.go_on = Counter[Any](), anyio.Event()

        @self.app.handler("q", concurrency=10)
        async def handle(job: Job) -> None:
            await anyio.sleep(0.005)
            self.runs[job.id] += 1

        @self.app.handler("long", concurrency=1)
        async def long(job: Job) -> None:
            self.runs[job.id] += 1
            await self.go_on.wait()

        @self.app.handler("tick", every=1)
        async def tick(job: Job) -> None:
            self.ticks[job.occurrence] += 1

    @contextlib.asynccontextmanager
    async def at_work(self, dsn: str) -> AsyncIterator[None]:
        """Two daemons."""
        async with (
            running(self.app, dsn, end_process=self.ended.append) as (_, one),
            running(self.app, dsn, end_process=self.ended.append) as (_, two),
        ):
            self.seen += [one, two]
            yield

    def told(self, *names: str) -> list[Any]:
        """All such events of all daemons."""
        return [each for name in names for recorder in self.seen for each in recorder.all(name)]


async def add(db: asyncpg.Connection[Any], part: str) -> int:
    """Jobs with and without keys, in a batch tree, in a workflow, and one that keeps its dedupe key; their number."""
    await db.execute(
        "INSERT INTO pgworkd.jobs (queue, serialize_key, payload)"
        " SELECT 'q', CASE WHEN n % 3 = 0 THEN 'k' || n % 10 END, jsonb_build_object('part', $2::text)"
        " FROM generate_series(1, $1) n",
        JOBS,
        part,
    )
    await db.execute("INSERT INTO pgworkd.queues (name) VALUES ($1)", part)  # the audit has an id from a sequence
    root = await batch(db, part, queue="q")
    await root.child("below", queue="q", stream=True)
    await root.add([{"part": part}] * 4)
    await root.seal()
    first = await enqueue(db, "q", {"part": part}, dedupe_key=part, dedupe_for=3600)
    await enqueue(db, "q", {"part": part}, after=[first])
    return JOBS + 4 + 2


async def lose(db: asyncpg.Connection[Any], part: str) -> None:
    """A lost job: its worker died at this instant."""
    async with db.transaction():
        job_id = await db.fetchval(
            "INSERT INTO pgworkd.jobs (queue, payload) VALUES ('q', jsonb_build_object('part', $1::text)) RETURNING id",
            part,
        )
        await db.execute(LOSE, job_id)


@pytest.fixture(scope="module")
def publisher(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    """A server whose WAL can be decoded."""
    server = start_test_server(request.config.getoption("--pg-bin"), wal_level="logical")
    yield server
    server.stop("immediate")


@contextlib.asynccontextmanager
async def database(server: EmbeddedPostgres, name: str) -> AsyncIterator[tuple[str, asyncpg.Connection[Any]]]:
    """A database with the schema, on that server."""
    await create_template(server.dsn(), schema.text())
    dsn = await create_database(server.dsn(), name)
    db = await asyncpg.connect(dsn)
    try:
        yield dsn, db
    finally:
        db.terminate()


async def test_a_publication_for_all_tables_blocks_no_statement(publisher: EmbeddedPostgres) -> None:
    fleet = Fleet()
    async with database(publisher, "published") as (dsn, db), fleet.at_work(dsn):
        count = await add(db, "before")
        await db.execute("CREATE PUBLICATION everything FOR ALL TABLES")
        await add(db, "after")
        await until(lambda: db.fetchval(OVER))
        # Retention by rows, limits, rates, operators.
        await db.execute(
            "INSERT INTO pgworkd.queues (name, keep_s, limit_per_key, rate, rate_period_s) VALUES ('q', 1, 3, 10000, 1)"
        )
        await add(db, "kept for a second")
        gone = await batch(db, "cancelled", queue="q")
        await gone.add([{}] * 3, run_at=await db.fetchval("SELECT now() + interval '1 day'"))
        await gone.cancel()
        await db.execute("SELECT pgworkd.delete_batch($1)", gone.id)
        await db.execute("SELECT pgworkd.free_key('q', 'before')")
        await until(lambda: db.fetchval(OVER))
        await until(lambda: db.fetchval(TOO_OLD))
        await db.execute("SELECT pgworkd.prune(7, 30)")
        assert [await db.fetchval(DONE, part) for part in ("before", "after")] == [count, count]
        assert await db.fetchval(TREES) == 6
    assert (
        fleet.told(events.OUTCOMES_DELAYED, events.OUTCOME_REJECTED, events.STATEMENT_FAILED, events.MAINTENANCE_FAILED)
        == []
    )
    assert set(fleet.runs.values()) == {1}


async def test_a_logical_replication_switchover_runs_every_job_exactly_once(
    request: pytest.FixtureRequest, publisher: EmbeddedPostgres
) -> None:
    fleet = Fleet()
    subscriber = start_test_server(request.config.getoption("--pg-bin"))
    try:
        async with (
            database(publisher, "before") as (old_dsn, old),
            database(subscriber, "after") as (new_dsn, new),
        ):
            async with fleet.at_work(old_dsn):
                count = await add(old, "copied")
                await until(lambda: old.fetchval("SELECT count(*) > 20 FROM pgworkd.finished_jobs"))
                # As docs/operating.md says.
                await old.execute(
                    "CREATE PUBLICATION moving FOR TABLES IN SCHEMA pgworkd WITH (publish_via_partition_root)"
                )
                await new.execute("TRUNCATE pgworkd.schema_version")
                await new.execute(f"CREATE SUBSCRIPTION moving CONNECTION '{old_dsn}' PUBLICATION moving")
                await until(lambda: new.fetchval(COPIED))
                await add(old, "streamed")
            await add(old, "left")
            written = await old.fetchval("SELECT pg_current_wal_lsn()")
            await until(lambda: old.fetchval(CAUGHT_UP, written))
            await new.execute("DROP SUBSCRIPTION moving")
            assert await everything(new) == await everything(old)
            await schema.migrate(ConnectionOptions(new_dsn))
            assert not await new.fetchval("SELECT pgworkd.is_origin(NULL)")
            await new.execute("SELECT pgworkd.adopt(NULL)")
            before = set(fleet.runs)
            async with fleet.at_work(new_dsn):
                await add(new, "new")
                await until(lambda: new.fetchval(OVER))
                parts = ("copied", "streamed", "left", "new")
                assert [await new.fetchval(DONE, part) for part in parts] == [count] * 4
                assert await new.fetchval(TREES) == 8
            assert before
            assert set(fleet.runs.values()) == {1}
            assert (
                fleet.told(events.OUTCOMES_DELAYED, events.OUTCOME_REJECTED, events.JOB_LOST, events.LEASE_LOST) == []
            )
    finally:
        subscriber.stop("immediate")


@pytest.fixture
def clock() -> Iterator[Path]:
    """The file that sets the clock of a server, which runs as another user under root."""
    with tempfile.TemporaryDirectory(prefix="clock-") as directory:
        Path(directory).chmod(0o711)
        yield Path(directory) / "server.clock"


@pytest.mark.skipif(clocks.LIBRARY is None, reason="there is no libfaketime")
async def test_jobs_run_while_the_servers_clock_is_set_back_and_forward(
    request: pytest.FixtureRequest, clock: Path
) -> None:
    fleet = Fleet()
    with clocks.inherited(clock):
        clocks.put_forward(clock, STEP_S)
        server = start_test_server(request.config.getoption("--pg-bin"))
    try:
        async with database(server, "clocks") as (dsn, db), fleet.at_work(dsn):
            await db.execute("INSERT INTO pgworkd.queues (name, rate, rate_period_s) VALUES ('q', 100, 1)")
            begun = await enqueue(db, "long")
            for part, ahead_s in (("as it is", STEP_S), ("set back", 0), ("set forward", STEP_S)):
                await lose(db, part)
                clocks.put_forward(clock, ahead_s)
                count = await add(db, part) + 1
                await until(lambda: db.fetchval(f"SELECT ({DONE}) = $2", part, count), limit_s=30)  # noqa: B023
            ticks = fleet.ticks.total()
            await until(lambda: fleet.ticks.total() > ticks + 1)
            fleet.go_on.set()
            await until(lambda: db.fetchval(OVER))
        assert len(fleet.told(events.JOB_LOST)) == 3
        assert fleet.runs[begun] == 1
        assert set(fleet.runs.values()) == set(fleet.ticks.values()) == {1}
        assert (
            fleet.told(events.LEASE_LOST, events.LEASE_FENCED, events.OUTCOMES_DELAYED, events.MAINTENANCE_FAILED) == []
        )
        assert fleet.ended == []
    finally:
        server.stop("immediate")
