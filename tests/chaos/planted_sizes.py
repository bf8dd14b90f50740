"""Bugs that show only with large payloads and results, many jobs at once, or a frozen client."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_LARGE = "tests/engine/test_large_work.py"
_STREAM = "tests/engine/test_client_stream.py"
_FROZEN = "tests/engine/test_frozen_client.py"
BUGS = (
    sql(
        "a claim's reply is not bounded in bytes",
        "    v_share := CASE WHEN v_tcp THEN 360000 ELSE 180000 END / greatest(cardinality(v_rows), 1) - 140;",
        "    v_share := 2000000000;",
        tests=_FROZEN,
    ),
    sql(
        "a payload read's reply is not bounded in bytes",
        "        EXIT WHEN v_bytes >= p_bytes;\n",
        "",
        tests="tests/sql/test_begun.py",
    ),
    python(
        "a session of a frozen client is never ended",
        "database/session",
        '        "tcp_user_timeout": USER_TIMEOUT_MS,\n',
        "",
        tests=f"{_FROZEN} -k session",
    ),
    python(
        "a flush is bounded in jobs but not in bytes",
        "engine/settle/flushes",
        "FLUSH_BYTES = 1024 * 1024\n",
        "FLUSH_BYTES = 1 << 40\n",
        tests=f"{_LARGE} -k results",
    ),
    python(
        "waiting outcomes are not bounded in bytes",
        "engine/settle/flushes",
        "        self.bytes += size\n        self.count",
        "        self.count",
        tests=f"{_LARGE} -k bounded_in_bytes",
    ),
    python(
        "outcomes of all queues share one FIFO",
        "engine/settle/flushes",
        "        if self.bytes > FLUSH_BYTES:\n",
        "        if False:\n",
        tests="tests/unit/test_flushes.py",
    ),
    python(
        "a stop waits for payload reads",
        "engine/claim/pool",
        "            self._executor.stop_reading(reason)\n",
        "            pass\n",
        tests=f"{_LARGE} -k at_a_stop",
    ),
    python(
        "ids within one millisecond are unordered",
        "client/new_job",
        "first = fresh if fresh >> 80 > self._next >> 80 else self._next + secrets.randbits(30)",
        "first = fresh",
        tests="tests/unit/test_ids.py",
    ),
    sql(
        "each inserted row is compared with each pool",
        "    v_soon := clock() + interval '10 s';\n",
        "    v_soon := clock() + interval '10 s';\n"
        "    IF NOT EXISTS (SELECT FROM pools p JOIN inserted i ON i.queue = p.queue WHERE p.idle) THEN\n"
        "        RETURN NULL;\n    END IF;\n",
        tests="tests/sql/test_insert_cost.py",
    ),
    python(
        "enqueue_many consumes its whole iterable before the first insert",
        "client/connections",
        "    return chain([first], steps) if many else [first, *filter(None, steps)]",
        "    return [first, *filter(None, steps)]",
        tests=f"{_STREAM} -k consumed_in_parts",
    ),
    python(
        "a column of equal-looking values is sent as one value",
        "client/columns",
        "if len(set(map(id, column))) == 1:",
        "if len(set(map(repr, column[:2]))) == 1:",
        tests=f"{_STREAM} -k column_checks",
    ),
    python(
        "an error in a later job of a call does not undo the earlier ones",
        "client/connections",
        "    for failed in [*errors, *filter(None, [error])]:",
        "    for failed in errors:",
        tests=f"{_STREAM} -k undoes_all",
    ),
)
