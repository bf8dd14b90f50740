"""A database of any previous version, full of jobs, becomes what a fresh one is, and loses nothing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from tests.kits.alerts import count, die
from tests.kits.daemon import running, until
from tests.kits.planting import ROOT
from tests.kits.schema import Roles, catalog, differences, granted
from tests.kits.verbs import Db, claim, fail, insert, worker

from .versions import TOKEN, contents, filled, grants_of, schema_of

pytestmark = pytest.mark.slow("databases of each version, migrated, compared and used by each role")

MIGRATIONS = sorted((ROOT / "pgworkd" / "sql" / "migrations").glob("*.sql"))
NO_SCRIPT = {11, 12}
"""Versions that changed what each installation makes anew, as functions, and nothing else."""


@pytest.fixture(params=range(1, schema.VERSION))
def version(request: pytest.FixtureRequest) -> int:
    """Each version that can be migrated."""
    return int(request.param)


@pytest.fixture
async def old(empty_dsn: str, version: int) -> AsyncIterator[Db]:
    """A session in a database of that version."""
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute(schema_of(version))
    yield connection
    connection.terminate()


def test_migrations_are_numbered_and_end_at_this_version() -> None:
    numbers = [int(path.name[:4]) for path in MIGRATIONS]
    assert sorted([*numbers, *NO_SCRIPT]) == list(range(1, schema.VERSION + 1))
    for number, path in zip(numbers[1:], MIGRATIONS[1:], strict=True):
        assert f"v.version >= {number})" in path.read_text(encoding="utf-8"), f"{path.name} would run again"


async def test_an_old_database_becomes_like_a_fresh_one_and_keeps_every_row(
    db: Db, old: Db, empty_dsn: str, version: int
) -> None:
    await filled(old)
    before = await contents(old)
    statuses = {row["status"] for row in before["jobs"] + before["finished_jobs"]}
    assert statuses == {"blocked", "pending", "running", "failed", "dead", "completed", "cancelled", "expired"}
    assert not [table for table, rows in before.items() if not rows], "nothing of this is tested"
    assert await schema.migrate(ConnectionOptions(empty_dsn)) == (version, schema.VERSION)
    assert await contents(old) == before
    assert differences(await catalog(old), await catalog(db)) == []


async def test_psql_upgrades_an_old_database_too(db: Db, old: Db) -> None:
    await filled(old)
    before = await contents(old)
    await old.execute(schema.script())
    assert await contents(old) == before
    assert differences(await catalog(old), await catalog(db)) == []


async def test_an_upgrade_that_waits_for_a_claim_holds_nothing_that_the_claim_is_about_to_take(
    old: Db, empty_dsn: str
) -> None:
    """Else each waits for the other, again and again: under busy daemons it never got its locks."""
    session = await asyncpg.connect(empty_dsn)
    pid = session.get_server_pid()
    await old.execute("BEGIN; LOCK TABLE pgworkd.workers IN ROW SHARE MODE")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.execute, schema.script())
        await until(lambda: old.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND NOT granted)", pid))
        await old.execute("LOCK TABLE pgworkd.jobs, pgworkd.queues IN ROW EXCLUSIVE MODE NOWAIT; COMMIT")
    assert await old.fetchval("SELECT version FROM pgworkd.schema_version") == schema.VERSION
    await session.close()


async def test_the_script_of_a_previous_version_leaves_a_newer_schema_unchanged(db: Db, version: int) -> None:
    before = await catalog(db)
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="newer than this script"):
        await db.execute(schema_of(version))
    assert differences(await catalog(db), before) == []


async def test_jobs_in_flight_on_an_old_worker_are_settled_and_the_rest_is_processed(old: Db, empty_dsn: str) -> None:
    worker = await filled(old)
    await schema.migrate(ConnectionOptions(empty_dsn))
    assert await old.fetchval("SELECT pgworkd.heartbeat($1, $2, 'running')", worker, TOKEN)
    ran = await old.fetch(
        "SELECT id, attempts FROM pgworkd.jobs WHERE status = 'running' AND cancel_requested_at IS NULL"
    )
    cancelled = await old.fetch("SELECT id, attempts FROM pgworkd.jobs WHERE cancel_requested_at IS NOT NULL")
    assert (len(ran), len(cancelled)) == (32, 1)
    ids, attempts = [row["id"] for row in ran], [row["attempts"] for row in ran]
    settle = "SELECT pgworkd.settle_completed($1, $2, $3, NULL, NULL, NULL, $4, $5, NULL)"
    won = await old.fetchval(settle, ids, attempts, [None] * len(ids), worker, TOKEN)
    assert sorted(won) == sorted(ids)
    end = "SELECT count(*) FROM pgworkd.settle_ended($1, $2, '{cancelled}', '{NULL}', $3, $4)"
    assert await old.fetchval(end, [cancelled[0]["id"]], [cancelled[0]["attempts"]], worker, TOKEN) == 1
    assert await old.fetchval("SELECT pgworkd.sign_off($1, $2)", worker, TOKEN)
    await old.execute("UPDATE pgworkd.jobs SET run_at = now() WHERE run_at > now() AND schedule IS NULL")
    app, seen = App(), []

    async def handle(job: Job) -> None:
        seen.append(job.id)

    for kind, queue in {"q": "q", "kind0": "q", "kind1": "q", "kind2": "q", "slow": "slow"}.items():
        app.handler(kind, queue=queue)(handle)

    left = "SELECT count(*) FROM pgworkd.jobs WHERE status NOT IN ('completed', 'dead') AND schedule IS NULL"
    async with running(app, empty_dsn) as (_, recorder):
        await until(lambda: none(old, left))
        assert recorder.all(events.JOB_FAILED) == []
    assert len(seen) == len(set(seen)) > 60
    batches = await old.fetch("SELECT name, state, total, done FROM pgworkd.batch_progress ORDER BY name")
    assert [tuple(row) for row in batches] == [
        ("cancelled", "cancelled", 1, 1),
        ("child", "completed", 2, 2),
        ("empty", "completed", 0, 0),
        ("other", "open", 3, 3),
        ("root", "completed", 2, 2),
    ]


@pytest.mark.parametrize("migrates", ["a superuser", "the owner"])
async def test_a_worker_role_keeps_working_before_the_grants_are_applied_again(
    old: Db, empty_dsn: str, version: int, migrates: str
) -> None:
    """Functions that a migration replaced, or added as a step of others, have their owner and their rights."""
    async with granted(empty_dsn, old, grants_of(version)) as roles:
        worker = await filled(old)
        rights = await old.fetch(_RIGHTS)
        await schema.migrate(ConnectionOptions(roles.dsn("owner") if migrates == "the owner" else empty_dsn))
        assert await old.fetch(_RIGHTS) == rights
        async with roles.session("worker") as session, roles.session("enqueuer") as application:
            insert = "INSERT INTO pgworkd.jobs (queue, serialize_key) VALUES ('new', 'k'), ('new', 'k')"
            await application.execute(insert)
            claim = "SELECT id, attempt FROM pgworkd.claim($1, 'new', 9, p_token => $2) WHERE id IS NOT NULL"
            ((id_, attempt),) = await session.fetch(claim, worker, TOKEN)
            settle = "SELECT pgworkd.settle_completed($1, $2, '{NULL}', p_worker => $3, p_token => $4)"
            assert await session.fetchval(settle, [id_], [attempt], worker, TOKEN) == [id_]
            assert len(await session.fetch(claim, worker, TOKEN)) == 1, "its key has been passed on"
            for call in MAINTENANCE:
                await session.execute(call)
        kept = await old.fetch(_EXECUTABLE, [roles.names[role] for role in ("worker", "enqueuer", "reader")])
        await old.execute(Roles(empty_dsn).sql)
        assert kept == await old.fetch(_EXECUTABLE, [roles.names[role] for role in ("worker", "enqueuer", "reader")])


_EXECUTABLE = """
    SELECT r.name, p.oid::regprocedure::text FROM unnest($1::text[]) AS r (name), pg_proc p
    WHERE p.pronamespace = 'pgworkd'::regnamespace AND has_function_privilege(r.name, p.oid, 'EXECUTE')
    ORDER BY 1, 2"""
_RIGHTS = """
    SELECT replace(p.proname, 'freed', 'after_ended') AS name, p.proowner::regrole::text, p.prosecdef,
           (SELECT array_agg(a.grantee::regrole::text ORDER BY a.grantee) FROM aclexplode(p.proacl) a)
    FROM pg_proc p
    WHERE p.proname IN ('depend', 'set_pool', 'claim', 'settle_completed', 'batch_ended', 'freed', 'after_ended')
    ORDER BY name"""
MAINTENANCE = (
    "SELECT * FROM pgworkd.rescue(1)",
    "SELECT * FROM pgworkd.expire_jobs(10)",
    "SELECT pgworkd.unblock()",
    "SELECT pgworkd.mend_dependencies(10)",
    "SELECT pgworkd.apply_effects(10)",
    "SELECT * FROM pgworkd.prune(7, 7, 10)",
    "SELECT pgworkd.ensure_partitions()",
    "SELECT * FROM pgworkd.wanted(1)",
    "SELECT * FROM pgworkd.ensure_schedules()",
)


async def none(db: Db, count: str) -> bool:
    """Whether the table is empty."""
    return bool(await db.fetchval(count) == 0)


@pytest.mark.parametrize("version", [1], indirect=True)
async def test_a_database_lacking_columns_of_its_version_gets_them(db: Db, old: Db, empty_dsn: str) -> None:
    """Version 1 was not numbered while it was being developed: any of these may be missing there."""
    await filled(old)
    lacks: dict[str, Any] = {
        "workers": ["schedules", "kinds"],
        "queues": ["max_losses"],
        "rates": ["searched"],
        "schedules": ["missed_grace_s", "waits_for_retries", "retired_at", "in_force_since"],
        "finished_jobs": ["began_at"],
        "batches": ["completed_called", "failure_called"],
        "pending_effects": ["put_off_at", "done_to", "left_behind"],
    }
    await old.execute("DROP VIEW pgworkd.all_jobs")
    for table, columns in lacks.items():
        drops = ", ".join(f"DROP COLUMN {column} CASCADE" for column in columns)
        await old.execute(f"ALTER TABLE pgworkd.{table} {drops}")
    await old.execute(
        "CREATE INDEX jobs_running ON pgworkd.jobs (worker_id); CREATE FUNCTION pgworkd.next_due(text[]) RETURNS int"
        " LANGUAGE sql AS 'SELECT 1'; ALTER TABLE pgworkd.audit DROP CONSTRAINT audit_what_check"
    )
    await schema.migrate(ConnectionOptions(empty_dsn))
    assert differences(await catalog(old), await catalog(db)) == []


@pytest.mark.parametrize("version", [1], indirect=True)
async def test_an_upgrade_drops_priority_ageing_and_keeps_the_other_limits(old: Db) -> None:
    await old.execute(
        "ALTER TABLE pgworkd.queues DROP COLUMN limited, ADD COLUMN ageing_s pgworkd.period_s;"
        " ALTER TABLE pgworkd.queues ADD COLUMN limited boolean GENERATED ALWAYS AS"
        " (num_nonnulls(max_running, limit_per_key, rate, rate_per_key, ageing_s) > 0 OR fair) STORED;"
        " INSERT INTO pgworkd.queues (name, ageing_s, max_running) VALUES ('q', 60, NULL), ('r', 60, 5)"
    )
    await old.execute(schema.text())
    assert await old.fetch("SELECT name, limited FROM pgworkd.queues ORDER BY name") == [("q", False), ("r", True)]
    await insert(old, 1)
    assert len(await claim(old, await worker(old))) == 1


@pytest.mark.parametrize("version", [1, 14], indirect=True)
async def test_keys_of_jobs_of_batches_stay_taken_by_an_upgrade_and_become_those_of_their_batch(
    old: Db, empty_dsn: str
) -> None:
    """Also of a job that has ended and keeps its key; one that is too long stays a key of the queue."""
    batch_id = await old.fetchval("SELECT id FROM pgworkd.create_batch('b', 'q')")
    keys = ["kept", "running", "dead", "waits", "x" * 475, "x" * 476, "none"]
    for key in keys:
        await old.execute(
            "INSERT INTO pgworkd.jobs (queue, batch_id, dedupe_key, dedupe_until, max_attempts)"
            " VALUES ('q', $1, $2, CASE WHEN $3 THEN now() + interval '1 day' END, 1)",
            None if key == "none" else batch_id,
            key,
            key == "kept",
        )
    ids = [row["id"] for row in await claim(old, await worker(old), 3)]
    await old.execute("SELECT pgworkd.settle_completed($1, '{1}', '{NULL}')", ids[:1])
    await fail(old, ids[2:], permanent=True)
    await schema.migrate(ConnectionOptions(empty_dsn))
    insert = "INSERT INTO pgworkd.jobs (queue, batch_id, dedupe_key) VALUES ('q', $1, $2)"
    for key in ("kept", "running", "waits", "x" * 475):
        with pytest.raises(asyncpg.UniqueViolationError):
            await old.execute(insert, batch_id, key)
        await old.execute(insert, None, key)
    for key in ("x" * 476, "none"):
        with pytest.raises(asyncpg.UniqueViolationError):
            await old.execute(insert, None, key)
    await old.execute(insert, batch_id, "dead")
    with pytest.raises(asyncpg.UniqueViolationError):
        await old.execute("SELECT pgworkd.retry($1)", ids[2:])


@pytest.mark.parametrize("version", [7], indirect=True)
async def test_an_upgrade_keeps_the_groups_of_errors(old: Db, empty_dsn: str) -> None:
    """A death afterwards is one of the group that there is, although groups are told apart in another way."""
    messages = ["it broke at 7", "über \U0001f600 7", "x" * 2000]
    for message in messages:
        await die(old, message)
    await count(old)
    before = await old.fetch(
        "SELECT id, queue, kind, error_type, pattern, deaths FROM pgworkd.error_groups ORDER BY id"
    )
    await old.execute(
        "INSERT INTO pgworkd.schedules (name, queue, every_s, timezone) VALUES ('s', 'q', 60, 'Asia/Tokyo')"
    )
    await schema.migrate(ConnectionOptions(empty_dsn))
    for message in messages:
        await die(old, message.replace("7", "8"))
    await count(old)
    after = await old.fetch("SELECT id, queue, kind, error_type, pattern, deaths FROM pgworkd.error_groups ORDER BY id")
    assert [tuple(row)[:-1] for row in after] == [tuple(row)[:-1] for row in before]
    assert [(b["deaths"], a["deaths"]) for b, a in zip(before, after, strict=True)] == [(1, 2)] * 3
    assert await old.fetchval("SELECT timezone FROM pgworkd.schedules") == "UTC"


def test_the_contract_shows_the_tables_as_they_are() -> None:
    text = (ROOT / "schema.sql").read_text(encoding="utf-8")
    assert not re.findall(r"ADD COLUMN|DROP (?:FUNCTION|INDEX|VIEW|COLUMN)|ALTER TABLE", text)


async def test_what_was_told_before_an_upgrade_stays_told_and_what_waits_is_told_after_it(empty_dsn: str) -> None:
    old = await asyncpg.connect(empty_dsn)
    await old.execute(schema_of(14))
    await old.execute(
        """INSERT INTO pgworkd.alert_rules (name, queue, kind) VALUES ('a', 'alerts', 'pgworkd.alert.a');
           INSERT INTO pgworkd.jobs (queue, status, attempts, failures, failed_at, error)
           SELECT 'q', 'dead', 1, 1, now(), 'cause ' || (ARRAY['x', 'y', 'y'])[n] FROM generate_series(1, 3) n;
           SELECT pgworkd.note_deaths(ARRAY(SELECT id FROM pgworkd.jobs)), pgworkd.count_deaths();
           DELETE FROM pgworkd.jobs WHERE queue = 'alerts' AND (payload ->> 'group')::bigint
               = (SELECT id FROM pgworkd.error_groups WHERE pattern = 'cause y')"""
    )
    await schema.migrate(ConnectionOptions(empty_dsn))
    rows = await old.fetch(
        """SELECT g.pattern, a.told, a.due_at <= now() AS due, a.reason FROM pgworkd.alerts a
           JOIN pgworkd.error_groups g ON g.id = a.group_id ORDER BY 1"""
    )
    assert [tuple(row) for row in rows] == [("cause x", 0, True, "new"), ("cause y", 2, None, None)]
    old.terminate()
