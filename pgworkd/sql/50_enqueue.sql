-- Inserting: the triggers of `jobs`, and enqueue() for a dedupe_key that is taken.

-- One NOTIFY per queue and statement, only if a pool is idle, and only for jobs due within ten
-- seconds: idle pools check for the next due time at least as often. STABLE saves a snapshot; a
-- pool that becomes idle during the statement checks again for as long as such a statement takes.
-- The first query is all that most inserts pay for while daemons are busy. After it the rows are
-- read once, and pools once per queue: the planner knows nothing of the rows, and might join each
-- row with each pool. Locks nothing.
CREATE OR REPLACE FUNCTION jobs_inserted() RETURNS trigger
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_soon timestamptz;
BEGIN
    IF NOT EXISTS (SELECT FROM pools p WHERE p.idle) THEN
        RETURN NULL;
    END IF;
    v_soon := clock() + interval '10 s';
    -- Listeners may have passed jobs that were due when the transaction began. (One instant for
    -- all its statements: Postgres sends equal notifications of a transaction once.)
    PERFORM notify_pools(q.queue,
                         least(q.run_at,
                               clock() - (statement_timestamp() - transaction_timestamp())))
    FROM (SELECT i.queue::text AS queue, min(i.run_at) AS run_at FROM inserted i
          WHERE i.status = 'pending' AND i.run_at <= v_soon GROUP BY i.queue) q
    WHERE (SELECT true FROM pools p WHERE p.queue = q.queue AND p.idle LIMIT 1);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER jobs_inserted AFTER INSERT ON jobs
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION jobs_inserted();

-- The dedupe_key of a job of a batch, as it is stored: the batch's id, a slash and the key, so that
-- it is unique in its batch. A key that begins so is one that was stored. p_batch NULL: p_key.
CREATE OR REPLACE FUNCTION item_key(p_batch uuid, p_key text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN CASE WHEN p_batch IS NULL OR starts_with(p_key, p_batch::text || '/') THEN p_key
            ELSE p_batch::text || '/' || p_key END;

-- Gives a job with a serialize_key the scope of its queue. A dedupe_key of a job of a batch becomes
-- item_key(). A dedupe_key is free at the very instant, not only
-- after free_keys(): deletes the row that keeps NEW's key for an ended job, if its time is over.
-- Locks that row. (CASE keeps the planner off the index on all such rows.) Every insert pays for
-- the condition of the trigger, so that is short.
CREATE OR REPLACE FUNCTION jobs_key_wanted() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.serialize_key IS NOT NULL THEN
        NEW.serialize_scope := NULL;
        IF NEW.queue::text IS DISTINCT FROM current_setting('pgworkd.unscoped', true) THEN
            NEW.serialize_scope := (SELECT q.serialize_scope FROM queues q
                                    WHERE q.name = NEW.queue);
            IF NEW.serialize_scope IS NULL THEN  -- many rows cost one look-up
                PERFORM set_config('pgworkd.unscoped', NEW.queue, true);
            END IF;
        END IF;
    END IF;
    IF NEW.dedupe_key IS NULL THEN
        RETURN NEW;
    END IF;
    IF NEW.batch_id IS NOT NULL THEN
        IF char_length(item_key(NEW.batch_id, NEW.dedupe_key)) > 512 THEN
            RAISE EXCEPTION 'dedupe_key of a job of a batch must have 1 to 475 characters'
                USING ERRCODE = 'check_violation', HINT = 'Its batch is stored with it.';
        END IF;
        NEW.dedupe_key := item_key(NEW.batch_id, NEW.dedupe_key);
    END IF;
    IF NEW.status <> 'completed' THEN
        DELETE FROM jobs j
        WHERE j.queue = NEW.queue AND j.dedupe_key = NEW.dedupe_key AND j.status <> 'dead'
          AND CASE WHEN j.status = 'completed' THEN j.dedupe_until <= clock() ELSE false END;
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER jobs_key_wanted BEFORE INSERT ON jobs
    FOR EACH ROW WHEN (NEW.dedupe_key IS NOT NULL OR NEW.serialize_key IS NOT NULL)
        EXECUTE FUNCTION jobs_key_wanted();

-- Moves a waiting job, p_job as the caller has locked it, to another due time and priority, and
-- out of parking (a job that waits for other jobs goes on waiting). Claims that have passed its
-- new place, and idle pools, are notified; if it was the first in its line, the next one is
-- promoted. Locks that one with SKIP LOCKED, and not the queue, as promote() does: the caller's
-- transaction may last, and all claims would wait for it. Jobs that a claim parks at that moment
-- are left to unblock().
CREATE OR REPLACE FUNCTION move(p_job jobs, p_run_at timestamptz, p_priority int) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_scope text := coalesce(p_job.serialize_scope, p_job.queue);
    v_queue text;
BEGIN
    UPDATE jobs j
    SET run_at = p_run_at, priority = p_priority,
        status = CASE WHEN j.status = 'blocked' AND j.waiting_on = 0 THEN 'pending'
                      ELSE j.status END
    WHERE j.id = p_job.id;
    IF p_run_at <= clock() + interval '10 s'
       AND (p_run_at < p_job.run_at OR p_priority <> p_job.priority
            OR p_job.status = 'blocked') THEN
        -- See jobs_inserted() for the instant.
        PERFORM wake(ARRAY[p_job.queue::text],
                     least(p_run_at, clock() - (statement_timestamp() - transaction_timestamp())),
                     true);
    END IF;
    IF p_job.serialize_key IS NOT NULL AND p_job.waiting_on = 0 AND p_run_at > p_job.run_at THEN
        UPDATE jobs j SET status = 'pending', promoted = clock_after_waiting()
        WHERE j.ctid = ANY (ARRAY(
            SELECT b.ctid FROM jobs b
            WHERE coalesce(b.serialize_scope, b.queue) = v_scope
              AND b.serialize_key = p_job.serialize_key
              AND b.status IN ('blocked', 'pending', 'failed') AND b.waiting_on = 0
              AND CASE WHEN b.status = 'blocked' THEN true ELSE false END  -- see promote()
              AND NOT EXISTS (SELECT FROM jobs h
                              WHERE coalesce(h.serialize_scope, h.queue) = v_scope
                                AND h.serialize_key = p_job.serialize_key
                              AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields))
            ORDER BY b.run_at, b.id LIMIT 1 FOR UPDATE OF b SKIP LOCKED))
        RETURNING j.queue INTO v_queue;
        IF FOUND THEN
            PERFORM wake(ARRAY[v_queue]);
        END IF;
    END IF;
END $$;

-- The dedupe_key of a job that is to be the only one of its kind and payload (as jsonb prints it).
CREATE OR REPLACE FUNCTION payload_key(p_kind text, p_payload jsonb) RETURNS text
LANGUAGE sql STABLE PARALLEL SAFE
RETURN 'payload:'
    || encode(sha256(convert_to(jsonb_build_array(p_kind, p_payload)::text, 'UTF8')), 'hex');

-- Inserts a job, with a rule for a dedupe_key that is taken. p_on_duplicate: 'raise' 23505, as a
-- plain INSERT does; 'skip': return the id that holds the key; 'replace': give a waiting job the
-- new payload, kind, priority, times, limits and meta (it keeps its keys, its place in their
-- lines, and its failures); 'reschedule': move it to the new run_at, and priority if one is given.
-- A job that is running, or has ended and keeps its key, is not changed. `created`: id is the new
-- job; `changed`: the holder was changed as requested. p_dedupe_by: 'payload', then payload_key()
-- is the dedupe_key. p_id: an id of the caller's own, see also enqueue_once(). p_batch: adds the
-- job to this batch, whose are also p_queue, p_kind and p_max_attempts where they are NULL, and in
-- which alone p_dedupe_key counts; raises PW003 if that takes no more. Locks the batch FOR KEY
-- SHARE, the holder if it is to change, then as move().
CREATE OR REPLACE FUNCTION enqueue(p_queue text, p_payload jsonb DEFAULT '{}',
                                   p_kind text DEFAULT NULL, p_priority int DEFAULT NULL,
                                   p_run_at timestamptz DEFAULT NULL, p_delay_s float8 DEFAULT NULL,
                                   p_expires_at timestamptz DEFAULT NULL,
                                   p_max_attempts int DEFAULT NULL, p_timeout_s float8 DEFAULT NULL,
                                   p_meta jsonb DEFAULT NULL, p_dedupe_key text DEFAULT NULL,
                                   p_dedupe_until timestamptz DEFAULT NULL,
                                   p_dedupe_for_s float8 DEFAULT NULL,
                                   p_serialize_key text DEFAULT NULL, p_limit_key text DEFAULT NULL,
                                   p_on_retry text DEFAULT 'hold',
                                   p_on_duplicate text DEFAULT 'raise', p_id uuid DEFAULT NULL,
                                   p_dedupe_by text DEFAULT NULL, p_batch uuid DEFAULT NULL)
RETURNS TABLE (id uuid, created boolean, changed boolean)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_run_at timestamptz := coalesce(p_run_at,
                                     clock() + make_interval(secs => coalesce(p_delay_s, 0)));
    v_until  timestamptz := coalesce(p_dedupe_until,
                                     clock() + make_interval(secs => p_dedupe_for_s));
    v_wrong  text := CASE
        WHEN p_on_duplicate IS NULL
          OR p_on_duplicate NOT IN ('raise', 'skip', 'replace', 'reschedule')
            THEN 'p_on_duplicate must be raise, skip, replace or reschedule'
        WHEN p_dedupe_by <> 'payload' THEN 'p_dedupe_by must be payload'
        WHEN num_nonnulls(p_dedupe_key, p_dedupe_by) > 1
            THEN 'p_dedupe_key and p_dedupe_by are both given: pass one of them'
        WHEN p_on_duplicate <> 'raise' AND num_nonnulls(p_dedupe_key, p_dedupe_by) = 0
            THEN 'p_on_duplicate needs a p_dedupe_key, or p_dedupe_by'
        WHEN num_nonnulls(p_run_at, p_delay_s) > 1
            THEN 'p_run_at and p_delay_s are both given: pass one of them'
        WHEN p_delay_s < 0 THEN 'p_delay_s must not be negative'
        WHEN num_nonnulls(p_dedupe_until, p_dedupe_for_s) > 1
            THEN 'p_dedupe_until and p_dedupe_for_s are both given: pass one of them'
        WHEN p_dedupe_for_s <= 0 THEN 'p_dedupe_for_s must be above 0'
        WHEN p_on_retry IS NULL OR p_on_retry NOT IN ('hold', 'yield')
            THEN 'p_on_retry must be hold or yield'
        WHEN p_on_retry = 'yield' AND p_serialize_key IS NULL
            THEN 'p_on_retry => ''yield'' needs a p_serialize_key' END;
    v_key    text;
    v_batch  batches;
    v_holder jobs;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF p_batch IS NOT NULL THEN
        v_batch := enter_batch(p_batch, 'jobs');
        p_queue := coalesce(p_queue, v_batch.queue);
        p_kind := coalesce(p_kind, v_batch.kind);
        p_max_attempts := coalesce(p_max_attempts, v_batch.max_attempts);
    END IF;
    v_key := CASE WHEN p_dedupe_by IS NULL THEN p_dedupe_key
                  ELSE payload_key(coalesce(p_kind, p_queue), p_payload) END;
    created := false;
    changed := false;
    FOR i IN 1..100 LOOP
        INSERT INTO jobs AS j (id, queue, payload, kind, priority, run_at, expires_at, max_attempts,
                               timeout_s, meta, dedupe_key, dedupe_until, serialize_key, limit_key,
                               yields, batch_id)
        VALUES (coalesce(p_id, new_id()), p_queue, p_payload, p_kind, coalesce(p_priority, 0),
                v_run_at, p_expires_at, p_max_attempts, p_timeout_s, p_meta, v_key, v_until,
                p_serialize_key, p_limit_key, p_on_retry = 'yield', p_batch)
        ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead' DO NOTHING
        RETURNING j.id INTO id;
        IF FOUND THEN
            created := true;
            RETURN NEXT;
            RETURN;
        END IF;
        EXIT WHEN p_on_duplicate = 'raise';
        SELECT * INTO v_holder FROM jobs j
        WHERE j.queue = p_queue AND j.dedupe_key = item_key(p_batch, v_key) AND j.status <> 'dead';
        CONTINUE WHEN NOT FOUND;  -- it has ended in between
        id := v_holder.id;
        IF p_on_duplicate = 'skip' OR v_holder.status IN ('running', 'completed') THEN
            RETURN NEXT;
            RETURN;
        END IF;
        SELECT * INTO v_holder FROM jobs j
        WHERE j.id = v_holder.id AND j.status IN ('blocked', 'pending', 'failed') FOR UPDATE;
        CONTINUE WHEN NOT FOUND;  -- it has been claimed, or has ended
        IF p_on_duplicate = 'replace' THEN
            UPDATE jobs j
            SET payload = p_payload, kind = p_kind, priority = coalesce(p_priority, 0),
                expires_at = p_expires_at, max_attempts = p_max_attempts, timeout_s = p_timeout_s,
                meta = p_meta, dedupe_until = coalesce(v_until, j.dedupe_until)
            WHERE j.id = v_holder.id;
        END IF;
        PERFORM move(v_holder, v_run_at,
                     coalesce(p_priority, CASE p_on_duplicate WHEN 'replace' THEN 0
                                               ELSE v_holder.priority END));
        changed := true;
        RETURN NEXT;
        RETURN;
    END LOOP;
    RAISE EXCEPTION 'duplicate key value violates unique constraint "jobs_dedupe"'
        USING ERRCODE = 'unique_violation', SCHEMA = 'pgworkd', TABLE = 'jobs',
            CONSTRAINT = 'jobs_dedupe',
              DETAIL = format('Key (queue, dedupe_key)=(%s, %s) already exists.', p_queue,
                              item_key(p_batch, v_key)),
              HINT = 'p_on_duplicate says what else to do with such a job.';
END $$;
