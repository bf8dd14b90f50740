-- Operations on jobs and keys, each of which is written into `audit`, and the selection of jobs.

-- The actor, for the audit: p_by, else the session's (SET pgworkd.by), else its user and program.
CREATE OR REPLACE FUNCTION who(p_by text DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT left(coalesce(nullif(p_by, ''), nullif(current_setting('pgworkd.by', true), ''),
                         session_user ||
                             coalesce(' (' || nullif(current_setting('application_name'), '')
                                      || ')', '')), 200)
$$;

-- Those members of p_object that differ from those of p_from with the same name.
CREATE OR REPLACE FUNCTION differing(p_object jsonb, p_from jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_object_agg(m.key, m.value), '{}')
    FROM jsonb_each(p_object) m WHERE m.value IS DISTINCT FROM p_from -> m.key
$$;

-- Cancels: a waiting job ends now; a running one is marked, and its worker notified, which cancels
-- the handler and settles it. Returns 'cancelled' or 'requested' per job found; others have ended
-- or are unknown. A dead job has ended: retry() or discard() it. A request is in the audit already
-- when the engine carries it out here. Locks the jobs in order of id.
CREATE OR REPLACE FUNCTION cancel(p_ids uuid[], p_by text DEFAULT NULL)
RETURNS TABLE (id uuid, outcome text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_was     text;
    v_who     text := who(p_by);
    v_waiting uuid[];
    v_running uuid[];
BEGIN
    SELECT array_agg(x.id) FILTER (WHERE x.status <> 'running'), array_agg(x.id)
               FILTER (WHERE x.status = 'running')
    INTO v_waiting, v_running
    FROM (SELECT j.id, j.status FROM jobs j
          WHERE j.id = ANY (p_ids) AND j.status NOT IN ('completed', 'dead') ORDER BY j.id
          FOR UPDATE) x;
    v_was := set_no_wait('on');  -- the caller's transaction may last
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT v_who, 'cancel', j.queue, j.id,
           CASE WHEN j.status = 'running' THEN '{"cancel_requested_at": null}'
                ELSE jsonb_build_object('status', j.status) END,
           CASE WHEN j.status = 'running' THEN jsonb_build_object('cancel_requested_at', clock())
                ELSE '{"status": "cancelled"}' END
    FROM jobs j WHERE j.id = ANY (v_waiting || v_running) AND j.cancel_requested_at IS NULL
    ORDER BY j.id;
    UPDATE jobs j SET cancel_requested_at = coalesce(j.cancel_requested_at, clock())
        WHERE j.id = ANY (v_running);
    PERFORM archive(v_waiting, 'cancelled', NULL), set_no_wait(v_was);
    PERFORM pg_notify('pgworkd', jsonb_build_object('worker', w.worker_id)::text)
    FROM (SELECT DISTINCT j.worker_id FROM jobs j WHERE j.id = ANY (v_running)) w;
    RETURN QUERY SELECT u.id, 'cancelled' FROM unnest(v_waiting) AS u (id)
                 UNION ALL SELECT u.id, 'requested' FROM unnest(v_running) AS u (id);
END $$;

-- Runs jobs again: a dead one gets a fresh budget, one that waits for its retry runs now. Returns
-- the ids it changed. An occurrence that is run again leaves its schedule's chain, which has gone
-- on without it. A dead job of a finished batch reopens it and its tree; when that is finished
-- again, the matching one of on_complete and on_failure is inserted, unless it was before;
-- p_call_back: even then. A dead job of a cancelled batch is not changed: delete the batch first,
-- or enqueue another job. Raises 23505 if another job holds the dedupe key. Locks the jobs in
-- order of id, then the roots of their batches.
CREATE OR REPLACE FUNCTION retry(p_ids uuid[], p_by text DEFAULT NULL,
                                 p_call_back boolean DEFAULT false) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_who    text := who(p_by);
    v_ids    uuid[];
    v_queues text[];
BEGIN
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.id = ANY (p_ids) AND j.status IN ('dead', 'failed') ORDER BY j.id
                   FOR UPDATE);
    IF EXISTS (SELECT FROM jobs j WHERE j.id = ANY (v_ids) AND j.batch_id IS NOT NULL
                 AND j.status = 'dead') THEN
        v_ids := reopened(v_ids, p_call_back);
    END IF;
    -- what has held their keys for jobs that are over, and need not any longer
    DELETE FROM jobs d WHERE d.ctid = ANY (ARRAY(
        SELECT k.ctid FROM jobs j JOIN jobs k ON k.queue = j.queue AND k.dedupe_key = j.dedupe_key
        WHERE j.id = ANY (v_ids) AND j.status = 'dead' AND k.status = 'completed'
          AND k.dedupe_until <= clock()
        FOR UPDATE OF k SKIP LOCKED));
    WITH old AS MATERIALIZED (
        SELECT j.id,
               jsonb_build_object('status', j.status, 'failures', j.failures, 'losses', j.losses,
                                  'schedule', j.schedule, 'run_at', j.run_at,
                                  'cancel_requested_at', j.cancel_requested_at) AS facts
        FROM jobs j WHERE j.id = ANY (v_ids)
    ), changed AS (
        UPDATE jobs j
        SET failures = CASE WHEN j.status = 'dead' THEN 0 ELSE j.failures END,
            losses = CASE WHEN j.status = 'dead' THEN 0 ELSE j.losses END,
            schedule = CASE WHEN j.status = 'dead' THEN NULL ELSE j.schedule END,
            -- who waits for a retry and holds its key goes on holding it
            status = CASE WHEN j.status = 'failed' AND j.serialize_key IS NOT NULL
                          AND NOT j.yields THEN 'failed'
                          ELSE 'pending' END::job_status,
            -- one that is due already keeps its place: the others in its line wait behind it
            run_at = CASE WHEN j.status = 'dead' THEN clock() ELSE least(j.run_at, clock()) END,
            begun = CASE WHEN j.begun = 0 AND j.expires_at <= clock() THEN greatest(j.attempts, 1)
                         ELSE j.begun END,  -- it runs, although it is late
            cancel_requested_at = NULL
        WHERE j.id = ANY (v_ids)
        RETURNING j.id, j.queue,
                  jsonb_build_object('status', j.status, 'failures', j.failures, 'losses', j.losses,
                                     'schedule', j.schedule, 'run_at', j.run_at,
                                     'cancel_requested_at', j.cancel_requested_at) AS facts
    ), noted AS (
        INSERT INTO audit (who, what, queue, job_id, before, after)
        SELECT v_who, 'retry', c.queue, c.id, differing(o.facts, c.facts),
               differing(c.facts, o.facts)
        FROM changed c JOIN old o ON o.id = c.id WHERE o.facts <> c.facts ORDER BY c.id
    )
    SELECT array_agg(DISTINCT c.queue::text) INTO v_queues FROM changed c;
    PERFORM wake(v_queues);
    RETURN v_ids;
END $$;

-- Moves dead jobs to finished_jobs, where they end as `dead`. Returns how many. Locks them in
-- order of id.
CREATE OR REPLACE FUNCTION discard(p_ids uuid[], p_by text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_was   text;
    v_count int;
    v_who text := who(p_by);
    v_ids uuid[] := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead'
                          ORDER BY j.id FOR UPDATE);
BEGIN
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT v_who, 'discard', j.queue, j.id, '{"finished_at": null}',
           jsonb_build_object('finished_at', clock())
    FROM jobs j WHERE j.id = ANY (v_ids) ORDER BY j.id;
    v_was := set_no_wait('on');  -- as in cancel()
    v_count := archive(v_ids, 'dead', NULL);
    PERFORM set_no_wait(v_was);
    RETURN v_count;
END $$;

-- Changes payload, run_at or priority of a waiting job. Returns what is different now, an empty
-- object if nothing is. A blocked job takes its new place in line when its run_at changes. Raises
-- PW002 for a job that does not wait. Locks the job, then as promote().
CREATE OR REPLACE FUNCTION edit(p_id uuid, p_payload jsonb DEFAULT NULL,
                                p_run_at timestamptz DEFAULT NULL, p_priority int DEFAULT NULL,
                                p_by text DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_was    text;
    v_old    jobs;
    v_new    jobs;
    v_status text;
    v_before jsonb;
    v_after  jsonb;
BEGIN
    IF num_nonnulls(p_payload, p_run_at, p_priority) = 0 THEN
        RAISE EXCEPTION 'nothing to edit' USING ERRCODE = '22023',
            HINT = 'Give a payload, a run_at or a priority.';
    END IF;
    SELECT * INTO v_old FROM jobs j WHERE j.id = p_id FOR UPDATE;
    v_status := coalesce(nullif(v_old.status::text, 'completed'),  -- such a row only keeps a key
                         (SELECT f.status::text FROM finished_of(ARRAY[p_id]) f LIMIT 1),
                         v_old.status::text, 'unknown');
    IF v_status NOT IN ('blocked', 'pending', 'failed') THEN
        RAISE EXCEPTION 'job % is %, only a waiting job can be edited', p_id, v_status
            USING ERRCODE = 'PW002',
            HINT = CASE
                WHEN v_status = 'running'
                    THEN 'Cancel it and enqueue a new one, or edit it when it waits for a retry.'
                WHEN v_old.status = 'dead'
                    THEN 'Pause its queue, retry the job, edit it while it waits, '
                         'resume the queue.'
                WHEN v_status = 'unknown'
                    THEN 'Check the id: it may no longer be in the history.'
                ELSE 'It has ended: enqueue a new one.' END;
    END IF;
    UPDATE jobs j
    SET payload = coalesce(p_payload, j.payload), run_at = coalesce(p_run_at, j.run_at),
        priority = coalesce(p_priority, j.priority),
        status = CASE WHEN j.status = 'blocked' AND j.waiting_on = 0 AND j.run_at <> p_run_at
                      THEN 'pending' ELSE j.status END
    WHERE j.id = p_id
    RETURNING j.* INTO v_new;
    v_before := jsonb_build_object('payload', v_old.payload, 'run_at', v_old.run_at, 'priority',
                                   v_old.priority, 'status', v_old.status);
    v_after := jsonb_build_object('payload', v_new.payload, 'run_at', v_new.run_at, 'priority',
                                  v_new.priority, 'status', v_new.status);
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT who(p_by), 'edit', v_new.queue, p_id, differing(v_before, v_after),
           differing(v_after, v_before)
    WHERE v_before <> v_after;
    IF (v_new.run_at, v_new.priority) <> (v_old.run_at, v_old.priority) THEN
        -- claims may be past its new place
        PERFORM wake(ARRAY[v_new.queue::text], v_new.run_at, true);
    END IF;
    IF v_new.run_at <> v_old.run_at AND v_new.serialize_key IS NOT NULL THEN
        v_was := set_no_wait('on');  -- as in cancel()
        PERFORM promote(ARRAY[coalesce(v_new.serialize_scope, v_new.queue)::text],
                        ARRAY[v_new.serialize_key::text]), set_no_wait(v_was);
    END IF;
    RETURN differing(v_after, v_before);
END $$;

-- Frees the dedupe_key that an ended job keeps: see kept_keys. False: no ended job keeps it; the
-- key of a live job is not freed. Locks the row that keeps the key.
CREATE OR REPLACE FUNCTION free_key(p_queue text, p_key text, p_by text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_kept jobs;
BEGIN
    DELETE FROM jobs j  -- CASE: as in jobs_key_wanted()
    WHERE j.queue = p_queue AND j.dedupe_key = p_key AND j.status <> 'dead'
      AND CASE WHEN j.status = 'completed' THEN j.dedupe_until > clock() ELSE false END
    RETURNING j.* INTO v_kept;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO audit (who, what, queue, job_id, before, after)
    VALUES (who(p_by), 'free_key', v_kept.queue, v_kept.id,
            jsonb_build_object('dedupe_key', v_kept.dedupe_key, 'dedupe_until',
                               v_kept.dedupe_until), '{"dedupe_key": null, "dedupe_until": null}');
    RETURN true;
END $$;

-- The same for the key of finished trees of batches, in each queue; p_name: of their roots. False:
-- no such tree keeps it; the key of an unfinished one is not freed. Locks the roots.
CREATE OR REPLACE FUNCTION free_batch_key(p_name text, p_key text, p_by text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_kept  batches;
    v_found boolean := false;
BEGIN
    FOR v_kept IN
        SELECT b.* FROM batches b
        WHERE b.parent_id IS NULL AND b.name = p_name AND b.dedupe_key = p_key
          AND b.tree_finished_at IS NOT NULL AND b.dedupe_until > clock()
        ORDER BY b.id FOR NO KEY UPDATE
    LOOP
        UPDATE batches b SET dedupe_until = NULL WHERE b.id = v_kept.id;
        INSERT INTO audit (who, what, queue, before, after)
        VALUES (who(p_by), 'free_key', v_kept.queue,
                jsonb_build_object('batch', v_kept.id, 'dedupe_key', v_kept.dedupe_key,
                                   'dedupe_until', v_kept.dedupe_until),
                jsonb_build_object('batch', v_kept.id, 'dedupe_key', NULL, 'dedupe_until', NULL));
        v_found := true;
    END LOOP;
    RETURN v_found;
END $$;

-- Writes every change of a queue's settings, pauses too, into the audit, whoever makes it. A queue
-- without a row has no settings. Those of the scratch queues of `pgworkd bench` are left out, as
-- nothing remains of these. Locks nothing.
CREATE OR REPLACE FUNCTION queues_audit() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_none   jsonb := to_jsonb(jsonb_populate_record(
        NULL::queues, jsonb_build_object('name', coalesce(NEW.name, OLD.name), 'fair', false)));
    v_before jsonb := coalesce(to_jsonb(OLD), v_none) - '{updated_at,limited}'::text[];
    v_after  jsonb := coalesce(to_jsonb(NEW), v_none) - '{updated_at,limited}'::text[];
BEGIN
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(), 'queue', v_after ->> 'name', differing(v_before, v_after),
           differing(v_after, v_before)
    WHERE v_before <> v_after AND v_after ->> 'name' !~ '^pgworkd-bench-[0-9a-f]{12}$';
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER queues_audit AFTER INSERT OR UPDATE OR DELETE ON queues
    FOR EACH ROW EXECUTE FUNCTION queues_audit();

-- Finds the jobs that match all that is given, for operations on many in short transactions: up to
-- p_limit ids (10,000 at most) in their order, behind p_after. `last`: where to go on; NULL: that
-- was all. There may be a `last` without any id: a call reads 100,000 rows at most. p_what is the
-- operation: 'cancel' finds waiting and running jobs, 'retry' and 'discard' dead ones, unless
-- p_status says which. p_key is any of a job's three keys, p_group the number of a group of errors.
-- Without queue, kind, key, batch and group nothing is found unless p_all. If an index has at most
-- 10,000 candidates it is used, else the primary key is walked. Locks nothing.
CREATE OR REPLACE FUNCTION matching(p_what text, p_queue text DEFAULT NULL,
                                    p_kind text DEFAULT NULL, p_key text DEFAULT NULL,
                                    p_batch uuid DEFAULT NULL, p_status text DEFAULT NULL,
                                    p_after uuid DEFAULT NULL, p_limit int DEFAULT 1000,
                                    p_all boolean DEFAULT false, p_group bigint DEFAULT NULL,
                                    OUT ids uuid[], OUT last uuid)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_allowed  text[] := CASE p_what WHEN 'cancel' THEN '{blocked,pending,failed,running}'
                                     WHEN 'retry' THEN '{dead,failed}'
                                     WHEN 'discard' THEN '{dead}' END;
    v_statuses job_status[];
    v_from     uuid := coalesce(p_after, '00000000-0000-0000-0000-000000000000');
    v_limit    int := least(greatest(p_limit, 1), 10000);
    -- all that may match, if an index knows and they are few
    v_few      uuid[];
BEGIN
    IF v_allowed IS NULL THEN
        RAISE EXCEPTION 'p_what is %', quote_nullable(p_what)
            USING ERRCODE = '22023', HINT = 'Give cancel, retry or discard.';
    ELSIF p_status <> ALL (v_allowed) THEN
        RAISE EXCEPTION 'cannot % a job whose status is %', p_what, p_status
            USING ERRCODE = '22023',
            HINT = 'p_status is one of ' || array_to_string(v_allowed, ', ') || ', or NULL.'
                || CASE WHEN p_what = 'cancel' AND p_status = 'dead'
                        THEN ' Dead jobs have ended: discard() them.' ELSE '' END;
    ELSIF NOT p_all AND num_nonnulls(p_queue, p_kind, p_key, p_batch, p_group) = 0 THEN
        RAISE EXCEPTION 'nothing says which jobs to %', p_what USING ERRCODE = '22023',
            HINT = 'Give a queue, kind, key or batch, or p_all => true for the jobs of all queues.';
    END IF;
    v_statuses := CASE WHEN p_status IS NOT NULL THEN ARRAY[p_status]
                       WHEN p_what = 'cancel' THEN v_allowed
                       ELSE '{dead}' END;
    IF p_group IS NOT NULL THEN
        v_few := ARRAY(SELECT d.job_id FROM deaths d WHERE d.group_id = p_group LIMIT 10001);
    ELSIF p_batch IS NOT NULL THEN
        v_few := ARRAY(SELECT j.id FROM jobs j WHERE j.batch_id = p_batch LIMIT 10001);
    ELSIF v_statuses = '{dead}' THEN
        v_few := ARRAY(SELECT j.id FROM jobs j
                       WHERE j.status = 'dead' AND (p_queue IS NULL OR j.queue = p_queue)
                       LIMIT 10001);
    ELSIF v_statuses = '{running}' THEN
        v_few := ARRAY(SELECT j.id FROM jobs j
                       WHERE j.status = 'running' AND (p_queue IS NULL OR j.queue = p_queue)
                       LIMIT 10001);
    ELSIF p_queue IS NOT NULL AND p_key IS NOT NULL THEN
        v_few := ARRAY(SELECT k.id FROM (
            SELECT j.id FROM jobs j WHERE coalesce(j.serialize_scope, j.queue) = scope_of(p_queue)
                AND j.serialize_key = p_key AND j.queue = p_queue AND j.waiting_on = 0
              AND j.status IN ('blocked', 'pending', 'failed')
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on > 0
                AND p_key IN (j.serialize_key, j.limit_key)
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.dedupe_key = p_key
                AND j.status <> 'dead'
            UNION ALL
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_keyed(j) AND coalesce(j.limit_key::text, '') = p_key
            UNION ALL
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_suspect(j) AND j.limit_key = p_key
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on = 0
                AND j.status = 'blocked' AND j.limit_key = p_key
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.status = 'running'
                AND (j.serialize_key = p_key OR j.limit_key = p_key)
        ) k LIMIT 10001);
    ELSIF p_queue IS NOT NULL THEN
        v_few := ARRAY(SELECT k.id FROM (
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_plain(j)
            UNION ALL
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_keyed(j)
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND waits_suspect(j)
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on = 0
                AND j.status = 'blocked'
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on > 0
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.status = 'running'
        ) k LIMIT 10001);
    END IF;

    IF cardinality(v_few) <= 10000 THEN
        ids := ARRAY(
            SELECT j.id FROM jobs j
            WHERE j.id = ANY (v_few) AND j.id >= v_from AND j.id IS DISTINCT FROM p_after
              AND j.status = ANY (v_statuses)
              AND (p_queue IS NULL OR j.queue = p_queue)
              AND (p_kind IS NULL OR coalesce(j.kind, j.queue) = p_kind)
              AND (p_key IS NULL OR p_key IN (j.serialize_key, j.limit_key, j.dedupe_key))
              AND (p_batch IS NULL OR j.batch_id = p_batch)
              AND (p_group IS NULL OR EXISTS (SELECT FROM deaths d WHERE d.job_id = j.id
                       AND d.attempt = j.attempts AND d.group_id = p_group))
            ORDER BY j.id LIMIT v_limit);
        last := ids[v_limit];
    ELSE
        ids := ARRAY(
            SELECT j.id
            FROM (SELECT w.id, w.queue, w.kind, w.status, w.serialize_key, w.limit_key,
                  w.dedupe_key, w.batch_id, w.attempts FROM jobs w
                  WHERE w.id >= v_from AND w.id IS DISTINCT FROM p_after ORDER BY w.id
                  LIMIT 100000) j
            WHERE j.status = ANY (v_statuses)
              AND (p_queue IS NULL OR j.queue = p_queue)
              AND (p_kind IS NULL OR coalesce(j.kind, j.queue) = p_kind)
              AND (p_key IS NULL OR p_key IN (j.serialize_key, j.limit_key, j.dedupe_key))
              AND (p_batch IS NULL OR j.batch_id = p_batch)
              AND (p_group IS NULL OR EXISTS (SELECT FROM deaths d WHERE d.job_id = j.id
                       AND d.attempt = j.attempts AND d.group_id = p_group))
            ORDER BY j.id LIMIT v_limit);
        last := coalesce(ids[v_limit], (SELECT j.id FROM jobs j
                                        WHERE j.id >= v_from AND j.id IS DISTINCT FROM p_after
                                        ORDER BY j.id OFFSET 99999 LIMIT 1));
    END IF;
END $$;
