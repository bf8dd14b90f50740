"""Bugs that show while two releases of one application run: what the old one does not know it must not decide."""

from __future__ import annotations

from tests.chaos.bug import python, sql

BUGS = (
    sql(
        "a claim stores a budget for kinds that it does not know",
        "array_position(p_kinds, coalesce(j.kind, j.queue)::text)])\n",
        "array_position(p_kinds, coalesce(j.kind, j.queue)::text)], 3)\n",
        tests="tests/sql/test_claim.py",
    ),
    sql(
        "a job that is given back loses its place in its line",
        "        SET status = CASE WHEN j.serialize_key IS NOT NULL AND NOT j.yields\n",
        "        SET status = CASE WHEN false\n",
        tests="tests/sql/test_serialize_released.py",
    ),
    sql(
        "a job of an unknown kind loses its place in its line",
        "AND (s.delay_s IS NULL OR s.message IS NOT NULL)\n",
        "AND s.delay_s IS NULL\n",
        tests="tests/sql/test_serialize_released.py",
    ),
    sql(
        "a job that was claimed cannot expire",
        "OR j.expires_at > p_at OR j.begun > 0;",
        "OR j.expires_at > p_at OR j.attempts > 0;",
        tests="tests/sql/test_begun.py",
    ),
    sql(
        "a claim returns the payload of a job that can expire",
        "CASE WHEN j.expires_at IS NULL AND is_within(",
        "CASE WHEN is_within(",
        tests="tests/engine/test_expiry_started.py",
    ),
    sql(
        "a job begins when its payload is read ahead",
        "        EXIT WHEN v_row.place > v_begin AND v_row.expires_at IS NOT NULL;\n",
        "",
        tests="tests/sql/test_begun.py",
    ),
    sql(
        "an attempt that was handed out and given back has begun",
        "s.begun = false AND j.begun = j.attempts THEN 0",
        "false THEN 0",
        tests="tests/sql/test_begun.py",
    ),
    sql(
        "a locked job that is to begin holds up the others",
        "        ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED\n    ), marked",
        "        ORDER BY j.id FOR NO KEY UPDATE OF j\n    ), marked",
        tests="tests/sql/test_begun.py",
    ),
    python(
        "the payload of an unknown kind is read",
        "engine/run/executor",
        "                if attempt.claimed.payload is None and self._runner.knows(attempt):\n",
        "                if attempt.claimed.payload is None:\n",
        tests="tests/engine/test_expiry_started.py",
    ),
    python(
        "a job that a stop gave back before it began counts as begun",
        "engine/settle/settler",
        "        if outcome.ending is Ending.RELEASED and attempt.started is None:\n",
        "        if False:\n",
        tests="tests/engine/test_expiry_started.py",
    ),
    python(
        "a job of a kind that nobody knows waits half a minute at once",
        "engine/run/unknown_kinds",
        "min(DELAY_S, FIRST_S * 2.0 ** min(attempt.claimed.attempt - 1, 10))",
        "DELAY_S",
        tests="tests/engine/test_mixed_kinds.py",
    ),
    sql(
        "whoever declares a schedule last takes it",
        "rule_of(f) <> v_rules -> f.name AND declarer(f, p_worker) IS NULL)",
        "rule_of(f) <> v_rules -> f.name)",
        tests="tests/sql/test_declared_rules.py",
    ),
    sql(
        "a declaration waits for a locked schedule",
        "        ORDER BY f.name FOR UPDATE SKIP LOCKED));\n",
        "        ORDER BY f.name FOR UPDATE));\n",
        tests="tests/sql/test_declared_rules.py",
    ),
    python(
        "a schedule is declared at the start only",
        "engine/life/recurring",
        "await self._store.declare_rules(worker_id, self._declared)",
        "await self._store.declare_rules(worker_id, {})",
        tests="tests/engine/test_schedule_releases.py",
    ),
    python(
        "a schedule that another service keeps is not reported",
        "engine/life/recurring",
        "            if self._differing.get(name) != each and",
        "            if False and",
        tests="tests/engine/test_schedule_releases.py",
    ),
    sql(
        "a schedule that has left the code leaves its due occurrence",
        "FOR EACH ROW WHEN (OLD.retired_at IS NULL AND NEW.retired_at IS NOT NULL)",
        "FOR EACH ROW WHEN (false)",
        tests="tests/sql/test_schedule_changes.py",
    ),
    sql(
        "the removal of a schedule waits for its occurrence",
        "                            AND j.status IN ('pending', 'failed', 'blocked')\n"
        "                          FOR UPDATE SKIP LOCKED), 'cancelled',",
        "                            AND j.status IN ('pending', 'failed', 'blocked')\n"
        "                          FOR UPDATE), 'cancelled',",
        tests="tests/sql/test_schedule_changes.py",
    ),
    sql(
        "a function that nothing needs survives its schema",
        "    WHILE EXISTS (SELECT FROM schema_version v WHERE v.version < 6) LOOP\n",
        "    WHILE false LOOP\n",
        tests="tests/sql/test_every_schema.py",
    ),
)
