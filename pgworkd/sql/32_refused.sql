-- Rows that something of others refuses to have changed: a trigger, a constraint, a policy. Each is
-- set aside for a while, and holds up no others. Here, how claims do it; see also in_parts().
--
-- A claim that fails for a row fails as a whole. Its daemon then claims carefully: one job, and if
-- that works two, four, and so on; and if one alone fails, it calls refuse_claims(). Careful claims
-- pass over the jobs that are set aside. All others pay nothing for this.

-- Raises 27000, for a row that was neither changed nor refused, in place of its id.
CREATE OR REPLACE FUNCTION raise_kept() RETURNS uuid
LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'a trigger keeps the row as it is' USING ERRCODE = '27000',
        HINT = 'It returns NULL instead of the row, or undoes what is to be changed.';
END $$;

-- p_done; raises 27000 if that is less than there are keys: some row was kept.
CREATE OR REPLACE FUNCTION all_done(p_keys anyarray, p_done bigint) RETURNS int
LANGUAGE plpgsql AS $$
BEGIN
    IF p_done < cardinality(p_keys) THEN
        PERFORM raise_kept();
    END IF;
    RETURN p_done;
END $$;

-- Sets a row aside, for 10 s, doubled each time, at most 10 min. p_what: the function that tried;
-- p_key: mostly an id. Locks the row in refused_rows.
CREATE OR REPLACE FUNCTION refuse(p_what text, p_key text, p_sqlstate text, p_error text)
RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO refused_rows AS r (what, key, sqlstate, error, until)
    VALUES (p_what, p_key, p_sqlstate, left(p_error, 1000), clock() + interval '10 s')
    ON CONFLICT (what, key) DO UPDATE SET
        sqlstate = excluded.sqlstate, error = excluded.error, times = r.times + 1,
        until = clock() + least(600, 10 * 2 ^ least(r.times, 10)) * interval '1 s';
END $$;

-- True if an error is no row's fault: a lock, a deadlock, a timeout, insufficient resources, a
-- read-only server.
CREATE OR REPLACE FUNCTION is_no_rows_fault(p_sqlstate text) RETURNS boolean
LANGUAGE sql IMMUTABLE
    RETURN left(p_sqlstate, 2) IN ('40', '53', '57', '58')
        OR p_sqlstate IN ('55P03', '25006', 'XX000');

-- Makes the claims of this transaction careful. True, so that a statement can begin with it. Locks
-- nothing.
CREATE OR REPLACE FUNCTION carefully(p_how text DEFAULT 'on') RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM set_config('pgworkd.careful', p_how, true);
    RETURN true;
END $$;

-- True in such a transaction.
CREATE OR REPLACE FUNCTION is_careful() RETURNS boolean LANGUAGE sql STABLE
    RETURN coalesce(current_setting('pgworkd.careful', true), '') <> '';

-- True if this row is set aside: see refuse().
CREATE OR REPLACE FUNCTION is_refused(p_what text, p_key text) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM refused_rows r
                   WHERE r.what = p_what AND r.key = p_key AND r.until > clock());
END $$;

-- Sets aside those of the jobs that a careful claim with these arguments takes that are refused;
-- returns how many. With p_error, and its p_sqlstate, sets aside the first without a trial: a trial
-- would take too long, or the claim did more than is tried here. The other arguments are those of
-- claim(). NULL: a claim would wait for a lock on all jobs. Locks as claim(), then rows of
-- refused_rows.
CREATE OR REPLACE FUNCTION refuse_claims(p_worker int, p_queue text, p_kinds text[],
                                         p_budgets int[], p_priorities int[], p_run_ats float8[],
                                         p_positions uuid[], p_token uuid, p_without text[],
                                         p_places text, p_reach_s float8, p_since float8,
                                         p_sqlstate text DEFAULT NULL, p_error text DEFAULT NULL)
RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_jobs uuid[];
BEGIN
    BEGIN
        LOCK TABLE jobs IN ROW EXCLUSIVE MODE NOWAIT;
    EXCEPTION WHEN lock_not_available THEN
        RETURN NULL;
    END;
    PERFORM carefully('choose');
    v_jobs := ARRAY(SELECT c.id FROM claim(p_worker, p_queue, CASE WHEN p_error IS NULL THEN 500
                                                                   ELSE 1 END, p_kinds, p_budgets,
                                           p_priorities, p_run_ats, p_positions, p_token, p_without,
                                           p_places, p_reach_s, p_since, false) c
                    WHERE c.id IS NOT NULL);
    IF p_error IS NULL THEN
        -- a trial of one that waited for too long before would take as long
        PERFORM refuse(r.what, r.key, r.sqlstate, r.error) FROM refused_rows r
        WHERE r.what = 'claim' AND r.key = v_jobs[1]::text AND is_no_rows_fault(r.sqlstate);
        PERFORM in_parts('claim', v_jobs::text[], 'try_to_claim(text[], jsonb)', jsonb_build_object(
            'worker', p_worker, 'queue', p_queue, 'kinds', p_kinds, 'budgets', p_budgets));
    ELSIF cardinality(v_jobs) > 0 THEN
        PERFORM refuse('claim', v_jobs[1]::text, p_sqlstate, p_error);
    END IF;
    RETURN (SELECT count(*) FROM unnest(v_jobs) AS u (id) WHERE is_refused('claim', u.id::text));
END $$;

-- One part of refuse_claims(): claims these jobs, whatever is due, and undoes that. p_claim: the
-- arguments. Locks as claim().
CREATE OR REPLACE FUNCTION try_to_claim(p_jobs text[], p_claim jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM carefully(p_jobs::text);
    PERFORM claim(a.worker, a.queue, 0, a.kinds, a.budgets)
    FROM jsonb_to_record(p_claim) AS a (worker int, queue text, kinds text[], budgets int[]);
    SET CONSTRAINTS ALL IMMEDIATE;
    RAISE EXCEPTION USING ERRCODE = 'PW000';
EXCEPTION WHEN SQLSTATE 'PW000' THEN
    NULL;
END $$;
