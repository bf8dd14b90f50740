-- Limits of queues: running jobs, and rates (GCRA). A claim where limits or keys count holds the
-- queue's lock, so that no two claims count at once. Whoever frees a key or changes a count may do
-- so at any time: rows first, then the lock. A holder of the lock never waits for a row, so the two
-- orders cannot deadlock.

-- The state of rates and turns: one row per queue (limit_key '') and per key with a rate.
CREATE TABLE IF NOT EXISTS rates (
    queue        name_text NOT NULL,
    limit_key    text NOT NULL DEFAULT '',
    spent_until  timestamptz NOT NULL DEFAULT '-infinity',  -- GCRA's theoretical arrival time
    turn text, searched text,        -- the key served last; how far by_turn() has searched for keys
    PRIMARY KEY (queue, limit_key)
);

-- How many starts of a rate may be ahead of their time: by default a tenth of a second's worth.
CREATE OR REPLACE FUNCTION burst(p_rate int, p_period_s real, p_burst int)
RETURNS int LANGUAGE sql IMMUTABLE
    RETURN coalesce(p_burst, least(greatest(1, ceil(0.1 * p_rate / p_period_s)), 1000000)::int);

-- How many starts a rate allows at p_now, and in how many seconds the next one after those will be
-- free (GCRA: each start costs period / rate seconds; up to burst() starts may be ahead). A time
-- more than a full burst ahead of p_now was written before the clock was set back: `reset_to` is
-- what it must be (else NULL), and what counts here. Locks nothing.
CREATE OR REPLACE FUNCTION rate_left(p_queue text, p_key text, p_rate int, p_period_s real,
                                     p_burst int, p_now timestamptz, OUT room int,
                                     OUT again_s float8, OUT reset_to timestamptz)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_cost_s  float8 := p_period_s::float8 / p_rate;
    v_burst   float8 := burst(p_rate, p_period_s, p_burst);
    v_ahead_s float8 := extract(epoch FROM (
        SELECT r.spent_until FROM rates r
        WHERE r.queue = p_queue AND r.limit_key = p_key AND r.spent_until > p_now) - p_now);
BEGIN
    IF v_ahead_s > v_burst * v_cost_s + 1 THEN  -- what a start costs is rounded up
        v_ahead_s := v_burst * v_cost_s;
        reset_to := p_now + make_interval(secs => v_ahead_s);
    END IF;
    v_ahead_s := coalesce(v_ahead_s, 0);
    room := greatest(floor(v_burst - v_ahead_s / v_cost_s), 0);
    again_s := greatest(v_ahead_s - (v_burst - room - 1) * v_cost_s, 0);
END $$;

-- Writes a time of rate_left(), without which nothing would start until the clock is where it was
-- before. NULL: does nothing. The caller holds the queue's lock. Locks that row of `rates`.
CREATE OR REPLACE FUNCTION reset_rate(p_queue text, p_key text, p_to timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE rates r SET spent_until = p_to WHERE r.queue = p_queue AND r.limit_key = p_key;
END $$;

-- How many jobs of a queue run, summed over the workers that run any. Locks nothing.
CREATE OR REPLACE FUNCTION running_in(p_queue text) RETURNS int
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_running int := 0;
    v_worker  int := 0;
BEGIN
    LOOP
        v_worker := (SELECT min(j.worker_id) FROM jobs j
                     WHERE j.status = 'running' AND j.worker_id > v_worker);
        EXIT WHEN v_worker IS NULL;
        v_running := v_running + (SELECT count(*) FROM jobs j
                                  WHERE j.status = 'running' AND j.worker_id = v_worker
                                    AND j.queue = p_queue);
    END LOOP;
    RETURN v_running;
END $$;

-- How many of p_limit jobs the queue's own limits let a claim take and, if a rate allows fewer,
-- when to ask again. The caller holds the queue's lock. Locks at most the row of `rates`.
CREATE OR REPLACE FUNCTION allowance(p_queue text, p_limit int, p_now timestamptz)
RETURNS TABLE (room int, again_s float8)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_queue queues;
    v_rate  record;
BEGIN
    SELECT * INTO v_queue FROM queues q WHERE q.name = p_queue;
    room := p_limit;
    IF v_queue.max_running IS NOT NULL THEN
        room := least(room, v_queue.max_running - running_in(p_queue));
    END IF;
    IF room > 0 AND v_queue.rate IS NOT NULL THEN
        v_rate := rate_left(p_queue, '', v_queue.rate, v_queue.rate_period_s, v_queue.rate_burst,
                            p_now);
        IF v_rate.reset_to IS NOT NULL THEN
            PERFORM reset_rate(p_queue, '', v_rate.reset_to);
        END IF;
        IF v_rate.room < room THEN
            room := v_rate.room;
            again_s := v_rate.again_s;
        END IF;
    END IF;
    room := greatest(room, 0);
    RETURN NEXT;
END $$;

-- How many jobs of one limit_key, of which p_running run and p_taken are about to, may start now
-- by the queue's limits per key and, if a rate allows fewer, when to ask again; `reset_to`: see
-- rate_left(). Locks nothing.
CREATE OR REPLACE FUNCTION key_left(p_queue queues, p_key text, p_running int, p_taken int,
                                    p_now timestamptz, OUT room int, OUT again_s float8,
                                    OUT reset_to timestamptz)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_rate record;
BEGIN
    room := CASE WHEN p_key = '' THEN 1000000
                 ELSE greatest(coalesce(p_queue.limit_per_key - p_running, 1000000) - p_taken,
                               0) END;
    IF p_key <> '' AND room > 0 AND p_queue.rate_per_key IS NOT NULL THEN
        v_rate := rate_left(p_queue.name, p_key, p_queue.rate_per_key,
                            p_queue.rate_per_key_period_s, p_queue.rate_per_key_burst, p_now);
        reset_to := v_rate.reset_to;
        IF v_rate.room - p_taken < room THEN
            room := greatest(v_rate.room - p_taken, 0);
            again_s := v_rate.again_s;
        END IF;
    END IF;
END $$;

-- As key_left(), for a claim: resets the rate where that is needed. The caller holds the queue's
-- lock. Locks at most the key's row of `rates`.
CREATE OR REPLACE FUNCTION key_allowance(p_queue queues, p_key text, p_running int, p_taken int,
                                         p_now timestamptz, OUT room int, OUT again_s float8)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_left record := key_left(p_queue, p_key, p_running, p_taken, p_now);
BEGIN
    IF v_left.reset_to IS NOT NULL THEN
        PERFORM reset_rate(p_queue.name, p_key, v_left.reset_to);
    END IF;
    room := v_left.room;
    again_s := v_left.again_s;
END $$;

-- True if a job of this limit_key may start now. For a single one; by_turn() checks many at once.
CREATE OR REPLACE FUNCTION key_has_room(p_queue text, p_key text, p_now timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT p_key IS NULL OR coalesce((
        SELECT a.room > 0
        FROM queues q, key_allowance(q, p_key,
                                     (SELECT count(*) FROM jobs j WHERE j.status = 'running'
                                      AND j.queue = p_queue
                                                AND j.limit_key = p_key)::int, 0, p_now) a
        WHERE q.name = p_queue), true)
$$;

-- Charges the start of these jobs, which the caller is about to take under the queue's lock, to
-- the queue's rates. The cost of a start is rounded up to the microsecond. Locks the rows of
-- `rates`.
CREATE OR REPLACE FUNCTION spend(p_queue text, p_rows tid[], p_now timestamptz) RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO rates AS r (queue, limit_key, spent_until)
    SELECT p_queue, s.key,
           p_now + make_interval(secs => ceil(s.starts * s.period_s::float8 / s.rate * 1e6) / 1e6)
    FROM (SELECT '' AS key, cardinality(p_rows) AS starts, q.rate_period_s AS period_s, q.rate
          FROM queues q WHERE q.name = p_queue AND q.rate IS NOT NULL AND cardinality(p_rows) > 0
          UNION ALL
          SELECT j.limit_key, count(*), q.rate_per_key_period_s, q.rate_per_key
          FROM queues q, jobs j
          WHERE q.name = p_queue AND q.rate_per_key IS NOT NULL AND j.limit_key IS NOT NULL
            AND j.ctid = ANY (p_rows)
          GROUP BY j.limit_key, q.rate_per_key_period_s, q.rate_per_key) s
    ORDER BY s.key  -- as in rates_follow()
    ON CONFLICT (queue, limit_key) DO UPDATE
    SET spent_until = greatest(r.spent_until, p_now) + (excluded.spent_until - p_now)
$$;

-- Applies a new rate from now on: no more is spent ahead than its own burst; otherwise jobs would
-- wait for the time of an old, slow one. Runs when its transaction commits. Locks the queue's rows
-- of `rates`, in order of key.
CREATE OR REPLACE FUNCTION rates_follow() RETURNS trigger
LANGUAGE plpgsql AS $$
DECLARE
    v_own_s float8 := burst(NEW.rate, NEW.rate_period_s, NEW.rate_burst)
        * NEW.rate_period_s::float8 / NEW.rate;
    v_key_s float8 := burst(NEW.rate_per_key, NEW.rate_per_key_period_s, NEW.rate_per_key_burst)
                      * NEW.rate_per_key_period_s::float8 / NEW.rate_per_key;
BEGIN
    UPDATE rates r SET spent_until = clock()
        + make_interval(secs => CASE r.limit_key WHEN '' THEN v_own_s ELSE v_key_s END)
    WHERE r.ctid = ANY (ARRAY(
        SELECT s.ctid FROM rates s
        WHERE s.queue = NEW.name
          AND s.spent_until > clock() + make_interval(
              secs => CASE s.limit_key WHEN '' THEN v_own_s ELSE v_key_s END)
        ORDER BY s.limit_key FOR UPDATE));
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t
                   WHERE t.tgrelid = 'pgworkd.queues'::regclass AND t.tgname = 'rates_follow') THEN
        CREATE CONSTRAINT TRIGGER rates_follow
            AFTER INSERT OR UPDATE OF rate, rate_period_s, rate_burst, rate_per_key,
                rate_per_key_period_s, rate_per_key_burst
            ON queues DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
            WHEN (NEW.rate IS NOT NULL OR NEW.rate_per_key IS NOT NULL)
                EXECUTE FUNCTION rates_follow();
    END IF;
END $$;
