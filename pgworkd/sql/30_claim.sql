-- Claiming: due jobs of a queue for a worker, in order of (priority, run_at, id).

DO $$
BEGIN
    IF to_regtype('pgworkd.claim_place') IS NULL THEN
        -- How far the claims of one pool have come in one priority, of the jobs with keys or of
        -- those without: see pick(). Times are microseconds since the epoch, so that the text is
        -- exact whatever the session's settings.
        CREATE TYPE claim_place AS (keyed boolean, priority int, run_at bigint, id uuid,
                                    promoted bigint);
    END IF;
END $$;

-- The three classes of jobs that wait for a claim, as the indexes of `jobs` have them; all are
-- inlined. Without a key: claims take such a job as it comes.
CREATE OR REPLACE FUNCTION waits_plain(j jobs) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.status IN ('pending', 'failed') AND j.losses < 2 AND j.serialize_key IS NULL
        AND j.limit_key IS NULL;

-- With a key that another job may hold, or whose limits may be reached.
CREATE OR REPLACE FUNCTION waits_keyed(j jobs) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.status IN ('pending', 'failed') AND j.losses < 2
        AND (j.serialize_key IS NOT NULL OR j.limit_key IS NOT NULL);

-- Lost with its worker twice, and perhaps the cause.
CREATE OR REPLACE FUNCTION waits_suspect(j jobs) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.status IN ('pending', 'failed') AND j.losses > 1;

-- True unless the job has expired: one whose handler was called once cannot expire.
CREATE OR REPLACE FUNCTION in_time(j jobs, p_at timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.expires_at IS NULL OR j.expires_at > p_at OR j.begun > 0;

-- True if both take about p_bytes as text, or less, judged by their headers without decompressing
-- them. A compressed value may be many times larger. Inlined.
CREATE OR REPLACE FUNCTION is_within(p_payload jsonb, p_meta jsonb, p_bytes int)
RETURNS boolean LANGUAGE sql STABLE
    RETURN pg_column_size(p_payload) + coalesce(pg_column_size(p_meta), 0) <= CASE
        WHEN pg_column_compression(p_payload) IS NULL
            AND pg_column_compression(p_meta) IS NULL THEN p_bytes ELSE p_bytes / 16 END;

-- True if this worker runs no suspect: one at a time per worker. Two claims of one worker may
-- overlap: the lock lets one check, in a statement of its own, so that it sees what the other has
-- committed. Locks the worker's suspects, without waiting.
CREATE OR REPLACE FUNCTION may_run_suspect(p_worker int) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873444, p_worker) THEN
        RETURN false;
    END IF;
    RETURN NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = p_worker AND j.status = 'running'
                         AND j.losses > 1);
END $$;

-- The suspect that is due first, if this worker may run one. p_locked: the caller has locked the
-- queue, without which a job that has a serialize_key is left. Locks as may_run_suspect(), then the
-- job with SKIP LOCKED.
CREATE OR REPLACE FUNCTION pick_suspect(p_worker int, p_queue text, p_now timestamptz,
                                        p_without text[], p_limited boolean, p_locked boolean)
RETURNS tid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_careful boolean := is_careful();
    v_scope   text := scope_of(p_queue);
BEGIN
    IF NOT may_run_suspect(p_worker) THEN
        RETURN '{}';
    END IF;
    UPDATE jobs j SET serialize_scope = nullif(v_scope, p_queue)  -- as in pick()
    WHERE p_locked AND j.ctid = ANY (ARRAY(
        SELECT s.ctid FROM jobs s
        WHERE s.queue = p_queue AND waits_suspect(s) AND s.serialize_key IS NOT NULL
          AND coalesce(s.serialize_scope, s.queue) <> v_scope FOR UPDATE SKIP LOCKED));
    RETURN ARRAY(
        SELECT j.ctid FROM jobs j
        WHERE j.queue = p_queue AND waits_suspect(j)
          AND j.run_at <= p_now AND in_time(j, p_now)
          AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
          AND (j.serialize_key IS NULL OR p_locked
               AND key_is_free(coalesce(j.serialize_scope, j.queue), j.serialize_key,
                               j.status = 'failed' AND NOT j.yields, j.run_at, j.id))
          AND (NOT p_limited OR key_has_room(j.queue, j.limit_key, p_now))
          AND NOT (v_careful AND is_refused('claim', j.id::text))
        ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1 FOR UPDATE SKIP LOCKED);
END $$;

-- Takes up to p_limit due jobs of a queue for a worker, in order of priority (higher first),
-- run_at, id; the answer has them in no order, which the caller can give them for less.
-- Each priority is a range of the index, entered at its first row and left at the first that is
-- not due: a million future rows cost nothing. While a transaction holds back vacuum, index
-- entries of ended jobs pile up at the head of each range, so callers may pass how far they have
-- come: at p_priorities[i] (descending) the claim begins behind (p_run_ats[i], p_positions[i]),
-- run_at in seconds since the epoch; other priorities are found in the gaps between those. Where
-- jobs have keys or the queue has limits, pick() chooses.
-- p_kinds and p_budgets give the max_attempts of kinds that differ from 3, for jobs that have
-- none: what the caller does not know, or leaves at 3, stays NULL, for a worker that knows more.
-- Jobs of the kinds in p_without are left for other workers.
-- The answer must fit into the buffers between server and client (208 KiB for a Unix socket, far
-- more for TCP): until it is sent the locks are held, and a frozen client receives nothing. So
-- each job gets an equal share of 360 kB, or over a Unix socket of 180 kB and at most 500 jobs; a
-- larger payload and meta are NULL, and payloads() returns them, as it does for every job that can
-- expire: what has been claimed has not begun.
-- Rows without an id come last. If a rate holds jobs back: `created_at` is in how many seconds to
-- ask again. With p_without, one for each `priority` in which only locked jobs and jobs of those
-- kinds are left up to `run_at`: the next claim may begin behind them. (Up to a second ago: jobs
-- due since then may not be committed yet.) If pick() chooses and the caller gives p_places ('{}'
-- at first): a row whose `payload` is what to pass the next time. p_reach_s: begin this far before
-- those places (NULL: at every head); p_since: and no later than that run_at. Finding new places
-- has a cost: with p_renew = false the old ones may be returned. p_claim_id: see list_held().
-- Locks the worker's row FOR KEY SHARE (so that rescue() and a claim exclude each other, and
-- heartbeats do not wait), the queue and its scope where keys or limits count, then due rows with
-- SKIP LOCKED. Raises PW001 if the worker's lease is gone.
CREATE OR REPLACE FUNCTION claim(p_worker int, p_queue text, p_limit int,
                                 p_kinds text[] DEFAULT '{}', p_budgets int[] DEFAULT '{}',
                                 p_priorities int[] DEFAULT '{}', p_run_ats float8[] DEFAULT '{}',
                                 p_positions uuid[] DEFAULT '{}', p_token uuid DEFAULT NULL,
                                 p_without text[] DEFAULT '{}', p_places text DEFAULT NULL,
                                 p_reach_s float8 DEFAULT 0, p_since float8 DEFAULT NULL,
                                 p_renew boolean DEFAULT true, p_claim_id int DEFAULT NULL)
RETURNS TABLE (id uuid, kind text, payload text, attempt int, failures int, max_attempts int,
               timeout_s real, priority int, losses int, run_at float8, created_at float8,
               schedule text, occurrence float8, meta text, serialize_key text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz := clock();
    v_rows     tid[] := '{}';
    v_room     int;
    v_above    bigint := 2147483648;             -- priorities from here on are done
    v_known    int := 1;                         -- the next of p_priorities
    v_next     bigint;
    v_priority int;
    v_from     timestamptz;
    v_id       uuid;
    v_probes   int := 0;
    v_special  boolean := cardinality(p_kinds) > 0;
    v_attempts int;                              -- of the queue, for jobs without their own
    v_timeout_s real;                            -- the same
    v_scope    text;                             -- of its serialize_keys
    v_paused   boolean;
    -- one is due: whether the first has a serialize_key
    v_suspect  boolean;
    v_locked   boolean;
    -- there may be priorities that the caller does not know
    v_gaps     boolean;
    v_limited  boolean;
    v_rated    boolean;
    v_chosen   boolean;                          -- pick() chooses: some waiting job has a key
    v_allowed  int;                              -- by the queue's own limits
    v_tcp      boolean := inet_client_addr() IS NOT NULL;
    v_remote   boolean;                          -- no process of ours will end its attempts
    -- bytes of payload and meta that each job may answer with
    v_share    int;
    v_again_s  float8;                           -- when a rate of the queue, ...
    v_turn_s   float8;                           -- ... or of a key, will allow the next start
    -- priorities with nothing left but jobs for other workers
    v_passed   int[] := '{}';
    v_places   claim_place[];                    -- as p_places, and after this claim
    v_careful  boolean := is_careful();
    v_taken    int;
BEGIN
    SELECT w.kind = 'remote' INTO v_remote FROM workers w
    WHERE w.id = p_worker AND (p_token IS NULL OR w.token = p_token) AND w.lost_at IS NULL
      AND w.lease_until > v_now FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'worker % has no lease', p_worker USING ERRCODE = 'PW001',
            HINT = 'Its lease ran out and its jobs were taken back: register again.';
    END IF;
    -- 1. The gate: pause, limits, locks. One statement for all checks, because with few jobs these
    -- cost more than the claim itself.
    SELECT coalesce(q.paused_until > v_now, false), coalesce(q.limited, false),
           q.rate IS NOT NULL OR q.rate_per_key IS NOT NULL,
           CASE WHEN coalesce(p_places, '{}') = '{}'
                    THEN EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j))
                WHEN p_reach_s = 0 AND p_since IS NULL
                    THEN keyed_behind(p_queue, p_places::claim_place[])
                ELSE keyed_behind(p_queue, starts(p_places::claim_place[], p_reach_s, p_since)) END,
           (SELECT j.serialize_key IS NOT NULL FROM jobs j
            WHERE j.queue = p_queue AND waits_suspect(j) AND j.run_at <= v_now
            ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1),
           cardinality(p_priorities) <> 1
           OR EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND waits_plain(j)
                      AND j.priority > p_priorities[1])
           OR EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND waits_plain(j)
                      AND j.priority < p_priorities[1]),
           q.max_attempts, q.timeout_s, q.serialize_scope
    INTO v_paused, v_limited, v_rated, v_chosen, v_suspect, v_gaps, v_attempts, v_timeout_s,
         v_scope
    FROM (SELECT) one LEFT JOIN queues q ON q.name = p_queue;
    IF v_paused THEN
        RETURN;
    END IF;
    v_room := CASE WHEN v_tcp THEN p_limit ELSE least(p_limit, 500) END;
    v_locked := v_limited OR v_chosen OR coalesce(v_suspect, false);
    IF v_locked THEN
        -- the statements that follow see what its last holder has committed
        IF v_scope IS NULL THEN
            PERFORM lock_queue(p_queue);
        ELSE
            PERFORM lock_queues(ARRAY[p_queue, v_scope]);
        END IF;
        IF (SELECT q.serialize_scope FROM queues q WHERE q.name = p_queue)
               IS DISTINCT FROM v_scope THEN
            RETURN;  -- it changed meanwhile: the next claim locks what counts now
        END IF;
        PERFORM set_config('pgworkd.queue_locked', 'on', true);
        -- otherwise all that waited would be charged to the time at which they began to wait
        v_now := clock_after_waiting();
    END IF;
    IF v_limited THEN
        SELECT a.room, a.again_s INTO v_room, v_again_s FROM allowance(p_queue, v_room, v_now) a;
    END IF;
    v_allowed := v_room;

    -- 2. A suspect comes first.
    IF v_room > 0 AND v_suspect IS NOT NULL THEN
        v_rows := pick_suspect(p_worker, p_queue, v_now, p_without, v_limited, v_locked);
        v_room := v_room - cardinality(v_rows);
    END IF;

    -- 3. What else is due: chosen by keys and limits, or the first in each priority.
    IF v_chosen AND v_room > 0 THEN
        SELECT v_rows || p.picked, p.again_s, p.places INTO v_rows, v_turn_s, v_places
        FROM pick(p_queue, v_room, v_rows, v_now, p_without, p_places::claim_place[], p_reach_s,
                  p_since, p_renew) p;
        v_room := 0;
    END IF;
    WHILE v_room > 0 AND v_probes < 200 LOOP
        v_next := coalesce(p_priorities[v_known], -2147483649);
        v_priority := NULL;
        -- is there a priority that the caller does not know?
        IF v_gaps AND v_above > v_next + 1 THEN
            v_priority := next_priority(p_queue, false, v_above, v_next);
        END IF;
        IF v_priority IS NOT NULL THEN
            v_from := '-infinity';
            v_id := '00000000-0000-0000-0000-000000000000';
        ELSE
            EXIT WHEN v_known > cardinality(p_priorities);
            v_priority := p_priorities[v_known];
            v_from := to_timestamp(p_run_ats[v_known]);
            v_id := p_positions[v_known];
            v_known := v_known + 1;
        END IF;
        v_rows := v_rows || ARRAY(
            SELECT j.ctid FROM jobs j
            WHERE j.queue = p_queue AND j.priority = v_priority AND waits_plain(j)
              AND j.run_at <= v_now AND (j.run_at, j.id) > (v_from, v_id)
              AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
              AND NOT (v_careful AND is_refused('claim', j.id::text))
            ORDER BY j.run_at, j.id LIMIT v_room FOR UPDATE SKIP LOCKED);
        v_room := v_allowed - cardinality(v_rows);
        IF v_room > 0 AND cardinality(p_without) > 0 THEN
            v_passed := v_passed || v_priority;
        END IF;
        v_above := v_priority;
        v_probes := v_probes + 1;
    END LOOP;
    -- More priorities than anyone should use: the rest in one walk, which is slower but still in
    -- order.
    IF v_room > 0 AND v_probes >= 200 THEN
        v_rows := v_rows || ARRAY(
            SELECT j.ctid FROM jobs j
            WHERE j.queue = p_queue AND j.priority < v_above AND waits_plain(j)
              AND j.run_at <= v_now AND in_time(j, v_now)
              AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
              AND NOT (v_careful AND is_refused('claim', j.id::text))
            ORDER BY j.priority DESC, j.run_at, j.id LIMIT v_room FOR UPDATE SKIP LOCKED);
    END IF;

    -- 4. Start them: those chosen above or, for refuse_claims() and claim_one(), by the caller.
    IF v_careful AND current_setting('pgworkd.careful', true) <> 'on' THEN
        IF current_setting('pgworkd.careful', true) = 'choose' THEN
            FOR id IN SELECT j.id FROM unnest(v_rows) WITH ORDINALITY AS r (ctid, place)
                      JOIN jobs j ON j.ctid = r.ctid ORDER BY r.place LOOP
                RETURN NEXT;
            END LOOP;
            RETURN;
        END IF;
        v_rows := ARRAY(SELECT j.ctid FROM jobs j
                        WHERE j.id = ANY (current_setting('pgworkd.careful', true)::uuid[]));
    END IF;
    IF v_rated THEN
        PERFORM spend(p_queue, v_rows, v_now);
    END IF;
    -- that for the other columns
    v_share := CASE WHEN v_tcp THEN 360000 ELSE 180000 END / greatest(cardinality(v_rows), 1) - 140;
    RETURN QUERY
    UPDATE jobs j
    SET status = 'running', worker_id = p_worker, started_at = v_now, claim_id = p_claim_id,
        attempts = least(j.attempts, 2147483646) + 1,  -- one absurd row must not stop the queue
        lease_until = CASE WHEN v_remote
                           THEN deadline(v_now, coalesce(j.timeout_s, v_timeout_s)) END,
        max_attempts = CASE
            WHEN v_attempts IS NOT NULL AND j.attempts = 0
                THEN coalesce(j.max_attempts, v_attempts)
            WHEN v_special
                THEN coalesce(j.max_attempts, p_budgets[
                    array_position(p_kinds, coalesce(j.kind, j.queue)::text)])
            ELSE j.max_attempts END
    WHERE j.ctid = ANY (v_rows)
    RETURNING CASE WHEN j.worker_id = p_worker THEN j.id ELSE raise_kept() END,
              coalesce(j.kind, j.queue)::text,
              CASE WHEN j.expires_at IS NULL AND is_within(j.payload, j.meta, v_share)
                   THEN j.payload::text END,
              j.attempts, j.failures, coalesce(j.max_attempts::int, 3),
              coalesce(j.timeout_s, v_timeout_s)::real,
              j.priority, j.losses, date_part('epoch', j.run_at), date_part('epoch', j.created_at),
              j.schedule::text, date_part('epoch', j.occurrence),
              CASE WHEN j.meta IS NOT NULL AND is_within(j.payload, j.meta, v_share)
                   THEN j.meta::text END,
              j.serialize_key::text;
    GET DIAGNOSTICS v_taken = ROW_COUNT;
    IF v_taken < cardinality(v_rows) THEN
        PERFORM raise_kept();
    END IF;
    created_at := least(v_turn_s, CASE WHEN cardinality(v_rows) >= v_allowed THEN v_again_s END);
    payload := v_places::text;
    IF created_at IS NOT NULL OR payload IS NOT NULL THEN
        RETURN NEXT;
    END IF;
    created_at := NULL;
    payload := NULL;
    run_at := date_part('epoch', v_now) - 1;
    FOREACH priority IN ARRAY v_passed LOOP
        RETURN NEXT;
    END LOOP;
END $$;

-- True if the transaction that has just claimed this job may stay open until it has run. Not if
-- other claims wait for it, as it has locked the queue; nor if others may wait for the row: who
-- inserts the dedupe_key again, or changes the schedule. Nor if the run must be counted even if the
-- worker does not survive it: of a job that may run only once, or was lost before, and by a worker
-- that is younger than its lease: so a job that kills its worker is soon found. Locks nothing.
CREATE OR REPLACE FUNCTION may_stay_open(p_id uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN current_setting('pgworkd.queue_locked', true) IS DISTINCT FROM 'on' AND EXISTS (
        SELECT FROM jobs j JOIN workers w ON w.id = j.worker_id
        WHERE j.id = p_id AND j.losses = 0 AND coalesce(j.max_attempts, 3) > 1
          AND num_nonnulls(j.dedupe_key, j.serialize_key, j.limit_key, j.schedule, j.expires_at) = 0
          AND w.started_at <= clock() - make_interval(secs => w.lease_s));
END $$;

-- Payload and meta of running attempts whose claim did not return them, in the order given, up to
-- p_bytes of text. For an attempt that no longer runs, by the fence of the settles, the payload is
-- NULL; so it is, with `expired`, for a job whose expires_at has passed before it began. The first
-- p_begin are about to begin (NULL: all): those of them that can expire are marked as begun, and
-- the answer ends before any other that can. Locks the jobs that it marks, in order of id, with
-- SKIP LOCKED; one that another session has locked is taken for one that no longer runs.
CREATE OR REPLACE FUNCTION payloads(p_ids uuid[], p_attempts int[], p_bytes int,
                                    p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL,
                                    p_begin int DEFAULT NULL)
RETURNS TABLE (id uuid, payload text, meta text, expired boolean)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz := clock();
    v_begin   int := coalesce(p_begin, cardinality(p_ids));
    v_begun   uuid[];
    v_row     record;
    v_bytes   bigint := 0;
BEGIN
    WITH mine AS MATERIALIZED (
        SELECT j.ctid AS place, j.id
        FROM unnest(p_ids[:v_begin], p_attempts[:v_begin]) u (id, attempt)
        JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt AND j.worker_id IS NOT NULL
            AND (p_worker IS NULL OR j.worker_id = p_worker
                 AND NOT EXISTS (SELECT FROM workers w
                                 WHERE w.id = p_worker AND w.token <> p_token))
        WHERE j.id = ANY (p_ids) AND j.expires_at IS NOT NULL AND in_time(j, v_now)
        ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
    ), marked AS (
        UPDATE jobs j SET begun = j.attempts FROM mine m WHERE j.ctid = m.place AND j.begun = 0
    )
    SELECT array_agg(m.id) INTO v_begun FROM mine m;
    FOR v_row IN
        SELECT u.id, u.place, j.payload, j.meta, j.expires_at, in_time(j, v_now) AS in_time
        FROM unnest(p_ids, p_attempts) WITH ORDINALITY u (id, attempt, place)
        LEFT JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt AND j.worker_id IS NOT NULL
            AND (p_worker IS NULL OR j.worker_id = p_worker
                 AND NOT EXISTS (SELECT FROM workers w
                                 WHERE w.id = p_worker AND w.token <> p_token))
        ORDER BY u.place
    LOOP
        EXIT WHEN v_row.place > v_begin AND v_row.expires_at IS NOT NULL;
        id := v_row.id;
        expired := NOT v_row.in_time;
        IF v_row.expires_at IS NULL OR id = ANY (v_begun) THEN
            payload := v_row.payload::text;  -- not above: it unpacks no more than is given
            meta := v_row.meta::text;
        ELSE
            payload := NULL;
            meta := NULL;
        END IF;
        v_bytes := v_bytes + coalesce(octet_length(payload), 0) + coalesce(octet_length(meta), 0);
        RETURN NEXT;
        EXIT WHEN v_bytes >= p_bytes;
    END LOOP;
END $$;
