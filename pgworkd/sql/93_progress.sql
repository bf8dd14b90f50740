-- Progress that the handlers of running jobs report.

-- Progress that running jobs report. Unlogged, and apart from `jobs`, so that a report is cheap.
CREATE UNLOGGED TABLE IF NOT EXISTS progress (
    job_id       uuid PRIMARY KEY,
    at timestamptz NOT NULL, attempt integer NOT NULL,
    done         real NOT NULL CONSTRAINT done_must_be_0_to_1 CHECK (done BETWEEN 0 AND 1),
    message      text
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- Stores the progress of running jobs: `done` from 0 to 1, and a message, of which 500 characters
-- are kept. Returns those whose attempt is still the running one, by the fence of the settles; for
-- others nothing is stored. Locks rows of `progress` in order of job_id.
CREATE OR REPLACE FUNCTION report_progress(p_ids uuid[], p_attempts int[], p_done real[],
                                           p_messages text[], p_worker int DEFAULT NULL,
                                           p_token uuid DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_won uuid[];
BEGIN
    WITH noted AS (
        INSERT INTO progress AS p (job_id, at, attempt, done, message)
        SELECT j.id, clock(), j.attempts, u.done, left(u.message, 500)
        FROM unnest(p_ids, p_attempts, p_done, p_messages) AS u (id, attempt, done, message)
        JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt AND j.status = 'running'
        WHERE p_worker IS NULL OR j.worker_id = p_worker
          AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token)
        ORDER BY j.id
        ON CONFLICT (job_id) DO UPDATE
        SET at = excluded.at, attempt = excluded.attempt, done = excluded.done,
            message = excluded.message
        WHERE p.attempt <= excluded.attempt
        RETURNING job_id
    )
    SELECT array_agg(n.job_id) INTO v_won FROM noted n;
    RETURN coalesce(v_won, '{}');
END $$;

-- One part of prune(): deletes these rows, and returns how many. Locks them.
CREATE OR REPLACE FUNCTION forget_progress(p_jobs uuid[]) RETURNS int LANGUAGE sql VOLATILE AS $$
    WITH gone AS (DELETE FROM progress p WHERE p.job_id = ANY (p_jobs) RETURNING 1)
    SELECT all_done(p_jobs, count(*)) FROM gone
$$;
