-- Effects of a job's end that are deferred: in a transaction that must not wait, what meets a lock
-- is written into pending_effects and applied soon after.

-- Consequences of a job's end that were deferred, because another transaction had locked what they
-- change, or because too many jobs depend on it. A row is one of: an end to count in its batch, an
-- end to pass on to dependents, a serialize_key that became free. apply_effects(), or the next
-- holder of the batch's tree, applies it and deletes the row; nothing else may delete one.
CREATE TABLE IF NOT EXISTS pending_effects (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    batch_id uuid, ended ended_job,  -- with payload and result where the batch needs them
    job_id uuid, completed boolean,  -- false: it is dead, cancelled or expired
    queue text, serialize_key text,
    put_off_at   timestamptz NOT NULL DEFAULT clock(),
    done_to      uuid,               -- the dependents of job_id up to this one were processed
    left_behind  boolean NOT NULL DEFAULT false  -- some were locked, or refused: another round
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX IF NOT EXISTS pending_effects_batch ON pending_effects (batch_id)
    WHERE batch_id IS NOT NULL;

-- Defers effects to apply_effects(), and notifies daemons. p_queues and p_keys are parallel. Locks
-- nothing.
CREATE OR REPLACE FUNCTION put_off(p_ended ended_job[], p_jobs uuid[] DEFAULT NULL,
                                   p_completed boolean DEFAULT NULL, p_queues text[] DEFAULT NULL,
                                   p_keys text[] DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO pending_effects (batch_id, ended, job_id, completed, queue, serialize_key)
    SELECT e.batch_id, e, NULL::uuid, NULL::boolean, NULL::text, NULL::text FROM unnest(p_ended) e
    UNION ALL
    SELECT NULL, NULL, u.id, p_completed, NULL, NULL FROM unnest(p_jobs) AS u (id)
    UNION ALL
    SELECT NULL, NULL, NULL, NULL, k.queue, k.key
    FROM (SELECT DISTINCT u.queue, u.key FROM unnest(p_queues, p_keys) AS u (queue, key)) k;
    IF FOUND
       AND coalesce(current_setting('pgworkd.no_wait', true), '') NOT IN ('apply', 'frees') THEN
        PERFORM pg_notify('pgworkd', '{"effects": true}');
    END IF;
END $$;

-- One part of apply_effects(): passes ends of jobs on to up to p_limit of the jobs that depend on
-- them, in order of id from where the last call stopped; true if the next call can go on at once.
-- Releases them, or cancels them if that is their rule. Dependents that are locked, or refused,
-- are retried in another round, which is not begun at once unless something was done. A dead job
-- that was retried meanwhile has not ended: jobs that wait for it go on waiting. Each effect that
-- was begun goes to the end of the line, so that none waits for a large one. The caller has set
-- no_wait(). Locks dependents with SKIP LOCKED, then as archive().
CREATE OR REPLACE FUNCTION apply_ends(p_limit int) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_effect  pending_effects;
    v_page    record;
    v_one     uuid[];                            -- its job
    v_room    int := p_limit;
    -- begun here, and up to which dependent: NULL if to the last
    v_effects bigint[] := '{}';
    v_to      uuid[] := '{}';
    v_of      bigint[] := '{}';                  -- what there is to do: parallel
    v_ids     uuid[] := '{}';
    v_jobs    uuid[] := '{}';
    v_well    uuid[] := '{}';
    v_badly   uuid[] := '{}';
    v_doomed  uuid[] := '{}';                    -- of v_jobs
    v_free    uuid[];
    v_done    boolean;
    v_rounds  boolean;                           -- another one is to begin
BEGIN
    FOR v_effect IN SELECT p.* FROM pending_effects p WHERE p.job_id IS NOT NULL ORDER BY p.id
        LIMIT p_limit LOOP
        EXIT WHEN v_room = 0;
        -- as an array it keeps the planner off the index on job_id alone
        v_one := ARRAY[v_effect.job_id];
        -- That it is not retried is looked up in the same statement: who can wait for its next end
        -- is not seen then.
        SELECT coalesce(array_agg(d.job_id)
                        FILTER (WHERE v_effect.completed
                                   OR d.on_failed_dependency <> 'wait'), '{}') AS jobs,
               coalesce(array_agg(d.job_id)
                        FILTER (WHERE NOT v_effect.completed
                                  AND d.on_failed_dependency = 'cancel'), '{}') AS doomed,
               (array_agg(d.job_id ORDER BY d.job_id DESC))[1] AS last, count(*)::int AS count
        INTO v_page
        FROM (SELECT w.job_id, w.on_failed_dependency FROM job_dependencies w
              WHERE w.depends_on = ANY (v_one)
                AND w.job_id > coalesce(v_effect.done_to, '00000000-0000-0000-0000-000000000000')
                AND (v_effect.completed
                     OR NOT EXISTS (SELECT FROM jobs j WHERE j.id = v_effect.job_id
                                      AND j.status IN ('blocked', 'pending', 'running', 'failed'))
                        AND NOT EXISTS (SELECT FROM pending_effects p
                                        WHERE p.job_id = v_effect.job_id AND p.completed))
              ORDER BY w.depends_on, w.job_id LIMIT v_room) d;
        v_effects := v_effects || v_effect.id;
        v_to := array_append(v_to, CASE WHEN v_page.count = v_room THEN v_page.last END);
        v_of := v_of || array_fill(v_effect.id, ARRAY[cardinality(v_page.jobs)]);
        v_ids := v_ids || array_fill(v_effect.job_id, ARRAY[cardinality(v_page.jobs)]);
        v_jobs := v_jobs || v_page.jobs;
        v_doomed := v_doomed || v_page.doomed;
        IF v_effect.completed THEN
            v_well := v_well || v_effect.job_id;
        -- else it may be one that was retried, for which others of v_jobs wait, too
        ELSIF v_page.count > 0 THEN
            v_badly := v_badly || v_effect.job_id;
        END IF;
        v_room := v_room - v_page.count;
    END LOOP;
    v_free := ARRAY(SELECT u FROM unnest(v_jobs) u EXCEPT SELECT u FROM unnest(v_doomed) u);
    v_free := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_free) AND j.waiting_on > 0
                    FOR UPDATE SKIP LOCKED);
    v_done := EXISTS (SELECT FROM in_parts('apply_effects', v_free::text[],
                                           'count_down(uuid[], jsonb)',
                                           jsonb_build_object('well', v_well, 'badly', v_badly)));
    IF cardinality(v_doomed) > 0 THEN
        v_free := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_doomed) AND j.waiting_on > 0
                        FOR UPDATE SKIP LOCKED);
        v_done := EXISTS (SELECT FROM in_parts('apply_effects', v_free::text[],
                                               'cancel_dependents(uuid[])')) OR v_done;
    END IF;
    WITH waits AS MATERIALIZED (
        SELECT DISTINCT u.effect FROM unnest(v_of, v_ids, v_jobs) AS u (effect, id, job)
        WHERE EXISTS (SELECT FROM job_dependencies d WHERE d.depends_on = u.id AND d.job_id = u.job)
          AND EXISTS (SELECT FROM jobs j WHERE j.id = u.job AND j.waiting_on > 0)
    ), begun AS (
        DELETE FROM pending_effects p WHERE p.id = ANY (v_effects) RETURNING p.*
    ), again AS (
        INSERT INTO pending_effects (job_id, completed, put_off_at, done_to, left_behind)
        SELECT b.job_id, b.completed, b.put_off_at, u.done_to, u.done_to IS NOT NULL
            AND (b.left_behind OR w.effect IS NOT NULL)
        FROM begun b JOIN unnest(v_effects, v_to) AS u (id, done_to) ON u.id = b.id
        LEFT JOIN waits w ON w.effect = b.id
        WHERE u.done_to IS NOT NULL OR b.left_behind OR w.effect IS NOT NULL
        ORDER BY b.id
        RETURNING done_to
    )
    SELECT coalesce(bool_or(a.done_to IS NULL), false) INTO v_rounds FROM again a;
    RETURN v_room = 0 AND (v_done OR NOT v_rounds);
END $$;

-- The same for serialize_keys that became free. The caller has locked the queues. Locks as
-- promote().
CREATE OR REPLACE FUNCTION apply_frees(p_effects bigint[]) RETURNS void
LANGUAGE sql VOLATILE AS $$
    WITH gone AS (
        DELETE FROM pending_effects p WHERE p.id = ANY (p_effects)
            RETURNING p.queue, p.serialize_key
    )
    SELECT promote(array_agg(g.queue), array_agg(g.serialize_key)) FROM gone g HAVING count(*) > 0
$$;

-- Applies what was deferred, up to p_limit of each kind, where it is no longer locked. Returns how
-- much is left, less than 0 if the next call can go on at once, or NULL if another session is
-- doing it. Never waits. Locks queues by try-lock, then roots and dependents with SKIP LOCKED.
CREATE OR REPLACE FUNCTION apply_effects(p_limit int DEFAULT 1000) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_rows    bigint[];
    v_queues  text[];
    v_batches uuid[];
    v_more    boolean;
BEGIN
    IF NOT EXISTS (SELECT FROM pending_effects) THEN
        RETURN 0;
    ELSIF NOT pg_try_advisory_xact_lock(1886873445, 7) THEN
        RETURN NULL;
    END IF;
    PERFORM set_no_wait('apply');
    v_batches := free_batches(ARRAY(SELECT DISTINCT x.batch_id FROM (
        SELECT p.batch_id FROM pending_effects p
        WHERE p.batch_id IS NOT NULL
          AND NOT is_refused('apply_effects', p.batch_id::text)
        ORDER BY p.id LIMIT p_limit) x));
    PERFORM in_parts('apply_effects', v_batches::text[], 'fold(uuid[])');
    v_more := apply_ends(p_limit);
    -- Last, so that no queue is held for longer than this takes.
    SELECT array_agg(q.queue)
               FILTER (WHERE pg_try_advisory_xact_lock(1886873446, hashtext(q.queue))) INTO v_queues
    FROM (SELECT DISTINCT p.queue FROM pending_effects p WHERE p.queue IS NOT NULL) q;
    v_rows := ARRAY(
        SELECT p.id FROM pending_effects p
        WHERE p.queue = ANY (v_queues)
          AND NOT is_refused('apply_effects', p.id::text)
        ORDER BY p.id LIMIT p_limit);
    PERFORM set_no_wait('frees');  -- the queues are locked
    PERFORM in_parts('apply_effects', v_rows::text[], 'apply_frees(bigint[])');
    PERFORM set_no_wait('');
    RETURN (SELECT count(*) FROM (SELECT FROM pending_effects LIMIT 10000) x) *
        CASE WHEN v_more THEN -1 ELSE 1 END;
END $$;
