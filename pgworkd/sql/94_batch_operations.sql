-- Batches: cancelling, deleting, reopening, and the maintenance of those whose counters were
-- missed.

-- Marks these batches and all below them as cancelled, unless they are finished; returns their
-- ids. The caller holds the roots.
CREATE OR REPLACE FUNCTION cancel_below(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_below uuid[] := with_below(p_batches);
BEGIN
    WITH marked AS (
        UPDATE batches b SET cancelled_at = coalesce(b.cancelled_at, clock()),
            sealed_at = coalesce(b.sealed_at, clock())
        WHERE b.id = ANY (v_below) AND CASE WHEN b.finished_at IS NULL THEN true ELSE false END
        RETURNING b.id
    )
    SELECT coalesce(array_agg(m.id), '{}') INTO v_below FROM marked m;
    RETURN v_below;
END $$;

-- These batches and all below them, level by level: for a recursive query the planner expects a
-- great many rows.
CREATE OR REPLACE FUNCTION with_below(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_level uuid[] := p_batches;
    v_all   uuid[] := p_batches;
BEGIN
    FOR i IN 1..32 LOOP
        v_level := ARRAY(SELECT c.id FROM batches c WHERE c.parent_id = ANY (v_level));
        EXIT WHEN cardinality(v_level) = 0;
        v_all := v_all || v_level;
    END LOOP;
    RETURN v_all;
END $$;

-- Requests cancellation of running jobs of cancelled batches, and locks waiting ones, which the
-- caller is to archive(), up to p_limit in all; without p_keyed only such as have no serialize_key.
-- The caller holds the roots. Locks the jobs with SKIP LOCKED.
CREATE OR REPLACE FUNCTION stop_jobs(p_batches uuid[], p_limit int, p_keyed boolean,
                                     OUT waiting uuid[], OUT running uuid[])
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    SELECT coalesce(array_agg(x.id) FILTER (WHERE x.status <> 'running'), '{}'),
           coalesce(array_agg(x.id) FILTER (WHERE x.status = 'running'), '{}')
    INTO waiting, running
    FROM (SELECT j.id, j.status FROM jobs j
          WHERE j.batch_id = ANY (p_batches)
            AND j.status IN ('blocked', 'pending', 'running', 'failed')
            AND CASE j.status WHEN 'running' THEN j.cancel_requested_at IS NULL
                              ELSE p_keyed OR j.serialize_key IS NULL END
          LIMIT p_limit FOR UPDATE SKIP LOCKED) x;
    UPDATE jobs j SET cancel_requested_at = clock() WHERE j.id = ANY (running);
    PERFORM pg_notify('pgworkd', jsonb_build_object('worker', w.worker_id)::text)
    FROM (SELECT DISTINCT j.worker_id FROM jobs j WHERE j.id = ANY (running)) w;
END $$;

-- Dead jobs that are to run again: counts them as live again, reopens those of their batches that
-- are finished, with what streams from these, and their trees, and returns p_jobs without those
-- whose batch is cancelled. p_call_back: a callback that was inserted before is inserted again. A
-- tree whose dedupe_key another one has by now goes on without it. The caller holds the jobs.
-- Locks the roots.
CREATE OR REPLACE FUNCTION reopened(p_jobs uuid[], p_call_back boolean) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_jobs  uuid[];
    v_level uuid[];
BEGIN
    PERFORM lock_trees_of(p_jobs);
    v_jobs := ARRAY(
        SELECT j.id FROM jobs j LEFT JOIN batches b ON b.id = j.batch_id
        WHERE j.id = ANY (p_jobs) AND (j.status <> 'dead' OR b.cancelled_at IS NULL)
        ORDER BY j.id);
    UPDATE batches b SET dead = greatest(b.dead - n.dead, 0)
    FROM (SELECT j.batch_id, count(*) AS dead FROM jobs j
          WHERE j.id = ANY (v_jobs) AND j.status = 'dead' AND j.batch_id IS NOT NULL
          GROUP BY j.batch_id) n
    WHERE b.id = n.batch_id;
    v_level := ARRAY(SELECT b.id FROM batches b
                     WHERE b.finished_at IS NOT NULL AND b.id = ANY (ARRAY(
        SELECT j.batch_id FROM jobs j WHERE j.id = ANY (v_jobs) AND j.status = 'dead'
            AND j.batch_id IS NOT NULL)));
    UPDATE batches r
    SET tree_finished_at = NULL,
        completed_called = r.completed_called AND NOT p_call_back, failure_called = r.failure_called
            AND NOT p_call_back,
        dedupe_key = CASE WHEN o.taken THEN NULL ELSE r.dedupe_key END, dedupe_until =
            CASE WHEN o.taken THEN NULL ELSE r.dedupe_until END
    FROM batches s, LATERAL (SELECT EXISTS (
        SELECT FROM batches t WHERE t.parent_id IS NULL AND t.name = s.name
            AND t.dedupe_key = s.dedupe_key AND t.id <> s.id
          AND (t.tree_finished_at IS NULL OR t.dedupe_until IS NOT NULL)) AS taken) o
    WHERE r.id = ANY (ARRAY(SELECT DISTINCT b.root_id FROM batches b WHERE b.id = ANY (v_level)))
      AND s.id = r.id
      AND r.tree_finished_at IS NOT NULL;
    UPDATE batches b SET finished_at = NULL WHERE b.id = ANY (v_level);
    FOR i IN 1..32 LOOP  -- what completes now has to be streamed on
        v_level := ARRAY(SELECT c.id FROM batches c
                         WHERE c.parent_id = ANY (v_level) AND c.stream AND c.cancelled_at IS NULL);
        EXIT WHEN cardinality(v_level) = 0;
        UPDATE batches b SET finished_at = NULL, sealed_at = NULL WHERE b.id = ANY (v_level);
    END LOOP;
    RETURN v_jobs;
END $$;

-- Cancels a batch and all below it: they take nothing more; waiting jobs end now, up to p_limit,
-- and running ones are requested to stop. `more`: call again, or leave the rest to maintenance. A
-- finished batch is not changed. Raises PW003 if there is no such batch. Locks the root, then jobs
-- with SKIP LOCKED, then as promote().
CREATE OR REPLACE FUNCTION cancel_batch(p_batch uuid, p_limit int DEFAULT 1000,
                                        p_by text DEFAULT NULL, OUT cancelled int,
                                        OUT requested int, OUT more boolean)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_was   text;
    v_batch batches;
    v_below uuid[];
    v_jobs  record;
BEGIN
    PERFORM lock_trees(ARRAY[p_batch]);
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch
            USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    END IF;
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(p_by), 'cancel_batch', v_batch.queue,
           jsonb_build_object('batch', p_batch, 'cancelled_at', NULL),
           jsonb_build_object('batch', p_batch, 'cancelled_at', clock())
    WHERE v_batch.cancelled_at IS NULL AND v_batch.finished_at IS NULL;
    v_below := cancel_below(ARRAY[p_batch]);
    SELECT s.waiting, s.running INTO v_jobs
    FROM stop_jobs(v_below, least(greatest(p_limit, 1), 10000), true) s;
    v_was := set_no_wait('on');  -- as in cancel()
    cancelled := archive(v_jobs.waiting, 'cancelled', 'its batch was cancelled', false);
    requested := cardinality(v_jobs.running);
    PERFORM fold(v_below);
    PERFORM advance(v_below, true);
    PERFORM set_no_wait(v_was);
    more := EXISTS (SELECT FROM jobs j WHERE j.batch_id = ANY (v_below)
                      AND (j.status IN ('blocked', 'pending', 'failed')
                           OR j.status = 'running' AND j.cancel_requested_at IS NULL));
END $$;

-- A batch of a finished tree. Raises PW003 if there is no such batch, or its tree is not finished.
-- Locks the root.
CREATE OR REPLACE FUNCTION of_finished_tree(p_batch uuid) RETURNS batches
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batch batches;
BEGIN
    PERFORM lock_trees(ARRAY[p_batch]);
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch
            USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    ELSIF EXISTS (SELECT FROM batches r
                  WHERE r.id = v_batch.root_id AND r.tree_finished_at IS NULL) THEN
        RAISE EXCEPTION 'batch % (%) belongs to a tree that is not finished', p_batch, v_batch.name
            USING ERRCODE = 'PW003',
            HINT = 'Cancel the tree first, or with this call (--cancel, ?cancel=true).';
    END IF;
    RETURN v_batch;
END $$;

-- Deletes up to p_limit jobs of a batch of a finished tree, and of all below it, from the history,
-- dead ones, too; returns how many: 0 when none is left. With the owner's rights, for the gateway's
-- role. Raises as of_finished_tree(). Locks the root, dead jobs in order of id, then rows of the
-- history with SKIP LOCKED.
CREATE OR REPLACE FUNCTION delete_items(p_batch uuid, p_limit int DEFAULT 1000,
                                        p_by text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batch batches := of_finished_tree(p_batch);
    v_below uuid[] := with_below(ARRAY[p_batch]);
    v_limit int := least(greatest(p_limit, 1), 10000);
    v_gone  int;
BEGIN
    PERFORM discard(ARRAY(SELECT j.id FROM jobs j WHERE j.batch_id = ANY (v_below)
                            AND j.status = 'dead' LIMIT v_limit), p_by);
    WITH gone AS (
        DELETE FROM finished_jobs f USING (
            SELECT o.id, o.finished_at FROM finished_jobs o WHERE o.batch_id = ANY (v_below)
            LIMIT v_limit FOR UPDATE SKIP LOCKED) d
        WHERE f.id = d.id AND f.finished_at = d.finished_at RETURNING 1)
    SELECT count(*) INTO v_gone FROM gone;
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(p_by), 'delete_batch', v_batch.queue,
           jsonb_build_object('batch', p_batch, 'items', v_gone),
           jsonb_build_object('batch', p_batch, 'items', NULL)
    WHERE v_gone > 0;
    RETURN v_gone;
END $$;

-- Deletes a batch and all below it from a finished tree; returns how many. Their dead jobs stay,
-- and can be retried: they belong to no tree any more. Raises and locks as of_finished_tree().
CREATE OR REPLACE FUNCTION delete_batch(p_batch uuid, p_by text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batch batches := of_finished_tree(p_batch);
    v_gone  int;
BEGIN
    INSERT INTO audit (who, what, queue, before, after)
    VALUES (who(p_by), 'delete_batch', v_batch.queue,
            jsonb_build_object('batch', p_batch, 'name', v_batch.name),
            jsonb_build_object('batch', p_batch, 'name', NULL));
    DELETE FROM batches b WHERE b.id = ANY (with_below(ARRAY[p_batch]));
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;

-- One part of mend_batches(), which has locked the roots of these batches. Locks those jobs with
-- SKIP LOCKED.
CREATE OR REPLACE FUNCTION mend_these(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_jobs uuid[];
BEGIN
    PERFORM fold(p_batches);
    SELECT s.waiting INTO v_jobs
    FROM stop_jobs(ARRAY(SELECT b.id FROM batches b
                         WHERE b.id = ANY (p_batches) AND b.cancelled_at IS NOT NULL), 10000,
                             true) s;
    PERFORM advance(p_batches, true);
    RETURN v_jobs;
END $$;

-- Finishes batches that were missed: a transaction that was adding when the last job ended rolled
-- back, or rows were deleted by hand. Returns waiting jobs of cancelled batches, up to 10,000, for
-- the caller to archive(); it has locked them. Locks roots, in order, then those jobs, all with
-- SKIP LOCKED.
CREATE OR REPLACE FUNCTION mend_batches() RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batches uuid[] := free_batches(ARRAY(
        SELECT a.batch_id FROM batch_additions a WHERE a.seals
        UNION
        SELECT b.id FROM batches b
        WHERE b.sealed_at IS NOT NULL AND b.finished_at IS NULL
          AND (b.cancelled_at IS NOT NULL
               OR (SELECT true FROM jobs j WHERE j.batch_id = b.id
                     AND j.status IN ('blocked', 'pending', 'running', 'failed') LIMIT 1) IS NULL)
        UNION
        SELECT r.id FROM batches r
        WHERE r.parent_id IS NULL AND r.finished_at IS NOT NULL AND r.tree_finished_at IS NULL
          AND (SELECT true FROM batches b WHERE b.root_id = r.id AND b.finished_at IS NULL
               LIMIT 1) IS NULL));
BEGIN
    RETURN ARRAY(SELECT jsonb_array_elements_text(p.jobs)
                 FROM in_parts('mend_batches', v_batches::text[], 'mend_these(uuid[])')
                     AS p (jobs));
END $$;
