-- Results: waiting for them and reading them, of jobs and of trees of batches.

-- Notifies sessions that wait for some of these jobs: NOTIFY on their channels with a JSON array
-- of ids, up to 190 in each (8,000 bytes are the maximum). Locks nothing: a job that ended once
-- does not end the waiting, a dead one may be retried.
CREATE OR REPLACE FUNCTION notify_waiters(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_notify(g.channel, g.ids)
    FROM (SELECT w.channel, jsonb_agg(w.job_id ORDER BY w.job_id)::text AS ids
          FROM (SELECT r.channel, r.job_id, (row_number() OVER (PARTITION BY r.channel
                  ORDER BY r.job_id) - 1) / 190 AS part
                FROM result_waiters r WHERE r.job_id = ANY (p_ids) AND r.until > clock()) w
          GROUP BY w.channel, w.part) g;
END $$;

-- Registers that the listener of p_channel waits for these jobs for p_for_s, and returns those
-- that have ended: their status, `dead` and `gone` (unknown, or no longer in the history)
-- included; those are not waited for. A job that ends while this call commits may be missed by
-- both: so call again soon, and from time to time as long as some are left. Locks rows of
-- result_waiters in order, which only other sessions that wait on the same channel would meet.
CREATE OR REPLACE FUNCTION await_results(p_jobs uuid[], p_channel text, p_for_s float8)
RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_over    uuid[];
    v_became  text[];
    v_wrong   text := CASE
        WHEN p_jobs IS NULL OR array_position(p_jobs, NULL) IS NOT NULL
            THEN 'p_jobs must not be, or contain, NULL'
        WHEN cardinality(p_jobs) > 10000
            THEN 'p_jobs has more than 10000 jobs: wait for them by several calls'
        WHEN p_channel IS NULL OR octet_length(p_channel) NOT BETWEEN 1 AND 63
            THEN 'p_channel must have 1 to 63 bytes'
        WHEN p_for_s IS NULL OR NOT p_for_s BETWEEN 1 AND 86400
            THEN 'p_for_s must be 1 to 86400' END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO result_waiters (job_id, channel, until)
    SELECT DISTINCT u.id, p_channel, clock() + make_interval(secs => p_for_s)
    FROM unnest(p_jobs) AS u (id) ORDER BY u.id
    ON CONFLICT (job_id, channel) DO UPDATE SET until = excluded.until;
    SELECT array_agg(a.id)
               FILTER (WHERE a.status NOT IN ('blocked', 'pending', 'running', 'failed')),
           array_agg(a.status)
               FILTER (WHERE a.status NOT IN ('blocked', 'pending', 'running', 'failed'))
    INTO v_over, v_became
    FROM became_all(ARRAY(SELECT DISTINCT unnest(p_jobs))) a;
    DELETE FROM result_waiters r WHERE r.channel = p_channel AND r.job_id = ANY (v_over);
    RETURN QUERY SELECT o.id, o.status FROM unnest(v_over, v_became) AS o (id, status);
END $$;

-- What has become of jobs, wherever they are; without a row: unknown, or no longer in the history
-- (a queue with keep_s = 0 keeps no result). Locks nothing; for the history see finished_of().
CREATE OR REPLACE FUNCTION result_of(p_jobs uuid[])
RETURNS TABLE (id uuid, status text, result jsonb, error text, finished_at timestamptz)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_rest uuid[];
BEGIN
    RETURN QUERY SELECT j.id, j.status::text, NULL::jsonb, j.error::text, NULL::timestamptz
        FROM jobs j
                 WHERE j.id = ANY (p_jobs) AND j.status <> 'completed';
    v_rest := ARRAY(SELECT i FROM unnest(p_jobs) i
                    EXCEPT SELECT j.id FROM jobs j WHERE j.id = ANY (p_jobs)
                        AND j.status <> 'completed');
    IF v_rest <> '{}' THEN
        RETURN QUERY SELECT f.id, f.status::text, f.result::jsonb, f.error, f.finished_at
                     FROM finished_of(v_rest) f;
    END IF;
END $$;

-- Their rows of all_jobs. The view itself, asked for an id, locks every day of the history. Locks
-- nothing; for the history see finished_of().
CREATE OR REPLACE FUNCTION jobs_of(p_jobs uuid[]) RETURNS SETOF all_jobs
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_rest uuid[];
    v_at   timestamptz[];
BEGIN
    RETURN QUERY SELECT a.* FROM all_jobs a WHERE a.id = ANY (p_jobs) AND a.finished_at IS NULL;
    v_rest := ARRAY(SELECT i FROM unnest(p_jobs) i
                    EXCEPT SELECT j.id FROM jobs j WHERE j.id = ANY (p_jobs)
                        AND j.status <> 'completed');
    v_at := ARRAY(SELECT f.finished_at FROM finished_of(v_rest) f);
    IF v_at <> '{}' THEN
        RETURN QUERY SELECT a.* FROM all_jobs a
                     WHERE a.id = ANY (v_rest) AND a.finished_at = ANY (v_at);
    END IF;
END $$;

-- A page of the results of a batch and all below it: of its final batches; if none is final, of
-- those without children; of all of them if p_all. Completed jobs only, without those that only
-- added others from streamed ones. In order of batch and id; p_after_batch and p_after are those
-- of the last row of the page before. The results are complete when the tree is finished, as long
-- as the history keeps them: queues with keep_s = 0 leave none. Raises PW003 if there is no such
-- batch. Locks nothing.
CREATE OR REPLACE FUNCTION batch_results(p_batch uuid, p_all boolean DEFAULT false,
                                         p_after_batch uuid DEFAULT NULL, p_after uuid DEFAULT NULL,
                                         p_limit int DEFAULT 1000)
RETURNS TABLE (batch_id uuid, batch text, id uuid, payload jsonb, result jsonb)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_below uuid[];
    v_final boolean;
    v_batch batches;
    v_left  int := least(greatest(coalesce(p_limit, 1000), 1), 10000);
    v_from  uuid;
    v_found int;
BEGIN
    IF NOT EXISTS (SELECT FROM batches b WHERE b.id = p_batch) THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch
            USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    ELSIF (p_after_batch IS NULL) <> (p_after IS NULL) THEN
        RAISE EXCEPTION 'p_after and p_after_batch go together'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_below := with_below(ARRAY[p_batch]);
    v_final := EXISTS (SELECT FROM batches b WHERE b.id = ANY (v_below) AND b.final);
    FOR v_batch IN
        SELECT b.* FROM batches b
        WHERE b.id = ANY (v_below) AND (p_after_batch IS NULL OR b.id >= p_after_batch)
          AND (p_all OR CASE WHEN v_final THEN b.final
                             ELSE NOT EXISTS (SELECT FROM batches c WHERE c.parent_id = b.id) END)
        ORDER BY b.id
    LOOP
        v_from := CASE WHEN v_batch.id = p_after_batch THEN p_after
                       ELSE '00000000-0000-0000-0000-000000000000' END;
        RETURN QUERY
        SELECT f.batch_id, v_batch.name::text, f.id, f.payload, f.result::jsonb FROM finished_jobs f
        WHERE f.batch_id = v_batch.id AND f.id > v_from AND f.status = 'completed'
          AND (v_batch.stream_kind IS NULL OR f.kind IS DISTINCT FROM v_batch.stream_kind)
        ORDER BY f.id LIMIT v_left;
        GET DIAGNOSTICS v_found = ROW_COUNT;
        v_left := v_left - v_found;
        EXIT WHEN v_left = 0;
    END LOOP;
END $$;

-- batch_progress of a batch and all below it, each before its children, which come in the order in
-- which they were created. Locks nothing.
CREATE OR REPLACE FUNCTION batch_tree(p_batch uuid) RETURNS SETOF batch_progress
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE tree AS (
        SELECT b.id, ARRAY[b.id] AS path FROM batches b WHERE b.id = p_batch
        UNION ALL
        SELECT c.id, t.path || c.id FROM tree t JOIN batches c ON c.parent_id = t.id
    )
    SELECT p.* FROM tree t JOIN batch_progress p ON p.id = t.id ORDER BY t.path
$$;
