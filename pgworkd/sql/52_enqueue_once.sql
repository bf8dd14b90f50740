-- Inserting a job at most once, by an id that the caller has made: calling again is safe.

-- enqueue() with an id, unless a job of that id is there, live or in the history; then nothing is
-- inserted. `created`; `same`: the job that is there has this queue, kind and payload (NULL: only
-- its kept dedupe_key is left of it); `status`: what it is now, as in result_of(); `keep_s`: for
-- how many seconds after its end the queue remembers it (NULL: as long as the history is kept). The
-- id should be a UUID of version 7: see finished_of(). Raises
-- 23505 for a dedupe_key that another job holds. Calls for one id wait for each other, until the
-- transaction of the first ends; it must not be REPEATABLE READ, which would not see what the one
-- before has inserted. Locks the id (an advisory lock), then as enqueue().
CREATE OR REPLACE FUNCTION enqueue_once(p_id uuid, p_queue text, p_payload jsonb DEFAULT '{}',
                                        p_kind text DEFAULT NULL, p_priority int DEFAULT NULL,
                                        p_run_at timestamptz DEFAULT NULL,
                                        p_delay_s float8 DEFAULT NULL,
                                        p_expires_at timestamptz DEFAULT NULL,
                                        p_max_attempts int DEFAULT NULL,
                                        p_timeout_s float8 DEFAULT NULL, p_meta jsonb DEFAULT NULL,
                                        p_dedupe_key text DEFAULT NULL,
                                        p_dedupe_until timestamptz DEFAULT NULL,
                                        p_dedupe_for_s float8 DEFAULT NULL,
                                        p_serialize_key text DEFAULT NULL,
                                        p_limit_key text DEFAULT NULL,
                                        p_on_retry text DEFAULT 'hold',
                                        p_dedupe_by text DEFAULT NULL)
RETURNS TABLE (created boolean, same boolean, status text, keep_s int)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_found record;
BEGIN
    IF p_id IS NULL THEN
        RAISE EXCEPTION 'p_id must not be NULL' USING ERRCODE = 'invalid_parameter_value';
    ELSIF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE EXCEPTION 'enqueue_once() needs a READ COMMITTED transaction'
            USING ERRCODE = 'invalid_parameter_value',
                HINT = 'Another would not see what was inserted since it began.';
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended(p_id::text, 1886873448));
    keep_s := (SELECT q.keep_s FROM queues q WHERE q.name = p_queue);
    created := false;
    SELECT j.queue::text, j.kind::text, j.payload::jsonb, j.status::text INTO v_found
    FROM jobs j WHERE j.id = p_id;
    -- It has ended, or was never there; the rows of ended jobs that keep a key have no payload.
    IF v_found IS NULL OR v_found.status = 'completed' THEN
        status := CASE WHEN v_found.status = 'completed' THEN 'gone' END;
        SELECT f.queue, f.kind, f.payload, f.status::text INTO v_found
        FROM finished_of(ARRAY[p_id]) f LIMIT 1;
    END IF;
    IF v_found.status IS NOT NULL THEN
        same := v_found.queue = p_queue AND v_found.payload = p_payload
            AND coalesce(v_found.kind, v_found.queue) = coalesce(p_kind, p_queue);
        status := v_found.status;
    ELSIF status IS NULL THEN
        PERFORM FROM enqueue(p_queue, p_payload, p_kind, p_priority, p_run_at, p_delay_s,
                             p_expires_at, p_max_attempts, p_timeout_s, p_meta, p_dedupe_key,
                             p_dedupe_until, p_dedupe_for_s, p_serialize_key, p_limit_key,
                             p_on_retry, p_id => p_id, p_dedupe_by => p_dedupe_by);
        created := true;
        same := true;
        status := 'pending';
    END IF;
    RETURN NEXT;
END $$;
