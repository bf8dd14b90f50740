"""Bugs planted into the handling of locks held by others, of database errors and of timeouts."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_LOCKED = "tests/engine/test_settle_locked.py"
_OPEN = "tests/sweeps/test_open_transactions.py"
_ERRORS = "tests/engine/test_settle_errors.py"

BUGS = (
    python(
        "a settle waits for a lock until the statement timeout",
        "database/store",
        'Connection(replace(options, lock_timeout_s=LOCK_TIMEOUT_S), "settle")',
        'Connection(options, "settle")',
        tests=f"{_LOCKED} {_OPEN}",
    ),
    python(
        "a settle that met a lock is not retried without the locked rows",
        "engine/settle/loop",
        "if skip or not (isinstance(error, DatabaseBusy) and error.locked):\n",
        "if error is not None:\n",
        tests=f"{_LOCKED} {_OPEN}",
    ),
    python(
        "locked rows are treated as stale",
        "engine/settle/loop",
        "await self._locked(missing) if skip and missing else _NOTHING\n",
        "_NOTHING\n",
        tests=_LOCKED,
    ),
    sql(
        "a settle that skips locked rows waits for them",
        "j.worker_id IS NOT NULL ORDER BY j.id FOR UPDATE SKIP LOCKED);\n    RETURN ARRAY(SELECT CASE WHEN l.id",
        "j.worker_id IS NOT NULL ORDER BY j.id FOR UPDATE);\n    RETURN ARRAY(SELECT CASE WHEN l.id",
        tests="tests/sql/test_complete_own.py",
    ),
    sql(
        "a settle waits for its batch tree",
        "WHERE r.id = ANY (v_roots) ORDER BY r.id FOR NO KEY UPDATE SKIP LOCKED);",
        "WHERE r.id = ANY (v_roots) ORDER BY r.id FOR NO KEY UPDATE);",
        tests=_LOCKED,
    ),
    sql(
        "a settle waits for its dependents",
        "        IF p_completed AND NOT no_wait() THEN\n            v_jobs",
        "        IF p_completed THEN\n            v_jobs",
        tests=_LOCKED,
    ),
    sql(
        "a settle waits for the lock of its queue",
        " WHERE NOT no_wait() GROUP BY u.queue ORDER BY hashtext(u.queue)) q",
        " GROUP BY u.queue ORDER BY hashtext(u.queue)) q",
        tests=f"{_LOCKED} {_OPEN}",
    ),
    sql(
        "job.transaction() waits for and locks the batch that its job belongs to",
        "    PERFORM set_no_wait('on');\n    RETURN settle_completed(",
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
        "a rescue waits for locked rows",
        "j.id::text)\n                   LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);\n    RETURN QUERY",
        "j.id::text)\n                   LIMIT p_limit FOR UPDATE OF j);\n    RETURN QUERY",
        tests=f"tests/sql/test_rescue.py {_OPEN}",
    ),
    python(
        "a statement timeout counts as an outage",
        "database/driver_errors",
        '        return DatabaseBusy(f"{text} ({code}){hint}", sqlstate=code)\n',
        '        return DatabaseUnavailable(f"{text} ({code})")\n',
        tests=f"{_ERRORS} tests/sweeps/test_errors.py",
    ),
    python(
        "a rejected outcome is retried forever",
        "engine/settle/settler",
        "        if not is_last_resort(item.outcome):\n",
        "        if False:\n",
        tests=_ERRORS,
    ),
    python(
        "outcomes that cannot be settled yet are retried one by one",
        "engine/settle/delayed",
        "        at = math.ceil((now + delay_s) / TICK_S) * TICK_S\n",
        "        at = now + delay_s\n",
        tests=f"{_ERRORS} -k many_locked",
    ),
    python(
        "a rejected flush is halved down to its last job",
        "engine/settle/loop",
        "        if flush.error is not None and flush.failures > flush.failures_max:\n",
        "        if flush.error is not None and flush.failures > 10_000:\n",
        tests=f"{_ERRORS} -k many_locked",
    ),
    sql(
        "a serialized job overtakes its locked predecessor",
        "                ORDER BY b.run_at, b.id LIMIT 1) AS row\n",
        "                ORDER BY b.run_at, b.id LIMIT 1 FOR UPDATE OF b SKIP LOCKED) AS row\n",
        tests="tests/sql/test_serialize_locked.py",
    ),
    python(
        "maintenance that timed out is retried at once",
        "engine/life/maintenance",
        "                delay_s = self._retry_delay_s(name, error)\n",
        "                delay_s = 0.0 * self._retry_delay_s(name, error)\n",
        tests="tests/sweeps/test_errors.py",
    ),
    sql(
        "jobs committed after the cancellation of their batch run",
        "    IF (SELECT b.cancelled_at FROM batches b WHERE b.id = NEW.batch_id) IS NULL\n",
        "    IF (SELECT b.cancelled_at FROM batches b WHERE b.id = NEW.batch_id) IS NULL OR true\n",
        tests="tests/sql/test_batch_adders.py -k after_the_cancel",
    ),
)
