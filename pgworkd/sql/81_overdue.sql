-- Attempts whose own lease, or whose deadline, has passed: see 36_assignments.sql.

-- Seconds that a job of the queue waits for its next retry, after this number of failures, by the
-- queue's settings and the defaults of pgworkd.core.backoff, give or take 10 %: for failures that
-- no handler's own policy can be asked about. Locks nothing.
CREATE OR REPLACE FUNCTION retry_delay_s(p_queue text, p_failures int) RETURNS float8
LANGUAGE sql VOLATILE AS $$
    SELECT least(coalesce(q.backoff_cap_s, 1800),
                 coalesce(q.backoff_s, 30)
                     * coalesce(q.backoff_factor, 10)::float8 ^ least(p_failures - 1, 80))
           * (0.9 + 0.2 * random())
    FROM (SELECT) one LEFT JOIN queues q ON q.name = p_queue
$$;

-- One part of fail_overdue(): fails these attempts, which the caller has locked, and returns them.
-- Locks as settle_failed(), without waiting.
CREATE OR REPLACE FUNCTION overdue_jobs(p_ids uuid[]) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_overdue jsonb := (
        SELECT jsonb_agg(jsonb_build_object(
            'id', j.id, 'queue', j.queue, 'kind', coalesce(j.kind, j.queue), 'attempt', j.attempts,
            'worker_id', j.worker_id, 'worker', coalesce(w.name, 'unknown'),
            'type', CASE WHEN d.passed THEN 'Timeout' ELSE 'lease' END,
            'error', CASE WHEN d.passed THEN 'no result within ' || d.timeout_s || ' s'
                          WHEN w.kind = 'standing' AND w.name = 'push'
                              THEN 'no callback within ' || j.lease_s || ' s'
                          ELSE 'its lease of ' || coalesce(j.lease_s, w.lease_s, 30)
                               || ' s was not renewed' END,
            'delay_s', retry_delay_s(j.queue, j.failures + 1)) ORDER BY j.id)
        FROM jobs j LEFT JOIN workers w ON w.id = j.worker_id
        LEFT JOIN queues q ON q.name = j.queue
        CROSS JOIN LATERAL (
            SELECT l.timeout_s, coalesce(deadline(j.started_at, l.timeout_s) <= j.lease_until,
                                         false) AS passed
            FROM (SELECT coalesce(j.timeout_s, q.timeout_s) AS timeout_s) l) d
        WHERE j.id = ANY (p_ids));
    v_statuses jsonb;
BEGIN
    SELECT jsonb_object_agg(s.id, s.status) INTO v_statuses
    FROM (SELECT array_agg(o.id) AS ids, array_agg(o.attempt) AS attempts,
                 array_agg(o.delay_s) AS delays_s, array_agg(false) AS permanent,
                 array_agg(o.error) AS messages,
                 array_agg(jsonb_build_object('type', o.type, 'message', o.error,
                                              'worker', o.worker)::text) AS errors
          FROM jsonb_to_recordset(v_overdue) AS o (id uuid, attempt int, delay_s float8, error text,
                                                   type text, worker text)) a
    CROSS JOIN LATERAL settle_failed(a.ids, a.attempts, a.delays_s, a.permanent, a.messages,
                                     a.errors) s;
    IF EXISTS (SELECT FROM jobs j WHERE j.id = ANY (p_ids) AND j.schedule IS NOT NULL) THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
    END IF;
    RETURN (SELECT jsonb_agg(o || jsonb_build_object('status', v_statuses ->> (o ->> 'id')))
            FROM jsonb_array_elements(v_overdue) o WHERE v_statuses ? (o ->> 'id'));
END $$;

-- Fails attempts whose `lease_until` has passed, at most p_limit, and returns them: only if a
-- gateway, through which they could have been extended or settled, and this server have been there
-- for the length of their lease (of their worker's, if they have none of their own): see
-- had_time(). With p_age_max_s, only what has passed at most this many seconds ago: while vacuum
-- is held back the entries of all that have ever had a lease are before that in the index. Locks a
-- lock of its own, then the jobs with SKIP LOCKED, then as settle_failed(), without waiting.
CREATE OR REPLACE FUNCTION fail_overdue(p_limit int DEFAULT 1000, p_age_max_s float8 DEFAULT NULL)
RETURNS TABLE (id uuid, queue text, kind text, attempt int, status text, worker_id int, worker text,
               error text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock();
    v_ids uuid[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 11) THEN
        RETURN;
    END IF;
    PERFORM set_no_wait('on');
    v_ids := ARRAY(
        SELECT j.id FROM jobs j LEFT JOIN workers w ON w.id = j.worker_id
        WHERE j.lease_until < v_now AND j.worker_id IS NOT NULL
          AND j.lease_until >= coalesce(v_now - make_interval(secs => p_age_max_s), '-infinity')
          AND had_time(j.lease_until, coalesce(j.lease_s, w.lease_s, 30)::real, v_now)
          AND NOT is_refused('fail_overdue', j.id::text)
        ORDER BY j.lease_until LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    RETURN QUERY
    SELECT t.id, t.queue, t.kind, t.attempt, t.status, t.worker_id, t.worker, t.error
    FROM in_parts('fail_overdue', v_ids::text[], 'overdue_jobs(uuid[])') AS p (failed)
    CROSS JOIN LATERAL jsonb_to_recordset(p.failed) AS t (id uuid, queue text, kind text,
            attempt int, status text, worker_id int, worker text, error text);
END $$;
