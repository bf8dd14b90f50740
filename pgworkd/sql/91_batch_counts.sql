-- Batches: counting the ends of jobs, finishing batches and trees, calling back. Whoever ends jobs
-- holds their rows, then locks the roots of their trees in order of id, one at a time per tree.
-- Batches below a root are written under that lock only; rows of `jobs` are locked under it with
-- SKIP LOCKED only; queues are locked after it. A batch is finished when it is sealed, its row can
-- be locked FOR UPDATE (nobody is adding), no job of it is live, and nothing streams into it any
-- longer. The counters say when to check. A transaction that added and rolled back checks nothing:
-- mend_batches() does.

-- For a caller that must not wait: locks the roots of these batches, and the batches, with SKIP
-- LOCKED; returns those whose root it has locked.
CREATE OR REPLACE FUNCTION free_batches(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_roots uuid[] := ARRAY(SELECT DISTINCT b.root_id FROM batches b WHERE b.id = ANY (p_batches));
BEGIN
    v_roots := ARRAY(SELECT r.id FROM batches r WHERE r.id = ANY (v_roots) ORDER BY r.id
                     FOR NO KEY UPDATE SKIP LOCKED);
    RETURN ARRAY(SELECT b.id FROM batches b
                 WHERE b.id = ANY (p_batches) AND b.root_id = ANY (v_roots)
                 ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED);
END $$;

-- Locks the roots of these batches, always in order of id. A caller that ends jobs of several
-- batches needs all of them at once. Returns those of the roots that may be finished: a session
-- waiting here can hide a root from the one that is to finish it.
CREATE OR REPLACE FUNCTION lock_trees(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_roots uuid[] := ARRAY(SELECT DISTINCT b.root_id FROM batches b WHERE b.id = ANY (p_batches));
    v_maybe uuid[];
BEGIN
    IF no_wait() THEN
        v_roots := free_batches(v_roots);
    END IF;
    SELECT array_agg(x.id) FILTER (WHERE x.sealed_at IS NOT NULL AND x.finished_at IS NULL
                                   AND x.completed + x.dead + x.cancelled >= x.added)
    INTO v_maybe
    FROM (SELECT r.id, r.sealed_at, r.finished_at, r.completed, r.dead, r.cancelled, r.added
          FROM batches r WHERE r.id = ANY (v_roots) ORDER BY r.id FOR NO KEY UPDATE) x;
    RETURN coalesce(v_maybe, '{}');
END $$;

-- The same for the batches of these jobs, whose rows the caller holds.
CREATE OR REPLACE FUNCTION lock_trees_of(p_jobs uuid[]) RETURNS void
LANGUAGE sql VOLATILE AS $$
    SELECT lock_trees(array_agg(j.batch_id)) FROM jobs j
    WHERE j.id = ANY (p_jobs) AND j.batch_id IS NOT NULL HAVING count(*) > 0
$$;

-- Called by whoever has ended jobs of batches, and holds their rows but no queue yet: updates the
-- counters, inserts streamed jobs, cancels a batch with too many dead, and finishes what is
-- finished. p_stop_waiting: ends up to 1,000 waiting jobs of a cancelled batch, of those that hold
-- no key (queues cannot be locked here); the others are left to the next call and to
-- mend_batches(). Locks the roots in order of id, then those jobs with SKIP LOCKED.
CREATE OR REPLACE FUNCTION batch_ended(p_ended ended_job[], p_stop_waiting boolean DEFAULT true)
RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_batches   uuid[] := ARRAY(SELECT DISTINCT e.batch_id FROM unnest(p_ended) e);
    v_streams   boolean;                         -- some of them have a child that streams
    v_roots     uuid[];
    v_maybe     uuid[];                          -- may be finished
    v_failed    uuid[];                          -- have too many dead
    v_cancelled uuid[];
    v_counted   int;
BEGIN
    IF no_wait() THEN
        v_maybe := free_batches(v_batches);
        IF cardinality(v_maybe) < cardinality(v_batches) THEN
            PERFORM put_off(array_agg(e)) FROM unnest(p_ended) e
            WHERE e.batch_id <> ALL (v_maybe)
              AND EXISTS (SELECT FROM batches b WHERE b.id = e.batch_id)
            HAVING count(*) > 0;
            IF cardinality(v_maybe) = 0 THEN
                RETURN;
            END IF;
            p_ended := ARRAY(SELECT e FROM unnest(p_ended) e WHERE e.batch_id = ANY (v_maybe));
            v_batches := v_maybe;
        END IF;
    END IF;
    v_roots := lock_trees(v_batches);
    v_streams := EXISTS (SELECT FROM batches c WHERE c.parent_id = ANY (v_batches) AND c.stream);
    IF v_streams AND EXISTS (SELECT FROM batches c
               WHERE c.parent_id = ANY (ARRAY(SELECT DISTINCT e.batch_id FROM unnest(p_ended) e
                                              WHERE e.status = 'completed' AND e.payload IS NULL))
                 AND c.stream) THEN
        RAISE EXCEPTION
            'a batch that streams was created beside the end of jobs that it must not miss'
            USING ERRCODE = 'serialization_failure', HINT = 'Try again: daemons do.';
    END IF;
    WITH moved AS (
        UPDATE batches b
        SET completed = b.completed + n.completed, dead = greatest(b.dead + n.dead, 0),
            cancelled = b.cancelled + n.cancelled
        FROM (SELECT e.batch_id, count(*) FILTER (WHERE e.status = 'completed') AS completed,
                     count(*) FILTER (WHERE e.status = 'dead' AND NOT e.was_dead)
                     - count(*) FILTER (WHERE e.status <> 'dead' AND e.was_dead) AS dead,
                     count(*) FILTER (WHERE e.status IN ('cancelled', 'expired')) AS cancelled
              FROM unnest(p_ended) e GROUP BY e.batch_id) n
        WHERE b.id = n.batch_id
        RETURNING b.id, b.completed + b.dead + b.cancelled >= b.added AS maybe, b.cancelled_at,
            b.dead > b.max_failures AS failed, b.finished_at
    )
    SELECT array_agg(m.id) FILTER (WHERE m.finished_at IS NULL AND m.maybe),
           array_agg(m.id)
               FILTER (WHERE m.finished_at IS NULL AND m.failed AND m.cancelled_at IS NULL),
           array_agg(m.id) FILTER (WHERE m.finished_at IS NULL AND m.cancelled_at IS NOT NULL),
           count(*)
    INTO v_maybe, v_failed, v_cancelled, v_counted
    FROM moved m;
    IF v_counted < cardinality(v_batches)
       AND v_counted < (SELECT count(*) FROM batches b WHERE b.id = ANY (v_batches)) THEN
        PERFORM raise_kept();
    END IF;
    IF v_streams AND EXISTS (SELECT FROM unnest(p_ended) e WHERE e.payload IS NOT NULL) THEN
        v_failed := v_failed || stream(p_ended);
    END IF;
    IF v_failed IS NOT NULL THEN
        v_failed := cancel_below(v_failed);
        v_maybe := v_maybe || v_failed;
        v_cancelled := v_cancelled || v_failed;
    END IF;
    IF p_stop_waiting AND v_cancelled IS NOT NULL THEN
        PERFORM archive(s.waiting, 'cancelled', 'its batch was cancelled', false)
            FROM stop_jobs(v_cancelled, 1000, false) s;
    END IF;
    v_maybe := v_maybe || v_roots;
    IF cardinality(v_maybe) > 0 THEN
        PERFORM fold(v_maybe);
        PERFORM advance(v_maybe, false);
    END IF;
END $$;

-- Inserts a job into each batch that streams from the batch of a completed job (those with a
-- payload here); a job that only added others from streamed ones is not streamed on. Returns
-- batches that have too many dead now: input and result that are too large together make a dead
-- job, or the parent could never be settled. The caller holds the roots.
CREATE OR REPLACE FUNCTION stream(p_ended ended_job[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_failed uuid[];
BEGIN
    WITH made AS MATERIALIZED (
        SELECT c.id AS batch_id, c.queue, coalesce(c.stream_kind, c.kind) AS kind, e.id AS source,
               c.max_attempts, e.meta,
               jsonb_build_object('input', e.payload, 'result', e.result) AS payload
        FROM unnest(p_ended) e JOIN batches b ON b.id = e.batch_id JOIN batches c
            ON c.parent_id = b.id
        WHERE e.payload IS NOT NULL AND c.stream
          AND num_nonnulls(c.sealed_at, c.cancelled_at, c.finished_at) = 0
          AND (b.stream_kind IS NULL OR e.kind IS DISTINCT FROM b.stream_kind)
    ), sized AS MATERIALIZED (
        SELECT m.*, 'input and result of job ' || m.source
            || ' are larger than 1 MiB together: let it return less' AS error,
               pg_column_size(m.payload) <= 200 OR octet_length(m.payload::text) <= 2097152 AS fits
        FROM made m
    ), added AS (
        INSERT INTO jobs (batch_id, counted, queue, kind, max_attempts, meta, payload, status,
                          failures, failed_at, error, errors)
        SELECT s.batch_id, true, s.queue, s.kind, s.max_attempts, s.meta,
               CASE WHEN s.fits THEN s.payload ELSE jsonb_build_object('source', s.source) END,
               CASE WHEN s.fits THEN 'pending' ELSE 'dead' END::job_status,
               CASE WHEN s.fits THEN 0 ELSE 1 END,
               CASE WHEN NOT s.fits THEN clock() END, CASE WHEN NOT s.fits THEN s.error END,
               CASE WHEN s.fits THEN '[]' ELSE jsonb_build_array(jsonb_build_object(
                   'attempt', 0, 'at', clock(), 'type', 'too large', 'message', s.error)) END
        FROM sized s
        RETURNING id, queue, kind, error, batch_id, status
    ), noted AS (
        INSERT INTO deaths (job_id, attempt, queue, kind, error_type, error)
        SELECT a.id, 0, a.queue, coalesce(a.kind, a.queue), 'too large', a.error
        FROM added a WHERE a.status = 'dead'
    ), counted AS (
        UPDATE batches b SET added = b.added + n.added, dead = b.dead + n.dead
        FROM (SELECT a.batch_id, count(*) AS added,
                     count(*) FILTER (WHERE a.status = 'dead') AS dead
              FROM added a GROUP BY a.batch_id) n
        WHERE b.id = n.batch_id
        RETURNING b.id, b.dead > b.max_failures AS failed
    )
    SELECT array_agg(c.id) INTO v_failed FROM counted c WHERE c.failed;
    RETURN v_failed;
END $$;

-- Applies the additions to these batches, their seals, and effects that were deferred for them to
-- their rows. The caller holds the roots: no other session touches the deferred effects of their
-- trees.
CREATE OR REPLACE FUNCTION fold(p_batches uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ended ended_job[];
    v_kept  boolean;
BEGIN
    IF EXISTS (SELECT FROM pending_effects p WHERE p.batch_id = ANY (p_batches)) THEN
        WITH gone AS (
            DELETE FROM pending_effects p WHERE p.batch_id = ANY (p_batches)
                RETURNING p.batch_id, p.ended
        )
        -- A child that streams may have been created since: it gets what the history knows.
        SELECT array_agg(CASE WHEN (g.ended).status = 'completed' AND (g.ended).payload IS NULL
                                   AND (SELECT true FROM batches c WHERE c.parent_id = g.batch_id
                                          AND c.stream LIMIT 1)
                              THEN (SELECT ROW(g.batch_id, 'completed', false, (g.ended).id, f.kind,
                                               coalesce(f.payload, '{}'), f.result,
                                               f.meta)::ended_job
                                    FROM (SELECT) one
                                    LEFT JOIN finished_of(ARRAY[(g.ended).id]) f ON true LIMIT 1)
                              ELSE g.ended END)
        INTO v_ended FROM gone g;
        PERFORM batch_ended(v_ended, false);
    END IF;
    WITH gone AS (
        DELETE FROM batch_additions a WHERE a.batch_id = ANY (p_batches)
            RETURNING a.batch_id, a.added, a.seals
    ), added AS (
        UPDATE batches b
        SET added = b.added + n.added,
            sealed_at = coalesce(b.sealed_at, CASE WHEN n.seals THEN clock() END)
        FROM (SELECT g.batch_id, sum(g.added) AS added, bool_or(g.seals) AS seals FROM gone g
              GROUP BY g.batch_id) n
        WHERE b.id = n.batch_id
        RETURNING b.id
    )
    SELECT EXISTS (SELECT FROM gone g JOIN batches b ON b.id = g.batch_id
                   WHERE g.batch_id NOT IN (SELECT a.id FROM added a))
    INTO v_kept;
    IF v_kept THEN
        PERFORM raise_kept();
    END IF;
END $$;

-- Finishes those of these batches that are done, seals what they streamed into, cancels what a
-- cancelled one still had below it, and so on down; then whole trees. p_exact: does not trust the
-- counters, which rows deleted by hand make wrong. The caller holds the roots. (Here and below
-- CASE keeps the planner off the indexes on all unfinished batches.) Locks batches FOR UPDATE with
-- SKIP LOCKED: a locked one is being added to.
CREATE OR REPLACE FUNCTION advance(p_batches uuid[], p_exact boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_todo  uuid[] := p_batches;
    v_ready uuid[];
    v_done  uuid[];
    v_over  uuid[] := '{}';
BEGIN
    LOOP
        v_ready := ARRAY(
            SELECT b.id FROM batches b
            WHERE b.id = ANY (v_todo)
              AND CASE WHEN b.finished_at IS NULL THEN b.sealed_at IS NOT NULL ELSE false END
              AND (p_exact OR b.completed + b.dead + b.cancelled >= b.added)
              AND (NOT b.stream OR b.cancelled_at IS NOT NULL
                   OR (SELECT p.finished_at FROM batches p WHERE p.id = b.parent_id) IS NOT NULL)
            FOR UPDATE OF b SKIP LOCKED);
        EXIT WHEN cardinality(v_ready) = 0;
        PERFORM fold(v_ready);
        -- A statement of its own: it sees what those have committed who were adding until now. (Not
        -- EXISTS, which might become a join with all jobs of batches.)
        WITH finished AS (
            UPDATE batches b SET finished_at = clock()
            WHERE b.id = ANY (v_ready)
              AND (SELECT true FROM jobs j WHERE j.batch_id = b.id
                     AND j.status IN ('blocked', 'pending', 'running', 'failed') LIMIT 1) IS NULL
              -- its counters lack something
              AND (SELECT true FROM pending_effects p WHERE p.batch_id = b.id LIMIT 1) IS NULL
            RETURNING b.id
        )
        SELECT coalesce(array_agg(f.id), '{}') INTO v_done FROM finished f;
        EXIT WHEN cardinality(v_done) = 0;
        v_over := v_over || v_done;
        UPDATE batches c
        SET sealed_at = coalesce(c.sealed_at, clock()),
            cancelled_at = coalesce(c.cancelled_at,
                                    CASE WHEN p.cancelled_at IS NOT NULL THEN clock() END)
        FROM batches p
        WHERE p.id = ANY (v_done) AND c.parent_id = p.id
          AND CASE WHEN c.finished_at IS NULL THEN c.stream
                   OR p.cancelled_at IS NOT NULL ELSE false END;
        -- Those above, too: a transaction that was creating a child when its parent could have been
        -- finished does not check again.
        v_todo := ARRAY(SELECT c.id FROM batches c WHERE c.parent_id = ANY (v_done))
               || ARRAY(SELECT b.parent_id FROM batches b
                        WHERE b.id = ANY (v_done) AND b.parent_id IS NOT NULL);
    END LOOP;
    IF p_exact OR cardinality(v_over) > 0 THEN
        PERFORM call_back(ARRAY(SELECT DISTINCT b.root_id FROM batches b
                                WHERE b.id = ANY (p_batches || v_over)));
    END IF;
END $$;

-- Marks those of these trees in which every batch is finished, and inserts the job of each root's
-- on_complete; or of its on_failure, if it has one and a job of the tree is dead, expired or was
-- cancelled. The job's payload gets a "batch" with the outcome of the tree. A tree that was
-- reopened inserts neither of the two again. The caller holds the roots.
CREATE OR REPLACE FUNCTION call_back(p_roots uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_over uuid[];
BEGIN
    WITH finished AS (
        UPDATE batches r
        SET tree_finished_at = clock(),
            dedupe_until = CASE WHEN r.cancelled_at IS NULL AND r.dedupe_until > clock()
                                THEN r.dedupe_until END
        WHERE r.id = ANY (p_roots) AND r.finished_at IS NOT NULL AND r.tree_finished_at IS NULL
          AND (SELECT true FROM batches b WHERE b.root_id = r.id AND b.finished_at IS NULL
               LIMIT 1) IS NULL
        RETURNING r.id
    )
    SELECT array_agg(f.id) INTO v_over FROM finished f;
    IF v_over IS NULL THEN
        RETURN;
    END IF;
    WITH over AS MATERIALIZED (
        SELECT r.id, r.name, t.completed, t.dead, t.cancelled, t.stopped, t.failed,
               t.failed AND r.on_failure IS NOT NULL AS fails,
               CASE WHEN t.failed AND r.on_failure IS NOT NULL THEN r.on_failure
                    ELSE r.on_complete END AS job,
               CASE WHEN t.failed AND r.on_failure IS NOT NULL THEN r.failure_called
                    ELSE r.completed_called END AS called
        FROM batches r,
             LATERAL (SELECT sum(b.completed) AS completed, sum(b.dead) AS dead,
                             sum(b.cancelled) AS cancelled,
                             bool_or(b.parent_id IS NULL AND b.cancelled_at IS NOT NULL) AS stopped,
                             bool_or(b.dead > 0 OR b.cancelled > 0
                                     OR b.cancelled_at IS NOT NULL) AS failed
                      FROM batches b WHERE b.root_id = r.id) t
        WHERE r.id = ANY (v_over)
    ), noted AS (
        UPDATE batches r SET completed_called = r.completed_called OR NOT o.fails,
                             failure_called = r.failure_called OR o.fails
        FROM over o WHERE r.id = o.id AND o.job IS NOT NULL AND NOT o.called
    )
    INSERT INTO jobs (queue, kind, payload, priority, max_attempts, timeout_s, meta, serialize_key,
                      limit_key)
    SELECT j.queue, j.kind,
           coalesce(j.payload, '{}') || jsonb_build_object('batch', jsonb_build_object(
               'id', t.id, 'name', t.name, 'completed', t.completed, 'dead', t.dead,
               'cancelled', t.cancelled,
               'state', CASE WHEN t.stopped THEN 'cancelled'
                             WHEN t.failed THEN 'completed with failures'
                             ELSE 'completed' END)),
           coalesce(j.priority, 0), j.max_attempts, j.timeout_s, j.meta, j.serialize_key,
           j.limit_key
    FROM over t, LATERAL jsonb_populate_record(NULL::jobs, t.job) j
    WHERE t.job IS NOT NULL AND NOT t.called;
END $$;
