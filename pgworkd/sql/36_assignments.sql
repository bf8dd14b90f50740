-- Assignments: attempts in the hands of remote workers. Claiming on behalf of several workers,
-- passing an attempt on, the fence for settles of several workers, leases of single attempts.
--
-- An attempt that a remote worker claims has its deadline in `lease_until`: timeout_s and five
-- seconds later it is failed by fail_overdue(), since no process of ours would end it. With a lease
-- of its own (`lease_s`) it runs under the standing worker, outlives whoever claimed it, and is
-- failed when `lease_until` passes without extend(), or at its deadline. `assignment_id` is drawn
-- at each such hand-over: after a restored dump, two could be the same attempt of one job.

-- When an attempt that began then must have ended: NULL, never. Inlined.
CREATE OR REPLACE FUNCTION deadline(p_started_at timestamptz, p_timeout_s real)
RETURNS timestamptz LANGUAGE sql STABLE
    RETURN p_started_at + make_interval(secs => p_timeout_s + 5);

-- Passes running attempts of p_from on: each to the worker in p_to, which must have a lease; with
-- p_leases_s (NULL, or more than 0, per attempt) to the standing worker, under a lease of its own
-- and p_assignment. Returns the attempts passed on; others stay where they are. Locks the new
-- workers' rows FOR KEY SHARE, in order of id, then the jobs in order of id.
CREATE OR REPLACE FUNCTION hand_over(p_ids uuid[], p_attempts int[], p_from int, p_token uuid,
                                     p_to int[], p_leases_s real[] DEFAULT NULL,
                                     p_assignment uuid DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_passed uuid[];
BEGIN
    PERFORM FROM workers w WHERE w.id = ANY (p_to) ORDER BY w.id FOR KEY SHARE;
    WITH passed AS (
        UPDATE jobs j
        SET worker_id = u.worker, lease_s = u.lease_s,
            assignment_id = CASE WHEN u.lease_s > 0 THEN p_assignment END,
            lease_until = least(clock() + make_interval(secs => u.lease_s), deadline(
                j.started_at, coalesce(j.timeout_s, (SELECT q.timeout_s FROM queues q
                                                     WHERE q.name = j.queue))))
        FROM (SELECT g.* FROM unnest(p_ids, p_attempts, p_to, p_leases_s)
                  AS g (id, attempt, worker, lease_s)
              JOIN workers w ON w.id = g.worker AND w.lost_at IS NULL AND w.lease_until > clock()
              WHERE (w.kind = 'standing') = (g.lease_s IS NOT NULL) ORDER BY g.id) u
        WHERE j.id = ANY (p_ids) AND j.id = u.id AND j.attempts = u.attempt
          AND j.worker_id = p_from
          AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_from AND w.token <> p_token)
        RETURNING j.id
    )
    SELECT array_agg(p.id) INTO v_passed FROM passed p;
    RETURN coalesce(v_passed, '{}');
END $$;

-- claim() on behalf of several remote workers that wait for jobs of a queue: the first is served
-- first. Each gets at most as many as its element of p_limits; with one in p_leases_s (seconds) the
-- attempts run under p_standing and p_assignment; the others note the number in p_claim_ids, see
-- list_held(). The other arguments are those of claim(), and so is what is returned, with the
-- worker before each row. A worker that was presumed dead gets a row
-- without an id; one whose row another session has locked, nothing. A suspect goes to a worker that
-- runs none. Locks the workers' rows FOR KEY SHARE, in order of id, with SKIP LOCKED, then as
-- claim().
CREATE OR REPLACE FUNCTION claim_for(p_workers int[], p_tokens uuid[], p_limits int[],
                                     p_leases_s real[], p_standing int, p_assignment uuid,
                                     p_queue text, p_priorities int[] DEFAULT '{}',
                                     p_run_ats float8[] DEFAULT '{}',
                                     p_positions uuid[] DEFAULT '{}', p_places text DEFAULT NULL,
                                     p_reach_s float8 DEFAULT 0, p_since float8 DEFAULT NULL,
                                     p_renew boolean DEFAULT true, p_kinds text[] DEFAULT '{}',
                                     p_budgets int[] DEFAULT '{}',
                                     p_claim_ids int[] DEFAULT NULL)
RETURNS TABLE (worker int, id uuid, kind text, payload text, attempt int, failures int,
               max_attempts int, timeout_s real, priority int, losses int, run_at float8,
               created_at float8, schedule text, occurrence float8, meta text, serialize_key text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_live   int[] := ARRAY(        -- places in p_workers, first come, first served
        SELECT l.place::int
        FROM (SELECT u.place FROM unnest(p_workers, p_tokens) WITH ORDINALITY u (id, token, place)
              JOIN workers w ON w.id = u.id AND w.token = u.token
                  AND w.lost_at IS NULL AND w.lease_until > clock()
              ORDER BY w.id FOR KEY SHARE OF w SKIP LOCKED) l
        ORDER BY l.place);
    v_slots  int[] := p_limits;     -- what is left of them
    v_turn   int := cardinality(v_live);
    v_by     int;                   -- the place of the worker that claims
    v_to     int;
    v_first  int;                   -- in v_live: those before it are served, or claim
    v_ids    uuid[];                -- of those that do not stay with it
    v_places int[];
BEGIN
    IF v_turn = 1 AND p_leases_s[v_live[1]] IS NULL THEN  -- as below, without passing anything on
        v_turn := 0;
        RETURN QUERY
        SELECT CASE WHEN c.id IS NOT NULL THEN p_workers[v_live[1]] END, c.*
        FROM claim(p_workers[v_live[1]], p_queue, p_limits[v_live[1]], p_kinds, p_budgets,
                   p_priorities, p_run_ats, p_positions, p_tokens[v_live[1]], '{}', p_places,
                   p_reach_s, p_since, p_renew, p_claim_ids[v_live[1]]) c;
    END IF;
    -- Whoever claims is served last: so it has a slot for the suspect that it may get. Then only
    -- another suspect may be left, for the workers before it.
    WHILE v_turn > 0 AND (v_by IS NULL OR EXISTS (
            SELECT FROM jobs j WHERE j.queue = p_queue AND waits_suspect(j)
                                 AND j.run_at <= clock())) LOOP
        v_by := v_live[v_turn];
        v_turn := v_turn - 1;
        CONTINUE WHEN v_slots[v_by] < 1;
        v_first := 1;
        v_ids := '{}';
        v_places := '{}';
        FOR id, kind, payload, attempt, failures, max_attempts, timeout_s, priority, losses, run_at,
            created_at, schedule, occurrence, meta, serialize_key IN
            SELECT c.* FROM claim(p_workers[v_by], p_queue,
                                  (SELECT sum(v_slots[l])::int FROM unnest(v_live) l), p_kinds,
                                  p_budgets, p_priorities, p_run_ats, p_positions,
                                  p_tokens[v_by], '{}', p_places, p_reach_s, p_since, p_renew,
                                  p_claim_ids[v_by]) c
            ORDER BY c.id IS NULL, c.priority DESC, c.run_at, c.id
        LOOP
            v_to := v_by;
            IF id IS NULL THEN      -- what the next claim should know
                worker := NULL;
                RETURN NEXT;
                CONTINUE;
            ELSIF losses < 2 THEN
                WHILE v_live[v_first] = v_by OR v_slots[v_live[v_first]] < 1 LOOP
                    v_first := v_first + 1;
                END LOOP;
                v_to := coalesce(v_live[v_first], v_by);
            END IF;
            v_slots[v_to] := v_slots[v_to] - 1;
            IF v_to <> v_by OR p_leases_s[v_to] IS NOT NULL THEN
                v_ids := v_ids || id;
                v_places := v_places || v_to;
            END IF;
            worker := p_workers[v_to];
            RETURN NEXT;
        END LOOP;
        UPDATE jobs j
        SET worker_id = CASE WHEN u.lease_s IS NULL THEN u.worker ELSE p_standing END,
            lease_s = u.lease_s, assignment_id = CASE WHEN u.lease_s > 0 THEN p_assignment END,
            lease_until = least(clock() + make_interval(secs => u.lease_s), j.lease_until),
            claim_id = CASE WHEN u.lease_s IS NULL THEN u.claim_id END
        FROM (SELECT o.id, p_workers[o.place] AS worker, p_leases_s[o.place] AS lease_s,
                     p_claim_ids[o.place] AS claim_id
              FROM unnest(v_ids, v_places) AS o (id, place)) u
        WHERE j.id = ANY (v_ids) AND j.id = u.id;
    END LOOP;
    RETURN QUERY
    SELECT u.id, NULL::uuid, NULL, NULL, NULL::int, NULL::int, NULL::int, NULL::real, NULL::int,
           NULL::int, NULL::float8, NULL::float8, NULL, NULL::float8, NULL, NULL
    FROM unnest(p_workers, p_tokens) AS u (id, token)
    WHERE NOT EXISTS (SELECT FROM workers w
                      WHERE w.id = u.id AND w.token = u.token AND w.lost_at IS NULL);
END $$;

-- Claims one job by its id, for a worker whose jobs somebody else hands out: whatever is due before
-- it, but else as claim(), which starts it. `why` is NULL if it did. Otherwise nothing was changed,
-- and it is `unknown` (that queue has no such live job); `locked`, by another session; the job's
-- status, if it does not wait; `expired`; `not_due`; `paused`; `key`, another job has its
-- serialize_key or stands before it; `limit`; or `suspect`, the worker runs one already. `again_s`:
-- in how many seconds to ask again, where that is known; `waits_for`: the job that it waits for by
-- its key, or up to ten on which it depends. With p_lease_s the attempt runs under
-- p_standing and p_assignment, as by claim_for(). Raises PW001 if the worker's lease is gone. Locks
-- the worker's row FOR KEY SHARE, the queue and its scope where keys or limits count, the job with
-- SKIP LOCKED, then as claim() and hand_over().
CREATE OR REPLACE FUNCTION claim_one(p_worker int, p_token uuid, p_queue text, p_id uuid,
                                     p_kinds text[] DEFAULT '{}', p_budgets int[] DEFAULT '{}',
                                     p_claim_id int DEFAULT NULL, p_lease_s real DEFAULT NULL,
                                     p_standing int DEFAULT NULL, p_assignment uuid DEFAULT NULL)
RETURNS TABLE (why text, again_s float8, waits_for uuid[], id uuid, kind text, payload text,
               attempt int, failures int, max_attempts int, timeout_s real, priority int,
               losses int, run_at float8, created_at float8, schedule text, occurrence float8,
               meta text, serialize_key text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_job   jobs;
    v_queue queues;
    v_scope text;
    v_now   timestamptz;
    v_room  int;
BEGIN
    PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;  -- before the queue, as claim()
    SELECT * INTO v_queue FROM queues q WHERE q.name = p_queue;
    PERFORM lock_queues(ARRAY[p_queue, coalesce(v_queue.serialize_scope, p_queue)::text])
    FROM jobs j WHERE j.id = p_id AND j.queue = p_queue
      AND (v_queue.limited OR j.serialize_key IS NOT NULL OR j.limit_key IS NOT NULL);
    v_scope := v_queue.serialize_scope;
    SELECT * INTO v_queue FROM queues q WHERE q.name = p_queue;
    IF v_queue.serialize_scope IS DISTINCT FROM v_scope THEN
        why := 'locked';  -- it changed meanwhile
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT clock_after_waiting() INTO v_now;  -- as claim(), once it has the lock
    UPDATE jobs j SET serialize_scope = v_scope, promoted = v_now  -- as in pick()
    WHERE j.ctid = ANY (ARRAY(
        SELECT s.ctid FROM jobs s
        WHERE s.id = p_id AND s.queue = p_queue AND s.serialize_key IS NOT NULL
          AND s.status IN ('pending', 'failed', 'blocked')
          AND s.serialize_scope IS DISTINCT FROM v_scope FOR UPDATE SKIP LOCKED));
    SELECT * INTO v_job FROM jobs j WHERE j.id = p_id AND j.queue = p_queue FOR UPDATE SKIP LOCKED;
    IF v_job.id IS NULL THEN
        why := CASE WHEN EXISTS (SELECT FROM jobs j WHERE j.id = p_id AND j.queue = p_queue)
                    THEN 'locked' ELSE 'unknown' END;
    ELSE
        SELECT CASE WHEN h.reason IN ('future', 'retry') THEN 'not_due' ELSE h.reason END,
               CASE WHEN isfinite(h.ends_at) THEN date_part('epoch', h.ends_at - v_now) END, h.jobs
        INTO why, again_s, waits_for FROM held_back(v_job, v_queue, v_now) h
        WHERE v_job.status <> 'blocked' OR h.reason IN ('dependency', 'key') LIMIT 1;
        IF v_job.status NOT IN ('pending', 'failed') THEN
            why := v_job.status;
            again_s := NULL;
        END IF;
    END IF;
    IF why IS NULL AND v_job.losses > 1 AND NOT may_run_suspect(p_worker) THEN
        why := 'suspect';
    ELSIF why IS NULL AND v_queue.limited THEN
        SELECT a.room, a.again_s INTO v_room, again_s FROM allowance(p_queue, 1, v_now) a;
        IF v_room < 1 OR NOT key_has_room(p_queue, v_job.limit_key, v_now) THEN
            why := 'limit';
        END IF;
    END IF;
    IF why IS NOT NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    PERFORM carefully(ARRAY[p_id]::text);
    RETURN QUERY
    SELECT NULL, NULL::float8, NULL::uuid[], c.*
    FROM claim(p_worker, p_queue, 0, p_kinds, p_budgets, p_token => p_token,
               p_claim_id => CASE WHEN p_lease_s IS NULL THEN p_claim_id END) c
    WHERE c.id IS NOT NULL;
    IF NOT FOUND THEN  -- meanwhile
        why := 'paused';
        RETURN NEXT;
    END IF;
    PERFORM carefully('');
    IF p_lease_s IS NOT NULL THEN
        PERFORM hand_over(ARRAY[p_id], ARRAY(SELECT j.attempts FROM jobs j WHERE j.id = p_id),
                          p_worker, p_token, ARRAY[p_standing], ARRAY[p_lease_s], p_assignment);
    END IF;
END $$;

-- The fence of a settle on behalf of several workers: returns p_attempts, with an impossible
-- attempt in place of each that does not run under its worker, registered under that token, and
-- under that assignment_id (NULL: without one). The settle compares the attempt again, and only
-- hand_over(), in the transaction of a claim or before anybody else knows of the attempt, changes
-- its worker: so nothing needs a lock here. Locks nothing.
CREATE OR REPLACE FUNCTION fenced(p_ids uuid[], p_attempts int[], p_workers int[], p_tokens uuid[],
                                  p_assignments uuid[] DEFAULT NULL) RETURNS int[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(CASE WHEN j.id IS NULL OR w.token <> u.token THEN -1 ELSE u.attempt END
                     ORDER BY u.place)
    FROM unnest(p_ids, p_attempts, p_workers, p_tokens, p_assignments) WITH ORDINALITY
        AS u (id, attempt, worker, token, assignment, place)
    LEFT JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt AND j.worker_id = u.worker
        AND j.assignment_id IS NOT DISTINCT FROM u.assignment
    LEFT JOIN workers w ON w.id = u.worker
$$;

-- Notes that these attempts have begun, because their remote worker lists them. p_attempts are
-- fenced(). A worker numbers its claims (`claim_id`), and says with each list up to which number it
-- has read or given up the answers. So an attempt of such a claim that is not in the list is in
-- nobody's hands: its worker has never known of it, and it is given back; or it was listed before
-- (`listed` is the attempt), and take_back() counts a loss. Returns those that it could not note,
-- because another session has locked them: list them again. Locks the jobs in order of id, with
-- SKIP LOCKED.
CREATE OR REPLACE FUNCTION list_held(p_ids uuid[], p_attempts int[]) RETURNS uuid[]
LANGUAGE sql VOLATILE AS $$
    WITH wanted AS MATERIALIZED (
        SELECT j.id, j.attempts
        FROM unnest(p_ids, p_attempts) AS u (id, attempt)
        JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt
        WHERE j.claim_id IS NOT NULL AND j.worker_id IS NOT NULL
          AND j.listed IS DISTINCT FROM j.attempts
    ), mine AS MATERIALIZED (
        SELECT j.id, j.ctid AS place FROM wanted w JOIN jobs j ON j.id = w.id
        WHERE j.attempts = w.attempts ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
    ), noted AS (
        UPDATE jobs j SET listed = j.attempts FROM mine m WHERE j.ctid = m.place
    )
    SELECT array_agg(w.id) FROM wanted w WHERE w.id NOT IN (SELECT m.id FROM mine m)
$$;

-- Renews leases of single attempts, by p_leases_s (NULL: by what each had), and returns the seconds
-- until lease_until; an attempt without a lease of its own keeps its deadline. NULL: it has none,
-- and its worker's lease is what counts. p_attempts are fenced(). An attempt that no longer runs is
-- missing, as is one that another session has locked: ask again, and see fenced(). Locks the jobs
-- in order of id, with SKIP LOCKED.
CREATE OR REPLACE FUNCTION extend(p_ids uuid[], p_attempts int[], p_leases_s real[] DEFAULT NULL)
RETURNS TABLE (id uuid, left_s float8)
LANGUAGE sql VOLATILE AS $$
    WITH mine AS MATERIALIZED (
        SELECT j.id, j.ctid AS place, j.lease_until, j.lease_s IS NOT NULL AS is_own,
               coalesce(u.lease_s, j.lease_s::real) AS lease_s
        FROM unnest(p_ids, p_attempts, p_leases_s) AS u (id, attempt, lease_s)
        JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt
        WHERE j.worker_id IS NOT NULL
        ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
    ), extended AS (
        UPDATE jobs j
        SET lease_s = m.lease_s,
            lease_until = least(clock() + make_interval(secs => m.lease_s),
                                deadline(j.started_at, j.timeout_s))
        FROM mine m WHERE j.ctid = m.place AND m.is_own
        RETURNING j.id, j.lease_until
    )
    SELECT e.id, extract(epoch FROM e.lease_until - clock())::float8 FROM extended e
    UNION ALL
    SELECT m.id, extract(epoch FROM m.lease_until - clock())::float8 FROM mine m
    WHERE NOT m.is_own
$$;
