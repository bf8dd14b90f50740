-- Settling: all ways out of `running`. Arrays are parallel, one element per attempt. Each function
-- locks the rows it changes, and answers with those it changed: an id missing from the answer was
-- settled before, or its attempt is no longer the running one.
-- The fence is (id, attempt, worker): the attempts must run under p_worker (NULL, for operators:
-- under any), and that id must not have been registered again under another token than p_token. The
-- token is checked once per call, without a lock.
-- The plan is the same whatever the statistics say: the primary key at these ids, hashed against
-- the arrays; both come in order of id, so rows are locked in that order (work_mem: a hash split
-- into batches would lose it). `worker_id IS NOT NULL` means running (a CHECK says so) and keeps
-- the planner off the index on running rows, which it prefers while it believes that few run.

-- For a settle that must not wait: locks those of these running jobs that no other session has
-- locked, and returns p_attempts with an impossible attempt for the others. What the settle then
-- finds locked is deferred. Locks the jobs in order of id, with SKIP LOCKED.
CREATE OR REPLACE FUNCTION unlocked(p_ids uuid[], p_attempts int[]) RETURNS int[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids uuid[];
BEGIN
    PERFORM set_no_wait('on');
    v_ids := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.worker_id IS NOT NULL
                   ORDER BY j.id FOR UPDATE SKIP LOCKED);
    RETURN ARRAY(SELECT CASE WHEN l.id IS NULL THEN -1 ELSE u.attempt END
                 FROM unnest(p_ids, p_attempts) WITH ORDINALITY AS u (id, attempt, place)
                 LEFT JOIN unnest(v_ids) AS l (id) ON l.id = u.id
                 ORDER BY u.place);
END $$;

-- For a settle that has not settled all of these attempts: raises 27000 if one of them still runs.
CREATE OR REPLACE FUNCTION check_settled(p_ids uuid[], p_attempts int[], p_worker int, p_token uuid)
RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF EXISTS (SELECT FROM jobs j JOIN unnest(p_ids, p_attempts) AS s (id, attempt)
                   ON j.id = s.id AND j.attempts = s.attempt
               WHERE j.id = ANY (p_ids) AND j.worker_id IS NOT NULL
                 AND (p_worker IS NULL OR j.worker_id = p_worker
                      AND NOT EXISTS (SELECT FROM workers w
                                      WHERE w.id = p_worker AND w.token <> p_token))) THEN
        PERFORM raise_kept();
    END IF;
END $$;

-- Moves the rows to finished_jobs (or only deletes them if the queue keeps no history) and inserts
-- the next occurrence of recurring ones (p_schedules, p_next, p_revisions; see add_occurrences()).
-- p_began_ago_s: seconds since the handler of each began. Notifies waiters and batches (with
-- payload and result only if a batch streams), frees keys, and notifies pools whose queue's limits
-- have capacity again. Locks the jobs in order of id, then as pass_on(), batch_ended(), promote(),
-- add_occurrences().
CREATE OR REPLACE FUNCTION settle_completed(p_ids uuid[], p_attempts int[], p_results text[],
                                            p_schedules text[] DEFAULT NULL,
                                            p_next timestamptz[] DEFAULT NULL,
                                            p_revisions int[] DEFAULT NULL,
                                            p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL,
                                            p_began_ago_s real[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_won       uuid[];
    v_schedules text[];
    v_queues    text[];
    v_keys      text[];
    v_wake      text[];
    v_kept_keys jsonb;
    v_batched   ended_job[];
    v_now       timestamptz := clock();          -- not anew for each row
BEGIN
    WITH done AS (
        DELETE FROM jobs j
        USING (SELECT * FROM unnest(p_ids, p_attempts, p_results, p_began_ago_s)
                   AS u (id, attempt, result, began_ago_s) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt
          AND j.worker_id IS NOT NULL
          AND (p_worker IS NULL OR j.worker_id = p_worker
               AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
        -- what follows reads, and no more: each column is formed twice for each row
        RETURNING j.id, j.run_at, j.created_at, j.started_at, j.failed_at, j.occurrence, j.batch_id,
                  j.priority, j.attempts, j.failures, j.max_attempts, j.worker_id, j.queue, j.kind,
                  j.payload, j.meta, j.error, j.errors, j.dedupe_key, j.dedupe_until,
                  j.serialize_key, j.serialize_scope, j.limit_key, j.schedule, j.expires_at,
                  s.result, s.began_ago_s
    ), settings AS MATERIALIZED (  -- of their queues, of which there may be thousands
        SELECT q.name::text, q.keep_s, q.limited FROM queues q
        WHERE q.name = ANY (ARRAY(SELECT DISTINCT d.queue::text FROM done d))
    ), kept AS (
        INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, failed_at,
                                   occurrence, batch_id, status, priority, attempts, failures,
                                   max_attempts, worker_id, queue, kind, payload, result, meta,
                                   error, errors, dedupe_key, serialize_key, limit_key, schedule,
                                   keep_until, expires_at, began_at)
        SELECT d.id, v_now, d.run_at, d.created_at, d.started_at, d.failed_at, d.occurrence,
               d.batch_id, 'completed', d.priority, d.attempts, d.failures, d.max_attempts,
               d.worker_id, d.queue, d.kind, d.payload, d.result::jsonb, d.meta, d.error, d.errors,
               d.dedupe_key, d.serialize_key, d.limit_key, d.schedule,
            CASE WHEN (SELECT bool_or(q.keep_s > 0) FROM settings q)
                 THEN (SELECT v_now + make_interval(secs => q.keep_s) FROM settings q
                       WHERE q.name = d.queue) END, d.expires_at,
            v_now - make_interval(secs => d.began_ago_s)
        FROM done d WHERE d.queue <> ALL (ARRAY(SELECT q.name FROM settings q WHERE q.keep_s = 0))
    )
    SELECT array_agg(d.id), array_agg(d.schedule) FILTER (WHERE d.schedule IS NOT NULL),
           array_agg(coalesce(d.serialize_scope, d.queue)::text)
               FILTER (WHERE d.serialize_key IS NOT NULL),
           array_agg(d.serialize_key::text) FILTER (WHERE d.serialize_key IS NOT NULL),
           array_agg(d.queue::text)
               FILTER (WHERE d.queue = ANY (ARRAY(SELECT q.name FROM settings q WHERE q.limited))),
           jsonb_agg(to_jsonb(ROW(d.id, d.queue, d.dedupe_key, d.dedupe_until)))
               FILTER (WHERE d.dedupe_until IS NOT NULL),
           array_agg(CASE WHEN (SELECT true FROM batches c
                                WHERE c.parent_id = d.batch_id AND c.stream LIMIT 1)
                          THEN ROW(d.batch_id, 'completed', false, d.id, d.kind, d.payload,
                                   d.result::jsonb, d.meta)::ended_job
                          ELSE ROW(d.batch_id, 'completed', false, d.id, NULL, NULL, NULL,
                                   NULL)::ended_job END)
               FILTER (WHERE d.batch_id IS NOT NULL)
    INTO v_won, v_schedules, v_queues, v_keys, v_wake, v_kept_keys, v_batched
    FROM done d;
    IF coalesce(cardinality(v_won), 0) < cardinality(p_ids) THEN
        PERFORM check_settled(p_ids, p_attempts, p_worker, p_token);
    END IF;
    -- As after_ended() looks; calling it for nothing costs each settle more than these two probes.
    IF num_nonnulls(v_batched, v_keys, v_wake, v_kept_keys) > 0
       OR EXISTS (SELECT FROM job_dependencies w WHERE w.depends_on = ANY (v_won))
       OR EXISTS (SELECT FROM result_waiters w WHERE w.job_id = ANY (v_won)) THEN
        PERFORM after_ended(v_won, true, v_batched, v_queues, v_keys, v_wake, v_kept_keys);
    END IF;
    IF v_schedules IS NOT NULL AND p_next IS NOT NULL THEN
        PERFORM follow(v_schedules, p_schedules, p_next, p_revisions);
    END IF;
    RETURN coalesce(v_won, '{}');
END $$;

-- settle_completed() in the handler's own transaction, which commits next; if its connection dies
-- first, it stays open until the server notices. So it waits for and locks the job's row only, and
-- nothing that claims or other settles need: the effects on its tree, its dependents and its line
-- are deferred, and applied after the commit.
CREATE OR REPLACE FUNCTION complete_own(p_ids uuid[], p_attempts int[], p_results text[],
                                        p_schedules text[], p_next timestamptz[], p_revisions int[],
                                        p_worker int, p_token uuid,
                                        p_began_ago_s real[] DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_no_wait('on');
    RETURN settle_completed(p_ids, p_attempts, p_results, p_schedules, p_next, p_revisions,
                            p_worker, p_token, p_began_ago_s);
END $$;

-- Counts a failure. With budget left the job waits for its retry, p_delays_s from now (NULL: by the
-- settings of its queue, see retry_delay_s()); otherwise, or with p_permanent, it is dead. p_errors
-- are history entries (JSON objects as text: type, message, traceback, worker). A job whose
-- cancellation was requested is cancelled instead of waiting. Locks as settle_completed().
CREATE OR REPLACE FUNCTION settle_failed(p_ids uuid[], p_attempts int[], p_delays_s float8[],
                                         p_permanent boolean[], p_messages text[], p_errors text[],
                                         p_schedules text[] DEFAULT NULL,
                                         p_next timestamptz[] DEFAULT NULL,
                                         p_revisions int[] DEFAULT NULL, p_worker int DEFAULT NULL,
                                         p_token uuid DEFAULT NULL)
RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_ids       uuid[];
    v_statuses  text[];
    v_cancelled uuid[];
    v_schedules text[];
    v_queues    text[];
    v_keys      text[];
    v_wake      text[];
    v_batched   ended_job[];
    v_dead      uuid[];
BEGIN
    WITH ended AS (
        UPDATE jobs j
        SET status = CASE WHEN s.permanent OR j.failures >= coalesce(j.max_attempts, 3) - 1
                          THEN 'dead' ELSE 'failed' END::job_status,
            failures = least(j.failures, 2147483646) + 1, failed_at = clock(), worker_id = NULL,
            lease_until = NULL, lease_s = NULL, assignment_id = NULL,
            run_at = CASE WHEN s.permanent OR j.failures >= coalesce(j.max_attempts, 3) - 1
                          THEN j.run_at ELSE clock() + make_interval(secs => coalesce(
                              s.delay_s, retry_delay_s(j.queue, j.failures + 1))) END,
            error = s.message,
            errors = add_error(j.errors, s.error::jsonb
                               || jsonb_build_object('attempt', j.attempts, 'at', clock()))
        FROM (SELECT * FROM unnest(p_ids, p_attempts, p_delays_s, p_permanent, p_messages, p_errors)
                  AS u (id, attempt, delay_s, permanent, message, error) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt
          AND j.worker_id IS NOT NULL
          AND (p_worker IS NULL OR j.worker_id = p_worker
               AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
        RETURNING j.id, j.status, j.schedule, j.cancel_requested_at, j.queue, j.batch_id,
                  coalesce(j.serialize_scope, j.queue)::text AS scope,
                  CASE WHEN j.status = 'dead' OR j.yields OR j.cancel_requested_at IS NOT NULL
                       -- now or when it is cancelled below: see lock_queues()
                       THEN j.serialize_key END AS freed_key
    )
    SELECT array_agg(e.id), array_agg(e.status::text),
           array_agg(e.id) FILTER (WHERE e.status = 'failed' AND e.cancel_requested_at IS NOT NULL),
           array_agg(e.schedule) FILTER (WHERE e.schedule IS NOT NULL),
           array_agg(e.scope) FILTER (WHERE e.freed_key IS NOT NULL),
           array_agg(e.freed_key::text) FILTER (WHERE e.freed_key IS NOT NULL),
           array_agg(e.queue::text) FILTER (WHERE e.queue = ANY (ARRAY(
               SELECT q.name::text FROM queues q WHERE q.limited
                   AND q.name = ANY (ARRAY(SELECT DISTINCT x.queue::text FROM ended x))))),
           array_agg(ROW(e.batch_id, 'dead', false, NULL, NULL, NULL, NULL, NULL)::ended_job)
               FILTER (WHERE e.batch_id IS NOT NULL AND e.status = 'dead'),
           array_agg(e.id) FILTER (WHERE e.status = 'dead')
    INTO v_ids, v_statuses, v_cancelled, v_schedules, v_queues, v_keys, v_wake, v_batched, v_dead
    FROM ended e;
    IF coalesce(cardinality(v_ids), 0) < cardinality(p_ids) OR 'running' = ANY (v_statuses) THEN
        PERFORM check_settled(p_ids, p_attempts, p_worker, p_token);
    END IF;
    IF v_cancelled IS NOT NULL THEN
        PERFORM lock_trees_of(v_ids);  -- those of the dead, too: all at once, and before the queues
    END IF;
    IF v_dead IS NOT NULL AND defers() THEN
        PERFORM in_parts('settle_failed', v_dead::text[], 'note_deaths(uuid[])');
    ELSIF v_dead IS NOT NULL THEN
        PERFORM note_deaths(v_dead);
    END IF;
    PERFORM after_ended(v_dead, false, v_batched, v_queues, v_keys, v_wake);
    IF v_cancelled IS NOT NULL THEN
        PERFORM cancel(v_cancelled);
    END IF;
    IF v_schedules IS NOT NULL AND p_next IS NOT NULL THEN
        PERFORM follow(v_schedules, p_schedules, p_next, p_revisions);
    END IF;
    RETURN QUERY SELECT e.id, CASE WHEN e.id = ANY (v_cancelled) THEN 'cancelled' ELSE e.status END
                 FROM unnest(v_ids, v_statuses) AS e (id, status);
END $$;

-- Gives jobs back without a failure. p_delays_s NULL keeps the due time and so the place in the
-- queue; p_messages, where not NULL, says why the job could not run here. Of both kinds a job goes
-- on holding its serialize_key, unless it yields: it is `failed`, as after a loss, so that no other
-- passes it. With a delay and no message it asks to be due later, and frees its key. p_begun: which
-- of the attempts have begun (NULL: all). Notifies other daemons. Locks as settle_completed().
CREATE OR REPLACE FUNCTION settle_released(p_ids uuid[], p_attempts int[], p_delays_s float8[],
                                           p_messages text[], p_worker int DEFAULT NULL,
                                           p_token uuid DEFAULT NULL,
                                           p_begun boolean[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_won       uuid[];
    v_cancelled uuid[];
    v_due       text[];
    v_run_at    timestamptz;
    v_queues    text[];
    v_keys      text[];
    v_wake      text[];
BEGIN
    WITH ended AS (
        UPDATE jobs j
        SET status = CASE WHEN j.serialize_key IS NOT NULL AND NOT j.yields
                               AND (s.delay_s IS NULL OR s.message IS NOT NULL)
                          THEN 'failed' ELSE 'pending' END::job_status,
            worker_id = NULL, lease_until = NULL, lease_s = NULL, assignment_id = NULL,
            -- as in rescue_jobs()
            run_at = coalesce(clock() + make_interval(secs => s.delay_s), least(j.run_at, clock())),
            error = coalesce(s.message, j.error),
            begun = CASE WHEN s.begun = false AND j.begun = j.attempts THEN 0 ELSE j.begun END
        FROM (SELECT * FROM unnest(p_ids, p_attempts, p_delays_s, p_messages, p_begun)
                  AS u (id, attempt, delay_s, message, begun) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt
          AND j.worker_id IS NOT NULL
          AND (p_worker IS NULL OR j.worker_id = p_worker
               AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
        RETURNING j.id, j.queue, j.run_at, s.delay_s, j.cancel_requested_at, j.status,
                  coalesce(j.serialize_scope, j.queue)::text AS scope,
                  CASE WHEN j.status = 'pending' OR j.cancel_requested_at IS NOT NULL
                       -- now or when it is cancelled below: see lock_queues()
                       THEN j.serialize_key END AS freed_key
    )
    SELECT array_agg(e.id) FILTER (WHERE e.status <> 'running'),
           array_agg(e.id) FILTER (WHERE e.cancel_requested_at IS NOT NULL),
           array_agg(DISTINCT e.queue::text) FILTER (WHERE e.delay_s IS NULL),
           min(e.run_at) FILTER (WHERE e.delay_s IS NULL),
           array_agg(e.scope) FILTER (WHERE e.freed_key IS NOT NULL),
           array_agg(e.freed_key::text) FILTER (WHERE e.freed_key IS NOT NULL),
           array_agg(e.queue::text) FILTER (WHERE e.queue = ANY (ARRAY(
               SELECT q.name::text FROM queues q WHERE q.limited
                   AND q.name = ANY (ARRAY(SELECT DISTINCT x.queue::text FROM ended x)))))
    INTO v_won, v_cancelled, v_due, v_run_at, v_queues, v_keys, v_wake
    FROM ended e;
    IF coalesce(cardinality(v_won), 0) < cardinality(p_ids) THEN
        PERFORM check_settled(p_ids, p_attempts, p_worker, p_token);
    END IF;
    IF v_cancelled IS NOT NULL THEN
        PERFORM lock_trees_of(v_cancelled);
    END IF;
    IF v_keys IS NOT NULL OR v_wake IS NOT NULL THEN
        PERFORM after_ended(NULL, false, NULL, v_queues, v_keys, v_wake);
    END IF;
    IF v_cancelled IS NOT NULL THEN
        PERFORM cancel(v_cancelled);
    END IF;
    PERFORM wake(v_due, v_run_at, true);
    RETURN coalesce(v_won, '{}');
END $$;

-- Ends jobs without success: p_statuses is 'cancelled' or 'expired' per job. Locks as
-- settle_completed().
CREATE OR REPLACE FUNCTION settle_ended(p_ids uuid[], p_attempts int[], p_statuses text[],
                                        p_messages text[], p_worker int DEFAULT NULL,
                                        p_token uuid DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids    uuid[];
    v_to     text[];
    v_why    text[];
    v_queues text[];
    v_batches uuid[];
BEGIN
    SELECT array_agg(x.id), array_agg(x.status), array_agg(x.message),
           array_agg(x.scope) FILTER (WHERE x.serialize_key IS NOT NULL),
           array_agg(x.batch_id) FILTER (WHERE x.batch_id IS NOT NULL)
    INTO v_ids, v_to, v_why, v_queues, v_batches
    FROM (SELECT j.id, s.status, s.message, coalesce(j.serialize_scope, j.queue)::text AS scope,
                 j.serialize_key, j.batch_id
          FROM jobs j JOIN unnest(p_ids, p_attempts, p_statuses, p_messages)
                  AS s (id, attempt, status, message)
            ON j.id = s.id
          WHERE j.id = ANY (p_ids) AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
            AND (p_worker IS NULL OR j.worker_id = p_worker
                 AND NOT EXISTS (SELECT FROM workers w
                                 WHERE w.id = p_worker AND w.token <> p_token))
          ORDER BY j.id FOR UPDATE OF j) x;
    IF v_batches IS NOT NULL THEN
        PERFORM lock_trees(v_batches);  -- archive() may be called several times
    END IF;
    IF v_queues IS NOT NULL THEN
        PERFORM lock_queues(v_queues);
    END IF;
    PERFORM archive(array_agg(e.id), e.status, e.message)
    FROM unnest(v_ids, v_to, v_why) AS e (id, status, message) GROUP BY e.status, e.message;
    RETURN coalesce(v_ids, '{}');
END $$;
