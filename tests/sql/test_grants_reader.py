"""A dashboard under the role `reader`: it sees everything and changes nothing."""

from __future__ import annotations

import pytest

from pgworkd.admin import Admin
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import UsageError
from tests.kits.batches import batch
from tests.kits.schema import Roles, denied
from tests.kits.verbs import Db, claim_ids, complete, one, worker

from .test_grants import FUNCTIONS, TABLES


async def test_a_reader_sees_every_table_and_view(db: Db, roles: Roles) -> None:
    job_id = await one(db, payload='{"n": 1}')
    assert await claim_ids(db, await worker(db)) == [job_id]
    await complete(db, [job_id], results=['"done"'])
    blocked = await one(db)
    async with db.transaction():
        await db.execute("SELECT pgworkd.depend($1, $2)", await one(db), [blocked])
    batch_id = await batch(db)
    async with roles.session("reader") as ours:
        for table in set(TABLES) - {
            "workers",
            "tokens",
            "idempotent_calls",
            "endpoints",
        }:  # of which it sees what is no secret
            await ours.fetch(f"SELECT * FROM pgworkd.{table}")  # noqa: S608 - names are ours
        assert await ours.fetchval("SELECT result FROM pgworkd.all_jobs WHERE id = $1", job_id) == '"done"'
        assert await ours.fetchval("SELECT result FROM pgworkd.result_of($1)", [job_id]) == '"done"'
        assert await ours.fetchval("SELECT reason FROM pgworkd.blocked_jobs") == "waits for 1 job"
        assert await ours.fetchval("SELECT name FROM pgworkd.batch_tree($1)", batch_id) == "b"
        assert await ours.fetch("SELECT * FROM pgworkd.batch_results($1)", batch_id) == []


async def test_read_only_commands_work_as_a_reader(db: Db, roles: Roles) -> None:
    job_id = await one(db)
    batch_id = await batch(db)
    async with Admin(ConnectionOptions(roles.dsn("reader"))) as admin:
        await admin.verify()
        assert [row.queue for row in await admin.queues.find()] == ["q"]
        assert [row.id for row in (await admin.jobs.find()).rows] == [job_id]
        assert (await admin.jobs.get(job_id)) is not None
        assert (await admin.workers(), await admin.schedules.find(), await admin.audit()) == ([], [], [])
        assert (await admin.stats("q")).depth == await admin.queues.depth("q") == 1
        assert [row.id for row in await admin.batches.find()] == [batch_id]
        assert len(await admin.batches.tree(batch_id)) == 1
        assert await admin.queues.settings() == {}
        assert await admin.keys.find() == []
        assert (await admin.doctor()).dead == 0
        assert await admin.health()
        with pytest.raises(UsageError, match=r"refused us.*42501"):
            await admin.jobs.cancel([job_id])


async def test_a_reader_cannot_write_to_any_table(db: Db, roles: Roles) -> None:
    rows = await db.fetch(
        "SELECT c.relname, a.attname, c.relkind = 'v'::char FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid "
        "WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind IN ('r', 'p', 'v') AND a.attnum = 1"
    )
    assert {row[0] for row in rows} > TABLES.keys()
    async with roles.session("reader") as ours:
        for table, column, is_view in rows:
            await denied(ours, f"DROP {'VIEW' if is_view else 'TABLE'} pgworkd.{table}")
            if not is_view:
                await denied(ours, f"INSERT INTO pgworkd.{table} DEFAULT VALUES")
                await denied(ours, f"UPDATE pgworkd.{table} SET {column} = DEFAULT")  # noqa: S608 - names are ours
                await denied(ours, f"DELETE FROM pgworkd.{table}")  # noqa: S608
                await denied(ours, f"TRUNCATE pgworkd.{table}")
                await denied(ours, f"SELECT FROM pgworkd.{table} FOR SHARE")


async def test_a_reader_cannot_call_any_function_that_writes(db: Db, roles: Roles) -> None:
    """All except those that are granted, each called with NULLs: EXECUTE is checked before anything else."""
    own = {name for who, names in FUNCTIONS.items() if "reader" in who for name in names.split()}
    rows = await db.fetch(
        "SELECT proname, pronargs, proargtypes::regtype[]::text[], provolatile FROM pg_proc "
        "WHERE pronamespace = 'pgworkd'::regnamespace AND prorettype <> 'trigger'::regtype"
    )
    async with roles.session("reader") as ours:
        for name, _, types, volatility in rows:
            call = f"SELECT pgworkd.{name}({', '.join(f'NULL::{each}' for each in types)})"
            if name not in own:
                await denied(ours, call)
            else:
                assert volatility in (b"s", b"i"), f"{name} may write"
        await denied(ours, "CREATE TABLE pgworkd.mine (id int)")
        await denied(ours, "SELECT setval('pgworkd.workers_id_seq', 1)")
