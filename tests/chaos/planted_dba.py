"""Bugs planted into what a DBA relies on: retention, migrations, privileges, database settings."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_TURNED = (
    "IS NOT NULL{}\n                         THEN current_setting('pgworkd.clock', true)::timestamptz END, "
    "statement_timestamp());\n"
)
BUGS = (
    sql(
        "dropping a history partition queues behind its readers",
        "        EXECUTE format('LOCK TABLE ONLY pgworkd.%I IN ACCESS EXCLUSIVE MODE NOWAIT', v_name);\n",
        "        SET LOCAL lock_timeout = '8s';\n",
        tests="tests/engine/test_retention.py",
    ),
    sql(
        "a queue's retention scans the whole history",
        "CREATE INDEX IF NOT EXISTS finished_jobs_kept ON finished_jobs (keep_until) WHERE keep_until IS NOT NULL;\n",
        "\n",
        tests="tests/sql/test_retention.py",
    ),
    python(
        "a migration waits for its locks and blocks all writers meanwhile",
        "database/schema",
        "SET LOCAL lock_timeout = '200ms';\n",
        "",
        tests="tests/engine/test_migrate_live.py",
    ),
    sql(
        "an upgrade locks jobs before the workers that claims hold while they wait for jobs",
        "LOCK TABLE ONLY pgworkd.workers, ONLY pgworkd.jobs,",
        "LOCK TABLE ONLY pgworkd.jobs, ONLY pgworkd.workers,",
        tests="tests/sql/test_migrations.py -k waits_for_a_claim",
    ),
    python(
        "a daemon claims from a newer schema",
        "engine/life/worker",
        "self.stopping or self.outdated or not",
        "self.stopping or not",
        tests="tests/engine/test_migrate_live.py",
    ),
    sql(
        "a session variable changes the clock for any role",
        _TURNED.format(" AND has_schema_privilege(session_user, 'pgworkd', 'CREATE')"),
        _TURNED.format(""),
        tests="tests/sql/test_grants_enqueuer.py tests/sql/test_grants_worker.py",
    ),
    python(
        "the role's idle timeout ends our sessions",
        "database/session",
        '        "idle_session_timeout": "0",\n',
        "",
        tests="tests/sweeps/test_hostile_settings.py",
    ),
    python(
        "the role's transaction timeout ends our transactions",
        "database/session",
        "            sql += _NO_LIMIT\n",
        "            pass\n",
        tests="tests/sweeps/test_hostile_settings.py",
    ),
    sql(
        "deferred effects after a logical switchover reuse ids",
        "    PERFORM setval('pgworkd.pending_effects_id_seq', m.id)\n",
        "    PERFORM m.id\n",
        tests="tests/sql/test_fence.py tests/engine/test_dba.py",
    ),
    sql(
        "looking up an id locks every day of the history",
        "WHERE f.id = ANY (v_found) AND f.finished_at = ANY (v_found_at);",
        "WHERE f.id = ANY (v_found);",
        tests="tests/sql/test_history_locks.py",
    ),
    sql(
        "an id of another day is looked for in all days at once",
        "    v_step constant int := 16;\n",
        "    v_step constant int := 9999;\n",
        tests="tests/sql/test_history_locks.py",
    ),
)
