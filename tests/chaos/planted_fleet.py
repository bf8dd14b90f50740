"""Bugs planted into leases, the fence, rescue and losses."""

from __future__ import annotations

from tests.chaos.bug import python, sql

BUGS = (
    sql(
        "slots of the dead count",
        " AND w.lost_at IS NULL AND w.lease_until > clock() GROUP BY p.queue",
        " GROUP BY p.queue",
        tests="tests/sql/test_views.py",
    ),
    sql(
        "the dead look alive",
        "CASE WHEN w.lost_at IS NOT NULL OR w.lease_until <= clock() THEN 'lost' ELSE w.state END AS state",
        "w.state",
        tests="tests/sql/test_views.py",
    ),
    sql(
        "workers are judged by the rescuer's lease",
        "             OR v_judges AND w.lease_s <= v_steady_s\n                AND w.lease_until",
        "             OR v_judges AND w.lease_until",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "nobody is rescued before a clock that was set back has passed the server's start",
        "CASE WHEN pg_postmaster_start_time() > v_now THEN '-infinity' ELSE pg_postmaster_start_time() END",
        "pg_postmaster_start_time()",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "what is taken back waits until a clock that was set back has passed its time",
        "            run_at = least(j.run_at, clock()),",
        "\n",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "an outage that the rescuer's lease is too long to notice",
        "CASE WHEN w.lease_s < v_lease_s THEN",
        "CASE WHEN false THEN",
        tests="tests/sql/test_rescue_guard.py",
    ),
    sql(
        "a heartbeat renews whatever has the id",
        "    WHERE w.id = p_worker AND w.token = p_token AND w.lost_at IS NULL;\n    RETURN FOUND;",
        "    WHERE w.id = p_worker AND w.lost_at IS NULL;\n    RETURN FOUND;",
        tests="tests/sql/test_fence.py tests/engine/test_failover.py",
    ),
    sql(
        "a claim asks for no token",
        "WHERE w.id = p_worker AND (p_token IS NULL OR w.token = p_token) AND",
        "WHERE w.id = p_worker AND",
        tests="tests/sql/test_fence.py",
    ),
    sql(
        "a sequence that is behind gives ids twice",
        "        ON CONFLICT (id) DO NOTHING RETURNING w.id",
        "        RETURNING w.id",
        tests="tests/sql/test_fence.py",
    ),
    python(
        "a claim that was lost and came again starts the job again",
        "engine/attempts",
        "                return False\n",
        "                return True\n",
        tests="tests/unit/test_attempts.py tests/engine/test_failover.py",
    ),
    python(
        "settles do not say whose they are",
        "database/store",
        "    return worker_id, token_of(worker_id)\n",
        "    return None, None\n",
        tests="tests/engine/test_failover.py",
    ),
    sql(
        "losses spend the budget of failures",
        "losses, 2147483646) + 1, failed_at = clock(), worker_id = NULL,",
        "losses, 2147483646) + 1, failures = j.failures + 1, failed_at = clock(), worker_id = NULL,",
        tests="tests/sql/test_rescue.py",
    ),
    sql(
        "one loss keeps jobs out of the claims' way",
        "RETURN j.status IN ('pending', 'failed') AND j.losses < 2 AND j.serialize_key IS NULL",
        "RETURN j.status IN ('pending', 'failed') AND j.losses < 1 AND j.serialize_key IS NULL",
        tests="tests/sql/test_rescue.py",
    ),
    sql(
        "a rescue does not say where claims must go back to",
        "    PERFORM wake(array_agg(j.queue::text), min(j.run_at), true)",
        "    PERFORM wake(array_agg(j.queue::text))",
        tests="tests/sql/test_rescue.py",
    ),
    python(
        "claims take again what only others know",
        "engine/run/unknown_kinds",
        "if known.elsewhere or (",
        "if (",
        tests="tests/engine/test_mixed_kinds.py tests/sweeps/test_mixed_fleets.py",
    ),
    python(
        "whom nobody knows is claimed without end",
        "engine/run/unknown_kinds",
        "known.met >= DOSE and",
        "False and",
        tests="tests/engine/test_mixed_kinds.py",
    ),
    python(
        "jobs that another worker knows wait as if nobody did",
        "engine/run/unknown_kinds",
        "        if not known.elsewhere:\n",
        "        if True:\n",
        tests="tests/engine/test_mixed_kinds.py",
    ),
    sql(
        "claims walk over what is left to others each time",
        "        IF v_room > 0 AND cardinality(p_without) > 0 THEN",
        "        IF false THEN",
        tests="tests/sql/test_claim_left_out.py",
    ),
    sql(
        "who has a handler is asked of dead workers, too",
        "                        AND w.lease_until > clock() AND u.kind",
        "                        AND u.kind",
        tests="tests/sql/test_claim_left_out.py",
    ),
    python(
        "a supervisor does not say that a process has ended",
        "fleet/supervisor",
        "                    await self._report_ended(worker_id)\n",
        "",
        tests="tests/engine/test_supervisor_deaths.py",
    ),
    python(
        "jobs are taken back beside the processes that run them",
        "fleet/supervisor",
        "                    await liveness_pipe.gone(end)\n",
        "",
        tests="tests/engine/test_supervisor_deaths.py",
    ),
    sql(
        "whose process has ended is found when somebody may judge",
        "    IF NOT v_judges AND NOT EXISTS (",
        "    IF NOT v_judges OR NOT EXISTS (",
        tests="tests/engine/test_supervisor_deaths.py",
    ),
    python(
        "a database in another encoding is taken",
        "database/schema",
        '    if encoding != "UTF8":\n',
        '    if encoding == "":\n',
        tests="tests/engine/test_encodings.py",
    ),
    sql(
        "progress is noted for whoever has the id",
        "        WHERE p_worker IS NULL OR j.worker_id = p_worker AND",
        "        WHERE true OR",
        tests="tests/sql/test_fence.py",
    ),
    sql(
        "payloads are read for whoever has the id",
        "= u.attempt AND j.worker_id IS NOT NULL\n            AND (p_worker IS NULL OR",
        "= u.attempt AND j.worker_id IS NOT NULL\n            AND (true OR",
        tests="tests/sql/test_fence.py",
    ),
    sql(
        "a pool is entered for whoever has the id",
        "WHERE w.id = p_worker AND w.lost_at IS NULL AND (p_token IS NULL OR w.token = p_token)",
        "WHERE w.id = p_worker AND w.lost_at IS NULL",
        tests="tests/sql/test_fence.py",
    ),
)
