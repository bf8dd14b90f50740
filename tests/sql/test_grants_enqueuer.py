"""An application under the role `enqueuer`: all ways to insert, and nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

from pgworkd.client import NewJob, Workflow, batch, enqueue, enqueue_many
from pgworkd.database import grants
from tests.kits.cli import invoke
from tests.kits.schema import Roles, denied
from tests.kits.sessions import Notices
from tests.kits.verbs import Db, at, claim_ids, clock, complete, live, set_pool, worker

pytestmark = pytest.mark.slow("every verb and client as that role")

KEYED = "INSERT INTO pgworkd.jobs (queue, dedupe_key, dedupe_until) VALUES ('q', 'k', $1)"
TARGET = " ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead' DO NOTHING RETURNING id"


@pytest.fixture
async def conn(roles: Roles) -> AsyncIterator[Db]:
    """The connection of the application."""
    async with roles.session("enqueuer") as session:
        yield session


async def test_each_column_that_an_application_may_set(db: Db, conn: Db) -> None:
    job_id = uuid4()
    said = {
        "id": job_id,
        "queue": "q",
        "kind": "k",
        "payload": '{"n": 1}',
        "meta": '{"m": 2}',
        "priority": 3,
        "run_at": at(5),
        "expires_at": at(6),
        "max_attempts": 4,
        "timeout_s": 5.0,
        "dedupe_key": "d",
        "dedupe_until": at(7),
        "serialize_key": "s",
        "limit_key": "l",
        "yields": True,
    }
    names, marks = ", ".join(said), ", ".join(f"${n}" for n in range(1, len(said) + 1))
    sql = f"INSERT INTO pgworkd.jobs ({names}) VALUES ({marks}) RETURNING id"  # noqa: S608 - names are ours
    assert await conn.fetchval(sql, *said.values()) == job_id
    row = await live(db, job_id)
    assert {name: row[name] for name in said} == said
    assert await conn.fetch("SELECT id, queue, dedupe_key, status FROM pgworkd.jobs") == [(job_id, "q", "d", "pending")]


async def test_inserting_where_the_dedupe_key_is_taken(db: Db, conn: Db) -> None:
    job_id = await conn.fetchval(f"{KEYED} RETURNING id", at(9))
    with pytest.raises(asyncpg.UniqueViolationError):
        await conn.execute(KEYED, at(9))
    assert await conn.fetchval(f"{KEYED} ON CONFLICT DO NOTHING RETURNING id", at(9)) is None
    assert await conn.fetchval(KEYED + TARGET, at(9)) is None
    for way, changed in (("skip", False), ("replace", True), ("reschedule", True)):
        assert await enqueue(conn, "q", {"way": way}, delay=60, dedupe_key="k", on_duplicate=way) == (
            job_id,
            False,
            changed,
        )
    assert json.loads((await live(db, job_id))["payload"]) == {"way": "replace"}


async def test_an_expired_key_is_free_at_once(db: Db, roles: Roles) -> None:
    async with roles.acting("enqueuer") as conn:
        await clock(0, db, conn)
        first = await conn.fetchval(f"{KEYED} RETURNING id", at(60))
        assert await claim_ids(db, await worker(db)) == [first]
        await complete(db, [first])
        with pytest.raises(asyncpg.UniqueViolationError):
            await conn.execute(KEYED, at(90))
        await clock(60, conn)
        assert await conn.fetchval(f"{KEYED} RETURNING id", at(90)) != first


async def test_a_session_variable_grants_no_privilege(db: Db, conn: Db) -> None:
    """A changed clock would free a kept key; a forged counter would add to a sealed batch."""
    first = await conn.fetchval(f"{KEYED} RETURNING id", datetime.now(UTC) + timedelta(minutes=1))
    assert await claim_ids(db, await worker(db)) == [first]
    await complete(db, [first])
    await clock(0, conn)
    with pytest.raises(asyncpg.UniqueViolationError):
        await conn.execute(KEYED, at(90))
    assert await conn.fetchval("SELECT pgworkd.clock() = statement_timestamp()")
    root = await batch(conn, "root", queue="q")
    await root.seal()
    for name in ("counted", "sealed", "trusted"):
        await conn.execute(f"SET pgworkd.{name} = 'on'")
    with pytest.raises(asyncpg.PostgresError, match="it takes no more jobs"):
        await conn.execute("INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('q', $1)", root.id)


async def test_an_insert_notifies_an_idle_pool(db: Db, conn: Db, notices: Notices) -> None:
    await set_pool(db, await worker(db))
    await conn.execute("INSERT INTO pgworkd.jobs (queue) VALUES ('q'), ('r')")
    assert await notices.queues() == ["q"]


async def test_enqueue_many_and_a_workflow(db: Db, conn: Db) -> None:
    ids = await enqueue_many(conn, [NewJob("q", {"n": n}, dedupe_key=f"{n}", serialize_key="s") for n in range(3)])
    flow = Workflow()
    flow.add("first", "q")
    flow.add("second", "q", after=["first"], on_failed_dependency="run")
    assert len(await flow.enqueue(conn)) == 2
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == len(ids) + 2
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'blocked'") == 1


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
async def test_the_dependencies_of_a_job_are_checked_again_at_the_commit(
    db: Db, conn: Db, roles: Roles, isolation: str
) -> None:
    first = await enqueue(conn, "q")
    transaction = conn.transaction(isolation=isolation)  # type: ignore[arg-type]
    await transaction.start()
    second = await enqueue(conn, "r", after=[first])
    if isolation == "read_committed":  # the others get 40001, in every role
        async with roles.session("worker") as ours:
            assert await claim_ids(ours, await worker(ours)) == [first]
            await complete(ours, [first])
    await transaction.commit()
    wanted = "pending" if isolation == "read_committed" else "blocked"
    assert (await live(db, second))["status"] == wanted


async def test_a_batch_is_created_filled_and_sealed(db: Db, conn: Db) -> None:
    async with conn.transaction():
        root = await batch(conn, "root", queue="q", dedupe_key="1", on_complete={"queue": "told"})
        below = await root.child("below", queue="q", stream=True)
        await root.add([{"n": 1}])
        await conn.execute("INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('q', $1)", root.id)
        assert await root.seal()
    assert (await batch(conn, "root", queue="q", dedupe_key="1")).id == root.id
    empty = await batch(conn, "empty", queue="q", on_complete={"queue": "told"})
    assert await empty.seal()
    rows = await db.fetch("SELECT id, total, state FROM pgworkd.batch_progress ORDER BY id")
    assert [tuple(row) for row in rows] == [(root.id, 2, "sealed"), (below.id, 0, "open"), (empty.id, 0, "completed")]
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE queue = 'told'") == 1, "its owner calls back"


async def test_a_waiter_learns_that_a_job_has_finished_but_not_its_result(db: Db, conn: Db) -> None:
    job_id = await enqueue(conn, "q", {"secret": 1})
    sql = "SELECT * FROM pgworkd.await_results($1, 'mine', 9)"
    assert await conn.fetch(sql, [job_id]) == []
    await db.execute("SELECT pgworkd.cancel($1)", [job_id])
    assert await conn.fetch(sql, [job_id]) == [(job_id, "cancelled")]


async def test_the_enqueue_command_needs_no_more(db: Db, roles: Roles) -> None:
    command = ("enqueue", "q", '{"n": 1}', "--dsn", roles.dsn("enqueuer"))
    result = await asyncio.to_thread(invoke, command)
    assert result.exit_code == 0, result.stderr
    assert await db.fetchval("SELECT id::text FROM pgworkd.jobs") in result.stdout


NOT_COLUMNS = """
counted begun claim_id listed created_at started_at failed_at lease_until cancel_requested_at occurrence assignment_id
lease_s serialize_scope status attempts failures losses promoted worker_id waiting_on error errors schedule
"""
READ = "payload meta error serialize_key limit_key xmin *"
TABLES = """
workers pools queues rates schedules finished_jobs finished_jobs_other batches batch_additions
job_dependencies pending_effects result_waiters progress audit all_jobs queue_stats batch_progress batch_trees
blocked_jobs kept_keys job_progress worker_stats refused_rows origin
samples queue_samples queue_minutes queue_depths deaths error_groups alert_rules alerts operations stack_requests
"""
FORBIDDEN = [
    *(f"INSERT INTO pgworkd.jobs (queue, {name}) VALUES ('q', NULL)" for name in NOT_COLUMNS.split()),  # noqa: S608
    "INSERT INTO pgworkd.jobs (queue, status, worker_id, attempts) VALUES ('q', 'running', 1, 1)",
    "INSERT INTO pgworkd.jobs (queue, assignment_id) VALUES ('q', gen_random_uuid())",
    "INSERT INTO pgworkd.jobs (queue) VALUES ('q') RETURNING payload",
    "INSERT INTO pgworkd.jobs (id) VALUES (gen_random_uuid()) ON CONFLICT (id) DO UPDATE SET payload = '{}'",
    *(f"SELECT {name} FROM pgworkd.jobs" for name in READ.split()),  # noqa: S608
    "SELECT id FROM pgworkd.jobs WHERE payload ->> 'a' = 'b'",
    "SELECT id FROM pgworkd.jobs FOR UPDATE",
    "UPDATE pgworkd.jobs SET priority = 1",
    "UPDATE pgworkd.jobs SET status = 'pending'",
    "DELETE FROM pgworkd.jobs",
    "TRUNCATE pgworkd.jobs",
    "COPY pgworkd.jobs TO STDOUT",
    *(f"SELECT 1 FROM pgworkd.{table}" for table in TABLES.split()),  # noqa: S608
    *(f"DELETE FROM pgworkd.{table}" for table in ("queues", "schedules", "batches", "workers")),  # noqa: S608
    "INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 60)",
    "INSERT INTO pgworkd.queues (name) VALUES ('q')",
    "INSERT INTO pgworkd.batches (name, queue) VALUES ('b', 'q')",
    "INSERT INTO pgworkd.batch_additions VALUES (gen_random_uuid())",
    "INSERT INTO pgworkd.job_dependencies VALUES (gen_random_uuid(), gen_random_uuid())",
    "CREATE TABLE pgworkd.mine (id int)",
    "CREATE FUNCTION pgworkd.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE VIEW pgworkd.mine AS SELECT 1",
    "CREATE TRIGGER mine BEFORE INSERT ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION pgworkd.jobs_key_wanted()",
    "SELECT * FROM pgworkd.claim(1, 'q', 1)",
    "SELECT pgworkd.register('w', 1, '1', 30)",
    "SELECT * FROM pgworkd.heartbeat(1, NULL, 'running')",
    "SELECT pgworkd.settle_completed('{}', '{}', '{}')",
    "SELECT * FROM pgworkd.settle_failed('{}', '{}', '{}', '{}', '{}', '{}')",
    "SELECT pgworkd.settle_released('{}', '{}', '{}', '{}')",
    "SELECT pgworkd.settle_ended('{}', '{}', '{}', '{}')",
    "SELECT * FROM pgworkd.rescue(1)",
    "SELECT * FROM pgworkd.cancel('{}')",
    "SELECT pgworkd.retry('{}')",
    "SELECT pgworkd.discard('{}')",
    "SELECT pgworkd.edit(gen_random_uuid(), '{}')",
    "SELECT pgworkd.set_queue('q', '{}')",
    "SELECT * FROM pgworkd.prune(1, 0)",
    "SELECT pgworkd.forget_rows(1, 1)",
    "SELECT pgworkd.drop_partition(1)",
    "SELECT pgworkd.ensure_partitions(1)",
    "SELECT pgworkd.archive('{}', 'dead', NULL)",
    "SELECT * FROM pgworkd.result_of('{}')",
    "SELECT * FROM pgworkd.batch_results(gen_random_uuid())",
    "SELECT * FROM pgworkd.cancel_batch(gen_random_uuid())",
    "SELECT pgworkd.enter_batch(gen_random_uuid(), 'jobs')",
    "SELECT pgworkd.undepend('{}')",
    "SELECT pgworkd.free_key('q', 'k')",
    "SELECT pgworkd.free_batch_key('b', 'k')",
    "SELECT pgworkd.put_schedule('s', 'q', NULL, NULL, 60, 'UTC', 'skip', '{}')",
]


async def test_statements_refused_to_an_enqueuer(db: Db, roles: Roles, conn: Db) -> None:
    """One statement of each kind, all on one connection: creating the roles takes longer than being refused."""
    for sql in FORBIDDEN:
        await denied(conn, sql)
    assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs") == 0


async def test_the_refused_columns_and_tables_are_all_that_are_not_granted(db: Db) -> None:
    columns = await db.fetch(
        "SELECT attname FROM pg_attribute WHERE attrelid = 'pgworkd.jobs'::regclass AND attnum > 0"
    )
    granted_ones = set(
        grants.text({role: role for role in grants.ROLES}).partition("GRANT INSERT (")[2].partition(")")[0].split()
    )
    names = {row[0] for row in columns}
    assert names - {name.strip(",") for name in granted_ones} == set(NOT_COLUMNS.split())
    relations = await db.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = 'pgworkd'::regnamespace AND relkind IN ('r', 'p', 'v') "
        "AND relname !~ '^finished_jobs_2'"
    )
    assert {row[0] for row in relations} == {
        "jobs",
        "schema_version",
        "tokens",
        "idempotent_calls",
        "endpoints",
        *TABLES.split(),
    }


async def test_a_trigger_of_another_role_cannot_use_the_owners_trigger_functions(
    db: Db, roles: Roles, conn: Db
) -> None:
    """A regression: on a table of their own, any role could have called them with arbitrary rows."""
    enqueuer = roles.name("enqueuer")
    await db.execute(f"CREATE SCHEMA lair AUTHORIZATION {enqueuer}")
    await conn.execute("CREATE TABLE lair.jobs (queue text, dedupe_key text, status text, batch_id uuid)")
    for function in (
        "job_added",
        "jobs_key_wanted",
        "jobs_inserted",
        "batch_sealed",
        "additions_checked",
        "stream_created",
        "dependencies_added",
    ):
        await denied(
            conn, f"CREATE TRIGGER t AFTER INSERT ON lair.jobs FOR EACH ROW EXECUTE FUNCTION pgworkd.{function}()"
        )


async def test_without_the_grants_usage_of_the_schema_gives_no_privilege(db: Db) -> None:
    """Privileges given by hand to a role that inserts: functions that run as the owner must not be granted by them."""
    name = f"app_{uuid4().hex[:12]}"
    await db.execute(
        f"CREATE ROLE {name}; GRANT USAGE ON SCHEMA pgworkd TO {name}; GRANT INSERT ON pgworkd.jobs TO {name}"
    )
    try:
        await db.execute(f"SET ROLE {name}")
        await db.execute("INSERT INTO pgworkd.jobs (queue, dedupe_key) VALUES ('q', 'k')")
        for call in (
            "forget_rows(1, 1)",
            "drop_partition(1)",
            "ensure_partitions(1)",
            "enqueue('q')",
            "seal_batch(gen_random_uuid())",
        ):
            await denied(db, f"SELECT pgworkd.{call}")
    finally:
        await db.execute(f"RESET ROLE; DROP OWNED BY {name}; DROP ROLE {name}")


async def test_an_unknown_batch_is_reported_as_unknown(conn: Db) -> None:
    with pytest.raises(asyncpg.PostgresError, match="does not exist"):
        await conn.execute("INSERT INTO pgworkd.jobs (queue, batch_id) VALUES ('q', $1)", UUID(int=7))
