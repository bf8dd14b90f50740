"""A DBA changes any setting for the whole database, and a daemon works as before.

Set after the application has connected, so that only the daemon's own sessions start with it.
"""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.client import batch, enqueue
from pgworkd.core import events
from pgworkd.engine.life.maintenance import Periods
from tests.kits.daemon import running, until, waits_for_status
from tests.kits.server import database_name

pytestmark = pytest.mark.slow("each operation under each fault, and servers of their own")

PERIODS = Periods(
    rescue_s=0.1, expire_s=0.1, schedules_s=0.1, orphans_s=0.1, partitions_s=0.1, prune_s=0.1, keep_days=1
)
HOSTILE = {
    "statement_timeout": "1",
    "lock_timeout": "1",
    "idle_in_transaction_session_timeout": "1",
    "idle_session_timeout": "20",
    "transaction_timeout": "20",  # from Postgres 17 on
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "search_path": "nowhere",
    "standard_conforming_strings": "off",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "datestyle": "'SQL, DMY'",
    "intervalstyle": "sql_standard",
    "timezone": "'Pacific/Kiritimati'",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "client_encoding": "latin1",
    "client_min_messages": "debug1",
    "quote_all_identifiers": "on",
    "check_function_bodies": "off",
    "row_security": "off",
    "synchronous_commit": "off",
    "plan_cache_mode": "force_custom_plan",
    "enable_indexscan": "off",
    "enable_tidscan": "off",
    "enable_nestloop": "off",
    "jit_above_cost": "0",
    "work_mem": "'64kB'",
}
OLD = "SELECT count(*) FROM pg_class WHERE relname ~ '^finished_jobs_2' AND relname < 'finished_jobs_20200201'"


def app_of() -> App:
    app = App()

    @app.handler("plain", concurrency=4)
    async def plain() -> dict[str, int]:
        return {"n": 1}

    @app.handler("flaky", backoff=0.01)
    async def flaky(job: Job) -> None:
        if job.attempt == 1:
            raise ValueError("not yet")

    @app.handler("money")
    async def money(job: Job) -> None:
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO public.paid VALUES ($1)", job.id)
            await anyio.sleep(0.03)  # longer than the timeouts for idle and for long transactions above

    @app.handler("often", queue="plain", every=1)
    async def often() -> None:
        pass

    return app


async def traffic(db: asyncpg.Connection[Any]) -> list[Any]:
    """Enqueues jobs of all sorts; returns their ids."""
    ids = [await enqueue(db, "plain", serialize_key="k", dedupe_key=f"d{n}") for n in range(3)]
    ids += [await enqueue(db, "flaky"), await enqueue(db, "money"), await enqueue(db, "plain", after=ids[:1])]
    root = await batch(db, "root", queue="plain", on_complete={"queue": "plain"})
    ids += await root.add([{}, {}])
    await root.seal()
    return ids


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_daemon_works_under_any_database_setting(dsn: str, db: asyncpg.Connection[Any], name: str) -> None:
    if name == "transaction_timeout" and db.get_server_version().major < 17:
        pytest.skip("this server does not know it")
    await db.execute("CREATE TABLE public.paid (job uuid PRIMARY KEY)")
    await db.execute("SET pgworkd.clock = '2020-01-01'; SELECT pgworkd.ensure_partitions(1); RESET pgworkd.clock")
    await db.execute(f"ALTER DATABASE {database_name(dsn)} SET {name} = {HOSTILE[name]}")
    async with running(app_of(), dsn, periods=PERIODS) as (_, seen):
        for _ in range(2):
            for job_id in await traffic(db):
                await until(waits_for_status(db, job_id, "completed"))
            await anyio.sleep(0.05)  # idle for longer than the idle session timeout
        await until(lambda: no_old_partition(db))
        assert await db.fetchval("SELECT count(*) FROM public.paid") == 2
    for fault in (
        events.DATABASE_UNAVAILABLE,
        events.MAINTENANCE_FAILED,
        events.JOB_DEAD,
        events.LEASE_FENCED,
        events.OUTCOME_REJECTED,
    ):
        assert seen.all(fault) == []
    assert len(seen.all(events.JOB_FAILED)) == 2, "those that fail once"


async def no_old_partition(db: asyncpg.Connection[Any]) -> bool:
    return not await db.fetchval(OLD)
