-- Signals: how many jobs each queue had (samples), and what ran in each period and how long it took
-- (minutes), so that whoever draws or watches them counts nothing. Statistics only: no job is ever
-- decided by them.

-- One row per sample of all queues, 5 s apart or more; `every_s`: thinned to one in so many
-- seconds. A queue that has no row in queue_samples at that time had no live job.
CREATE TABLE IF NOT EXISTS samples (
    at           timestamptz PRIMARY KEY,
    took_s       float8 NOT NULL,
    every_s      integer NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS samples_every ON samples (every_s, at);
-- The columns are those of queue_stats: each job is in one of them. `due`: it could run now, be it
-- for the first time or again; `failed`: its retry is still to come.
CREATE TABLE IF NOT EXISTS queue_samples (
    at           timestamptz NOT NULL,
    queue        text NOT NULL,
    due bigint NOT NULL, scheduled bigint NOT NULL, running bigint NOT NULL,
    failed bigint NOT NULL, blocked bigint NOT NULL, dead bigint NOT NULL,
    oldest_due_s float8,             -- NULL: none is due
    PRIMARY KEY (queue, at)
);
CREATE INDEX IF NOT EXISTS queue_samples_at ON queue_samples (at);

-- What ended between `at` and `period_s` later. Rows add up: any number of them may exist for one
-- period, from several workers or from one. `waits` (due to start) and `runs` count durations by
-- the bounds of histogram_bounds(); wait_s and run_s are their sums. `worker`: NULL once summed up.
CREATE TABLE IF NOT EXISTS queue_minutes (
    at           timestamptz NOT NULL,
    period_s     integer NOT NULL,
    queue text NOT NULL, kind text NOT NULL, worker text,
    started bigint NOT NULL, completed bigint NOT NULL, failed bigint NOT NULL,
    dead bigint NOT NULL, released bigint NOT NULL,
    waits bigint[] NOT NULL, runs bigint[] NOT NULL,
    wait_s float8 NOT NULL, run_s float8 NOT NULL,
    cancelled bigint NOT NULL DEFAULT 0, expired bigint NOT NULL DEFAULT 0  -- by archive()
);
DO $$
BEGIN  -- it has no key, and can be published so; only once, because that takes the table's lock
    IF (SELECT c.relreplident FROM pg_class c WHERE c.oid = 'queue_minutes'::regclass) <> 'f' THEN
        ALTER TABLE queue_minutes REPLICA IDENTITY FULL;
    END IF;
END $$;
CREATE INDEX IF NOT EXISTS queue_minutes_queue ON queue_minutes (queue, at);
CREATE INDEX IF NOT EXISTS queue_minutes_period ON queue_minutes (period_s, at);

-- The upper bounds of the first 71 of 72 counts, in seconds; the last count has none.
CREATE OR REPLACE FUNCTION histogram_bounds() RETURNS float8[] LANGUAGE sql IMMUTABLE
    RETURN '{0.001,0.00126,0.00159,0.002,0.00251,0.00316,0.00398,0.005,0.0063,0.00794,
             0.01,0.0126,0.0159,0.02,0.0251,0.0316,0.0398,0.05,0.063,0.0794,
             0.1,0.126,0.159,0.2,0.251,0.316,0.398,0.5,0.63,0.794,
             1,1.26,1.59,2,2.51,3.16,3.98,5,6.3,7.94,
             10,12.6,15.9,20,25.1,31.6,39.8,50,63,79.4,
             100,126,159,200,251,316,398,500,630,794,
             1000,1260,1590,2000,2510,3160,3980,5000,6300,7940,10000}'::float8[];

-- The same counts by the bounds of now, if they are by those of versions before 15, of which there
-- were 22 (1, 2 and 5 of each decade).
CREATE OR REPLACE FUNCTION finer_counts(p_counts bigint[]) RETURNS bigint[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN cardinality(p_counts) <> 23 THEN p_counts ELSE (
        SELECT array_agg(coalesce(p_counts[o.place], 0) ORDER BY n.place)
        FROM generate_series(1, 72) AS n (place) LEFT JOIN generate_series(1, 23) AS o (place)
            ON n.place = CASE o.place WHEN 23 THEN 72
                ELSE 10 * ((o.place - 1) / 3) + (ARRAY[1, 4, 8])[(o.place - 1) % 3 + 1] END) END
$$;
DO $$
BEGIN
    IF EXISTS (SELECT FROM schema_version v WHERE v.version < 15) THEN
        UPDATE queue_minutes m SET waits = finer_counts(m.waits), runs = finer_counts(m.runs);
    END IF;
END $$;

-- The duration, in seconds, that p_share (0 to 1) of these counts do not exceed, on a straight line
-- between two bounds; for the last count its lower bound; NULL: nothing was counted. Locks nothing.
CREATE OR REPLACE FUNCTION percentile(p_counts bigint[], p_share float8) RETURNS float8
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_bounds float8[] := histogram_bounds();
    v_rank   float8;
    v_below  float8 := 0;
    v_count  bigint;
BEGIN
    v_rank := p_share * (SELECT sum(c) FROM unnest(p_counts) c);
    FOR i IN 1..coalesce(cardinality(p_counts), 0) LOOP
        v_count := p_counts[i];
        IF v_count > 0 AND v_below + v_count >= v_rank THEN
            RETURN CASE WHEN i > cardinality(v_bounds) THEN v_bounds[i - 1]
                ELSE coalesce(v_bounds[i - 1], 0) + (v_bounds[i] - coalesce(v_bounds[i - 1], 0))
                     * greatest(v_rank - v_below, 0) / v_count END;
        END IF;
        v_below := v_below + v_count;
    END LOOP;
    RETURN NULL;
END $$;

-- Counts the jobs of all queues, if that is due, for the whole fleet: every 5 s, or 20 times what
-- the last one took. Returns the seconds until the next one is due. After a step back of the clock
-- the samples of the time to come are dropped. Locks no job.
CREATE OR REPLACE FUNCTION sample_queues() RETURNS float8
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now    timestamptz := clock();
    v_last   samples;
    v_due_at timestamptz;
    v_began  timestamptz;
    v_took_s float8;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 8) THEN
        RETURN 5;
    END IF;
    SELECT * INTO v_last FROM samples s ORDER BY s.at DESC LIMIT 1;
    v_due_at := v_last.at + make_interval(secs => greatest(5, 20 * v_last.took_s));
    IF v_last.at <= v_now AND v_due_at > v_now THEN
        RETURN extract(epoch FROM v_due_at - v_now);
    END IF;
    IF v_last.at > v_now THEN
        DELETE FROM queue_samples s WHERE s.at > v_now;
        DELETE FROM samples s WHERE s.at > v_now;
    END IF;
    v_began := clock_timestamp();
    INSERT INTO queue_samples (at, queue, due, scheduled, running, failed, blocked, dead,
                               oldest_due_s)
    SELECT v_now, j.queue,
           count(*) FILTER (WHERE j.status IN ('pending', 'failed') AND j.run_at <= v_now),
           count(*) FILTER (WHERE j.status = 'pending' AND j.run_at > v_now),
           count(*) FILTER (WHERE j.status = 'running'),
           count(*) FILTER (WHERE j.status = 'failed' AND j.run_at > v_now),
           count(*) FILTER (WHERE j.status = 'blocked'),
           count(*) FILTER (WHERE j.status = 'dead'),
           extract(epoch FROM v_now - min(j.run_at) FILTER (
               WHERE j.status IN ('pending', 'failed') AND j.run_at <= v_now))
    FROM jobs j WHERE j.status <> 'completed' GROUP BY j.queue;
    v_took_s := extract(epoch FROM clock_timestamp() - v_began);
    INSERT INTO samples (at, took_s) VALUES (v_now, greatest(v_took_s, 0))
    ON CONFLICT (at) DO NOTHING;
    RETURN greatest(5, 20 * v_took_s);
END $$;

-- Adds one period of a worker's statistics, which ends now; what an outage has made longer than an
-- hour counts in its last hour. What is cancelled or expires is counted by archive(). The arrays
-- are parallel, p_waits and p_runs have one array as text for each row. Locks nothing.
CREATE OR REPLACE FUNCTION append_minutes(p_worker text, p_period_s float8, p_queues text[],
                                          p_kinds text[], p_started bigint[], p_completed bigint[],
                                          p_failed bigint[], p_dead bigint[], p_released bigint[],
                                          p_waits text[], p_runs text[], p_wait_s float8[],
                                          p_run_s float8[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO queue_minutes (at, period_s, queue, kind, worker, started, completed, failed, dead,
                               released, waits, runs, wait_s, run_s)
    SELECT clock() - make_interval(secs => least(p_period_s, 3600)),
           ceil(least(p_period_s, 3600)), u.queue, u.kind,
           left(p_worker, 200), u.started, u.completed, u.failed, u.dead, u.released,
           finer_counts(u.waits::bigint[]), finer_counts(u.runs::bigint[]), u.wait_s, u.run_s
    FROM unnest(p_queues, p_kinds, p_started, p_completed, p_failed, p_dead, p_released, p_waits,
                p_runs, p_wait_s, p_run_s)
        AS u (queue, kind, started, completed, failed, dead, released, waits, runs, wait_s, run_s);
END $$;

-- The durations of runs in these queues in the last 8 days, by queue and kind, by the bounds of
-- histogram_bounds(): of hours that are summed up, and of the last 6 hours. Locks nothing.
CREATE OR REPLACE FUNCTION usual_runs(p_queues text[], p_kinds text[])
RETURNS TABLE (queue text, kind text, runs bigint[])
LANGUAGE sql STABLE AS $$
    SELECT c.queue, c.kind, array_agg(c.runs ORDER BY c.place)
    FROM (SELECT m.queue, m.kind, r.place, sum(r.run)::bigint AS runs
          FROM queue_minutes m, unnest(m.runs) WITH ORDINALITY AS r (run, place)
          WHERE m.queue = ANY (p_queues) AND m.kind = ANY (p_kinds)
            AND (m.period_s = 3600 AND m.at > clock() - interval '8 days'
                 OR m.period_s < 3600 AND m.at > clock() - interval '6 hours')
          GROUP BY m.queue, m.kind, r.place) c
    GROUP BY c.queue, c.kind
$$;

-- Sums up to p_limit rows of queue_minutes that are older than p_age and shorter than p_period_s to
-- one row per period, queue and kind. Returns how many there were. As rows add up, it may be cut
-- off anywhere. Locks rows with SKIP LOCKED.
CREATE OR REPLACE FUNCTION sum_minutes(p_period_s int, p_age interval, p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_rows int;
BEGIN
    WITH gone AS MATERIALIZED (
        DELETE FROM queue_minutes m WHERE m.ctid = ANY (ARRAY(
            SELECT o.ctid FROM queue_minutes o
            WHERE o.period_s < p_period_s AND o.at < clock() - p_age
            ORDER BY o.period_s, o.at LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING to_timestamp(floor(extract(epoch FROM m.at) / p_period_s) * p_period_s) AS of, m.*
    ), totals AS (
        SELECT g.of, g.queue, g.kind, count(*) AS rows, sum(g.started) AS started,
               sum(g.completed) AS completed, sum(g.failed) AS failed, sum(g.dead) AS dead,
               sum(g.released) AS released, sum(g.cancelled) AS cancelled,
               sum(g.expired) AS expired, sum(g.wait_s) AS wait_s, sum(g.run_s) AS run_s
        FROM gone g GROUP BY g.of, g.queue, g.kind
    ), counts AS (
        SELECT c.of, c.queue, c.kind, array_agg(c.waits ORDER BY c.place) AS waits,
               array_agg(c.runs ORDER BY c.place) AS runs
        FROM (SELECT g.of, g.queue, g.kind, u.place, sum(u.wait)::bigint AS waits,
                     sum(u.run)::bigint AS runs
              FROM gone g, ROWS FROM (unnest(g.waits), unnest(g.runs))
                  WITH ORDINALITY AS u (wait, run, place)
              GROUP BY g.of, g.queue, g.kind, u.place) c
        GROUP BY c.of, c.queue, c.kind
    ), made AS (
        INSERT INTO queue_minutes (at, period_s, queue, kind, started, completed, failed, dead,
                                   released, waits, runs, wait_s, run_s, cancelled, expired)
        SELECT t.of, p_period_s, t.queue, t.kind, t.started, t.completed, t.failed, t.dead,
               t.released, c.waits, c.runs, t.wait_s, t.run_s, t.cancelled, t.expired
        FROM totals t JOIN counts c ON c.of = t.of AND c.queue = t.queue AND c.kind = t.kind
    )
    SELECT coalesce(sum(t.rows), 0) INTO v_rows FROM totals t;
    RETURN v_rows;
END $$;

-- Thins samples older than p_age to the first in each p_every_s seconds, up to p_limit of them.
-- Returns how many it looked at. Locks rows with SKIP LOCKED.
CREATE OR REPLACE FUNCTION thin_samples(p_every_s int, p_age interval, p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_old  timestamptz[];
    v_keep timestamptz[];
BEGIN
    v_old := ARRAY(SELECT s.at FROM samples s
                   WHERE s.every_s < p_every_s AND s.at < clock() - p_age
                   ORDER BY s.at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    v_keep := ARRAY(
        SELECT min(o.at) FROM unnest(v_old) o (at)
        GROUP BY floor(extract(epoch FROM o.at) / p_every_s)
        HAVING NOT EXISTS (
            SELECT FROM samples k WHERE k.every_s >= p_every_s
              AND k.at >= to_timestamp(floor(extract(epoch FROM min(o.at)) / p_every_s) * p_every_s)
              AND k.at < min(o.at)));
    UPDATE samples s SET every_s = p_every_s WHERE s.at = ANY (v_keep);
    DELETE FROM queue_samples s WHERE s.at = ANY (v_old) AND s.at <> ALL (v_keep);
    DELETE FROM samples s WHERE s.at = ANY (v_old) AND s.at <> ALL (v_keep);
    RETURN cardinality(v_old);
END $$;

-- Retention of all signals, for the whole fleet, in steps of p_limit rows: statistics by the minute
-- after an hour, by the hour after 3 days (samples: 7), gone after 400; deaths, and groups of
-- errors without one, after p_keep_dead_days. Returns true if a step was full: call it again. Locks
-- rows with SKIP LOCKED.
CREATE OR REPLACE FUNCTION roll_up(p_keep_dead_days int, p_limit int DEFAULT 2000) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_most int;
    v_rows int;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 9) THEN
        RETURN false;
    END IF;
    v_most := greatest(sum_minutes(60, '1 hour', p_limit), sum_minutes(3600, '3 days', p_limit),
                       thin_samples(60, '1 hour', p_limit), thin_samples(3600, '7 days', p_limit),
                       forget_deaths(p_keep_dead_days, p_limit));
    DELETE FROM queue_minutes m WHERE m.ctid = ANY (ARRAY(
        SELECT o.ctid FROM queue_minutes o
        WHERE o.period_s = 3600 AND o.at < clock() - interval '400 days'
        ORDER BY o.at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    v_most := greatest(v_most, v_rows);
    DELETE FROM queue_samples s WHERE s.ctid = ANY (ARRAY(
        SELECT o.ctid FROM queue_samples o WHERE o.at < clock() - interval '400 days'
        ORDER BY o.at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    DELETE FROM samples s WHERE s.at < clock() - interval '401 days';
    RETURN greatest(v_most, v_rows) >= p_limit;
END $$;

-- The newest sample of every queue that it found jobs in, or that has settings or a worker, and its
-- age. Reads one sample.
CREATE OR REPLACE VIEW queue_depths AS
SELECT n.queue, coalesce(s.due, 0) AS due, coalesce(s.scheduled, 0) AS scheduled,
       coalesce(s.running, 0) AS running, coalesce(s.failed, 0) AS failed,
       coalesce(s.blocked, 0) AS blocked, coalesce(s.dead, 0) AS dead, s.oldest_due_s,
       extract(epoch FROM clock() - l.at)::float8 AS sample_age_s
FROM (SELECT x.at FROM samples x ORDER BY x.at DESC LIMIT 1) l
CROSS JOIN LATERAL (SELECT y.queue FROM queue_samples y WHERE y.at = l.at
                    UNION SELECT q.name::text FROM queues q
                    UNION SELECT p.queue::text FROM known_pools() p) n
LEFT JOIN queue_samples s ON s.queue = n.queue AND s.at = l.at;

-- What ended from p_from to p_until, by p_step_s seconds, for one queue, one kind, or all (NULL),
-- with percentiles of waiting and running in seconds. Periods in which nothing ended are left out.
-- Locks nothing.
CREATE OR REPLACE FUNCTION throughput(p_from timestamptz, p_until timestamptz, p_step_s int,
                                      p_queue text DEFAULT NULL, p_kind text DEFAULT NULL)
RETURNS TABLE (at timestamptz, started bigint, completed bigint, failed bigint, dead bigint,
               released bigint, wait_p50_s float8, wait_p95_s float8, run_p50_s float8,
               run_p95_s float8, cancelled bigint, expired bigint)
LANGUAGE sql STABLE AS $$
    WITH found AS (
        SELECT to_timestamp(floor(extract(epoch FROM m.at) / p_step_s) * p_step_s) AS of, m.*
        FROM queue_minutes m
        WHERE m.at >= p_from AND m.at < p_until AND (p_queue IS NULL OR m.queue = p_queue)
          AND (p_kind IS NULL OR m.kind = p_kind)
    ), counts AS (
        SELECT c.of, array_agg(c.waits ORDER BY c.place) AS waits,
               array_agg(c.runs ORDER BY c.place) AS runs
        FROM (SELECT f.of, u.place, sum(u.wait)::bigint AS waits, sum(u.run)::bigint AS runs
              FROM found f, ROWS FROM (unnest(f.waits), unnest(f.runs))
                  WITH ORDINALITY AS u (wait, run, place)
              GROUP BY f.of, u.place) c
        GROUP BY c.of
    )
    SELECT t.of, t.started, t.completed, t.failed, t.dead, t.released,
           percentile(c.waits, 0.5), percentile(c.waits, 0.95), percentile(c.runs, 0.5),
           percentile(c.runs, 0.95), t.cancelled, t.expired
    FROM (SELECT f.of, sum(f.started)::bigint AS started, sum(f.completed)::bigint AS completed,
                 sum(f.failed)::bigint AS failed, sum(f.dead)::bigint AS dead,
                 sum(f.released)::bigint AS released, sum(f.cancelled)::bigint AS cancelled,
                 sum(f.expired)::bigint AS expired FROM found f GROUP BY f.of) t
    JOIN counts c ON c.of = t.of ORDER BY t.of
$$;
