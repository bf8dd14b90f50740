-- Maintenance: the partitions of finished_jobs, and what retention removes.

-- Creates the day partitions of finished_jobs for today and p_days_ahead more that are missing;
-- returns how many. Rows of a day without a partition go to finished_jobs_other, none is refused.
-- Postgres reads all of that under an exclusive lock before it adds a day: so a day is only added
-- where that is small, or where a constraint says that it has no row of the day: see
-- rule_out_days(). Needs a short exclusive lock of it, for which it waits 200 ms at most, so that
-- nobody queues behind a long reader; settles need none of its locks. Runs with the owner's rights.
CREATE OR REPLACE FUNCTION ensure_partitions(p_days_ahead int DEFAULT 7) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_day   date;
    v_name  text;
    v_made  int := 0;
    v_small boolean;
    v_ruled_out daterange;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 3) THEN
        RETURN 0;
    END IF;
    v_small := pg_relation_size('pgworkd.finished_jobs_other') < 8388608;
    v_ruled_out := days_ruled_out(true);
    FOR i IN 0..least(p_days_ahead, 366) LOOP
        v_day := clock()::date + i;
        v_name := 'finished_jobs_' || to_char(v_day, 'YYYYMMDD');
        CONTINUE WHEN to_regclass('pgworkd.' || v_name) IS NOT NULL
            OR NOT (v_small OR coalesce(v_ruled_out @> v_day, false));
        BEGIN  -- identifiers and bounds come from the calendar, never from data
            EXECUTE format('CREATE TABLE pgworkd.%I (LIKE pgworkd.finished_jobs INCLUDING DEFAULTS '
                           'INCLUDING CONSTRAINTS)', v_name);
            EXECUTE format('ALTER TABLE pgworkd.finished_jobs ATTACH PARTITION pgworkd.%I '
                           'FOR VALUES FROM (%L) TO (%L)', v_name, v_day::timestamptz,
                           (v_day + 1)::timestamptz);
            v_made := v_made + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                EXIT;  -- a reader is in the way, of this day as of the next: another time
            WHEN check_violation THEN
                -- the day's first rows are already in finished_jobs_other, and may stay there
                NULL;
        END;
    END LOOP;
    -- nobody was there for days, and what would refuse today's rows was not checked, or of no use
    IF days_ruled_out(false) @> clock()::date
       AND to_regclass('pgworkd.finished_jobs_' || to_char(clock()::date, 'YYYYMMDD')) IS NULL THEN
        v_ruled_out := days_ruled_out(false);
        EXECUTE format('ALTER TABLE pgworkd.finished_jobs_other DROP CONSTRAINT %I',
                       to_char(lower(v_ruled_out), '"no_rows_of_"YYYYMMDD_')
                       || to_char(upper(v_ruled_out), 'YYYYMMDD'));
    END IF;
    RETURN v_made;
END $$;

-- The days of which a constraint says that finished_jobs_other has no row; p_valid: only if that
-- was checked. NULL: there is no such constraint. The days are in its name. Locks nothing.
CREATE OR REPLACE FUNCTION days_ruled_out(p_valid boolean) RETURNS daterange
LANGUAGE sql STABLE AS $$
    SELECT daterange(to_date(split_part(c.conname, '_', 4), 'YYYYMMDD'),
                     to_date(split_part(c.conname, '_', 5), 'YYYYMMDD'))
    FROM pg_constraint c
    WHERE c.conrelid = 'pgworkd.finished_jobs_other'::regclass AND c.conname LIKE 'no_rows_of_%'
      AND (c.convalidated OR NOT p_valid)
$$;

-- Where finished_jobs_other is large (a data-only restore, a switch-over, days that could not be
-- made) adds a constraint that it has no row of the coming days, up to thirty of those that have no
-- partition. True: it is to be checked by validate_days(), which reads all of the table, but locks
-- nobody out; then ensure_partitions() adds the days without reading it. The days begin after
-- tomorrow, as the constraint refuses their rows; it is dropped again when they are made, or near.
-- Locks finished_jobs_other, for 200 ms at most. Runs with the owner's rights.
CREATE OR REPLACE FUNCTION rule_out_days() RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_today date := clock()::date;
    v_days  daterange := days_ruled_out(false);
    v_name  text;
    v_first date;
    v_end   date;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 3) THEN
        RETURN false;
    END IF;
    SELECT min(d.day) INTO v_first
    FROM (SELECT v_today + i AS day FROM generate_series(2, 8) i) d
    WHERE to_regclass('pgworkd.finished_jobs_' || to_char(d.day, 'YYYYMMDD')) IS NULL;
    IF v_days IS NOT NULL AND (v_first IS NULL OR lower(v_days) <= v_today + 1) THEN
        EXECUTE format('ALTER TABLE pgworkd.finished_jobs_other DROP CONSTRAINT %I',
                       to_char(lower(v_days), '"no_rows_of_"YYYYMMDD_')
                       || to_char(upper(v_days), 'YYYYMMDD'));
        v_days := NULL;
    END IF;
    IF v_first IS NULL OR pg_relation_size('pgworkd.finished_jobs_other') < 8388608 THEN
        RETURN false;
    ELSIF v_days IS NULL THEN
        v_end := least(v_first + 30, (SELECT min(o.finished_at)::date FROM finished_jobs_other o
                                      WHERE o.finished_at >= v_first::timestamptz));
        IF v_end <= v_first THEN
            RETURN false;
        END IF;
        EXECUTE format('ALTER TABLE pgworkd.finished_jobs_other ADD CONSTRAINT %I '
                       'CHECK (finished_at < %L OR finished_at >= %L) NOT VALID',
                       to_char(v_first, '"no_rows_of_"YYYYMMDD_') || to_char(v_end, 'YYYYMMDD'),
                       v_first::timestamptz, v_end::timestamptz);
    END IF;
    RETURN days_ruled_out(true) IS NULL;
END $$;

-- Checks that constraint. Reads all of finished_jobs_other, which may take minutes. Locks it
-- against others that change its definition. Runs with the owner's rights.
CREATE OR REPLACE FUNCTION validate_days() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_name text := (SELECT c.conname FROM pg_constraint c
                    WHERE c.conrelid = 'pgworkd.finished_jobs_other'::regclass
                      AND NOT c.convalidated AND c.conname LIKE 'no_rows_of_%');
BEGIN
    IF v_name IS NOT NULL THEN
        EXECUTE format('ALTER TABLE pgworkd.finished_jobs_other VALIDATE CONSTRAINT %I', v_name);
    END IF;
END $$;

-- Drops the oldest day partition of finished_jobs that is wholly older than p_keep_days; returns
-- its name, or NULL: there is none, or a session reads it. One per call, each in a transaction of
-- its own: the history's lock is held for that one commit. Locks the partition without waiting (a
-- long reader, such as pg_dump, has locked it, too), then finished_jobs, for 200 ms at most, so
-- that no settle waits longer. Runs with the owner's rights.
CREATE OR REPLACE FUNCTION drop_partition(p_keep_days int) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_name text;
BEGIN
    IF p_keep_days IS NULL OR p_keep_days < 1 THEN
        RAISE EXCEPTION 'keep_days must be 1 or more, not %', p_keep_days USING ERRCODE = '22023';
    END IF;
    -- not while ensure_partitions() makes some
    IF NOT pg_try_advisory_xact_lock(1886873445, 3) THEN
        RETURN NULL;
    END IF;
    SELECT c.relname INTO v_name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'pgworkd.finished_jobs'::regclass
      AND c.relnamespace = 'pgworkd'::regnamespace
      AND c.relname ~ '^finished_jobs_[0-9]{8}$'
      AND to_date(right(c.relname, 8), 'YYYYMMDD') < clock()::date - p_keep_days
    ORDER BY c.relname LIMIT 1;
    IF v_name IS NULL THEN
        RETURN NULL;
    END IF;
    -- the name comes from the catalog, and has the form of those that ensure_partitions() gives
    BEGIN
        EXECUTE format('LOCK TABLE ONLY pgworkd.%I IN ACCESS EXCLUSIVE MODE NOWAIT', v_name);
        EXECUTE format('DROP TABLE pgworkd.%I', v_name);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        -- another time; of the others, too: who reads the history has mostly locked all of it
        RETURN NULL;
    END;
    RETURN v_name;
END $$;

-- One part of prune(): deletes the batches below these roots. Returns how many. Locks their rows.
CREATE OR REPLACE FUNCTION forget_batches(p_roots uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM batches b WHERE b.root_id = ANY (p_roots) RETURNING 1)
    SELECT all_done(p_roots, count(*)) FROM gone
$$;

-- One part of prune(): deletes these requests for stacks. Returns how many. Locks them.
CREATE OR REPLACE FUNCTION forget_stacks(p_jobs uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM stack_requests r WHERE r.job_id = ANY (p_jobs) RETURNING 1)
    SELECT all_done(p_jobs, count(*)) FROM gone
$$;

-- One part of forget_rows(): deletes these rows of the audit. Returns how many. Locks them.
CREATE OR REPLACE FUNCTION forget_audit(p_ids bigint[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM audit a WHERE a.id = ANY (p_ids) RETURNING 1)
    SELECT all_done(p_ids, count(*)) FROM gone
$$;

-- One part of forget_rows(): deletes these tokens. Returns how many. Locks them.
CREATE OR REPLACE FUNCTION forget_tokens(p_ids text[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM tokens t WHERE t.id = ANY (p_ids) RETURNING 1)
    SELECT all_done(p_ids, count(*)) FROM gone
$$;

-- One part of forget_rows(): deletes these calls, [caller, key] of each. Returns how many. Locks
-- them.
CREATE OR REPLACE FUNCTION forget_calls(p_calls text[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (
        DELETE FROM idempotent_calls c
        USING (SELECT k::jsonb ->> 0 AS caller, k::jsonb ->> 1 AS key FROM unnest(p_calls) k) o
        WHERE c.caller = o.caller AND c.key = o.key RETURNING 1)
    SELECT all_done(p_calls, count(*)) FROM gone
$$;

-- One part of forget_rows(): deletes these rows of the history of no day. Returns how many. Locks
-- them.
CREATE OR REPLACE FUNCTION forget_undated(p_ids uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM finished_jobs_other o WHERE o.id = ANY (p_ids) RETURNING 1)
    SELECT all_done(p_ids, count(*)) FROM gone
$$;

-- One part of forget_rows(): deletes these rows of the history, "id instant" of each. Returns how
-- many. Locks them.
CREATE OR REPLACE FUNCTION forget_kept(p_keys text[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (
        DELETE FROM finished_jobs f
        USING (SELECT split_part(k, ' ', 1)::uuid AS id, split_part(k, ' ', 2)::timestamptz AS at
               FROM unnest(p_keys) k) o
        WHERE f.id = o.id AND f.finished_at = o.at RETURNING 1)
    SELECT all_done(p_keys, count(*)) FROM gone
$$;

-- One part of prune(): moves these dead jobs to the history. Returns how many. Locks as archive().
CREATE OR REPLACE FUNCTION archive_dead(p_ids uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    SELECT archive(p_ids, 'dead', NULL)
$$;

-- Deletes old rows of tables that only grow: of finished_jobs_other and of the audit (kept for 7
-- days at least) by p_keep_days, of finished_jobs by keep_until, at most p_limit of each, by their
-- indexes; with the audit, tokens that have ended; and calls after a day. Returns how many of the
-- history. For prune(); with the owner's rights, so that nobody else needs the right to change the
-- history. Locks rows with SKIP LOCKED.
CREATE OR REPLACE FUNCTION forget_rows(p_keep_days int, p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_other uuid[];
    v_kept  text[];
    v_audit bigint[];
BEGIN
    IF p_keep_days IS NULL OR p_keep_days < 1 THEN
        RAISE EXCEPTION 'keep_days must be 1 or more, not %', p_keep_days USING ERRCODE = '22023';
    END IF;
    v_other := ARRAY(
        SELECT f.id FROM finished_jobs_other f
        WHERE f.finished_at < clock() - make_interval(days => p_keep_days)
          AND NOT is_refused('forget_rows', f.id::text)
        ORDER BY f.finished_at LIMIT p_limit FOR UPDATE OF f SKIP LOCKED);
    -- with the instant, as the key of the history has it: else each id is looked for in every
    -- partition
    v_kept := ARRAY(
        SELECT f.id || ' ' || to_char(f.finished_at AT TIME ZONE 'UTC',
                                      'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
        FROM finished_jobs f
        WHERE f.keep_until < clock()
          AND NOT is_refused('forget_rows', f.id || ' ' || to_char(
              f.finished_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
        ORDER BY f.keep_until LIMIT p_limit FOR UPDATE OF f SKIP LOCKED);
    v_audit := ARRAY(
        SELECT o.id FROM audit o
        WHERE o.at < clock() - make_interval(days => greatest(p_keep_days, 7))
          AND NOT is_refused('forget_rows', o.id::text)
        ORDER BY o.at LIMIT p_limit FOR UPDATE OF o SKIP LOCKED);
    PERFORM in_parts('forget_rows', v_audit::text[], 'forget_audit(bigint[])');
    -- what a token was is looked up in the audit; an expired or revoked one is refused anyway
    PERFORM in_parts('forget_rows', ARRAY(
        SELECT o.id FROM tokens o
        WHERE least(o.revoked_at, o.expires_at)
              < clock() - make_interval(days => greatest(p_keep_days, 7))
          AND NOT is_refused('forget_rows', o.id)
        ORDER BY o.id LIMIT p_limit FOR UPDATE SKIP LOCKED), 'forget_tokens(text[])');
    PERFORM in_parts('forget_rows', ARRAY(
        SELECT jsonb_build_array(o.caller, o.key)::text FROM idempotent_calls o
        WHERE o.at < clock() - interval '1 day'
          AND NOT is_refused('forget_rows', jsonb_build_array(o.caller, o.key)::text)
        ORDER BY o.at LIMIT p_limit FOR UPDATE SKIP LOCKED), 'forget_calls(text[])');
    RETURN (SELECT coalesce(sum(p.gone::int), 0) FROM (
        SELECT in_parts('forget_rows', v_other::text[], 'forget_undated(uuid[])')
        UNION ALL
        SELECT in_parts('forget_rows', v_kept, 'forget_kept(text[])')) AS p (gone));
END $$;

-- Retention: see forget_rows(), and drop_partition() for the rest of the history. Moves jobs dead
-- for p_keep_dead_days to finished_jobs (at most p_limit, as of all else), and deletes the
-- progress of ended attempts, and stacks that were asked for an hour ago; operations go as the
-- audit does. Finished trees of batches are kept for p_keep_days, and as long as they keep a
-- dedupe_key. Locks rows with SKIP LOCKED.
CREATE OR REPLACE FUNCTION prune(p_keep_days int, p_keep_dead_days int, p_limit int DEFAULT 5000)
RETURNS TABLE (rows_deleted int, dead_moved int)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids uuid[];
    v_ops bigint[];
BEGIN
    rows_deleted := 0; dead_moved := 0;
    IF NOT pg_try_advisory_xact_lock(1886873445, 4) THEN
        RETURN NEXT;
        RETURN;
    END IF;
    rows_deleted := forget_rows(p_keep_days, p_limit);
    v_ids := ARRAY(
        SELECT b.id FROM batches b
        WHERE b.tree_finished_at < clock() - make_interval(days => p_keep_days)
          AND (b.dedupe_until IS NULL OR b.dedupe_until <= clock() OR b.dedupe_until = 'infinity')
          AND NOT is_refused('prune', b.id::text)
        LIMIT p_limit FOR UPDATE OF b SKIP LOCKED);
    SELECT rows_deleted + coalesce(sum(p.gone::int), 0) INTO rows_deleted
    FROM in_parts('prune', v_ids::text[], 'forget_batches(uuid[])') AS p (gone);
    v_ops := ARRAY(
        SELECT o.id FROM operations o
        WHERE o.finished_at < clock() - make_interval(days => greatest(p_keep_days, 7))
          AND NOT is_refused('prune', o.id::text)
        ORDER BY o.finished_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    PERFORM in_parts('prune', v_ops::text[], 'forget_operations(bigint[])');
    v_ids := ARRAY(
        SELECT o.job_id FROM progress o
        WHERE (SELECT j.attempts FROM jobs j
               WHERE j.id = o.job_id AND j.status = 'running') IS DISTINCT FROM o.attempt
          AND NOT is_refused('prune', o.job_id::text)
        LIMIT p_limit FOR UPDATE SKIP LOCKED);
    SELECT rows_deleted + coalesce(sum(p.gone::int), 0) INTO rows_deleted
    FROM in_parts('prune', v_ids::text[], 'forget_progress(uuid[])') AS p (gone);
    PERFORM in_parts('prune', ARRAY(
        SELECT o.job_id FROM stack_requests o
        WHERE o.asked_at < clock() - interval '1 hour' AND NOT is_refused('prune', o.job_id::text)
        LIMIT p_limit FOR UPDATE SKIP LOCKED)::text[], 'forget_stacks(uuid[])');
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.status = 'dead'
                     AND j.failed_at < clock() - make_interval(days => p_keep_dead_days)
                     AND NOT is_refused('prune', j.id::text)
                   LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    SELECT coalesce(sum(p.moved::int), 0) INTO dead_moved
    FROM in_parts('prune', v_ids::text[], 'archive_dead(uuid[])') AS p (moved);
    -- what was tried no more since then is there no more
    DELETE FROM refused_rows r WHERE r.ctid = ANY (ARRAY(
        SELECT o.ctid FROM refused_rows o WHERE o.until < clock() - interval '1 day' LIMIT p_limit
        FOR UPDATE SKIP LOCKED));
    RETURN NEXT;
END $$;
