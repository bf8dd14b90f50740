-- Operations in the background: cancel, retry or discard of all jobs that match a filter. Each is a
-- row. Daemons do it in short steps, so it goes on when who started it has left.

-- `done`, `requested` (running jobs that were asked to stop) and `refused` (jobs that it could not
-- change, `reason`: one of the reasons) count jobs. It concerns the jobs that were there when it
-- was started; of dead ones, those that were dead then. What refuses is set aside for this one
-- operation: the next tries it again.
CREATE TABLE IF NOT EXISTS operations (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    what        text NOT NULL CONSTRAINT what_must_be_cancel_retry_or_discard
                CHECK (what IN ('cancel', 'retry', 'discard')),
    who         text NOT NULL CHECK (char_length(who) BETWEEN 1 AND 200),
    queue       text, kind text, key text, batch_id uuid, status text, group_id bigint,  -- filter
    call_back   boolean NOT NULL DEFAULT false,  -- as of retry()
    started_at  timestamptz NOT NULL DEFAULT clock(),
    expected    integer,      -- matched at the start; NULL: more than could be counted at once
    after_id    uuid,                            -- jobs up to this one were looked at in this round
    step        integer NOT NULL DEFAULT 500,    -- rows of the next step: fewer after a lock
    rounds      integer NOT NULL DEFAULT 0,      -- finished ones: a round passes over locked jobs
    left_behind boolean NOT NULL DEFAULT false,  -- such jobs in this round: another follows
    next_at     timestamptz NOT NULL DEFAULT clock(),  -- when the next step is due
    done        bigint NOT NULL DEFAULT 0,
    requested   bigint NOT NULL DEFAULT 0,
    refused     bigint NOT NULL DEFAULT 0,
    reason      text,
    finished_at timestamptz,
    stopped_by  text                             -- before all was done
);
CREATE INDEX IF NOT EXISTS operations_due ON operations (next_at) WHERE finished_at IS NULL;
CREATE INDEX IF NOT EXISTS operations_finished ON operations (finished_at)
    WHERE finished_at IS NOT NULL;

-- Starts an operation on the jobs that matching() finds with these arguments, and notifies daemons.
-- Returns its id; that of an unfinished one with the same arguments, if there is one. Counts what
-- matches, up to 100,000 jobs and for about 300 ms. Raises as matching() does, and 54000 if 100 are
-- unfinished. Locks nothing.
CREATE OR REPLACE FUNCTION start_operation(p_what text, p_queue text DEFAULT NULL,
                                           p_kind text DEFAULT NULL, p_key text DEFAULT NULL,
                                           p_batch uuid DEFAULT NULL, p_status text DEFAULT NULL,
                                           p_all boolean DEFAULT false,
                                           p_group bigint DEFAULT NULL,
                                           p_call_back boolean DEFAULT false,
                                           p_by text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '300 ms';
    v_found record;
    v_count int := 0;
    v_last  uuid;
    v_id    bigint;
BEGIN
    LOOP
        SELECT * INTO v_found
        FROM matching(p_what, p_queue, p_kind, p_key, p_batch, p_status, v_last, 10000, p_all,
                      p_group);
        v_count := v_count + cardinality(v_found.ids);
        v_last := v_found.last;
        EXIT WHEN v_last IS NULL OR v_count >= 100000 OR clock_timestamp() > v_until;
    END LOOP;
    SELECT o.id INTO v_id FROM operations o
    WHERE o.finished_at IS NULL AND o.what = p_what AND o.call_back = p_call_back
      AND (o.queue, o.kind, o.key, o.batch_id, o.status, o.group_id)
          IS NOT DISTINCT FROM (p_queue, p_kind, p_key, p_batch, p_status, p_group)
    ORDER BY o.id LIMIT 1;
    IF v_id IS NOT NULL THEN
        RETURN v_id;
    ELSIF (SELECT count(*) FROM operations o WHERE o.finished_at IS NULL) >= 100 THEN
        RAISE EXCEPTION '100 operations have not finished' USING ERRCODE = '54000',
            HINT = 'Wait for them, or stop some: see `pgworkd operations`.';
    END IF;
    INSERT INTO operations (what, who, queue, kind, key, batch_id, status, group_id, call_back,
                            expected)
    VALUES (p_what, who(p_by), p_queue, p_kind, p_key, p_batch, p_status, p_group, p_call_back,
            CASE WHEN v_last IS NULL THEN v_count END)
    RETURNING id INTO v_id;
    PERFORM note_operation(v_id, who(p_by), 'started');
    PERFORM pg_notify('pgworkd', '{"operations": true}');
    RETURN v_id;
END $$;

-- Writes into the audit what became of an operation. Locks nothing.
CREATE OR REPLACE FUNCTION note_operation(p_id bigint, p_who text, p_became text) RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO audit (who, what, queue, before, after)
    SELECT p_who, o.what, coalesce(o.queue, ''), jsonb_build_object('operation', o.id),
           jsonb_strip_nulls(jsonb_build_object(
               'operation', o.id, 'became', p_became, 'queue', o.queue, 'kind', o.kind,
               'key', o.key, 'batch', o.batch_id, 'status', o.status, 'group', o.group_id,
               'done', o.done, 'requested', o.requested, 'refused', o.refused))
    FROM operations o WHERE o.id = p_id
$$;

-- Stops an operation; what it has done stays done. False: it has finished, or there is none. Waits
-- for a step that is being done. Locks the operation.
CREATE OR REPLACE FUNCTION stop_operation(p_id bigint, p_by text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE operations o SET finished_at = clock(), stopped_by = who(p_by)
    WHERE o.id = p_id AND o.finished_at IS NULL;
    IF FOUND THEN
        PERFORM note_operation(p_id, who(p_by), 'stopped');
    END IF;
    RETURN FOUND;
END $$;

-- One part of advance_operations(): does p_operation.what to these jobs; how many it changed.
-- Locks as that function.
CREATE OR REPLACE FUNCTION operation_step(p_ids uuid[], p_operation jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_who       text := p_operation ->> 'who';
    v_done      int := 0;
    v_requested int := 0;
BEGIN
    CASE p_operation ->> 'what'
        WHEN 'cancel' THEN
            SELECT count(*) FILTER (WHERE c.outcome = 'cancelled'),
                   count(*) FILTER (WHERE c.outcome = 'requested')
            INTO v_done, v_requested FROM cancel(p_ids, v_who) c;
        WHEN 'retry' THEN
            v_done := cardinality(retry(p_ids, v_who, (p_operation ->> 'call_back')::boolean));
        WHEN 'discard' THEN
            v_done := discard(p_ids, v_who);
    END CASE;
    RETURN jsonb_build_object('done', v_done, 'requested', v_requested);
END $$;

-- Does one step, at most p_limit jobs, of the operation that is due and has waited longest. Passes
-- over jobs that are locked: another round takes them. What refuses to be changed is set aside by
-- in_parts(), and counted. A step that met another lock, as of a batch, is done again with fewer
-- jobs, and passes over a single one. Returns the seconds until the next step is due, 5 if another
-- session does one, or NULL if no operation is unfinished. Locks the operation with SKIP LOCKED,
-- jobs with SKIP LOCKED, then as cancel(), retry() or discard(), for 200 ms at most.
CREATE OR REPLACE FUNCTION advance_operations(p_limit int DEFAULT 500) RETURNS float8
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_one     operations;
    v_name    text;                              -- of the operation, for in_parts()
    v_found   record;
    v_wanted  uuid[];
    v_ids     uuid[];
    v_parts   jsonb[] := '{}';
    v_done    int;
    v_asked   int;
    v_refused int;
    v_ends    boolean;
BEGIN
    IF NOT EXISTS (SELECT FROM operations o WHERE o.finished_at IS NULL) THEN
        RETURN NULL;
    ELSIF NOT pg_try_advisory_xact_lock(1886873445, 12) THEN
        RETURN 5;
    END IF;
    SELECT * INTO v_one FROM operations o WHERE o.finished_at IS NULL AND o.next_at <= clock()
    ORDER BY o.next_at, o.id LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN (SELECT greatest(extract(epoch FROM min(o.next_at) - clock()), 0.2)
                FROM operations o WHERE o.finished_at IS NULL);
    END IF;
    v_name := 'operation ' || v_one.id;
    v_one.step := greatest(least(v_one.step, p_limit), 1);
    SELECT * INTO v_found
    FROM matching(v_one.what, v_one.queue, v_one.kind, v_one.key, v_one.batch_id, v_one.status,
                  v_one.after_id, v_one.step, true, v_one.group_id);
    v_wanted := ARRAY(
        SELECT j.id FROM jobs j
        WHERE j.id = ANY (v_found.ids) AND NOT is_refused(v_name, j.id::text)
          AND CASE v_one.what WHEN 'cancel' THEN j.created_at <= v_one.started_at
                                             AND j.cancel_requested_at IS NULL
              ELSE j.failed_at <= v_one.started_at END
          AND (j.status <> 'failed' OR v_one.what = 'cancel' OR j.run_at > v_one.started_at));
    v_ids := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_wanted) ORDER BY j.id
                   FOR UPDATE SKIP LOCKED);
    BEGIN
        v_parts := ARRAY(SELECT in_parts(v_name, v_ids::text[],
                                         'operation_step(uuid[], jsonb)', to_jsonb(v_one)));
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        IF cardinality(v_found.ids) > 1 THEN
            UPDATE operations o SET step = greatest(v_one.step / 8, 1), next_at = clock()
            WHERE o.id = v_one.id;
            RETURN 0;
        END IF;
        v_ids := '{}';
    END;
    SELECT coalesce(sum((u.part ->> 'done')::int), 0),
           coalesce(sum((u.part ->> 'requested')::int), 0)
    INTO v_done, v_asked FROM unnest(v_parts) AS u (part);
    v_refused := cardinality(v_ids) - v_done - v_asked;
    v_one.left_behind := v_one.left_behind OR cardinality(v_ids) < cardinality(v_wanted);
    v_ends := v_found.last IS NULL AND NOT v_one.left_behind;
    UPDATE operations o
    SET done = o.done + v_done, requested = o.requested + v_asked, refused = o.refused + v_refused,
        reason = CASE WHEN v_refused = 0 THEN o.reason ELSE coalesce(
            (SELECT r.error FROM refused_rows r
             WHERE r.what = v_name AND r.key = ANY (v_ids::text[]) LIMIT 1),
            o.reason, 'their status, or that of their batch, does not allow it') END,
        step = least(2 * v_one.step, 500), after_id = v_found.last,
        left_behind = v_one.left_behind AND v_found.last IS NOT NULL,
        rounds = o.rounds + (v_found.last IS NULL)::int,
        -- the next round gives those who lock jobs time
        next_at = clock() + CASE WHEN v_found.last IS NULL
                                 THEN least(60, 0.2 * 2 ^ least(o.rounds, 10)) ELSE 0 END
                  * interval '1 s',
        finished_at = CASE WHEN v_ends THEN clock() END
    WHERE o.id = v_one.id;
    IF v_ends THEN
        PERFORM note_operation(v_one.id, v_one.who, 'finished');
    END IF;
    RETURN 0;
END $$;

-- One part of prune(): deletes these operations, which have finished. Returns how many. Locks them.
CREATE OR REPLACE FUNCTION forget_operations(p_ids bigint[]) RETURNS int
LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM operations o WHERE o.id = ANY (p_ids) RETURNING 1)
    SELECT all_done(p_ids, count(*)) FROM gone
$$;
