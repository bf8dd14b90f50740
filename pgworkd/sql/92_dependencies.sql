-- Dependencies: a job that waits for others is `blocked` with waiting_on > 0, and has that many
-- rows in job_dependencies; whoever deletes such rows counts down, under the job's row lock. Only
-- the transaction that inserts a job may make it wait, so nobody else can see the job, or depend on
-- it, before it commits. At its commit it locks what its jobs wait for, for that instant, and
-- checks what has ended meanwhile; whoever ends jobs checks for dependents in a statement of its
-- own after its row locks: one of the two sees the other, and no daemon waits for an uncommitted
-- transaction. What was locked, or ended under REPEATABLE READ, which does not see other commits,
-- and what is to be cancelled, is left to mend_dependencies().

-- Whether any session or job waits for one of these jobs: for whoever has ended them, in a
-- statement of its own after its row locks. Jobs that nothing waits for pay two index probes.
-- Locks nothing.
CREATE OR REPLACE FUNCTION is_awaited(p_ids uuid[]) RETURNS boolean LANGUAGE sql STABLE
    RETURN EXISTS (SELECT FROM job_dependencies d WHERE d.depends_on = ANY (p_ids))
        OR EXISTS (SELECT FROM result_waiters r WHERE r.job_id = ANY (p_ids));

-- Passes the end of these jobs on to those that wait for it. p_completed: else they are dead,
-- cancelled or expired. Handles 1,000 of their dependents, and 4 more for each of the jobs, at
-- most: the others are deferred, so that no end takes long, however many wait for it. Locks the
-- dependents in order of id, so that a fan-in is counted down one settle at a time; if the jobs
-- have not completed, with SKIP LOCKED, because the caller may hold trees. (Cancelling or retrying
-- a job together with one that was inserted before it may meet a settle of that in the other
-- order. Postgres ends one of the two: 40P01. Daemons then try again.)
CREATE OR REPLACE FUNCTION pass_on(p_ids uuid[], p_completed boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_most constant int := 1000 + 4 * cardinality(p_ids);
    v_ids  uuid[];                               -- those of p_ids that v_jobs wait for
    v_jobs uuid[];
    v_full boolean;                              -- there may be more
BEGIN
    SELECT array_agg(DISTINCT d.depends_on), array_agg(DISTINCT d.job_id)
               FILTER (WHERE p_completed OR d.on_failed_dependency = 'run'),
           count(*) = v_most
    INTO v_ids, v_jobs, v_full
    FROM (SELECT w.depends_on, w.job_id, w.on_failed_dependency FROM job_dependencies w
          WHERE w.depends_on = ANY (p_ids)
          ORDER BY w.depends_on, w.job_id LIMIT v_most) d;
    IF v_jobs IS NOT NULL THEN
        IF p_completed AND NOT no_wait() THEN
            v_jobs := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_jobs) ORDER BY j.id
                            FOR UPDATE);
        ELSE
            v_jobs := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_jobs)
                            FOR UPDATE SKIP LOCKED);
        END IF;
        PERFORM wait_less(v_jobs, v_ids, p_completed);
    END IF;
    IF v_full OR v_jobs IS NOT NULL AND no_wait() THEN
        PERFORM put_off(NULL, array_agg(u.id), p_completed)
        FROM (SELECT DISTINCT unnest(p_ids) AS id) u
        WHERE EXISTS (SELECT FROM job_dependencies d
                      WHERE d.depends_on = u.id
                        AND (p_completed OR v_full OR d.on_failed_dependency = 'run'))
        HAVING count(*) > 0;
    END IF;
    PERFORM notify_waiters(p_ids);
END $$;

-- Deletes what these jobs, which the caller holds, wait for among p_ids (without p_completed: only
-- under the rule `run`), counts down, and releases those that wait for nothing more, due from now
-- on at the earliest.
CREATE OR REPLACE FUNCTION wait_less(p_jobs uuid[], p_ids uuid[], p_completed boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_wake text[];
    v_kept boolean;
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM job_dependencies d
        WHERE d.depends_on = ANY (p_ids) AND d.job_id = ANY (p_jobs)
          AND (p_completed OR d.on_failed_dependency = 'run')
        RETURNING d.job_id
    ), moved AS (
        UPDATE jobs j
        SET waiting_on = j.waiting_on - n.less,
            status = CASE WHEN j.waiting_on > n.less THEN 'blocked' ELSE 'pending' END::job_status,
            run_at = CASE WHEN j.waiting_on > n.less THEN j.run_at
                          ELSE greatest(j.run_at, clock()) END
        FROM (SELECT g.job_id, count(*)::int AS less FROM gone g GROUP BY g.job_id) n
        WHERE j.id = n.job_id AND j.waiting_on > 0
        RETURNING j.queue::text, j.status
    )
    SELECT array_agg(DISTINCT m.queue) FILTER (WHERE m.status = 'pending'),
           count(*) < cardinality(p_jobs)
    INTO v_wake, v_kept FROM moved m;
    IF v_kept AND EXISTS (
            SELECT FROM jobs j WHERE j.id = ANY (p_jobs) AND j.waiting_on > 0
              AND (j.waiting_on > (SELECT count(*) FROM job_dependencies d WHERE d.job_id = j.id)
                   OR EXISTS (SELECT FROM job_dependencies d
                              WHERE d.job_id = j.id AND d.depends_on = ANY (p_ids)
                                AND (p_completed OR d.on_failed_dependency = 'run')))) THEN
        PERFORM raise_kept();
    END IF;
    PERFORM wake(v_wake);
END $$;

-- One part of mend_dependencies() and of apply_ends(): wait_less() for the jobs of
-- p_ended: `well` have completed, `badly` have not. Returns how many wait less.
CREATE OR REPLACE FUNCTION count_down(p_jobs uuid[], p_ended jsonb) RETURNS int
LANGUAGE sql VOLATILE AS $$
    SELECT wait_less(p_jobs, e.well, true), wait_less(p_jobs, e.badly, false)
    FROM jsonb_to_record(p_ended) AS e (well uuid[], badly uuid[]);
    SELECT cardinality(p_jobs)
$$;

-- One part of the same: ends these jobs, since one that they wait for did not complete. Returns how
-- many. Locks as archive().
CREATE OR REPLACE FUNCTION cancel_dependents(p_jobs uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    SELECT archive(p_jobs, 'cancelled', 'a job that it depends on did not complete')
$$;

-- What has become of jobs: their status, `discarded` for a dead one that ended, or `gone`. Locks
-- nothing; for the history see finished_of().
CREATE OR REPLACE FUNCTION became_all(p_ids uuid[]) RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_rest uuid[];
BEGIN
    RETURN QUERY SELECT j.id, j.status::text FROM jobs j
        WHERE j.id = ANY (p_ids) AND j.status <> 'completed';
    v_rest := ARRAY(SELECT i FROM unnest(p_ids) i
                    EXCEPT SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids)
                        AND j.status <> 'completed');
    IF v_rest <> '{}' THEN
        RETURN QUERY
        SELECT i, coalesce(CASE f.status WHEN 'dead' THEN 'discarded' ELSE f.status::text END,
                           'gone')
        FROM unnest(v_rest) i
        LEFT JOIN (SELECT DISTINCT ON (e.id) e.id, e.status FROM finished_of(v_rest) e) f
            ON f.id = i;
    END IF;
END $$;

-- The same of one. Calls became_all() only for a job that has ended, so that for a live one no
-- partition of the history is locked.
CREATE OR REPLACE FUNCTION became(p_id uuid) RETURNS text LANGUAGE sql STABLE
    RETURN coalesce((SELECT j.status::text FROM jobs j
                     WHERE j.id = p_id AND j.status <> 'completed'),
                    (SELECT b.status FROM became_all(ARRAY[p_id]) b));

-- True if the row was written by this transaction, in a savepoint or not: it is visible, yet its
-- transaction is in progress. (xmin has 32 bits: the nearest of all such numbers is meant.)
CREATE OR REPLACE FUNCTION is_ours(p_xmin xid) RETURNS boolean LANGUAGE sql VOLATILE
    RETURN coalesce(pg_xact_status(((pg_current_xact_id()::text::bigint - 2147483648)
        + ((p_xmin::text::bigint - pg_current_xact_id()::text::bigint + 2147483648)
           & 4294967295))::text::xid8) = 'in progress', false);

-- Makes a job, which this very transaction has inserted, wait until all of p_after have completed;
-- those that have completed already are skipped. p_on_failed_dependency: what to do if one of them
-- dies, is cancelled or expires: 'wait' (until it is retried and completes, or undepend()),
-- 'cancel' this one, too, within a minute or so, or 'run' it all the same. The first rule given for
-- a pair holds. Returns how many jobs it waits for now that it did not before. Raises PW004 if that
-- would never end: the job itself, a circle, one that does not exist, or, except with 'run', one
-- that can no longer complete. Locks p_after in order of id for the instant of the commit; see
-- check_dependencies().
CREATE OR REPLACE FUNCTION depend(p_job uuid, p_after uuid[],
                                  p_on_failed_dependency text DEFAULT 'wait')
RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_wrong text := CASE
        WHEN p_job IS NULL THEN 'p_job must not be NULL'
        WHEN p_after IS NULL OR array_position(p_after, NULL) IS NOT NULL
            THEN 'p_after must not be, or contain, NULL'
        WHEN cardinality(p_after) > 10000
            THEN 'p_after has more than 10000 jobs: add them by several calls'
        WHEN p_on_failed_dependency IS NULL
          OR p_on_failed_dependency NOT IN ('wait', 'cancel', 'run')
            THEN 'p_on_failed_dependency must be wait, cancel or run' END;
    v_after uuid[];
    v_never uuid;                                -- the first that cannot be waited for
    v_count int;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    ELSIF NOT coalesce((SELECT is_ours(j.xmin) AND j.status IN ('pending', 'blocked') FROM jobs j
                        WHERE j.id = p_job), false) THEN
        RAISE EXCEPTION 'job % was not inserted by this transaction', p_job USING ERRCODE = 'PW004',
            HINT = 'Say what a job waits for in the transaction that inserts it: '
                   'later it may already be running.';
    ELSIF p_job = ANY (p_after) THEN
        RAISE EXCEPTION 'job % cannot wait for itself', p_job
            USING ERRCODE = 'PW004', HINT = 'Leave it out of p_after.';
    ELSIF EXISTS (SELECT FROM job_dependencies d WHERE d.depends_on = p_job) AND p_job = ANY (ARRAY(
            WITH RECURSIVE above AS (
                SELECT unnest(p_after) AS id
                UNION
                SELECT d.depends_on FROM above a JOIN job_dependencies d ON d.job_id = a.id
            )
            SELECT a.id FROM above a)) THEN
        RAISE EXCEPTION 'job % would wait, by way of others, for itself', p_job
            USING ERRCODE = 'PW004',
            HINT = 'Jobs that wait for each other in a circle would never run: '
                   'leave one of them out of p_after.';
    END IF;
    WITH a AS MATERIALIZED (
        SELECT b.id, b.status FROM became_all(ARRAY(SELECT DISTINCT unnest(p_after))) b
    )
    SELECT array_agg(a.id) FILTER (WHERE a.status IN ('blocked', 'pending', 'running', 'failed')
                                         OR a.status = 'dead' AND p_on_failed_dependency = 'wait'),
           (array_agg(a.id ORDER BY a.id) FILTER (
               WHERE a.status = 'gone' OR a.status IN ('cancelled', 'expired', 'discarded')
                 AND p_on_failed_dependency <> 'run'
                  OR a.status = 'dead' AND p_on_failed_dependency = 'cancel'))[1]
    INTO v_after, v_never FROM a;
    IF v_never IS NOT NULL THEN
        RAISE EXCEPTION 'job % cannot wait for %, which %', p_job, v_never,
            (SELECT CASE b WHEN 'gone' THEN 'does not exist' WHEN 'expired' THEN 'has expired'
                         WHEN 'dead' THEN 'is dead'
                           ELSE 'was ' || b END FROM became(v_never) b)
            USING ERRCODE = 'PW004', HINT = CASE became(v_never)
                WHEN 'gone' THEN
                    'Check the id: its insert may have been rolled back, '
                    'or its queue keeps no history.'
                ELSE 'It will not complete: leave it out, or pass '
                     'p_on_failed_dependency => ''run''.' END;
    END IF;
    WITH added AS (
        INSERT INTO job_dependencies (job_id, depends_on, on_failed_dependency, unchecked)
        SELECT p_job, u.id, p_on_failed_dependency, u.place = 1
        FROM unnest(v_after) WITH ORDINALITY AS u (id, place)
        ON CONFLICT DO NOTHING
        RETURNING depends_on
    )
    SELECT count(*) INTO v_count FROM added a;
    UPDATE jobs j SET status = 'blocked', waiting_on = j.waiting_on + v_count
        WHERE j.id = p_job AND v_count > 0;
    RETURN v_count;
END $$;

-- Before a transaction commits that has made jobs wait: locks all that they wait for, in order of
-- id, FOR SHARE (changes since the snapshot of a REPEATABLE READ then raise 40001), and checks
-- which of those have ended in between.
CREATE OR REPLACE FUNCTION check_dependencies() RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_jobs  uuid[];
    v_after uuid[];
    v_ended record;
BEGIN
    WITH checked AS (UPDATE job_dependencies d SET unchecked = false WHERE d.unchecked
                     RETURNING d.job_id)
    SELECT array_agg(DISTINCT c.job_id) INTO v_jobs FROM checked c;
    IF v_jobs IS NULL THEN
        RETURN;
    END IF;
    v_after := ARRAY(SELECT DISTINCT d.depends_on FROM job_dependencies d
                     WHERE d.job_id = ANY (v_jobs));
    PERFORM FROM jobs j WHERE j.id = ANY (v_after) ORDER BY j.id FOR SHARE;
    SELECT array_agg(a.id) FILTER (WHERE a.status = 'completed') AS well,
           array_agg(a.id)
               FILTER (WHERE a.status NOT IN ('completed', 'blocked', 'pending', 'running',
                                              'failed')) AS badly,
           array_agg(a.id) FILTER (WHERE a.status = 'gone') AS gone
    INTO v_ended
    FROM became_all(v_after) a;
    IF EXISTS (SELECT FROM job_dependencies d
               WHERE d.job_id = ANY (v_jobs) AND d.depends_on = ANY (v_ended.gone)
                 AND d.on_failed_dependency <> 'run') THEN
        RAISE EXCEPTION 'job % has ended before this transaction committed, and nothing says how',
            v_ended.gone[1]
            USING ERRCODE = 'PW004',
                HINT = 'Its queue keeps no history. Run the transaction again.';
    END IF;
    IF v_ended.well IS NOT NULL THEN
        PERFORM wait_less(v_jobs, v_ended.well, true);
    END IF;
    IF v_ended.badly IS NOT NULL THEN
        PERFORM wait_less(v_jobs, v_ended.badly, false);
    END IF;
END $$;

-- At the end of a transaction that has made jobs wait: the first call handles all of them. Locks
-- as check_dependencies().
CREATE OR REPLACE FUNCTION dependencies_added() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    -- by key: each further call would read all that this transaction has checked
    IF EXISTS (SELECT FROM job_dependencies d
               WHERE d.depends_on = NEW.depends_on AND d.job_id = NEW.job_id AND d.unchecked) THEN
        PERFORM check_dependencies();
    END IF;
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t
                   WHERE t.tgrelid = 'pgworkd.job_dependencies'::regclass
                     AND t.tgname = 'dependencies_added') THEN
        CREATE CONSTRAINT TRIGGER dependencies_added AFTER INSERT ON job_dependencies
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.unchecked)
                EXECUTE FUNCTION dependencies_added();
    END IF;
END $$;

-- Releases dependents that were missed, and cancels those that go with a job that did not
-- complete, and with them those that go with these, and so on down: up to p_limit of each. Deletes
-- what ended jobs waited for. Returns how many it changed: p_limit or more if there may be more. A
-- job whose dependents are deferred is left to apply_effects(): its queue may keep no history, and
-- then only the effect says whether it has completed. Reads all rows of job_dependencies. Locks
-- dependents with SKIP LOCKED, then as archive().
CREATE OR REPLACE FUNCTION mend_dependencies(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ended record;
    v_jobs  uuid[];
    v_count int;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 6) THEN
        RETURN 0;
    END IF;
    PERFORM set_no_wait('on');
    SELECT array_agg(a.id) FILTER (WHERE a.status = 'completed') AS well,
           array_agg(a.id) FILTER (WHERE a.status <> 'completed') AS badly
    INTO v_ended
    FROM became_all(ARRAY(SELECT DISTINCT d.depends_on FROM job_dependencies d LEFT JOIN jobs p
                          ON p.id = d.depends_on
                          WHERE (p.id IS NULL OR p.status IN ('dead', 'completed'))
                            AND NOT EXISTS (SELECT FROM pending_effects e
                                            WHERE e.job_id = d.depends_on))) a;
    v_jobs := ARRAY(SELECT DISTINCT x.id FROM (
        SELECT j.id FROM job_dependencies d JOIN jobs j ON j.id = d.job_id
        WHERE (d.depends_on = ANY (v_ended.well) OR d.depends_on = ANY (v_ended.badly)
               AND d.on_failed_dependency = 'run') AND j.waiting_on > 0
          AND NOT is_refused('mend_dependencies', j.id::text)
        LIMIT p_limit FOR UPDATE OF j SKIP LOCKED) x);
    SELECT coalesce(sum(p.released::int), 0) INTO v_count
    FROM in_parts('mend_dependencies', v_jobs::text[], 'count_down(uuid[], jsonb)',
                  to_jsonb(v_ended)) AS p (released);
    v_jobs := ARRAY(
        SELECT j.id FROM (
            WITH RECURSIVE doomed AS (
                SELECT d.job_id AS id FROM job_dependencies d
                WHERE d.depends_on = ANY (v_ended.badly) AND d.on_failed_dependency = 'cancel'
                UNION
                SELECT d.job_id FROM doomed a JOIN job_dependencies d ON d.depends_on = a.id
                WHERE d.on_failed_dependency = 'cancel'
            )
            SELECT a.id FROM doomed a) x JOIN jobs j ON j.id = x.id
        WHERE j.waiting_on > 0
          AND NOT is_refused('mend_dependencies', j.id::text)
        LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    SELECT v_count + coalesce(sum(p.archived::int), 0) INTO v_count
    FROM in_parts('mend_dependencies', v_jobs::text[], 'cancel_dependents(uuid[])') AS p (archived);
    DELETE FROM job_dependencies d
    WHERE d.ctid = ANY (ARRAY(SELECT o.ctid FROM job_dependencies o
                              WHERE NOT EXISTS (SELECT FROM jobs j
                                                WHERE j.id = o.job_id AND j.waiting_on > 0)
                                                LIMIT 100 * p_limit));
    RETURN v_count;
END $$;

-- Makes jobs that wait for others runnable now; returns those it changed. Locks the jobs in order
-- of id.
CREATE OR REPLACE FUNCTION undepend(p_jobs uuid[], p_by text DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_who text := who(p_by);
    v_ids uuid[] := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_jobs) AND j.waiting_on > 0
                          ORDER BY j.id FOR UPDATE);
BEGIN
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT v_who, 'undepend', j.queue, j.id,
           jsonb_build_object('status', j.status, 'waiting_on', j.waiting_on),
           '{"status": "pending", "waiting_on": 0}'
    FROM jobs j WHERE j.id = ANY (v_ids) ORDER BY j.id;
    DELETE FROM job_dependencies d WHERE d.job_id = ANY (v_ids);
    UPDATE jobs j SET status = 'pending', waiting_on = 0, run_at = greatest(j.run_at, clock())
        WHERE j.id = ANY (v_ids);
    PERFORM wake(ARRAY(SELECT j.queue::text FROM jobs j WHERE j.id = ANY (v_ids)));
    RETURN v_ids;
END $$;

-- One row per blocked job, and why. `stuck_on`: a dependency that will not complete by itself.
CREATE OR REPLACE VIEW blocked_jobs AS
SELECT j.id, j.queue::text, coalesce(j.kind, j.queue)::text AS kind, j.batch_id,
       j.created_at::timestamptz, j.waiting_on,
       CASE WHEN j.waiting_on = 0 THEN 'waits for its serialize_key'
            ELSE 'waits for ' || j.waiting_on
                 || CASE j.waiting_on WHEN 1 THEN ' job' ELSE ' jobs' END
                 || coalesce('; job ' || s.id || CASE s.status
                     WHEN 'dead' THEN ' is dead: retry it, or undepend() this one'
                     ELSE CASE s.status WHEN 'gone' THEN ' is gone'
                               WHEN 'expired' THEN ' has expired' ELSE ' was ' || s.status END
                          || ': undepend() or cancel this one' END, '') END AS reason,
       s.id AS stuck_on
FROM jobs j
LEFT JOIN LATERAL (
    SELECT e.id, e.status FROM (SELECT d.depends_on AS id, became(d.depends_on) AS status
                                FROM job_dependencies d WHERE d.job_id = j.id) e
    WHERE e.status IN ('dead', 'discarded', 'cancelled', 'expired', 'gone')
      AND e.id <> ALL (ARRAY(SELECT p.job_id FROM pending_effects p WHERE p.completed))
    ORDER BY e.id LIMIT 1) s ON j.waiting_on > 0
WHERE j.status = 'blocked';
