"""Bugs planted into what the engine does for remote workers."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_WORKERS, _MODEL = "tests/sql/test_remote_workers.py", "tests/sql/test_remote_model.py"
_ASSIGNMENTS, _ONCE = "tests/sql/test_assignments.py tests/sql/test_attempt_leases.py", "tests/sql/test_enqueue_once.py"

BUGS = (
    sql(
        "a settle on behalf of others matches the job's id only",
        "CASE WHEN j.id IS NULL OR w.token <> u.token THEN -1 ELSE u.attempt END",
        "u.attempt",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "a settle on behalf of others does not match the worker",
        "ON j.id = u.id AND j.attempts = u.attempt AND j.worker_id = u.worker\n        AND j.assignment_id",
        "ON j.id = u.id AND j.attempts = u.attempt\n        AND j.assignment_id",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "a settle on behalf of others does not match the token",
        "CASE WHEN j.id IS NULL OR w.token <> u.token THEN",
        "CASE WHEN j.id IS NULL THEN",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "an assignment of a restored dump settles",
        "        AND j.assignment_id IS NOT DISTINCT FROM u.assignment\n",
        "",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "a worker that signs off is believed to have begun whatever its claims took",
        "AND NOT (coalesce(j.claim_id <= p_claim_id, false)",
        "AND NOT (false",
        tests="tests/http/test_worker_lists.py",
    ),
    sql(
        "a worker that signs off is believed to have begun nothing since its last list",
        "AND NOT (coalesce(j.claim_id <= p_claim_id, false)",
        "AND NOT (true",
        tests="tests/http/test_worker_lists.py",
    ),
    sql(
        "leases are renewed together without a fence",
        "FROM given g JOIN workers w ON w.id = g.id AND w.token = g.token\n        WHERE w.lost_at IS NULL ORDER BY",
        "FROM given g JOIN workers w ON w.id = g.id\n        WHERE w.lost_at IS NULL ORDER BY",
        tests=_WORKERS,
    ),
    sql(
        "the lease of a worker presumed dead is renewed",
        "WHERE w.lost_at IS NULL ORDER BY w.id FOR NO KEY UPDATE OF w SKIP LOCKED",
        "ORDER BY w.id FOR NO KEY UPDATE OF w SKIP LOCKED",
        tests=_WORKERS,
    ),
    sql(
        "a locked worker holds up the leases of all",
        "ORDER BY w.id FOR NO KEY UPDATE OF w SKIP LOCKED",
        "ORDER BY w.id FOR NO KEY UPDATE OF w NOWAIT",
        tests=_WORKERS,
    ),
    sql(
        "a remote worker is judged like a daemon",
        "WHEN w.kind = 'remote' THEN had_time(w.lease_until, w.lease_s, v_now)",
        "WHEN false THEN true",
        tests=f"{_WORKERS} {_MODEL}",
    ),
    sql(
        "a remote worker is judged by the gateway's lease",
        "<= g.seen_at - make_interval(secs => p_lease_s)",
        "<= g.seen_at - make_interval(secs => g.lease_s)",
        tests=f"{_WORKERS} {_MODEL}",
    ),
    sql(
        "an outage that a gateway did not notice costs a short lease",
        "WHEN p_lease_s < g.lease_s THEN make_interval(secs => g.lease_s / 2 + p_lease_s / 3)",
        "WHEN false THEN interval '0'",
        tests=_MODEL,
    ),
    sql(
        "a new gateway inherits from one that is frozen",
        "AND w.seen_at <= p_now AND w.seen_at > p_now - make_interval(secs => w.lease_s / 2)\n"
        "      AND w.steady_since <= w.seen_at",
        "AND w.steady_since <= w.seen_at",
        tests=f"{_WORKERS} {_MODEL}",
    ),
    sql(
        "a new gateway inherits nothing",
        "least(v_since, clock()), CASE WHEN p_kind",
        "clock(), CASE WHEN p_kind",
        tests=_WORKERS,
    ),
    sql(
        "rescue takes attempts with a lease of their own",
        "AND j.status = 'running' AND j.lease_s IS NULL\n",
        "AND j.status = 'running'\n",
        tests=_WORKERS,
    ),
    sql(
        "the standing worker's lease is shortened",
        "\n      AND w.kind <> 'standing';",
        ";",
        tests=_WORKERS,
    ),
    sql(
        "a claim on behalf of others gives to who has gone",
        "              JOIN workers w ON w.id = u.id AND w.token = u.token\n"
        "                  AND w.lost_at IS NULL AND w.lease_until > clock()",
        "              JOIN workers w ON w.id = u.id",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "the last to wait is served first",
        "v_to := coalesce(v_live[v_first], v_by);",
        "v_to := coalesce((SELECT max(l) FROM unnest(v_live) l WHERE l <> v_by AND v_slots[l] > 0), v_by);",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "two suspects for one remote worker",
        "            ELSIF losses < 2 THEN\n",
        "            ELSE\n",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "a suspect waits for the first worker only",
        "    WHILE v_turn > 0 AND (v_by IS NULL OR EXISTS (",
        "    WHILE v_turn > 0 AND (v_by IS NULL OR false AND EXISTS (",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "a remote attempt has no deadline",
        "THEN deadline(v_now, coalesce(j.timeout_s, v_timeout_s)) END,",
        "THEN NULL::timestamptz END,",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "an extension goes beyond the deadline",
        "lease_until = least(clock() + make_interval(secs => m.lease_s),",
        "lease_until = greatest(clock() + make_interval(secs => m.lease_s),",
        tests=_ASSIGNMENTS,
    ),
    sql(
        "an attempt is failed however short a gateway has been there",
        "          AND had_time(j.lease_until, coalesce(j.lease_s, w.lease_s, 30)::real, v_now)\n",
        "",
        tests=f"{_ASSIGNMENTS} {_MODEL}",
    ),
    sql(
        "two enqueue_once() of one id at once",
        "    PERFORM pg_advisory_xact_lock(hashtextextended(p_id::text, 1886873448));\n",
        "",
        tests=_ONCE,
    ),
    sql(
        "enqueue_once() looks at live jobs only",
        "FROM finished_of(ARRAY[p_id]) f LIMIT 1;",
        "FROM finished_jobs f WHERE false;",
        tests=_ONCE,
    ),
    sql(
        "what may run only once goes back at a sign-off",
        "array_agg(coalesce(j.max_attempts = 1, false)\n",
        "array_agg(false\n",
        tests=_WORKERS,
    ),
    python(
        "no daemon fails what is overdue",
        "database/maintenance_store",
        "worker, error, true FROM pgworkd.fail_overdue($2, $3)",
        "worker, error, true FROM pgworkd.fail_overdue($2, $3) WHERE false",
        tests="tests/engine/test_remote_attempts.py",
    ),
    python(
        "an answer that comes after the registration was lost is run",
        "engine/claim/pool",
        "        if not self._worker.may_claim or worker_id is not self._worker.worker_id:\n",
        "        if not self._worker.may_claim:\n",
        tests="tests/http/test_remote_claims.py",
    ),
    python(
        "a lock on all jobs costs remote workers their lease",
        "gateway/workers/beats",
        "        except DatabaseBusy as error:\n            self._outage.failed(error)\n            return None",
        "        except ZeroDivisionError as error:\n            self._outage.failed(error)\n            return None",
        tests="tests/http/test_worker_lists.py",
    ),
    python(
        "what was not asked for under a lock counts as listed",
        "gateway/workers/beats",
        "                beat.is_listed = False\n",
        "                beat.is_listed = True\n",
        tests="tests/http/test_worker_lists.py",
    ),
    python(
        "what could not be listed counts as listed",
        "gateway/workers/beats",
        "            beat.is_listed = not any(each.job_id in failed for each in beat.report.held)\n",
        "            beat.is_listed = True\n",
        tests="tests/http/test_worker_lists.py",
    ),
)
