-- The history by id, without a lock on each of its days: a transaction keeps the locks of all that
-- it has read, and a history of a year has some 1,700 tables and indexes.

-- When a uuid of version 7 was made, by the clock of its maker; NULL for others. Inlined.
CREATE OR REPLACE FUNCTION made_at(p_id uuid) RETURNS timestamptz LANGUAGE sql IMMUTABLE
    RETURN CASE WHEN substr(p_id::text, 15, 1) = '7'
                THEN to_timestamp(('x' || substr(replace(p_id::text, '-', ''), 1, 12))::bit(48)
                                  ::bigint / 1000.0) END;

-- The rows of ended jobs, wherever they are. The days around the time in the ids come first; an id
-- that was made today is looked for nowhere else (unless a clock is wrong by more than a day). Then
-- all days, newest first, some at a time, each time in a subtransaction that is rolled back, which
-- releases the locks. Planned anew each time, so that only the days asked for are locked: those in
-- which rows were found, and a few. Locks nothing else.
CREATE OR REPLACE FUNCTION finished_of(p_ids uuid[]) RETURNS SETOF finished_jobs
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_step constant int := 16;
    v_from  timestamptz;
    v_to    timestamptz;
    v_today boolean;                             -- all of them were made today
    v_rest  uuid[] := p_ids;                     -- not found yet
    v_days  timestamptz[];                       -- where they begin, newest first
    v_ids   uuid[];
    v_at    timestamptz[];
    v_found uuid[] := '{}';
    v_found_at timestamptz[] := '{}';
BEGIN
    SELECT min(made_at(i)) - interval '1 day', max(made_at(i)) + interval '2 days',
           coalesce(bool_and(abs(extract(epoch FROM made_at(i) - clock())) < 86400), false)
    INTO v_from, v_to, v_today FROM unnest(p_ids) i;
    IF v_to < v_from + interval '10 days' THEN
        RETURN QUERY SELECT f.* FROM finished_jobs f
                     WHERE f.id = ANY (p_ids) AND f.finished_at >= v_from AND f.finished_at < v_to;
        v_rest := ARRAY(SELECT i FROM unnest(p_ids) i
                        EXCEPT SELECT f.id FROM finished_jobs f
                        WHERE f.id = ANY (p_ids) AND f.finished_at >= v_from
                          AND f.finished_at < v_to);
    END IF;
    IF v_rest = '{}' OR v_today THEN
        RETURN;
    END IF;
    v_days := ARRAY(SELECT nullif(split_part(pg_get_expr(c.relpartbound, c.oid), '''', 2), '')
                           ::timestamptz AS day
                    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
                    WHERE i.inhparent = 'pgworkd.finished_jobs'::regclass ORDER BY day DESC);
    v_to := 'infinity';
    FOR i IN 1..cardinality(v_days) / v_step + 1 LOOP
        v_from := coalesce(v_days[v_step * i], '-infinity');
        BEGIN
            SELECT array_agg(f.id), array_agg(f.finished_at) INTO v_ids, v_at FROM finished_jobs f
            WHERE f.id = ANY (v_rest) AND f.finished_at >= v_from AND f.finished_at < v_to;
            RAISE EXCEPTION USING ERRCODE = 'PW000';
        EXCEPTION WHEN SQLSTATE 'PW000' THEN
            v_found := v_found || v_ids;
            v_found_at := v_found_at || v_at;
        END;
        v_rest := ARRAY(SELECT unnest(v_rest) EXCEPT SELECT unnest(v_ids));
        v_to := v_from;
        EXIT WHEN v_rest = '{}';
    END LOOP;
    IF v_found <> '{}' THEN
        RETURN QUERY SELECT f.* FROM finished_jobs f
                     WHERE f.id = ANY (v_found) AND f.finished_at = ANY (v_found_at);
    END IF;
END $$;
