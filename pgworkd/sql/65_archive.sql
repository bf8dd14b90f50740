-- The end of jobs: moving them to the history, their keys to the next in line.

-- Called by whoever has ended jobs: those whose dedupe_until lies ahead leave a row that holds
-- their key until then, so that an insert conflicts with it as with a live job. p_keys: (id,
-- queue, dedupe_key, dedupe_until) of each.
CREATE OR REPLACE FUNCTION keep_keys(p_keys jsonb) RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO jobs (id, queue, dedupe_key, dedupe_until, status)
    SELECT k.f1, k.f2, k.f3, k.f4, 'completed'
    FROM jsonb_to_recordset(p_keys) AS k (f1 uuid, f2 text, f3 text, f4 timestamptz)
    WHERE k.f4 > clock()
$$;

-- What follows the end of jobs, or of attempts, in the lock order. Whoever ends some, and holds
-- their rows, calls this. p_ids are the jobs that have ended, all of them completed or not: passes
-- that on to those that wait for it. Then counts them in their batches (p_batched), keeps their
-- dedupe_keys (p_kept_keys, see keep_keys()), passes their serialize_keys on (p_queues and p_keys,
-- parallel), and notifies the queues whose limits have capacity again (p_limited). What is NULL is
-- left out. Locks as pass_on(), batch_ended() (p_stop_waiting: see there) and promote(). Where
-- something refuses one of these effects the caller calls again, set to defer all of them.
CREATE OR REPLACE FUNCTION after_ended(p_ids uuid[], p_completed boolean, p_batched ended_job[],
                                       p_queues text[], p_keys text[], p_limited text[],
                                       p_kept_keys jsonb DEFAULT NULL,
                                       p_stop_waiting boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_awaited boolean := is_awaited(p_ids);
BEGIN
    IF p_kept_keys IS NOT NULL THEN
        PERFORM keep_keys(p_kept_keys);
    END IF;
    IF defers() THEN
        PERFORM put_off(p_batched, CASE WHEN v_awaited THEN p_ids END, p_completed, p_queues,
                        p_keys);
        PERFORM notify_waiters(p_ids), wake(p_limited);
        RETURN;
    END IF;
    IF v_awaited THEN
        PERFORM pass_on(p_ids, p_completed);
    END IF;
    IF p_batched IS NOT NULL THEN
        PERFORM batch_ended(p_batched, p_stop_waiting);
    END IF;
    IF p_keys IS NOT NULL THEN
        PERFORM promote(p_queues, p_keys);
    END IF;
    IF p_limited IS NOT NULL THEN
        PERFORM wake(p_limited);
    END IF;
END $$;

-- Counts jobs that were cancelled or have expired in queue_minutes: p_counts has queue, kind and
-- jobs of each. Statistics never stand in the way: nothing is counted while that table is locked,
-- or where something refuses its rows. Locks nothing.
CREATE OR REPLACE FUNCTION count_ended(p_status text, p_counts jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    LOCK TABLE queue_minutes IN ROW EXCLUSIVE MODE NOWAIT;
    INSERT INTO queue_minutes (at, period_s, queue, kind, started, completed, failed, dead,
                               released, waits, runs, wait_s, run_s, cancelled, expired)
    SELECT clock() - interval '1 s', 1, c.queue, c.kind, 0, 0, 0, 0, 0, n.none, n.none, 0, 0,
           CASE p_status WHEN 'cancelled' THEN c.jobs ELSE 0 END,
           CASE p_status WHEN 'expired' THEN c.jobs ELSE 0 END
    FROM jsonb_to_recordset(p_counts) AS c (queue text, kind text, jobs bigint)
    CROSS JOIN (SELECT array_fill(0::bigint, ARRAY[72]) AS none) n;
EXCEPTION WHEN OTHERS THEN
    RETURN;
END $$;

-- Archives jobs: moves rows, which the caller has locked, to finished_jobs under a final status;
-- p_message, where not NULL, becomes their error. A queue without history loses them. Returns how
-- many there were. Counts those that are cancelled or expire (count_ended()), notifies waiters and
-- their batches (p_stop_waiting: see batch_ended()), and frees their keys, except those that are
-- kept longer (see keep_keys()). The chains of schedules among them are left to daemons, which are
-- notified (see ensure_schedules()). Locks as pass_on(), batch_ended() and promote().
CREATE OR REPLACE FUNCTION archive(p_ids uuid[], p_status text, p_message text,
                                   p_stop_waiting boolean DEFAULT true) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_gone    uuid[];
    v_queues  text[];
    v_keys    text[];
    v_wake    text[];
    v_kept_keys jsonb;
    v_batched ended_job[];
    v_chain   boolean;
    v_counts  jsonb;
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN 0;  -- without reading finished_jobs, which may be locked
    END IF;
    WITH gone AS (
        DELETE FROM jobs j WHERE j.id = ANY (p_ids) RETURNING j.*
    ), settings AS MATERIALIZED (
        SELECT q.name::text, q.keep_s, q.limited FROM queues q
        WHERE q.name = ANY (ARRAY(SELECT DISTINCT g.queue::text FROM gone g))
    ), kept AS (
        INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, failed_at,
                                   occurrence, batch_id, status, priority, attempts, failures,
                                   max_attempts, worker_id, queue, kind, payload, meta,
                                   error, errors, dedupe_key, serialize_key, limit_key, schedule,
                                   keep_until, expires_at)
        SELECT g.id, clock(), g.run_at, g.created_at, g.started_at, g.failed_at, g.occurrence,
               g.batch_id, p_status::job_status, g.priority, g.attempts, g.failures, g.max_attempts,
               g.worker_id, g.queue, g.kind, g.payload, g.meta, coalesce(p_message, g.error),
               g.errors, g.dedupe_key, g.serialize_key, g.limit_key, g.schedule,
            clock() + make_interval(secs => q.keep_s), g.expires_at
        FROM gone g LEFT JOIN settings q ON q.name = g.queue
        WHERE q.keep_s IS DISTINCT FROM 0
    )
    SELECT array_agg(g.id),
           array_agg(coalesce(g.serialize_scope, g.queue)::text)
               FILTER (WHERE g.serialize_key IS NOT NULL AND g.waiting_on = 0),
           array_agg(g.serialize_key::text)
               FILTER (WHERE g.serialize_key IS NOT NULL AND g.waiting_on = 0),
           array_agg(g.queue::text)
               FILTER (WHERE g.status = 'running' AND g.queue = ANY (ARRAY(
                   SELECT q.name FROM settings q WHERE q.limited))),
           jsonb_agg(to_jsonb(ROW(g.id, g.queue, g.dedupe_key, g.dedupe_until)))
               -- the dead hold no key
               FILTER (WHERE g.dedupe_until IS NOT NULL AND g.status <> 'dead'),
           array_agg(ROW(g.batch_id, p_status, g.status = 'dead', NULL, NULL, NULL, NULL,
                         NULL)::ended_job)
               FILTER (WHERE g.batch_id IS NOT NULL AND (g.status <> 'dead' OR p_status <> 'dead')),
           bool_or(g.schedule IS NOT NULL AND g.status <> 'dead'),
           (SELECT jsonb_agg(c) FROM (
                SELECT x.queue, coalesce(x.kind, x.queue) AS kind, count(*) AS jobs FROM gone x
                WHERE p_status IN ('cancelled', 'expired') GROUP BY 1, 2) c)
    INTO v_gone, v_queues, v_keys, v_wake, v_kept_keys, v_batched, v_chain, v_counts FROM gone g;
    IF coalesce(cardinality(v_gone), 0) < cardinality(p_ids)
       AND EXISTS (SELECT FROM jobs j WHERE j.id = ANY (p_ids) AND j.status <> 'completed') THEN
        PERFORM raise_kept();
    END IF;
    IF v_counts IS NOT NULL THEN
        PERFORM count_ended(p_status, v_counts);
    END IF;
    IF v_chain THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
    END IF;
    PERFORM after_ended(v_gone, false, v_batched, v_queues, v_keys, v_wake, v_kept_keys,
                        p_stop_waiting);
    RETURN coalesce(cardinality(v_gone), 0);
END $$;

-- Adds an entry to an error history and keeps the last 20. Inlined.
CREATE OR REPLACE FUNCTION add_error(p_errors jsonb, p_entry jsonb)
RETURNS jsonb LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN jsonb_array_length(p_errors) >= 20 THEN p_errors - 0 ELSE p_errors END
           || jsonb_build_array(p_entry)
$$;
