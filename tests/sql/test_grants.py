"""`pgworkd grants`: which role may do what, for every function, table and column that exists."""

from __future__ import annotations

import re

import asyncpg
import pytest

from pgworkd.database import grants, schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import UsageError
from tests.kits.schema import Roles, denied
from tests.kits.verbs import Db

NOBODY = """
additions_checked batch_created batch_moved batch_sealed check_callback check_dependencies dependencies_added
enter_batch is_ours job_added jobs_inserted jobs_key_wanted move queue_dated queue_rerouted queues_audit queues_changed
rates_follow queue_rescoped schedule_changed schedule_ended schedules_audit schedules_notify stream_created
mend_sequences forget_audit forget_calls forget_kept forget_tokens forget_undated
"""
"""Called by triggers and by functions that run as the owner."""
FUNCTIONS = {
    "worker enqueuer reader": "clock",
    "worker enqueuer": """
        add_jobs await_results create_batch depend enqueue enqueue_once item_key new_id payload_key seal_batch
    """,
    "worker reader": """
        rule_of server_id is_origin
        batch_results batch_tree became became_all depth finished_of jobs_of known_pools made_at next_priority result_of
        waits_keyed waits_plain waits_suspect with_below
        histogram_bounds percentile throughput error_message error_pattern error_place error_group
        dead_groups
        explain place_of before_in_line held_back in_shell key_left rate_left who_could_run
        key_is_free in_time running_in burst
    """,
    "worker": """
        belong adopt
        due_keys kinds_waiting next_keys apply_effects free_batches no_wait put_off set_no_wait unlocked
        is_within is_since is_later stuck_lines unblock_lines forget_rates kinds_elsewhere worker_ended
        declare_schedules declare_rules declarer enable_schedule missed_since remove_schedule retire_schedules
        run_schedule
        add_error add_occurrences advance allowance batch_ended archive by_turn call_back cancel cancel_batch
        cancel_below claim clock_after_waiting complete_own
        delete_batch differing discard drop_partition drop_pool edit ensure_partitions ensure_schedules expire
        expire_jobs count_ended finer_counts usual_runs next_alert_s of_finished_tree
        in_parts all_done archive_dead cancel_dependents cancel_these count_down forget_batches forget_progress
        ask_stack answer_stack forget_stacks
        forget_workers free_these give_back park presume_dead promote_these restore_these
        report_refused rescue_jobs expire_these promote_lines mend_these apply_ends
        apply_frees restore_occurrences done_of fail_schedule fold follow forget_rows free_batch_key free_key
        free_keys after_ended heartbeat in_order is_awaited keep_keys keyed_behind key_allowance
        key_has_room scope_of lock_queue lock_queues lock_trees lock_trees_of matching mend_batches
        mend_dependencies first_run_at next_due notify_pools of_key pass_on payloads pick pick_suspect places_after
        promote prune put_schedule register reopened report_progress rescue retry running_of set_pool
        set_queue settle_completed settle_ended settle_failed settle_released sign_off spend reset_rate
        starts stop_jobs stream notify_waiters unblock undepend wait_less wanted wake who
        sample_queues append_minutes sum_minutes thin_samples roll_up note_deaths count_deaths count_these
        note_alert due_rules make_alerts told mute_errors declare_alerts forget_deaths
        start_operation note_operation stop_operation operation_step advance_operations forget_operations
        days_ruled_out rule_out_days validate_days
        live_gateways had_time standing_worker heartbeats abandon ask_worker claim_for claim_one
        may_run_suspect deadline hand_over fenced extend list_held take_back
        fail_overdue overdue_jobs retry_delay_s pause_endpoint disable_endpoint enable_endpoint hold_queues
        note_endpoint warn_of raise_kept refuse is_no_rows_fault carefully is_careful is_refused refuse_claims
        try_to_claim defers deferred check_settled may_stay_open
    """,
    "gateway": "set_endpoint remove_endpoint begin_once end_once delete_items",
    "": NOBODY,
}
OWNERS_RIGHTS = """
add_jobs additions_checked await_results batch_sealed create_batch delete_items depend dependencies_added
drop_partition enqueue enqueue_once ensure_partitions forget_rows job_added jobs_inserted jobs_key_wanted rule_out_days
seal_batch stream_created validate_days
"""
"""SECURITY DEFINER: one more of them needs a reason."""
S, SI, SID, SD, SUD, SIUD = (
    "SELECT",
    "SELECT INSERT",
    "SELECT INSERT DELETE",
    "SELECT DELETE",
    "SELECT UPDATE DELETE",
    "SELECT INSERT UPDATE DELETE",
)
TABLES = {  # the worker's; readers have SELECT on them, enqueuers on schema_version only, the gateway has tokens, too
    **dict.fromkeys(("jobs", "workers", "pools", "queues", "rates", "schedules", "progress", "refused_rows"), SIUD),
    **dict.fromkeys(("finished_jobs", "audit"), SI),
    **dict.fromkeys(("batches", "result_waiters"), SUD),
    **dict.fromkeys(("batch_additions", "job_dependencies"), SD),
    "pending_effects": SID,
    **dict.fromkeys(("samples", "queue_samples", "queue_minutes", "deaths", "error_groups", "operations"), SIUD),
    **dict.fromkeys(("alert_rules", "alerts", "stack_requests"), SIUD),
    **dict.fromkeys(("schema_version", "finished_jobs_other"), S),
    **dict.fromkeys(("all_jobs", "queue_stats", "batch_progress", "batch_trees", "blocked_jobs"), S),
    **dict.fromkeys(("kept_keys", "job_progress", "worker_stats", "queue_depths"), S),
    **dict.fromkeys(("tokens", "idempotent_calls"), ""),
    "endpoints": S,
    "origin": "SELECT INSERT UPDATE",
}
PRIVILEGES = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
COLUMNS = {  # columns of jobs: the enqueuer's
    "INSERT": """
        id queue kind payload meta priority run_at expires_at max_attempts timeout_s dedupe_key dedupe_until
        serialize_key limit_key yields batch_id
    """,
    "SELECT": "id queue dedupe_key status",
    "UPDATE": "",
    "REFERENCES": "",
}
THEY = ("worker", "enqueuer", "reader", "gateway")


async def _functions(db: Db) -> list[asyncpg.Record]:
    return await db.fetch(
        "SELECT p.oid, p.proname AS name, p.prosecdef AS definer, p.proconfig AS config, p.prosrc AS body, "
        "p.prorettype = 'trigger'::regtype AS is_trigger, "
        "EXISTS (SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a WHERE a.grantee = 0) "
        "AS public "
        "FROM pg_proc p WHERE p.pronamespace = 'pgworkd'::regnamespace ORDER BY p.proname"
    )


async def test_every_function_is_granted_to_the_intended_roles(db: Db, roles: Roles) -> None:
    placed = [(name, set(who.split())) for who, names in FUNCTIONS.items() for name in names.split()]
    rows = await _functions(db)
    assert sorted(name for name, _ in placed) == [row["name"] for row in rows], (
        "a function has no place, or none has it"
    )
    wanted = dict(placed)
    for row in rows:
        assert not row["public"], row["name"]
        sql = "SELECT has_function_privilege($1, $2::oid, 'EXECUTE')"
        may = {role for role in THEY if await db.fetchval(sql, roles.names[role], row["oid"])}
        expected = wanted[row["name"]]
        assert may == expected | ({"gateway"} if expected else set()), row["name"]


async def test_every_table_is_granted_to_the_intended_roles(db: Db, roles: Roles) -> None:
    rows = await db.fetch(
        "SELECT c.oid, c.relname AS name FROM pg_class c "
        "WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f') ORDER BY 2"
    )
    days = {row["name"] for row in rows if re.fullmatch(r"finished_jobs_\d{8}", row["name"])}
    assert days, "there are partitions, which are reached by way of their parent only"
    assert {row["name"] for row in rows} == TABLES.keys() | days
    for row in rows:
        worker = TABLES.get(row["name"], "")
        by_columns = row["name"] in ("workers", "tokens", "idempotent_calls", "endpoints", *days)
        wanted = {"worker": worker, "reader": "" if by_columns else S, "enqueuer": ""}
        wanted["gateway"] = SIUD if row["name"] in ("tokens", "idempotent_calls", "endpoints") else worker
        if row["name"] == "schema_version":
            wanted["enqueuer"] = S
        for role in THEY:
            sql = "SELECT has_table_privilege($1, $2::oid, $3)"
            may = [p for p in PRIVILEGES if await db.fetchval(sql, roles.names[role], row["oid"], p)]
            assert set(may) == set(wanted[role].split()), (role, row["name"])


async def test_nobody_who_only_reads_sees_a_token(db: Db, roles: Roles) -> None:
    """Of `workers`, the reader has all columns but one; of `tokens`, none; of `endpoints`, what holds no secret."""
    sql = "SELECT a.attname, has_column_privilege($1, a.attrelid, a.attnum, 'SELECT') AS may FROM pg_attribute a"
    sql += " WHERE a.attrelid = 'pgworkd.workers'::regclass AND a.attnum > 0 AND NOT a.attisdropped"
    rows = await db.fetch(sql, roles.names["reader"])
    assert [row["attname"] for row in rows if not row["may"]] == ["token"]
    async with roles.session("reader") as session:
        await denied(session, "SELECT url FROM pgworkd.endpoints")
        await denied(session, "SELECT headers FROM pgworkd.endpoints")
        assert await session.fetch("SELECT name, secret_name, disabled_why FROM pgworkd.endpoints") == []
        await denied(session, "SELECT token FROM pgworkd.workers")
        await denied(session, "SELECT * FROM pgworkd.tokens")
        await session.fetch("SELECT * FROM pgworkd.worker_stats")
    async with roles.session("worker") as session:
        await denied(session, "SELECT * FROM pgworkd.tokens")
        await denied(session, "UPDATE pgworkd.endpoints SET url = 'http://169.254.169.254/'")
        await denied(session, "SELECT pgworkd.set_endpoint('e', '{}')")
    async with roles.session("gateway") as session:
        assert await session.fetch("SELECT * FROM pgworkd.tokens") == []


async def test_every_column_is_either_writable_by_the_enqueuer_or_not(db: Db, roles: Roles) -> None:
    rows = await db.fetch(
        "SELECT c.relname AS relation, a.attname AS name, p AS privilege "
        "FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid, "
        "unnest($2::text[]) AS p WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind IN ('r', 'p', 'v') "
        "AND a.attnum > 0 AND has_column_privilege($1, c.oid, a.attnum, p)",
        roles.names["enqueuer"],
        [*COLUMNS],
    )
    wanted = {("jobs", name, privilege) for privilege, names in COLUMNS.items() for name in names.split()}
    assert {tuple(row) for row in rows if row["relation"] != "schema_version"} == wanted


async def test_privileges_on_sequences_and_the_schema(db: Db, roles: Roles) -> None:
    rows = await db.fetch(
        "SELECT c.relname, r, p FROM pg_class c, unnest($1::text[]) AS r, unnest('{SELECT,UPDATE,USAGE}'::text[]) AS p "
        "WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind = 'S' AND has_sequence_privilege(r, c.oid, p)",
        [roles.names[role] for role in THEY],
    )
    assert rows == []
    for role in THEY:
        sql = "SELECT has_schema_privilege($1, 'pgworkd', 'USAGE'), has_schema_privilege($1, 'pgworkd', 'CREATE')"
        assert await db.fetchrow(sql, roles.names[role]) == (True, False)


async def test_every_object_belongs_to_the_owner(db: Db, roles: Roles) -> None:
    owners = await db.fetch(
        "SELECT DISTINCT pg_get_userbyid(owner) FROM ("
        "SELECT nspowner AS owner FROM pg_namespace WHERE nspname = 'pgworkd' "
        "UNION ALL SELECT relowner FROM pg_class WHERE relnamespace = 'pgworkd'::regnamespace "
        "UNION ALL SELECT proowner FROM pg_proc WHERE pronamespace = 'pgworkd'::regnamespace "
        "UNION ALL SELECT typowner FROM pg_type WHERE typnamespace = 'pgworkd'::regnamespace) all_of_it"
    )
    assert [row[0] for row in owners] == [roles.names["owner"]]


async def test_security_definer_functions_are_listed_pinned_and_not_public(db: Db) -> None:
    definers = [row for row in await _functions(db) if row["definer"]]
    assert [row["name"] for row in definers] == sorted(OWNERS_RIGHTS.split())
    for row in definers:
        assert "search_path=pg_catalog, pgworkd, pg_temp" in row["config"], row["name"]
        assert not row["public"], f"{row['name']}: whoever may use the schema could call it, also without grants"


async def test_dynamic_sql_is_built_by_format(db: Db) -> None:
    """Identifiers by %I, literals by %L, and only from the calendar or the catalog."""
    executes = re.compile(r"\bEXECUTE\b(?!\s+FUNCTION)\s*(.{0,100})", re.S | re.I)
    found = {row["name"]: executes.findall(row["body"]) for row in await _functions(db)}
    found = {name: texts for name, texts in found.items() if texts}
    assert found.keys() == {"ensure_partitions", "drop_partition", "rule_out_days", "validate_days", "in_parts"}
    (step,) = found.pop("in_parts")
    assert step.startswith("format('SELECT %s($1::%s%s) AS it', p_step::regproc, v_type, v_more)")
    of_days = r"ALTER TABLE pgworkd\.finished_jobs(_other)? (ATTACH PARTITION pgworkd\.|\w+ CONSTRAINT )"
    for texts in found.values():
        for text in texts:
            assert re.match(
                rf"format\('((CREATE TABLE|DROP TABLE|LOCK TABLE ONLY) pgworkd\.|{of_days})%I?[^%]*(%L[^%]*)*'",
                text + "'",
            ), text


_STEP = re.compile(r"in_parts\((?:p_what|'\w+'),.*?'(\w+\([a-z]+\[\](?:, jsonb)?\))'[,)]", re.S)


async def test_each_step_that_is_done_in_parts_is_a_function(db: Db) -> None:
    bodies = {row["name"]: row["body"] for row in await _functions(db)}
    calls = [call for body in bodies.values() for call in _STEP.findall(body)]
    assert len(calls) == sum(body.count("in_parts('") + body.count("in_parts(p_") for body in bodies.values())
    await db.fetch("SELECT ('pgworkd.' || c)::regprocedure FROM unnest($1::text[]) c", calls)
    with pytest.raises(asyncpg.UndefinedFunctionError):  # and no row is to blame
        await db.execute("SELECT pgworkd.in_parts('rescue', ARRAY['a', 'b'], 'magic(text[])')")


async def test_the_grants_can_be_applied_again_and_revoke_everything_else(db: Db, roles: Roles) -> None:
    acl = (
        "SELECT oid, relacl::text FROM pg_class WHERE relnamespace = 'pgworkd'::regnamespace UNION ALL "
        "SELECT oid, proacl::text FROM pg_proc WHERE pronamespace = 'pgworkd'::regnamespace UNION ALL "
        "SELECT attrelid, attname || attacl::text FROM pg_attribute WHERE attacl IS NOT NULL ORDER BY 1, 2"
    )
    before = await db.fetch(acl)
    enqueuer = roles.name("enqueuer")
    await db.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA pgworkd TO {enqueuer}, PUBLIC")
    await db.execute(f"GRANT ALL ON ALL FUNCTIONS IN SCHEMA pgworkd TO {enqueuer}, PUBLIC")
    await db.execute(f"GRANT ALL ON SCHEMA pgworkd TO {enqueuer}; GRANT UPDATE (status) ON pgworkd.jobs TO {enqueuer}")
    await db.execute(roles.sql)
    assert await db.fetch(acl) == before


async def test_an_upgrade_by_an_owner_that_is_not_a_superuser(db: Db, roles: Roles) -> None:
    """Migrates, without privileges on the database itself; new objects are granted when the grants are reapplied."""
    options = ConnectionOptions(roles.dsn("owner"))
    async with roles.session("owner") as owner:
        await owner.execute("DROP VIEW pgworkd.blocked_jobs; DROP FUNCTION pgworkd.undepend")
        assert await schema.migrate(options) == (schema.VERSION, schema.VERSION)
        async with roles.session("worker") as worker:
            await denied(worker, "SELECT pgworkd.undepend('{}')")
            await denied(worker, "SELECT * FROM pgworkd.blocked_jobs")
            await owner.execute(roles.sql)
            await worker.execute("SELECT pgworkd.undepend('{}')")
            await worker.execute("SELECT * FROM pgworkd.blocked_jobs")


async def test_a_first_migration_by_a_role_that_is_not_a_superuser(empty_dsn: str) -> None:
    """As on managed servers: this once required a superuser, for a parameter of our own in a SET clause."""
    admin = await asyncpg.connect(empty_dsn)
    roles = Roles(empty_dsn)
    owner = roles.name("owner")
    await admin.execute(f"CREATE ROLE {owner} LOGIN PASSWORD 'secret'")
    try:
        database = await admin.fetchval("SELECT quote_ident(current_database())")
        await admin.execute(f"GRANT CREATE ON DATABASE {database} TO {owner}")
        assert await schema.migrate(ConnectionOptions(roles.dsn("owner"))) == (None, schema.VERSION)
    finally:
        await admin.execute(f"DROP OWNED BY {owner} CASCADE; DROP ROLE {owner}")
        await admin.close()


async def test_objects_created_by_a_member_of_the_owner_become_the_owners(db: Db, roles: Roles) -> None:
    async with roles.session("owner") as owner:
        await db.execute("CREATE FUNCTION pgworkd.later() RETURNS int LANGUAGE sql AS 'SELECT 1'")
        await db.execute("CREATE TYPE pgworkd.shape AS ENUM ('round'); CREATE VIEW pgworkd.seen AS SELECT 1 AS one")
        alters = (
            "FUNCTION pgworkd.later() STABLE",
            "TYPE pgworkd.shape ADD VALUE 'flat'",
            "VIEW pgworkd.seen RENAME one TO uno",
        )
        for what in alters:
            await denied(owner, f"ALTER {what}")
        await db.execute(roles.sql)
        for what in alters:
            await owner.execute(f"ALTER {what}")


NAMES = {role: f"pgworkd_{role}" for role in grants.ROLES}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "1 to 63 bytes"),
        ("a" * 64, "1 to 63 bytes"),
        ("\N{EURO SIGN}" * 22, "1 to 63 bytes"),
        ("a\0b", "control character"),
        ("a\nb", "control character"),
        ("public", "reserved by Postgres"),
        ("none", "reserved by Postgres"),
        ("pg_worker", "reserved by Postgres"),
        ("pgworkd_reader", "same name"),
    ],
)
def test_an_invalid_role_name_is_refused(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        grants.text(NAMES | {"worker": name})


@pytest.mark.parametrize(
    "name", ["a" * 63, "o'b\"; DROP SCHEMA pgworkd; --", "{reader}", "$$", "Mixed Case", "current_user", "%I"]
)
async def test_any_other_role_name_is_quoted(db: Db, name: str) -> None:
    transaction = db.transaction()
    await transaction.start()
    text = grants.text(
        {"owner": await db.fetchval("SELECT current_user")}
        | {role: f"x_{role}_{db.get_server_pid()}" for role in THEY}
        | {"reader": name}
    )
    try:
        await db.execute(text.replace("\nBEGIN;", "").replace("\nCOMMIT;", ""))
        assert await db.fetchval("SELECT has_table_privilege($1, 'pgworkd.jobs', 'SELECT')", name)
    finally:
        await transaction.rollback()
