-- Maintenance: jobs that expired, keys and rates that nobody needs, lines whose next job was
-- missed.

-- One part of expire_jobs(): ends these jobs, which the caller has locked; returns how many of
-- which queue and kind. Locks as archive().
CREATE OR REPLACE FUNCTION expire_these(p_ids uuid[]) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_counts jsonb := (SELECT jsonb_agg(to_jsonb(c))
                       FROM (SELECT j.queue, coalesce(j.kind, j.queue) AS kind, count(*) AS jobs,
                                    (array_agg(j.id ORDER BY j.expires_at, j.id))[1] AS example
                             FROM jobs j WHERE j.id = ANY (p_ids) GROUP BY 1, 2) c);
BEGIN
    PERFORM archive(p_ids, 'expired', 'expired before it could start');
    RETURN v_counts;
END $$;

-- Ends jobs that never began and whose expires_at has passed, and frees dedupe_keys whose
-- time is over, at most p_limit of each. Returns a row per queue and kind of jobs that ended, and
-- one without a queue for the keys. Locks them with SKIP LOCKED.
CREATE OR REPLACE FUNCTION expire_jobs(p_limit int DEFAULT 1000)
RETURNS TABLE (queue text, kind text, jobs int, example uuid)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_ids uuid[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 2) THEN
        RETURN;
    END IF;
    PERFORM set_no_wait('on');
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.expires_at <= clock() AND j.begun = 0
                     AND j.status IN ('blocked', 'pending', 'failed')
                     AND NOT is_refused('expire_jobs', j.id::text)
                   ORDER BY j.expires_at LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    RETURN QUERY
    SELECT t.queue, t.kind, sum(t.jobs)::int, (array_agg(t.example ORDER BY p.part))[1]
    FROM in_parts('expire_jobs', v_ids::text[], 'expire_these(uuid[])')
        WITH ORDINALITY AS p (ended, part)
    CROSS JOIN LATERAL jsonb_to_recordset(p.ended) AS t (queue text, kind text, jobs int,
            example uuid)
    GROUP BY 1, 2 ORDER BY 1, 2;
    RETURN QUERY SELECT NULL::text, NULL::text, f.freed, NULL::uuid
        FROM free_keys(p_limit) AS f (freed) WHERE f.freed > 0;
END $$;

-- The same as one number, the larger of the two counts. Also for daemons of the version before.
CREATE OR REPLACE FUNCTION expire(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(greatest(sum(e.jobs) FILTER (WHERE e.queue IS NOT NULL), sum(e.jobs)
                             FILTER (WHERE e.queue IS NULL)), 0)::int
    FROM expire_jobs(p_limit) e
$$;

-- One part of free_keys(): deletes these rows. Returns how many. Locks them.
CREATE OR REPLACE FUNCTION free_these(p_ids uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM jobs j WHERE j.id = ANY (p_ids) RETURNING j.id)
    SELECT all_done(p_ids, count(*)) FROM gone
$$;

-- Deletes rows that keep the dedupe_key of an ended job and whose time is over, at most p_limit;
-- returns how many. An insert of such a key does not wait for this. Locks them with SKIP LOCKED.
CREATE OR REPLACE FUNCTION free_keys(p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids uuid[] := ARRAY(
        SELECT j.id FROM jobs j
        WHERE j.status = 'completed' AND j.dedupe_until <= clock()
          AND NOT is_refused('free_keys', j.id::text)
        ORDER BY j.dedupe_until LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
BEGIN
    RETURN (SELECT coalesce(sum(p.freed::int), 0)
            FROM in_parts('free_keys', v_ids::text[], 'free_these(uuid[])') AS p (freed));
END $$;

-- Of the next p_most serialize_keys after (p_queue, p_key) with blocked jobs: those that no job
-- holds, although the first in line is blocked; `queues`: their scopes. `last_queue` and
-- `last_key`: where to go on; NULL: there are no more. Reads one blocked job per key. Locks
-- nothing.
CREATE OR REPLACE FUNCTION stuck_lines(p_queue text, p_key text, p_most int, OUT queues text[],
                                       OUT keys text[], OUT last_queue text, OUT last_key text)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    WITH RECURSIVE lines AS (
        (SELECT j.queue::text AS queue, coalesce(j.serialize_scope, j.queue)::text AS scope,
                j.serialize_key::text AS key, 1 AS place FROM jobs j
         WHERE j.status = 'blocked' AND j.waiting_on = 0
           AND (j.queue, j.serialize_key) > (p_queue, p_key)
         ORDER BY j.queue, j.serialize_key LIMIT 1)
        UNION ALL
        SELECT n.queue, n.scope, n.key, l.place + 1 FROM lines l CROSS JOIN LATERAL (
            SELECT j.queue::text AS queue, coalesce(j.serialize_scope, j.queue)::text AS scope,
                   j.serialize_key::text AS key FROM jobs j
            WHERE j.status = 'blocked' AND j.waiting_on = 0
              AND (j.queue, j.serialize_key) > (l.queue, l.key)
            ORDER BY j.queue, j.serialize_key LIMIT 1) n
        WHERE l.place < p_most
    ), looked AS (
        SELECT l.queue, l.scope, l.key, l.place,
               (SELECT j.status FROM jobs j
                WHERE coalesce(j.serialize_scope, j.queue) = l.scope AND j.serialize_key = l.key
                AND j.status IN ('blocked', 'pending', 'failed') AND j.waiting_on = 0
                AND in_time(j, clock())
                ORDER BY j.run_at, j.id LIMIT 1) = 'blocked'
               AND NOT EXISTS (SELECT FROM jobs h
                               WHERE coalesce(h.serialize_scope, h.queue) = l.scope
                                 AND h.serialize_key = l.key
                               AND (h.status = 'running' OR h.status = 'failed'
                                    AND NOT h.yields)) AS stuck
        FROM lines l
    )
    SELECT array_agg(l.scope) FILTER (WHERE l.stuck), array_agg(l.key) FILTER (WHERE l.stuck),
           max(l.queue) FILTER (WHERE l.place = p_most), max(l.key) FILTER (WHERE l.place = p_most)
    INTO queues, keys, last_queue, last_key FROM looked l;
END $$;

-- One part of promote_lines(): p_lines are JSON arrays of a queue and a key. Locks as promote().
CREATE OR REPLACE FUNCTION promote_these(p_lines text[]) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT promote(array_agg(l::jsonb ->> 0), array_agg(l::jsonb ->> 1)) FROM unnest(p_lines) l
$$;

-- promote() for maintenance: a line whose first job refuses holds up no others. p_what: the
-- calling function. Locks as promote().
CREATE OR REPLACE FUNCTION promote_lines(p_what text, p_queues text[], p_keys text[]) RETURNS void
LANGUAGE sql VOLATILE AS $$
    SELECT in_parts(p_what, (SELECT array_agg(jsonb_build_array(u.queue, u.key)::text)
                             FROM unnest(p_queues, p_keys) AS u (queue, key)),
                    'promote_these(text[])')
$$;

-- One step of unblock() for the lines behind (p_queue, p_key). Locks one blocked job per key with
-- SKIP LOCKED, and waits for no queue: see promote().
CREATE OR REPLACE FUNCTION unblock_lines(p_queue text, p_key text, p_most int,
                                         OUT promoted int, OUT last_queue text, OUT last_key text)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queues text[];
    v_keys   text[];
BEGIN
    promoted := 0;
    IF NOT pg_try_advisory_xact_lock(1886873445, 5) THEN
        RETURN;
    END IF;
    PERFORM set_no_wait('on');
    SELECT l.queues, l.keys, l.last_queue, l.last_key INTO v_queues, v_keys, last_queue, last_key
    FROM stuck_lines(p_queue, p_key, p_most) l;
    PERFORM promote_lines('unblock', v_queues, v_keys);
    promoted := coalesce(cardinality(v_keys), 0);
END $$;

-- Deletes rates that no longer hold anything back, of the next p_most keys behind (p_queue,
-- p_key). `last_queue` and `last_key`: where to go on; NULL: there are no more. Locks them with
-- SKIP LOCKED, and nothing else: claims update rates under the queue's lock, so a holder of a rate
-- must not wait for that.
CREATE OR REPLACE FUNCTION forget_rates(p_queue text, p_key text, p_most int,
                                        OUT forgotten int, OUT last_queue text, OUT last_key text)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_over tid[];
BEGIN
    SELECT array_agg(l.ctid) FILTER (WHERE l.limit_key <> '' AND l.spent_until < clock()),
           max(l.queue) FILTER (WHERE l.place = p_most), max(l.limit_key)
               FILTER (WHERE l.place = p_most)
    INTO v_over, last_queue, last_key
    FROM (SELECT r.ctid, r.queue::text, r.limit_key, r.spent_until,
          row_number() OVER (ORDER BY r.queue, r.limit_key) AS place
          FROM rates r WHERE (r.queue, r.limit_key) > (p_queue, p_key) ORDER BY r.queue, r.limit_key
          LIMIT p_most) l;
    DELETE FROM rates r WHERE r.ctid = ANY (ARRAY(
        SELECT s.ctid FROM rates s WHERE s.ctid = ANY (v_over) AND s.limit_key <> ''
            AND s.spent_until < clock()
        FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS forgotten = ROW_COUNT;
END $$;

-- One part of unblock(): ends these jobs of cancelled batches. Returns how many. Locks as
-- archive().
CREATE OR REPLACE FUNCTION cancel_these(p_ids uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    SELECT archive(p_ids, 'cancelled', 'its batch was cancelled', false)
$$;

-- Promotes jobs that wait for a key that no job holds: whoever frees keys does so, unless the next
-- in line was locked or rows were changed by hand. Deletes waiters for results whose time is over.
-- Returns how many keys it checked. Reads one blocked job of each of the first thousand keys;
-- unblock_lines() goes on from there, a step each. Also finishes batches, see mend_batches().
-- Locks as that does, then as promote().
CREATE OR REPLACE FUNCTION unblock() RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_queues text[];
    v_keys   text[];
    v_ended  uuid[];                             -- jobs of cancelled batches
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 5) THEN
        RETURN 0;
    END IF;
    PERFORM set_no_wait('on');
    v_ended := mend_batches();
    SELECT l.queues, l.keys INTO v_queues, v_keys FROM stuck_lines('', '', 1000) l;
    PERFORM in_parts('unblock', v_ended::text[], 'cancel_these(uuid[])');
    PERFORM promote_lines('unblock', v_queues, v_keys);
    DELETE FROM result_waiters r WHERE r.ctid = ANY (ARRAY(
        SELECT s.ctid FROM result_waiters s WHERE s.until < clock() ORDER BY s.until LIMIT 10000
        FOR UPDATE SKIP LOCKED));
    RETURN coalesce(cardinality(v_keys), 0);
END $$;
