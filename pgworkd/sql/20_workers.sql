-- Workers, their pools, and the settings of queues: registering, leases, what a heartbeat's caller
-- should know, the stacks that it is asked for, waking idle pools.

-- The stacks of running attempts that operators have asked for, the last one of each job, for an
-- hour. Unlogged, and without a foreign key: nothing depends on it.
CREATE UNLOGGED TABLE IF NOT EXISTS stack_requests (
    job_id       uuid PRIMARY KEY,
    attempt integer NOT NULL, worker_id integer NOT NULL,  -- which are asked for it
    asked_at timestamptz NOT NULL DEFAULT clock(), asked_by text NOT NULL,
    answered_at  timestamptz,
    stack        text CONSTRAINT stack_must_not_exceed_64_kib CHECK (octet_length(stack) <= 65536)
);
CREATE INDEX IF NOT EXISTS stack_requests_open ON stack_requests (worker_id)
    WHERE answered_at IS NULL;

-- Registers a worker with its first lease, under a token that it has drawn itself; returns its id.
-- Ids in use, by a row or by running jobs, are skipped: the sequence may lag behind (logical
-- replication does not carry it) or wrap around. p_kinds: the kinds that its code has handlers
-- for. p_kind is that of the worker. A gateway beside others that are there has been steady for as
-- long as they have: through them remote workers could renew their leases. Locks nothing.
CREATE OR REPLACE FUNCTION register(p_name text, p_pid int, p_version text, p_lease_s real,
                                    p_token uuid DEFAULT gen_random_uuid(),
                                    p_kinds text[] DEFAULT NULL, p_kind text DEFAULT 'daemon')
RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_id    int;
    v_since timestamptz := CASE p_kind WHEN 'gateway' THEN
                           (SELECT min(g.steady_since) FROM live_gateways(clock()) g) END;
BEGIN
    LOOP
        INSERT INTO workers AS w (name, pid, version, lease_s, lease_until, token, kinds, kind,
                                  steady_since, schedules)
        VALUES (left(p_name, 200), p_pid, p_version, p_lease_s,
                clock() + make_interval(secs => p_lease_s), p_token, p_kinds, p_kind,
                least(v_since, clock()), CASE WHEN p_kind <> 'daemon' THEN '{}'::text[] END)
        ON CONFLICT (id) DO NOTHING RETURNING w.id INTO v_id;
        CONTINUE WHEN NOT FOUND;
        EXIT WHEN NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = v_id AND j.status = 'running');
        DELETE FROM workers w WHERE w.id = v_id;  -- rescue() restores it for those jobs
    END LOOP;
    RETURN v_id;
END $$;

-- Renews the lease. False: the worker was presumed dead, or its id was registered again, and its
-- jobs belong to others. A gap of more than half a lease since the last heartbeat (an outage, a
-- freeze, a clock jump) makes the worker unsteady: for one lease it must not rescue others. Reads
-- no other table, so that a lock on the jobs costs no lease. Locks the worker's row.
CREATE OR REPLACE FUNCTION heartbeat(p_worker int, p_token uuid, p_state text) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE workers w
    SET seen_at = clock(), state = p_state,
        lease_until = clock() + make_interval(secs => w.lease_s),
        steady_since = CASE WHEN w.seen_at > clock() OR w.steady_since > clock()
                              OR w.seen_at < clock() - make_interval(secs => w.lease_s / 2)
                            THEN clock() ELSE w.steady_since END
    WHERE w.id = p_worker AND w.token = p_token AND w.lost_at IS NULL;
    RETURN FOUND;
END $$;

-- What a worker needs to know after it has renewed its lease: jobs to cancel; the rows of `queues`
-- (without NULLs; `pause_s`: seconds until a pause ends by itself); the concurrency that the code
-- of other workers gives its queues, where it differs, by queue and worker; and attempts whose
-- stack is asked for, twenty at most.
-- `settings_version` identifies the contents of `queues`: for a caller that passes its last one,
-- `settings` is NULL as long as they are unchanged. p_queues: these queues only (NULL: all), by
-- index, so that other queues' settings cost nothing; a caller that asks for other queues than
-- before passes no version. Always one row. Locks nothing.
CREATE OR REPLACE FUNCTION wanted(p_worker int, p_settings_version text DEFAULT NULL,
                                  p_queues text[] DEFAULT NULL)
RETURNS TABLE (cancel_ids uuid[], cancel_attempts int[], settings text, differing text,
               settings_version text, stack_ids uuid[], stack_attempts int[])
LANGUAGE sql STABLE AS $$
    WITH own AS MATERIALIZED (
        SELECT q AS row, q.name, q.paused_until, q.xmin AS written FROM queues q
        WHERE q.name = ANY (p_queues)
        UNION ALL
        SELECT q, q.name, q.paused_until, q.xmin FROM queues q WHERE p_queues IS NULL
    )
    SELECT c.ids, c.attempts,
           CASE WHEN v.version IS DISTINCT FROM p_settings_version OR v.counts_down THEN
           (SELECT coalesce(jsonb_object_agg(q.name, jsonb_strip_nulls(
                       to_jsonb(q.row) - '{name,updated_at,paused_until}'::text[]
                           || jsonb_build_object(
                           'paused', coalesce(q.paused_until > clock(), false),
                           'paused_until', CASE WHEN q.paused_until > clock()
                                                THEN q.paused_until END,
                           'pause_s', CASE WHEN q.paused_until > clock()
                                           AND q.paused_until < 'infinity'
                                           THEN extract(epoch FROM q.paused_until - clock()) END))),
                                               '{}')
            FROM own q)::text END,
           (SELECT coalesce(jsonb_object_agg(d.queue, d.said), '{}')
            FROM (SELECT o.queue,
                  jsonb_agg(DISTINCT jsonb_build_array(w.name, o.code_concurrency)) AS said
                  FROM pools mine JOIN pools o ON o.queue = mine.queue
                      AND o.code_concurrency <> mine.code_concurrency
                  JOIN workers w ON w.id = o.worker_id AND w.lost_at IS NULL
                  WHERE mine.worker_id = p_worker GROUP BY o.queue) d)::text,
           v.version, r.ids, r.attempts
    FROM (SELECT coalesce(array_agg(j.id), '{}') AS ids,
          coalesce(array_agg(j.attempts), '{}') AS attempts
          FROM jobs j  -- not `status = 'running'`, which says the same: see the index
          WHERE j.worker_id = p_worker AND j.worker_id IS NOT NULL
            AND j.cancel_requested_at IS NOT NULL) c,
         (SELECT coalesce(array_agg(o.job_id), '{}') AS ids,
                 coalesce(array_agg(o.attempt), '{}') AS attempts
          FROM (SELECT s.job_id, s.attempt FROM stack_requests s
                WHERE s.worker_id = p_worker AND s.answered_at IS NULL LIMIT 20) o) r,
         -- Of the same number of rows each change makes the sum larger. `age` counts back from now,
         -- as it does for 3: the difference stays, and comes at a tenth of the price of xmin::text.
         (SELECT concat_ws(' ', count(*),
                           sum(((SELECT age('3'::xid)::bigint) - age(q.written)) & 4294967295),
                           count(*) FILTER (WHERE q.paused_until > (SELECT clock()))) AS version,
                 coalesce(bool_or(q.paused_until > (SELECT clock())
                                  AND q.paused_until < 'infinity'), false) AS counts_down
          FROM own q) v
$$;

-- Asks the worker that runs a job for the stack of this attempt, and notifies it; what was asked of
-- the job before is replaced. Raises PW005 for a job that does not run in a daemon that can answer.
-- Locks the job's row in stack_requests.
CREATE OR REPLACE FUNCTION ask_stack(p_job uuid, p_by text DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_job    record;
    v_worker record;
    v_is     text;
BEGIN
    SELECT j.status::text, j.attempts, j.worker_id, j.lease_s, q.endpoint INTO v_job
    FROM jobs j LEFT JOIN queues q ON q.name = j.queue WHERE j.id = p_job;
    SELECT w.name, w.kind, w.lost_at IS NOT NULL OR w.lease_until <= clock() AS lost INTO v_worker
    FROM workers w WHERE w.id = v_job.worker_id;
    v_is := CASE
        WHEN v_job.worker_id IS NULL
            THEN coalesce((SELECT o.status FROM jobs_of(ARRAY[p_job]) o), 'unknown')
                 || ': only a running job has a stack'
        WHEN v_job.endpoint IS NOT NULL OR v_worker.kind = 'standing' OR v_job.lease_s IS NOT NULL
            THEN 'sent by HTTP to what runs it, which cannot be asked for a stack'
        WHEN v_worker.kind = 'remote'
            THEN 'run by the remote worker ' || v_worker.name
                 || ', which works through a gateway and cannot be asked for a stack'
        WHEN v_worker.lost IS DISTINCT FROM false
            THEN 'run by a worker whose lease has ended: it is about to be taken back' END;
    IF v_is IS NOT NULL THEN
        RAISE EXCEPTION 'job % is %', p_job, v_is USING ERRCODE = 'PW005';
    END IF;
    INSERT INTO stack_requests AS r (job_id, attempt, worker_id, asked_by)
    VALUES (p_job, v_job.attempts, v_job.worker_id, who(p_by))
    ON CONFLICT (job_id) DO UPDATE
    SET attempt = excluded.attempt, worker_id = excluded.worker_id, asked_at = excluded.asked_at,
        asked_by = excluded.asked_by, answered_at = NULL, stack = NULL;
    PERFORM pg_notify('pgworkd', jsonb_build_object('worker', v_job.worker_id)::text);
END $$;

-- Stores the stack that a worker was asked for. False: it is not asked for any more, or not of this
-- worker. Locks the job's row in stack_requests.
CREATE OR REPLACE FUNCTION answer_stack(p_job uuid, p_attempt int, p_worker int, p_token uuid,
                                        p_stack text) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE stack_requests r SET answered_at = clock(), stack = p_stack
    WHERE r.job_id = p_job AND r.attempt = p_attempt AND r.worker_id = p_worker
      AND r.answered_at IS NULL
      AND EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token = p_token);
    RETURN FOUND;
END $$;

-- Sets whether a pool is idle (inserts must NOTIFY) or polling. A pool that becomes idle must
-- claim once more before it waits: a row inserted just before found it polling and sent nothing.
-- p_code_concurrency is what the worker's own code or settings (p_code_source) give the queue. No
-- effect for a worker that is gone, or whose id has been registered again (p_token). Locks the
-- pool's row.
CREATE OR REPLACE FUNCTION set_pool(p_worker int, p_queue text, p_concurrency int, p_idle boolean,
                                    p_code_concurrency int DEFAULT NULL,
                                    p_code_source text DEFAULT NULL, p_token uuid DEFAULT NULL)
RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO pools AS p (worker_id, queue, concurrency, idle, code_concurrency, code_source)
    SELECT w.id, p_queue, p_concurrency, p_idle, p_code_concurrency, p_code_source
    FROM workers w WHERE w.id = p_worker AND w.lost_at IS NULL
        AND (p_token IS NULL OR w.token = p_token)
    ON CONFLICT (queue, worker_id) DO UPDATE
    SET idle = excluded.idle, concurrency = excluded.concurrency,
        code_concurrency = excluded.code_concurrency, code_source = excluded.code_source
    WHERE (p.idle, p.concurrency, p.code_concurrency, p.code_source)
        IS DISTINCT FROM (excluded.idle, excluded.concurrency, excluded.code_concurrency,
                          excluded.code_source)
$$;

-- Removes a pool that its worker has closed. Locks the pool's row.
CREATE OR REPLACE FUNCTION drop_pool(p_worker int, p_queue text, p_token uuid DEFAULT NULL)
RETURNS void
LANGUAGE sql VOLATILE AS $$
    DELETE FROM pools p WHERE p.worker_id = p_worker AND p.queue = p_queue
       AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token)
$$;

-- Of these kinds, those for which another worker has a handler that serves the queue, has a lease
-- and is not stopping. A remote worker, which does not say what it knows, may have any. Locks
-- nothing.
CREATE OR REPLACE FUNCTION kinds_elsewhere(p_worker int, p_queue text, p_kinds text[])
RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT ARRAY(
        SELECT u.kind FROM unnest(p_kinds) AS u (kind)
        WHERE EXISTS (SELECT FROM pools p JOIN workers w ON w.id = p.worker_id
                      WHERE p.queue = p_queue AND w.id <> p_worker AND w.state = 'running'
                        AND w.lost_at IS NULL AND w.lease_until > clock()
                        AND (u.kind = ANY (w.kinds) OR w.kinds IS NULL AND w.kind = 'remote'
                             AND w.requested IS NULL)))
$$;

-- Removes a worker that runs nothing any more. False if it still has running jobs, which its row
-- protects: rescue() will take them. The row of a worker presumed dead is left to rescue(), and
-- one under another token is left alone. Locks the worker's row, which also stops a claim in
-- progress.
CREATE OR REPLACE FUNCTION sign_off(p_worker int, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF EXISTS (SELECT FROM workers WHERE id = p_worker AND token <> p_token) THEN
        RETURN true;
    END IF;
    DELETE FROM pools WHERE worker_id = p_worker;
    PERFORM FROM workers WHERE id = p_worker FOR UPDATE;
    IF EXISTS (SELECT FROM jobs WHERE worker_id = p_worker AND status = 'running') THEN
        RETURN false;
    END IF;
    DELETE FROM workers WHERE id = p_worker AND token = p_token AND lost_at IS NULL;
    RETURN true;
END $$;

-- Reports that the process of a worker has ended, with all that ran handlers for it, as only the
-- process that started it can know: its jobs need not wait for the end of its lease. Notifies all
-- daemons; rescue() counts a loss as always. Locks the worker's row.
CREATE OR REPLACE FUNCTION worker_ended(p_worker int, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE workers w SET lost_at = clock()
        WHERE w.id = p_worker AND w.token = p_token AND w.lost_at IS NULL;
    IF FOUND THEN
        PERFORM pg_notify('pgworkd', '{"ended": true}');
    END IF;
    RETURN FOUND;
END $$;

-- Notifies the pools of a queue that there is work. p_run_at: some of it is due from then on, so
-- that claims that have passed that place must go back. Inlined.
CREATE OR REPLACE FUNCTION notify_pools(p_queue text, p_run_at timestamptz)
RETURNS void LANGUAGE sql VOLATILE
    RETURN pg_notify('pgworkd', jsonb_strip_nulls(
        jsonb_build_object('queue', p_queue, 'run_at', date_part('epoch', p_run_at)))::text);

-- Notifies the pools of each of these queues that has an idle pool (p_all: any pool). Locks
-- nothing, but a NOTIFY serializes commits over the whole cluster: that is why polling pools get
-- none.
CREATE OR REPLACE FUNCTION wake(p_queues text[], p_run_at timestamptz DEFAULT NULL,
                                p_all boolean DEFAULT false)
RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT notify_pools(q.queue, p_run_at) FROM (SELECT DISTINCT unnest(p_queues) AS queue) q
    WHERE EXISTS (SELECT FROM pools p WHERE p.queue = q.queue AND (p.idle OR p_all))
$$;

-- The pools that have slots, as far as this server has them: those of a gateway have none. A
-- standby has no unlogged tables and refuses to read them: there the answer is empty. For readers.
-- Locks nothing.
CREATE OR REPLACE FUNCTION known_pools() RETURNS SETOF pools
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF NOT pg_is_in_recovery() THEN
        RETURN QUERY SELECT * FROM pools p WHERE p.concurrency > 0;
    END IF;
END $$;

-- Notifies every daemon to read the settings of its queues: a plain UPDATE takes effect at once.
-- Locks nothing.
CREATE OR REPLACE FUNCTION queues_changed() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('pgworkd', '{"queues": true}');
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER queues_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON queues
    FOR EACH STATEMENT EXECUTE FUNCTION queues_changed();

-- Sets updated_at at each change of a row of `queues`. Locks nothing.
CREATE OR REPLACE FUNCTION queue_dated() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    NEW.updated_at := clock();
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER queue_dated BEFORE UPDATE ON queues FOR EACH ROW
    EXECUTE FUNCTION queue_dated();

-- Changes settings of a queue: p_changes names columns of `queues`, null resets one. The row is
-- created if there is none, and deleted when it has no setting left. Locks the queue's row in
-- `queues`.
CREATE OR REPLACE FUNCTION set_queue(p_queue text, p_changes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now queues;
    v_new queues;
    v_is_new boolean;
BEGIN
    LOOP
        SELECT q.* INTO v_now FROM queues q WHERE q.name = p_queue FOR UPDATE;
        v_is_new := NOT FOUND;
        v_now.name := p_queue;
        v_new := jsonb_populate_record(v_now, p_changes - '{name,updated_at,limited}'::text[]);
        v_new.fair := coalesce(v_new.fair, false);
        IF num_nonnulls(v_new.concurrency, v_new.paused_until, v_new.keep_s, v_new.backoff_s,
                        v_new.backoff_factor, v_new.backoff_cap_s, v_new.max_losses,
                        v_new.max_running, v_new.limit_per_key, v_new.rate, v_new.rate_period_s,
                        v_new.rate_burst, v_new.rate_per_key, v_new.rate_per_key_period_s,
                        v_new.rate_per_key_burst, v_new.endpoint, v_new.max_attempts,
                        v_new.timeout_s, v_new.serialize_scope) = 0 AND NOT v_new.fair THEN
            DELETE FROM queues q WHERE q.name = p_queue;
            RETURN;
        ELSIF v_is_new THEN
            INSERT INTO queues (name, concurrency, paused_until, keep_s, backoff_s, backoff_factor,
                                backoff_cap_s, max_losses, max_running, limit_per_key, rate,
                                rate_period_s, rate_burst, rate_per_key, rate_per_key_period_s,
                                rate_per_key_burst, fair, endpoint, max_attempts, timeout_s,
                                serialize_scope)
            VALUES (p_queue, v_new.concurrency, v_new.paused_until, v_new.keep_s, v_new.backoff_s,
                    v_new.backoff_factor, v_new.backoff_cap_s, v_new.max_losses, v_new.max_running,
                    v_new.limit_per_key, v_new.rate, v_new.rate_period_s, v_new.rate_burst,
                    v_new.rate_per_key, v_new.rate_per_key_period_s, v_new.rate_per_key_burst,
                    v_new.fair, v_new.endpoint, v_new.max_attempts, v_new.timeout_s,
                    v_new.serialize_scope)
            ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;  -- else someone has made the row meanwhile
        ELSE
            UPDATE queues q
            SET concurrency = v_new.concurrency, paused_until = v_new.paused_until,
                keep_s = v_new.keep_s, backoff_s = v_new.backoff_s,
                backoff_factor = v_new.backoff_factor, backoff_cap_s = v_new.backoff_cap_s,
                max_losses = v_new.max_losses, max_running = v_new.max_running,
                limit_per_key = v_new.limit_per_key, rate = v_new.rate,
                rate_period_s = v_new.rate_period_s, rate_burst = v_new.rate_burst,
                rate_per_key = v_new.rate_per_key,
                rate_per_key_period_s = v_new.rate_per_key_period_s,
                rate_per_key_burst = v_new.rate_per_key_burst, fair = v_new.fair,
                endpoint = v_new.endpoint, max_attempts = v_new.max_attempts,
                timeout_s = v_new.timeout_s, serialize_scope = v_new.serialize_scope
            WHERE q.name = p_queue;
            RETURN;
        END IF;
    END LOOP;
END $$;
