"""Bugs planted into claims, keys, limits, rates, and the queries of heartbeats."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_EXPLAIN = "tests/sql/test_explain.py"
_ONE = "tests/sql/test_claim_one.py"

BUGS = (
    python(
        "a claim's jobs begin in the order of the table",
        "core/claims",
        "map(_claimed, sorted(rows[: -len(extra)], key=_place))",
        "map(_claimed, rows[: -len(extra)])",
        tests="tests/unit/test_claims.py",
    ),
    sql(
        "a turn takes a job of a kind that is left to others",
        "in_time(j, p_now) AND j.ctid <> ALL (p_seen)\n"
        "                             AND coalesce(j.kind, j.queue)::text <> ALL (p_without)\n",
        "in_time(j, p_now) AND j.ctid <> ALL (p_seen)\n",
        tests="tests/sql/test_claim_left_out.py",
    ),
    sql(
        "a turn takes a job that has expired",
        "CASE WHEN j.run_at <= p_now AND in_time(j, p_now) AND",
        "CASE WHEN j.run_at <= p_now AND",
        tests="tests/sql/test_turns.py",
    ),
    sql(
        "a rate-limited claim that waited for a lock uses the time before the wait",
        "        v_now := clock_after_waiting();",
        "        -- v_now := clock_after_waiting();",
        tests="tests/sql/test_rates.py",
    ),
    sql(
        "a clock set back stops a rate",
        "    IF v_ahead_s > v_burst * v_cost_s + 1 THEN",
        "    IF false THEN",
        tests="tests/sql/test_rates.py",
    ),
    sql(
        "claims of a fair queue visit keys without due jobs",
        "            v_further := v_further OR NOT v_round;\n",
        "",
        tests="tests/sql/test_turns.py",
    ),
    sql(
        "a backlog of one key hides the keys after it",
        "            v_first := v_found.keys[:(p_room + 1) / 2];\n",
        "            v_first := '{}';\n",
        tests="tests/sql/test_turns.py",
    ),
    sql(
        "counting for max_running reads jobs that run in other queues",
        "AND j.worker_id = v_worker AND j.queue = p_queue);",
        "AND j.worker_id = v_worker AND j.queue || '' = p_queue);",
        tests="tests/sql/test_costs.py",
    ),
    sql(
        "a heartbeat reads every job that the worker ever ran",
        "WHERE j.worker_id = p_worker AND j.worker_id IS NOT NULL AND j.cancel_requested_at IS NOT NULL) c,",
        "WHERE j.worker_id = p_worker AND j.status = 'running' AND j.cancel_requested_at >= '1970-01-02') c,",
        tests="tests/sql/test_heartbeat_cost.py",
    ),
    sql(
        "a heartbeat misses settings changed by an earlier transaction",
        "sum(((SELECT age('3'::xid)::bigint) - age(q.written)) & 4294967295),",
        "max(((SELECT age('3'::xid)::bigint) - age(q.written)) & 4294967295),",
        tests="tests/sql/test_heartbeat_cost.py",
    ),
    sql(
        "a promoted job is not found by claims past its position",
        "        -- for the queue: see pick()\n"
        "        UPDATE jobs j SET status = 'pending', promoted = clock_after_waiting()",
        "        UPDATE jobs j SET status = 'pending'",
        tests="tests/sql/test_claim_places.py",
    ),
    sql(
        "a keyed claim starts after jobs that it could not take",
        "            v_done := v_done || done_of(v_met[:coalesce(v_stop - 1, cardinality(v_met))]);",
        "            v_done := v_done || done_of(v_met);",
        tests="tests/sql/test_claim_places.py",
    ),
    sql(
        "keyed claims scan entries of finished jobs to check for work",
        "CASE WHEN coalesce(p_places, '{}') = '{}' THEN EXISTS",
        "CASE WHEN true THEN EXISTS",
        tests="tests/sql/test_claim_places.py",
    ),
    python(
        "a keyed claim that could not rewind drops the rewind",
        "engine/claim/claim_cursor",
        "        if places is not None:\n            self._passed",
        "        self._since = self._rewound\n        if places is not None:\n            self._passed",
        tests="tests/unit/test_cursor.py",
    ),
    sql(
        "a settle reads the settings of all queues",
        " FROM queues q WHERE q.name = ANY (ARRAY(SELECT DISTINCT d.queue::text FROM done d))",
        " FROM queues q",
        tests="tests/sql/test_settle_cost.py",
    ),
    python(
        "one priority too many resets all claim positions",
        "engine/claim/claim_cursor",
        "            del self._positions[next(iter(self._positions))]\n",
        "            self._positions.clear()\n",
        tests="tests/unit/test_cursor.py",
    ),
    sql(
        "jobs without a key wait while keyed ones are being blocked",
        "            v_round := v_rounds < cardinality(v_park_max);\n",
        "            v_round := true;\n",
        tests="tests/sql/test_serialize.py",
    ),
    sql(
        "the depth of a queue is counted over all waiting jobs",
        "AND waits_plain(j) AND j.run_at <= v_now\n             ORDER BY j.run_at LIMIT p_most - v_found)",
        "AND waits_plain(j) AND (j.run_at <= v_now) IS TRUE\n             ORDER BY j.run_at LIMIT p_most - v_found)",
        tests="tests/sql/test_costs.py",
    ),
    sql(
        "unblock visits only the first thousand keys",
        "           max(l.queue) FILTER (WHERE l.place = p_most), max(l.key) FILTER (WHERE l.place = p_most)\n",
        "           NULL, NULL\n",
        tests="tests/sql/test_serialize.py",
    ),
    sql(
        "by turns, jobs with a serialize_key alone start behind all without any key",
        "                ORDER BY j.priority DESC, j.run_at, j.id LIMIT v_room);\n            met := met",
        "                ORDER BY j.serialize_key IS NOT NULL, j.priority DESC, j.run_at, j.id LIMIT v_room);\n"
        "            met := met",
        tests="tests/sql/test_turns.py",
    ),
    sql(
        "explain leaves out that the limit of a key is reached",
        "(v_queue.limit_per_key <= v_same, 'limit_key',",
        "(false, 'limit_key',",
        tests=_EXPLAIN,
    ),
    sql(
        "explain names a limit that is not reached",
        "(v_queue.max_running <= v_running, 'limit',",
        "(v_queue.max_running <= v_running + 1, 'limit',",
        tests=_EXPLAIN,
    ),
    sql(
        "explain says a wrong time for the end of a rate",
        "'time', v_now + make_interval(secs => v_rate.again_s), NULL),",
        "'time', v_now + make_interval(secs => v_rate.again_s / 2), NULL),",
        tests=_EXPLAIN,
    ),
    sql(
        "a claim by id takes a job that is not due",
        "WHERE v_job.status <> 'blocked' OR h.reason IN ('dependency', 'key') LIMIT 1;",
        "WHERE v_job.status <> 'blocked' AND h.reason NOT IN ('future', 'retry') LIMIT 1;",
        tests=_ONE,
    ),
    sql(
        "a claim by id passes others in the line of its key",
        "WHERE v_job.status <> 'blocked' OR h.reason IN ('dependency', 'key') LIMIT 1;",
        "WHERE h.reason <> 'key' LIMIT 1;",
        tests=_ONE,
    ),
    sql(
        "a claim by id heeds no limit per key",
        "IF v_room < 1 OR NOT key_has_room(p_queue, v_job.limit_key, v_now) THEN",
        "IF v_room < 1 THEN",
        tests=_ONE,
    ),
    sql(
        "a claim by id runs a second suspect",
        "    IF why IS NULL AND v_job.losses > 1 AND NOT may_run_suspect(p_worker) THEN",
        "    IF false THEN",
        tests=_ONE,
    ),
    sql(
        "claims after one by id in the same transaction claim its job again",
        "    PERFORM carefully('');\n    IF p_lease_s",
        "    IF p_lease_s",
        tests=_ONE,
    ),
    sql(
        "a job that had not seen the scope of its queue runs in its old line",
        "                  WHEN x.scope <> coalesce(v_queue.serialize_scope, p_queue) THEN NULL\n",
        "",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "a queue gets a scope beside the claims under way",
        "    PERFORM lock_queues(array_remove(ARRAY[",
        "    PERFORM (array_remove(ARRAY[",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "a queue with a scope may be renamed under its jobs",
        "                       OR NEW.name <> OLD.name AND OLD.serialize_scope IS NOT NULL)",
        "                       OR false)",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "a claim locks its queue alone, and not the scope of its keys",
        "        IF v_scope IS NULL THEN\n",
        "        IF true THEN\n",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "a queue without a scope has those after it in the transaction taken for such",
        "NEW.queue::text IS DISTINCT FROM current_setting('pgworkd.unscoped', true)",
        "coalesce(current_setting('pgworkd.unscoped', true), '') = ''",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "a transaction that gives its queue a scope takes it for one without",
        "    PERFORM set_config('pgworkd.unscoped', '', true);  -- see jobs_key_wanted()\n",
        "",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "a key of a scope is handed on in silence",
        "    PERFORM wake(p_queues || v_wake);",
        "    PERFORM wake(p_queues);",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "the scope of a queue may change under its jobs",
        "FOR EACH ROW WHEN (NEW.serialize_scope IS DISTINCT FROM OLD.serialize_scope\n",
        "FOR EACH ROW WHEN (false\n",
        tests="tests/sql/test_serialize_scopes.py",
    ),
    sql(
        "a job that ends hands the key of its scope on in its queue",
        "array_agg(coalesce(d.serialize_scope, d.queue)::text)",
        "array_agg(d.queue::text)",
        tests="tests/sql/test_serialize_scopes.py",
    ),
)
