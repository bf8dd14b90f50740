"""Bugs planted into what is done where others hold locks, and where the database refuses or takes too long."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_LOCKED = "tests/engine/test_settle_locked.py"
_OPEN = "tests/sweeps/test_open_transactions.py"
_ERRORS = "tests/engine/test_settle_errors.py"

BUGS = (
    python(
        "a settle waits for a lock as long as a statement may take",
        "database/store",
        'Connection(replace(options, lock_timeout_s=LOCK_TIMEOUT_S), "settle")',
        'Connection(options, "settle")',
        tests=f"{_LOCKED} {_OPEN}",
    ),
    python(
        "what met a lock is not tried again without what is locked",
        "engine/settle/settler",
        "if skip or not (isinstance(error, DatabaseBusy) and error.locked):\n",
        "if error is not None:\n",
        tests=f"{_LOCKED} {_OPEN}",
    ),
    python(
        "what is locked is taken for stale",
        "engine/settle/settler",
        "        if not missing or not self._how:\n",
        "        if missing is not None:\n",
        tests=_LOCKED,
    ),
    sql(
        "a settle that skips what is locked waits for it",
        "j.worker_id IS NOT NULL ORDER BY j.id FOR UPDATE SKIP LOCKED);\n    RETURN ARRAY(SELECT CASE WHEN l.id",
        "j.worker_id IS NOT NULL ORDER BY j.id FOR UPDATE);\n    RETURN ARRAY(SELECT CASE WHEN l.id",
        tests=_OPEN,
    ),
    sql(
        "an ending waits for its tree",
        "WHERE r.id = ANY (v_roots) ORDER BY r.id FOR NO KEY UPDATE SKIP LOCKED);",
        "WHERE r.id = ANY (v_roots) ORDER BY r.id FOR NO KEY UPDATE);",
        tests=_LOCKED,
    ),
    sql(
        "an ending waits for its dependents",
        "        IF p_completed AND NOT no_wait() THEN\n            v_jobs",
        "        IF p_completed THEN\n            v_jobs",
        tests=_LOCKED,
    ),
    sql(
        "an ending waits for the lines of its queue",
        " WHERE NOT no_wait() GROUP BY u.queue ORDER BY hashtext(u.queue)) q",
        " GROUP BY u.queue ORDER BY hashtext(u.queue)) q",
        tests=f"{_LOCKED} {_OPEN}",
    ),
    sql(
        "a handler's own transaction waits for whatever its job belongs to, and holds it",
        "    PERFORM say_no_wait('on');\n    RETURN settle_completed(",
        "    RETURN settle_completed(",
        tests=f"tests/sql/test_complete_own.py {_LOCKED}",
    ),
    sql(
        "an occurrence waits for its schedule",
        "WHERE s.name = ANY (p_names) ORDER BY s.name FOR UPDATE SKIP LOCKED);",
        "WHERE s.name = ANY (p_names) ORDER BY s.name FOR UPDATE);",
        tests=_LOCKED,
    ),
    sql(
        "rescue waits for what is locked",
        "                   LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);\n    RETURN QUERY\n    SELECT t.id, t.queue",
        "                   LIMIT p_limit FOR UPDATE OF j);\n    RETURN QUERY\n    SELECT t.id, t.queue",
        tests=f"tests/sql/test_rescue.py {_OPEN}",
    ),
    python(
        "a time-out is an outage",
        "database/driver_errors",
        '        return DatabaseBusy(f"{text} ({code})", sqlstate=code)\n',
        '        return DatabaseUnavailable(f"{text} ({code})")\n',
        tests=f"{_ERRORS} tests/sweeps/test_errors.py",
    ),
    python(
        "an outcome that is refused is sent again for ever",
        "engine/settle/settler",
        "        if is_last_resort(outcome):\n",
        "        if outcome is not None:\n",
        tests=_ERRORS,
    ),
    python(
        "what cannot be settled for now comes back one by one",
        "engine/settle/delayed",
        "        at = math.ceil((now + delay_s) / TICK_S) * TICK_S\n",
        "        at = now + delay_s\n",
        tests=f"{_ERRORS} -k many_locked",
    ),
    python(
        "a flush that is refused as a whole is asked for to its last job",
        "engine/settle/settler",
        "        if flush.error is not None and flush.failures > flush.failures_max:\n",
        "        if flush.error is not None and flush.failures > 10_000:\n",
        tests=f"{_ERRORS} -k many_locked",
    ),
    sql(
        "who is next but one goes first where the next is locked",
        "                ORDER BY b.run_at, b.id LIMIT 1) AS row\n",
        "                ORDER BY b.run_at, b.id LIMIT 1 FOR UPDATE OF b SKIP LOCKED) AS row\n",
        tests="tests/sql/test_serialize_locked.py",
    ),
    python(
        "maintenance that takes too long is tried again at once",
        "engine/life/maintenance",
        "                delay_s = self._retry_delay_s(name, error)\n",
        "                delay_s = 0.0 * self._retry_delay_s(name, error)\n",
        tests="tests/sweeps/test_errors.py",
    ),
    sql(
        "jobs that are committed after their batch was cancelled run",
        "    IF (SELECT b.cancelled_at FROM batches b WHERE b.id = NEW.batch_id) IS NULL\n",
        "    IF (SELECT b.cancelled_at FROM batches b WHERE b.id = NEW.batch_id) IS NULL OR true\n",
        tests="tests/sql/test_batch_adders.py -k after_the_cancel",
    ),
)
