-- pgworkd: the engine.
--
-- THE STORY
-- An application inserts a row into `jobs`, in its own transaction. A trigger sends one NOTIFY per
-- queue, and only if a pool of that queue is asleep. A daemon, registered in `workers`, calls claim():
-- it takes the due rows in order of (priority, run_at, id), skipping what others hold, and marks them
-- `running` with its worker id; `attempts` rises by one and never falls, so (id, attempt) names this
-- very run for ever: the fence. The daemon proves that it lives by heartbeat(), one row for all its jobs.
--
-- Each run ends in exactly one settle_...() call, which changes the row only if it is still `running`
-- under the same attempt; whoever comes late changes nothing and is told so:
--
--   settle_completed   the row moves to finished_jobs with its result
--   settle_failed      waits as `failed` for its retry, or is `dead` when its budget is spent
--   settle_released    goes back unspent: snoozed, given back at a stop, or no handler known (yet)
--   settle_ended       the row moves to finished_jobs as cancelled or expired
--
-- A worker that stops renewing its lease is lost: rescue() takes its jobs back and counts a loss on
-- each. Any of them may be the one that killed it, so jobs with a loss run one at a time per worker;
-- the third loss makes a job dead. rescue() does nothing for one lease after an outage or a clock
-- jump, because then every healthy worker looks lost.
--
-- A schedule has at most one live occurrence. The transaction that settles it inserts the next one;
-- ensure_schedules lists the chains that have no live occurrence, so that any daemon restores them.
--
-- `jobs` holds live work only, so it stays small whatever the history; `finished_jobs` is partitioned
-- by day and forgets by dropping partitions.
--
-- RULES
-- All instants are the database's, read through clock(); tests turn it with SET pgworkd.clock.
-- Locks are taken in this order: advisory, workers, jobs, schedules; several rows of one table in
-- the order of their key, or with SKIP LOCKED. Claims go by ctid = ANY(ARRAY(SELECT .. LIMIT n FOR
-- UPDATE SKIP LOCKED)): IN (SELECT .. LIMIT ..) may be planned as a nested loop and claim too much.
-- The file is re-runnable, keeps grants and what others built on it, and runs unchanged on Postgres 14
-- to 18. Chapters: 1 words, 2 tables, 3 worker life, 4 claim, 5 settle, 6 schedules, 7 mend,
-- 8 operators, 9 insert trigger, 10 views.

CREATE SCHEMA IF NOT EXISTS pgworkd;
SET search_path = pgworkd, pg_catalog;
SET client_min_messages = warning;

-- ------------------------------------------------------------------------------------------------
-- 1 Words
-- ------------------------------------------------------------------------------------------------

DO $$
BEGIN
    IF to_regtype('pgworkd.job_status') IS NULL THEN
        CREATE TYPE job_status AS ENUM
            ('blocked', 'pending', 'running', 'failed', 'dead', 'completed', 'cancelled', 'expired');

        -- Bounds are domains, not table CHECKs: a domain looks at a value when it is written; a CHECK
        -- looks again at every claim and settle, and would unpack a large payload each time.
        CREATE DOMAIN name_text AS text
            CONSTRAINT name_must_have_1_to_200_characters CHECK (char_length(VALUE) BETWEEN 1 AND 200);
        CREATE DOMAIN key_text AS text
            CONSTRAINT key_must_have_1_to_512_characters CHECK (char_length(VALUE) BETWEEN 1 AND 512)
            CONSTRAINT key_must_not_exceed_1536_bytes CHECK (octet_length(VALUE) <= 1536);  -- else no index takes it
        CREATE DOMAIN payload_object AS jsonb
            CONSTRAINT value_must_be_a_json_object CHECK (jsonb_typeof(VALUE) = 'object')
            -- 1 MiB of compact text; Postgres prints a space after each comma and colon. What is stored in
            -- 2,000 bytes is small enough even when it comes compressed from another table.
            CONSTRAINT value_must_not_exceed_1_mib
                CHECK (pg_column_size(VALUE) <= 2000 OR octet_length(VALUE::text) <= 2097152);
        CREATE DOMAIN json_result AS jsonb
            CONSTRAINT result_must_not_exceed_1_mib
                CHECK (pg_column_size(VALUE) <= 2000 OR octet_length(VALUE::text) <= 2097152);
        CREATE DOMAIN error_list AS jsonb
            CONSTRAINT errors_must_be_a_json_array CHECK (jsonb_typeof(VALUE) = 'array');
        CREATE DOMAIN instant AS timestamptz
            CONSTRAINT instant_must_lie_between_1970_and_2200
            CHECK (VALUE >= '1970-01-01 00:00:00+00' AND VALUE < '2200-01-01 00:00:00+00');
        CREATE DOMAIN attempts_limit AS integer
            CONSTRAINT max_attempts_must_be_1_to_1000 CHECK (VALUE BETWEEN 1 AND 1000);
        CREATE DOMAIN period_s AS real
            CONSTRAINT period_must_be_above_0_and_at_most_366_days CHECK (VALUE > 0 AND VALUE <= 31622400);
    END IF;
END $$;

-- The database's time. SET pgworkd.clock = '2027-03-28 00:59:59+00' stands it still for one session.
-- (The bodies of clock and new_id are parsed here, not in the caller's search_path, and clock is inlined.)
CREATE OR REPLACE FUNCTION clock() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    RETURN coalesce(nullif(current_setting('pgworkd.clock', true), '')::timestamptz, statement_timestamp());

-- A job id: uuid version 7 (RFC 9562), so ids sort by time. Before Postgres 18 we build it ourselves,
-- with the microseconds in the 12 bits after the version, so that order holds within a millisecond too.
DO $$
BEGIN
    IF current_setting('server_version_num')::int >= 180000 THEN
        EXECUTE $def$
            CREATE OR REPLACE FUNCTION new_id() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE RETURN uuidv7()
        $def$;
    ELSE
        EXECUTE $def$
            CREATE OR REPLACE FUNCTION new_id() RETURNS uuid LANGUAGE sql VOLATILE PARALLEL SAFE RETURN (
                SELECT (substr(hex, 1, 12) || '7' || substr(hex, 13, 3)
                        || substr(translate(substr(rnd, 1, 1), '0123456789abcdef', '89ab89ab89ab89ab'), 1, 1)
                        || substr(rnd, 2, 15))::uuid
                FROM (SELECT lpad(to_hex(us / 1000), 12, '0') || lpad(to_hex(us % 1000 * 4096 / 1000), 3, '0') AS hex,
                             substr(md5(gen_random_uuid()::text), 1, 16) AS rnd
                      FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us) t) x)
        $def$;
    END IF;
END $$;

-- ------------------------------------------------------------------------------------------------
-- 2 Tables
-- ------------------------------------------------------------------------------------------------

CREATE TABLE IF NOT EXISTS schema_version (
    version      integer NOT NULL,
    installed_at timestamptz NOT NULL DEFAULT clock(),
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row)
);

-- One process that claims. Its lease protects every job it runs. Ids are never used twice.
CREATE TABLE IF NOT EXISTS workers (
    id          integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL CHECK (char_length(name) <= 200),   -- host name unless set
    pid         integer NOT NULL,
    version     text NOT NULL,
    state       text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'stopping', 'vanished')),
    lease_s     real NOT NULL CHECK (lease_s BETWEEN 1 AND 3600),
    started_at  timestamptz NOT NULL DEFAULT clock(),
    seen_at     timestamptz NOT NULL DEFAULT clock(),             -- last heartbeat
    steady_since timestamptz NOT NULL DEFAULT clock(),            -- heartbeats without a gap since then
    lease_until timestamptz NOT NULL,
    lost_at     timestamptz                                       -- set by rescue(); never cleared
);

-- One worker's slots for one queue. Unlogged: a crash of Postgres cuts all listeners off, and each
-- announces itself again when it is back.
CREATE UNLOGGED TABLE IF NOT EXISTS pools (
    worker_id   integer NOT NULL,
    queue       name_text NOT NULL,
    concurrency integer NOT NULL,
    asleep      boolean NOT NULL DEFAULT false,                   -- true: inserts must NOTIFY
    PRIMARY KEY (queue, worker_id)
);

-- Settings of a queue that override code. A queue without a row lives by its code and the defaults.
CREATE TABLE IF NOT EXISTS queues (
    name         name_text PRIMARY KEY,
    concurrency  integer CONSTRAINT concurrency_must_be_1_to_10000 CHECK (concurrency BETWEEN 1 AND 10000),
    paused_until timestamptz,                                     -- 'infinity' = until resumed
    keep_s       integer CONSTRAINT keep_must_not_be_negative CHECK (keep_s >= 0),  -- 0 = no history
    updated_at   timestamptz NOT NULL DEFAULT clock()
);

-- A recurring rule. `cron` is computed by daemons in `timezone`; `every_s` counts from the Unix epoch.
CREATE TABLE IF NOT EXISTS schedules (
    name         name_text PRIMARY KEY,
    queue        name_text NOT NULL,
    kind         name_text,
    payload      payload_object NOT NULL DEFAULT '{}',
    cron         text CHECK (char_length(cron) <= 200),
    every_s      integer CONSTRAINT every_s_must_be_1_to_366_days CHECK (every_s BETWEEN 1 AND 31622400),
    timezone     text NOT NULL DEFAULT 'UTC' CHECK (char_length(timezone) <= 100),
    missed       text NOT NULL DEFAULT 'skip'
                 CONSTRAINT missed_must_be_skip_once_or_all CHECK (missed IN ('skip', 'once', 'all')),
    priority     integer NOT NULL DEFAULT 0,
    max_attempts attempts_limit,
    timeout_s    period_s,
    enabled      boolean NOT NULL DEFAULT true,
    source       text NOT NULL DEFAULT 'sql' CHECK (source IN ('code', 'sql')),
    revision     integer NOT NULL DEFAULT 1,        -- rises with each change of the rule
    last_occurrence timestamptz,                    -- the newest one ever inserted; only rises
    error        text,                              -- why no next occurrence can be computed
    created_at   timestamptz NOT NULL DEFAULT clock(),
    CONSTRAINT exactly_one_of_cron_and_every_s_must_be_set CHECK (num_nonnulls(cron, every_s) = 1)
);

-- Live work. Columns in the order of their width; see `all_jobs` for the order people read.
CREATE TABLE IF NOT EXISTS jobs (
    id           uuid PRIMARY KEY DEFAULT new_id(),
    run_at       instant NOT NULL DEFAULT clock(),  -- due from then on
    created_at   instant NOT NULL DEFAULT clock(),
    started_at   instant,                           -- of the last attempt
    failed_at    instant,
    expires_at   instant,                           -- not started (attempts = 0) by then: expired
    dedupe_until instant,
    lease_until  timestamptz,                       -- remote claims only; a daemon leases by its worker row
    cancel_requested_at instant,
    occurrence   instant,                           -- of `schedule`: the instant this run stands for
    assignment_id uuid,                             -- remote claims only
    batch_id     uuid,
    status       job_status NOT NULL DEFAULT 'pending',
    priority     integer NOT NULL DEFAULT 0,        -- higher first
    attempts     integer NOT NULL DEFAULT 0,        -- claims so far; with id, the fence
    failures     integer NOT NULL DEFAULT 0,        -- budget spent
    losses       integer NOT NULL DEFAULT 0,        -- failures that took the worker along
    max_attempts attempts_limit,                    -- NULL: 3, or as the handler says at the first claim
    worker_id    integer,
    waiting_on   integer NOT NULL DEFAULT 0,
    timeout_s    period_s,                          -- NULL: as the handler says
    queue        name_text NOT NULL,
    kind         name_text,                         -- NULL: the queue's own handler
    payload      payload_object NOT NULL DEFAULT '{}',
    meta         payload_object,                       -- trace context, tags; handed through
    error        text,                              -- of the last failure, one line
    errors       error_list NOT NULL DEFAULT '[]',  -- the last 20 failures
    dedupe_key   key_text,
    serialize_key key_text,
    schedule     name_text,
    CONSTRAINT status_must_be_one_of_a_live_job
        CHECK (status IN ('blocked', 'pending', 'running', 'failed', 'dead')),
    CONSTRAINT running_jobs_and_only_they_have_a_worker
        CHECK ((status = 'running') = (worker_id IS NOT NULL)),
    -- rescue() restores an unknown worker and moves the sequence past it: an absurd id would use up all others.
    CONSTRAINT worker_id_must_be_1_to_a_billion CHECK (worker_id BETWEEN 1 AND 1000000000),
    CONSTRAINT counters_must_not_be_negative CHECK (attempts >= 0 AND failures >= 0 AND losses >= 0),
    -- These columns hold their place. Until a verb honours them, a row that relies on them is refused:
    -- to ignore it would break a promise.
    CONSTRAINT serialize_key_batches_and_dependencies_are_not_available_yet
        CHECK (serialize_key IS NULL AND batch_id IS NULL AND waiting_on = 0 AND dedupe_until IS NULL
               AND assignment_id IS NULL AND lease_until IS NULL AND status <> 'blocked')
) WITH (
    fillfactor = 50,                                -- room for the one update that nearly every job lives through
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000,
    autovacuum_analyze_scale_factor = 0.0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0
);

-- What claim() walks. A job with a loss is out of it, so that suspects never stand in others' way.
CREATE INDEX IF NOT EXISTS jobs_claimable ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses = 0;
CREATE INDEX IF NOT EXISTS jobs_suspect ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses > 0;
CREATE INDEX IF NOT EXISTS jobs_running ON jobs (worker_id) WHERE status = 'running';
CREATE INDEX IF NOT EXISTS jobs_running_suspect ON jobs (worker_id) WHERE status = 'running' AND losses > 0;
CREATE INDEX IF NOT EXISTS jobs_dead ON jobs (queue, failed_at) WHERE status = 'dead';
CREATE INDEX IF NOT EXISTS jobs_expiring ON jobs (expires_at)
    WHERE expires_at IS NOT NULL AND attempts = 0 AND status IN ('blocked', 'pending', 'failed');
CREATE UNIQUE INDEX IF NOT EXISTS jobs_dedupe ON jobs (queue, dedupe_key)
    WHERE dedupe_key IS NOT NULL AND status <> 'dead';
CREATE UNIQUE INDEX IF NOT EXISTS jobs_serialize ON jobs (queue, serialize_key)
    WHERE serialize_key IS NOT NULL AND status IN ('running', 'failed');
CREATE UNIQUE INDEX IF NOT EXISTS jobs_occurrence ON jobs (schedule, occurrence) WHERE schedule IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS jobs_schedule_live ON jobs (schedule)
    WHERE schedule IS NOT NULL AND status <> 'dead';
CREATE INDEX IF NOT EXISTS jobs_batch ON jobs (batch_id) WHERE batch_id IS NOT NULL;

-- What is over: completed, cancelled, expired, and the dead that were discarded or aged out.
CREATE TABLE IF NOT EXISTS finished_jobs (
    id           uuid NOT NULL,
    finished_at  timestamptz NOT NULL,
    run_at       timestamptz NOT NULL,
    created_at   timestamptz NOT NULL,
    started_at   timestamptz,
    failed_at    timestamptz,
    occurrence   timestamptz,
    batch_id     uuid,
    status       job_status NOT NULL CHECK (status IN ('completed', 'cancelled', 'expired', 'dead')),
    priority     integer NOT NULL,
    attempts     integer NOT NULL,
    failures     integer NOT NULL,
    max_attempts integer,
    worker_id    integer,
    queue        text NOT NULL,
    kind         text,
    payload      jsonb NOT NULL,
    result       json_result,
    meta         jsonb,
    error        text,
    errors       jsonb NOT NULL,
    dedupe_key   text,
    serialize_key text,
    schedule     text,
    PRIMARY KEY (id, finished_at)
) PARTITION BY RANGE (finished_at);
CREATE TABLE IF NOT EXISTS finished_jobs_other PARTITION OF finished_jobs DEFAULT;

-- Containers of jobs and edges between jobs. They hold their place; see the CHECK in `jobs`.
CREATE TABLE IF NOT EXISTS batches (
    id           uuid PRIMARY KEY DEFAULT new_id(),
    root_id      uuid NOT NULL REFERENCES batches,
    parent_id    uuid REFERENCES batches CHECK (parent_id <> id),
    name         name_text NOT NULL,
    depth        smallint NOT NULL DEFAULT 0 CHECK (depth BETWEEN 0 AND 32),
    sealed_at    timestamptz,
    finished_at  timestamptz,
    created_at   timestamptz NOT NULL DEFAULT clock(),
    UNIQUE (parent_id, name)
);
CREATE TABLE IF NOT EXISTS job_dependencies (
    job_id       uuid NOT NULL,
    depends_on   uuid NOT NULL CHECK (depends_on <> job_id),
    PRIMARY KEY (depends_on, job_id)
);

-- ------------------------------------------------------------------------------------------------
-- 3 Worker life
-- ------------------------------------------------------------------------------------------------

-- Enters a worker with its first lease. Locks nothing.
CREATE OR REPLACE FUNCTION register(p_name text, p_pid int, p_version text, p_lease_s real) RETURNS int
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    INSERT INTO workers (name, pid, version, lease_s, lease_until)
    VALUES (left(p_name, 200), p_pid, p_version, p_lease_s, clock() + make_interval(secs => p_lease_s))
    RETURNING id
$$;

-- Renews the lease and answers with what the worker should know: the jobs to cancel and the rows of
-- `queues`. No row in the answer: the worker is lost, its jobs belong to others. A gap of more than
-- half a lease since the last heartbeat (an outage, a freeze, a clock jump) makes the worker unsteady:
-- it must not rescue others for one lease. Locks the worker's row.
CREATE OR REPLACE FUNCTION heartbeat(p_worker int, p_state text)
RETURNS TABLE (lease_s real, cancel_ids uuid[], cancel_attempts int[], settings text)
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    WITH renewed AS (
        UPDATE workers w
        SET seen_at = clock(), state = p_state,
            lease_until = clock() + make_interval(secs => w.lease_s),
            steady_since = CASE WHEN w.seen_at > clock() OR w.steady_since > clock()
                                  OR w.seen_at < clock() - make_interval(secs => w.lease_s / 2)
                                THEN clock() ELSE w.steady_since END
        WHERE w.id = p_worker AND w.lost_at IS NULL
        RETURNING w.lease_s
    ), cancelled AS (
        SELECT array_agg(j.id) AS ids, array_agg(j.attempts) AS attempts FROM jobs j
        WHERE j.worker_id = p_worker AND j.status = 'running' AND j.cancel_requested_at IS NOT NULL
    )
    SELECT r.lease_s, coalesce(c.ids, '{}'), coalesce(c.attempts, '{}'),
           (SELECT coalesce(jsonb_object_agg(q.name, jsonb_build_object(
                       'concurrency', q.concurrency, 'paused', coalesce(q.paused_until > clock(), false))), '{}')
            FROM queues q)::text
    FROM renewed r, cancelled c
$$;

-- Says that a pool sleeps (inserts must NOTIFY) or is awake. A sleeper must claim once more after this,
-- before it waits: a row inserted just before found it awake and sent nothing. Nothing is entered for a
-- worker that is gone. Locks the pool's row.
CREATE OR REPLACE FUNCTION set_pool(p_worker int, p_queue text, p_concurrency int, p_asleep boolean) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    INSERT INTO pools AS p (worker_id, queue, concurrency, asleep)
    SELECT w.id, p_queue, p_concurrency, p_asleep FROM workers w WHERE w.id = p_worker AND w.lost_at IS NULL
    ON CONFLICT (queue, worker_id) DO UPDATE
    SET asleep = excluded.asleep, concurrency = excluded.concurrency
    WHERE (p.asleep, p.concurrency) IS DISTINCT FROM (excluded.asleep, excluded.concurrency)
$$;

-- Ends a worker that runs nothing any more; false if it still has running jobs, whose protection its
-- row is (rescue() will take them). Locks the worker's row, which also stops a claim under way.
CREATE OR REPLACE FUNCTION sign_off(p_worker int) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM pools WHERE worker_id = p_worker;
    PERFORM FROM workers WHERE id = p_worker FOR UPDATE;
    DELETE FROM workers WHERE id = p_worker AND lost_at IS NULL
       AND NOT EXISTS (SELECT FROM jobs WHERE worker_id = p_worker AND status = 'running');
    RETURN FOUND;
END $$;

-- Tells the pools of a queue that there is work. p_run_at: some of it was due from then on, so claims that
-- are past that must go back. Inlined.
CREATE OR REPLACE FUNCTION notify_pools(p_queue text, p_run_at timestamptz) RETURNS void LANGUAGE sql VOLATILE
    RETURN pg_notify('pgworkd', jsonb_strip_nulls(
        jsonb_build_object('queue', p_queue, 'run_at', date_part('epoch', p_run_at)))::text);

-- Tells the pools of each of these queues in which some pool sleeps (p_all: in which there is any pool).
-- Locks nothing, but a NOTIFY serialises commits over the whole cluster: that is why those awake get none.
CREATE OR REPLACE FUNCTION wake(p_queues text[], p_run_at timestamptz DEFAULT NULL, p_all boolean DEFAULT false)
RETURNS void LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT notify_pools(q.queue, p_run_at) FROM (SELECT DISTINCT unnest(p_queues) AS queue) q
    WHERE EXISTS (SELECT FROM pools p WHERE p.queue = q.queue AND (p.asleep OR p_all))
$$;

-- ------------------------------------------------------------------------------------------------
-- 4 Claim
-- ------------------------------------------------------------------------------------------------

-- Takes up to p_limit due jobs of a queue for a worker, in order of priority (higher first), run_at, id.
-- Each priority is its own range of the index, entered at its first row and left at the first that is
-- not due: a million future rows cost nothing. While some transaction holds back vacuum, the entries of
-- finished jobs pile up at the head of each range, so callers may say how far they have come: at
-- p_priorities[i] (descending) begin behind (p_run_ats[i], p_positions[i]), run_at in seconds since the
-- epoch; other priorities are found in the gaps between those. p_kinds and p_budgets give the attempts of
-- kinds that differ from 3, for jobs that do not say.
-- Locks: the worker's row FOR KEY SHARE (so that rescue() and a claim never cross; heartbeats pass),
-- then due rows with SKIP LOCKED. Raises PW001 when the worker's lease is gone.
CREATE OR REPLACE FUNCTION claim(p_worker int, p_queue text, p_limit int, p_kinds text[] DEFAULT '{}', p_budgets int[] DEFAULT '{}',
                                 p_priorities int[] DEFAULT '{}', p_run_ats float8[] DEFAULT '{}', p_positions uuid[] DEFAULT '{}')
RETURNS TABLE (id uuid, kind text, payload text, attempt int, failures int, max_attempts int, timeout_s real,
               priority int, losses int, run_at float8, created_at float8, schedule text, occurrence float8, meta text)
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz := clock();
    v_rows     tid[] := '{}';
    v_room     int;
    v_above    bigint := 2147483648;             -- priorities from here on are done
    v_known    int := 1;                         -- the next of p_priorities
    v_next     bigint;
    v_priority int;
    v_from     timestamptz;
    v_id       uuid;
    v_probes   int := 0;
    v_special  boolean := cardinality(p_kinds) > 0;
    v_paused   boolean;
    v_suspect  boolean;
    v_gaps     boolean;                          -- there may be priorities that the caller does not know
BEGIN
    PERFORM FROM workers w WHERE w.id = p_worker AND w.lost_at IS NULL AND w.lease_until > v_now FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'worker % has no lease', p_worker USING ERRCODE = 'PW001',
            HINT = 'Its lease ran out and its jobs were taken back: register again.';
    END IF;
    -- One statement for three questions, because with few jobs these cost more than the claim itself.
    SELECT EXISTS (SELECT FROM queues q WHERE q.name = p_queue AND q.paused_until > v_now),
           EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND j.status IN ('pending', 'failed') AND j.losses > 0
                   AND j.run_at <= v_now),
           cardinality(p_priorities) <> 1
           OR EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND j.status IN ('pending', 'failed') AND j.losses = 0
                      AND j.priority > p_priorities[1])
           OR EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND j.status IN ('pending', 'failed') AND j.losses = 0
                      AND j.priority < p_priorities[1])
    INTO v_paused, v_suspect, v_gaps;
    IF v_paused THEN
        RETURN;
    END IF;

    -- One suspect at a time per worker. Two claims of one worker may overlap: the lock lets one look,
    -- and the look is a statement of its own, so it sees what the other has committed.
    IF p_limit > 0 AND v_suspect THEN
        IF pg_try_advisory_xact_lock(1886873444, p_worker) THEN
            IF NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = p_worker AND j.status = 'running' AND j.losses > 0) THEN
                v_rows := ARRAY(
                    SELECT j.ctid FROM jobs j
                    WHERE j.queue = p_queue AND j.status IN ('pending', 'failed') AND j.losses > 0
                      AND j.run_at <= v_now AND (j.expires_at IS NULL OR j.expires_at > v_now OR j.attempts > 0)
                    ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1 FOR UPDATE SKIP LOCKED);
            END IF;
        END IF;
    END IF;

    v_room := p_limit - cardinality(v_rows);
    WHILE v_room > 0 AND v_probes < 100 LOOP
        v_next := coalesce(p_priorities[v_known], -2147483649);
        v_priority := NULL;
        IF v_gaps AND v_above > v_next + 1 THEN  -- is there a priority that the caller does not know?
            SELECT j.priority INTO v_priority FROM jobs j
            WHERE j.queue = p_queue AND j.status IN ('pending', 'failed') AND j.losses = 0
              AND j.priority < v_above AND j.priority > v_next
            ORDER BY j.priority DESC LIMIT 1;
        END IF;
        IF v_priority IS NOT NULL THEN
            v_from := '-infinity';
            v_id := '00000000-0000-0000-0000-000000000000';
        ELSE
            EXIT WHEN v_known > cardinality(p_priorities);
            v_priority := p_priorities[v_known];
            v_from := to_timestamp(p_run_ats[v_known]);
            v_id := p_positions[v_known];
            v_known := v_known + 1;
        END IF;
        v_rows := v_rows || ARRAY(
            SELECT j.ctid FROM jobs j
            WHERE j.queue = p_queue AND j.priority = v_priority AND j.status IN ('pending', 'failed')
              AND j.losses = 0 AND j.run_at <= v_now AND (j.run_at, j.id) > (v_from, v_id)
              AND (j.expires_at IS NULL OR j.expires_at > v_now OR j.attempts > 0)
            ORDER BY j.run_at, j.id LIMIT v_room FOR UPDATE SKIP LOCKED);
        v_room := p_limit - cardinality(v_rows);
        v_above := v_priority;
        v_probes := v_probes + 1;
    END LOOP;
    -- More priorities than anyone should use: the rest in one walk, which is slower but still in order.
    IF v_room > 0 AND v_probes >= 100 THEN
        v_rows := v_rows || ARRAY(
            SELECT j.ctid FROM jobs j
            WHERE j.queue = p_queue AND j.priority < v_above AND j.status IN ('pending', 'failed')
              AND j.losses = 0 AND j.run_at <= v_now AND (j.expires_at IS NULL OR j.expires_at > v_now OR j.attempts > 0)
            ORDER BY j.priority DESC, j.run_at, j.id LIMIT v_room FOR UPDATE SKIP LOCKED);
    END IF;

    RETURN QUERY
    WITH taken AS (
        UPDATE jobs j
        SET status = 'running', worker_id = p_worker, started_at = v_now,
            attempts = least(j.attempts, 2147483646) + 1,  -- one absurd row must not stop the queue
            max_attempts = CASE WHEN v_special THEN coalesce(j.max_attempts,
                p_budgets[array_position(p_kinds, coalesce(j.kind, j.queue)::text)], 3) ELSE j.max_attempts END
        WHERE j.ctid = ANY (v_rows)
        RETURNING j.id, coalesce(j.kind, j.queue)::text, j.payload::text, j.attempts, j.failures,
                  coalesce(j.max_attempts::int, 3), j.timeout_s::real, j.priority, j.losses,
                  date_part('epoch', j.run_at) AS run_at, date_part('epoch', j.created_at), j.schedule::text,
                  date_part('epoch', j.occurrence), j.meta::text
    )
    SELECT * FROM taken t ORDER BY t.priority DESC, t.run_at, t.id;
END $$;

-- Seconds until the next job of each queue is due (0 or less: due now); queues with no waiting job are
-- left out. Walks one index entry per priority. Locks nothing.
CREATE OR REPLACE FUNCTION next_due(p_queues text[]) RETURNS TABLE (queue text, due_in_s float8)
LANGUAGE plpgsql STABLE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz := clock();
    v_queue    text;
    v_next     timestamptz;
    v_row      record;
    v_probes   int;
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        SELECT min(j.run_at) INTO v_next FROM jobs j
        WHERE j.queue = v_queue AND j.status IN ('pending', 'failed') AND j.losses > 0;
        SELECT j.priority, j.run_at INTO v_row FROM jobs j
        WHERE j.queue = v_queue AND j.status IN ('pending', 'failed') AND j.losses = 0
        ORDER BY j.priority DESC, j.run_at LIMIT 1;
        v_probes := 0;
        WHILE v_row.priority IS NOT NULL AND v_probes < 100 LOOP
            v_next := least(v_next, v_row.run_at);
            v_probes := v_probes + 1;
            SELECT j.priority, j.run_at INTO v_row FROM jobs j
            WHERE j.queue = v_queue AND j.status IN ('pending', 'failed') AND j.losses = 0
              AND j.priority < v_row.priority
            ORDER BY j.priority DESC, j.run_at LIMIT 1;
        END LOOP;
        IF v_row.priority IS NOT NULL THEN
            v_next := least(v_next, (
                SELECT min(j.run_at) FROM jobs j
                WHERE j.queue = v_queue AND j.status IN ('pending', 'failed') AND j.losses = 0
                  AND j.priority <= v_row.priority));
        END IF;
        IF v_next IS NOT NULL THEN
            queue := v_queue;
            due_in_s := extract(epoch FROM v_next - v_now);
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- ------------------------------------------------------------------------------------------------
-- 5 Settle: all ways out of `running`. Arrays are parallel, one element per attempt. Each function
-- locks the rows it changes and answers with those it changed; an id that is missing from the answer
-- was settled before, or its attempt is no longer the running one.
-- The plan is the same whatever the statistics say: the primary key at these ids, hashed against the
-- arrays; both come in order of id, so rows are locked in that order (work_mem: a hash that is split into
-- parts would lose it). `worker_id IS NOT NULL` means running (a CHECK says so) and keeps the planner off the index on
-- running rows, which it likes as long as it believes that few run.
-- ------------------------------------------------------------------------------------------------

-- Completed: moves the rows to finished_jobs (or only deletes them where the queue keeps nothing) and
-- inserts the next occurrence of recurring ones (p_schedules, p_next, p_revisions; see add_occurrences).
CREATE OR REPLACE FUNCTION settle_completed(p_ids uuid[], p_attempts int[], p_results text[], p_schedules text[] DEFAULT NULL,
                                 p_next timestamptz[] DEFAULT NULL, p_revisions int[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off SET jit = off
SET work_mem = '64MB' SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_won       uuid[];
    v_schedules text[];
    v_forget    text[] := ARRAY(SELECT q.name FROM queues q WHERE q.keep_s = 0);
BEGIN
    WITH done AS (
        DELETE FROM jobs j
        USING (SELECT * FROM unnest(p_ids, p_attempts, p_results) AS u (id, attempt, result) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
        RETURNING j.*, s.result
    ), kept AS (
        INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, failed_at, occurrence, batch_id,
            status, priority, attempts, failures, max_attempts, worker_id, queue, kind, payload, result, meta,
            error, errors, dedupe_key, serialize_key, schedule)
        SELECT d.id, clock(), d.run_at, d.created_at, d.started_at, d.failed_at, d.occurrence, d.batch_id,
            'completed', d.priority, d.attempts, d.failures, d.max_attempts, d.worker_id, d.queue, d.kind, d.payload,
            d.result::jsonb, d.meta, d.error, d.errors, d.dedupe_key, d.serialize_key, d.schedule
        FROM done d WHERE d.queue <> ALL (v_forget)
    )
    SELECT array_agg(d.id), array_agg(d.schedule) FILTER (WHERE d.schedule IS NOT NULL) INTO v_won, v_schedules
    FROM done d;
    IF v_schedules IS NOT NULL AND p_next IS NOT NULL THEN
        PERFORM follow(v_schedules, p_schedules, p_next, p_revisions);
    END IF;
    RETURN coalesce(v_won, '{}');
END $$;

-- settle_completed, then claim, in one round trip and one commit: for small batches, whose cost those are.
-- The first row holds what was settled (`won`), the others what was claimed. Recurring jobs take the other
-- way. Locks: the worker's row as a claim does, then as settle_completed, then as claim. Raises PW001.
CREATE OR REPLACE FUNCTION settle_and_claim(p_ids uuid[], p_attempts int[], p_results text[], p_worker int, p_queue text, p_limit int,
                                 p_kinds text[], p_budgets int[], p_priorities int[], p_run_ats float8[], p_positions uuid[])
RETURNS TABLE (won uuid[], id uuid, kind text, payload text, attempt int, failures int, max_attempts int, timeout_s real,
               priority int, losses int, run_at float8, created_at float8, schedule text, occurrence float8, meta text)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    PERFORM FROM workers w WHERE w.id = p_worker FOR KEY SHARE;
    won := settle_completed(p_ids, p_attempts, p_results);
    RETURN NEXT;
    RETURN QUERY SELECT NULL::uuid[], c.*
                 FROM claim(p_worker, p_queue, p_limit, p_kinds, p_budgets, p_priorities, p_run_ats, p_positions) c;
END $$;

-- Failed: one failure is spent. With budget left the job waits for its retry (p_delays_s from now),
-- otherwise, or when p_permanent, it is dead. p_errors are history entries (JSON objects as text:
-- type, message, traceback, worker). A job whose cancellation was asked for is cancelled instead of waiting.
CREATE OR REPLACE FUNCTION settle_failed(p_ids uuid[], p_attempts int[], p_delays_s float8[], p_permanent boolean[],
                              p_messages text[], p_errors text[], p_schedules text[] DEFAULT NULL,
                              p_next timestamptz[] DEFAULT NULL, p_revisions int[] DEFAULT NULL)
RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off SET jit = off
SET work_mem = '64MB' SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_ids       uuid[];
    v_statuses  text[];
    v_cancelled uuid[];
    v_schedules text[];
BEGIN
    WITH ended AS (
        UPDATE jobs j
        SET status = CASE WHEN s.permanent OR j.failures >= coalesce(j.max_attempts, 3) - 1
                          THEN 'dead' ELSE 'failed' END::job_status,
            failures = least(j.failures, 2147483646) + 1, failed_at = clock(), worker_id = NULL,
            run_at = CASE WHEN s.permanent OR j.failures >= coalesce(j.max_attempts, 3) - 1
                          THEN j.run_at ELSE clock() + make_interval(secs => s.delay_s) END,
            error = s.message, errors = add_error(j.errors, s.error::jsonb || jsonb_build_object('attempt', j.attempts, 'at', clock()))
        FROM (SELECT * FROM unnest(p_ids, p_attempts, p_delays_s, p_permanent, p_messages, p_errors)
                  AS u (id, attempt, delay_s, permanent, message, error) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
        RETURNING j.id, j.status, j.schedule, j.cancel_requested_at
    )
    SELECT array_agg(e.id), array_agg(e.status::text),
           array_agg(e.id) FILTER (WHERE e.status = 'failed' AND e.cancel_requested_at IS NOT NULL),
           array_agg(e.schedule) FILTER (WHERE e.status = 'dead' AND e.schedule IS NOT NULL)
    INTO v_ids, v_statuses, v_cancelled, v_schedules
    FROM ended e;
    IF v_cancelled IS NOT NULL THEN
        PERFORM cancel(v_cancelled);
    END IF;
    IF v_schedules IS NOT NULL AND p_next IS NOT NULL THEN
        PERFORM follow(v_schedules, p_schedules, p_next, p_revisions);
    END IF;
    RETURN QUERY SELECT e.id, CASE WHEN e.id = ANY (v_cancelled) THEN 'cancelled' ELSE e.status END
                 FROM unnest(v_ids, v_statuses) AS e (id, status);
END $$;

-- Released: the job goes back, no budget spent. p_delays_s NULL keeps its due time and so its place in
-- line; p_messages, where not NULL, says why. Other daemons are woken.
CREATE OR REPLACE FUNCTION settle_released(p_ids uuid[], p_attempts int[], p_delays_s float8[], p_messages text[])
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off SET jit = off
SET work_mem = '64MB' SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_won       uuid[];
    v_cancelled uuid[];
    v_due       text[];
    v_run_at    timestamptz;
BEGIN
    WITH ended AS (
        UPDATE jobs j
        SET status = 'pending', worker_id = NULL,
            run_at = coalesce(clock() + make_interval(secs => s.delay_s), j.run_at),
            error = coalesce(s.message, j.error)
        FROM (SELECT * FROM unnest(p_ids, p_attempts, p_delays_s, p_messages)
                  AS u (id, attempt, delay_s, message) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
        RETURNING j.id, j.queue, j.run_at, s.delay_s, j.cancel_requested_at
    )
    SELECT array_agg(e.id), array_agg(e.id) FILTER (WHERE e.cancel_requested_at IS NOT NULL),
           array_agg(DISTINCT e.queue::text) FILTER (WHERE e.delay_s IS NULL),
           min(e.run_at) FILTER (WHERE e.delay_s IS NULL)
    INTO v_won, v_cancelled, v_due, v_run_at
    FROM ended e;
    IF v_cancelled IS NOT NULL THEN
        PERFORM cancel(v_cancelled);
    END IF;
    PERFORM wake(v_due, v_run_at, true);
    RETURN coalesce(v_won, '{}');
END $$;

-- Ended without success and for good: p_statuses is 'cancelled' or 'expired' per job.
CREATE OR REPLACE FUNCTION settle_ended(p_ids uuid[], p_attempts int[], p_statuses text[], p_messages text[])
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off SET jit = off
SET work_mem = '64MB' SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_ids  uuid[];
    v_to   text[];
    v_why  text[];
BEGIN
    SELECT array_agg(x.id), array_agg(x.status), array_agg(x.message) INTO v_ids, v_to, v_why
    FROM (SELECT j.id, s.status, s.message
          FROM jobs j JOIN unnest(p_ids, p_attempts, p_statuses, p_messages) AS s (id, attempt, status, message)
            ON j.id = s.id
          WHERE j.id = ANY (p_ids) AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
          ORDER BY j.id FOR UPDATE OF j) x;
    PERFORM bury(array_agg(e.id), e.status, e.message)
    FROM unnest(v_ids, v_to, v_why) AS e (id, status, message) GROUP BY e.status, e.message;
    RETURN coalesce(v_ids, '{}');
END $$;

-- Moves rows, which the caller has locked, to finished_jobs under a final status; p_message, where not NULL,
-- becomes their error. A queue that keeps nothing loses them. Answers how many there were. The chains of
-- schedules among them are left to ensure_schedules.
CREATE OR REPLACE FUNCTION bury(p_ids uuid[], p_status text, p_message text) RETURNS int
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_moved int;
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN 0;  -- without even looking at finished_jobs, which someone may have locked
    END IF;
    WITH gone AS (
        DELETE FROM jobs j WHERE j.id = ANY (p_ids) RETURNING j.*
    ), kept AS (
        INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, failed_at, occurrence, batch_id,
            status, priority, attempts, failures, max_attempts, worker_id, queue, kind, payload, meta,
            error, errors, dedupe_key, serialize_key, schedule)
        SELECT g.id, clock(), g.run_at, g.created_at, g.started_at, g.failed_at, g.occurrence, g.batch_id,
            p_status::job_status, g.priority, g.attempts, g.failures, g.max_attempts, g.worker_id, g.queue, g.kind,
            g.payload, g.meta, coalesce(p_message, g.error), g.errors, g.dedupe_key, g.serialize_key, g.schedule
        FROM gone g LEFT JOIN queues q ON q.name = g.queue
        WHERE q.keep_s IS DISTINCT FROM 0
    )
    SELECT count(*) INTO v_moved FROM gone;
    RETURN v_moved;
END $$;

-- Adds an entry to an error history and keeps the last 20.
CREATE OR REPLACE FUNCTION add_error(p_errors jsonb, p_entry jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN jsonb_array_length(p_errors) >= 20 THEN p_errors - 0 ELSE p_errors END
           || jsonb_build_array(p_entry)
$$;

-- ------------------------------------------------------------------------------------------------
-- 6 Schedules
-- ------------------------------------------------------------------------------------------------

-- Enters or changes a schedule that stands in code. A row that someone has put in by SQL under the same
-- name is left alone. Locks the schedule's row.
CREATE OR REPLACE FUNCTION put_schedule(p_name text, p_queue text, p_kind text, p_cron text, p_every_s int, p_timezone text,
                             p_missed text, p_payload text) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    INSERT INTO schedules AS s (name, queue, kind, cron, every_s, timezone, missed, payload, source)
    VALUES (p_name, p_queue, p_kind, p_cron, p_every_s, p_timezone, p_missed, p_payload::jsonb, 'code')
    ON CONFLICT (name) DO UPDATE
    SET queue = excluded.queue, kind = excluded.kind, cron = excluded.cron, every_s = excluded.every_s,
        timezone = excluded.timezone, missed = excluded.missed, payload = excluded.payload
    WHERE s.source = 'code'
      AND (s.queue, s.kind, s.cron, s.every_s, s.timezone, s.missed, s.payload)
          IS DISTINCT FROM (excluded.queue, excluded.kind, excluded.cron, excluded.every_s, excluded.timezone,
                            excluded.missed, excluded.payload)
$$;

-- All enabled schedules, and whether each lacks a live occurrence. The caller computes the next instants
-- and hands them to add_occurrences. Locks nothing.
CREATE OR REPLACE FUNCTION ensure_schedules()
RETURNS TABLE (name text, cron text, every_s int, timezone text, missed text, revision int,
               last_occurrence timestamptz, at timestamptz, broken boolean)
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT s.name, s.cron, s.every_s, s.timezone, s.missed, s.revision, s.last_occurrence, clock(),
           NOT EXISTS (SELECT FROM jobs j WHERE j.schedule = s.name AND j.status <> 'dead')
    FROM schedules s WHERE s.enabled ORDER BY s.name
$$;

-- Inserts one occurrence per schedule, unless the schedule has a live one, has moved past that instant,
-- or has changed since the caller computed it (revision). Answers with the names that got one.
-- Locks the schedules' rows in order of name, then looks: so two callers never both insert.
CREATE OR REPLACE FUNCTION add_occurrences(p_names text[], p_at timestamptz[], p_revisions int[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_added text[];
BEGIN
    PERFORM FROM schedules s WHERE s.name = ANY (p_names) ORDER BY s.name FOR UPDATE;
    WITH moved AS (
        UPDATE schedules s SET last_occurrence = n.at, error = NULL
        FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision)
        WHERE s.name = n.name AND s.enabled AND s.revision = n.revision
          AND (s.last_occurrence IS NULL OR s.last_occurrence < n.at)
          AND NOT EXISTS (SELECT FROM jobs j WHERE j.schedule = s.name AND j.status <> 'dead')
        RETURNING s.*
    ), added AS (
        INSERT INTO jobs (queue, kind, payload, run_at, priority, max_attempts, timeout_s, schedule, occurrence)
        SELECT m.queue, m.kind, m.payload, m.last_occurrence, m.priority, m.max_attempts, m.timeout_s, m.name,
               m.last_occurrence
        FROM moved m
        ON CONFLICT DO NOTHING
        RETURNING schedule
    )
    SELECT array_agg(a.schedule) INTO v_added FROM added a;
    RETURN coalesce(v_added, '{}');
END $$;

-- Of the schedules whose occurrence was just settled, adds those next ones that the caller computed.
CREATE OR REPLACE FUNCTION follow(p_settled text[], p_names text[], p_at timestamptz[], p_revisions int[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT add_occurrences(array_agg(n.name), array_agg(n.at), array_agg(n.revision))
    FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision)
    WHERE n.name = ANY (p_settled) AND n.at IS NOT NULL
    HAVING count(*) > 0
$$;

-- Notes why no occurrence can be computed; the chain rests until the rule is changed. Locks the row.
CREATE OR REPLACE FUNCTION fail_schedule(p_name text, p_revision int, p_error text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    UPDATE schedules SET error = left(p_error, 4096)
    WHERE name = p_name AND revision = p_revision AND error IS DISTINCT FROM left(p_error, 4096);
    RETURN FOUND;
END $$;

-- A changed rule gets a new revision; its waiting occurrence, if neither due nor begun, makes room for the new
-- next one. Locks that job, which no claim can hold: it is not due.
CREATE OR REPLACE FUNCTION schedule_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM jobs WHERE schedule = OLD.name AND status = 'pending' AND attempts = 0 AND run_at > clock();
    IF TG_OP = 'DELETE' THEN
        RETURN OLD;
    END IF;
    NEW.revision := OLD.revision + 1;
    NEW.error := NULL;
    NEW.last_occurrence := least(OLD.last_occurrence, clock());
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER schedule_changed BEFORE UPDATE OF
    queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s, enabled
    ON schedules FOR EACH ROW EXECUTE FUNCTION schedule_changed();
CREATE OR REPLACE TRIGGER schedule_deleted BEFORE DELETE ON schedules
    FOR EACH ROW EXECUTE FUNCTION schedule_changed();

-- Tells daemons at once that a schedule came, changed or went.
CREATE OR REPLACE FUNCTION schedules_notify() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify('pgworkd', '{"schedules": true}');
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER schedules_notify AFTER INSERT OR DELETE OR UPDATE OF
    queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s, enabled
    ON schedules FOR EACH ROW EXECUTE FUNCTION schedules_notify();

-- ------------------------------------------------------------------------------------------------
-- 7 Mend: idempotent, each under its own advisory try-lock, so any daemon may call at any time.
-- ------------------------------------------------------------------------------------------------

-- Takes back the jobs of lost workers, at most p_limit: a loss and a failure on each, `failed` and due
-- at once, or `dead` at the third loss or a spent budget. Answers with what it took.
-- Does nothing unless the caller itself has renewed its lease without a gap for a whole lease, and the
-- server has been up for as long: after an outage or a clock jump all healthy workers look lost.
-- Locks: the rescue lock, lost workers' rows in order of id, their jobs with SKIP LOCKED (a job that is
-- being settled right now is left to its settle; the worker's row stays until no job is left).
CREATE OR REPLACE FUNCTION rescue(p_worker int, p_limit int DEFAULT 1000)
RETURNS TABLE (id uuid, queue text, kind text, attempt int, status text, worker_id int, worker text, error text)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz := clock();
    v_lost  int[];
    v_ids   uuid[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 1) THEN
        RETURN;
    END IF;
    PERFORM FROM workers w
    WHERE w.id = p_worker AND w.lost_at IS NULL AND w.lease_until > v_now
      AND w.seen_at <= v_now AND w.seen_at > v_now - make_interval(secs => w.lease_s / 2)
      AND w.steady_since <= v_now - make_interval(secs => w.lease_s)
      AND pg_postmaster_start_time() <= v_now - make_interval(secs => w.lease_s);
    IF NOT FOUND THEN
        RETURN;
    END IF;

    -- A lease from before the clock was set back would last too long.
    UPDATE workers w SET lease_until = v_now + make_interval(secs => w.lease_s)
    WHERE w.lease_until > v_now + make_interval(secs => 2 * w.lease_s);

    -- Running jobs whose worker has no row (someone deleted it): the row is restored with one lease, in
    -- which a living worker finds itself again and a dead one is rescued.
    INSERT INTO workers (id, name, pid, version, state, lease_s, lease_until)
    OVERRIDING SYSTEM VALUE
    SELECT r.worker_id, 'unknown', 0, '', 'vanished', 30, v_now + interval '30 s'
    FROM (WITH RECURSIVE seen AS (
              SELECT (SELECT min(j.worker_id) FROM jobs j WHERE j.status = 'running') AS worker_id
              UNION ALL
              SELECT (SELECT min(j.worker_id) FROM jobs j WHERE j.status = 'running' AND j.worker_id > s.worker_id)
              FROM seen s WHERE s.worker_id IS NOT NULL)
          SELECT s.worker_id FROM seen s WHERE s.worker_id IS NOT NULL) r
    WHERE NOT EXISTS (SELECT FROM workers w WHERE w.id = r.worker_id)
    ON CONFLICT DO NOTHING;
    IF FOUND THEN  -- an id that no sequence gave must not be given again
        PERFORM setval('pgworkd.workers_id_seq', m.id) FROM (SELECT max(w.id) AS id FROM workers w) m
        WHERE m.id > (SELECT q.last_value FROM workers_id_seq q);
    END IF;

    SELECT array_agg(l.id) INTO v_lost
    FROM (SELECT w.id FROM workers w WHERE w.lost_at IS NOT NULL OR w.lease_until < v_now
          ORDER BY w.id FOR UPDATE SKIP LOCKED) l;
    IF v_lost IS NULL THEN
        RETURN;
    END IF;
    UPDATE workers w SET lost_at = v_now WHERE w.id = ANY (v_lost) AND w.lost_at IS NULL;
    DELETE FROM pools p WHERE p.worker_id = ANY (v_lost);

    v_ids := ARRAY(SELECT j.id FROM jobs j WHERE j.worker_id = ANY (v_lost) AND j.status = 'running'
                   LIMIT p_limit FOR UPDATE SKIP LOCKED);
    RETURN QUERY
    WITH before AS MATERIALIZED (
        SELECT j.id, j.worker_id AS lost_worker_id, w.name AS lost_worker,
               'lost: worker ' || w.name || ' (id ' || w.id || ', pid ' || w.pid
               || ') did not renew its lease' AS message
        FROM jobs j JOIN workers w ON w.id = j.worker_id WHERE j.id = ANY (v_ids)
    ), taken AS (
        UPDATE jobs j
        SET status = CASE WHEN j.losses >= 2 OR j.failures >= coalesce(j.max_attempts, 3) - 1
                          THEN 'dead' ELSE 'failed' END::job_status,
            losses = least(j.losses, 2147483646) + 1, failures = least(j.failures, 2147483646) + 1, failed_at = v_now, worker_id = NULL,
            error = b.message,
            errors = add_error(j.errors, jsonb_build_object('attempt', j.attempts, 'at', v_now, 'type', 'lost',
                                                            'message', b.message, 'worker', b.lost_worker))
        FROM before b WHERE b.id = j.id
        RETURNING j.id, j.queue::text, coalesce(j.kind, j.queue)::text, j.attempts,
                  CASE WHEN j.status = 'failed' AND j.cancel_requested_at IS NOT NULL THEN 'cancelled'
                       ELSE j.status::text END,
                  b.lost_worker_id, b.lost_worker, b.message
    )
    SELECT * FROM taken;
    PERFORM wake(ARRAY(SELECT DISTINCT j.queue FROM jobs j WHERE j.id = ANY (v_ids)));
    PERFORM cancel(ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_ids) AND j.cancel_requested_at IS NOT NULL
                         AND j.status = 'failed'));
    DELETE FROM workers w WHERE w.id = ANY (v_lost)
       AND NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = w.id AND j.status = 'running');
END $$;

-- The running attempts of a worker that began more than p_age_s ago. The worker compares them with what
-- it holds: one that it does not hold is a stray, claimed by a call whose answer was lost, and is given
-- back by settle_released. Locks nothing.
CREATE OR REPLACE FUNCTION running_of(p_worker int, p_age_s float8) RETURNS TABLE (id uuid, attempt int)
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT j.id, j.attempts FROM jobs j
    WHERE j.worker_id = p_worker AND j.status = 'running' AND j.started_at < clock() - make_interval(secs => p_age_s)
$$;

-- Ends jobs that were never started and whose expires_at has passed, at most p_limit. Locks them with SKIP LOCKED.
CREATE OR REPLACE FUNCTION expire(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_ids uuid[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 2) THEN
        RETURN 0;
    END IF;
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.expires_at <= clock() AND j.attempts = 0 AND j.status IN ('blocked', 'pending', 'failed')
                   ORDER BY j.expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED);
    RETURN bury(v_ids, 'expired', 'expired before it could start');
END $$;

-- Makes the day partitions of finished_jobs for today and p_days_ahead more. A new partition needs a
-- short exclusive lock: it is waited for 200 ms at most, so that no settle queues behind a long reader;
-- rows of a day without a partition go to finished_jobs_other, nothing is refused.
CREATE OR REPLACE FUNCTION ensure_partitions(p_days_ahead int DEFAULT 7) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET lock_timeout = '200ms'
SET timezone = 'UTC' AS $$
DECLARE
    v_day   date;
    v_made  int := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 3) THEN
        RETURN 0;
    END IF;
    FOR i IN 0..p_days_ahead LOOP
        v_day := clock()::date + i;
        CONTINUE WHEN to_regclass('pgworkd.finished_jobs_' || to_char(v_day, 'YYYYMMDD')) IS NOT NULL;
        BEGIN  -- identifiers and bounds come from the calendar, never from data
            EXECUTE format('CREATE TABLE %I PARTITION OF finished_jobs FOR VALUES FROM (%L) TO (%L)',
                           'finished_jobs_' || to_char(v_day, 'YYYYMMDD'), v_day::timestamptz, (v_day + 1)::timestamptz);
            v_made := v_made + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                EXIT;  -- a reader is in the way, of this day as of the next: another time
            WHEN check_violation THEN
                NULL;  -- the day's first rows are already in finished_jobs_other, and may stay there
        END;
    END LOOP;
    RETURN v_made;
END $$;

-- Forgets: drops day partitions older than p_keep_days, deletes as old rows of finished_jobs_other and
-- rows of queues that keep less (at most p_limit each), and moves jobs dead for p_keep_dead_days to
-- finished_jobs. Locks: as in ensure_partitions for the drop; rows with SKIP LOCKED.
CREATE OR REPLACE FUNCTION prune(p_keep_days int, p_keep_dead_days int, p_limit int DEFAULT 5000)
RETURNS TABLE (partitions int, rows_deleted int, dead_moved int)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET lock_timeout = '200ms'
SET timezone = 'UTC' AS $$
DECLARE
    v_name text;
    v_ids  uuid[];
    v_rows int;
BEGIN
    partitions := 0; rows_deleted := 0; dead_moved := 0;
    IF NOT pg_try_advisory_xact_lock(1886873445, 4) THEN
        RETURN NEXT;
        RETURN;
    END IF;
    FOR v_name IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'pgworkd.finished_jobs'::regclass AND c.relname ~ '^finished_jobs_\d{8}$'
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < clock()::date - p_keep_days
        ORDER BY c.relname
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE %I', v_name);
            partitions := partitions + 1;
        EXCEPTION WHEN lock_not_available THEN
            NULL;  -- a reader is in the way: next time
        END;
    END LOOP;
    DELETE FROM finished_jobs_other o WHERE o.ctid = ANY (ARRAY(
        SELECT f.ctid FROM finished_jobs_other f
        WHERE f.finished_at < clock() - make_interval(days => p_keep_days) LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS rows_deleted = ROW_COUNT;
    DELETE FROM finished_jobs d USING (
        SELECT f.id, f.finished_at FROM queues q JOIN finished_jobs f ON f.queue = q.name
        WHERE q.keep_s < p_keep_days * 86400 AND f.finished_at < clock() - make_interval(secs => q.keep_s)
        LIMIT p_limit FOR UPDATE OF f SKIP LOCKED) old
    WHERE d.id = old.id AND d.finished_at = old.finished_at;
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    rows_deleted := rows_deleted + v_rows;
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.status = 'dead' AND j.failed_at < clock() - make_interval(days => p_keep_dead_days)
                   LIMIT p_limit FOR UPDATE SKIP LOCKED);
    dead_moved := bury(v_ids, 'dead', NULL);
    RETURN NEXT;
END $$;

-- ------------------------------------------------------------------------------------------------
-- 8 Operators
-- ------------------------------------------------------------------------------------------------

-- Cancels: a waiting or dead job ends now; a running one is marked, and its worker told, which cancels
-- the handler and settles it. Answers with 'cancelled' or 'requested' per job found; others are over or
-- unknown. Locks the jobs in order of id.
CREATE OR REPLACE FUNCTION cancel(p_ids uuid[]) RETURNS TABLE (id uuid, outcome text)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_waiting uuid[];
    v_running uuid[];
BEGIN
    SELECT array_agg(x.id) FILTER (WHERE x.status <> 'running'), array_agg(x.id) FILTER (WHERE x.status = 'running')
    INTO v_waiting, v_running
    FROM (SELECT j.id, j.status FROM jobs j WHERE j.id = ANY (p_ids) ORDER BY j.id FOR UPDATE) x;
    UPDATE jobs j SET cancel_requested_at = coalesce(j.cancel_requested_at, clock()) WHERE j.id = ANY (v_running);
    PERFORM bury(v_waiting, 'cancelled', NULL);
    PERFORM pg_notify('pgworkd', jsonb_build_object('worker', w.worker_id)::text)
    FROM (SELECT DISTINCT j.worker_id FROM jobs j WHERE j.id = ANY (v_running)) w;
    RETURN QUERY SELECT u.id, 'cancelled' FROM unnest(v_waiting) AS u (id)
                 UNION ALL SELECT u.id, 'requested' FROM unnest(v_running) AS u (id);
END $$;

-- Runs jobs again: a dead one gets a fresh budget, one that waits for its retry runs now. Answers with
-- the ids it changed. A replayed occurrence leaves its schedule's chain, which has gone on without it.
-- Raises 23505 when another live job holds the dedupe key. Locks the jobs in order of id.
CREATE OR REPLACE FUNCTION retry(p_ids uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_ids uuid[];
BEGIN
    PERFORM FROM jobs j WHERE j.id = ANY (p_ids) AND j.status IN ('dead', 'failed') ORDER BY j.id FOR UPDATE;
    WITH changed AS (
        UPDATE jobs j
        SET failures = CASE WHEN j.status = 'dead' THEN 0 ELSE j.failures END,
            losses = CASE WHEN j.status = 'dead' THEN 0 ELSE j.losses END,
            schedule = CASE WHEN j.status = 'dead' THEN NULL ELSE j.schedule END,
            status = 'pending', run_at = clock(), cancel_requested_at = NULL
        WHERE j.id = ANY (p_ids) AND j.status IN ('dead', 'failed')
        RETURNING j.id
    )
    SELECT array_agg(c.id) INTO v_ids FROM changed c;
    PERFORM wake(ARRAY(SELECT DISTINCT j.queue FROM jobs j WHERE j.id = ANY (v_ids)));
    RETURN coalesce(v_ids, '{}');
END $$;

-- Moves dead jobs to finished_jobs, where they end as `dead`. Answers how many. Locks them in order of id.
CREATE OR REPLACE FUNCTION discard(p_ids uuid[]) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_ids uuid[];
BEGIN
    SELECT array_agg(x.id) INTO v_ids
    FROM (SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead' ORDER BY j.id FOR UPDATE) x;
    RETURN bury(v_ids, 'dead', NULL);
END $$;

-- ------------------------------------------------------------------------------------------------
-- 9 Insert trigger
-- ------------------------------------------------------------------------------------------------

-- One NOTIFY per queue and statement, only where a pool sleeps, only for jobs due within ten seconds:
-- sleepers look for the next due time at least as often. STABLE spares it a snapshot of its own; a pool that
-- falls asleep during the statement looks again for as long as such a statement takes.
CREATE OR REPLACE FUNCTION jobs_inserted() RETURNS trigger
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM pools p JOIN inserted i ON i.queue = p.queue WHERE p.asleep) THEN
        -- Whoever hears this may be past jobs that were due when the transaction began. (One instant for all its
        -- statements: Postgres sends equal notices of a transaction once.)
        PERFORM notify_pools(q.queue, least(q.run_at, clock() - (statement_timestamp() - transaction_timestamp())))
        FROM (SELECT i.queue::text AS queue, min(i.run_at) AS run_at FROM inserted i
              WHERE i.status = 'pending' AND i.run_at <= clock() + interval '10 s' GROUP BY i.queue) q
        WHERE EXISTS (SELECT FROM pools p WHERE p.queue = q.queue AND p.asleep);
    END IF;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER jobs_inserted AFTER INSERT ON jobs
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION jobs_inserted();

-- ------------------------------------------------------------------------------------------------
-- 10 Views
-- ------------------------------------------------------------------------------------------------

-- Every job there is, live or over, in the order people read.
CREATE OR REPLACE VIEW all_jobs AS
SELECT id, queue::text, coalesce(kind, queue)::text AS kind, status, payload::jsonb, NULL::jsonb AS result, priority,
       run_at::timestamptz, created_at::timestamptz, started_at::timestamptz, failed_at::timestamptz, NULL::timestamptz AS finished_at, attempts, failures,
       max_attempts::int, error, errors::jsonb, worker_id, schedule::text, occurrence::timestamptz, dedupe_key::text, serialize_key::text,
       batch_id, meta::jsonb
FROM jobs
UNION ALL
SELECT id, queue, coalesce(kind, queue), status, payload, result, priority,
       run_at, created_at, started_at, failed_at, finished_at, attempts, failures,
       max_attempts, error, errors, worker_id, schedule, occurrence, dedupe_key, serialize_key,
       batch_id, meta
FROM finished_jobs;

-- One row per queue that has live jobs, a pool or settings.
CREATE OR REPLACE VIEW queue_stats AS
WITH counts AS (
    SELECT j.queue::text AS queue,
           count(*) FILTER (WHERE j.status = 'pending' AND j.run_at <= clock()) AS due,
           count(*) FILTER (WHERE j.status = 'pending' AND j.run_at > clock()) AS scheduled,
           count(*) FILTER (WHERE j.status = 'running') AS running,
           count(*) FILTER (WHERE j.status = 'failed') AS failed,
           count(*) FILTER (WHERE j.status = 'blocked') AS blocked,
           count(*) FILTER (WHERE j.status = 'dead') AS dead,
           min(j.run_at) FILTER (WHERE j.status IN ('pending', 'failed') AND j.run_at <= clock()) AS oldest_due_at
    FROM jobs j GROUP BY j.queue
), fleet AS (
    SELECT p.queue::text AS queue, count(*) AS workers, sum(p.concurrency) AS slots FROM pools p GROUP BY p.queue
)
SELECT n.queue, coalesce(c.due, 0) AS due, coalesce(c.scheduled, 0) AS scheduled, coalesce(c.running, 0) AS running,
       coalesce(c.failed, 0) AS failed, coalesce(c.blocked, 0) AS blocked, coalesce(c.dead, 0) AS dead,
       extract(epoch FROM clock() - c.oldest_due_at)::float8 AS oldest_due_s,
       coalesce(f.workers, 0) AS workers, coalesce(f.slots, 0) AS slots, q.paused_until
FROM (SELECT queue FROM counts UNION SELECT queue FROM fleet UNION SELECT name FROM queues) n
LEFT JOIN counts c ON c.queue = n.queue
LEFT JOIN fleet f ON f.queue = n.queue
LEFT JOIN queues q ON q.name = n.queue;

-- One row per worker.
CREATE OR REPLACE VIEW worker_stats AS
SELECT w.id, w.name, w.pid, w.version, w.state, w.started_at, w.seen_at, w.lease_until, w.lost_at,
       (SELECT count(*) FROM jobs j WHERE j.worker_id = w.id AND j.status = 'running') AS running,
       (SELECT array_agg(p.queue::text ORDER BY p.queue) FROM pools p WHERE p.worker_id = w.id) AS queues
FROM workers w;

SELECT ensure_partitions();
INSERT INTO schema_version (version) VALUES (1) ON CONFLICT (only_row) DO NOTHING;
RESET search_path;
RESET client_min_messages;
