"""Statements of the docs for DBAs: data-only restores, row security, inserts without a notification."""

from __future__ import annotations

import subprocess
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from pgworkd import App
from pgworkd.client import batch, enqueue
from pgworkd.database import schema
from tests.kits.apps import app_of_one
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.server import binaries

pytestmark = pytest.mark.slow("dumps and restores")

DATA = ["--data-only", "--load-via-partition-root", "-n", "pgworkd", "--exclude-table-data=pgworkd.schema_version"]
RESTORE = ("psql", "-X", "-v", "ON_ERROR_STOP=1", "--single-transaction")
REPLICA = ("-c", "SET session_replication_role = replica")
YESTERDAY = """
    DO $$ DECLARE v_day date := (now() AT TIME ZONE 'UTC')::date - 1; BEGIN
        EXECUTE format('CREATE TABLE pgworkd.%I PARTITION OF pgworkd.finished_jobs FOR VALUES FROM (%L) TO (%L)',
                       to_char(v_day, '"finished_jobs_"YYYYMMDD'), v_day::timestamp AT TIME ZONE 'UTC',
                       (v_day + 1)::timestamp AT TIME ZONE 'UTC');
    END $$;
    UPDATE pgworkd.finished_jobs SET finished_at = finished_at - interval '1 day'"""
"""The dump has a day that a schema of today has not."""
COUNTS = "SELECT total, done, completed, dead FROM pgworkd.batch_progress ORDER BY name"


@pytest.fixture
def tool(request: pytest.FixtureRequest) -> Any:
    """Runs a program of the server's version; its output in bytes."""
    directory = binaries(request.config.getoption("--pg-bin"))

    def run(name: str, *args: str, data: bytes | None = None) -> bytes:
        if not (directory / name).exists():
            pytest.skip(f"these binaries have no {name}")
        done = subprocess.run([directory / name, *args], input=data, capture_output=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        return done.stdout

    return run


async def some_work(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A half-finished batch, a finished one, and jobs in all states."""
    app = App()

    @app.handler("q")
    async def handle() -> None:
        pass

    async with running(app, dsn):
        done = await batch(db, "done", queue="q")
        await done.add([{}] * 3)
        await done.seal()
        half = await batch(db, "half", queue="q")
        ids = await half.add([{}, {}])
        for job_id in ids:
            await until(waits_for_status(db, job_id, "completed"))
        await until(lambda: db.fetchval("SELECT finished_at IS NOT NULL FROM pgworkd.batches WHERE name = 'done'"))
    await half.add([{}] * 4)
    await enqueue(db, "q", after=[await enqueue(db, "q", serialize_key="s")])
    await db.execute(
        "INSERT INTO pgworkd.endpoints (name, url, secret_name, headers, disabled_at, disabled_queues)"
        """ VALUES ('e', 'https://example.com/', 's', '{"X-A": "1"}', now(), '{q}')"""
    )
    await db.execute("INSERT INTO pgworkd.queues (name, keep_s) VALUES ('q', 60)")
    await db.execute("INSERT INTO pgworkd.queues (name, endpoint) VALUES ('sent', 'e')")


async def everything(db: asyncpg.Connection[Any]) -> list[Any]:
    tables = ["jobs", "finished_jobs", "batches", "batch_additions", "job_dependencies", "queues", "schedules", "audit"]
    tables += ["pending_effects", "endpoints"]
    return [await db.fetch(f"SELECT t::text FROM pgworkd.{table} t ORDER BY 1") for table in tables]  # noqa: S608


@pytest.mark.parametrize("as_documented", [True, False])
async def test_a_data_only_restore_works_without_triggers_or_is_refused(
    dsn: str, db: asyncpg.Connection[Any], empty_dsn: str, tool: Any, *, as_documented: bool
) -> None:
    await some_work(dsn, db)
    await db.execute(YESTERDAY)
    assert (
        await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE finished_at < now() - '12 h'::interval") > 3
    )
    dump = tool("pg_dump", *DATA, dsn)
    other = await asyncpg.connect(empty_dsn)
    await other.execute(schema.text())
    try:
        if not as_documented:
            with pytest.raises(RuntimeError, match=r"counters, as from a dump of data only(.|\n)*= replica"):
                tool(*RESTORE, "-f", "-", empty_dsn, data=dump)
            assert await other.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0
            return
        tool(*RESTORE, *REPLICA, "-f", "-", empty_dsn, data=dump)
        assert await everything(other) == await everything(db)
        assert [tuple(row) for row in await other.fetch(COUNTS)] == [(3, 3, 3, 0), (6, 2, 2, 0)]
        assert not await other.fetchval("SELECT pgworkd.is_origin(NULL)")  # it is a copy, until somebody says otherwise
        await other.execute("SELECT pgworkd.adopt(NULL)")
        async with running(app_of_one(), empty_dsn):
            await until(lambda: none_left(other))
    finally:
        other.terminate()


async def test_deferred_effects_survive_a_dump_and_a_reset_sequence(
    dsn: str, db: asyncpg.Connection[Any], empty_dsn: str, tool: Any
) -> None:
    """A data-only dump, like logical replication, does not carry the sequence of the rows' ids."""
    await db.execute(
        "INSERT INTO pgworkd.workers (name, pid, version, state, lease_s, lease_until)"
        " VALUES ('w', 1, '', 'running', 60, now() + interval '1 min')"
    )
    half = await batch(db, "half", queue="q")
    (first,) = await half.add([{}])
    second = await enqueue(db, "q", after=[first])
    take = "UPDATE pgworkd.jobs SET status = 'running', attempts = 1, worker_id = (SELECT min(id) FROM pgworkd.workers)"
    await db.execute(take + " WHERE id = $1", first)
    holder = await asyncpg.connect(dsn)
    other = await asyncpg.connect(empty_dsn)
    try:
        await holder.execute("BEGIN")
        await holder.execute("SELECT FROM pgworkd.batches FOR UPDATE")
        await holder.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", second)
        async with db.transaction():
            await db.execute("SELECT pgworkd.set_no_wait('on')")
            assert await db.fetchval("SELECT pgworkd.settle_completed($1, '{1}', '{NULL}')", [first]) == [first]
        assert await db.fetchval("SELECT count(*) FROM pgworkd.pending_effects") == 2
        await other.execute(schema.text())
        tool(*RESTORE, *REPLICA, "-f", "-", empty_dsn, data=tool("pg_dump", *DATA, dsn))
        assert await everything(other) == await everything(db)
        await other.execute("SELECT setval('pgworkd.pending_effects_id_seq', 1, false)")
        await other.execute("SELECT pgworkd.mend_sequences()")  # as migrate does
        await other.execute("SELECT pgworkd.put_off(NULL, ARRAY[pgworkd.new_id()], true)")
        assert await other.fetchval("SELECT pgworkd.apply_effects()") == 0
        assert await other.fetchval("SELECT completed FROM pgworkd.batches") == 1
        assert await other.fetchval("SELECT status::text FROM pgworkd.jobs WHERE id = $1", second) == "pending"
    finally:
        holder.terminate()
        other.terminate()


async def none_left(db: asyncpg.Connection[Any]) -> bool:
    return not await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status <> 'completed'")


async def test_row_security_applies_to_inserts_and_only_if_forced_to_functions(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    owner, app = f"o_{uuid4().hex[:12]}", f"a_{uuid4().hex[:12]}"
    try:
        await db.execute(f"""
            CREATE ROLE {owner}; CREATE ROLE {app};
            GRANT USAGE ON SCHEMA pgworkd TO {app}, {owner}; GRANT INSERT, SELECT ON pgworkd.jobs TO {app};
            GRANT ALL ON ALL TABLES IN SCHEMA pgworkd TO {owner}; ALTER TABLE pgworkd.jobs OWNER TO {owner};
            GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pgworkd TO {app}, {owner};
            ALTER TABLE pgworkd.jobs ENABLE ROW LEVEL SECURITY;
            CREATE POLICY mine ON pgworkd.jobs USING (queue = 'mine') WITH CHECK (queue = 'mine')""")
        enqueuer = await db.fetchval("SELECT 'pgworkd.enqueue'::regproc::oid::regprocedure::text")
        await db.execute(f"ALTER FUNCTION {enqueuer} OWNER TO {owner}; SET ROLE {app}")
        await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('mine')")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('theirs')")
        await db.execute("SELECT pgworkd.enqueue('theirs')")
        await db.execute("RESET ROLE; ALTER TABLE pgworkd.jobs FORCE ROW LEVEL SECURITY")
        await db.execute(f"SET ROLE {app}")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            await db.execute("SELECT pgworkd.enqueue('theirs')")
    finally:
        await db.execute("RESET ROLE")
        await db.execute(f"REASSIGN OWNED BY {owner} TO CURRENT_USER; DROP OWNED BY {owner}, {app}")
        await db.execute(f"DROP ROLE {owner}, {app}")


async def test_an_insert_without_the_trigger_is_found_by_the_poll(dsn: str, db: asyncpg.Connection[Any]) -> None:
    await db.execute("ALTER TABLE pgworkd.jobs DISABLE TRIGGER jobs_inserted")
    heard: list[str] = []
    await db.add_listener("pgworkd", lambda *args: heard.append(str(args[3])))
    async with running(app_of_one(), dsn):
        idle = "SELECT bool_and(idle) FROM pgworkd.pools"
        await until(lambda: db.fetchval(idle))
        heard.clear()
        job_id = await insert(db, "q")
        await until(waits_for_status(db, job_id, "completed"))
    assert heard == []
