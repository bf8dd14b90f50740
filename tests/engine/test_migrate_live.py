"""`migrate` on a schema in use: without changes it takes no lock; with changes it blocks nobody for long.

Daemons with a schema of another version wait for an older one to be migrated, and claim nothing under a newer one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import DatabaseUnavailable
from tests.kits.apps import app_of_one
from tests.kits.daemon import Recorder, insert, quick_options, running, until, waits_for_status
from tests.kits.schema import plain_user

pytestmark = pytest.mark.slow("migrations beside daemons and open transactions")

INSERT_S = 1.0
"""Five times as long as an INSERT may wait behind a migration that does not get its locks."""
CURRENT = "the schema is installed and current, as after pgworkd dev or an earlier migrate: nothing to do"
TABLES = "jobs finished_jobs batches batch_additions job_dependencies result_waiters schedules queues audit workers"


@pytest.fixture
async def session(dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    """Another session, whose open transaction ends with the test."""
    opened = await asyncpg.connect(dsn)
    yield opened
    opened.terminate()


async def migrated(dsn: str, **how: Any) -> list[str]:
    """The messages of `migrate`."""
    said: list[str] = []
    await schema.migrate(ConnectionOptions(dsn), say=said.append, **how)
    return said


async def test_migrating_a_current_schema_takes_no_lock(dsn: str, session: asyncpg.Connection[Any]) -> None:
    await migrated(dsn)
    await session.execute("BEGIN; LOCK TABLE pgworkd.jobs, pgworkd.finished_jobs, pgworkd.queues IN EXCLUSIVE MODE")
    with anyio.fail_after(5):
        assert await migrated(dsn) == [CURRENT]


async def test_a_changed_script_runs_again_even_if_psql_installed_it(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrated(dsn)
    await db.execute("DROP VIEW pgworkd.job_progress")
    whole = schema.text()
    monkeypatch.setattr(schema, "text", lambda: whole + "\n-- another build")
    assert await migrated(dsn) == []
    assert await db.fetchval("SELECT to_regclass('pgworkd.job_progress')") is not None
    assert await migrated(dsn) != []
    await db.execute(whole)
    assert await migrated(dsn) == []
    assert await migrated(dsn, force=True) == []


@pytest.mark.parametrize("table", TABLES.split())
async def test_migrate_waits_for_an_open_transaction_without_blocking_inserts(
    dsn: str, db: asyncpg.Connection[Any], session: asyncpg.Connection[Any], table: str
) -> None:
    """Regardless of the table that it has written to."""
    await session.execute(f"BEGIN; LOCK TABLE pgworkd.{table} IN ROW EXCLUSIVE MODE")
    said: list[str] = []
    longest_s = 0.0

    async def migrate() -> None:
        said.extend(await migrated(dsn))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(migrate)
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            started = time.monotonic()
            await insert(db, "q")
            longest_s = max(longest_s, time.monotonic() - started)
            await anyio.sleep(0.005)
        await session.execute("COMMIT")
    if table != "workers":  # nothing to do there
        assert len(said) == 1
        assert "waiting for locks: pid" in said[0]
        assert longest_s < INSERT_S


async def test_migrate_gives_up_and_names_the_blocking_session(
    dsn: str, db: asyncpg.Connection[Any], session: asyncpg.Connection[Any]
) -> None:
    await session.execute("SET application_name = 'report'; BEGIN")
    await insert(session, "q")
    with pytest.raises(DatabaseUnavailable, match=r"pid \d+ \(report\), in a transaction for \d+ s: end that"):
        await migrated(dsn, patience_s=0.4)
    with anyio.fail_after(2):
        await insert(db, "q")


async def test_a_migration_from_version_0_raises_the_version(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await migrated(dsn)
    await db.execute("UPDATE pgworkd.schema_version SET version = 0")
    assert await schema.migrate(ConnectionOptions(dsn)) == (0, schema.VERSION)
    await schema.verify(ConnectionOptions(dsn))


async def test_the_script_does_not_touch_a_newer_schema(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("UPDATE pgworkd.schema_version SET version = version + 1; DROP VIEW pgworkd.job_progress")
    with pytest.raises(asyncpg.PostgresError, match="newer than this script"):
        await db.execute(schema.text())
    assert await db.fetchval("SELECT to_regclass('pgworkd.job_progress')") is None


# Daemons


async def test_under_a_newer_schema_a_daemon_only_settles_its_running_jobs(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    app, gate, began = App(), anyio.Event(), anyio.Event()

    @app.handler("q", concurrency=2)
    async def handle() -> None:
        began.set()
        await gate.wait()

    async with running(app, dsn) as (daemon, seen):
        job_id = await insert(db, "q")
        await began.wait()
        await db.execute("UPDATE pgworkd.schema_version SET version = version + 1")
        told = await seen.wait(events.SCHEMA_NEWER)
        assert (told["found"], told["ours"]) == (schema.VERSION + 1, schema.VERSION)
        assert "upgrade" in daemon.status()
        waiting_id = await insert(db, "q")
        gate.set()
        await until(waits_for_status(db, job_id, "completed"))
        await anyio.sleep(0.3)  # three polls
        assert await waits_for_status(db, waiting_id, "pending")()
        await db.execute("UPDATE pgworkd.schema_version SET version = $1", schema.VERSION)  # released
        await until(waits_for_status(db, waiting_id, "completed"))
        assert len(seen.all(events.SCHEMA_NEWER)) == 1


@contextlib.asynccontextmanager
async def starting(dsn: str) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """A daemon that cannot start yet; stopped at the end."""
    seen = Recorder()
    daemon = Daemon(app_of_one(), quick_options(dsn))
    daemon.events.listen(seen)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        try:
            yield daemon, seen
        finally:
            daemon.request_stop()


async def test_a_daemon_without_a_schema_waits_for_migrate_and_logs_it(empty_dsn: str) -> None:
    async with starting(empty_dsn) as (daemon, seen):
        told = await seen.wait(events.SCHEMA_AWAITED)
        assert told["error"] == "this database has no pgworkd schema: run pgworkd migrate"
        assert daemon.status() == "waiting for pgworkd migrate"
        await schema.migrate(ConnectionOptions(empty_dsn))
        await seen.wait(events.DAEMON_READY)
    assert len(seen.all(events.SCHEMA_AWAITED)) == 1
    assert seen.all(events.DAEMON_STOPPED, exit_code=0) != []


async def test_a_daemon_with_an_older_schema_waits_for_migrate_and_can_stop(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    await db.execute("UPDATE pgworkd.schema_version SET version = 0")
    async with starting(dsn) as (daemon, seen):
        told = await seen.wait(events.SCHEMA_AWAITED)
        assert told["error"] == (
            f"the schema is at version 0, this program needs {schema.VERSION}: run pgworkd migrate"
        )
        daemon.request_stop()
        with anyio.fail_after(2):
            await seen.wait(events.DAEMON_STOPPED, exit_code=0)


async def test_a_daemon_that_waited_for_the_schema_waits_for_its_grants(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """They are granted after the migration."""
    await db.execute("UPDATE pgworkd.schema_version SET version = 0")
    async with plain_user(dsn, db, granted=False) as user_dsn, starting(user_dsn) as (daemon, seen):
        await seen.wait(events.SCHEMA_AWAITED)
        await db.execute("UPDATE pgworkd.schema_version SET version = $1", schema.VERSION)
        refused = await seen.wait(events.DATABASE_REFUSED)
        assert daemon.status() == f"waiting for the database: {refused['error']}"
        daemon.request_stop()
        await seen.wait(events.DAEMON_STOPPED)


@pytest.mark.parametrize("end", ["ROLLBACK", "COMMIT"])
@pytest.mark.parametrize("by", ["CREATE SCHEMA pgworkd", "SELECT pg_advisory_xact_lock(1886873445, 0)"])
async def test_migrate_waits_for_a_schema_that_is_not_committed_and_names_its_creator(
    empty_dsn: str, by: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "_BEGIN", schema._BEGIN.replace("'5s'", "'300ms'"))
    other = await asyncpg.connect(empty_dsn, server_settings={"application_name": "installer"})
    await other.execute(f"BEGIN; {by}")
    with pytest.raises(DatabaseUnavailable, match=r"nothing was changed; .*pid \d+ \(installer\), .*: end that"):
        await migrated(empty_dsn, patience_s=0.4)
    said: list[str] = []

    async def migrate() -> None:
        said.extend(await migrated(empty_dsn))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(migrate)
        await anyio.sleep(1.0)
        await other.execute(end)
    (line,) = said
    assert f"pid {other.get_server_pid()} (installer)" in line
    assert ("has not committed it; probably" in line) == by.startswith("CREATE")
    await other.close()
    await schema.verify(ConnectionOptions(empty_dsn))


async def test_migrate_survives_a_schema_that_is_committed_while_it_waits_for_it(empty_dsn: str) -> None:
    other, watcher = await asyncpg.connect(empty_dsn), await asyncpg.connect(empty_dsn)
    await other.execute("BEGIN; CREATE SCHEMA pgworkd")
    waits = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event = 'transactionid'"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(migrated, empty_dsn)
        await until(lambda: watcher.fetchval(waits))
        await other.execute("COMMIT")
    await other.close()
    await watcher.close()
    await schema.verify(ConnectionOptions(empty_dsn))
