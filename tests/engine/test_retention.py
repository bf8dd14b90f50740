"""The history is pruned while others read and write it: nobody waits for long."""

from __future__ import annotations

import time
from typing import Any

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.maintenance import Periods
from tests.kits.daemon import insert, running, until, waits_for_status

DAYS = 30
PERIODS = Periods(prune_s=0.1, keep_days=1)
SETTLE_S = 2.0
"""Far longer than a settle takes on a busy machine, far shorter than 30 times 200 ms."""
OLD = "SELECT count(*) FROM pg_class WHERE relname ~ '^finished_jobs_2' AND relkind = 'r' AND relname < $1"


def app_of() -> App:
    app = App()

    @app.handler("q")
    async def handle() -> None:
        await anyio.lowlevel.checkpoint()

    return app


async def old_partitions(db: asyncpg.Connection[Any]) -> str:
    """Creates DAYS partitions that are due to be dropped; the name of the first that is not."""
    await db.execute("SELECT set_config('pgworkd.clock', (now() - interval '90 days')::text, false)")
    await db.fetchval("SELECT pgworkd.ensure_partitions($1)", DAYS - 1)
    await db.execute("RESET pgworkd.clock")
    keep = "SELECT 'finished_jobs_' || to_char((now() AT TIME ZONE 'UTC')::date - 1, 'YYYYMMDD')"
    return str(await db.fetchval(keep))


async def test_a_reader_of_the_history_does_not_delay_settles(dsn: str, db: asyncpg.Connection[Any]) -> None:
    first_kept = await old_partitions(db)
    reader = await asyncpg.connect(dsn)
    try:
        await reader.execute("BEGIN; SELECT count(*) FROM pgworkd.all_jobs")  # like pg_dump, on all tables
        async with running(app_of(), dsn, periods=PERIODS) as (_, seen):
            began = time.monotonic()
            for n in range(1, 21):
                started = time.monotonic()
                await insert(db, "q")
                await seen.wait(events.JOB_COMPLETED, n)
                assert time.monotonic() - started < SETTLE_S
            await anyio.sleep(max(0.0, 0.5 - (time.monotonic() - began)))  # maintenance has pruned several times
            assert await db.fetchval(OLD, first_kept) == DAYS
            await reader.execute("COMMIT")
            await until(lambda: _none_left(db, first_kept))
            assert seen.all(events.MAINTENANCE_FAILED) == []
            assert seen.all(events.DATABASE_UNAVAILABLE) == []
    finally:
        reader.terminate()


async def _none_left(db: asyncpg.Connection[Any], first_kept: str) -> bool:
    return not await db.fetchval(OLD, first_kept)


async def test_a_queue_retention_beyond_the_partitions_is_reported_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 86401), ('less', 86400)")
    async with running(app_of(), dsn, periods=PERIODS) as (_, seen):
        assert await seen.wait(events.RETENTION_CUT) == {"queue": "q", "keep_s": 86401, "keep_days": 1}
        await db.execute("UPDATE pgworkd.queues SET keep_s = 90000 WHERE name = 'less'")
        await seen.wait(events.RETENTION_CUT, queue="less", keep_s=90000)
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "completed"))
    assert len(seen.all(events.RETENTION_CUT)) == 2


MANY = """
    INSERT INTO pgworkd.finished_jobs (id, finished_at, run_at, created_at, status, priority, attempts, failures, queue,
                                       payload, errors)
    SELECT gen_random_uuid(), now() - interval '30 days' - n * interval '1 s', now(), now(), 'completed', 0, 1, 0, 'q',
           '{}', '[]'
    FROM generate_series(1, 1500000) n"""
"""To read them takes longer than a command may; to read them for each of eight days far longer than a settle."""
DAYS_OF_OURS = """SELECT c.oid::regclass FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'pgworkd.finished_jobs'::regclass AND c.relname <> 'finished_jobs_other'"""


@pytest.mark.slow("a million rows and more, read and not read")
async def test_a_restored_history_of_no_day_delays_neither_start_nor_settles(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """As after a data-only restore: all of it is in the default partition, and no day is there."""
    for row in await db.fetch(DAYS_OF_OURS):
        await db.execute(f"DROP TABLE {row[0]}")
    await db.execute("ALTER TABLE pgworkd.finished_jobs_other SET (autovacuum_enabled = off)")
    await db.execute(MANY)
    options = ConnectionOptions(dsn, connect_timeout_s=5, command_timeout_s=0.3)
    began, periods = time.monotonic(), Periods(partitions_s=0.1, prune_s=3600.0)
    async with running(app_of(), dsn, periods=periods, connection=options) as (_, seen):
        assert time.monotonic() - began < 5
        longest, n = 0.0, 0
        while len(await db.fetch(DAYS_OF_OURS)) < 6 or n < 20:  # from the day after tomorrow on
            n += 1
            started = time.monotonic()
            await insert(db, "q")
            await seen.wait(events.JOB_COMPLETED, n)
            longest = max(longest, time.monotonic() - started)
        assert longest < SETTLE_S
    for fault in (events.MAINTENANCE_FAILED, events.DATABASE_UNAVAILABLE, events.OUTCOMES_DELAYED):
        assert seen.all(fault) == []
