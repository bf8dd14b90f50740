"""Bugs that show where others have put something: triggers on rows, settings, rows of no day, spoilt sessions."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_CLAIMS = "tests/engine/test_refused_claims.py"
_CLAIMS_SQL = "tests/sql/test_refused_claims.py"
_DAYS = "tests/sql/test_days.py"
_DOCTOR = "tests/engine/test_cli_doctor.py"
BUGS = (
    python(
        "a job that cannot be claimed holds up its queue",
        "engine/claim/claim_loop",
        "if self._sent is not None and await self._care.refused(error):",
        "if False:",
        tests=f"{_CLAIMS} -k holds_up",
    ),
    python(
        "a gateway's claims never become careful",
        "gateway/workers/pool",
        "careful=self._care.on",
        "careful=False",
        tests=f"{_CLAIMS} -k gateway",
    ),
    sql(
        "a job is set aside for ten minutes for a lock that was released meanwhile",
        "left(p_error, 1000), clock() + interval '10 s')",
        "left(p_error, 1000), clock() + interval '600 s')",
        tests=_CLAIMS_SQL,
    ),
    sql(
        "a careful claim takes what is set aside",
        "WHERE r.what = p_what AND r.key = p_key AND r.until > clock());",
        "WHERE r.what = p_what AND r.key = p_key AND r.until > clock() AND p_what <> 'claim');",
        tests=_CLAIMS_SQL,
    ),
    sql(
        "a claim does not see that a trigger keeps a row",
        "    IF v_taken < cardinality(v_rows) THEN\n",
        "    IF false THEN\n",
        tests=_CLAIMS_SQL,
    ),
    sql(
        "a job that refuses to be parked holds up its queue",
        "    WITH parked AS (UPDATE jobs j SET status = 'blocked' WHERE j.id = ANY (p_ids) RETURNING j.id)",
        "    WITH parked AS (UPDATE jobs j SET status = 'blocked' WHERE false RETURNING j.id)",
        tests=_CLAIMS_SQL,
    ),
    sql(
        "while all jobs are locked, a claim that waits sets one aside",
        "        LOCK TABLE jobs IN ROW EXCLUSIVE MODE NOWAIT;\n",
        "        NULL;\n",
        tests=_CLAIMS_SQL,
    ),
    python(
        "a lock on all jobs that is gone by now sets one aside",
        "engine/claim/care",
        "        forced = self._in_vain\n",
        "        forced = waited or self._in_vain\n",
        tests="tests/unit/test_care.py",
    ),
    sql(
        "a settle does not see that a trigger keeps the row",
        "        PERFORM raise_kept();\n    END IF;\nEND $$;\n\n-- Moves the rows to finished_jobs",
        "        NULL;\n    END IF;\nEND $$;\n\n-- Moves the rows to finished_jobs",
        tests=f"{_CLAIMS} -k second_time",
    ),
    python(
        "a job whose row is kept is run again",
        "engine/settle/delayed",
        "permanent=ours or outcome.permanent or code == _KEPT,",
        "permanent=ours or outcome.permanent,",
        tests=f"{_CLAIMS} -k second_time",
    ),
    python(
        "an outcome is lost to what refuses the next job",
        "engine/settle/loop",
        "            if len(items) == 1 and not deferred and not isinstance(error, DatabaseUnavailable):\n",
        "            if False:\n",
        tests=f"{_CLAIMS} -k outcome_is_stored",
    ),
    python(
        "one worker's row costs all workers of a gateway their lease",
        "gateway/workers/beats",
        "            if len(batch) > 1 and not isinstance(error, DatabaseUnavailable):\n",
        "            if False:\n",
        tests="tests/http/test_worker_faults.py -k costs_no_other",
    ),
    sql(
        "a trigger of others stops the rescue of all workers",
        "    PERFORM in_parts('rescue', v_lost::text[], 'presume_dead(int[])');\n",
        "    UPDATE workers w SET lost_at = clock() WHERE w.id = ANY (v_lost) AND w.lost_at IS NULL;\n",
        tests="tests/sweeps/test_others_objects.py -k workers",
    ),
    sql(
        "to add a day reads all rows of no day under a lock",
        "    v_small := pg_relation_size('pgworkd.finished_jobs_other') < 8388608;\n    v_ruled_out",
        "    v_small := true;\n    v_ruled_out",
        tests=f"{_DAYS} tests/engine/test_retention.py",
    ),
    sql(
        "days that were ruled out refuse their rows",
        "    IF days_ruled_out(false) @> clock()::date\n",
        "    IF false\n",
        tests=_DAYS,
    ),
    python(
        "a session that a handler has spoilt is used again",
        "database/session",
        "    connection.made_sql += _IS_AS_LENT\n",
        "",
        tests="tests/engine/test_spoilt_sessions.py",
    ),
    sql(
        "a schema is read as the server's settings say",
        "SET LOCAL standard_conforming_strings = on;\n",
        "\n",
        tests="tests/sweeps/test_settings_at_install.py",
    ),
    sql(
        "functions without their settings are installed",
        "    IF v_left IS NOT NULL OR cardinality(v_done) = 0 THEN\n",
        "    IF false THEN\n",
        tests="tests/sql/test_install.py",
    ),
    sql(
        "an upgrade splits the groups of errors",
        "    IF to_regclass('pgworkd.error_groups') IS NOT NULL THEN\n",
        "    IF false THEN\n",
        tests="tests/sql/test_migrations.py -k groups",
    ),
    python(
        "doctor does not see who holds a lock",
        "admin/doctor_database",
        "        WHERE NOT l.granted AND l.database",
        "        WHERE false AND l.database",
        tests=_DOCTOR,
    ),
    python(
        "doctor says to restart what a trigger holds up",
        "admin/findings",
        '        *_or_ok("rows", _refused(health), "none is refused"),\n',
        "",
        tests=f"{_CLAIMS} -k holds_up",
    ),
    python(
        "who lacks a right is not told who has it",
        "database/driver_errors",
        'groups = grants.groups_that_may(text) if code == FORBIDDEN else ""',
        'groups = ""',
        tests=_DOCTOR,
    ),
    python(
        "a daemon is ready with too few sessions to serve",
        "engine/life/daemon",
        "            sessions=self._database.open_sessions,\n",
        "",
        tests="tests/engine/test_start.py",
    ),
    python(
        "a recovery is reported while nothing answers",
        "engine/life/maintenance",
        "                if self._store.answers != answers:",
        "                if True:",
        tests="tests/engine/test_lease.py -k recovery",
    ),
    python(
        "a range of one value with a step goes on to the end",
        "core/recurrence",
        "found[1] if _is_one(found[1], found[2]) else found[0]",
        "found[0]",
        tests="tests/unit/test_cron_dialects.py",
    ),
    python(
        "an interval ignores its time zone",
        "core/recurrence",
        '        elif self.timezone != "UTC":\n',
        "        elif False:\n",
        tests="tests/unit/test_schedule.py tests/unit/test_cron_dialects.py",
    ),
    sql(
        "an insert with a key reads a table whole that was empty when the session began",
        "('by_index', 'enable_seqscan=off')",
        "('by_index', 'jit=off')",
        tests="tests/sql/test_table_scans.py",
    ),
    sql(
        "wanted() reads a table whole that was empty when the session began",
        "('by_index_no_jit_once', 'enable_seqscan=off jit=off",
        "('by_index_no_jit_once', 'jit=off",
        tests="tests/sql/test_table_scans.py",
    ),
)
