-- Maintenance: rescue and what it shares with other steps. Idempotent, each under an advisory
-- try-lock of its own, so that any daemon may call at any time. A row that refuses to be changed
-- holds up no others: see in_parts().

-- Rows that claims and maintenance could not change because something refuses it, such as a foreign
-- key that others added. They are skipped until `until`: see refuse().
CREATE UNLOGGED TABLE IF NOT EXISTS refused_rows (
    what text NOT NULL, key text NOT NULL,  -- the function that tried; mostly a job's or batch's id
    sqlstate text NOT NULL, error text NOT NULL,
    times        integer NOT NULL DEFAULT 1,
    first_at     timestamptz NOT NULL DEFAULT clock(),
    until        timestamptz NOT NULL,
    reported     boolean NOT NULL DEFAULT false,  -- in a daemon's log: see report_refused()
    PRIMARY KEY (what, key)
);

-- Calls p_step, a function of an array of keys and maybe p_with, for these keys: for all of them,
-- and if that raises, for halves, and so on, until what is refused is found. Returns the answer of
-- each call that was done; the functions that call this say what it is. What is refused is stored
-- in refused_rows under p_what, and skipped until its time has come. Errors that are no row's fault
-- are raised. Deferred constraints are checked in each part. Locks what the step locks, of refused
-- parts nothing, then rows of refused_rows in order of key.
CREATE OR REPLACE FUNCTION in_parts(p_what text, p_keys text[], p_step regprocedure,
                                    p_with jsonb DEFAULT NULL) RETURNS SETOF jsonb
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_keys   text[] := ARRAY(SELECT u.key FROM unnest(p_keys) WITH ORDINALITY AS u (key, place)
                             WHERE NOT is_refused(p_what, u.key) ORDER BY u.place);
    v_type   regtype;                            -- of the keys
    v_more   text;
    v_from   int := 1;
    v_size   int := cardinality(v_keys);
    v_part   text[];
    v_answer record;
    v_done   boolean;
BEGIN
    SELECT p.proargtypes[0], CASE p.pronargs WHEN 2 THEN ', $2' ELSE '' END INTO v_type, v_more
    FROM pg_proc p WHERE p.oid = p_step;
    WHILE v_from <= cardinality(v_keys) LOOP
        v_part := v_keys[v_from : v_from + v_size - 1];
        BEGIN
            EXECUTE format('SELECT %s($1::%s%s) AS it', p_step::regproc, v_type, v_more)
                INTO v_answer USING v_part, p_with;
            SET CONSTRAINTS ALL IMMEDIATE;
            DELETE FROM refused_rows r WHERE r.what = p_what AND r.key = ANY (v_part);
            v_done := true;
        EXCEPTION WHEN OTHERS THEN
            IF is_no_rows_fault(SQLSTATE) THEN
                RAISE;
            END IF;
            v_done := false;
            IF cardinality(v_part) = 1 THEN
                PERFORM refuse(p_what, v_part[1], SQLSTATE, SQLERRM);
            END IF;
        END;
        IF v_done THEN
            RETURN NEXT nullif(to_jsonb(v_answer) -> 'it', 'null');
        END IF;
        IF v_done OR cardinality(v_part) = 1 THEN
            v_from := v_from + cardinality(v_part);
            v_size := 2 * v_size;
        ELSE
            v_size := cardinality(v_part) / 2;
        END IF;
    END LOOP;
END $$;

-- What was refused and has not been reported yet, for the log of the calling daemon: how many rows
-- of each function and SQLSTATE, and one of them. Locks them with SKIP LOCKED.
CREATE OR REPLACE FUNCTION report_refused()
RETURNS TABLE (what text, sqlstate text, count int, key text, error text)
LANGUAGE sql VOLATILE AS $$
    WITH news AS (
        UPDATE refused_rows r SET reported = true
        WHERE r.ctid = ANY (ARRAY(SELECT n.ctid FROM refused_rows n WHERE NOT n.reported LIMIT 10000
                                  FOR UPDATE SKIP LOCKED))
        RETURNING r.*
    )
    SELECT n.what, n.sqlstate, count(*)::int, min(n.key), (array_agg(n.error ORDER BY n.key))[1]
    FROM news n GROUP BY n.what, n.sqlstate ORDER BY n.what, n.sqlstate
$$;

-- One part of take_back(): gives these jobs back uncounted, and returns them. Locks as
-- settle_released().
CREATE OR REPLACE FUNCTION give_back(p_ids uuid[]) RETURNS jsonb
LANGUAGE sql VOLATILE AS $$
    SELECT jsonb_agg(jsonb_build_object('id', w.id, 'status', 'pending'))
    FROM (SELECT unnest(settle_released(array_agg(j.id), array_agg(j.attempts),
                                        array_agg(NULL::float8), array_agg(NULL::text),
                                        p_begun => array_agg(false))) AS id
          FROM jobs j WHERE j.id = ANY (p_ids)) w
$$;

-- One part of rescue(): presumes these workers dead. Returns how many. Locks their rows.
CREATE OR REPLACE FUNCTION presume_dead(p_workers int[]) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE workers w SET lost_at = clock() WHERE w.id = ANY (p_workers) AND w.lost_at IS NULL;
    DELETE FROM pools p WHERE p.worker_id = ANY (p_workers);
    RETURN (SELECT all_done(p_workers, count(w.lost_at)) FROM workers w
            WHERE w.id = ANY (p_workers));
END $$;

-- One part of rescue(): deletes these workers. Returns how many. Locks their rows.
CREATE OR REPLACE FUNCTION forget_workers(p_workers int[]) RETURNS int
LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM workers w WHERE w.id = ANY (p_workers) RETURNING w.id)
    SELECT all_done(p_workers, count(*)) FROM gone
$$;

-- One part of rescue(): takes back these jobs of dead workers, and returns them. The caller has
-- locked them and set no_wait(). Locks what batch_ended(), pass_on(), promote() and cancel() lock,
-- without waiting.
CREATE OR REPLACE FUNCTION rescue_jobs(p_ids uuid[]) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_taken jsonb;
BEGIN
    WITH before AS MATERIALIZED (
        SELECT j.id, j.worker_id AS lost_worker_id, w.name AS lost_worker,
               'lost: worker ' || w.name || ' (id ' || w.id || ', pid ' || w.pid
               || CASE WHEN w.lost_at IS NULL THEN ') no longer lists it'
                       WHEN w.lease_until >= w.lost_at THEN ') has ended'
                       ELSE ') did not renew its lease' END AS message,
                           coalesce(q.max_losses, 3) AS max_losses
        FROM jobs j JOIN workers w ON w.id = j.worker_id LEFT JOIN queues q ON q.name = j.queue
        WHERE j.id = ANY (p_ids)
    ), taken AS (
        UPDATE jobs j
        SET status = CASE WHEN j.losses >= b.max_losses - 1 OR j.max_attempts = 1
                          THEN 'dead' ELSE 'failed' END::job_status,
            losses = least(j.losses, 2147483646) + 1, failed_at = clock(), worker_id = NULL,
            lease_until = NULL,
            -- it was due: the clock may have been set back since
            run_at = least(j.run_at, clock()),
            error = b.message,
            errors = add_error(j.errors, jsonb_build_object('attempt', j.attempts, 'at', clock(),
                    'type', 'lost', 'message', b.message, 'worker', b.lost_worker))
        FROM before b WHERE b.id = j.id
        RETURNING j.id, j.queue::text, coalesce(j.kind, j.queue)::text, j.attempts,
                  CASE WHEN j.status = 'failed' AND j.cancel_requested_at IS NOT NULL
                       THEN 'cancelled'
                       ELSE j.status::text END,
                  b.lost_worker_id, b.lost_worker, b.message
    )
    SELECT jsonb_agg(to_jsonb(t)) FILTER (WHERE t.status <> 'running') INTO v_taken
    FROM taken AS t (id, queue, kind, attempt, status, worker_id, worker, error);
    IF coalesce(jsonb_array_length(v_taken), 0) < cardinality(p_ids) THEN
        PERFORM raise_kept();
    END IF;
    IF EXISTS (SELECT FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead'
                 AND j.schedule IS NOT NULL) THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
    END IF;
    IF EXISTS (SELECT FROM jobs j WHERE j.id = ANY (p_ids) AND j.batch_id IS NOT NULL
               AND (j.status = 'dead' OR j.cancel_requested_at IS NOT NULL)) THEN
        PERFORM lock_trees_of(p_ids);
    END IF;
    PERFORM note_deaths(p_ids);
    PERFORM after_ended(
        array_agg(e.id) FILTER (WHERE e.status = 'dead'), false,
        array_agg(ROW(e.batch_id, 'dead', false, NULL, NULL, NULL, NULL, NULL)::ended_job)
            FILTER (WHERE e.batch_id IS NOT NULL AND e.status = 'dead'),
        array_agg(e.scope) FILTER (WHERE e.freed_key IS NOT NULL),
        array_agg(e.freed_key) FILTER (WHERE e.freed_key IS NOT NULL), NULL)
    FROM (SELECT j.id, j.status, j.batch_id, coalesce(j.serialize_scope, j.queue)::text AS scope,
                 CASE WHEN j.status = 'dead' OR j.yields OR j.cancel_requested_at IS NOT NULL
                      THEN j.serialize_key::text END AS freed_key  -- those are cancelled below
          FROM jobs j WHERE j.id = ANY (p_ids)) e;
    -- claims are past their places by now
    PERFORM wake(array_agg(j.queue::text), min(j.run_at), true)
    FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'failed';
    PERFORM cancel(ARRAY(SELECT j.id FROM jobs j
                         WHERE j.id = ANY (p_ids) AND j.cancel_requested_at IS NOT NULL
                         AND j.status = 'failed'));
    RETURN v_taken;
END $$;

-- Takes back the jobs of workers that are presumed dead, at most p_limit: counts a loss on each,
-- which makes it `failed` and due at once, or `dead` at the third loss (max_losses of its queue),
-- or at the first if it may run only once. Returns those jobs.
-- After an outage or a clock jump all healthy workers look dead, so each is presumed dead only
-- after it has had the time of its own lease to renew: the caller has renewed its lease without a
-- gap for as long (and for a whole lease of its own), and the server has been up for as long. An
-- outage too short for a caller with a long lease to notice may have cost a short lease: such a
-- worker gets the time that the outage may have taken on top. A worker known to be dead (see
-- worker_ended()) needs no such caller. For a remote worker a gateway must have been there, too:
-- see had_time(). An attempt with a lease of its own is left to fail_overdue().
-- Locks the rescue lock, dead workers' rows in order of id, then their jobs with SKIP LOCKED (a
-- job that is being settled is left to its settle; the worker's row stays until no job is left).
CREATE OR REPLACE FUNCTION rescue(p_worker int, p_limit int DEFAULT 1000)
RETURNS TABLE (id uuid, queue text, kind text, attempt int, status text, worker_id int, worker text,
               error text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz := clock();
    -- A start that lies ahead was before the clock was set back, and since that the caller has not
    -- been steady for long.
    v_up_since timestamptz := CASE WHEN pg_postmaster_start_time() > v_now THEN '-infinity'
                                   ELSE pg_postmaster_start_time() END;
    v_lease_s  real;                             -- the caller's
    -- for how long there has been no outage, as far as it knows
    v_steady_s float8;
    v_judges   boolean;                          -- it may presume others dead
    v_lost  int[];
    v_ids   uuid[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 1) THEN
        RETURN;
    END IF;
    PERFORM set_no_wait('on');
    SELECT w.lease_s, extract(epoch FROM v_now - greatest(w.steady_since, v_up_since))
    INTO v_lease_s, v_steady_s FROM workers w
    WHERE w.id = p_worker AND w.lost_at IS NULL AND w.lease_until > v_now
      AND w.seen_at <= v_now AND w.seen_at > v_now - make_interval(secs => w.lease_s / 2)
      AND w.steady_since <= v_now - make_interval(secs => w.lease_s)
      AND v_up_since <= v_now - make_interval(secs => w.lease_s);
    v_judges := FOUND;
    IF NOT v_judges AND NOT EXISTS (SELECT FROM workers w
                                    WHERE w.lost_at IS NOT NULL AND w.id <> p_worker) THEN
        RETURN;
    END IF;

    -- A lease from before the clock was set back would last too long.
    UPDATE workers w SET lease_until = v_now + make_interval(secs => w.lease_s)
    WHERE v_judges AND w.lease_until > v_now + make_interval(secs => 2 * w.lease_s)
      AND w.kind <> 'standing';

    -- Running jobs whose worker has no row (someone deleted it): the row is restored with one
    -- lease, as long as the longest of the others, in which a living worker finds out that it has
    -- lost them. The row has no token, so nobody renews it.
    INSERT INTO workers (id, name, pid, version, state, lease_s, lease_until)
    OVERRIDING SYSTEM VALUE
    SELECT r.worker_id, 'unknown', 0, '', 'vanished', l.lease_s,
           v_now + make_interval(secs => l.lease_s)
    FROM (SELECT greatest(max(w.lease_s), 30) AS lease_s FROM workers w) l,
        (WITH RECURSIVE seen AS (
              SELECT (SELECT min(j.worker_id) FROM jobs j WHERE j.status = 'running') AS worker_id
              UNION ALL
              SELECT (SELECT min(j.worker_id) FROM jobs j
                      WHERE j.status = 'running' AND j.worker_id > s.worker_id)
              FROM seen s WHERE s.worker_id IS NOT NULL)
          SELECT s.worker_id FROM seen s WHERE s.worker_id IS NOT NULL) r
    WHERE v_judges AND NOT EXISTS (SELECT FROM workers w WHERE w.id = r.worker_id)
    ON CONFLICT DO NOTHING;

    SELECT array_agg(l.id) INTO v_lost
    FROM (SELECT w.id FROM workers w
          WHERE w.lost_at IS NOT NULL
             OR v_judges AND w.lease_until < v_now AND CASE
                    WHEN w.kind = 'remote' THEN had_time(w.lease_until, w.lease_s, v_now)
                    WHEN w.lease_s < v_lease_s THEN w.lease_s <= v_steady_s AND w.lease_until
                        < v_now - make_interval(secs => v_lease_s / 2 + w.lease_s / 3)
                    ELSE w.lease_s <= v_steady_s END
          ORDER BY w.id FOR UPDATE SKIP LOCKED) l;
    IF v_lost IS NULL THEN
        RETURN;
    END IF;
    PERFORM in_parts('rescue', v_lost::text[], 'presume_dead(int[])');
    v_lost := ARRAY(SELECT w.id FROM workers w WHERE w.id = ANY (v_lost) AND w.lost_at IS NOT NULL);
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.worker_id = ANY (v_lost) AND j.status = 'running' AND j.lease_s IS NULL
                     AND NOT is_refused('rescue', j.id::text)
                   LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    RETURN QUERY
    SELECT t.id, t.queue, t.kind, t.attempt, t.status, t.worker_id, t.worker, t.error
    FROM in_parts('rescue', v_ids::text[], 'rescue_jobs(uuid[])') AS p (taken)
    CROSS JOIN LATERAL jsonb_to_recordset(p.taken) AS t (id uuid, queue text, kind text,
            attempt int, status text, worker_id int, worker text, error text);
    v_lost := ARRAY(
        SELECT w.id FROM workers w
        WHERE w.id = ANY (v_lost)
          AND NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = w.id AND j.status = 'running'));
    PERFORM in_parts('rescue', v_lost::text[], 'forget_workers(int[])');
END $$;

-- The running attempts of a worker that began more than p_age_s ago. The worker compares them with
-- what it has in flight: one that it does not have is an orphaned attempt, claimed by a call whose
-- answer was lost, and is given back by settle_released(). None under another token than the
-- worker's own. While vacuum is held back this reads the index entries of all that the worker has
-- ever run. With p_queues, only attempts that began at most p_age_max_s ago in those queues are
-- returned, and no older entry is read. Locks nothing.
CREATE OR REPLACE FUNCTION running_of(p_worker int, p_token uuid, p_age_s float8,
                                      p_age_max_s float8 DEFAULT NULL, p_queues text[] DEFAULT NULL)
RETURNS TABLE (id uuid, attempt int)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz := clock() - make_interval(secs => p_age_s);
    v_from  timestamptz := clock() - make_interval(secs => p_age_max_s);
    v_queue text;
BEGIN
    IF EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token) THEN
        RETURN;
    END IF;
    IF p_queues IS NULL THEN
        RETURN QUERY SELECT j.id, j.attempts FROM jobs j
                     WHERE j.worker_id = p_worker AND j.status = 'running'
                       AND j.started_at < v_until;
        RETURN;
    END IF;
    FOREACH v_queue IN ARRAY p_queues LOOP
        RETURN QUERY SELECT j.id, j.attempts FROM jobs j
                     WHERE j.worker_id = p_worker AND j.status = 'running' AND j.queue = v_queue
                       AND j.started_at >= v_from AND j.started_at < v_until;
    END LOOP;
END $$;

-- Advances each sequence that is behind the ids in its table: logical replication carries rows,
-- but not sequences. For `migrate`. Locks nothing.
CREATE OR REPLACE FUNCTION mend_sequences() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM setval('pgworkd.workers_id_seq', m.id)
    FROM (SELECT max(w.id) AS id FROM workers w WHERE w.token IS NOT NULL) m, workers_id_seq q
    WHERE m.id > q.last_value;
    PERFORM setval('pgworkd.audit_id_seq', m.id)
        FROM (SELECT max(a.id) AS id FROM audit a) m, audit_id_seq q
    WHERE m.id > q.last_value;
    PERFORM setval('pgworkd.pending_effects_id_seq', m.id)
    FROM (SELECT max(e.id) AS id FROM pending_effects e) m, pending_effects_id_seq q
    WHERE m.id > q.last_value;
END $$;
