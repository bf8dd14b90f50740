"""Bugs planted into leases, the fence, rescue and losses."""

from __future__ import annotations

from tests.chaos.bug import python, sql

BUGS = (
    sql(
        "slots of dead workers are counted",
        " AND w.lost_at IS NULL AND w.lease_until > clock() GROUP BY p.queue",
        " GROUP BY p.queue",
        tests="tests/sql/test_views.py",
    ),
    sql(
        "dead workers are shown as alive",
        "CASE WHEN w.lost_at IS NOT NULL OR w.lease_until <= clock() THEN 'lost' ELSE w.state END AS state",
        "w.state",
        tests="tests/sql/test_views.py",
    ),
    sql(
        "workers are judged by the rescuer's lease duration",
        "                    ELSE w.lease_s <= v_steady_s END\n          ORDER BY w.id",
        "                    ELSE true END\n          ORDER BY w.id",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "no job is rescued until a clock that was set back passes the server's start",
        "CASE WHEN pg_postmaster_start_time() > v_now THEN '-infinity' ELSE pg_postmaster_start_time() END",
        "pg_postmaster_start_time()",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "rescued jobs wait until a clock that was set back passes their run_at",
        "            run_at = least(j.run_at, clock()),",
        "\n",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "a rescuer with a long lease misses an outage",
        "WHEN w.lease_s < v_lease_s THEN w.lease_s <= v_steady_s",
        "WHEN false THEN w.lease_s <= v_steady_s",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "a heartbeat renews any registration with its worker id",
        "    WHERE w.id = p_worker AND w.token = p_token AND w.lost_at IS NULL;\n    RETURN FOUND;",
        "    WHERE w.id = p_worker AND w.lost_at IS NULL;\n    RETURN FOUND;",
        tests="tests/sql/test_fence.py tests/engine/test_failover.py",
    ),
    sql(
        "a claim does not check the registration token",
        "WHERE w.id = p_worker AND (p_token IS NULL OR w.token = p_token) AND",
        "WHERE w.id = p_worker AND",
        tests="tests/sql/test_fence.py",
    ),
    sql(
        "a sequence that lags hands out worker ids twice",
        "        ON CONFLICT (id) DO NOTHING RETURNING w.id",
        "        RETURNING w.id",
        tests="tests/sql/test_fence.py",
    ),
    python(
        "an attempt that is claimed twice starts twice",
        "engine/attempts",
        "                if _are_same(older, attempt):\n",
        "                if False:\n",
        tests="tests/unit/test_attempts.py tests/engine/test_failover.py",
    ),
    python(
        "settles do not send the registration token",
        "database/settles",
        "        return [ids, attempts, first.worker_id or None, first.token]\n",
        "        return [ids, attempts, None, None]\n",
        tests="tests/engine/test_failover.py",
    ),
    sql(
        "losses count against max_attempts",
        "losses, 2147483646) + 1, failed_at = clock(), worker_id = NULL,",
        "losses, 2147483646) + 1, failures = j.failures + 1, failed_at = clock(), worker_id = NULL,",
        tests="tests/sql/test_rescue.py",
    ),
    sql(
        "a job is a suspect after its first loss",
        "RETURN j.status IN ('pending', 'failed') AND j.losses < 2 AND j.serialize_key IS NULL",
        "RETURN j.status IN ('pending', 'failed') AND j.losses < 1 AND j.serialize_key IS NULL",
        tests="tests/sql/test_rescue.py",
    ),
    sql(
        "a rescue does not report the position to rewind to",
        "    PERFORM wake(array_agg(j.queue::text), min(j.run_at), true)",
        "    PERFORM wake(array_agg(j.queue::text))",
        tests="tests/sql/test_rescue.py",
    ),
    python(
        "claims repeatedly take kinds that only other workers handle",
        "engine/run/unknown_kinds",
        "if known.elsewhere or (",
        "if (",
        tests="tests/engine/test_mixed_kinds.py tests/sweeps/test_mixed_fleets.py",
    ),
    python(
        "jobs of a kind without any handler are claimed endlessly",
        "engine/run/unknown_kinds",
        "known.met >= DOSE and",
        "False and",
        tests="tests/engine/test_mixed_kinds.py",
    ),
    python(
        "jobs of a kind that another worker handles wait as if of an unknown kind",
        "engine/run/unknown_kinds",
        "        if not known.elsewhere:\n",
        "        if True:\n",
        tests="tests/engine/test_mixed_kinds.py",
    ),
    sql(
        "each claim scans the jobs left to other workers",
        "        IF v_room > 0 AND cardinality(p_without) > 0 THEN",
        "        IF false THEN",
        tests="tests/sql/test_claim_left_out.py",
    ),
    sql(
        "handlers of dead workers count as available",
        " AND w.lost_at IS NULL AND w.lease_until > clock()\n                        AND (u.kind",
        " AND w.lost_at IS NULL\n                        AND (u.kind",
        tests="tests/sql/test_claim_left_out.py",
    ),
    python(
        "a supervisor does not report a dead process",
        "processes/supervisor",
        "                    await self._report_ended(worker_id)\n",
        "",
        tests="tests/engine/test_supervisor_deaths.py",
    ),
    python(
        "jobs are rescued while the processes that run them are alive",
        "processes/supervisor",
        "                    await liveness_pipe.gone(end)\n",
        "",
        tests="tests/engine/test_supervisor_deaths.py",
    ),
    sql(
        "workers with a dead process are rescued only after the outage guard",
        "    IF NOT v_judges AND NOT EXISTS (",
        "    IF NOT v_judges OR NOT EXISTS (",
        tests="tests/engine/test_supervisor_deaths.py",
    ),
    python(
        "a database in another encoding is accepted",
        "database/schema",
        '    if encoding != "UTF8":\n',
        '    if encoding == "":\n',
        tests="tests/engine/test_encodings.py",
    ),
    sql(
        "progress is stored for an attempt of another worker",
        "        WHERE p_worker IS NULL OR j.worker_id = p_worker AND",
        "        WHERE true OR",
        tests="tests/sql/test_fence.py",
    ),
    sql(
        "payloads are read for an attempt of another worker",
        "w.id = p_worker AND w.token <> p_token))\n        ORDER BY u.place\n",
        "w.id = p_worker AND w.token <> p_token) OR true)\n        ORDER BY u.place\n",
        tests="tests/sql/test_fence.py",
    ),
    sql(
        "a pool is registered without checking the registration token",
        "WHERE w.id = p_worker AND w.lost_at IS NULL AND (p_token IS NULL OR w.token = p_token)",
        "WHERE w.id = p_worker AND w.lost_at IS NULL",
        tests="tests/sql/test_fence.py",
    ),
)
