"""`migrate`: idempotent, safe to run concurrently, and without effect if it fails."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd.core import events
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import DatabaseUnavailable
from tests.kits.apps import app_of_one
from tests.kits.daemon import running, until
from tests.kits.server import set_read_only

pytestmark = pytest.mark.slow("whole schemas installed, beside sessions that hold locks")


def connection(dsn: str, **changes: float) -> ConnectionOptions:
    return ConnectionOptions(dsn, **({"connect_timeout_s": 5, "command_timeout_s": 5} | changes))


async def test_migrate_installs_and_is_idempotent(empty_dsn: str) -> None:
    assert await schema.migrate(connection(empty_dsn)) == (None, schema.VERSION)
    assert await schema.migrate(connection(empty_dsn)) == (schema.VERSION, schema.VERSION)
    await schema.verify(connection(empty_dsn))


async def test_a_concurrent_migrate_waits_beyond_the_statement_timeout(empty_dsn: str) -> None:
    first = await asyncpg.connect(empty_dsn)
    transaction = first.transaction()
    await transaction.start()
    await first.execute(f"SELECT pg_advisory_xact_lock({schema._LOCK[0]}, {schema._LOCK[1]})")
    await first.execute(schema.text())
    done: list[tuple[int | None, int]] = []

    async def second() -> None:
        done.append(await schema.migrate(connection(empty_dsn, connect_timeout_s=1, command_timeout_s=0.2)))

    watcher = await asyncpg.connect(empty_dsn)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second)
        waits = (
            "SELECT extract(epoch FROM now() - query_start) > 0.4 FROM pg_stat_activity "
            "WHERE wait_event = 'advisory' AND datname = current_database()"
        )
        await until(lambda: watcher.fetchval(waits), limit_s=4)
        assert done == []
        await transaction.commit()
    assert [after for _, after in done] == [schema.VERSION]
    await first.close()
    await watcher.close()


async def test_migrate_under_a_running_daemon_harms_no_job(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """Functions are dropped and recreated: the daemon's prepared statements must not fail permanently."""
    async with running(app_of_one(), dsn) as (_, seen):
        for round_ in range(1, 4):
            await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 50)")
            await schema.migrate(connection(dsn), force=True)
            await seen.wait(events.JOB_COMPLETED, count=50 * round_)
        assert seen.all(events.JOB_FAILED) == []
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE attempts = 1") == 150


async def test_migrate_on_a_read_only_server_reports_it(empty_dsn: str) -> None:
    db = await asyncpg.connect(empty_dsn)
    await set_read_only(empty_dsn, db, "on")
    await db.close()
    with pytest.raises(DatabaseUnavailable, match=r"reads|standby"):
        await schema.migrate(connection(empty_dsn))
