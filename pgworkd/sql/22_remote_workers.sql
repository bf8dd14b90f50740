-- Workers that reach the database through a gateway: their leases, their sign-off, what operators
-- ask of them.

-- The gateways that are there now: since when each has renewed its lease without a gap, as far as
-- it knows, and when it did last. Through them remote workers could renew theirs. Locks nothing.
CREATE OR REPLACE FUNCTION live_gateways(p_now timestamptz)
RETURNS TABLE (lease_s real, steady_since timestamptz, seen_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT w.lease_s, w.steady_since, w.seen_at FROM workers w
    WHERE w.kind = 'gateway' AND w.lost_at IS NULL AND w.lease_until > p_now
      AND w.seen_at <= p_now AND w.seen_at > p_now - make_interval(secs => w.lease_s / 2)
      AND w.steady_since <= w.seen_at
$$;

-- True if whoever had a lease of p_lease_s, which ran out at p_lease_until, could have renewed it:
-- a gateway and this server have been there for as long as that lease. A gateway does not notice an
-- outage of half its own lease; a shorter lease gets that time on top. Locks nothing.
CREATE OR REPLACE FUNCTION had_time(p_lease_until timestamptz, p_lease_s real, p_now timestamptz)
RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT EXISTS (
        SELECT FROM live_gateways(p_now) g
        CROSS JOIN LATERAL (SELECT CASE WHEN pg_postmaster_start_time() > p_now THEN '-infinity'
                                        ELSE pg_postmaster_start_time() END AS up_since) s
        WHERE greatest(g.steady_since, s.up_since)
                  <= g.seen_at - make_interval(secs => p_lease_s)
          AND p_lease_until < g.seen_at - CASE
              WHEN p_lease_s < g.lease_s THEN make_interval(secs => g.lease_s / 2 + p_lease_s / 3)
              ELSE interval '0' END)
$$;

-- The standing worker of that name and its token, which is drawn when it is first asked for. Waits
-- for another session that is making it.
CREATE OR REPLACE FUNCTION standing_worker(p_name text DEFAULT 'assignments')
RETURNS TABLE (id int, token uuid)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO workers (name, pid, version, lease_s, lease_until, token, schedules, kind)
    VALUES (p_name, 0, '', 3600, 'infinity', gen_random_uuid(), '{}', 'standing')
    ON CONFLICT (name) WHERE kind = 'standing' DO NOTHING;
    RETURN QUERY SELECT w.id, w.token FROM workers w WHERE w.kind = 'standing' AND w.name = p_name;
END $$;

-- Renews the leases of several workers on their behalf, as heartbeat() does for one. `outcome`:
-- `renewed`; `lost`, where heartbeat() returns false; or `locked`, because another session has
-- locked the row, or a trigger keeps it: ask again. `requested`: what an operator asks of it, see
-- ask_worker(). Each worker may be given once. Locks the workers' rows in order of id, with SKIP
-- LOCKED.
CREATE OR REPLACE FUNCTION heartbeats(p_workers int[], p_tokens uuid[], p_states text[])
RETURNS TABLE (worker int, outcome text, lease_s real, requested text)
LANGUAGE sql VOLATILE AS $$
    WITH given AS MATERIALIZED (
        SELECT * FROM unnest(p_workers, p_tokens, p_states) AS u (id, token, state)
    ), mine AS MATERIALIZED (
        SELECT w.id, w.ctid AS place, g.state
        FROM given g JOIN workers w ON w.id = g.id AND w.token = g.token
        WHERE w.lost_at IS NULL ORDER BY w.id FOR NO KEY UPDATE OF w SKIP LOCKED
    ), renewed AS (
        UPDATE workers w
        SET seen_at = clock(), state = m.state,
            lease_until = clock() + make_interval(secs => w.lease_s),
            steady_since = CASE WHEN w.seen_at > clock() OR w.steady_since > clock()
                                  OR w.seen_at < clock() - make_interval(secs => w.lease_s / 2)
                                THEN clock() ELSE w.steady_since END
        FROM mine m WHERE w.ctid = m.place
        RETURNING w.id, w.lease_s, w.requested
    )
    SELECT r.id, 'renewed', r.lease_s, r.requested FROM renewed r
    UNION ALL
    SELECT g.id, CASE WHEN EXISTS (SELECT FROM workers w WHERE w.id = g.id AND w.token = g.token
                                                         AND w.lost_at IS NULL)
                      THEN 'locked' ELSE 'lost' END, NULL, NULL
    FROM given g WHERE g.id NOT IN (SELECT r.id FROM renewed r)
$$;

-- Ends the registration of a remote worker. What it still runs goes back without a failure; a job
-- that may run only once may have begun, and is dead, unless a claim up to number p_claim_id took
-- it, and list_held() has never noted it: then it has not begun. Attempts with a lease of their own
-- are not its own any more. Returns the jobs that were given back or are dead; NULL if it was
-- presumed dead, or its id has been registered again. Locks the worker's row, which also stops a
-- claim in progress, then as settle_failed().
CREATE OR REPLACE FUNCTION abandon(p_worker int, p_token uuid, p_claim_id int DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids      uuid[];
    v_attempts int[];
    v_once     boolean[];
    v_name     text;
BEGIN
    SELECT w.name INTO v_name FROM workers w
    WHERE w.id = p_worker AND w.token = p_token AND w.lost_at IS NULL FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    DELETE FROM pools p WHERE p.worker_id = p_worker;
    SELECT array_agg(j.id ORDER BY j.id), array_agg(j.attempts ORDER BY j.id),
           array_agg(coalesce(j.max_attempts = 1, false)
                     AND NOT (coalesce(j.claim_id <= p_claim_id, false)
                              AND j.listed IS DISTINCT FROM j.attempts) ORDER BY j.id)
    INTO v_ids, v_attempts, v_once
    FROM jobs j WHERE j.worker_id = p_worker AND j.status = 'running';
    PERFORM settle_failed(array_agg(u.id), array_agg(u.attempt), array_agg(0::float8),
                          array_agg(true), array_agg(u.message),
                          array_agg(jsonb_build_object('type', 'lost', 'message', u.message,
                                                       'worker', v_name)::text),
                          p_worker => p_worker, p_token => p_token)
    FROM (SELECT o.id, o.attempt, 'worker ' || v_name || ' signed off without its result' AS message
          FROM unnest(v_ids, v_attempts, v_once) AS o (id, attempt, once) WHERE o.once) u
    HAVING count(*) > 0;
    PERFORM settle_released(array_agg(u.id), array_agg(u.attempt), array_agg(NULL::float8),
                            array_agg(NULL::text), p_worker, p_token)
    FROM unnest(v_ids, v_attempts, v_once) AS u (id, attempt, once) WHERE NOT u.once
    HAVING count(*) > 0;
    DELETE FROM workers w WHERE w.id = p_worker;
    RETURN coalesce(v_ids, '{}');
END $$;

-- Takes back attempts that their remote worker does not list, see list_held(). One that it never
-- listed goes back uncounted, and is `pending`; on one that it did a loss is counted, as by
-- rescue(). Returns them as that does. p_attempts are fenced(). Locks the jobs in order of id, with
-- SKIP LOCKED, then as settle_released() and rescue().
CREATE OR REPLACE FUNCTION take_back(p_ids uuid[], p_attempts int[])
RETURNS TABLE (id uuid, queue text, kind text, attempt int, status text, worker_id int, worker text,
               error text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_unknown uuid[];
    v_begun   uuid[];
BEGIN
    SELECT array_agg(l.id) FILTER (WHERE NOT l.begun), array_agg(l.id) FILTER (WHERE l.begun)
    INTO v_unknown, v_begun
    FROM (SELECT j.id, coalesce(j.listed = j.attempts, false) AS begun
          FROM unnest(p_ids, p_attempts) AS u (id, attempt)
          JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt
          WHERE j.id = ANY (p_ids) AND j.worker_id IS NOT NULL
          ORDER BY j.id FOR UPDATE OF j SKIP LOCKED) l;
    PERFORM set_no_wait('on');
    RETURN QUERY
    SELECT t.id, t.queue, t.kind, t.attempt, t.status, t.worker_id, t.worker, t.error
    FROM (SELECT in_parts('rescue', v_unknown::text[], 'give_back(uuid[])')
          UNION ALL
          SELECT in_parts('rescue', v_begun::text[], 'rescue_jobs(uuid[])')) AS p (taken)
    CROSS JOIN LATERAL jsonb_to_recordset(p.taken) AS t (id uuid, queue text, kind text,
            attempt int, status text, worker_id int, worker text, error text);
END $$;

-- What an operator asks of a worker, of which its gateways are notified: 'quiet', claim nothing
-- more; 'stop', and end; NULL, go on. Audited. False: there is no such worker, or it cannot be
-- asked. Locks the worker's row.
CREATE OR REPLACE FUNCTION ask_worker(p_worker int, p_what text, p_who text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_old workers;
BEGIN
    SELECT * INTO v_old FROM workers w
    WHERE w.id = p_worker AND w.lost_at IS NULL AND w.kind = 'remote' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE workers w SET requested = p_what WHERE w.id = p_worker;
    INSERT INTO audit (who, what, queue, before, after)
    VALUES (who(p_who), 'worker', '',
            jsonb_build_object('worker', p_worker, 'name', v_old.name,
                               'requested', v_old.requested),
            jsonb_build_object('worker', p_worker, 'name', v_old.name, 'requested', p_what));
    PERFORM pg_notify('pgworkd', jsonb_build_object('worker', p_worker)::text);
    RETURN true;
END $$;
