"""schema.sql as a file: what it creates, and that it can be run again at any time."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd.database import schema
from tests.kits import verbs as v
from tests.kits.sessions import Later, waits_for_lock
from tests.kits.verbs import Db

pytestmark = pytest.mark.usefixtures("t0")

# The functions that users and the daemon call. `text[]` and the like as Postgres prints them.
FUNCTIONS = {
    "add_occurrences(text[], timestamp with time zone[], integer[])": "text[]",
    "add_jobs(uuid, jsonb[], text, text, integer, timestamp with time zone, integer, double precision, "
    "jsonb, uuid[])": "uuid[]",
    "batch_tree(uuid)": "SETOF pgworkd.batch_progress",
    "await_results(uuid[], text, double precision)": "TABLE(id uuid, status text)",
    "batch_results(uuid, boolean, uuid, uuid, integer)": (
        "TABLE(batch_id uuid, batch text, id uuid, payload jsonb, result jsonb)"
    ),
    "cancel(uuid[], text)": "TABLE(id uuid, outcome text)",
    "cancel_batch(uuid, integer, text)": "record",
    "clock()": "timestamp with time zone",
    "create_batch(text, text, text, uuid, boolean, text, boolean, integer, jsonb, jsonb, text, "
    "timestamp with time zone, double precision, integer, jsonb)": ("TABLE(id uuid, created boolean)"),
    "delete_items(uuid, integer, text)": "integer",
    "payload_key(text, jsonb)": "text",
    "item_key(uuid, text)": "text",
    "delete_batch(uuid, text)": "integer",
    "depend(uuid, uuid[], text)": "integer",
    "discard(uuid[], text)": "integer",
    "drop_pool(integer, text, uuid)": "void",
    "edit(uuid, jsonb, timestamp with time zone, integer, text)": "jsonb",
    "enqueue(text, jsonb, text, integer, timestamp with time zone, double precision, timestamp with time zone, integer,"
    " double precision, jsonb, text, timestamp with time zone, double precision, text, text, text, text, uuid, text,"
    " uuid)": "TABLE(id uuid, created boolean, changed boolean)",
    "ensure_partitions(integer)": "integer",
    "expire(integer)": "integer",
    "fail_schedule(text, integer, text)": "boolean",
    "free_batch_key(text, text, text)": "boolean",
    "free_key(text, text, text)": "boolean",
    "matching(text, text, text, text, uuid, text, uuid, integer, boolean, bigint)": "record",
    "new_id()": "uuid",
    "next_due(text[], double precision[], text[])": "TABLE(queue text, due_in_s double precision)",
    "drop_partition(integer)": "text",
    "prune(integer, integer, integer)": "TABLE(rows_deleted integer, dead_moved integer)",
    "put_schedule(text, text, text, text, integer, text, text, text, real, boolean)": "void",
    "register(text, integer, text, real, uuid, text[], text)": "integer",
    "report_progress(uuid[], integer[], real[], text[], integer, uuid)": "uuid[]",
    "result_of(uuid[])": (
        "TABLE(id uuid, status text, result jsonb, error text, finished_at timestamp with time zone)"
    ),
    "retry(uuid[], text, boolean)": "uuid[]",
    "running_of(integer, uuid, double precision, double precision, text[])": "TABLE(id uuid, attempt integer)",
    "seal_batch(uuid)": "boolean",
    "set_pool(integer, text, integer, boolean, integer, text, uuid)": "void",
    "set_queue(text, jsonb)": "void",
    "settle_completed(uuid[], integer[], text[], text[], timestamp with time zone[], integer[],"
    " integer, uuid, real[])": "uuid[]",
    "settle_ended(uuid[], integer[], text[], text[], integer, uuid)": "uuid[]",
    "settle_failed(uuid[], integer[], double precision[], boolean[], text[], text[], text[],"
    " timestamp with time zone[], integer[], integer, uuid)": "TABLE(id uuid, status text)",
    "settle_released(uuid[], integer[], double precision[], text[], integer, uuid, boolean[])": "uuid[]",
    "sign_off(integer, uuid)": "boolean",
    "undepend(uuid[], text)": "uuid[]",
    "wake(text[], timestamp with time zone, boolean)": "void",
}

VIEWS = {
    "all_jobs": "id queue kind status payload result priority run_at created_at claimed_at failed_at finished_at"
    " attempts failures max_attempts error errors worker_id schedule occurrence dedupe_key serialize_key batch_id meta"
    " limit_key expires_at started_at",
    "batch_progress": "id root_id parent_id name depth queue kind state total done completed dead cancelled"
    " max_failures stream final dedupe_key created_at sealed_at cancelled_at finished_at tree_finished_at"
    " dedupe_until max_attempts meta",
    "blocked_jobs": "id queue kind batch_id created_at waiting_on reason stuck_on",
    "job_progress": "id queue kind batch_id attempt done message at claimed_at",
    "kept_keys": "queue dedupe_key until id batch became",
    "queue_stats": "queue due scheduled running failed blocked dead oldest_due_s workers slots paused_until",
    "worker_stats": "id name pid version state started_at seen_at lease_until lost_at running queues kind requested",
}


async def _contents(db: Db) -> dict[str, list[Any]]:
    return {
        table: await db.fetch(f"SELECT * FROM pgworkd.{table} t ORDER BY t::text")  # noqa: S608 - names are ours
        for table in [*v.TABLES, "schema_version"]
    }


async def _some_of_everything(db: Db) -> int:
    """Live data of every kind; the worker that runs some of it."""
    worker_id = await v.worker(db)
    await v.set_pool(db, worker_id)
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency) VALUES ('q', 3)")
    await db.execute("INSERT INTO pgworkd.schedules (name, queue, every_s) VALUES ('s', 'q', 60)")
    await db.execute("SELECT pgworkd.add_occurrences('{s}', $1, '{1}')", [v.at(60)])
    running, failed, dead, completed = await v.insert(db, 4, dedupe_key=None)
    await v.claim(db, worker_id)
    await v.fail(db, [failed])
    await v.fail(db, [dead], permanent=True)
    await v.complete(db, [completed])
    await v.one(db, dedupe_key="k", meta="{}", run_at=v.at(5))
    assert await v.statuses(db, [running]) == ["running"]
    return worker_id


def _statements(text: str) -> list[str]:
    """The file cut at the semicolons that end a statement, as psql does."""
    statements, start, quote = [], 0, ""
    for match in re.finditer(r"--[^\n]*|'[^']*'|\$\w*\$|;", text):
        token = match[0]
        if quote:
            quote = "" if token == quote else quote
        elif token.startswith("$"):
            quote = token
        elif token == ";":
            statements.append(text[start : match.end()])
            start = match.end()
    return statements


@pytest.fixture
async def reader(db: Db) -> AsyncIterator[str]:
    """A role for a dashboard."""
    name = f"reader_{uuid.uuid4().hex[:12]}"
    await db.execute(f"CREATE ROLE {name}; GRANT USAGE ON SCHEMA pgworkd TO {name}")
    yield name
    await db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


# Running the file again


async def test_the_script_can_be_rerun_on_live_data_and_changes_nothing(db: Db) -> None:
    worker_id = await _some_of_everything(db)
    before = await _contents(db)
    for _ in range(2):
        await db.execute(schema.text())
        assert await _contents(db) == before
    assert await v.heartbeat(db, worker_id) is not None
    assert await v.claim_ids(db, worker_id) == []
    await v.clock(60, db)
    await v.heartbeat(db, worker_id)
    assert len(await v.claim_ids(db, worker_id)) == 3
    settings = await db.fetch("SELECT current_setting('search_path'), current_setting('client_min_messages')")
    assert [tuple(row) for row in settings] == [('"$user", public', "notice")], "it leaves the session as it was"


async def test_the_script_can_be_rerun_statement_by_statement_as_psql_does(db: Db) -> None:
    before = await _contents(db)
    for statement in _statements(schema.text()):
        await db.execute(statement)
    assert await _contents(db) == before


async def test_the_script_waits_for_an_open_transaction_and_loses_none_of_its_work(
    db: Db, other: Db, third: Db
) -> None:
    worker_id = await _some_of_everything(db)
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        job_id = await v.one(db, "late")
        migrating = Later(tasks, other.execute(schema.text()))
        await waits_for_lock(third, other)
        assert await third.fetchval("SELECT count(*) FROM pgworkd.jobs") > 0, "readers go on"
        assert await v.claim_ids(db, worker_id, queue="late") == [job_id]
        await db.execute("COMMIT")
        await migrating.answer()
    assert await v.complete(db, [job_id]) == {job_id}


async def test_sessions_that_used_the_old_functions_continue_with_the_new_ones(db: Db, other: Db) -> None:
    worker_id = await v.worker(db)
    for _ in range(7):  # prepared, with a generic plan
        ids = await v.insert(db, 2)
        assert await v.claim_ids(db, worker_id) == ids
        await v.complete(db, ids[:1])
        await v.fail(db, ids[1:], permanent=True)
        assert await v.heartbeat(db, worker_id) is not None
    await other.execute(schema.text())
    ids = await v.insert(db, 2)
    assert await v.claim_ids(db, worker_id) == ids
    assert await v.complete(db, ids[:1]) == {ids[0]}
    assert await v.fail(db, ids[1:]) == {ids[1]: "failed"}
    assert await v.heartbeat(db, worker_id) is not None


async def test_concurrent_installations_do_not_break_each_other(db: Db, other: Db, third: Db) -> None:
    async with anyio.create_task_group() as tasks:
        await db.execute("BEGIN")
        await db.execute("SELECT pg_advisory_xact_lock(1886873445, 0)")
        await db.execute(schema.text())
        script = f"BEGIN; SELECT pg_advisory_xact_lock(1886873445, 0); {schema.text()}; COMMIT"
        second = Later(tasks, other.execute(script))
        await waits_for_lock(third, other)
        await db.execute("COMMIT")
        await second.answer()
    assert await db.fetchval("SELECT version FROM pgworkd.schema_version") == schema.VERSION


async def test_a_users_view_on_our_views_survives_or_stops_the_migration(db: Db) -> None:
    """DROP VIEW .. CASCADE would silently drop it, too."""
    await db.execute("CREATE VIEW public.my_report AS SELECT queue, count(*) FROM pgworkd.all_jobs GROUP BY 1")
    try:
        await db.execute(schema.text())
    except asyncpg.DependentObjectsStillExistError:
        return
    assert await db.fetchval("SELECT to_regclass('public.my_report')") is not None


async def test_grants_survive_a_migration(db: Db, reader: str) -> None:
    """Dropped and created again, views would be granted to nobody, and functions to PUBLIC."""
    await db.execute(f"GRANT SELECT ON pgworkd.all_jobs, pgworkd.queue_stats TO {reader}")
    await db.execute("REVOKE EXECUTE ON FUNCTION pgworkd.discard(uuid[], text) FROM PUBLIC")
    await db.execute(schema.text())
    assert await db.fetchval("SELECT has_table_privilege($1, 'pgworkd.all_jobs', 'SELECT')", reader)
    assert not await db.fetchval("SELECT has_function_privilege($1, 'pgworkd.discard(uuid[],text)', 'EXECUTE')", reader)


# What it creates


async def test_the_signatures_of_public_functions(db: Db) -> None:
    rows = await db.fetch(
        "SELECT p.oid::regprocedure::text, pg_get_function_result(p.oid) FROM pg_proc p "
        "WHERE p.pronamespace = 'pgworkd'::regnamespace"
    )
    made = {re.sub(r"^pgworkd\.", "", name).replace(",", ", "): result for name, result in rows}
    assert {name: made.get(name) for name in FUNCTIONS} == FUNCTIONS


@pytest.mark.parametrize("view", VIEWS)
async def test_the_columns_of_the_views(db: Db, view: str) -> None:
    columns = await db.fetch(
        "SELECT attname, format_type(atttypid, NULL) FROM pg_attribute "
        "WHERE attrelid = ('pgworkd.' || $1)::regclass AND attnum > 0 ORDER BY attnum",
        view,
    )
    assert [name for name, _ in columns] == VIEWS[view].split()
    assert not [name for name, kind in columns if re.search("_text|payload_object|instant", kind)], "no domains"


async def test_the_contents_of_the_views(db: Db) -> None:
    worker_id = await _some_of_everything(db)
    counts = "SELECT status::text, count(*), count(finished_at) FROM pgworkd.all_jobs GROUP BY 1 ORDER BY 1"
    rows = await db.fetch(counts)
    assert [tuple(row) for row in rows] == [
        ("completed", 1, 1), ("dead", 1, 0), ("failed", 1, 0), ("pending", 2, 0), ("running", 1, 0),
    ]  # fmt: skip
    await v.one(db, run_at=v.at(-30))
    (stats,) = await db.fetch("SELECT * FROM pgworkd.queue_stats")
    assert dict(stats) == {
        "queue": "q", "due": 1, "scheduled": 2, "running": 1, "failed": 1, "blocked": 0, "dead": 1,
        "oldest_due_s": 30.0, "workers": 1, "slots": 1, "paused_until": None,
    }  # fmt: skip
    (row,) = await db.fetch("SELECT id, running, queues FROM pgworkd.worker_stats")
    assert tuple(row) == (worker_id, 1, ["q"])


async def test_every_function_has_a_comment_above_it() -> None:
    lines = schema.text().splitlines()
    found = [n for n, line in enumerate(lines) if re.match(r"\s*CREATE (OR REPLACE )?FUNCTION", line)]
    assert len(found) > 30
    silent = [
        lines[n]
        for n in found
        if not lines[n - 1].startswith("--") and "EXECUTE" not in lines[n - 1]  # new_id() stands in a DO block
    ]
    assert silent == []


async def test_the_hot_path_has_exactly_the_indexes_it_needs(db: Db) -> None:
    rows = await db.fetch(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = 'pgworkd.jobs'::regclass AND indpred IS NULL"
    )
    assert [row[0] for row in rows] == ["pgworkd.jobs_pkey"], "all others are partial"
