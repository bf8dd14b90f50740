-- pgworkd: the engine.
--
-- THE STORY
-- An application inserts a row into `jobs`, in its own transaction. A trigger sends one NOTIFY per
-- queue, and only if a pool of that queue is asleep. A daemon, registered in `workers`, calls claim():
-- it takes the due rows in order of (priority, run_at, id), skipping what others hold, and marks them
-- `running` with its worker id; `attempts` rises by one and never falls, so (id, attempt, worker)
-- names this very run for ever: the fence. The daemon proves that it lives by heartbeat(), one row for all its jobs.
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
-- each. A crash takes many innocent jobs along: the first loss is retried at once, like any job; who was lost
-- twice is a suspect, of which a worker runs one at a time, so that the third loss, which is death, names the
-- culprit. After an outage or a clock jump all look lost: rescue() gives each the time of its own lease.
--
-- A schedule has at most one occurrence that has not failed yet. The transaction that settles it inserts the next one;
-- ensure_schedules lists the chains that have no such occurrence, so that any daemon restores them.
--
-- Batches of jobs form trees; whoever ends jobs keeps their counters, and the last one calls back. Jobs may wait
-- for others; whoever completes those counts down.
--
-- `jobs` holds live work only, so it stays small whatever the history; `finished_jobs` is partitioned
-- by day and forgets by dropping partitions.
--
-- RULES
-- All instants are the database's, read through clock(); tests of the schema's owner turn it with SET pgworkd.clock.
-- Functions run with their caller's rights, but for what who inserts needs of them: see pgworkd/grants.sql.
-- Locks are taken in this order: advisory, workers, jobs, batches, schedules, queues (see chapter 5); several
-- rows of one table in the order of their key, or with SKIP LOCKED. Claims go by ctid = ANY(ARRAY(SELECT .. LIMIT n FOR
-- UPDATE SKIP LOCKED)): IN (SELECT .. LIMIT ..) may be planned as a nested loop and claim too much.
-- The file is re-runnable, keeps grants and what others built on it, and runs unchanged on Postgres 14
-- to 18. Chapters: 1 words, 2 tables, 3 worker life, 4 claim, 5 keys and limits, 6 settle, 7 schedules,
-- 8 mend, 9 operators, 10 insert trigger, 11 batches, 12 dependencies, 13 results and progress, 14 views.

DO $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'the encoding of this database is %, pgworkd needs UTF8', current_setting('server_encoding')
            USING ERRCODE = '55000', HINT = 'CREATE DATABASE ... ENCODING ''UTF8'' TEMPLATE template0';
    END IF;
    IF to_regclass('pgworkd.schema_version') IS NOT NULL THEN
        IF EXISTS (SELECT FROM pgworkd.schema_version v WHERE v.version > 1) THEN
            RAISE EXCEPTION 'the schema pgworkd is newer than this script: use that of the newer pgworkd' USING ERRCODE = '55000';
        END IF;
    END IF;
    IF to_regnamespace('pgworkd') IS NULL THEN  -- IF NOT EXISTS asks for rights on the database, also where it exists
        CREATE SCHEMA pgworkd;
    END IF;
END $$;
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
            -- 1 MiB of compact text; Postgres prints a space after each comma and colon. What is stored in 200 bytes is small
            -- enough even when it comes compressed from another table, or holds numbers like 1e131071, which are printed in full.
            CONSTRAINT value_must_not_exceed_1_mib
                CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152);
        CREATE DOMAIN json_result AS jsonb
            CONSTRAINT result_must_not_exceed_1_mib
                CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152);
        CREATE DOMAIN error_list AS jsonb
            CONSTRAINT errors_must_be_a_json_array CHECK (jsonb_typeof(VALUE) = 'array');
        CREATE DOMAIN instant AS timestamptz
            CONSTRAINT instant_must_lie_between_1970_and_2200
            CHECK (VALUE >= '1970-01-01 00:00:00+00' AND VALUE < '2200-01-01 00:00:00+00');
        CREATE DOMAIN attempts_limit AS integer
            CONSTRAINT max_attempts_must_be_1_to_1000 CHECK (VALUE BETWEEN 1 AND 1000);
        CREATE DOMAIN limit_count AS integer
            CONSTRAINT limit_must_be_1_to_a_million CHECK (VALUE BETWEEN 1 AND 1000000);
        CREATE DOMAIN period_s AS real
            CONSTRAINT period_must_be_above_0_and_at_most_366_days CHECK (VALUE > 0 AND VALUE <= 31622400);

        -- What its batch must know of a job that ended: `status` is what it has become. The rest is for streaming.
        CREATE TYPE ended_job AS (batch_id uuid, status job_status, was_dead boolean,
                                  id uuid, kind text, payload jsonb, result jsonb, meta jsonb);
    END IF;
    IF EXISTS (SELECT FROM pg_constraint c WHERE c.contypid = 'pgworkd.json_result'::regtype
               AND pg_get_constraintdef(c.oid) LIKE '%<= 2000)%') THEN  -- what is stored already is not looked at
        ALTER DOMAIN payload_object DROP CONSTRAINT value_must_not_exceed_1_mib;
        ALTER DOMAIN payload_object ADD CONSTRAINT value_must_not_exceed_1_mib
            CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152) NOT VALID;
        ALTER DOMAIN json_result DROP CONSTRAINT result_must_not_exceed_1_mib;
        ALTER DOMAIN json_result ADD CONSTRAINT result_must_not_exceed_1_mib
            CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152) NOT VALID;
    END IF;
    IF to_regtype('pgworkd.claim_place') IS NULL THEN
        -- How far claims of one pool have come in one priority, of the jobs with keys or of those without: see pick(). Instants
        -- are in microseconds since the epoch, so that the text is exact whatever the session's settings.
        CREATE TYPE claim_place AS (keyed boolean, priority int, run_at bigint, id uuid, promoted bigint);
    END IF;
END $$;

-- The database's time. SET pgworkd.clock = '2027-03-28 00:59:59+00' stands it still for one session of whoever may CREATE
-- in the schema; of anybody else it is only a text, since no session variable is a right.
-- (The bodies of clock and new_id are parsed here, not in the caller's search_path, and clock is inlined.)
CREATE OR REPLACE FUNCTION clock() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    RETURN coalesce(CASE WHEN nullif(current_setting('pgworkd.clock', true), '') IS NOT NULL AND has_schema_privilege(session_user, 'pgworkd', 'CREATE')
                         THEN current_setting('pgworkd.clock', true)::timestamptz END, statement_timestamp());

-- The same at this very instant: for a statement that has waited for a lock, and began long before it got it.
CREATE OR REPLACE FUNCTION clock_after_waiting() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN coalesce(CASE WHEN nullif(current_setting('pgworkd.clock', true), '') IS NOT NULL AND has_schema_privilege(session_user, 'pgworkd', 'CREATE')
                         THEN current_setting('pgworkd.clock', true)::timestamptz END, clock_timestamp());

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
    script       text,                              -- what `pgworkd migrate` has run: it need not do so again
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row)
);

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'schema_version'::regclass AND a.attname = 'script') THEN
        ALTER TABLE schema_version ADD COLUMN script text;
    END IF;
END $$;

-- One process that claims. Its lease protects every job it runs. `token` names the registration: when an id comes twice
-- (a dump restored beside live workers, a failover that lost commits), whoever has it under another token is a stranger.
CREATE TABLE IF NOT EXISTS workers (
    id          integer GENERATED ALWAYS AS IDENTITY (MAXVALUE 1000000000 CYCLE) PRIMARY KEY,
    name        text NOT NULL CHECK (char_length(name) <= 200),   -- host name unless set
    pid         integer NOT NULL,
    version     text NOT NULL,
    state       text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'stopping', 'vanished')),
    lease_s     real NOT NULL CHECK (lease_s BETWEEN 1 AND 3600),
    started_at  timestamptz NOT NULL DEFAULT clock(),
    seen_at     timestamptz NOT NULL DEFAULT clock(),             -- last heartbeat
    steady_since timestamptz NOT NULL DEFAULT clock(),            -- heartbeats without a gap since then
    lease_until timestamptz NOT NULL,
    lost_at     timestamptz,                                      -- set by rescue(); never cleared
    schedules   text[],                                           -- those that stand in its code; NULL: it has not said
    token       uuid,                                             -- NULL: restored by rescue(); such a row is never renewed
    kinds       text[]                                            -- of its code's handlers; NULL: it has not said
);
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pgworkd.workers'::regclass AND a.attname = 'schedules') THEN
        ALTER TABLE workers ADD COLUMN schedules text[];
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pgworkd.workers'::regclass AND a.attname = 'token') THEN
        ALTER TABLE workers ADD COLUMN token uuid;
        PERFORM setval('pgworkd.workers_id_seq', coalesce((SELECT max(w.id) FROM workers w WHERE w.id < 1000000000), 1))
        FROM workers_id_seq q WHERE q.last_value >= 1000000000;
        ALTER TABLE workers ALTER COLUMN id SET MAXVALUE 1000000000 SET CYCLE;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pgworkd.workers'::regclass AND a.attname = 'kinds') THEN
        ALTER TABLE workers ADD COLUMN kinds text[];
    END IF;
END $$;

-- One worker's slots for one queue. Unlogged: a crash of Postgres cuts all listeners off, and each
-- announces itself again when it is back.
CREATE UNLOGGED TABLE IF NOT EXISTS pools (
    worker_id   integer NOT NULL,
    queue       name_text NOT NULL,
    concurrency integer NOT NULL,                                 -- in force
    asleep      boolean NOT NULL DEFAULT false,                   -- true: inserts must NOTIFY
    code_concurrency integer,                                     -- in force where `queues` says nothing
    code_source text CHECK (code_source IN ('code', 'settings', 'default')),  -- of that: where it was stated
    PRIMARY KEY (queue, worker_id)
);

-- Settings of a queue that override code. A queue without a row lives by its code and the defaults; NULL: no limit,
-- or as the code says. Limits hold over the whole fleet; those per key count the jobs of each limit_key apart.
CREATE TABLE IF NOT EXISTS queues (
    name         name_text PRIMARY KEY,
    concurrency  integer CONSTRAINT concurrency_must_be_1_to_10000 CHECK (concurrency BETWEEN 1 AND 10000),  -- per worker
    paused_until timestamptz,                                     -- 'infinity' = until resumed
    keep_s       integer CONSTRAINT keep_must_not_be_negative CHECK (keep_s >= 0),  -- 0 = no history
    backoff_s    real CONSTRAINT backoff_must_be_0_to_366_days CHECK (backoff_s BETWEEN 0 AND 31622400),
    backoff_factor real CONSTRAINT backoff_factor_must_be_1_to_1000 CHECK (backoff_factor BETWEEN 1 AND 1000),
    backoff_cap_s real CONSTRAINT backoff_cap_must_be_0_to_366_days CHECK (backoff_cap_s BETWEEN 0 AND 31622400),
    max_running  limit_count,                                     -- so many run at once
    limit_per_key limit_count,                                    -- so many of one limit_key run at once
    rate         limit_count,                                     -- so many start in rate_period_s
    rate_period_s period_s,
    rate_burst   limit_count,                                     -- so many may start at one instant
    rate_per_key limit_count,                                     -- the same for each limit_key
    rate_per_key_period_s period_s,
    rate_per_key_burst limit_count,
    fair         boolean NOT NULL DEFAULT false,                  -- limit_keys take turns
    limited      boolean GENERATED ALWAYS AS
                 (num_nonnulls(max_running, limit_per_key, rate, rate_per_key) > 0 OR fair) STORED,
    updated_at   timestamptz NOT NULL DEFAULT clock(),
    max_losses   integer CONSTRAINT max_losses_must_be_1_to_1000 CHECK (max_losses BETWEEN 1 AND 1000),  -- then dead; NULL: 3
    CONSTRAINT rate_needs_a_period CHECK ((rate IS NULL) = (rate_period_s IS NULL)),
    CONSTRAINT rate_burst_needs_a_rate CHECK (rate_burst IS NULL OR rate IS NOT NULL),
    CONSTRAINT rate_per_key_needs_a_period CHECK ((rate_per_key IS NULL) = (rate_per_key_period_s IS NULL)),
    CONSTRAINT rate_per_key_burst_needs_a_rate CHECK (rate_per_key_burst IS NULL OR rate_per_key IS NOT NULL)
);
DO $$
BEGIN  -- priority ageing is retired
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pgworkd.queues'::regclass AND a.attname = 'ageing_s' AND NOT a.attisdropped) THEN
        ALTER TABLE queues DROP COLUMN limited, DROP COLUMN ageing_s,
            ADD COLUMN limited boolean GENERATED ALWAYS AS
                (num_nonnulls(max_running, limit_per_key, rate, rate_per_key) > 0 OR fair) STORED;
    END IF;
END $$;

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pgworkd.queues'::regclass AND a.attname = 'max_losses') THEN
        ALTER TABLE queues ADD COLUMN max_losses integer
            CONSTRAINT max_losses_must_be_1_to_1000 CHECK (max_losses BETWEEN 1 AND 1000);
    END IF;
END $$;

-- What the rates and turns of queues remember: one row per queue (limit_key '') and per key with a rate.
-- `spent_until`: all starts so far are paid for then (GCRA's theoretical arrival time). `turn`: the key served last.
CREATE TABLE IF NOT EXISTS rates (
    queue        name_text NOT NULL,
    limit_key    text NOT NULL DEFAULT '',
    spent_until  timestamptz NOT NULL DEFAULT '-infinity',
    turn         text,
    searched     text,                              -- how far claims have looked for keys with due jobs; see by_turn()
    PRIMARY KEY (queue, limit_key)
);
ALTER TABLE rates ADD COLUMN IF NOT EXISTS searched text;

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
    missed_grace_s real NOT NULL DEFAULT 60         -- with missed = 'skip': how long before its workers it may have been due
                 CONSTRAINT missed_grace_s_must_be_0_to_366_days CHECK (missed_grace_s BETWEEN 0 AND 31622400),
    waits_for_retries boolean NOT NULL DEFAULT false,  -- no next occurrence while one waits for its retry
    retired_at   timestamptz,                       -- disabled because it left the code; enabled again when it comes back
    in_force_since timestamptz NOT NULL DEFAULT clock(),  -- the rule as it is: what it names before that was never due
    CONSTRAINT exactly_one_of_cron_and_every_s_must_be_set CHECK (num_nonnulls(cron, every_s) = 1)
);
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pgworkd.schedules'::regclass AND a.attname = 'retired_at') THEN
        ALTER TABLE schedules
            ADD COLUMN missed_grace_s real NOT NULL DEFAULT 60
                CONSTRAINT missed_grace_s_must_be_0_to_366_days CHECK (missed_grace_s BETWEEN 0 AND 31622400),
            ADD COLUMN waits_for_retries boolean NOT NULL DEFAULT false,
            ADD COLUMN retired_at timestamptz;
    END IF;
END $$;
ALTER TABLE schedules ADD COLUMN IF NOT EXISTS in_force_since timestamptz NOT NULL DEFAULT clock();

-- Live work. Columns in the order of their width; see `all_jobs` for the order people read.
CREATE TABLE IF NOT EXISTS jobs (
    id           uuid DEFAULT new_id() PRIMARY KEY WITH (fillfactor = 50),  -- see below
    run_at       instant NOT NULL DEFAULT clock(),  -- due from then on
    created_at   instant NOT NULL DEFAULT clock(),
    started_at   instant,                           -- when the last attempt was claimed; its handler may start later
    failed_at    instant,
    expires_at   instant,                           -- not started (attempts = 0) by then: expired
    dedupe_until instant,                           -- the dedupe_key stays taken until then, also when the job is over
    lease_until  timestamptz,                       -- remote claims only; a daemon leases by its worker row
    cancel_requested_at instant,
    occurrence   instant,                           -- of `schedule`: the instant this run stands for
    promoted     timestamptz,                       -- when its serialize_key became free, after it had been parked; see pick()
    assignment_id uuid,                             -- remote claims only
    batch_id     uuid,                              -- no foreign key: it would cost every insert; see jobs_batched
    status       job_status NOT NULL DEFAULT 'pending',
    priority     integer NOT NULL DEFAULT 0,        -- higher first
    attempts     integer NOT NULL DEFAULT 0,        -- claims so far; with id, the fence
    failures     integer NOT NULL DEFAULT 0,        -- budget spent
    losses       integer NOT NULL DEFAULT 0,        -- attempts that ended with their worker; counted apart from failures
    max_attempts attempts_limit,                    -- NULL: 3, or as the handler says at the first claim
    worker_id    integer,
    waiting_on   integer NOT NULL DEFAULT 0,        -- > 0: waits for so many other jobs; see depend()
    timeout_s    period_s,                          -- NULL: as the handler says
    queue        name_text NOT NULL,
    kind         name_text,                         -- NULL: the queue's own handler
    payload      payload_object NOT NULL DEFAULT '{}',
    meta         payload_object,                       -- trace context, tags; handed through
    error        text,                              -- of the last failure, one line
    errors       error_list NOT NULL DEFAULT '[]',  -- the last 20 failures
    dedupe_key   key_text,                          -- one live job of the queue has it
    serialize_key key_text,                         -- one at a time, in the order in which they are due
    limit_key    key_text,                          -- what the queue's limits per key and turns count by
    yields       boolean NOT NULL DEFAULT false,    -- while it waits for its retry, others of its serialize_key may pass
    counted      boolean,                           -- true: whoever inserted it has counted it into its batch; not for enqueuers
    schedule     name_text,
    -- `completed`, whatever became of it, is what stays of a job that is over and keeps its dedupe_key: its id, no more.
    CONSTRAINT status_must_be_one_of_a_live_job
        CHECK (status IN ('blocked', 'pending', 'running', 'failed', 'dead')
               OR status = 'completed' AND dedupe_until IS NOT NULL),
    CONSTRAINT dedupe_until_needs_a_dedupe_key CHECK (dedupe_until IS NULL OR dedupe_key IS NOT NULL),
    CONSTRAINT running_jobs_and_only_they_have_a_worker
        CHECK ((status = 'running') = (worker_id IS NOT NULL)),
    -- rescue() restores an unknown worker; the sequence of ids comes round at this bound.
    CONSTRAINT worker_id_must_be_1_to_a_billion CHECK (worker_id BETWEEN 1 AND 1000000000),
    CONSTRAINT counters_must_not_be_negative CHECK (attempts >= 0 AND failures >= 0 AND losses >= 0 AND waiting_on >= 0),
    CONSTRAINT blocked_jobs_need_a_serialize_key_or_depend
        CHECK (CASE status WHEN 'blocked' THEN serialize_key IS NOT NULL OR waiting_on > 0 ELSE waiting_on = 0 END),
    -- These columns hold their place. Until a verb honours them, a row that relies on them is refused:
    -- to ignore it would break a promise.
    CONSTRAINT remote_claims_are_not_available_yet CHECK (assignment_id IS NULL AND lease_until IS NULL)
) WITH (
    fillfactor = 50,                                -- room for the one update that nearly every job lives through
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000,
    autovacuum_analyze_scale_factor = 0.0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0
);

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'jobs'::regclass AND a.attname = 'counted') THEN
        ALTER TABLE jobs ADD COLUMN counted boolean;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'jobs'::regclass AND a.attname = 'promoted') THEN
        ALTER TABLE jobs ADD COLUMN promoted timestamptz;
    END IF;
END $$;

-- What claim() walks. Suspects, jobs that were lost twice, are out of it, so that they never stand in others' way.
DO $$
DECLARE
    v_index regclass;
BEGIN
    FOR v_index IN  -- of an older installation, where one loss made a suspect
        SELECT i.indexrelid FROM pg_index i
        WHERE i.indrelid = 'pgworkd.jobs'::regclass AND pg_get_expr(i.indpred, i.indrelid) ~ 'losses [=>] 0'
    LOOP
        EXECUTE format('DROP INDEX %s', v_index);
    END LOOP;
END $$;
CREATE INDEX IF NOT EXISTS jobs_claimable ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2 AND serialize_key IS NULL AND limit_key IS NULL;
CREATE INDEX IF NOT EXISTS jobs_claimable_keyed ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2 AND (serialize_key IS NOT NULL OR limit_key IS NOT NULL);
-- Those that claims had been past when they became claimable: in the order in which they did.
CREATE INDEX IF NOT EXISTS jobs_promoted ON jobs (queue, priority, promoted, run_at, id)
    WHERE promoted IS NOT NULL AND status IN ('pending', 'failed') AND losses < 2 AND (serialize_key IS NOT NULL OR limit_key IS NOT NULL);
CREATE INDEX IF NOT EXISTS jobs_suspect ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses > 1;
CREATE INDEX IF NOT EXISTS jobs_running_since ON jobs (worker_id, queue, started_at) WHERE status = 'running';
DROP INDEX IF EXISTS jobs_running;  -- as it was called without the queue
DROP INDEX IF EXISTS jobs_running_of;  -- and without the time
-- For wanted(). Its predicate does not name the status, so that wanted() cannot be planned with the index above: whatever
-- holds back vacuum fills that with entries of jobs that are over.
CREATE INDEX IF NOT EXISTS jobs_cancelling ON jobs (worker_id) WHERE worker_id IS NOT NULL AND cancel_requested_at IS NOT NULL;
-- What limits per key count.
CREATE INDEX IF NOT EXISTS jobs_running_limited ON jobs (queue, limit_key) WHERE status = 'running' AND limit_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_dead ON jobs (queue, failed_at) WHERE status = 'dead';
CREATE INDEX IF NOT EXISTS jobs_expiring ON jobs (expires_at)
    WHERE expires_at IS NOT NULL AND attempts = 0 AND status IN ('blocked', 'pending', 'failed');
CREATE UNIQUE INDEX IF NOT EXISTS jobs_dedupe ON jobs (queue, dedupe_key)
    WHERE dedupe_key IS NOT NULL AND status <> 'dead';
CREATE INDEX IF NOT EXISTS jobs_kept_keys ON jobs (dedupe_until) WHERE status = 'completed';
-- Who holds a serialize_key, and who stands in line for it; who waits for other jobs does neither.
CREATE UNIQUE INDEX IF NOT EXISTS jobs_serialize ON jobs (queue, serialize_key)
    WHERE serialize_key IS NOT NULL AND (status = 'running' OR status = 'failed' AND NOT yields);
CREATE INDEX IF NOT EXISTS jobs_line ON jobs (queue, serialize_key, run_at, id)
    WHERE serialize_key IS NOT NULL AND waiting_on = 0 AND status IN ('blocked', 'pending', 'failed');
CREATE INDEX IF NOT EXISTS jobs_blocked ON jobs (queue, serialize_key, run_at, id) WHERE status = 'blocked' AND waiting_on = 0;
CREATE INDEX IF NOT EXISTS jobs_waiting ON jobs (queue, id) WHERE waiting_on > 0;
CREATE INDEX IF NOT EXISTS jobs_turns ON jobs (queue, (coalesce(limit_key::text, '')), priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2 AND (serialize_key IS NOT NULL OR limit_key IS NOT NULL);
-- The same of those with a limit_key, for workers that leave kinds to others. (A kind by its hash, of 64 bits: three long texts
-- fit into no index. The priority is an expression, so that no other index has the order that is asked for: whatever the
-- statistics say, this one is taken.)
CREATE INDEX IF NOT EXISTS jobs_turns_of_kind
    ON jobs (queue, hashtextextended(coalesce(kind, queue)::text, 0), limit_key, (- priority::bigint), run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2 AND limit_key IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS jobs_occurrence ON jobs (schedule, occurrence) WHERE schedule IS NOT NULL;
-- The chain of a schedule: its one occurrence that waits, or runs, and has not failed. One that has failed leaves it.
CREATE UNIQUE INDEX IF NOT EXISTS jobs_schedule_chain ON jobs (schedule)
    WHERE schedule IS NOT NULL AND status <> 'dead' AND failures = 0;
DROP INDEX IF EXISTS jobs_schedule_live;  -- as it was when a retry held up the chain
CREATE INDEX IF NOT EXISTS jobs_batch ON jobs (batch_id, status) WHERE batch_id IS NOT NULL;

-- The three lines in which jobs wait for a claim, as the indexes above have them; all inlined wherever they stand.
-- Without a key: claims take such a job as it comes.
CREATE OR REPLACE FUNCTION waits_plain(j jobs) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.status IN ('pending', 'failed') AND j.losses < 2 AND j.serialize_key IS NULL AND j.limit_key IS NULL;
-- With a key that others may hold, or whose limits may be reached.
CREATE OR REPLACE FUNCTION waits_keyed(j jobs) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.status IN ('pending', 'failed') AND j.losses < 2 AND (j.serialize_key IS NOT NULL OR j.limit_key IS NOT NULL);
-- Was lost with its worker twice, and may be the reason.
CREATE OR REPLACE FUNCTION waits_suspect(j jobs) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.status IN ('pending', 'failed') AND j.losses > 1;
-- True unless the job has expired: what was started once no longer can.
CREATE OR REPLACE FUNCTION in_time(j jobs, p_at timestamptz) RETURNS boolean LANGUAGE sql IMMUTABLE
    RETURN j.expires_at IS NULL OR j.expires_at > p_at OR j.attempts > 0;

-- What is over: completed, cancelled, expired, and the dead that were discarded or aged out.
CREATE TABLE IF NOT EXISTS finished_jobs (
    id           uuid NOT NULL,
    finished_at  timestamptz NOT NULL,
    run_at       timestamptz NOT NULL,
    created_at   timestamptz NOT NULL,
    started_at   timestamptz,                       -- when the last attempt was claimed
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
    limit_key    text,
    schedule     text,
    keep_until   timestamptz,                       -- finished_at + the queue's keep_s, as it was then; NULL: keep_days
    expires_at   timestamptz,
    began_at     timestamptz,                       -- when its handler began, if it completed
    PRIMARY KEY (id, finished_at)
) PARTITION BY RANGE (finished_at);
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'finished_jobs'::regclass AND a.attname = 'keep_until') THEN
        ALTER TABLE finished_jobs ADD COLUMN keep_until timestamptz;
    END IF;
END $$;
ALTER TABLE finished_jobs ADD COLUMN IF NOT EXISTS expires_at timestamptz;
ALTER TABLE finished_jobs ADD COLUMN IF NOT EXISTS began_at timestamptz;
CREATE TABLE IF NOT EXISTS finished_jobs_other PARTITION OF finished_jobs DEFAULT;
CREATE INDEX IF NOT EXISTS finished_jobs_kept ON finished_jobs (keep_until) WHERE keep_until IS NOT NULL;
-- Only here does retention go by rows: each other partition is dropped as a whole.
CREATE INDEX IF NOT EXISTS finished_jobs_other_finished ON finished_jobs_other (finished_at);
CREATE INDEX IF NOT EXISTS finished_jobs_batch ON finished_jobs (batch_id, id) WHERE batch_id IS NOT NULL;

-- Containers of jobs, in trees; who has no parent is the root. A batch takes jobs until it is sealed; sealed, and without
-- a live job, it is finished, and the tree when all of its batches are. Counters are moved by whoever ends jobs, under the
-- lock of the root, and are in no index, so that such an update stays on its page. See chapter 11.
CREATE TABLE IF NOT EXISTS batches (
    id           uuid PRIMARY KEY DEFAULT new_id(),
    root_id      uuid NOT NULL,                     -- filled in, as `depth` is
    parent_id    uuid REFERENCES batches,
    created_at   timestamptz NOT NULL DEFAULT clock(),
    sealed_at    timestamptz,
    cancelled_at timestamptz,                       -- takes nothing more, and ends what it has
    finished_at  timestamptz,
    tree_finished_at timestamptz,                   -- of a root: all was over, and it has called back
    added        bigint NOT NULL DEFAULT 0,         -- besides what still lies in batch_additions
    completed    bigint NOT NULL DEFAULT 0,
    dead         bigint NOT NULL DEFAULT 0,
    cancelled    bigint NOT NULL DEFAULT 0,         -- expired ones, too
    max_failures integer CONSTRAINT max_failures_must_not_be_negative CHECK (max_failures >= 0),  -- more dead: cancelled
    depth        smallint NOT NULL DEFAULT 0,       -- of a root: 0
    stream       boolean NOT NULL DEFAULT false,    -- each job that completes in the parent adds one here
    final        boolean NOT NULL DEFAULT false,    -- its results are results of the tree
    name         name_text NOT NULL,
    queue        name_text NOT NULL,                -- of its jobs, unless told otherwise
    kind         name_text,                         -- the same; NULL: the queue's own handler
    stream_kind  name_text,                         -- a job of this kind, here, makes the real ones of what is streamed
    dedupe_key   key_text,                          -- of a root: one unfinished tree of the name has it
    dedupe_until timestamptz,                       -- a tree that finished and was not cancelled keeps it until then; NULL: freed
    on_complete  payload_object,                    -- of a root: the job to insert when the tree is finished; see call_back()
    on_failure   payload_object,                    -- the same if anything died or was cancelled; NULL: on_complete
    completed_called boolean NOT NULL DEFAULT false,  -- of a root: the job of on_complete has been inserted, ...
    failure_called boolean NOT NULL DEFAULT false,  -- ... that of on_failure; a tree that was reopened inserts neither again
    CONSTRAINT batches_must_not_be_deeper_than_32 CHECK (depth BETWEEN 0 AND 32),
    CONSTRAINT only_a_child_can_stream CHECK (NOT stream OR parent_id IS NOT NULL),
    CONSTRAINT stream_kind_needs_stream CHECK (stream_kind IS NULL OR stream),
    CONSTRAINT stream_kind_must_differ_from_kind CHECK (stream_kind IS NULL OR stream_kind <> coalesce(kind::text, queue)),
    CONSTRAINT only_a_root_can_call_back CHECK (parent_id IS NULL OR on_complete IS NULL AND on_failure IS NULL),
    CONSTRAINT only_a_root_can_have_a_dedupe_key CHECK (parent_id IS NULL OR dedupe_key IS NULL),
    CONSTRAINT dedupe_until_needs_a_dedupe_key CHECK (dedupe_until IS NULL OR dedupe_key IS NOT NULL),
    CONSTRAINT batch_name_must_be_unique_in_its_parent UNIQUE (parent_id, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX IF NOT EXISTS batches_tree ON batches (root_id);
CREATE INDEX IF NOT EXISTS batches_unfinished ON batches (root_id) WHERE finished_at IS NULL;
CREATE INDEX IF NOT EXISTS batches_sealed ON batches (id) WHERE sealed_at IS NOT NULL AND finished_at IS NULL;
CREATE INDEX IF NOT EXISTS batches_uncalled ON batches (id)
    WHERE parent_id IS NULL AND finished_at IS NOT NULL AND tree_finished_at IS NULL;
CREATE INDEX IF NOT EXISTS batches_over ON batches (tree_finished_at) WHERE tree_finished_at IS NOT NULL;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pgworkd.batches'::regclass AND a.attname = 'dedupe_until') THEN
        ALTER TABLE batches ADD COLUMN dedupe_until timestamptz
            CONSTRAINT dedupe_until_needs_a_dedupe_key CHECK (dedupe_until IS NULL OR dedupe_key IS NOT NULL);
    END IF;
END $$;
ALTER TABLE batches ADD COLUMN IF NOT EXISTS completed_called boolean NOT NULL DEFAULT false;
ALTER TABLE batches ADD COLUMN IF NOT EXISTS failure_called boolean NOT NULL DEFAULT false;
CREATE UNIQUE INDEX IF NOT EXISTS batches_key ON batches (name, dedupe_key)
    WHERE parent_id IS NULL AND dedupe_key IS NOT NULL AND (tree_finished_at IS NULL OR dedupe_until IS NOT NULL);
DROP INDEX IF EXISTS batches_dedupe;  -- as it was when every key was free at the end of its tree
CREATE INDEX IF NOT EXISTS batches_kept_keys ON batches (dedupe_until) WHERE tree_finished_at IS NOT NULL AND dedupe_until IS NOT NULL;
-- It makes finished_at part of a key: to finish is then a change that FOR KEY SHARE conflicts with, also for a transaction
-- (REPEATABLE READ) that still sees the batch as it was before; such a one gets 40001.
CREATE UNIQUE INDEX IF NOT EXISTS batches_finished ON batches (id, finished_at);

-- What was added to batches, and that they shall be sealed, until someone who holds the root's lock folds it into the row:
-- an application's transaction, which may last, never holds what a settle needs. Only inserted to and deleted from.
CREATE TABLE IF NOT EXISTS batch_additions (
    batch_id     uuid NOT NULL,
    added        bigint NOT NULL DEFAULT 0 CHECK (added >= 0),
    seals        boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);
DO $$
BEGIN  -- it has no key: under a publication of all tables each DELETE would be refused
    IF (SELECT c.relreplident FROM pg_class c WHERE c.oid = 'pgworkd.batch_additions'::regclass) <> 'f' THEN
        ALTER TABLE batch_additions REPLICA IDENTITY FULL;
    END IF;
END $$;
CREATE INDEX IF NOT EXISTS batch_additions_batch ON batch_additions (batch_id);
CREATE INDEX IF NOT EXISTS batch_additions_seals ON batch_additions (batch_id) WHERE seals;

-- What waiting jobs still wait for: a row goes when its `depends_on` has completed. See chapter 12.
CREATE TABLE IF NOT EXISTS job_dependencies (
    job_id       uuid NOT NULL,
    depends_on   uuid NOT NULL CHECK (depends_on <> job_id),
    unless       text NOT NULL DEFAULT 'wait'       -- what to do if that dies, or is cancelled, or expires
                 CONSTRAINT unless_must_be_wait_cancel_or_run CHECK (unless IN ('wait', 'cancel', 'run')),
    unchecked    boolean NOT NULL DEFAULT false,    -- of each depend() one row, until it commits
    PRIMARY KEY (depends_on, job_id)
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);
CREATE INDEX IF NOT EXISTS job_dependencies_job ON job_dependencies (job_id);
CREATE INDEX IF NOT EXISTS job_dependencies_unchecked ON job_dependencies (job_id) WHERE unchecked;

-- What follows from the end of a job and could not be done at once, because another transaction had locked what it changes,
-- or because too many jobs depend on it. Only added to; apply_effects() does it soon after and deletes the row, and so does
-- who next holds a batch's tree. A row is one of: the end of a job for its batch, the end of a job for those that depend on
-- it, a serialize_key that is free.
-- `ended` has the payload and the result of the job where its batch needs them. There are no more rows than jobs ended while
-- what they change was locked, and nothing else deletes any: each is part of a counter or of a wait. `pgworkd doctor` tells
-- when one is old.
CREATE TABLE IF NOT EXISTS pending_effects (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    batch_id     uuid,
    ended        ended_job,
    job_id       uuid,
    completed    boolean,                           -- so has the job, else it is dead, cancelled or expired
    queue        text,
    serialize_key text,
    put_off_at   timestamptz NOT NULL DEFAULT clock(),
    done_to      uuid,                              -- the dependents of job_id up to this one have had their turn
    left_behind  boolean NOT NULL DEFAULT false     -- some of those were locked, or refused: there is another round
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);
ALTER TABLE pending_effects ADD COLUMN IF NOT EXISTS put_off_at timestamptz NOT NULL DEFAULT clock();
ALTER TABLE pending_effects ADD COLUMN IF NOT EXISTS done_to uuid;
ALTER TABLE pending_effects ADD COLUMN IF NOT EXISTS left_behind boolean NOT NULL DEFAULT false;
CREATE INDEX IF NOT EXISTS pending_effects_batch ON pending_effects (batch_id) WHERE batch_id IS NOT NULL;

-- Who wants to hear at once when a job is over: NOTIFY on `channel` names it. Unlogged: it is a hint, who waits also asks.
CREATE UNLOGGED TABLE IF NOT EXISTS result_waiters (
    job_id       uuid NOT NULL,
    until        timestamptz NOT NULL,
    channel      text NOT NULL
                 CONSTRAINT channel_must_have_1_to_63_bytes CHECK (octet_length(channel) BETWEEN 1 AND 63),
    PRIMARY KEY (job_id, channel)
);
CREATE INDEX IF NOT EXISTS result_waiters_until ON result_waiters (until);

-- Rows that maintenance could not change because something refuses it, such as a trigger or a foreign key that others have
-- added to these tables. in_parts() writes them and passes them by until `until`, so that they hold up no other rows; they are
-- tried again after 10 s, then after twice as long each time, up to 10 min. Unlogged: whatever is lost is found again.
CREATE UNLOGGED TABLE IF NOT EXISTS refused_rows (
    what         text NOT NULL,                     -- the function that tried
    key          text NOT NULL,                     -- mostly the id of a job or batch
    sqlstate     text NOT NULL,
    error        text NOT NULL,
    times        integer NOT NULL DEFAULT 1,
    first_at     timestamptz NOT NULL DEFAULT clock(),
    until        timestamptz NOT NULL,
    reported     boolean NOT NULL DEFAULT false,    -- in the log of a daemon: see report_refused()
    PRIMARY KEY (what, key)
);

-- How far a running job says it is. Unlogged, and apart from `jobs`: to note it must cost little and touch nothing.
CREATE UNLOGGED TABLE IF NOT EXISTS progress (
    job_id       uuid PRIMARY KEY,
    at           timestamptz NOT NULL,
    attempt      integer NOT NULL,                  -- of which it says so
    done         real NOT NULL CONSTRAINT done_must_be_0_to_1 CHECK (done BETWEEN 0 AND 1),
    message      text
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);

-- What operators did: one row per act and job (or queue), written in the transaction of the act by the verbs of
-- chapter 9 and by a trigger on `queues`. What changed nothing is not noted. Who may act needs INSERT on it.
CREATE TABLE IF NOT EXISTS audit (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock(),
    who          text NOT NULL CHECK (char_length(who) BETWEEN 1 AND 200),
    what         text NOT NULL CHECK (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch', 'delete_batch',
                                                             'undepend', 'schedule', 'free_key')),
    queue        text NOT NULL,
    job_id       uuid,                              -- NULL: settings of the queue, or a batch
    before       jsonb NOT NULL,                    -- of what changed
    after        jsonb NOT NULL
);
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = 'pgworkd.audit'::regclass
                   AND pg_get_constraintdef(c.oid) LIKE '%free_key%') THEN
        ALTER TABLE audit DROP CONSTRAINT audit_what_check;
        ALTER TABLE audit ADD CONSTRAINT audit_what_check CHECK (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch',
                                                                          'delete_batch', 'undepend', 'schedule', 'free_key'));
    END IF;
END $$;
CREATE INDEX IF NOT EXISTS audit_at ON audit (at);
CREATE INDEX IF NOT EXISTS audit_queue ON audit (queue, id);
CREATE INDEX IF NOT EXISTS audit_job ON audit (job_id, id) WHERE job_id IS NOT NULL;

-- ------------------------------------------------------------------------------------------------
-- 3 Worker life
-- ------------------------------------------------------------------------------------------------

-- What has another signature since it was installed: without the token of the worker.
DROP FUNCTION IF EXISTS register(text, int, text, real);
DROP FUNCTION IF EXISTS heartbeat(int, text);
DROP FUNCTION IF EXISTS sign_off(int);
DROP FUNCTION IF EXISTS claim(int, text, int, text[], int[], int[], float8[], uuid[], int);
DROP FUNCTION IF EXISTS settle_completed(uuid[], int[], text[], text[], timestamptz[], int[], text);
DROP FUNCTION IF EXISTS settle_and_claim(uuid[], int[], text[], int, text, int, text[], int[], int[], float8[], uuid[], int);
DROP FUNCTION IF EXISTS settle_failed(uuid[], int[], float8[], boolean[], text[], text[], text[], timestamptz[], int[]);
DROP FUNCTION IF EXISTS settle_released(uuid[], int[], float8[], text[]);
DROP FUNCTION IF EXISTS settle_ended(uuid[], int[], text[], text[]);
DROP FUNCTION IF EXISTS running_of(int, float8);
DROP FUNCTION IF EXISTS set_pool(int, text, int, boolean, int, text);
DROP FUNCTION IF EXISTS drop_pool(int, text);
DROP FUNCTION IF EXISTS register(text, int, text, real, uuid);

-- Enters a worker with its first lease, under a token that it has drawn itself; its id. Ids that are taken, by a row or by
-- running jobs, are passed over: a sequence may be behind (logical replication does not carry it) or come round. p_kinds:
-- what its code has handlers for. Locks nothing.
CREATE OR REPLACE FUNCTION register(p_name text, p_pid int, p_version text, p_lease_s real,
                                    p_token uuid DEFAULT gen_random_uuid(), p_kinds text[] DEFAULT NULL) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_id int;
BEGIN
    LOOP
        INSERT INTO workers AS w (name, pid, version, lease_s, lease_until, token, kinds)
        VALUES (left(p_name, 200), p_pid, p_version, p_lease_s, clock() + make_interval(secs => p_lease_s), p_token, p_kinds)
        ON CONFLICT (id) DO NOTHING RETURNING w.id INTO v_id;
        CONTINUE WHEN NOT FOUND;
        EXIT WHEN NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = v_id AND j.status = 'running');
        DELETE FROM workers w WHERE w.id = v_id;  -- rescue() restores it for those jobs
    END LOOP;
    RETURN v_id;
END $$;

-- Renews the lease; false: the worker is lost, or its id is somebody else's, and its jobs belong to others. A gap of more than half a lease since the last
-- heartbeat (an outage, a freeze, a clock jump) makes the worker unsteady: it must not rescue others for one lease.
-- Touches no other table, so that whoever locks the jobs costs no lease. Locks the worker's row.
CREATE OR REPLACE FUNCTION heartbeat(p_worker int, p_token uuid, p_state text) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    UPDATE workers w
    SET seen_at = clock(), state = p_state,
        lease_until = clock() + make_interval(secs => w.lease_s),
        steady_since = CASE WHEN w.seen_at > clock() OR w.steady_since > clock()
                              OR w.seen_at < clock() - make_interval(secs => w.lease_s / 2)
                            THEN clock() ELSE w.steady_since END
    WHERE w.id = p_worker AND w.token = p_token AND w.lost_at IS NULL;
    RETURN FOUND;
END $$;

DROP FUNCTION IF EXISTS wanted(int);
DROP FUNCTION IF EXISTS wanted(int, text);
-- What a worker that has renewed its lease should know: the jobs to cancel, the rows of `queues` (without what is NULL;
-- `pause_s`: so long until a pause ends by itself), and what the code of other workers says of its queues, where that
-- differs, by queue and worker. `settings_version` stands for what the rows of `queues` say now: to who passes the one he was given
-- last, `settings` are NULL as long as they are the same. p_queues: of these queues alone (NULL: of all), by index, so that
-- it costs nothing how many others have settings; whoever asks for others than before has no version of them. Always one row.
-- Locks nothing.
CREATE OR REPLACE FUNCTION wanted(p_worker int, p_settings_version text DEFAULT NULL, p_queues text[] DEFAULT NULL)
RETURNS TABLE (cancel_ids uuid[], cancel_attempts int[], settings text, differing text, settings_version text)
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
    WITH own AS MATERIALIZED (
        SELECT q AS row, q.name, q.paused_until, q.xmin AS written FROM queues q WHERE q.name = ANY (p_queues)
        UNION ALL
        SELECT q, q.name, q.paused_until, q.xmin FROM queues q WHERE p_queues IS NULL
    )
    SELECT c.ids, c.attempts,
           CASE WHEN v.version IS DISTINCT FROM p_settings_version OR v.counts_down THEN
           (SELECT coalesce(jsonb_object_agg(q.name, jsonb_strip_nulls(
                       to_jsonb(q.row) - '{name,updated_at,paused_until}'::text[] || jsonb_build_object(
                           'paused', coalesce(q.paused_until > clock(), false),
                           'paused_until', CASE WHEN q.paused_until > clock() THEN q.paused_until END,
                           'pause_s', CASE WHEN q.paused_until > clock() AND q.paused_until < 'infinity'
                                           THEN extract(epoch FROM q.paused_until - clock()) END))), '{}')
            FROM own q)::text END,
           (SELECT coalesce(jsonb_object_agg(d.queue, d.said), '{}')
            FROM (SELECT o.queue, jsonb_agg(DISTINCT jsonb_build_array(w.name, o.code_concurrency)) AS said
                  FROM pools mine JOIN pools o ON o.queue = mine.queue AND o.code_concurrency <> mine.code_concurrency
                  JOIN workers w ON w.id = o.worker_id AND w.lost_at IS NULL
                  WHERE mine.worker_id = p_worker GROUP BY o.queue) d)::text,
           v.version
    FROM (SELECT coalesce(array_agg(j.id), '{}') AS ids, coalesce(array_agg(j.attempts), '{}') AS attempts
          FROM jobs j  -- not `status = 'running'`, which says the same: see the index
          WHERE j.worker_id = p_worker AND j.worker_id IS NOT NULL AND j.cancel_requested_at IS NOT NULL) c,
         -- Of the same number of rows each change makes the sum larger. `age` counts back from now, as it does for 3: the
         -- difference stays, and comes at a tenth of the price of xmin::text.
         (SELECT concat_ws(' ', count(*), sum(((SELECT age('3'::xid)::bigint) - age(q.written)) & 4294967295),
                           count(*) FILTER (WHERE q.paused_until > (SELECT clock()))) AS version,
                 coalesce(bool_or(q.paused_until > (SELECT clock()) AND q.paused_until < 'infinity'), false) AS counts_down
          FROM own q) v
$$;

-- Tells every daemon to ask for the settings of its queues: a plain UPDATE takes effect at once. Locks nothing.
CREATE OR REPLACE FUNCTION queues_changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pg_notify('pgworkd', '{"queues": true}');
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER queues_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON queues
    FOR EACH STATEMENT EXECUTE FUNCTION queues_changed();

-- Dates each change of a row of `queues`, whoever makes it. Locks nothing.
CREATE OR REPLACE FUNCTION queue_dated() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    NEW.updated_at := clock();
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER queue_dated BEFORE UPDATE ON queues FOR EACH ROW EXECUTE FUNCTION queue_dated();

-- Changes some settings of a queue: p_changes names columns of `queues`, null takes a setting back. The row is
-- made when there is none, and goes when nothing is left in it. Locks the queue's row in `queues`.
CREATE OR REPLACE FUNCTION set_queue(p_queue text, p_changes jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_now queues;
    v_new queues;
    v_is_new boolean;
BEGIN
    LOOP
        SELECT q.* INTO v_now FROM queues q WHERE q.name = p_queue FOR UPDATE;
        v_is_new := NOT FOUND;
        v_now.name := p_queue;
        v_new := jsonb_populate_record(v_now, p_changes - '{name,updated_at,limited}'::text[]);
        v_new.fair := coalesce(v_new.fair, false);
        IF num_nonnulls(v_new.concurrency, v_new.paused_until, v_new.keep_s, v_new.backoff_s, v_new.backoff_factor,
                        v_new.backoff_cap_s, v_new.max_losses, v_new.max_running, v_new.limit_per_key, v_new.rate, v_new.rate_period_s,
                        v_new.rate_burst, v_new.rate_per_key, v_new.rate_per_key_period_s, v_new.rate_per_key_burst) = 0 AND NOT v_new.fair THEN
            DELETE FROM queues q WHERE q.name = p_queue;
            RETURN;
        ELSIF v_is_new THEN
            INSERT INTO queues (name, concurrency, paused_until, keep_s, backoff_s, backoff_factor, backoff_cap_s, max_losses,
                                max_running, limit_per_key, rate, rate_period_s, rate_burst, rate_per_key,
                                rate_per_key_period_s, rate_per_key_burst, fair)
            VALUES (p_queue, v_new.concurrency, v_new.paused_until, v_new.keep_s, v_new.backoff_s,
                    v_new.backoff_factor, v_new.backoff_cap_s, v_new.max_losses, v_new.max_running, v_new.limit_per_key, v_new.rate,
                    v_new.rate_period_s, v_new.rate_burst, v_new.rate_per_key, v_new.rate_per_key_period_s,
                    v_new.rate_per_key_burst, v_new.fair)
            ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;  -- else someone has made the row meanwhile
        ELSE
            UPDATE queues q
            SET concurrency = v_new.concurrency, paused_until = v_new.paused_until, keep_s = v_new.keep_s,
                backoff_s = v_new.backoff_s, backoff_factor = v_new.backoff_factor,
                backoff_cap_s = v_new.backoff_cap_s, max_losses = v_new.max_losses, max_running = v_new.max_running,
                limit_per_key = v_new.limit_per_key, rate = v_new.rate, rate_period_s = v_new.rate_period_s,
                rate_burst = v_new.rate_burst, rate_per_key = v_new.rate_per_key,
                rate_per_key_period_s = v_new.rate_per_key_period_s, rate_per_key_burst = v_new.rate_per_key_burst,
                fair = v_new.fair
            WHERE q.name = p_queue;
            RETURN;
        END IF;
    END LOOP;
END $$;

-- Says that a pool sleeps (inserts must NOTIFY) or is awake. A sleeper must claim once more after this,
-- before it waits: a row inserted just before found it awake and sent nothing. p_code_concurrency is what the
-- worker's own code or settings (p_code_source) give the queue. Nothing is entered for a worker that is gone, or whose id is
-- somebody else's by now (p_token).
-- Locks the pool's row.
CREATE OR REPLACE FUNCTION set_pool(p_worker int, p_queue text, p_concurrency int, p_asleep boolean,
                                    p_code_concurrency int DEFAULT NULL, p_code_source text DEFAULT NULL,
                                    p_token uuid DEFAULT NULL) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    INSERT INTO pools AS p (worker_id, queue, concurrency, asleep, code_concurrency, code_source)
    SELECT w.id, p_queue, p_concurrency, p_asleep, p_code_concurrency, p_code_source
    FROM workers w WHERE w.id = p_worker AND w.lost_at IS NULL AND (p_token IS NULL OR w.token = p_token)
    ON CONFLICT (queue, worker_id) DO UPDATE
    SET asleep = excluded.asleep, concurrency = excluded.concurrency,
        code_concurrency = excluded.code_concurrency, code_source = excluded.code_source
    WHERE (p.asleep, p.concurrency, p.code_concurrency, p.code_source)
        IS DISTINCT FROM (excluded.asleep, excluded.concurrency, excluded.code_concurrency, excluded.code_source)
$$;

-- Takes a pool out that its worker has closed. Locks the pool's row.
CREATE OR REPLACE FUNCTION drop_pool(p_worker int, p_queue text, p_token uuid DEFAULT NULL) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    DELETE FROM pools p WHERE p.worker_id = p_worker AND p.queue = p_queue
       AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token)
$$;

-- Those of these kinds for which another worker that serves the queue, lives and is not about to stop has a handler.
-- Locks nothing.
CREATE OR REPLACE FUNCTION kinds_elsewhere(p_worker int, p_queue text, p_kinds text[]) RETURNS text[]
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT ARRAY(
        SELECT u.kind FROM unnest(p_kinds) AS u (kind)
        WHERE EXISTS (SELECT FROM pools p JOIN workers w ON w.id = p.worker_id
                      WHERE p.queue = p_queue AND w.id <> p_worker AND w.state = 'running' AND w.lost_at IS NULL
                        AND w.lease_until > clock() AND u.kind = ANY (w.kinds)))
$$;

-- Ends a worker that runs nothing any more; false if it still has running jobs, whose protection its
-- row is (rescue() will take them). The row of one that was taken for lost is rescue()'s to delete, and what stands under
-- another token is somebody else's. Locks the worker's row, which also stops a claim under way.
CREATE OR REPLACE FUNCTION sign_off(p_worker int, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM workers WHERE id = p_worker AND token <> p_token) THEN
        RETURN true;
    END IF;
    DELETE FROM pools WHERE worker_id = p_worker;
    PERFORM FROM workers WHERE id = p_worker FOR UPDATE;
    IF EXISTS (SELECT FROM jobs WHERE worker_id = p_worker AND status = 'running') THEN
        RETURN false;
    END IF;
    DELETE FROM workers WHERE id = p_worker AND token = p_token AND lost_at IS NULL;
    RETURN true;
END $$;

-- Says that the process of a worker has ended, and each that ran handlers for it, which only who has started it can know:
-- its jobs need not wait for the end of its lease. Tells all daemons; rescue() counts a loss as ever. Locks the worker's row.
CREATE OR REPLACE FUNCTION worker_ended(p_worker int, p_token uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    UPDATE workers w SET lost_at = clock() WHERE w.id = p_worker AND w.token = p_token AND w.lost_at IS NULL;
    IF FOUND THEN
        PERFORM pg_notify('pgworkd', '{"ended": true}');
    END IF;
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

-- True if both take about p_bytes as text, or less: told from their heads, without unpacking them. What is compressed may
-- be many times larger. Inlined.
CREATE OR REPLACE FUNCTION is_within(p_payload jsonb, p_meta jsonb, p_bytes int) RETURNS boolean LANGUAGE sql STABLE
    RETURN pg_column_size(p_payload) + coalesce(pg_column_size(p_meta), 0) <= CASE
        WHEN pg_column_compression(p_payload) IS NULL AND pg_column_compression(p_meta) IS NULL THEN p_bytes ELSE p_bytes / 16 END;

DROP FUNCTION IF EXISTS claim(int, text, int, text[], int[], int[], float8[], uuid[], int, uuid);
DROP FUNCTION IF EXISTS claim(int, text, int, text[], int[], int[], float8[], uuid[], uuid);
DROP FUNCTION IF EXISTS claim(int, text, int, text[], int[], int[], float8[], uuid[], uuid, text[]);
DROP FUNCTION IF EXISTS pick(text, int, tid[], timestamptz, text[]);
DROP FUNCTION IF EXISTS in_order(text, int, tid[], boolean, text[]);
DROP FUNCTION IF EXISTS in_order(text, int, tid[], boolean, text[], claim_place[]);
DROP FUNCTION IF EXISTS pick(text, int, tid[], timestamptz);
DROP FUNCTION IF EXISTS in_order(text, int, tid[], boolean);
DROP FUNCTION IF EXISTS payloads(uuid[], int[], int);
DROP FUNCTION IF EXISTS of_key(text, text, int, tid[]);
DROP FUNCTION IF EXISTS by_turn(queues, int, tid[], tid[], timestamptz, boolean);
DROP FUNCTION IF EXISTS by_turn(queues, int, tid[], tid[], timestamptz, boolean, text[]);
DROP FUNCTION IF EXISTS of_key(text, text, int, tid[], text[]);
DROP FUNCTION IF EXISTS next_keys(text, text, int, timestamptz);
DROP FUNCTION IF EXISTS due_keys(text, int, timestamptz);
DROP FUNCTION IF EXISTS settle_completed(uuid[], int[], text[], text[], timestamptz[], int[], text, int, uuid);
DROP FUNCTION IF EXISTS settle_completed(uuid[], int[], text[], text[], timestamptz[], int[], int, uuid);
DROP FUNCTION IF EXISTS complete_own(uuid[], int[], text[], text[], timestamptz[], int[], int, uuid);
DROP FUNCTION IF EXISTS settle_and_claim(uuid[], int[], text[], int, text, int, text[], int[], int[], float8[], uuid[], int, uuid);
-- Takes up to p_limit due jobs of a queue for a worker, in order of priority (higher first), run_at, id.
-- Each priority is its own range of the index, entered at its first row and left at the first that is
-- not due: a million future rows cost nothing. While some transaction holds back vacuum, the entries of
-- finished jobs pile up at the head of each range, so callers may say how far they have come: at
-- p_priorities[i] (descending) begin behind (p_run_ats[i], p_positions[i]), run_at in seconds since the
-- epoch; other priorities are found in the gaps between those. p_kinds and p_budgets give the attempts of
-- kinds that differ from 3, for jobs that do not say. Where jobs have keys or the queue has limits, pick() chooses.
-- The answer must fit into the buffers between server and client (208 KiB for a Unix socket, far more for TCP): until it
-- has gone out the locks are held, and a client that is frozen takes nothing in. So each job has an equal share of 360 kB,
-- of 180 kB over a Unix socket, where 500 jobs are the most; payload and meta of one that needs more are NULL, and
-- payloads() gives them.
-- Jobs of the kinds in p_without stay where they are, for other workers.
-- Rows without id come last. When a rate holds jobs back: `created_at` is then in how many seconds to ask again. With
-- p_without, one for each `priority` in which nothing is left up to `run_at` but what others have locked and jobs of those
-- kinds: the next claim may begin behind them. (Up to a second ago: what was due since then may not be committed yet.)
-- Where pick() chooses, callers that give p_places ('{}' at first) get a row whose `payload` is what to give the next
-- time. p_reach_s: begin so much before those places (NULL: at every head), p_since: and at that run_at at the latest. To find
-- new places has its price: with p_renew = false they may come back as they were.
-- Locks: the worker's row FOR KEY SHARE (so that rescue() and a claim never cross; heartbeats pass), the
-- queue where keys or limits count, then due rows with SKIP LOCKED. Raises PW001 when the worker's lease is gone.
CREATE OR REPLACE FUNCTION claim(p_worker int, p_queue text, p_limit int, p_kinds text[] DEFAULT '{}', p_budgets int[] DEFAULT '{}',
                                 p_priorities int[] DEFAULT '{}', p_run_ats float8[] DEFAULT '{}', p_positions uuid[] DEFAULT '{}',
                                 p_token uuid DEFAULT NULL, p_without text[] DEFAULT '{}',
                                 p_places text DEFAULT NULL, p_reach_s float8 DEFAULT 0, p_since float8 DEFAULT NULL,
                                 p_renew boolean DEFAULT true)
RETURNS TABLE (id uuid, kind text, payload text, attempt int, failures int, max_attempts int, timeout_s real,
               priority int, losses int, run_at float8, created_at float8, schedule text, occurrence float8, meta text,
               serialize_key text)
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
    v_suspect  boolean;                          -- there is one that is due: has the first a serialize_key?
    v_locked   boolean;
    v_gaps     boolean;                          -- there may be priorities that the caller does not know
    v_limited  boolean;
    v_rated    boolean;
    v_chosen   boolean;                          -- pick() chooses: some waiting job has a key
    v_allowed  int;                              -- by the queue's own limits
    v_tcp      boolean := inet_client_addr() IS NOT NULL;
    v_share    int;                              -- bytes of payload and meta that each job may answer with
    v_again_s  float8;                           -- when a rate of the queue, ...
    v_turn_s   float8;                           -- ... or of a key, will let the next start
    v_passed   int[] := '{}';                    -- priorities in which only what is left to others is left
    v_places   claim_place[];                    -- as p_places, and after this claim
BEGIN
    PERFORM FROM workers w
    WHERE w.id = p_worker AND (p_token IS NULL OR w.token = p_token) AND w.lost_at IS NULL AND w.lease_until > v_now FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'worker % has no lease', p_worker USING ERRCODE = 'PW001',
            HINT = 'Its lease ran out and its jobs were taken back: register again.';
    END IF;
    -- One statement for all questions, because with few jobs these cost more than the claim itself.
    SELECT coalesce(q.paused_until > v_now, false), coalesce(q.limited, false),
           q.rate IS NOT NULL OR q.rate_per_key IS NOT NULL,
           CASE WHEN coalesce(p_places, '{}') = '{}' THEN EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j))
                WHEN p_reach_s = 0 AND p_since IS NULL THEN keyed_behind(p_queue, p_places::claim_place[])
                ELSE keyed_behind(p_queue, starts(p_places::claim_place[], p_reach_s, p_since)) END,
           (SELECT j.serialize_key IS NOT NULL FROM jobs j
            WHERE j.queue = p_queue AND waits_suspect(j) AND j.run_at <= v_now
            ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1),
           cardinality(p_priorities) <> 1
           OR EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND waits_plain(j)
                      AND j.priority > p_priorities[1])
           OR EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND waits_plain(j)
                      AND j.priority < p_priorities[1])
    INTO v_paused, v_limited, v_rated, v_chosen, v_suspect, v_gaps
    FROM (SELECT) one LEFT JOIN queues q ON q.name = p_queue;
    IF v_paused THEN
        RETURN;
    END IF;
    v_room := CASE WHEN v_tcp THEN p_limit ELSE least(p_limit, 500) END;
    v_locked := v_limited OR v_chosen OR coalesce(v_suspect, false);
    IF v_locked THEN
        PERFORM lock_queue(p_queue);  -- what follows are statements of their own, so they see what its last holder did
        v_now := clock_after_waiting();  -- else all who waited would be charged to the time at which they began to wait
    END IF;
    IF v_limited THEN
        SELECT a.room, a.again_s INTO v_room, v_again_s FROM allowance(p_queue, v_room, v_now) a;
    END IF;
    v_allowed := v_room;

    -- One suspect at a time per worker. Two claims of one worker may overlap: the lock lets one look,
    -- and the look is a statement of its own, so it sees what the other has committed.
    IF v_room > 0 AND v_suspect IS NOT NULL THEN
        IF pg_try_advisory_xact_lock(1886873444, p_worker) THEN
            IF NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = p_worker AND j.status = 'running' AND j.losses > 1) THEN
                v_rows := ARRAY(
                    SELECT j.ctid FROM jobs j
                    WHERE j.queue = p_queue AND waits_suspect(j)
                      AND j.run_at <= v_now AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                      AND (j.serialize_key IS NULL OR v_locked AND key_is_free(j.queue, j.serialize_key, j.status = 'failed' AND NOT j.yields, j.run_at, j.id))
                      AND (NOT v_limited OR key_has_room(j.queue, j.limit_key, v_now))
                    ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1 FOR UPDATE SKIP LOCKED);
            END IF;
        END IF;
    END IF;

    v_room := v_room - cardinality(v_rows);
    IF v_chosen AND v_room > 0 THEN
        SELECT v_rows || p.picked, p.again_s, p.places INTO v_rows, v_turn_s, v_places
        FROM pick(p_queue, v_room, v_rows, v_now, p_without, p_places::claim_place[], p_reach_s, p_since, p_renew) p;
        v_room := 0;
    END IF;
    WHILE v_room > 0 AND v_probes < 200 LOOP
        v_next := coalesce(p_priorities[v_known], -2147483649);
        v_priority := NULL;
        IF v_gaps AND v_above > v_next + 1 THEN  -- is there a priority that the caller does not know?
            SELECT j.priority INTO v_priority FROM jobs j
            WHERE j.queue = p_queue AND waits_plain(j)
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
            WHERE j.queue = p_queue AND j.priority = v_priority AND waits_plain(j)
              AND j.run_at <= v_now AND (j.run_at, j.id) > (v_from, v_id)
              AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
            ORDER BY j.run_at, j.id LIMIT v_room FOR UPDATE SKIP LOCKED);
        v_room := v_allowed - cardinality(v_rows);
        IF v_room > 0 AND cardinality(p_without) > 0 THEN
            v_passed := v_passed || v_priority;
        END IF;
        v_above := v_priority;
        v_probes := v_probes + 1;
    END LOOP;
    -- More priorities than anyone should use: the rest in one walk, which is slower but still in order.
    IF v_room > 0 AND v_probes >= 200 THEN
        v_rows := v_rows || ARRAY(
            SELECT j.ctid FROM jobs j
            WHERE j.queue = p_queue AND j.priority < v_above AND waits_plain(j)
              AND j.run_at <= v_now AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
            ORDER BY j.priority DESC, j.run_at, j.id LIMIT v_room FOR UPDATE SKIP LOCKED);
    END IF;

    IF v_rated THEN
        PERFORM spend(p_queue, v_rows, v_now);
    END IF;
    v_share := CASE WHEN v_tcp THEN 360000 ELSE 180000 END / greatest(cardinality(v_rows), 1) - 140;  -- that for the other columns
    RETURN QUERY
    WITH taken AS (
        UPDATE jobs j
        SET status = 'running', worker_id = p_worker, started_at = v_now,
            attempts = least(j.attempts, 2147483646) + 1,  -- one absurd row must not stop the queue
            max_attempts = CASE WHEN v_special THEN coalesce(j.max_attempts,
                p_budgets[array_position(p_kinds, coalesce(j.kind, j.queue)::text)], 3) ELSE j.max_attempts END
        WHERE j.ctid = ANY (v_rows)
        RETURNING j.id, coalesce(j.kind, j.queue)::text, CASE WHEN is_within(j.payload, j.meta, v_share) THEN j.payload::text END,
                  j.attempts, j.failures, coalesce(j.max_attempts::int, 3), j.timeout_s::real, j.priority, j.losses,
                  date_part('epoch', j.run_at) AS run_at, date_part('epoch', j.created_at), j.schedule::text,
                  date_part('epoch', j.occurrence), CASE WHEN j.meta IS NOT NULL AND is_within(j.payload, j.meta, v_share) THEN j.meta::text END,
                  j.serialize_key::text
    )
    SELECT * FROM taken t ORDER BY t.priority DESC, t.run_at, t.id;
    created_at := least(v_turn_s, CASE WHEN cardinality(v_rows) >= v_allowed THEN v_again_s END);
    payload := v_places::text;
    IF created_at IS NOT NULL OR payload IS NOT NULL THEN
        RETURN NEXT;
    END IF;
    created_at := NULL;
    payload := NULL;
    run_at := date_part('epoch', v_now) - 1;
    FOREACH priority IN ARRAY v_passed LOOP
        RETURN NEXT;
    END LOOP;
END $$;

-- Payload and meta of running attempts whose claim did not carry them, in the order given, until they come to p_bytes of
-- text. An attempt that is no longer the running one, by the fence of the settles, comes without a payload. Locks nothing.
CREATE OR REPLACE FUNCTION payloads(p_ids uuid[], p_attempts int[], p_bytes int, p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL)
RETURNS TABLE (id uuid, payload text, meta text)
LANGUAGE plpgsql STABLE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_payload jsonb;
    v_meta    jsonb;
    v_bytes   bigint;
BEGIN
    FOR id, v_payload, v_meta IN
        SELECT u.id, j.payload, j.meta FROM unnest(p_ids, p_attempts) WITH ORDINALITY u (id, attempt, place)
        LEFT JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt AND j.worker_id IS NOT NULL
            AND (p_worker IS NULL OR j.worker_id = p_worker AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
        ORDER BY u.place
    LOOP
        payload := v_payload::text;  -- here, not above: it unpacks no more than is given
        meta := v_meta::text;
        v_bytes := coalesce(v_bytes, 0) + coalesce(octet_length(payload), 0) + coalesce(octet_length(meta), 0);
        RETURN NEXT;
        EXIT WHEN v_bytes >= p_bytes;
    END LOOP;
END $$;

-- How many jobs of a queue could run now if there were a slot; p_most stands for that many or more. Reads what is due,
-- p_most entries of an index at most, and one per priority of what is not. While a transaction holds back vacuum, the entries of
-- jobs of the queue that are over stay, and are read each time: some 0.5 ms for a thousand. (Claims need not, because each pool
-- remembers its place; who asks here has none.) Locks nothing.
CREATE OR REPLACE FUNCTION depth(p_queue text, p_most int DEFAULT 100000) RETURNS int
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now      timestamptz := clock();
    v_found    int := 0;
    v_above    bigint := 2147483648;
    v_priority int;
BEGIN
    FOR i IN 1..1000 LOOP
        v_priority := greatest(
            (SELECT max(j.priority) FROM jobs j WHERE j.queue = p_queue AND waits_plain(j) AND j.priority < v_above),
            (SELECT max(j.priority) FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority < v_above),
            (SELECT max(j.priority) FROM jobs j WHERE j.queue = p_queue AND waits_suspect(j) AND j.priority < v_above));
        EXIT WHEN v_priority IS NULL OR v_found >= p_most;
        v_found := v_found + (SELECT count(*) FROM (
            (SELECT FROM jobs j WHERE j.queue = p_queue AND j.priority = v_priority AND waits_plain(j) AND j.run_at <= v_now
             ORDER BY j.run_at LIMIT p_most - v_found)
            UNION ALL
            (SELECT FROM jobs j WHERE j.queue = p_queue AND j.priority = v_priority AND waits_keyed(j) AND j.run_at <= v_now
             ORDER BY j.run_at LIMIT p_most - v_found)
            UNION ALL
            (SELECT FROM jobs j WHERE j.queue = p_queue AND j.priority = v_priority AND waits_suspect(j) AND j.run_at <= v_now
             ORDER BY j.run_at LIMIT p_most - v_found)) due);
        v_above := v_priority;
    END LOOP;
    RETURN least(v_found, p_most);
END $$;

DROP FUNCTION IF EXISTS next_due(text[]);
-- Seconds until the next job of each queue is due (0 or less: due now); queues with no waiting job are
-- left out. Walks one index entry per priority, and, while vacuum is held back, those of all jobs that are over before it.
-- So callers may say what they know of p_queues[i]: nothing waits that was due more than p_ages_s[i] ago (NULL: nothing
-- is known), which spares the entries of jobs that are over in the priorities p_known[i] ('{5,0}', descending). Locks nothing.
CREATE OR REPLACE FUNCTION next_due(p_queues text[], p_ages_s float8[] DEFAULT '{}', p_known text[] DEFAULT '{}')
RETURNS TABLE (queue text, due_in_s float8)
LANGUAGE plpgsql STABLE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz := clock();
    v_queue    text;
    v_from     timestamptz;
    v_next     timestamptz;
    v_row      record;
    v_probes   int;
    v_top      bigint;
    v_above    bigint;
    v_known    bigint;
BEGIN
    FOR v_place IN 1..coalesce(cardinality(p_queues), 0) LOOP
        v_queue := p_queues[v_place];
        v_from := coalesce(v_now - make_interval(secs => p_ages_s[v_place]), '-infinity');
        v_top := 2147483648;
        SELECT min(j.run_at) INTO v_next FROM jobs j
        WHERE j.queue = v_queue AND waits_suspect(j);
        FOREACH v_known IN ARRAY coalesce(p_known[v_place]::bigint[], '{}') || -2147483649 LOOP
            v_above := v_top;  -- priorities between two that the caller knows
            v_probes := 0;
            LOOP
                SELECT j.priority, j.run_at INTO v_row FROM jobs j
                WHERE j.queue = v_queue AND waits_keyed(j) AND j.priority < v_above AND j.priority > v_known
                ORDER BY j.priority DESC, j.run_at LIMIT 1;
                EXIT WHEN NOT FOUND OR v_probes >= 100;
                v_next := least(v_next, v_row.run_at);
                v_above := v_row.priority;
                v_probes := v_probes + 1;
            END LOOP;
            IF v_row.priority IS NOT NULL THEN
                v_next := least(v_next, (
                    SELECT min(j.run_at) FROM jobs j
                    WHERE j.queue = v_queue AND waits_keyed(j) AND j.priority < v_above AND j.priority > v_known));
            END IF;
            v_above := v_top;
            v_probes := 0;
            LOOP
                SELECT j.priority, j.run_at INTO v_row FROM jobs j
                WHERE j.queue = v_queue AND waits_plain(j) AND j.priority < v_above AND j.priority > v_known
                ORDER BY j.priority DESC, j.run_at LIMIT 1;
                EXIT WHEN NOT FOUND OR v_probes >= 100;
                v_next := least(v_next, v_row.run_at);
                v_above := v_row.priority;
                v_probes := v_probes + 1;
            END LOOP;
            IF v_row.priority IS NOT NULL THEN
                v_next := least(v_next, (
                    SELECT min(j.run_at) FROM jobs j
                    WHERE j.queue = v_queue AND waits_plain(j) AND j.priority < v_above AND j.priority > v_known));
            END IF;
            IF v_known >= -2147483648 THEN
                v_next := least(v_next,
                    (SELECT min(j.run_at) FROM jobs j
                     WHERE j.queue = v_queue AND waits_keyed(j) AND j.priority = v_known AND j.run_at >= v_from),
                    (SELECT min(j.run_at) FROM jobs j
                     WHERE j.queue = v_queue AND waits_plain(j) AND j.priority = v_known AND j.run_at >= v_from));
            END IF;
            v_top := v_known;
        END LOOP;
        IF v_next IS NOT NULL THEN
            queue := v_queue;
            due_in_s := extract(epoch FROM v_next - v_now);
            RETURN NEXT;
        END IF;
    END LOOP;
END $$;

-- ------------------------------------------------------------------------------------------------
-- 5 Keys and limits
-- Who claims where these count holds the queue's lock, so that no two claims count at once. Whoever frees a
-- key or changes a limit's count may do so at any time: rows first, then the lock. A holder of the lock never
-- waits for a row, so the two orders cannot meet in a deadlock.
-- ------------------------------------------------------------------------------------------------

-- What an earlier version of this file had, with other arguments.
DROP FUNCTION IF EXISTS rate_allowance(timestamptz, int, real, int);
DROP FUNCTION IF EXISTS allowance(text, int);
DROP FUNCTION IF EXISTS key_allowance(queues, text, int, int);
DROP FUNCTION IF EXISTS key_has_room(text, text);
DROP FUNCTION IF EXISTS spend(text, tid[]);
DROP FUNCTION IF EXISTS pick(text, int, tid[]);
DROP FUNCTION IF EXISTS in_order(text, int, tid[], real, boolean);
DROP FUNCTION IF EXISTS by_turn(queues, int, tid[], tid[]);
DROP FUNCTION IF EXISTS by_turn(queues, int, tid[], tid[], timestamptz);

-- True while nothing may be waited for, nor a lock be held that others wait for: in a settle that skips what is locked, in
-- maintenance, and in verbs that an application may call in a transaction that lasts. What cannot be done then is put off.
CREATE OR REPLACE FUNCTION no_wait() RETURNS boolean LANGUAGE sql STABLE
    RETURN coalesce(current_setting('pgworkd.no_wait', true), '') NOT IN ('', 'frees');

-- Says so from now on, to the end of the transaction or until the answer, what held before, is given here. 'apply': by
-- apply_effects() itself; 'frees': by it, too, once it has locked the queues, so that it may wait for what they guard.
CREATE OR REPLACE FUNCTION say_no_wait(p_say text) RETURNS text LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_was text := coalesce(current_setting('pgworkd.no_wait', true), '');
BEGIN
    PERFORM set_config('pgworkd.no_wait', p_say, true);
    RETURN v_was;
END $$;

-- Writes down what is left for apply_effects(), and tells daemons. p_queues and p_keys are parallel. Locks nothing.
CREATE OR REPLACE FUNCTION put_off(p_ended ended_job[], p_jobs uuid[] DEFAULT NULL, p_completed boolean DEFAULT NULL,
                                   p_queues text[] DEFAULT NULL, p_keys text[] DEFAULT NULL) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO pending_effects (batch_id, ended, job_id, completed, queue, serialize_key)
    SELECT e.batch_id, e, NULL::uuid, NULL::boolean, NULL::text, NULL::text FROM unnest(p_ended) e
    UNION ALL
    SELECT NULL, NULL, u.id, p_completed, NULL, NULL FROM unnest(p_jobs) AS u (id)
    UNION ALL
    SELECT NULL, NULL, NULL, NULL, k.queue, k.key FROM (SELECT DISTINCT u.queue, u.key FROM unnest(p_queues, p_keys) AS u (queue, key)) k;
    IF FOUND AND coalesce(current_setting('pgworkd.no_wait', true), '') NOT IN ('apply', 'frees') THEN
        PERFORM pg_notify('pgworkd', '{"effects": true}');
    END IF;
END $$;

-- Locks a queue to the end of the transaction. Locks of different queues may coincide; that only costs time.
CREATE OR REPLACE FUNCTION lock_queue(p_queue text) RETURNS void LANGUAGE sql VOLATILE
    RETURN pg_advisory_xact_lock(1886873446, hashtext(p_queue));

-- Locks these queues, all in the same order whoever does so. Who frees keys of several queues needs all of them at
-- once: to lock one more later would be out of order.
-- Does nothing for who may not wait: see promote().
CREATE OR REPLACE FUNCTION lock_queues(p_queues text[]) RETURNS void LANGUAGE sql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT lock_queue(q.queue)
    FROM (SELECT u.queue FROM unnest(p_queues) AS u (queue) WHERE NOT no_wait() GROUP BY u.queue ORDER BY hashtext(u.queue)) q
$$;

-- True if p_holds, or no other job holds the serialize_key and none that is due stands before (p_run_at, p_id) in its
-- line. A retry holds its key while it waits, unless it yields, whoever has been due for longer. Locks nothing.
CREATE OR REPLACE FUNCTION key_is_free(p_queue text, p_key text, p_holds boolean, p_run_at timestamptz, p_id uuid)
RETURNS boolean LANGUAGE sql STABLE
    RETURN p_key IS NULL OR p_holds
        OR NOT EXISTS (SELECT FROM jobs h WHERE h.queue = p_queue AND h.serialize_key = p_key AND h.id <> p_id
                       AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields))
       AND NOT EXISTS (SELECT FROM jobs e WHERE e.queue = p_queue AND e.serialize_key = p_key
                       AND e.status IN ('blocked', 'pending', 'failed') AND e.waiting_on = 0
                       AND (e.run_at, e.id) < (p_run_at, p_id)
                       AND in_time(e, clock()));

-- How many starts of a rate may be ahead of their time: by default a tenth of a second's worth.
CREATE OR REPLACE FUNCTION burst(p_rate int, p_period_s real, p_burst int) RETURNS int LANGUAGE sql IMMUTABLE
    RETURN coalesce(p_burst, least(greatest(1, ceil(0.1 * p_rate / p_period_s)), 1000000)::int);

-- Until when the starts of a rate so far are paid for. More than a full burst ahead of p_now was written before the clock
-- was set back: it is pulled back to that, in its row, else nothing would start until the clock is there again.
-- The caller holds the queue's lock. Locks the row of `rates` if it changes it.
CREATE OR REPLACE FUNCTION spent_until(p_queue text, p_key text, p_rate int, p_period_s real, p_burst int, p_now timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_spent timestamptz := (SELECT r.spent_until FROM rates r WHERE r.queue = p_queue AND r.limit_key = p_key);
    v_most  timestamptz := p_now + make_interval(secs => burst(p_rate, p_period_s, p_burst) * p_period_s::float8 / p_rate);
BEGIN
    IF v_spent > v_most + interval '1 s' THEN  -- what a start costs is rounded up
        UPDATE rates r SET spent_until = v_most WHERE r.queue = p_queue AND r.limit_key = p_key;
        RETURN v_most;
    END IF;
    RETURN v_spent;
END $$;

-- How many starts a rate allows at p_now, and in how many seconds the next one after those will be free (GCRA: each
-- start costs period / rate seconds; up to burst() starts may be ahead).
CREATE OR REPLACE FUNCTION rate_allowance(p_spent_until timestamptz, p_rate int, p_period_s real, p_burst int, p_now timestamptz)
RETURNS TABLE (room int, again_s float8)
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT n.room, greatest(r.ahead_s - (r.burst - n.room - 1) * r.cost_s, 0)
    FROM (SELECT p_period_s::float8 / p_rate AS cost_s,
                 burst(p_rate, p_period_s, p_burst)::float8 AS burst,
                 CASE WHEN p_spent_until > p_now THEN extract(epoch FROM p_spent_until - p_now)::float8 ELSE 0 END AS ahead_s) r,
         LATERAL (SELECT greatest(floor(r.burst - r.ahead_s / r.cost_s), 0)::int AS room) n
$$;

-- How many jobs of a queue run: for each worker that runs any, those of the queue. Locks nothing.
CREATE OR REPLACE FUNCTION running_in(p_queue text) RETURNS int
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_running int := 0;
    v_worker  int := 0;
BEGIN
    LOOP
        v_worker := (SELECT min(j.worker_id) FROM jobs j WHERE j.status = 'running' AND j.worker_id > v_worker);
        EXIT WHEN v_worker IS NULL;
        v_running := v_running + (SELECT count(*) FROM jobs j
                                  WHERE j.status = 'running' AND j.worker_id = v_worker AND j.queue = p_queue);
    END LOOP;
    RETURN v_running;
END $$;

-- How many of p_limit jobs the queue's own limits let a claim take, and, when a rate says less, when to ask again.
-- The caller holds the queue's lock.
CREATE OR REPLACE FUNCTION allowance(p_queue text, p_limit int, p_now timestamptz) RETURNS TABLE (room int, again_s float8)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off AS $$
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
        SELECT a.room, a.again_s INTO v_rate
        FROM rate_allowance(spent_until(p_queue, '', v_queue.rate, v_queue.rate_period_s, v_queue.rate_burst, p_now),
                            v_queue.rate, v_queue.rate_period_s, v_queue.rate_burst, p_now) a;
        IF v_rate.room < room THEN
            room := v_rate.room;
            again_s := v_rate.again_s;
        END IF;
    END IF;
    room := greatest(room, 0);
    RETURN NEXT;
END $$;

-- How many jobs of one limit_key, of which p_running run and p_taken are about to, may start now by the queue's limits
-- per key, and, when a rate says less, when to ask again. The caller holds the queue's lock. Locks nothing.
CREATE OR REPLACE FUNCTION key_allowance(p_queue queues, p_key text, p_running int, p_taken int, p_now timestamptz)
RETURNS TABLE (room int, again_s float8)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_rate record;
BEGIN
    room := CASE WHEN p_key = '' THEN 1000000
                 ELSE greatest(coalesce(p_queue.limit_per_key - p_running, 1000000) - p_taken, 0) END;
    IF p_key <> '' AND room > 0 AND p_queue.rate_per_key IS NOT NULL THEN
        SELECT a.room, a.again_s INTO v_rate
        FROM rate_allowance(spent_until(p_queue.name, p_key, p_queue.rate_per_key, p_queue.rate_per_key_period_s,
                                        p_queue.rate_per_key_burst, p_now),
                            p_queue.rate_per_key, p_queue.rate_per_key_period_s, p_queue.rate_per_key_burst, p_now) a;
        IF v_rate.room - p_taken < room THEN
            room := greatest(v_rate.room - p_taken, 0);
            again_s := v_rate.again_s;
        END IF;
    END IF;
    RETURN NEXT;
END $$;

-- True if a job of this limit_key may start now. For the odd one; by_turn() asks for many at once.
CREATE OR REPLACE FUNCTION key_has_room(p_queue text, p_key text, p_now timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT p_key IS NULL OR coalesce((
        SELECT a.room > 0
        FROM queues q, key_allowance(q, p_key, (SELECT count(*) FROM jobs j WHERE j.status = 'running' AND j.queue = p_queue
                                                AND j.limit_key = p_key)::int, 0, p_now) a
        WHERE q.name = p_queue), true)
$$;

-- Notes the start of these jobs, which the caller is about to take under the queue's lock, against the queue's rates.
-- What a start costs is rounded up to the microsecond. Locks the rows of `rates`.
CREATE OR REPLACE FUNCTION spend(p_queue text, p_rows tid[], p_now timestamptz) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    INSERT INTO rates AS r (queue, limit_key, spent_until)
    SELECT p_queue, s.key, p_now + make_interval(secs => ceil(s.starts * s.period_s::float8 / s.rate * 1e6) / 1e6)
    FROM (SELECT '' AS key, cardinality(p_rows) AS starts, q.rate_period_s AS period_s, q.rate
          FROM queues q WHERE q.name = p_queue AND q.rate IS NOT NULL AND cardinality(p_rows) > 0
          UNION ALL
          SELECT j.limit_key, count(*), q.rate_per_key_period_s, q.rate_per_key
          FROM queues q, jobs j
          WHERE q.name = p_queue AND q.rate_per_key IS NOT NULL AND j.limit_key IS NOT NULL AND j.ctid = ANY (p_rows)
          GROUP BY j.limit_key, q.rate_per_key_period_s, q.rate_per_key) s
    ORDER BY s.key  -- as in rates_follow()
    ON CONFLICT (queue, limit_key) DO UPDATE
    SET spent_until = greatest(r.spent_until, p_now) + (excluded.spent_until - p_now)
$$;

-- A new rate counts from now on: no more is spent ahead than its own burst can be. What an old, slow one held back
-- would else wait for its time. Runs when its transaction commits. Locks the queue's rows of `rates`, in order of key.
CREATE OR REPLACE FUNCTION rates_follow() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_own_s float8 := burst(NEW.rate, NEW.rate_period_s, NEW.rate_burst) * NEW.rate_period_s::float8 / NEW.rate;
    v_key_s float8 := burst(NEW.rate_per_key, NEW.rate_per_key_period_s, NEW.rate_per_key_burst)
                      * NEW.rate_per_key_period_s::float8 / NEW.rate_per_key;
BEGIN
    UPDATE rates r SET spent_until = clock() + make_interval(secs => CASE r.limit_key WHEN '' THEN v_own_s ELSE v_key_s END)
    WHERE r.ctid = ANY (ARRAY(
        SELECT s.ctid FROM rates s
        WHERE s.queue = NEW.name
          AND s.spent_until > clock() + make_interval(secs => CASE s.limit_key WHEN '' THEN v_own_s ELSE v_key_s END)
        ORDER BY s.limit_key FOR UPDATE));
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'pgworkd.queues'::regclass AND t.tgname = 'rates_follow') THEN
        CREATE CONSTRAINT TRIGGER rates_follow
            AFTER INSERT OR UPDATE OF rate, rate_period_s, rate_burst, rate_per_key, rate_per_key_period_s, rate_per_key_burst
            ON queues DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
            WHEN (NEW.rate IS NOT NULL OR NEW.rate_per_key IS NOT NULL) EXECUTE FUNCTION rates_follow();
    END IF;
END $$;

-- Chooses up to p_room due jobs of a queue where keys or limits count, besides p_taken, and locks them. They come in
-- order of (priority, run_at, id), or by turns where limits per key or fairness ask for it. A job whose serialize_key
-- is not free is parked as `blocked`, out of the claim's way, until promote(). Jobs of the kinds p_without are not met. Where very many are to be parked, one claim
-- does some of it, and jobs without a key pass the rest. `again_s`: see allowance().
-- p_places, p_reach_s, p_since: where to begin, see claim(); `places`: where the next claim may begin (by turns: only
-- behind jobs without keys that are left out; without p_renew as given, unless some are left out or many parked).
-- Whatever waits, is due and stands at its place or before was taken or parked, is of a kind that was left out, or has become claimable since then: when
-- promote() or move() did that, `promoted` says when, and is at or behind the place's own; of all else callers are told a
-- run_at, or find it by reaching back. The caller holds the queue's lock, and so does who promotes and may wait for it:
-- what this claim does not see is promoted later than p_now. Rows are locked with SKIP LOCKED.
CREATE OR REPLACE FUNCTION pick(p_queue text, p_room int, p_taken tid[], p_now timestamptz, p_without text[],
                                p_places claim_place[], p_reach_s float8, p_since float8, p_renew boolean,
                                OUT picked tid[], OUT again_s float8, OUT places claim_place[])
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_queue  queues;
    v_met    tid[];
    v_take   tid[];
    v_park   tid[];
    v_parked tid[];
    v_turns  boolean;
    v_round  boolean;                            -- this one has left out nothing
    v_further boolean := false;                  -- there are more keys than the first look has seen
    v_park_max int[] := '{0,64,2000}';           -- how many jobs each round may park
    v_wait_s float8;
    v_room   int;
    v_now    timestamptz := clock();
    v_seen   tid[] := p_taken;                   -- met before: taken, or locked by someone else
    v_rounds int := 0;
    v_starts claim_place[] := CASE WHEN p_reach_s = 0 AND p_since IS NULL THEN coalesce(p_places, '{}')
                                   ELSE starts(p_places, p_reach_s, p_since) END;
    v_done   claim_place[] := '{}';              -- the last ones that are taken or parked
    v_asked  int;
    v_renew  boolean;                            -- this round says how far it has come
    v_ended  int[];                              -- priorities that this round has walked to their end
    v_passed claim_place[] := '{}';              -- where that leaves only kinds that are left to others
    v_stop   int;                                -- the first one met, of v_met, that could run and is not taken
    v_kinds  bigint[];                           -- of the jobs that turns go by, if some are left out
    v_below  int;
    v_cut    int := -2147483648;                 -- the priority that was not walked to its end; none: the last there is
BEGIN
    SELECT * INTO v_queue FROM queues q WHERE q.name = p_queue;
    v_turns := coalesce(v_queue.fair, false) OR v_queue.limit_per_key IS NOT NULL OR v_queue.rate_per_key IS NOT NULL;
    picked := '{}';
    IF v_turns THEN
        v_cut := 2147483647;
        v_kinds := CASE WHEN p_without <> '{}' THEN kinds_waiting(p_queue, p_without) END;
        v_starts := CASE WHEN p_without <> '{}' THEN v_starts ELSE '{}' END;
    END IF;
    LOOP
        v_room := p_room - cardinality(picked);
        IF v_turns THEN
            SELECT t.met, t.round, t.again_s, t.ended, t.cut INTO v_met, v_round, v_wait_s, v_ended, v_below
            FROM by_turn(v_queue, v_room, p_taken || picked, v_seen, p_now, v_further, p_without, v_kinds, v_starts) t;
            again_s := least(again_s, v_wait_s);
            v_further := v_further OR NOT v_round;
        ELSE  -- where one had to be parked there are more; but those without a key need not wait for all that
            v_round := v_rounds < cardinality(v_park_max);
            v_asked := greatest(v_room, v_park_max[v_rounds + 1]);
            SELECT o.met, o.ended INTO v_met, v_ended FROM in_order(p_queue, v_asked, v_round, v_seen, p_without, v_starts) o;
        END IF;
        SELECT (array_agg(y.ctid ORDER BY y.place) FILTER (WHERE y.free))[:v_room],
               array_agg(y.ctid) FILTER (WHERE NOT y.free),
               (array_agg(y.place ORDER BY y.place) FILTER (WHERE y.free))[v_room + 1]
        INTO v_take, v_park, v_stop
        FROM (SELECT x.ctid, x.place, CASE  -- of several with one key only the first is asked for
                  WHEN x.serialize_key IS NULL OR x.status = 'failed' AND NOT x.yields THEN true
                  WHEN row_number() OVER (PARTITION BY x.serialize_key ORDER BY x.run_at, x.id) > 1 THEN false
                  ELSE NOT EXISTS (SELECT FROM jobs h WHERE h.queue = p_queue AND h.serialize_key = x.serialize_key
                                   AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields) AND h.id <> x.id)
                   AND NOT EXISTS (SELECT FROM jobs e WHERE e.queue = p_queue AND e.serialize_key = x.serialize_key
                                   AND e.status IN ('blocked', 'pending', 'failed') AND e.waiting_on = 0
                                   AND (e.run_at, e.id) < (x.run_at, x.id)
                                   AND in_time(e, v_now)) END AS free
              FROM (SELECT j.ctid, m.place, j.serialize_key, j.run_at, j.id, j.status, j.yields
                    FROM unnest(v_met) WITH ORDINALITY AS m (ctid, place) JOIN jobs j ON j.ctid = m.ctid
                    WHERE j.status IN ('pending', 'failed')) x) y;
        IF v_turns AND p_without <> '{}' AND p_places IS NOT NULL AND v_ended IS NOT NULL THEN
            v_cut := v_below;
            v_passed := ARRAY(
                SELECT ROW(false, e.priority, (extract(epoch FROM p_now) * 1000000)::bigint - 1000000, '00000000-0000-0000-0000-000000000000', NULL)::claim_place
                FROM unnest(v_ended) AS e (priority));
        END IF;
        v_renew := v_round AND NOT v_turns AND p_places IS NOT NULL AND (p_renew OR v_rounds > 0 OR p_without <> '{}') OR v_renew;
        IF v_round AND v_renew THEN
            v_done := v_done || done_of(v_met[:coalesce(v_stop - 1, cardinality(v_met))]);
            v_cut := CASE WHEN v_stop IS NOT NULL OR cardinality(v_met) >= v_asked
                          THEN coalesce((SELECT j.priority FROM jobs j WHERE j.ctid = v_met[coalesce(v_stop, v_asked)]), 2147483647)
                          ELSE -2147483648 END;
            IF p_without <> '{}' THEN  -- with keys or without: up to a second ago, for what is due since then may not be committed yet
                v_passed := ARRAY(
                    SELECT ROW(k.keyed, p.priority, p.run_at, p.id, NULL)::claim_place
                    FROM (SELECT d.priority, d.run_at, d.id FROM unnest(v_done) d
                          UNION ALL
                          SELECT e.priority, (extract(epoch FROM p_now) * 1000000)::bigint - 1000000, '00000000-0000-0000-0000-000000000000'
                          FROM unnest(v_ended) AS e (priority) WHERE e.priority > v_cut) p,
                         (VALUES (false), (true)) AS k (keyed));
            END IF;
        END IF;
        picked := picked || ARRAY(
            SELECT j.ctid FROM unnest(v_take) WITH ORDINALITY AS m (ctid, place) JOIN jobs j ON j.ctid = m.ctid
            WHERE j.status IN ('pending', 'failed') ORDER BY m.place FOR UPDATE OF j SKIP LOCKED);
        v_parked := ARRAY(
            SELECT j.ctid FROM unnest(v_park) AS m (ctid) JOIN jobs j ON j.ctid = m.ctid
            WHERE j.status IN ('pending', 'failed') FOR UPDATE OF j SKIP LOCKED);
        UPDATE jobs j SET status = 'blocked' WHERE j.ctid = ANY (v_parked);
        -- Besides what was taken, what someone else holds must not be met again. (What is parked is not: each row met
        -- is compared with all of these.)
        v_seen := v_seen || v_take || ARRAY(SELECT unnest(v_park) EXCEPT SELECT unnest(v_parked));
        EXIT WHEN cardinality(picked) >= p_room OR cardinality(v_met) = 0 AND v_round;
        v_rounds := v_rounds + 1;
        IF v_rounds >= 10 OR NOT v_turns AND v_rounds > cardinality(v_park_max) THEN  -- enough for one claim
            again_s := least(again_s, 0.02);
            EXIT;
        END IF;
    END LOOP;
    IF v_turns AND p_places IS NOT NULL THEN  -- places of those without keys only, and of what is left to others
        p_places := CASE WHEN p_without <> '{}' THEN ARRAY(SELECT p::claim_place FROM unnest(p_places) p WHERE NOT p.keyed) ELSE '{}' END;
        v_renew := p_without <> '{}';
    END IF;
    places := CASE WHEN v_renew IS NOT TRUE THEN p_places
                   ELSE places_after(p_queue, p_places, v_starts, v_done || v_passed, v_cut, picked, p_now, p_without, p_since IS NOT NULL) END;
END $$;

-- Where a claim begins that reaches p_reach_s before these places, NULL: to every head; and goes back to p_since, if that
-- is before them. Without `promoted` all that was promoted is met by its run_at. Locks nothing.
CREATE OR REPLACE FUNCTION starts(p_places claim_place[], p_reach_s float8, p_since float8) RETURNS claim_place[]
LANGUAGE sql IMMUTABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT ARRAY(
        SELECT ROW(p.keyed, p.priority, b.run_at,
                   CASE WHEN b.run_at < p.run_at OR p_since IS NOT NULL THEN '00000000-0000-0000-0000-000000000000'::uuid ELSE p.id END,
                   p.promoted - (p_reach_s * 1e6)::bigint)::claim_place
        FROM unnest(p_places) p,
             LATERAL (SELECT greatest(least(p.run_at - (coalesce(p_reach_s, 1e10) * 1e6)::bigint, (p_since * 1e6)::bigint), 0) AS run_at) b)
$$;

-- True if a job with keys waits that pick() may meet from these places on. Locks nothing. (The first ones in an order
-- are asked for, because the index must have that order: in another one, EXISTS would look at each limit_key.)
CREATE OR REPLACE FUNCTION keyed_behind(p_queue text, p_starts claim_place[]) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_above bigint := 2147483648;
    v_place claim_place;
    v_found boolean := false;
BEGIN
    FOREACH v_place IN ARRAY p_starts LOOP  -- in order of priority: see places_after()
        CONTINUE WHEN NOT v_place.keyed;
        v_found := (SELECT max(j.priority) FROM jobs j
                    WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority < v_above AND j.priority > v_place.priority) IS NOT NULL
           OR (SELECT j.id FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority = v_place.priority
               AND (j.run_at, j.id) > (to_timestamp(v_place.run_at / 1e6), v_place.id) ORDER BY j.run_at, j.id LIMIT 1) IS NOT NULL
           OR (SELECT j.id FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority = v_place.priority
               AND j.promoted >= to_timestamp(v_place.promoted / 1e6) ORDER BY j.promoted LIMIT 1) IS NOT NULL;
        EXIT WHEN v_found;
        v_above := v_place.priority;
    END LOOP;
    IF NOT v_found THEN
        v_found := (SELECT max(j.priority) FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority < v_above) IS NOT NULL;
    END IF;
    RETURN v_found;
END $$;

-- Of these rows, which come in order, the last of each priority, with keys and without. Locks nothing.
CREATE OR REPLACE FUNCTION done_of(p_rows tid[]) RETURNS claim_place[]
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT ARRAY(
        SELECT ROW(g.keyed, g.priority, (extract(epoch FROM j.run_at) * 1000000)::bigint, j.id, NULL)::claim_place
        FROM (SELECT j.serialize_key IS NOT NULL OR j.limit_key IS NOT NULL AS keyed, j.priority, max(m.place) AS place
              FROM unnest(p_rows) WITH ORDINALITY AS m (ctid, place) JOIN jobs j ON j.ctid = m.ctid GROUP BY 1, 2) g
        JOIN jobs j ON j.ctid = p_rows[g.place])
$$;

-- Where the next claim may begin. p_places are the places before, p_starts where this one began, p_done its last rows that
-- are taken or parked, and what it has passed. Priorities above p_cut it has walked to the end, that one up to there, those below it has not seen.
-- p_back: p_starts went back because something had become claimable. Keeps 180 places, those of what was taken or parked first.
-- They come in descending order of priority. Locks nothing.
CREATE OR REPLACE FUNCTION places_after(p_queue text, p_places claim_place[], p_starts claim_place[], p_done claim_place[], p_cut int,
                                        p_picked tid[], p_now timestamptz, p_without text[], p_back boolean) RETURNS claim_place[]
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_now      bigint := extract(epoch FROM p_now) * 1000000;
    v_row      record;
    v_at       bigint;
    v_id       uuid;
    v_promoted bigint;
    v_from     timestamptz;
    v_until    timestamptz;
    v_places   claim_place[] := '{}';
BEGIN
    FOR v_row IN
        SELECT coalesce(o.keyed, d.keyed) AS keyed, coalesce(o.priority, d.priority) AS priority,
               o.run_at, o.id, o.promoted, s.run_at AS start_at, s.id AS start_id, s.promoted AS start_promoted,
               d.run_at AS done_at, d.id AS done_id
        FROM unnest(p_places) WITH ORDINALITY AS o (keyed, priority, run_at, id, promoted, place)
        LEFT JOIN unnest(p_starts) s ON s.keyed = o.keyed AND s.priority = o.priority
        FULL JOIN (SELECT DISTINCT ON (x.keyed, x.priority) x.* FROM unnest(p_done) x
                   ORDER BY x.keyed, x.priority, x.run_at DESC, x.id DESC) d ON d.keyed = o.keyed AND d.priority = o.priority
        ORDER BY d.priority IS NULL, o.place
    LOOP
        IF v_row.priority = p_cut OR v_row.priority < p_cut AND p_back THEN
            v_at := v_row.start_at;
            v_id := v_row.start_id;
        ELSE
            v_at := v_row.run_at;
            v_id := v_row.id;
        END IF;
        IF v_at > v_now THEN  -- the clock was set back
            v_at := v_now;
            v_id := '00000000-0000-0000-0000-000000000000';
        END IF;
        IF v_row.priority >= p_cut AND v_row.done_at IS NOT NULL
           AND (v_at IS NULL OR (v_row.done_at, v_row.done_id) > (v_at, v_id)) THEN
            v_at := v_row.done_at;
            v_id := v_row.done_id;
        END IF;
        CONTINUE WHEN v_at IS NULL;
        v_from := to_timestamp(v_row.start_promoted / 1e6);
        v_until := to_timestamp(v_at / 1e6);
        v_promoted := CASE WHEN v_row.keyed THEN v_now END;
        IF v_row.keyed AND v_row.priority < p_cut THEN
            v_promoted := least(v_row.promoted, v_now);
        ELSIF v_row.keyed AND v_from IS NOT NULL THEN  -- there may be some that are not taken
            v_promoted := least(v_now, (
                SELECT (extract(epoch FROM j.promoted) * 1000000)::bigint FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority = v_row.priority
                  AND j.promoted >= v_from AND (j.run_at, j.id) <= (v_until, v_id)
                  AND j.ctid <> ALL (p_picked) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                ORDER BY j.promoted LIMIT 1));
        END IF;
        v_places := v_places || ROW(v_row.keyed, v_row.priority, v_at, v_id, v_promoted)::claim_place;
        EXIT WHEN cardinality(v_places) >= 180;
    END LOOP;
    RETURN ARRAY(SELECT p::claim_place FROM unnest(v_places) p ORDER BY p.keyed, p.priority DESC);  -- as in_order() reads them
END $$;

-- Up to p_room due jobs in order of (priority, run_at, id), besides p_seen and the kinds p_without; those with keys only if
-- p_keyed. Begins behind p_starts, of which each priority that is not among them begins at its head, and takes what was
-- promoted before those in along; where more than 64 of a priority were, in the order in which they were. `ended`: the
-- priorities of which there are no more. Locks nothing.
CREATE OR REPLACE FUNCTION in_order(p_queue text, p_room int, p_keyed boolean, p_seen tid[], p_without text[],
                                    p_starts claim_place[], OUT met tid[], OUT ended int[])
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_now      timestamptz := clock();
    v_above    bigint := 2147483648;
    v_priority int;
    v_room     int := p_room;
    v_probes   int := 0;
    v_plain    int;                              -- the next known priority of jobs without keys, ...
    v_keyed    int;                              -- ... and with them
    v_start    claim_place;
    v_plain_at claim_place;
    v_keyed_at claim_place;
    v_plain_from timestamptz;
    v_plain_id uuid;
    v_from     timestamptz;
    v_id       uuid;
    v_promoted timestamptz;
    v_first    tid[];                            -- before that place, promoted since
BEGIN
    met := '{}';
    ended := '{}';
    WHILE v_room > 0 AND v_probes < 1000 LOOP
        v_plain := NULL;
        v_keyed := NULL;
        FOREACH v_start IN ARRAY p_starts LOOP  -- a loop is much quicker than a query here
            IF v_start.priority >= v_above THEN
                CONTINUE;
            ELSIF v_start.keyed THEN
                v_keyed := v_start.priority;
                v_keyed_at := v_start;
                EXIT;  -- those without keys come first
            ELSIF v_plain IS NULL THEN
                v_plain := v_start.priority;
                v_plain_at := v_start;
            END IF;
        END LOOP;
        v_priority := greatest(v_plain, CASE WHEN p_keyed THEN v_keyed END,
            (SELECT max(j.priority) FROM jobs j
             WHERE j.queue = p_queue AND waits_plain(j) AND j.priority < v_above AND j.priority > coalesce(v_plain, -2147483649)),
            (SELECT max(j.priority) FROM jobs j
             WHERE p_keyed AND j.queue = p_queue AND waits_keyed(j) AND j.priority < v_above
               AND j.priority > coalesce(v_keyed, -2147483649)));
        EXIT WHEN v_priority IS NULL;
        v_plain_from := '-infinity';
        v_plain_id := '00000000-0000-0000-0000-000000000000';
        IF v_priority = v_plain THEN
            v_plain_from := to_timestamp(v_plain_at.run_at / 1e6);
            v_plain_id := v_plain_at.id;
        END IF;
        v_from := '-infinity';
        v_id := '00000000-0000-0000-0000-000000000000';
        v_promoted := NULL;
        v_first := '{}';
        IF v_priority = v_keyed THEN
            v_from := to_timestamp(v_keyed_at.run_at / 1e6);
            v_id := v_keyed_at.id;
            v_promoted := to_timestamp(v_keyed_at.promoted / 1e6);
        END IF;
        IF p_keyed AND v_promoted IS NOT NULL THEN
            v_first := ARRAY(
                SELECT j.ctid FROM jobs j
                WHERE j.queue = p_queue AND j.priority = v_priority AND waits_keyed(j) AND j.run_at <= v_now
                  AND j.promoted >= v_promoted AND (j.run_at, j.id) <= (v_from, v_id)
                  AND j.ctid <> ALL (p_seen) AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                ORDER BY j.promoted, j.run_at, j.id LIMIT greatest(v_room, 64));
        END IF;
        met := met || ARRAY(
              SELECT all_lines.ctid FROM (
                  (SELECT j.ctid, j.run_at, j.id FROM jobs j
                   WHERE j.queue = p_queue AND j.priority = v_priority AND waits_plain(j) AND j.run_at <= v_now
                     AND (j.run_at, j.id) > (v_plain_from, v_plain_id)
                     AND j.ctid <> ALL (p_seen) AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                   ORDER BY j.run_at, j.id LIMIT v_room)
                  UNION ALL
                  (SELECT j.ctid, j.run_at, j.id FROM jobs j
                   WHERE p_keyed AND j.queue = p_queue AND j.priority = v_priority AND waits_keyed(j) AND j.run_at <= v_now
                     AND (j.run_at, j.id) > (v_from, v_id)
                     AND j.ctid <> ALL (p_seen) AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                   ORDER BY j.run_at, j.id LIMIT v_room)
                  UNION ALL
                  (SELECT j.ctid, j.run_at, j.id FROM jobs j WHERE j.ctid = ANY (v_first) ORDER BY j.run_at, j.id)) all_lines
              ORDER BY all_lines.run_at, all_lines.id LIMIT v_room);
        v_above := v_priority;
        v_probes := v_probes + 1;
        v_room := p_room - cardinality(met);
        IF v_room > 0 THEN
            ended := ended || v_priority;
        END IF;
    END LOOP;
END $$;

-- The kinds of the jobs with a limit_key that wait, but for p_without, by their hashes; NULL: there are too many to go by.
-- Locks nothing.
CREATE OR REPLACE FUNCTION kinds_waiting(p_queue text, p_without text[]) RETURNS bigint[]
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_without bigint[] := ARRAY(SELECT hashtextextended(u.kind, 0) FROM unnest(p_without) AS u (kind));
    v_kind    bigint;
    v_kinds   bigint[] := '{}';
BEGIN
    FOR i IN 1..200 LOOP
        v_kind := (SELECT min(hashtextextended(coalesce(j.kind, j.queue)::text, 0)) FROM jobs j
                   WHERE j.queue = p_queue AND waits_keyed(j) AND j.limit_key IS NOT NULL
                     AND hashtextextended(coalesce(j.kind, j.queue)::text, 0) > coalesce(v_kind, -9223372036854775808));
        IF v_kind IS NULL THEN
            RETURN v_kinds;
        END IF;
        IF v_kind <> ALL (v_without) THEN
            v_kinds := v_kinds || v_kind;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- Up to p_room due jobs of one limit_key ('': those that have only a serialize_key), besides p_seen and the kinds p_without,
-- in order of (priority, run_at, id). p_kinds: as kinds_waiting() says. Locks nothing.
CREATE OR REPLACE FUNCTION of_key(p_queue text, p_key text, p_room int, p_seen tid[], p_without text[], p_kinds bigint[])
RETURNS tid[]
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_now      timestamptz := clock();
    v_rows     tid[] := '{}';
    v_above    bigint := 2147483648;
    v_priority int;
    v_probes   int := 0;
    v_each     tid[];                            -- of each kind, the first ones
BEGIN
    WHILE cardinality(v_rows) < p_room AND v_probes < 100 LOOP
        IF p_kinds IS NULL OR p_key = '' THEN
            v_priority := (
                SELECT max(j.priority) FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j) AND coalesce(j.limit_key::text, '') = p_key
                  AND j.priority < v_above);
            EXIT WHEN v_priority IS NULL;
            v_rows := v_rows || ARRAY(
                SELECT j.ctid FROM jobs j
                WHERE j.queue = p_queue AND waits_keyed(j) AND coalesce(j.limit_key::text, '') = p_key
                  AND j.priority = v_priority AND j.run_at <= v_now AND j.ctid <> ALL (p_seen)
                  AND in_time(j, v_now) AND coalesce(j.kind, j.queue)::text <> ALL (p_without)
                ORDER BY j.run_at, j.id LIMIT p_room - cardinality(v_rows));
        ELSE
            v_priority := (
                SELECT max(k.priority)
                FROM unnest(p_kinds) AS u (kind),
                     LATERAL (SELECT j.priority FROM jobs j
                              WHERE j.queue = p_queue AND waits_keyed(j) AND hashtextextended(coalesce(j.kind, j.queue)::text, 0) = u.kind
                                AND j.limit_key = p_key AND - j.priority::bigint > - v_above
                              ORDER BY - j.priority::bigint LIMIT 1) k);
            EXIT WHEN v_priority IS NULL;
            v_each := ARRAY(
                SELECT k.ctid
                FROM unnest(p_kinds) AS u (kind),
                     LATERAL (SELECT j.ctid FROM jobs j
                              WHERE j.queue = p_queue AND waits_keyed(j) AND hashtextextended(coalesce(j.kind, j.queue)::text, 0) = u.kind
                                AND j.limit_key = p_key AND - j.priority::bigint = - v_priority::bigint
                                AND j.run_at <= v_now AND j.ctid <> ALL (p_seen) AND in_time(j, v_now)
                              ORDER BY j.run_at, j.id LIMIT p_room - cardinality(v_rows)) k);
            v_rows := v_rows || ARRAY(
                SELECT j.ctid FROM jobs j WHERE j.ctid = ANY (v_each)
                ORDER BY j.run_at, j.id LIMIT p_room - cardinality(v_rows));
        END IF;
        v_above := v_priority;
        v_probes := v_probes + 1;
    END LOOP;
    RETURN v_rows;
END $$;

-- Of the limit_keys after p_after, in rotation, those that have a due job; '' stands for the jobs without a limit_key and
-- is always among them. Looks at up to p_looks keys, and `reached` the last of them; `round`: it has seen all there are.
-- Jobs of the kinds p_without do not count; with p_kinds, as kinds_waiting() says, keys that have only such ones are not met.
-- Locks nothing.
CREATE OR REPLACE FUNCTION next_keys(p_queue text, p_after text, p_looks int, p_now timestamptz, p_without text[], p_kinds bigint[],
                                     OUT keys text[], OUT reached text, OUT round boolean)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_key      text := p_after;
    v_priority int;                              -- of the first job of that key, due or not
    v_run_at   timestamptz;
    v_due      boolean;
    v_wrapped  boolean := false;
BEGIN
    keys := '{}';
    reached := p_after;
    FOR i IN 1..p_looks LOOP
        IF p_kinds IS NULL THEN
            SELECT coalesce(j.limit_key::text, ''), j.priority, j.run_at INTO v_key, v_priority, v_run_at FROM jobs j
            WHERE j.queue = p_queue AND waits_keyed(j) AND coalesce(j.limit_key::text, '') > v_key
            ORDER BY j.queue, coalesce(j.limit_key::text, ''), j.priority DESC, j.run_at LIMIT 1;
        ELSE
            v_key := (
                SELECT min(k.key)
                FROM unnest(p_kinds) AS u (kind),
                     LATERAL (SELECT j.limit_key::text AS key FROM jobs j
                              WHERE j.queue = p_queue AND waits_keyed(j) AND hashtextextended(coalesce(j.kind, j.queue)::text, 0) = u.kind
                                AND j.limit_key > v_key
                              ORDER BY j.limit_key LIMIT 1) k);
        END IF;
        IF v_key IS NULL AND NOT v_wrapped THEN  -- behind the last key comes '', then the first
            v_wrapped := true;
            v_key := '';
        END IF;
        round := v_key IS NULL OR v_wrapped AND v_key > p_after;
        EXIT WHEN round;
        reached := v_key;
        v_due := v_key = '' OR p_without = '{}' AND v_run_at <= p_now
            OR (p_without <> '{}' OR EXISTS (SELECT FROM jobs j WHERE j.queue = p_queue AND waits_keyed(j)
                                             AND coalesce(j.limit_key::text, '') = v_key AND j.priority < v_priority))
               AND cardinality(of_key(p_queue, v_key, 1, '{}', p_without, p_kinds)) > 0;
        IF v_due THEN
            keys := keys || v_key;
        END IF;
    END LOOP;
END $$;

-- The limit_keys of the first p_most due jobs with keys, in order of (priority, run_at, id), and ''. `complete`: no other
-- key has a due job. Those of the kinds p_without are left out afterwards, so that they cost no more. Locks nothing.
CREATE OR REPLACE FUNCTION due_keys(p_queue text, p_most int, p_now timestamptz, p_without text[], OUT keys text[], OUT complete boolean)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_found    text[] := '{}';
    v_above    bigint := 2147483648;
    v_priority int;
    v_probes   int := 0;
BEGIN
    LOOP
        v_priority := (SELECT max(j.priority) FROM jobs j
                       WHERE j.queue = p_queue AND waits_keyed(j) AND j.priority < v_above);
        complete := v_priority IS NULL;
        EXIT WHEN complete OR v_probes >= 100 OR cardinality(v_found) >= p_most;
        v_found := v_found || ARRAY(
            SELECT CASE WHEN coalesce(j.kind, j.queue)::text <> ALL (p_without) THEN coalesce(j.limit_key::text, '') END FROM jobs j
            WHERE j.queue = p_queue AND j.priority = v_priority AND waits_keyed(j) AND j.run_at <= p_now
            ORDER BY j.run_at, j.id LIMIT p_most - cardinality(v_found));
        v_above := v_priority;
        v_probes := v_probes + 1;
    END LOOP;
    complete := complete AND cardinality(v_found) < p_most;
    keys := ARRAY(SELECT DISTINCT u.key FROM unnest(v_found || ''::text) AS u (key) WHERE u.key IS NOT NULL);
END $$;

-- Up to p_room due jobs besides p_seen such that limit_keys take turns: equal shares for the next keys after the
-- one served last, each within its own limits, against which p_taken count. Jobs without a limit_key count as one
-- key more. It looks at the next few keys; p_further, when those did not give enough: at the keys of the jobs that have
-- been due for longest, which are all that are due unless those are many. Then it also looks, from where the claim
-- before has got to (`searched`), for keys that have a due job behind those, and serves them first: none waits for ever.
-- `round`: no key was left out; `again_s`: when a rate will let the next start. Among the jobs without keys it begins behind
-- p_starts; `ended` and `cut`: what it has walked of their priorities, see in_order() and places_after(); NULL: nothing.
-- Remembers the turn: locks the queue's row in `rates`. The caller holds the queue's lock.
CREATE OR REPLACE FUNCTION by_turn(p_queue queues, p_room int, p_taken tid[], p_seen tid[], p_now timestamptz, p_further boolean,
                                   p_without text[], p_kinds bigint[], p_starts claim_place[],
                                   OUT met tid[], OUT round boolean, OUT again_s float8, OUT ended int[], OUT cut int)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_turn     text;
    v_searched text;
    v_most     int := least(greatest(p_room, 16), 1000);
    v_found    record;
    v_first    text[] := '{}';                   -- to be served before all others
    v_keys     text[];                           -- the next in turn; '' stands for the jobs without a limit_key
    v_key      text;
    v_running  int := 0;
    v_taken    jsonb := '{}';                    -- how many this claim has taken before, by key
    v_allowed  record;
    v_room     int;
    v_share    int;
    v_before   int;
    v_plain    tid[];
BEGIN
    SELECT r.turn, r.searched INTO v_turn, v_searched FROM rates r WHERE r.queue = p_queue.name AND r.limit_key = '';
    v_turn := coalesce(v_turn, '');
    IF NOT p_further THEN
        SELECT n.keys, n.round INTO v_keys, round FROM next_keys(p_queue.name, v_turn, v_most, p_now, p_without, p_kinds) n;
    ELSE
        SELECT d.keys, d.complete INTO v_keys, round FROM due_keys(p_queue.name, 500 + cardinality(p_seen), p_now, p_without) d;
        IF NOT round THEN
            SELECT * INTO v_found FROM next_keys(p_queue.name, coalesce(v_searched, v_turn), 100, p_now, p_without, p_kinds);
            v_first := v_found.keys[:(p_room + 1) / 2];
            v_searched := CASE WHEN v_first = v_found.keys THEN v_found.reached ELSE v_first[cardinality(v_first)] END;
        END IF;
        v_keys := ARRAY(SELECT u.key FROM unnest(v_keys) AS u (key) WHERE u.key <> ALL (v_first)
                        ORDER BY u.key <= v_turn, u.key LIMIT v_most + 1);
        round := round AND cardinality(v_keys) <= v_most;
        v_keys := v_keys[:v_most];
    END IF;
    IF cardinality(p_taken) > 0 THEN
        v_taken := (SELECT coalesce(jsonb_object_agg(t.key, t.n), '{}')
                    FROM (SELECT j.limit_key::text AS key, count(*) AS n FROM jobs j
                          WHERE j.ctid = ANY (p_taken) AND j.limit_key IS NOT NULL GROUP BY 1) t);
    END IF;
    met := '{}';
    v_share := ceil(p_room::float8 / nullif(cardinality(v_first || v_keys), 0));
    FOREACH v_key IN ARRAY v_first || v_keys LOOP
        IF p_queue.limit_per_key IS NOT NULL AND v_key <> '' THEN
            v_running := (SELECT count(*) FROM jobs j
                          WHERE j.queue = p_queue.name AND j.limit_key = v_key AND j.status = 'running');
        END IF;
        SELECT * INTO v_allowed
        FROM key_allowance(p_queue, v_key, v_running, coalesce((v_taken ->> v_key)::int, 0), p_now);
        v_before := cardinality(met);
        v_room := least(v_share, v_allowed.room, p_room - v_before);
        IF v_key = '' THEN
            SELECT o.met, o.ended INTO v_plain, ended FROM in_order(p_queue.name, v_room, false, p_seen, p_without, p_starts) o;
            cut := CASE WHEN cardinality(v_plain) >= v_room
                        THEN coalesce((SELECT j.priority FROM jobs j WHERE j.ctid = v_plain[v_room]), 2147483647)
                        ELSE -2147483648 END;
            met := met || v_plain;
        END IF;
        IF v_room > cardinality(met) - v_before THEN
            met := met || of_key(p_queue.name, v_key, v_room + v_before - cardinality(met), p_seen, p_without, p_kinds);
        END IF;
        IF cardinality(met) - v_before >= v_allowed.room THEN  -- it is the rate that holds the next one back
            again_s := least(again_s, v_allowed.again_s);
        END IF;
        IF v_key <> ALL (v_first) THEN
            v_turn := v_key;
        END IF;
        EXIT WHEN cardinality(met) >= p_room;
    END LOOP;
    INSERT INTO rates AS r (queue, turn, searched) VALUES (p_queue.name, v_turn, v_searched)
    ON CONFLICT (queue, limit_key) DO UPDATE SET turn = excluded.turn, searched = excluded.searched
    WHERE (r.turn, r.searched) IS DISTINCT FROM (excluded.turn, excluded.searched);
END $$;

-- Puts the first of those who wait for each of these keys back in the claim's way, unless someone holds the key.
-- For whoever has freed keys, or taken a job out of a line. p_queues and p_keys are parallel. Locks the queues, in
-- order, then one blocked job per key with SKIP LOCKED: where the first is locked, no other goes before it, and the key is left
-- to apply_effects(). Who may not wait locks no queue; whom a claim parks in this very moment apply_effects() finds.
-- (Who holds a key is asked once for each, inside: as a join it would read all holders there are.)
CREATE OR REPLACE FUNCTION promote(p_queues text[], p_keys text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_queues text[];
    v_keys   text[];
BEGIN
    PERFORM lock_queues(p_queues);
    IF no_wait() THEN
        PERFORM put_off(NULL, p_queues => p_queues, p_keys => p_keys);
    END IF;
    WITH first AS MATERIALIZED (
        SELECT k.queue, k.key,
               (SELECT b.ctid FROM jobs b
                WHERE b.queue = k.queue AND b.serialize_key = k.key AND b.status = 'blocked' AND b.waiting_on = 0
                  AND in_time(b, clock())
                  AND NOT EXISTS (SELECT FROM jobs h WHERE h.queue = k.queue AND h.serialize_key = k.key
                                  AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields))
                ORDER BY b.run_at, b.id LIMIT 1) AS row
        FROM (SELECT DISTINCT u.queue, u.key FROM unnest(p_queues, p_keys) AS u (queue, key)) k
    ), ours AS MATERIALIZED (
        SELECT b.ctid AS row FROM jobs b WHERE b.ctid = ANY (ARRAY(SELECT f.row FROM first f)) FOR UPDATE SKIP LOCKED
    ), moved AS (
        UPDATE jobs j SET status = 'pending', promoted = clock_after_waiting()  -- for the queue: see pick()
        WHERE j.ctid = ANY (ARRAY(SELECT o.row FROM ours o))
    )
    SELECT array_agg(f.queue), array_agg(f.key) INTO v_queues, v_keys
    FROM first f WHERE f.row IS NOT NULL AND f.row <> ALL (ARRAY(SELECT o.row FROM ours o));
    IF v_keys IS NOT NULL AND NOT no_wait() THEN
        PERFORM put_off(NULL, p_queues => v_queues, p_keys => v_keys);
    END IF;
    PERFORM wake(p_queues);
END $$;

-- ------------------------------------------------------------------------------------------------
-- 6 Settle: all ways out of `running`. Arrays are parallel, one element per attempt. Each function
-- locks the rows it changes and answers with those it changed; an id that is missing from the answer
-- was settled before, or its attempt is no longer the running one.
-- The fence is (id, attempt, worker): the attempts must run under p_worker (NULL, for people who act by hand: whoever's), and
-- that id must not be somebody else's by now, under another token than p_token. That is looked up once per call, without a lock.
-- The plan is the same whatever the statistics say: the primary key at these ids, hashed against the
-- arrays; both come in order of id, so rows are locked in that order (work_mem: a hash that is split into
-- parts would lose it). `worker_id IS NOT NULL` means running (a CHECK says so) and keeps the planner off the index on
-- running rows, which it likes as long as it believes that few run.
-- ------------------------------------------------------------------------------------------------

-- For a settle that waits for nobody: locks those of these running jobs that nobody else has locked, and answers with
-- p_attempts, in which the others have an attempt that there is not. What the settle then finds locked is put off.
CREATE OR REPLACE FUNCTION unlocked(p_ids uuid[], p_attempts int[]) RETURNS int[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_ids uuid[];
BEGIN
    PERFORM say_no_wait('on');
    v_ids := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.worker_id IS NOT NULL ORDER BY j.id FOR UPDATE SKIP LOCKED);
    RETURN ARRAY(SELECT CASE WHEN l.id IS NULL THEN -1 ELSE u.attempt END
                 FROM unnest(p_ids, p_attempts) WITH ORDINALITY AS u (id, attempt, place) LEFT JOIN unnest(v_ids) AS l (id) ON l.id = u.id
                 ORDER BY u.place);
END $$;

-- Completed: moves the rows to finished_jobs (or only deletes them where the queue keeps nothing; p_began_ago_s: so many
-- seconds ago the handler of each began) and inserts the next occurrence of recurring ones (p_schedules, p_next, p_revisions; see add_occurrences). Tells who waits
-- for them, and batches (with payload and result only where a batch streams), frees keys, and wakes pools whose queue's
-- limits have room again.
CREATE OR REPLACE FUNCTION settle_completed(p_ids uuid[], p_attempts int[], p_results text[], p_schedules text[] DEFAULT NULL,
                                 p_next timestamptz[] DEFAULT NULL, p_revisions int[] DEFAULT NULL,
                                 p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL, p_began_ago_s real[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off SET jit = off
SET work_mem = '64MB' SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_won       uuid[];
    v_schedules text[];
    v_queues    text[];
    v_keys      text[];
    v_wake      text[];
    v_kept_keys jsonb;
    v_batched   ended_job[];
BEGIN
    WITH done AS (
        DELETE FROM jobs j
        USING (SELECT * FROM unnest(p_ids, p_attempts, p_results, p_began_ago_s) AS u (id, attempt, result, began_ago_s) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
          AND (p_worker IS NULL OR j.worker_id = p_worker AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
        RETURNING j.*, s.result, s.began_ago_s
    ), settings AS MATERIALIZED (  -- of their queues, of which there may be thousands
        SELECT q.name::text, q.keep_s, q.limited FROM queues q WHERE q.name = ANY (ARRAY(SELECT DISTINCT d.queue::text FROM done d))
    ), kept AS (
        INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, failed_at, occurrence, batch_id,
            status, priority, attempts, failures, max_attempts, worker_id, queue, kind, payload, result, meta,
            error, errors, dedupe_key, serialize_key, limit_key, schedule, keep_until, expires_at, began_at)
        SELECT d.id, clock(), d.run_at, d.created_at, d.started_at, d.failed_at, d.occurrence, d.batch_id,
            'completed', d.priority, d.attempts, d.failures, d.max_attempts, d.worker_id, d.queue, d.kind, d.payload,
            d.result::jsonb, d.meta, d.error, d.errors, d.dedupe_key, d.serialize_key, d.limit_key, d.schedule,
            CASE WHEN (SELECT bool_or(q.keep_s > 0) FROM settings q)
                 THEN (SELECT clock() + make_interval(secs => q.keep_s) FROM settings q WHERE q.name = d.queue) END, d.expires_at,
            clock() - make_interval(secs => d.began_ago_s)
        FROM done d WHERE d.queue <> ALL (ARRAY(SELECT q.name FROM settings q WHERE q.keep_s = 0))
    )
    SELECT array_agg(d.id), array_agg(d.schedule) FILTER (WHERE d.schedule IS NOT NULL),
           array_agg(d.queue::text) FILTER (WHERE d.serialize_key IS NOT NULL),
           array_agg(d.serialize_key::text) FILTER (WHERE d.serialize_key IS NOT NULL),
           array_agg(d.queue::text) FILTER (WHERE d.queue = ANY (ARRAY(SELECT q.name FROM settings q WHERE q.limited))),
           jsonb_agg(to_jsonb(ROW(d.id, d.queue, d.dedupe_key, d.dedupe_until))) FILTER (WHERE d.dedupe_until IS NOT NULL),
           array_agg(CASE WHEN (SELECT true FROM batches c WHERE c.parent_id = d.batch_id AND c.stream LIMIT 1)
                          THEN ROW(d.batch_id, 'completed', false, d.id, d.kind, d.payload, d.result::jsonb, d.meta)::ended_job
                          ELSE ROW(d.batch_id, 'completed', false, d.id, NULL, NULL, NULL, NULL)::ended_job END)
               FILTER (WHERE d.batch_id IS NOT NULL)
    INTO v_won, v_schedules, v_queues, v_keys, v_wake, v_kept_keys, v_batched
    FROM done d;
    -- As is_awaited(); a call of that costs each settle more than its two questions.
    IF EXISTS (SELECT FROM job_dependencies w WHERE w.depends_on = ANY (v_won))
       OR EXISTS (SELECT FROM result_waiters w WHERE w.job_id = ANY (v_won)) THEN
        PERFORM pass_on(v_won, true);
    END IF;
    IF v_kept_keys IS NOT NULL THEN
        PERFORM keep_keys(v_kept_keys);
    END IF;
    IF v_batched IS NOT NULL THEN
        PERFORM batch_ended(v_batched);
    END IF;
    IF v_keys IS NOT NULL OR v_wake IS NOT NULL THEN
        PERFORM freed(v_queues, v_keys, v_wake);
    END IF;
    IF v_schedules IS NOT NULL AND p_next IS NOT NULL THEN
        PERFORM follow(v_schedules, p_schedules, p_next, p_revisions);
    END IF;
    RETURN coalesce(v_won, '{}');
END $$;

-- settle_completed() in the transaction of the handler itself, which commits next, unless its connection dies first: then it
-- stays open until the server notices. So it locks the job's row, for which it waits, and nothing that claims or other settles
-- need: what its tree, its dependents and its line are owed is put off, and done when it has committed.
CREATE OR REPLACE FUNCTION complete_own(p_ids uuid[], p_attempts int[], p_results text[], p_schedules text[], p_next timestamptz[],
                                        p_revisions int[], p_worker int, p_token uuid, p_began_ago_s real[] DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    PERFORM say_no_wait('on');
    RETURN settle_completed(p_ids, p_attempts, p_results, p_schedules, p_next, p_revisions, p_worker, p_token, p_began_ago_s);
END $$;

-- For whoever has ended jobs: those whose dedupe_until lies ahead leave a row that holds their key until then, so that
-- an insert meets it as it meets a live job. p_keys: (id, queue, dedupe_key, dedupe_until) of each.
CREATE OR REPLACE FUNCTION keep_keys(p_keys jsonb) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    INSERT INTO jobs (id, queue, dedupe_key, dedupe_until, status)
    SELECT k.f1, k.f2, k.f3, k.f4, 'completed'
    FROM jsonb_to_recordset(p_keys) AS k (f1 uuid, f2 text, f3 text, f4 timestamptz)
    WHERE k.f4 > clock()
$$;

-- For whoever has ended runs: hands on their serialize_keys (p_queues and p_keys, parallel), and tells the queues whose
-- limits have room again.
CREATE OR REPLACE FUNCTION freed(p_queues text[], p_keys text[], p_limited text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    IF p_keys IS NOT NULL THEN
        PERFORM promote(p_queues, p_keys);
    END IF;
    IF p_limited IS NOT NULL THEN
        PERFORM wake(p_limited);
    END IF;
END $$;

-- Failed: one failure is spent. With budget left the job waits for its retry (p_delays_s from now),
-- otherwise, or when p_permanent, it is dead. p_errors are history entries (JSON objects as text:
-- type, message, traceback, worker). A job whose cancellation was asked for is cancelled instead of waiting.
CREATE OR REPLACE FUNCTION settle_failed(p_ids uuid[], p_attempts int[], p_delays_s float8[], p_permanent boolean[],
                              p_messages text[], p_errors text[], p_schedules text[] DEFAULT NULL,
                              p_next timestamptz[] DEFAULT NULL, p_revisions int[] DEFAULT NULL,
                                 p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL)
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
    v_queues    text[];
    v_keys      text[];
    v_wake      text[];
    v_batched   ended_job[];
    v_dead      uuid[];
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
          AND (p_worker IS NULL OR j.worker_id = p_worker AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
        RETURNING j.id, j.status, j.schedule, j.cancel_requested_at, j.queue, j.batch_id,
                  CASE WHEN j.status = 'dead' OR j.yields OR j.cancel_requested_at IS NOT NULL
                       THEN j.serialize_key END AS freed_key  -- now or when it is cancelled below: see lock_queues()
    )
    SELECT array_agg(e.id), array_agg(e.status::text),
           array_agg(e.id) FILTER (WHERE e.status = 'failed' AND e.cancel_requested_at IS NOT NULL),
           array_agg(e.schedule) FILTER (WHERE e.schedule IS NOT NULL),
           array_agg(e.queue::text) FILTER (WHERE e.freed_key IS NOT NULL),
           array_agg(e.freed_key::text) FILTER (WHERE e.freed_key IS NOT NULL),
           array_agg(e.queue::text) FILTER (WHERE e.queue = ANY (ARRAY(
               SELECT q.name::text FROM queues q WHERE q.limited AND q.name = ANY (ARRAY(SELECT DISTINCT x.queue::text FROM ended x))))),
           array_agg(ROW(e.batch_id, 'dead', false, NULL, NULL, NULL, NULL, NULL)::ended_job)
               FILTER (WHERE e.batch_id IS NOT NULL AND e.status = 'dead'),
           array_agg(e.id) FILTER (WHERE e.status = 'dead')
    INTO v_ids, v_statuses, v_cancelled, v_schedules, v_queues, v_keys, v_wake, v_batched, v_dead
    FROM ended e;
    IF is_awaited(v_dead) THEN
        PERFORM pass_on(v_dead, false);
    END IF;
    IF v_cancelled IS NOT NULL THEN
        PERFORM lock_trees_of(v_ids);  -- those of the dead, too: all at once, and before the queues
    END IF;
    IF v_batched IS NOT NULL THEN
        PERFORM batch_ended(v_batched);
    END IF;
    IF v_keys IS NOT NULL OR v_wake IS NOT NULL THEN
        PERFORM freed(v_queues, v_keys, v_wake);
    END IF;
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
CREATE OR REPLACE FUNCTION settle_released(p_ids uuid[], p_attempts int[], p_delays_s float8[], p_messages text[], p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL)
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
    v_queues    text[];
    v_keys      text[];
    v_wake      text[];
BEGIN
    WITH ended AS (
        UPDATE jobs j
        SET status = 'pending', worker_id = NULL,
            run_at = coalesce(clock() + make_interval(secs => s.delay_s), least(j.run_at, clock())),  -- as in rescue_jobs()
            error = coalesce(s.message, j.error)
        FROM (SELECT * FROM unnest(p_ids, p_attempts, p_delays_s, p_messages)
                  AS u (id, attempt, delay_s, message) ORDER BY u.id) s
        WHERE j.id = ANY (p_ids) AND j.id = s.id AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
          AND (p_worker IS NULL OR j.worker_id = p_worker AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
        RETURNING j.id, j.queue, j.run_at, s.delay_s, j.cancel_requested_at, j.serialize_key
    )
    SELECT array_agg(e.id), array_agg(e.id) FILTER (WHERE e.cancel_requested_at IS NOT NULL),
           array_agg(DISTINCT e.queue::text) FILTER (WHERE e.delay_s IS NULL),
           min(e.run_at) FILTER (WHERE e.delay_s IS NULL),
           array_agg(e.queue::text) FILTER (WHERE e.serialize_key IS NOT NULL),
           array_agg(e.serialize_key::text) FILTER (WHERE e.serialize_key IS NOT NULL),
           array_agg(e.queue::text) FILTER (WHERE e.queue = ANY (ARRAY(
               SELECT q.name::text FROM queues q WHERE q.limited AND q.name = ANY (ARRAY(SELECT DISTINCT x.queue::text FROM ended x)))))
    INTO v_won, v_cancelled, v_due, v_run_at, v_queues, v_keys, v_wake
    FROM ended e;
    IF v_cancelled IS NOT NULL THEN
        PERFORM lock_trees_of(v_cancelled);
    END IF;
    IF v_keys IS NOT NULL OR v_wake IS NOT NULL THEN
        PERFORM freed(v_queues, v_keys, v_wake);
    END IF;
    IF v_cancelled IS NOT NULL THEN
        PERFORM cancel(v_cancelled);
    END IF;
    PERFORM wake(v_due, v_run_at, true);
    RETURN coalesce(v_won, '{}');
END $$;

-- Ended without success and for good: p_statuses is 'cancelled' or 'expired' per job.
CREATE OR REPLACE FUNCTION settle_ended(p_ids uuid[], p_attempts int[], p_statuses text[], p_messages text[], p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_nestloop = off SET enable_mergejoin = off SET jit = off
SET work_mem = '64MB' SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_ids    uuid[];
    v_to     text[];
    v_why    text[];
    v_queues text[];
    v_batches uuid[];
BEGIN
    SELECT array_agg(x.id), array_agg(x.status), array_agg(x.message),
           array_agg(x.queue) FILTER (WHERE x.serialize_key IS NOT NULL),
           array_agg(x.batch_id) FILTER (WHERE x.batch_id IS NOT NULL)
    INTO v_ids, v_to, v_why, v_queues, v_batches
    FROM (SELECT j.id, s.status, s.message, j.queue::text, j.serialize_key, j.batch_id
          FROM jobs j JOIN unnest(p_ids, p_attempts, p_statuses, p_messages) AS s (id, attempt, status, message)
            ON j.id = s.id
          WHERE j.id = ANY (p_ids) AND j.attempts = s.attempt AND j.worker_id IS NOT NULL
            AND (p_worker IS NULL OR j.worker_id = p_worker AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token))
          ORDER BY j.id FOR UPDATE OF j) x;
    IF v_batches IS NOT NULL THEN
        PERFORM lock_trees(v_batches);  -- there may be several burials
    END IF;
    IF v_queues IS NOT NULL THEN
        PERFORM lock_queues(v_queues);
    END IF;
    PERFORM bury(array_agg(e.id), e.status, e.message)
    FROM unnest(v_ids, v_to, v_why) AS e (id, status, message) GROUP BY e.status, e.message;
    RETURN coalesce(v_ids, '{}');
END $$;

-- Moves rows, which the caller has locked, to finished_jobs under a final status; p_message, where not NULL,
-- becomes their error. A queue that keeps nothing loses them. Answers how many there were. Tells who waits for them, and
-- their batches (p_mop: see batch_ended), frees their keys, except those that are kept longer (see keep_keys). The chains
-- of schedules among them are left to daemons, which are told to look (see ensure_schedules).
CREATE OR REPLACE FUNCTION bury(p_ids uuid[], p_status text, p_message text, p_mop boolean DEFAULT true) RETURNS int
LANGUAGE plpgsql VOLATILE
SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_gone    uuid[];
    v_queues  text[];
    v_keys    text[];
    v_wake    text[];
    v_kept_keys jsonb;
    v_batched ended_job[];
    v_chain   boolean;
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN 0;  -- without even looking at finished_jobs, which someone may have locked
    END IF;
    WITH gone AS (
        DELETE FROM jobs j WHERE j.id = ANY (p_ids) RETURNING j.*
    ), settings AS MATERIALIZED (
        SELECT q.name::text, q.keep_s, q.limited FROM queues q WHERE q.name = ANY (ARRAY(SELECT DISTINCT g.queue::text FROM gone g))
    ), kept AS (
        INSERT INTO finished_jobs (id, finished_at, run_at, created_at, started_at, failed_at, occurrence, batch_id,
            status, priority, attempts, failures, max_attempts, worker_id, queue, kind, payload, meta,
            error, errors, dedupe_key, serialize_key, limit_key, schedule, keep_until, expires_at)
        SELECT g.id, clock(), g.run_at, g.created_at, g.started_at, g.failed_at, g.occurrence, g.batch_id,
            p_status::job_status, g.priority, g.attempts, g.failures, g.max_attempts, g.worker_id, g.queue, g.kind,
            g.payload, g.meta, coalesce(p_message, g.error), g.errors, g.dedupe_key, g.serialize_key, g.limit_key, g.schedule,
            clock() + make_interval(secs => q.keep_s), g.expires_at
        FROM gone g LEFT JOIN settings q ON q.name = g.queue
        WHERE q.keep_s IS DISTINCT FROM 0
    )
    SELECT array_agg(g.id),
           array_agg(g.queue::text) FILTER (WHERE g.serialize_key IS NOT NULL AND g.waiting_on = 0),
           array_agg(g.serialize_key::text) FILTER (WHERE g.serialize_key IS NOT NULL AND g.waiting_on = 0),
           array_agg(g.queue::text) FILTER (WHERE g.status = 'running' AND g.queue = ANY (ARRAY(SELECT q.name FROM settings q WHERE q.limited))),
           jsonb_agg(to_jsonb(ROW(g.id, g.queue, g.dedupe_key, g.dedupe_until)))
               FILTER (WHERE g.dedupe_until IS NOT NULL AND g.status <> 'dead'),  -- the dead hold no key
           array_agg(ROW(g.batch_id, p_status, g.status = 'dead', NULL, NULL, NULL, NULL, NULL)::ended_job)
               FILTER (WHERE g.batch_id IS NOT NULL AND (g.status <> 'dead' OR p_status <> 'dead')),
           bool_or(g.schedule IS NOT NULL AND g.status <> 'dead')
    INTO v_gone, v_queues, v_keys, v_wake, v_kept_keys, v_batched, v_chain FROM gone g;
    IF v_chain THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
    END IF;
    IF is_awaited(v_gone) THEN
        PERFORM pass_on(v_gone, false);
    END IF;
    IF v_kept_keys IS NOT NULL THEN
        PERFORM keep_keys(v_kept_keys);
    END IF;
    IF v_batched IS NOT NULL THEN
        PERFORM batch_ended(v_batched, p_mop);
    END IF;
    IF v_keys IS NOT NULL OR v_wake IS NOT NULL THEN
        PERFORM freed(v_queues, v_keys, v_wake);
    END IF;
    RETURN coalesce(cardinality(v_gone), 0);
END $$;

-- Adds an entry to an error history and keeps the last 20.
CREATE OR REPLACE FUNCTION add_error(p_errors jsonb, p_entry jsonb) RETURNS jsonb LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN jsonb_array_length(p_errors) >= 20 THEN p_errors - 0 ELSE p_errors END
           || jsonb_build_array(p_entry)
$$;

-- ------------------------------------------------------------------------------------------------
-- 7 Schedules
-- ------------------------------------------------------------------------------------------------

-- What this was before knew neither grace nor retries.
DROP FUNCTION IF EXISTS put_schedule(text, text, text, text, int, text, text, text);

-- Enters or changes a schedule that stands in code; one that had left the code is enabled again. A row that someone has
-- put in by SQL under the same name is left alone, and so is that someone has disabled it. Locks the schedule's row.
CREATE OR REPLACE FUNCTION put_schedule(p_name text, p_queue text, p_kind text, p_cron text, p_every_s int, p_timezone text,
                             p_missed text, p_payload text, p_missed_grace_s real DEFAULT 60,
                             p_waits_for_retries boolean DEFAULT false) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    INSERT INTO schedules AS s (name, queue, kind, cron, every_s, timezone, missed, payload, missed_grace_s, waits_for_retries, source)
    VALUES (p_name, p_queue, p_kind, p_cron, p_every_s, p_timezone, p_missed, p_payload::jsonb, p_missed_grace_s, p_waits_for_retries,
            'code')
    ON CONFLICT (name) DO UPDATE
    SET queue = excluded.queue, kind = excluded.kind, cron = excluded.cron, every_s = excluded.every_s,
        timezone = excluded.timezone, missed = excluded.missed, payload = excluded.payload, missed_grace_s = excluded.missed_grace_s,
        waits_for_retries = excluded.waits_for_retries, enabled = s.enabled OR s.retired_at IS NOT NULL, retired_at = NULL
    WHERE s.source = 'code'
      AND (s.retired_at IS NOT NULL
           OR (s.queue, s.kind, s.cron, s.every_s, s.timezone, s.missed, s.payload, s.missed_grace_s, s.waits_for_retries)
              IS DISTINCT FROM (excluded.queue, excluded.kind, excluded.cron, excluded.every_s, excluded.timezone,
                                excluded.missed, excluded.payload, excluded.missed_grace_s, excluded.waits_for_retries))
$$;

-- All enabled schedules, and whether each lacks an occurrence in its chain. The caller computes the next instants
-- and hands them to add_occurrences. Locks nothing.
CREATE OR REPLACE FUNCTION ensure_schedules()
RETURNS TABLE (name text, cron text, every_s int, timezone text, missed text, revision int,
               last_occurrence timestamptz, at timestamptz, broken boolean)
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT s.name, s.cron, s.every_s, s.timezone, s.missed, s.revision, s.last_occurrence, clock(),
           NOT EXISTS (SELECT FROM jobs j WHERE j.schedule = s.name AND j.status <> 'dead' AND (j.failures = 0 OR s.waits_for_retries))
    FROM schedules s WHERE s.enabled ORDER BY s.name
$$;

-- Notes which schedules stand in the code of a worker, and answers with what is amiss: `retired`, those of its own that
-- were disabled because no worker had them (put_schedule() enables them), else those enabled ones that came from code and
-- stand in the code of no worker now. Nothing is amiss while some worker has not said. Locks the worker's row if it changes.
CREATE OR REPLACE FUNCTION declare_schedules(p_worker int, p_names text[]) RETURNS TABLE (name text, retired boolean)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    UPDATE workers w SET schedules = p_names WHERE w.id = p_worker AND w.schedules IS DISTINCT FROM p_names;
    RETURN QUERY
    SELECT s.name::text, s.retired_at IS NOT NULL FROM schedules s
    WHERE s.source = 'code'
      AND CASE WHEN s.retired_at IS NOT NULL THEN s.name = ANY (p_names)
               ELSE s.enabled AND NOT EXISTS (SELECT FROM workers w WHERE w.lost_at IS NULL AND (w.schedules IS NULL OR s.name = ANY (w.schedules)))
               END
    ORDER BY s.name;
END $$;

-- Disables those of these schedules that stand in the code of no worker (see declare_schedules()); their names. The
-- trigger of the table notes it in the audit. Locks their rows in order of name.
CREATE OR REPLACE FUNCTION retire_schedules(p_names text[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_names text[] := ARRAY(
        SELECT s.name FROM schedules s
        WHERE s.name = ANY (p_names) AND s.source = 'code' AND s.enabled
          AND NOT EXISTS (SELECT FROM workers w WHERE w.lost_at IS NULL AND (w.schedules IS NULL OR s.name = ANY (w.schedules)))
        ORDER BY s.name FOR UPDATE);
BEGIN
    UPDATE schedules s SET enabled = false, retired_at = clock() WHERE s.name = ANY (v_names) AND s.enabled;
    RETURN v_names;
END $$;

-- Whether an occurrence that has just been claimed for the first time was missed, and is to be skipped: since when workers
-- serve its queue without a gap, if it was due longer before that than its schedule's grace; else NULL. What waited for a
-- worker that was there (a backlog, a pause, a limit), and what was claimed before, was not missed. Locks nothing.
CREATE OR REPLACE FUNCTION missed_since(p_job uuid, p_attempt int) RETURNS timestamptz
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT f.since
    FROM jobs j JOIN schedules s ON s.name = j.schedule
    CROSS JOIN LATERAL (
        SELECT min(w.steady_since) AS since FROM workers w
        WHERE w.lost_at IS NULL AND w.lease_until > clock()
          AND (w.id = j.worker_id OR EXISTS (SELECT FROM pools p WHERE p.queue = j.queue AND p.worker_id = w.id))) f
    WHERE j.id = p_job AND j.attempts = p_attempt AND j.attempts = 1 AND j.status = 'running' AND s.missed = 'skip'
      AND greatest(j.run_at, j.occurrence) + make_interval(secs => s.missed_grace_s) < f.since
$$;

-- Inserts one occurrence per schedule, unless its chain has one (see jobs_schedule_chain), it has moved past that instant,
-- or has changed since the caller computed it (revision). Answers with the names that got one.
-- Locks the schedules' rows in order of name with SKIP LOCKED, then looks: so two callers never both insert. One that is
-- locked is left to the daemons' next look at the schedules (see follow()).
CREATE OR REPLACE FUNCTION add_occurrences(p_names text[], p_at timestamptz[], p_revisions int[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_free  text[] := ARRAY(SELECT s.name FROM schedules s WHERE s.name = ANY (p_names) ORDER BY s.name FOR UPDATE SKIP LOCKED);
    v_added text[];
BEGIN
    WITH moved AS (
        UPDATE schedules s SET last_occurrence = n.at, error = NULL
        FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision)
        WHERE s.name = n.name AND s.name = ANY (v_free) AND s.enabled AND s.revision = n.revision
          AND (s.last_occurrence IS NULL OR s.last_occurrence < n.at)
          AND NOT EXISTS (SELECT FROM jobs j WHERE j.schedule = s.name AND j.status <> 'dead'
                          AND (j.failures = 0 OR s.waits_for_retries))
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

-- The same for daemons that find chains broken: an occurrence that is refused holds up no others.
CREATE OR REPLACE FUNCTION restore_occurrences(p_names text[], p_at timestamptz[], p_revisions int[]) RETURNS text[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    RETURN ARRAY(SELECT jsonb_array_elements_text(p.added) FROM in_parts('restore_occurrences', p_names, 'restore occurrences',
                     (SELECT jsonb_agg(to_jsonb(n)) FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision))) AS p (added));
END $$;

-- Of the schedules whose occurrence was just settled, adds those next ones that the caller computed. Where a schedule is
-- locked, daemons are told to look at them all, again and again until it is free. Locks as add_occurrences().
CREATE OR REPLACE FUNCTION follow(p_settled text[], p_names text[], p_at timestamptz[], p_revisions int[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_names text[];
    v_at    timestamptz[];
    v_revisions int[];
BEGIN
    SELECT array_agg(n.name), array_agg(n.at), array_agg(n.revision) INTO v_names, v_at, v_revisions
    FROM unnest(p_names, p_at, p_revisions) AS n (name, at, revision)
    WHERE n.name = ANY (p_settled) AND n.at IS NOT NULL;
    IF v_names IS NULL THEN
        RETURN;
    END IF;
    PERFORM add_occurrences(v_names, v_at, v_revisions);
    IF (SELECT count(*) FROM schedules s WHERE s.name = ANY (v_names))
       > cardinality(ARRAY(SELECT s.name FROM schedules s WHERE s.name = ANY (v_names) FOR UPDATE SKIP LOCKED)) THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
    END IF;
END $$;

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
    NEW.in_force_since := clock();
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER schedule_changed BEFORE UPDATE OF
    queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s, enabled, missed_grace_s, waits_for_retries
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
    queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s, enabled, missed_grace_s, waits_for_retries
    ON schedules FOR EACH ROW EXECUTE FUNCTION schedules_notify();

-- Notes every change of a schedule's rule, and that it was deleted, whoever does it; which occurrence came last, and what is
-- wrong with the rule, is no change of it.
CREATE OR REPLACE FUNCTION schedules_audit() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_before jsonb := to_jsonb(OLD) - '{revision,last_occurrence,error,in_force_since}'::text[];
    v_after  jsonb := CASE TG_OP WHEN 'DELETE' THEN '{}' ELSE to_jsonb(NEW) - '{revision,last_occurrence,error,in_force_since}'::text[] END;
BEGIN
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(), 'schedule', OLD.queue, jsonb_build_object('schedule', OLD.name) || differing(v_before, v_after),
           jsonb_build_object('schedule', CASE TG_OP WHEN 'DELETE' THEN NULL ELSE NEW.name END) || differing(v_after, v_before)
    WHERE v_before <> v_after;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER schedules_audit AFTER DELETE OR UPDATE OF
    name, queue, kind, payload, cron, every_s, timezone, missed, priority, max_attempts, timeout_s, enabled, missed_grace_s,
    waits_for_retries ON schedules FOR EACH ROW EXECUTE FUNCTION schedules_audit();

-- Enables or disables a schedule; false if it was so before. Raises 22023 where there is none. Locks the row.
CREATE OR REPLACE FUNCTION enable_schedule(p_name text, p_enabled boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_schedule schedules;
BEGIN
    SELECT s.* INTO v_schedule FROM schedules s WHERE s.name = p_name FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'schedule "%" does not exist', p_name USING ERRCODE = '22023', HINT = 'pgworkd schedules lists them all.';
    END IF;
    UPDATE schedules s SET enabled = p_enabled WHERE s.name = p_name AND s.enabled <> p_enabled;
    UPDATE schedules s SET retired_at = NULL WHERE s.name = p_name AND s.retired_at IS NOT NULL;  -- now someone has said so
    RETURN v_schedule.enabled <> p_enabled;
END $$;

-- Removes a schedule; an occurrence that is due, or runs, stays. Raises 22023 where there is none, or where it stands in the
-- code of a living worker, which would enter it again. Locks the row.
CREATE OR REPLACE FUNCTION remove_schedule(p_name text) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_worker text := (SELECT w.name || ' (id ' || w.id || ')' FROM workers w
                      WHERE w.lost_at IS NULL AND w.lease_until > clock() AND p_name = ANY (w.schedules)
                      ORDER BY w.id LIMIT 1);
BEGIN
    IF v_worker IS NOT NULL AND EXISTS (SELECT FROM schedules s WHERE s.name = p_name AND s.source = 'code') THEN
        RAISE EXCEPTION 'schedule "%" stands in the code of worker %', p_name, v_worker USING ERRCODE = '22023',
            HINT = 'It would be entered again: disable it, or take it out of the code first.';
    END IF;
    DELETE FROM schedules s WHERE s.name = p_name;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'schedule "%" does not exist', p_name USING ERRCODE = '22023', HINT = 'pgworkd schedules lists them all.';
    END IF;
END $$;

-- Inserts a job as the schedule would, due now, apart from its occurrences; its id. Also of a disabled schedule. Raises 22023
-- where there is none. Locks nothing.
CREATE OR REPLACE FUNCTION run_schedule(p_name text, p_by text DEFAULT NULL) RETURNS uuid
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_job jobs;
BEGIN
    INSERT INTO jobs AS j (queue, kind, payload, priority, max_attempts, timeout_s)
    SELECT s.queue, s.kind, s.payload, s.priority, s.max_attempts, s.timeout_s FROM schedules s WHERE s.name = p_name
    RETURNING j.* INTO v_job;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'schedule "%" does not exist', p_name USING ERRCODE = '22023', HINT = 'pgworkd schedules lists them all.';
    END IF;
    INSERT INTO audit (who, what, queue, job_id, before, after)
    VALUES (who(p_by), 'schedule', v_job.queue, v_job.id, jsonb_build_object('schedule', p_name, 'run_now', NULL),
            jsonb_build_object('schedule', p_name, 'run_now', v_job.run_at));
    RETURN v_job.id;
END $$;

-- ------------------------------------------------------------------------------------------------
-- 8 Mend: idempotent, each under its own advisory try-lock, so any daemon may call at any time.
-- One row that refuses to be changed holds up no others: see in_parts().
-- ------------------------------------------------------------------------------------------------

-- One step of maintenance for these rows: p_keys are their ids, or what else names them. Its answer is for who asked for it. Locks
-- what the step says.
CREATE OR REPLACE FUNCTION do_part(p_step text, p_keys text[], p_with jsonb) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_rows int := 0;
BEGIN
    CASE p_step
    WHEN 'rescue jobs' THEN
        RETURN rescue_jobs(p_keys::uuid[]);
    WHEN 'expire jobs' THEN
        RETURN expire_these(p_keys::uuid[]);
    WHEN 'free keys' THEN
        DELETE FROM jobs j WHERE j.id = ANY (p_keys::uuid[]);
        GET DIAGNOSTICS v_rows = ROW_COUNT;
    WHEN 'restore occurrences' THEN
        RETURN (SELECT to_jsonb(add_occurrences(array_agg(n.name), array_agg(n.at), array_agg(n.revision)))
                FROM jsonb_to_recordset(p_with) AS n (name text, at timestamptz, revision int) WHERE n.name = ANY (p_keys));
    WHEN 'promote lines' THEN
        PERFORM promote(l.queues, l.keys)
        FROM (SELECT array_agg(k::jsonb ->> 0) AS queues, array_agg(k::jsonb ->> 1) AS keys FROM unnest(p_keys) k) l;
    WHEN 'cancel jobs of batches' THEN
        v_rows := bury(p_keys::uuid[], 'cancelled', 'its batch was cancelled', false);
    WHEN 'cancel dependents' THEN
        v_rows := bury(p_keys::uuid[], 'cancelled', 'a job that it depends on did not complete');
    WHEN 'wait less' THEN
        PERFORM wait_less(p_keys::uuid[], e.well, true), wait_less(p_keys::uuid[], e.badly, false)
        FROM jsonb_to_record(p_with) AS e (well uuid[], badly uuid[]);
        v_rows := cardinality(p_keys);
    WHEN 'bury the dead' THEN
        v_rows := bury(p_keys::uuid[], 'dead', NULL);
    WHEN 'forget batches' THEN
        DELETE FROM batches b WHERE b.root_id = ANY (p_keys::uuid[]);
        GET DIAGNOSTICS v_rows = ROW_COUNT;
    WHEN 'forget audit' THEN
        DELETE FROM audit a WHERE a.id = ANY (p_keys::bigint[]);
        GET DIAGNOSTICS v_rows = ROW_COUNT;
    WHEN 'forget history of no day' THEN
        DELETE FROM finished_jobs_other o WHERE o.id = ANY (p_keys::uuid[]);
        GET DIAGNOSTICS v_rows = ROW_COUNT;
    WHEN 'forget kept history' THEN
        DELETE FROM finished_jobs f
        USING (SELECT split_part(k, ' ', 1)::uuid AS id, split_part(k, ' ', 2)::timestamptz AS at FROM unnest(p_keys) k) o
        WHERE f.id = o.id AND f.finished_at = o.at;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
    WHEN 'mend batches' THEN
        RETURN to_jsonb(mend_these(p_keys::uuid[]));
    WHEN 'fold batches' THEN
        PERFORM fold(p_keys::uuid[]);
    WHEN 'apply frees' THEN
        PERFORM apply_frees(p_keys::bigint[]);
    ELSE
        RAISE EXCEPTION 'maintenance has no step %', p_step USING ERRCODE = 'XX000';  -- which is no row's fault
    END CASE;
    RETURN to_jsonb(v_rows);
END $$;

-- Does p_step (see do_part()) for these keys: for all of them, and where that raises for half as many, and so on, until what
-- is refused is found. Answers with a row for each part that was done. What is refused is noted in refused_rows, and passed by until its time has come. What is no row's fault is
-- raised: locks, deadlocks, time-outs, resources that are short, a server that only reads. Deferred constraints are checked
-- in each part. Locks what the step locks, of refused parts nothing, and rows of refused_rows in order of the keys.
CREATE OR REPLACE FUNCTION in_parts(p_what text, p_keys text[], p_step text, p_with jsonb DEFAULT NULL) RETURNS SETOF jsonb
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_keys   text[] := ARRAY(SELECT u.key FROM unnest(p_keys) WITH ORDINALITY AS u (key, place)
                             WHERE NOT EXISTS (SELECT FROM refused_rows r
                                               WHERE r.what = p_what AND r.key = u.key AND r.until > clock())
                             ORDER BY u.place);
    v_from   int := 1;
    v_size   int := cardinality(v_keys);
    v_part   text[];
    v_answer jsonb;
    v_done   boolean;
BEGIN
    WHILE v_from <= cardinality(v_keys) LOOP
        v_part := v_keys[v_from : v_from + v_size - 1];
        BEGIN
            v_answer := do_part(p_step, v_part, p_with);
            SET CONSTRAINTS ALL IMMEDIATE;
            DELETE FROM refused_rows r WHERE r.what = p_what AND r.key = ANY (v_part);
            v_done := true;
        EXCEPTION WHEN OTHERS THEN
            IF left(SQLSTATE, 2) IN ('40', '53', '57', '58') OR SQLSTATE IN ('55P03', '25006', 'XX000') THEN
                RAISE;
            END IF;
            v_done := false;
            IF cardinality(v_part) = 1 THEN
                INSERT INTO refused_rows AS r (what, key, sqlstate, error, until)
                VALUES (p_what, v_part[1], SQLSTATE, left(SQLERRM, 1000), clock() + interval '10 s')
                ON CONFLICT (what, key) DO UPDATE SET
                    sqlstate = excluded.sqlstate, error = excluded.error, times = r.times + 1,
                    until = clock() + least(600, 10 * 2 ^ least(r.times, 10)) * interval '1 s';
            END IF;
        END;
        IF v_done THEN
            RETURN NEXT v_answer;
        END IF;
        IF v_done OR cardinality(v_part) = 1 THEN
            v_from := v_from + cardinality(v_part);
            v_size := 2 * v_size;
        ELSE
            v_size := cardinality(v_part) / 2;
        END IF;
    END LOOP;
END $$;

-- What was refused and has not been reported yet, for the log of the daemon that asks: how many rows of each function and
-- SQLSTATE, and one of them. Locks them with SKIP LOCKED.
CREATE OR REPLACE FUNCTION report_refused() RETURNS TABLE (what text, sqlstate text, count int, key text, error text)
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    WITH news AS (
        UPDATE refused_rows r SET reported = true
        WHERE r.ctid = ANY (ARRAY(SELECT n.ctid FROM refused_rows n WHERE NOT n.reported LIMIT 10000 FOR UPDATE SKIP LOCKED))
        RETURNING r.*
    )
    SELECT n.what, n.sqlstate, count(*)::int, min(n.key), (array_agg(n.error ORDER BY n.key))[1]
    FROM news n GROUP BY n.what, n.sqlstate ORDER BY n.what, n.sqlstate
$$;

-- One part of rescue(): takes back these jobs of lost workers, and answers with them. The caller has locked them and says
-- no_wait(). Locks what batch_ended(), pass_on(), promote() and cancel() do, for none of which it waits.
CREATE OR REPLACE FUNCTION rescue_jobs(p_ids uuid[]) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_taken jsonb;
BEGIN
    WITH before AS MATERIALIZED (
        SELECT j.id, j.worker_id AS lost_worker_id, w.name AS lost_worker,
               'lost: worker ' || w.name || ' (id ' || w.id || ', pid ' || w.pid
               || CASE WHEN w.lease_until >= w.lost_at THEN ') has ended' ELSE ') did not renew its lease' END AS message, coalesce(q.max_losses, 3) AS max_losses
        FROM jobs j JOIN workers w ON w.id = j.worker_id LEFT JOIN queues q ON q.name = j.queue WHERE j.id = ANY (p_ids)
    ), taken AS (
        UPDATE jobs j
        SET status = CASE WHEN j.losses >= b.max_losses - 1 OR j.max_attempts = 1
                          THEN 'dead' ELSE 'failed' END::job_status,
            losses = least(j.losses, 2147483646) + 1, failed_at = clock(), worker_id = NULL,
            run_at = least(j.run_at, clock()),  -- it was due: the clock may have been set back since
            error = b.message,
            errors = add_error(j.errors, jsonb_build_object('attempt', j.attempts, 'at', clock(), 'type', 'lost',
                                                            'message', b.message, 'worker', b.lost_worker))
        FROM before b WHERE b.id = j.id
        RETURNING j.id, j.queue::text, coalesce(j.kind, j.queue)::text, j.attempts,
                  CASE WHEN j.status = 'failed' AND j.cancel_requested_at IS NOT NULL THEN 'cancelled'
                       ELSE j.status::text END,
                  b.lost_worker_id, b.lost_worker, b.message
    )
    SELECT jsonb_agg(to_jsonb(t)) INTO v_taken FROM taken AS t (id, queue, kind, attempt, status, worker_id, worker, error);
    IF EXISTS (SELECT FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead' AND j.schedule IS NOT NULL) THEN
        PERFORM pg_notify('pgworkd', '{"schedules": true}');
    END IF;
    IF EXISTS (SELECT FROM jobs j WHERE j.id = ANY (p_ids) AND j.batch_id IS NOT NULL
               AND (j.status = 'dead' OR j.cancel_requested_at IS NOT NULL)) THEN
        PERFORM lock_trees_of(p_ids);
        PERFORM batch_ended(array_agg(ROW(j.batch_id, 'dead', false, NULL, NULL, NULL, NULL, NULL)::ended_job))
        FROM jobs j WHERE j.id = ANY (p_ids) AND j.batch_id IS NOT NULL AND j.status = 'dead' HAVING count(*) > 0;
    END IF;
    PERFORM pass_on(d.ids, false)
    FROM (SELECT array_agg(j.id) AS ids FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead') d WHERE is_awaited(d.ids);
    PERFORM promote(array_agg(j.queue::text), array_agg(j.serialize_key::text))
    FROM jobs j WHERE j.id = ANY (p_ids) AND j.serialize_key IS NOT NULL
      AND (j.status = 'dead' OR j.yields OR j.cancel_requested_at IS NOT NULL)  -- those are cancelled below
    HAVING count(*) > 0;
    PERFORM wake(array_agg(j.queue::text), min(j.run_at), true)  -- claims are past their places by now
    FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'failed';
    PERFORM cancel(ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.cancel_requested_at IS NOT NULL
                         AND j.status = 'failed'));
    RETURN v_taken;
END $$;

-- Takes back the jobs of lost workers, at most p_limit: a loss on each, `failed` and due at once, or `dead`
-- at the third loss (max_losses of its queue), or at the first if it may run only once. Answers with what it took.
-- After an outage or a clock jump all healthy workers look lost, so each is presumed dead only when it has had the time
-- of its own lease to renew: the caller has renewed its lease without a gap for as long (and for a whole lease of its own),
-- and the server has been up for as long. An outage too short for a caller with a long lease to notice may have cost a
-- short lease: such a one gets the time that the outage may have taken on top. Who is known to be lost (see worker_ended())
-- needs no such caller.
-- Locks: the rescue lock, lost workers' rows in order of id, their jobs with SKIP LOCKED (a job that is
-- being settled right now is left to its settle; the worker's row stays until no job is left).
CREATE OR REPLACE FUNCTION rescue(p_worker int, p_limit int DEFAULT 1000)
RETURNS TABLE (id uuid, queue text, kind text, attempt int, status text, worker_id int, worker text, error text)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz := clock();
    -- A start that lies ahead was before the clock was set back, and since that the caller has not been steady for long.
    v_up_since timestamptz := CASE WHEN pg_postmaster_start_time() > v_now THEN '-infinity' ELSE pg_postmaster_start_time() END;
    v_lease_s  real;                             -- the caller's
    v_steady_s float8;                           -- for how long there has been no outage, as far as it knows
    v_judges   boolean;                          -- it may say who is lost
    v_lost  int[];
    v_ids   uuid[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 1) THEN
        RETURN;
    END IF;
    PERFORM say_no_wait('on');
    SELECT w.lease_s, extract(epoch FROM v_now - greatest(w.steady_since, v_up_since))
    INTO v_lease_s, v_steady_s FROM workers w
    WHERE w.id = p_worker AND w.lost_at IS NULL AND w.lease_until > v_now
      AND w.seen_at <= v_now AND w.seen_at > v_now - make_interval(secs => w.lease_s / 2)
      AND w.steady_since <= v_now - make_interval(secs => w.lease_s)
      AND v_up_since <= v_now - make_interval(secs => w.lease_s);
    v_judges := FOUND;
    IF NOT v_judges AND NOT EXISTS (SELECT FROM workers w WHERE w.lost_at IS NOT NULL AND w.id <> p_worker) THEN
        RETURN;
    END IF;

    -- A lease from before the clock was set back would last too long.
    UPDATE workers w SET lease_until = v_now + make_interval(secs => w.lease_s)
    WHERE v_judges AND w.lease_until > v_now + make_interval(secs => 2 * w.lease_s);

    -- Running jobs whose worker has no row (someone deleted it): the row is restored with one lease, as long as
    -- the longest of the others, in which a living worker finds out that it has lost them. The row has no token, so nobody renews it.
    INSERT INTO workers (id, name, pid, version, state, lease_s, lease_until)
    OVERRIDING SYSTEM VALUE
    SELECT r.worker_id, 'unknown', 0, '', 'vanished', l.lease_s, v_now + make_interval(secs => l.lease_s)
    FROM (SELECT greatest(max(w.lease_s), 30) AS lease_s FROM workers w) l, (WITH RECURSIVE seen AS (
              SELECT (SELECT min(j.worker_id) FROM jobs j WHERE j.status = 'running') AS worker_id
              UNION ALL
              SELECT (SELECT min(j.worker_id) FROM jobs j WHERE j.status = 'running' AND j.worker_id > s.worker_id)
              FROM seen s WHERE s.worker_id IS NOT NULL)
          SELECT s.worker_id FROM seen s WHERE s.worker_id IS NOT NULL) r
    WHERE v_judges AND NOT EXISTS (SELECT FROM workers w WHERE w.id = r.worker_id)
    ON CONFLICT DO NOTHING;

    SELECT array_agg(l.id) INTO v_lost
    FROM (SELECT w.id FROM workers w
          WHERE w.lost_at IS NOT NULL
             OR v_judges AND w.lease_s <= v_steady_s
                AND w.lease_until < v_now - CASE WHEN w.lease_s < v_lease_s THEN make_interval(secs => v_lease_s / 2 + w.lease_s / 3)
                                                 ELSE interval '0' END
          ORDER BY w.id FOR UPDATE SKIP LOCKED) l;
    IF v_lost IS NULL THEN
        RETURN;
    END IF;
    UPDATE workers w SET lost_at = v_now WHERE w.id = ANY (v_lost) AND w.lost_at IS NULL;
    DELETE FROM pools p WHERE p.worker_id = ANY (v_lost);

    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.worker_id = ANY (v_lost) AND j.status = 'running'
                     AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'rescue' AND r.key = j.id::text AND r.until > v_now)
                   LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    RETURN QUERY
    SELECT t.id, t.queue, t.kind, t.attempt, t.status, t.worker_id, t.worker, t.error
    FROM in_parts('rescue', v_ids::text[], 'rescue jobs') AS p (taken)
    CROSS JOIN LATERAL jsonb_to_recordset(p.taken) AS t (id uuid, queue text, kind text, attempt int, status text,
                                                         worker_id int, worker text, error text);
    DELETE FROM workers w WHERE w.id = ANY (v_lost)
       AND NOT EXISTS (SELECT FROM jobs j WHERE j.worker_id = w.id AND j.status = 'running');
END $$;

DROP FUNCTION IF EXISTS running_of(int, uuid, float8);
-- The running attempts of a worker that began more than p_age_s ago. The worker compares them with what
-- it holds: one that it does not hold is a stray, claimed by a call whose answer was lost, and is given
-- back by settle_released. None under another token than the worker's own: those are somebody else's.
-- While vacuum is held back this reads the index entries of all that the worker has ever run. With p_queues, only what
-- began at most p_age_max_s ago in those queues is looked for, and no entry of what began before is read. Locks nothing.
CREATE OR REPLACE FUNCTION running_of(p_worker int, p_token uuid, p_age_s float8, p_age_max_s float8 DEFAULT NULL,
                                      p_queues text[] DEFAULT NULL) RETURNS TABLE (id uuid, attempt int)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz := clock() - make_interval(secs => p_age_s);
    v_from  timestamptz := clock() - make_interval(secs => p_age_max_s);
    v_queue text;
BEGIN
    IF EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token) THEN
        RETURN;
    END IF;
    IF p_queues IS NULL THEN
        RETURN QUERY SELECT j.id, j.attempts FROM jobs j
                     WHERE j.worker_id = p_worker AND j.status = 'running' AND j.started_at < v_until;
        RETURN;
    END IF;
    FOREACH v_queue IN ARRAY p_queues LOOP
        RETURN QUERY SELECT j.id, j.attempts FROM jobs j
                     WHERE j.worker_id = p_worker AND j.status = 'running' AND j.queue = v_queue
                       AND j.started_at >= v_from AND j.started_at < v_until;
    END LOOP;
END $$;

-- Moves each sequence that is behind the ids in its table up to them: logical replication carries rows, but not sequences.
-- For `migrate`. Locks nothing.
CREATE OR REPLACE FUNCTION mend_sequences() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    PERFORM setval('pgworkd.workers_id_seq', m.id)
    FROM (SELECT max(w.id) AS id FROM workers w WHERE w.token IS NOT NULL) m, workers_id_seq q
    WHERE m.id > q.last_value;
    PERFORM setval('pgworkd.audit_id_seq', m.id) FROM (SELECT max(a.id) AS id FROM audit a) m, audit_id_seq q
    WHERE m.id > q.last_value;
    PERFORM setval('pgworkd.pending_effects_id_seq', m.id)
    FROM (SELECT max(e.id) AS id FROM pending_effects e) m, pending_effects_id_seq q
    WHERE m.id > q.last_value;
END $$;

-- One part of expire_jobs(): ends these jobs, which the caller has locked; how many of which queue and kind. Locks as bury().
CREATE OR REPLACE FUNCTION expire_these(p_ids uuid[]) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_counts jsonb := (SELECT jsonb_agg(to_jsonb(c))
                       FROM (SELECT j.queue, coalesce(j.kind, j.queue) AS kind, count(*) AS jobs,
                                    (array_agg(j.id ORDER BY j.expires_at, j.id))[1] AS example
                             FROM jobs j WHERE j.id = ANY (p_ids) GROUP BY 1, 2) c);
BEGIN
    PERFORM bury(p_ids, 'expired', 'expired before it could start');
    RETURN v_counts;
END $$;

-- Ends jobs that were never started and whose expires_at has passed, and frees dedupe_keys that were kept long enough,
-- at most p_limit of each. Answers with a row per queue and kind of jobs that ended, and one without a queue for the keys.
-- Locks them with SKIP LOCKED.
CREATE OR REPLACE FUNCTION expire_jobs(p_limit int DEFAULT 1000) RETURNS TABLE (queue text, kind text, jobs int, example uuid)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_ids uuid[];
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 2) THEN
        RETURN;
    END IF;
    PERFORM say_no_wait('on');
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.expires_at <= clock() AND j.attempts = 0 AND j.status IN ('blocked', 'pending', 'failed')
                     AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'expire_jobs' AND r.key = j.id::text AND r.until > clock())
                   ORDER BY j.expires_at LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    RETURN QUERY
    SELECT t.queue, t.kind, sum(t.jobs)::int, (array_agg(t.example ORDER BY p.part))[1]
    FROM in_parts('expire_jobs', v_ids::text[], 'expire jobs') WITH ORDINALITY AS p (ended, part)
    CROSS JOIN LATERAL jsonb_to_recordset(p.ended) AS t (queue text, kind text, jobs int, example uuid)
    GROUP BY 1, 2 ORDER BY 1, 2;
    RETURN QUERY SELECT NULL::text, NULL::text, f.freed, NULL::uuid FROM free_keys(p_limit) AS f (freed) WHERE f.freed > 0;
END $$;

-- The same as a number, of what was more; also for daemons of the version before.
CREATE OR REPLACE FUNCTION expire(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT coalesce(greatest(sum(e.jobs) FILTER (WHERE e.queue IS NOT NULL), sum(e.jobs) FILTER (WHERE e.queue IS NULL)), 0)::int
    FROM expire_jobs(p_limit) e
$$;

-- Removes, of what holds the dedupe_key of a job that is over, what need not do so any longer, at most p_limit. Answers
-- how many. An insert of such a key does not wait for this. Locks them with SKIP LOCKED.
CREATE OR REPLACE FUNCTION free_keys(p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_ids uuid[] := ARRAY(
        SELECT j.id FROM jobs j
        WHERE j.status = 'completed' AND j.dedupe_until <= clock()
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'free_keys' AND r.key = j.id::text AND r.until > clock())
        ORDER BY j.dedupe_until LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
BEGIN
    RETURN (SELECT coalesce(sum(p.freed::int), 0) FROM in_parts('free_keys', v_ids::text[], 'free keys') AS p (freed));
END $$;

-- Of the next p_most serialize_keys after (p_queue, p_key) for which jobs are blocked: those that nobody holds, although
-- the first in line is blocked. `last_queue` and `last_key`: where to go on; NULL: there are no more. Looks at one blocked
-- job per key. Locks nothing.
CREATE OR REPLACE FUNCTION stuck_lines(p_queue text, p_key text, p_most int,
                                       OUT queues text[], OUT keys text[], OUT last_queue text, OUT last_key text)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    WITH RECURSIVE lines AS (
        (SELECT j.queue::text AS queue, j.serialize_key::text AS key, 1 AS place FROM jobs j
         WHERE j.status = 'blocked' AND j.waiting_on = 0 AND (j.queue, j.serialize_key) > (p_queue, p_key)
         ORDER BY j.queue, j.serialize_key LIMIT 1)
        UNION ALL
        SELECT n.queue, n.key, l.place + 1 FROM lines l CROSS JOIN LATERAL (
            SELECT j.queue::text AS queue, j.serialize_key::text AS key FROM jobs j
            WHERE j.status = 'blocked' AND j.waiting_on = 0 AND (j.queue, j.serialize_key) > (l.queue, l.key)
            ORDER BY j.queue, j.serialize_key LIMIT 1) n
        WHERE l.place < p_most
    ), looked AS (
        SELECT l.queue, l.key, l.place,
               (SELECT j.status FROM jobs j WHERE j.queue = l.queue AND j.serialize_key = l.key
                AND j.status IN ('blocked', 'pending', 'failed') AND j.waiting_on = 0
                AND in_time(j, clock())
                ORDER BY j.run_at, j.id LIMIT 1) = 'blocked'
               AND NOT EXISTS (SELECT FROM jobs h WHERE h.queue = l.queue AND h.serialize_key = l.key
                               AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields)) AS stuck
        FROM lines l
    )
    SELECT array_agg(l.queue) FILTER (WHERE l.stuck), array_agg(l.key) FILTER (WHERE l.stuck),
           max(l.queue) FILTER (WHERE l.place = p_most), max(l.key) FILTER (WHERE l.place = p_most)
    INTO queues, keys, last_queue, last_key FROM looked l;
END $$;

-- promote() for maintenance: a line whose first job refuses holds up no others. p_what: the function that asks. Locks as that.
CREATE OR REPLACE FUNCTION promote_lines(p_what text, p_queues text[], p_keys text[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT in_parts(p_what, (SELECT array_agg(jsonb_build_array(u.queue, u.key)::text) FROM unnest(p_queues, p_keys) AS u (queue, key)),
                    'promote lines')
$$;

-- One step of unblock() for the lines behind (p_queue, p_key). Locks one blocked job per key with SKIP LOCKED, and waits for no
-- queue: see promote().
CREATE OR REPLACE FUNCTION unblock_lines(p_queue text, p_key text, p_most int,
                                         OUT promoted int, OUT last_queue text, OUT last_key text)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_queues text[];
    v_keys   text[];
BEGIN
    promoted := 0;
    IF NOT pg_try_advisory_xact_lock(1886873445, 5) THEN
        RETURN;
    END IF;
    PERFORM say_no_wait('on');
    SELECT l.queues, l.keys, l.last_queue, l.last_key INTO v_queues, v_keys, last_queue, last_key
    FROM stuck_lines(p_queue, p_key, p_most) l;
    PERFORM promote_lines('unblock', v_queues, v_keys);
    promoted := coalesce(cardinality(v_keys), 0);
END $$;

-- Forgets rates that no longer hold anything back, of the next p_most keys behind (p_queue, p_key). `last_queue` and `last_key`:
-- where to go on; NULL: there are no more. Locks them with SKIP LOCKED, and nothing else: claims move rates under the queue's
-- lock, so who has locked a rate must not wait for that.
CREATE OR REPLACE FUNCTION forget_rates(p_queue text, p_key text, p_most int,
                                        OUT forgotten int, OUT last_queue text, OUT last_key text)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_over tid[];
BEGIN
    SELECT array_agg(l.ctid) FILTER (WHERE l.limit_key <> '' AND l.spent_until < clock()),
           max(l.queue) FILTER (WHERE l.place = p_most), max(l.limit_key) FILTER (WHERE l.place = p_most)
    INTO v_over, last_queue, last_key
    FROM (SELECT r.ctid, r.queue::text, r.limit_key, r.spent_until, row_number() OVER (ORDER BY r.queue, r.limit_key) AS place
          FROM rates r WHERE (r.queue, r.limit_key) > (p_queue, p_key) ORDER BY r.queue, r.limit_key LIMIT p_most) l;
    DELETE FROM rates r WHERE r.ctid = ANY (ARRAY(
        SELECT s.ctid FROM rates s WHERE s.ctid = ANY (v_over) AND s.limit_key <> '' AND s.spent_until < clock()
        FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS forgotten = ROW_COUNT;
END $$;

-- Promotes what still waits for a key that nobody holds: those who free keys do so themselves, unless someone had the
-- next in line locked or changed rows by hand. Forgets who waited for results.
-- Answers how many keys it looked after. Looks at one blocked job
-- of each of the first thousand keys; unblock_lines() goes on from there, a step each. The same for batches that nobody came by to
-- finish; see mend_batches(). Locks as that does, then as promote().
CREATE OR REPLACE FUNCTION unblock() RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_queues text[];
    v_keys   text[];
    v_ended  uuid[];                             -- jobs of cancelled batches
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 5) THEN
        RETURN 0;
    END IF;
    PERFORM say_no_wait('on');
    v_ended := mend_batches();
    SELECT l.queues, l.keys INTO v_queues, v_keys FROM stuck_lines('', '', 1000) l;
    PERFORM in_parts('unblock', v_ended::text[], 'cancel jobs of batches');
    PERFORM promote_lines('unblock', v_queues, v_keys);
    DELETE FROM result_waiters r WHERE r.ctid = ANY (ARRAY(
        SELECT s.ctid FROM result_waiters s WHERE s.until < clock() ORDER BY s.until LIMIT 10000 FOR UPDATE SKIP LOCKED));
    RETURN coalesce(cardinality(v_keys), 0);
END $$;

-- Makes the day partitions of finished_jobs for today and p_days_ahead more. A new partition needs a
-- short exclusive lock: it is waited for 200 ms at most, so that no settle queues behind a long reader;
-- rows of a day without a partition go to finished_jobs_other, nothing is refused. Runs as the owner of the table.
CREATE OR REPLACE FUNCTION ensure_partitions(p_days_ahead int DEFAULT 7) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET lock_timeout = '200ms'
SET timezone = 'UTC' AS $$
DECLARE
    v_day   date;
    v_made  int := 0;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 3) THEN
        RETURN 0;
    END IF;
    FOR i IN 0..least(p_days_ahead, 366) LOOP
        v_day := clock()::date + i;
        CONTINUE WHEN to_regclass('pgworkd.finished_jobs_' || to_char(v_day, 'YYYYMMDD')) IS NOT NULL;
        BEGIN  -- identifiers and bounds come from the calendar, never from data
            EXECUTE format('CREATE TABLE pgworkd.%I PARTITION OF pgworkd.finished_jobs FOR VALUES FROM (%L) TO (%L)',
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

-- What these were before answered otherwise.
DO $$
BEGIN
    IF to_regprocedure('forget(int, int)') IS NOT NULL THEN
        DROP FUNCTION forget(int, int);
        DROP FUNCTION prune(int, int, int);
    END IF;
END $$;

-- Drops the oldest day partition of finished_jobs that is wholly older than p_keep_days; its name, or NULL: there is none,
-- or somebody reads it. One per call, each in a transaction of its own: the history's lock is held for that one commit.
-- Locks: the partition, for which it does not wait (a long reader, such as pg_dump, has locked it, too), then finished_jobs,
-- for 200 ms at most, so that no settle waits for longer. Runs as the owner of the tables.
CREATE OR REPLACE FUNCTION drop_partition(p_keep_days int) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET lock_timeout = '200ms'
SET timezone = 'UTC' AS $$
DECLARE
    v_name text;
BEGIN
    IF p_keep_days IS NULL OR p_keep_days < 1 THEN
        RAISE EXCEPTION 'keep_days must be 1 or more, not %', p_keep_days USING ERRCODE = '22023';
    END IF;
    IF NOT pg_try_advisory_xact_lock(1886873445, 3) THEN  -- not while ensure_partitions() makes some
        RETURN NULL;
    END IF;
    SELECT c.relname INTO v_name FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'pgworkd.finished_jobs'::regclass AND c.relnamespace = 'pgworkd'::regnamespace
      AND c.relname ~ '^finished_jobs_[0-9]{8}$' AND to_date(right(c.relname, 8), 'YYYYMMDD') < clock()::date - p_keep_days
    ORDER BY c.relname LIMIT 1;
    IF v_name IS NULL THEN
        RETURN NULL;
    END IF;
    BEGIN  -- the name comes from the catalog, and has the form of those that ensure_partitions() gives
        EXECUTE format('LOCK TABLE ONLY pgworkd.%I IN ACCESS EXCLUSIVE MODE NOWAIT', v_name);
        EXECUTE format('DROP TABLE pgworkd.%I', v_name);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        RETURN NULL;  -- another time; of the others, too: who reads the history has mostly locked all of it
    END;
    RETURN v_name;
END $$;

-- Deletes old rows of what only ever grows: of finished_jobs_other and of the audit (which is kept for 7 days at least) by
-- p_keep_days, of finished_jobs by keep_until, at most p_limit of each, by their indexes. Answers how many of the history.
-- For prune(); runs as the owner of the tables, so that nobody else need be able to change the history. Locks rows with
-- SKIP LOCKED.
CREATE OR REPLACE FUNCTION forget_rows(p_keep_days int, p_limit int) RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET lock_timeout = '200ms'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off AS $$
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
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'forget_rows' AND r.key = f.id::text AND r.until > clock())
        ORDER BY f.finished_at LIMIT p_limit FOR UPDATE OF f SKIP LOCKED);
    v_kept := ARRAY(  -- with the instant, as the key of the history has it: else each id is looked for in every partition
        SELECT f.id || ' ' || to_char(f.finished_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
        FROM finished_jobs f
        WHERE f.keep_until < clock()
          AND NOT EXISTS (SELECT FROM refused_rows r
                          WHERE r.what = 'forget_rows' AND r.until > clock()
                            AND r.key = f.id || ' ' || to_char(f.finished_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'))
        ORDER BY f.keep_until LIMIT p_limit FOR UPDATE OF f SKIP LOCKED);
    v_audit := ARRAY(
        SELECT o.id FROM audit o
        WHERE o.at < clock() - make_interval(days => greatest(p_keep_days, 7))
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'forget_rows' AND r.key = o.id::text AND r.until > clock())
        ORDER BY o.at LIMIT p_limit FOR UPDATE OF o SKIP LOCKED);
    PERFORM in_parts('forget_rows', v_audit::text[], 'forget audit');
    RETURN (SELECT coalesce(sum(p.gone::int), 0) FROM (
        SELECT in_parts('forget_rows', v_other::text[], 'forget history of no day')
        UNION ALL
        SELECT in_parts('forget_rows', v_kept, 'forget kept history')) AS p (gone));
END $$;

-- Forgets: see forget_rows(), and drop_partition() for the rest of the history; and moves jobs dead for p_keep_dead_days to
-- finished_jobs (at most p_limit, as of all else). What was said of the progress of attempts that are over goes, too.
-- Finished trees of batches are kept for p_keep_days, and as long as they keep a dedupe_key. Locks: rows with SKIP LOCKED.
CREATE OR REPLACE FUNCTION prune(p_keep_days int, p_keep_dead_days int, p_limit int DEFAULT 5000)
RETURNS TABLE (rows_deleted int, dead_moved int)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET lock_timeout = '200ms'
SET timezone = 'UTC' AS $$
DECLARE
    v_ids  uuid[];
    v_rows int;
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
          AND (b.dedupe_until IS NULL OR b.dedupe_until <= clock())
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'prune' AND r.key = b.id::text AND r.until > clock())
        LIMIT p_limit FOR UPDATE OF b SKIP LOCKED);
    SELECT rows_deleted + coalesce(sum(p.gone::int), 0) INTO rows_deleted FROM in_parts('prune', v_ids::text[], 'forget batches') AS p (gone);
    DELETE FROM progress p WHERE p.ctid = ANY (ARRAY(
        SELECT o.ctid FROM progress o
        WHERE (SELECT j.attempts FROM jobs j WHERE j.id = o.job_id AND j.status = 'running') IS DISTINCT FROM o.attempt
        LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    rows_deleted := rows_deleted + v_rows;
    v_ids := ARRAY(SELECT j.id FROM jobs j
                   WHERE j.status = 'dead' AND j.failed_at < clock() - make_interval(days => p_keep_dead_days)
                     AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'prune' AND r.key = j.id::text AND r.until > clock())
                   LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    SELECT coalesce(sum(p.moved::int), 0) INTO dead_moved
    FROM in_parts('prune', v_ids::text[], 'bury the dead') AS p (moved);
    DELETE FROM refused_rows r WHERE r.ctid = ANY (ARRAY(  -- what was tried no more since then is there no more
        SELECT o.ctid FROM refused_rows o WHERE o.until < clock() - interval '1 day' LIMIT p_limit FOR UPDATE SKIP LOCKED));
    RETURN NEXT;
END $$;

-- ------------------------------------------------------------------------------------------------
-- 9 Operators
-- ------------------------------------------------------------------------------------------------

-- Who acts, for the audit: p_by, else what the session says (SET pgworkd.by), else its user and program.
CREATE OR REPLACE FUNCTION who(p_by text DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT left(coalesce(nullif(p_by, ''), nullif(current_setting('pgworkd.by', true), ''),
                         session_user || coalesce(' (' || nullif(current_setting('application_name'), '') || ')', '')), 200)
$$;

-- Those members of p_object that differ from what p_from has under the same name.
CREATE OR REPLACE FUNCTION differing(p_object jsonb, p_from jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT coalesce(jsonb_object_agg(m.key, m.value), '{}')
    FROM jsonb_each(p_object) m WHERE m.value IS DISTINCT FROM p_from -> m.key
$$;

-- Finds the jobs that match all that is given, for acts on many in short transactions: up to p_limit ids (10,000 at
-- most) in their order, behind p_after. `last`: where to go on from; NULL: that was all. There may be a `last` without
-- any id: a call looks at 100,000 rows at most. p_what says what the jobs are for: 'cancel' finds those that wait or
-- run, 'retry' and 'discard' dead ones, unless p_status says which. p_key is any of a job's three keys. Without queue,
-- kind, key and batch nothing is found unless p_all. Where an index knows at most 10,000 candidates it is asked, else
-- the primary key is walked. Locks nothing.
CREATE OR REPLACE FUNCTION matching(p_what text, p_queue text DEFAULT NULL, p_kind text DEFAULT NULL, p_key text DEFAULT NULL,
                         p_batch uuid DEFAULT NULL, p_status text DEFAULT NULL, p_after uuid DEFAULT NULL,
                         p_limit int DEFAULT 1000, p_all boolean DEFAULT false, OUT ids uuid[], OUT last uuid)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    v_allowed  text[] := CASE p_what WHEN 'cancel' THEN '{blocked,pending,failed,running}'
                                     WHEN 'retry' THEN '{dead,failed}' WHEN 'discard' THEN '{dead}' END;
    v_statuses job_status[];
    v_from     uuid := coalesce(p_after, '00000000-0000-0000-0000-000000000000');
    v_limit    int := least(greatest(p_limit, 1), 10000);
    v_few      uuid[];                           -- all that may match, if an index knows and they are few
BEGIN
    IF v_allowed IS NULL THEN
        RAISE EXCEPTION 'p_what is %', quote_nullable(p_what) USING ERRCODE = '22023', HINT = 'Give cancel, retry or discard.';
    ELSIF p_status <> ALL (v_allowed) THEN
        RAISE EXCEPTION 'jobs that are % are not there to %', p_status, p_what USING ERRCODE = '22023',
            HINT = 'p_status is one of ' || array_to_string(v_allowed, ', ') || ', or NULL.'
                || CASE WHEN p_what = 'cancel' AND p_status = 'dead' THEN ' Dead jobs have ended: discard() them.' ELSE '' END;
    ELSIF NOT p_all AND num_nonnulls(p_queue, p_kind, p_key, p_batch) = 0 THEN
        RAISE EXCEPTION 'nothing says which jobs to %', p_what USING ERRCODE = '22023',
            HINT = 'Give a queue, kind, key or batch, or p_all => true for the jobs of all queues.';
    END IF;
    v_statuses := CASE WHEN p_status IS NOT NULL THEN ARRAY[p_status] WHEN p_what = 'cancel' THEN v_allowed
                       ELSE '{dead}' END;
    IF p_batch IS NOT NULL THEN
        v_few := ARRAY(SELECT j.id FROM jobs j WHERE j.batch_id = p_batch LIMIT 10001);
    ELSIF v_statuses = '{dead}' THEN
        v_few := ARRAY(SELECT j.id FROM jobs j WHERE j.status = 'dead' AND (p_queue IS NULL OR j.queue = p_queue) LIMIT 10001);
    ELSIF v_statuses = '{running}' THEN
        v_few := ARRAY(SELECT j.id FROM jobs j WHERE j.status = 'running' AND (p_queue IS NULL OR j.queue = p_queue) LIMIT 10001);
    ELSIF p_queue IS NOT NULL AND p_key IS NOT NULL THEN
        v_few := ARRAY(SELECT k.id FROM (
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.serialize_key = p_key AND j.waiting_on = 0
              AND j.status IN ('blocked', 'pending', 'failed')
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on > 0 AND p_key IN (j.serialize_key, j.limit_key)
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.dedupe_key = p_key AND j.status <> 'dead'
            UNION ALL
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_keyed(j) AND coalesce(j.limit_key::text, '') = p_key
            UNION ALL
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_suspect(j) AND j.limit_key = p_key
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on = 0 AND j.status = 'blocked' AND j.limit_key = p_key
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.status = 'running' AND (j.serialize_key = p_key OR j.limit_key = p_key)
        ) k LIMIT 10001);
    ELSIF p_queue IS NOT NULL THEN
        v_few := ARRAY(SELECT k.id FROM (
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_plain(j)
            UNION ALL
            SELECT j.id FROM jobs j
            WHERE j.queue = p_queue AND waits_keyed(j)
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND waits_suspect(j)
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on = 0 AND j.status = 'blocked'
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.waiting_on > 0
            UNION ALL
            SELECT j.id FROM jobs j WHERE j.queue = p_queue AND j.status = 'running'
        ) k LIMIT 10001);
    END IF;

    IF cardinality(v_few) <= 10000 THEN
        ids := ARRAY(
            SELECT j.id FROM jobs j
            WHERE j.id = ANY (v_few) AND j.id >= v_from AND j.id IS DISTINCT FROM p_after AND j.status = ANY (v_statuses)
              AND (p_queue IS NULL OR j.queue = p_queue) AND (p_kind IS NULL OR coalesce(j.kind, j.queue) = p_kind)
              AND (p_key IS NULL OR p_key IN (j.serialize_key, j.limit_key, j.dedupe_key))
              AND (p_batch IS NULL OR j.batch_id = p_batch)
            ORDER BY j.id LIMIT v_limit);
        last := ids[v_limit];
    ELSE
        ids := ARRAY(
            SELECT j.id
            FROM (SELECT w.id, w.queue, w.kind, w.status, w.serialize_key, w.limit_key, w.dedupe_key, w.batch_id FROM jobs w
                  WHERE w.id >= v_from AND w.id IS DISTINCT FROM p_after ORDER BY w.id LIMIT 100000) j
            WHERE j.status = ANY (v_statuses)
              AND (p_queue IS NULL OR j.queue = p_queue) AND (p_kind IS NULL OR coalesce(j.kind, j.queue) = p_kind)
              AND (p_key IS NULL OR p_key IN (j.serialize_key, j.limit_key, j.dedupe_key))
              AND (p_batch IS NULL OR j.batch_id = p_batch)
            ORDER BY j.id LIMIT v_limit);
        last := coalesce(ids[v_limit], (SELECT j.id FROM jobs j WHERE j.id >= v_from AND j.id IS DISTINCT FROM p_after
                                        ORDER BY j.id OFFSET 99999 LIMIT 1));
    END IF;
END $$;

-- Cancels: a waiting job ends now; a running one is marked, and its worker told, which cancels
-- the handler and settles it. Answers with 'cancelled' or 'requested' per job found; others are over or
-- unknown. A dead one has ended: retry() or discard() it. What was asked for before is in the audit already, also when the engine carries it out here.
-- Locks the jobs in order of id.
CREATE OR REPLACE FUNCTION cancel(p_ids uuid[], p_by text DEFAULT NULL) RETURNS TABLE (id uuid, outcome text)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    v_was     text;
    v_who     text := who(p_by);
    v_waiting uuid[];
    v_running uuid[];
BEGIN
    SELECT array_agg(x.id) FILTER (WHERE x.status <> 'running'), array_agg(x.id) FILTER (WHERE x.status = 'running')
    INTO v_waiting, v_running
    FROM (SELECT j.id, j.status FROM jobs j
          WHERE j.id = ANY (p_ids) AND j.status NOT IN ('completed', 'dead') ORDER BY j.id FOR UPDATE) x;
    v_was := say_no_wait('on');  -- the caller's transaction may last
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT v_who, 'cancel', j.queue, j.id,
           CASE WHEN j.status = 'running' THEN '{"cancel_requested_at": null}' ELSE jsonb_build_object('status', j.status) END,
           CASE WHEN j.status = 'running' THEN jsonb_build_object('cancel_requested_at', clock()) ELSE '{"status": "cancelled"}' END
    FROM jobs j WHERE j.id = ANY (v_waiting || v_running) AND j.cancel_requested_at IS NULL
    ORDER BY j.id;
    UPDATE jobs j SET cancel_requested_at = coalesce(j.cancel_requested_at, clock()) WHERE j.id = ANY (v_running);
    PERFORM bury(v_waiting, 'cancelled', NULL), say_no_wait(v_was);
    PERFORM pg_notify('pgworkd', jsonb_build_object('worker', w.worker_id)::text)
    FROM (SELECT DISTINCT j.worker_id FROM jobs j WHERE j.id = ANY (v_running)) w;
    RETURN QUERY SELECT u.id, 'cancelled' FROM unnest(v_waiting) AS u (id)
                 UNION ALL SELECT u.id, 'requested' FROM unnest(v_running) AS u (id);
END $$;

-- What these were before could not reopen a tree.
DROP FUNCTION IF EXISTS retry(uuid[], text);
DROP FUNCTION IF EXISTS reopened(uuid[]);

-- Runs jobs again: a dead one gets a fresh budget, one that waits for its retry runs now. Answers with
-- the ids it changed. A replayed occurrence leaves its schedule's chain, which has gone on without it. A dead job of a
-- finished batch opens it and its tree again; when that is over again, the one of on_complete and on_failure that fits is
-- inserted, unless it was before; p_call_back: also if it was. A dead job of a cancelled batch stays as it is: delete the
-- batch first, or enqueue another.
-- Raises 23505 when another job holds the dedupe key. Locks the jobs in order of id, then the roots of their batches.
CREATE OR REPLACE FUNCTION retry(p_ids uuid[], p_by text DEFAULT NULL, p_call_back boolean DEFAULT false) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_who    text := who(p_by);
    v_ids    uuid[];
    v_queues text[];
BEGIN
    v_ids := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.status IN ('dead', 'failed') ORDER BY j.id FOR UPDATE);
    IF EXISTS (SELECT FROM jobs j WHERE j.id = ANY (v_ids) AND j.batch_id IS NOT NULL AND j.status = 'dead') THEN
        v_ids := reopened(v_ids, p_call_back);
    END IF;
    DELETE FROM jobs d WHERE d.ctid = ANY (ARRAY(  -- what has held their keys for jobs that are over, and need not any longer
        SELECT k.ctid FROM jobs j JOIN jobs k ON k.queue = j.queue AND k.dedupe_key = j.dedupe_key
        WHERE j.id = ANY (v_ids) AND j.status = 'dead' AND k.status = 'completed' AND k.dedupe_until <= clock()
        FOR UPDATE OF k SKIP LOCKED));
    WITH old AS MATERIALIZED (
        SELECT j.id, jsonb_build_object('status', j.status, 'failures', j.failures, 'losses', j.losses, 'schedule', j.schedule,
                                        'run_at', j.run_at, 'cancel_requested_at', j.cancel_requested_at) AS facts
        FROM jobs j WHERE j.id = ANY (v_ids)
    ), changed AS (
        UPDATE jobs j
        SET failures = CASE WHEN j.status = 'dead' THEN 0 ELSE j.failures END,
            losses = CASE WHEN j.status = 'dead' THEN 0 ELSE j.losses END,
            schedule = CASE WHEN j.status = 'dead' THEN NULL ELSE j.schedule END,
            -- who waits for a retry and holds its key goes on holding it
            status = CASE WHEN j.status = 'failed' AND j.serialize_key IS NOT NULL AND NOT j.yields THEN 'failed'
                          ELSE 'pending' END::job_status,
            -- one that is due already keeps its place: the others in its line wait behind it
            run_at = CASE WHEN j.status = 'dead' THEN clock() ELSE least(j.run_at, clock()) END,
            cancel_requested_at = NULL
        WHERE j.id = ANY (v_ids)
        RETURNING j.id, j.queue,
                  jsonb_build_object('status', j.status, 'failures', j.failures, 'losses', j.losses, 'schedule', j.schedule,
                                     'run_at', j.run_at, 'cancel_requested_at', j.cancel_requested_at) AS facts
    ), noted AS (
        INSERT INTO audit (who, what, queue, job_id, before, after)
        SELECT v_who, 'retry', c.queue, c.id, differing(o.facts, c.facts), differing(c.facts, o.facts)
        FROM changed c JOIN old o ON o.id = c.id WHERE o.facts <> c.facts ORDER BY c.id
    )
    SELECT array_agg(DISTINCT c.queue::text) INTO v_queues FROM changed c;
    PERFORM wake(v_queues);
    RETURN v_ids;
END $$;

-- Moves dead jobs to finished_jobs, where they end as `dead`. Answers how many. Locks them in order of id.
CREATE OR REPLACE FUNCTION discard(p_ids uuid[], p_by text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_was   text;
    v_count int;
    v_who text := who(p_by);
    v_ids uuid[] := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.status = 'dead' ORDER BY j.id FOR UPDATE);
BEGIN
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT v_who, 'discard', j.queue, j.id, '{"finished_at": null}', jsonb_build_object('finished_at', clock())
    FROM jobs j WHERE j.id = ANY (v_ids) ORDER BY j.id;
    v_was := say_no_wait('on');  -- as in cancel()
    v_count := bury(v_ids, 'dead', NULL);
    PERFORM say_no_wait(v_was);
    RETURN v_count;
END $$;

-- Changes what is given of a waiting job. Answers with what is different now, an empty object if nothing is. A job
-- that is blocked takes its new place in line when its run_at changes. Raises PW002 for a job that does not wait.
-- Locks the job, then as promote().
CREATE OR REPLACE FUNCTION edit(p_id uuid, p_payload jsonb DEFAULT NULL, p_run_at timestamptz DEFAULT NULL,
                     p_priority int DEFAULT NULL, p_by text DEFAULT NULL) RETURNS jsonb
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_was    text;
    v_old    jobs;
    v_new    jobs;
    v_status text;
    v_before jsonb;
    v_after  jsonb;
BEGIN
    IF num_nonnulls(p_payload, p_run_at, p_priority) = 0 THEN
        RAISE EXCEPTION 'nothing to edit' USING ERRCODE = '22023', HINT = 'Give a payload, a run_at or a priority.';
    END IF;
    SELECT * INTO v_old FROM jobs j WHERE j.id = p_id FOR UPDATE;
    v_status := coalesce(nullif(v_old.status::text, 'completed'),  -- such a row only keeps a key
                         (SELECT f.status::text FROM finished_jobs f WHERE f.id = p_id LIMIT 1), v_old.status::text, 'unknown');
    IF v_status NOT IN ('blocked', 'pending', 'failed') THEN
        RAISE EXCEPTION 'job % is %, only a waiting job can be edited', p_id, v_status USING ERRCODE = 'PW002',
            HINT = CASE WHEN v_status = 'running' THEN 'Cancel it and enqueue a new one, or edit it when it waits for a retry.'
                        WHEN v_old.status = 'dead' THEN 'Pause its queue, retry the job, edit it while it waits, resume the queue.'
                        WHEN v_status = 'unknown' THEN 'Check the id; the history may have forgotten it.'
                        ELSE 'It is over: enqueue a new one.' END;
    END IF;
    UPDATE jobs j
    SET payload = coalesce(p_payload, j.payload), run_at = coalesce(p_run_at, j.run_at), priority = coalesce(p_priority, j.priority),
        status = CASE WHEN j.status = 'blocked' AND j.waiting_on = 0 AND j.run_at <> p_run_at THEN 'pending' ELSE j.status END
    WHERE j.id = p_id
    RETURNING j.* INTO v_new;
    v_before := jsonb_build_object('payload', v_old.payload, 'run_at', v_old.run_at, 'priority', v_old.priority, 'status', v_old.status);
    v_after := jsonb_build_object('payload', v_new.payload, 'run_at', v_new.run_at, 'priority', v_new.priority, 'status', v_new.status);
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT who(p_by), 'edit', v_new.queue, p_id, differing(v_before, v_after), differing(v_after, v_before)
    WHERE v_before <> v_after;
    IF (v_new.run_at, v_new.priority) <> (v_old.run_at, v_old.priority) THEN
        PERFORM wake(ARRAY[v_new.queue::text], v_new.run_at, true);  -- claims may be past its new place
    END IF;
    IF v_new.run_at <> v_old.run_at AND v_new.serialize_key IS NOT NULL THEN
        v_was := say_no_wait('on');  -- as in cancel()
        PERFORM promote(ARRAY[v_new.queue::text], ARRAY[v_new.serialize_key::text]), say_no_wait(v_was);
    END IF;
    RETURN differing(v_after, v_before);
END $$;

-- Frees the dedupe_key that a job which is over keeps: see kept_keys. False: no job that is over keeps it; the key of a live
-- job is not freed. Locks the row that keeps the key.
CREATE OR REPLACE FUNCTION free_key(p_queue text, p_key text, p_by text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_kept jobs;
BEGIN
    DELETE FROM jobs j  -- CASE: as in jobs_key_wanted()
    WHERE j.queue = p_queue AND j.dedupe_key = p_key AND j.status <> 'dead'
      AND CASE WHEN j.status = 'completed' THEN j.dedupe_until > clock() ELSE false END
    RETURNING j.* INTO v_kept;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO audit (who, what, queue, job_id, before, after)
    VALUES (who(p_by), 'free_key', v_kept.queue, v_kept.id,
            jsonb_build_object('dedupe_key', v_kept.dedupe_key, 'dedupe_until', v_kept.dedupe_until),
            '{"dedupe_key": null, "dedupe_until": null}');
    RETURN true;
END $$;

-- The same of the key of a tree of batches that has finished; p_name: the root's. False: no such tree keeps it; the key of
-- one that has not finished is not freed. Locks the root.
CREATE OR REPLACE FUNCTION free_batch_key(p_name text, p_key text, p_by text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_kept batches;
BEGIN
    SELECT b.* INTO v_kept FROM batches b
    WHERE b.parent_id IS NULL AND b.name = p_name AND b.dedupe_key = p_key
      AND (b.tree_finished_at IS NULL OR b.dedupe_until IS NOT NULL)
      AND b.tree_finished_at IS NOT NULL AND b.dedupe_until > clock()
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE batches b SET dedupe_until = NULL WHERE b.id = v_kept.id;
    INSERT INTO audit (who, what, queue, before, after)
    VALUES (who(p_by), 'free_key', v_kept.queue,
            jsonb_build_object('batch', v_kept.id, 'dedupe_key', v_kept.dedupe_key, 'dedupe_until', v_kept.dedupe_until),
            jsonb_build_object('batch', v_kept.id, 'dedupe_key', NULL, 'dedupe_until', NULL));
    RETURN true;
END $$;

-- Notes every change of a queue's settings, pauses too, whoever makes it. A queue without a row has no settings.
CREATE OR REPLACE FUNCTION queues_audit() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_none   jsonb := to_jsonb(jsonb_populate_record(NULL::queues, jsonb_build_object('name', coalesce(NEW.name, OLD.name), 'fair', false)));
    v_before jsonb := coalesce(to_jsonb(OLD), v_none) - '{updated_at,limited}'::text[];
    v_after  jsonb := coalesce(to_jsonb(NEW), v_none) - '{updated_at,limited}'::text[];
BEGIN
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(), 'queue', v_after ->> 'name', differing(v_before, v_after), differing(v_after, v_before)
    WHERE v_before <> v_after;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER queues_audit AFTER INSERT OR UPDATE OR DELETE ON queues
    FOR EACH ROW EXECUTE FUNCTION queues_audit();

-- ------------------------------------------------------------------------------------------------
-- 10 Insert triggers, and inserting where a dedupe_key is taken
-- ------------------------------------------------------------------------------------------------

-- One NOTIFY per queue and statement, only where a pool sleeps, only for jobs due within ten seconds:
-- sleepers look for the next due time at least as often. STABLE spares it a snapshot of its own; a pool that
-- falls asleep during the statement looks again for as long as such a statement takes. The first question
-- is all that most inserts pay for while daemons are busy. After it the rows are read once, and pools once per queue:
-- nothing is known of the rows when it is planned, so a join of the two may be one of each row with each pool.
CREATE OR REPLACE FUNCTION jobs_inserted() RETURNS trigger
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp AS $$
DECLARE
    v_soon timestamptz;
BEGIN
    IF NOT EXISTS (SELECT FROM pools p WHERE p.asleep) THEN
        RETURN NULL;
    END IF;
    v_soon := clock() + interval '10 s';
    -- Whoever hears this may be past jobs that were due when the transaction began. (One instant for all its
    -- statements: Postgres sends equal notices of a transaction once.)
    PERFORM notify_pools(q.queue, least(q.run_at, clock() - (statement_timestamp() - transaction_timestamp())))
    FROM (SELECT i.queue::text AS queue, min(i.run_at) AS run_at FROM inserted i
          WHERE i.status = 'pending' AND i.run_at <= v_soon GROUP BY i.queue) q
    WHERE (SELECT true FROM pools p WHERE p.queue = q.queue AND p.asleep LIMIT 1);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER jobs_inserted AFTER INSERT ON jobs
    REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION jobs_inserted();

-- A dedupe_key is free at the very instant, not only when free_keys() has come by: removes what holds NEW's for a job that
-- is over, if it has done so for long enough. Locks that row. (CASE keeps the planner off the index on all such rows.) The
-- condition of the trigger costs every insert of a row, and is therefore short.
CREATE OR REPLACE FUNCTION jobs_key_wanted() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET enable_seqscan = off AS $$
BEGIN
    IF NEW.status <> 'completed' THEN
        DELETE FROM jobs j
        WHERE j.queue = NEW.queue AND j.dedupe_key = NEW.dedupe_key AND j.status <> 'dead'
          AND CASE WHEN j.status = 'completed' THEN j.dedupe_until <= clock() ELSE false END;
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER jobs_key_wanted BEFORE INSERT ON jobs
    FOR EACH ROW WHEN (NEW.dedupe_key IS NOT NULL) EXECUTE FUNCTION jobs_key_wanted();

-- Moves a waiting job, p_job as the caller has locked it, to another due time and priority, out of a parking place (where it
-- waits for other jobs it goes on doing so). Claims
-- that are past its new place, and pools that sleep, hear of it; if it left the head of a line, the next steps forward.
-- Locks that one with SKIP LOCKED. Not the queue, as promote() does: the caller's transaction may last, and all claims
-- would wait for it. What a claim parks in this very moment is left to unblock().
CREATE OR REPLACE FUNCTION move(p_job jobs, p_run_at timestamptz, p_priority int) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    UPDATE jobs j
    SET run_at = p_run_at, priority = p_priority,
        status = CASE WHEN j.status = 'blocked' AND j.waiting_on = 0 THEN 'pending' ELSE j.status END
    WHERE j.id = p_job.id;
    IF p_run_at <= clock() + interval '10 s'
       AND (p_run_at < p_job.run_at OR p_priority <> p_job.priority OR p_job.status = 'blocked') THEN
        -- See jobs_inserted() for the instant.
        PERFORM wake(ARRAY[p_job.queue::text],
                     least(p_run_at, clock() - (statement_timestamp() - transaction_timestamp())), true);
    END IF;
    IF p_job.serialize_key IS NOT NULL AND p_job.waiting_on = 0 AND p_run_at > p_job.run_at THEN
        UPDATE jobs j SET status = 'pending', promoted = clock_after_waiting()
        WHERE j.ctid = ANY (ARRAY(
            SELECT b.ctid FROM jobs b
            WHERE b.queue = p_job.queue AND b.serialize_key = p_job.serialize_key AND b.status = 'blocked' AND b.waiting_on = 0
              AND NOT EXISTS (SELECT FROM jobs h WHERE h.queue = p_job.queue AND h.serialize_key = p_job.serialize_key
                              AND (h.status = 'running' OR h.status = 'failed' AND NOT h.yields))
            ORDER BY b.run_at, b.id LIMIT 1 FOR UPDATE OF b SKIP LOCKED));
        IF FOUND THEN
            PERFORM wake(ARRAY[p_job.queue::text]);
        END IF;
    END IF;
END $$;

-- Inserts a job, and says what to do where its dedupe_key is taken. p_on_duplicate: 'raise' 23505, as a plain INSERT
-- does; 'skip': answer with the id that holds the key; 'replace': give a job that waits the new payload, kind,
-- priority, times, limits and meta (its place in the lines of its keys stays as it is, and so does what its failures
-- have spent); 'reschedule': move it to the new run_at, and priority if one is given. A job that runs, or is over and
-- keeps its key, is left alone. `created`: id is the new job; `changed`: the holder was given what was asked for.
-- Locks the holder if it is to change, then as move().
CREATE OR REPLACE FUNCTION enqueue(
    p_queue text, p_payload jsonb DEFAULT '{}', p_kind text DEFAULT NULL, p_priority int DEFAULT NULL,
    p_run_at timestamptz DEFAULT NULL, p_delay_s float8 DEFAULT NULL, p_expires_at timestamptz DEFAULT NULL,
    p_max_attempts int DEFAULT NULL, p_timeout_s float8 DEFAULT NULL, p_meta jsonb DEFAULT NULL,
    p_dedupe_key text DEFAULT NULL, p_dedupe_until timestamptz DEFAULT NULL, p_dedupe_for_s float8 DEFAULT NULL,
    p_serialize_key text DEFAULT NULL, p_limit_key text DEFAULT NULL, p_on_retry text DEFAULT 'hold',
    p_on_duplicate text DEFAULT 'raise')
RETURNS TABLE (id uuid, created boolean, changed boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_run_at timestamptz := coalesce(p_run_at, clock() + make_interval(secs => coalesce(p_delay_s, 0)));
    v_until  timestamptz := coalesce(p_dedupe_until, clock() + make_interval(secs => p_dedupe_for_s));
    v_wrong  text := CASE
        WHEN p_on_duplicate IS NULL OR p_on_duplicate NOT IN ('raise', 'skip', 'replace', 'reschedule')
            THEN 'p_on_duplicate must be raise, skip, replace or reschedule'
        WHEN p_on_duplicate <> 'raise' AND p_dedupe_key IS NULL THEN 'p_on_duplicate needs a p_dedupe_key'
        WHEN num_nonnulls(p_run_at, p_delay_s) > 1 THEN 'p_run_at and p_delay_s are both given: pass one of them'
        WHEN p_delay_s < 0 THEN 'p_delay_s must not be negative'
        WHEN num_nonnulls(p_dedupe_until, p_dedupe_for_s) > 1
            THEN 'p_dedupe_until and p_dedupe_for_s are both given: pass one of them'
        WHEN p_dedupe_for_s <= 0 THEN 'p_dedupe_for_s must be above 0'
        WHEN p_on_retry IS NULL OR p_on_retry NOT IN ('hold', 'yield') THEN 'p_on_retry must be hold or yield'
        WHEN p_on_retry = 'yield' AND p_serialize_key IS NULL THEN 'p_on_retry => ''yield'' needs a p_serialize_key' END;
    v_holder jobs;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    created := false;
    changed := false;
    FOR i IN 1..100 LOOP
        INSERT INTO jobs AS j (queue, payload, kind, priority, run_at, expires_at, max_attempts, timeout_s, meta,
                               dedupe_key, dedupe_until, serialize_key, limit_key, yields)
        VALUES (p_queue, p_payload, p_kind, coalesce(p_priority, 0), v_run_at, p_expires_at, p_max_attempts,
                p_timeout_s, p_meta, p_dedupe_key, v_until, p_serialize_key, p_limit_key, p_on_retry = 'yield')
        ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead' DO NOTHING
        RETURNING j.id INTO id;
        IF FOUND THEN
            created := true;
            RETURN NEXT;
            RETURN;
        END IF;
        EXIT WHEN p_on_duplicate = 'raise';
        SELECT * INTO v_holder FROM jobs j
        WHERE j.queue = p_queue AND j.dedupe_key = p_dedupe_key AND j.status <> 'dead';
        CONTINUE WHEN NOT FOUND;  -- it has ended in between
        id := v_holder.id;
        IF p_on_duplicate = 'skip' OR v_holder.status IN ('running', 'completed') THEN
            RETURN NEXT;
            RETURN;
        END IF;
        SELECT * INTO v_holder FROM jobs j
        WHERE j.id = v_holder.id AND j.status IN ('blocked', 'pending', 'failed') FOR UPDATE;
        CONTINUE WHEN NOT FOUND;  -- it has been claimed, or has ended
        IF p_on_duplicate = 'replace' THEN
            UPDATE jobs j
            SET payload = p_payload, kind = p_kind, priority = coalesce(p_priority, 0), expires_at = p_expires_at,
                max_attempts = p_max_attempts, timeout_s = p_timeout_s, meta = p_meta,
                dedupe_until = coalesce(v_until, j.dedupe_until)
            WHERE j.id = v_holder.id;
        END IF;
        PERFORM move(v_holder, v_run_at,
                     coalesce(p_priority, CASE p_on_duplicate WHEN 'replace' THEN 0 ELSE v_holder.priority END));
        changed := true;
        RETURN NEXT;
        RETURN;
    END LOOP;
    RAISE EXCEPTION 'duplicate key value violates unique constraint "jobs_dedupe"'
        USING ERRCODE = 'unique_violation', SCHEMA = 'pgworkd', TABLE = 'jobs', CONSTRAINT = 'jobs_dedupe',
              DETAIL = format('Key (queue, dedupe_key)=(%s, %s) already exists.', p_queue, p_dedupe_key),
              HINT = 'p_on_duplicate says what else to do with such a job.';
END $$;

-- ------------------------------------------------------------------------------------------------
-- 11 Batches
-- Who adds holds FOR KEY SHARE on the batch to the end of its transaction and inserts into batch_additions, no more: no
-- daemon ever waits for it. Who ends jobs, in whatever way, holds their rows, then locks the roots of the trees concerned
-- in order of id, which lets one at a time into a tree; batches below a root are written under that lock only, and
-- rows of `jobs` are locked under it with SKIP LOCKED only; queues are locked after it. A batch is finished
-- when it is sealed, its row can be had FOR UPDATE (nobody is adding), no job of it lives, and nothing streams into it any
-- longer. Counters say when it is worth while to look. Who adds and then rolls back does not look: mend_batches() does.
-- ------------------------------------------------------------------------------------------------

-- What this was before knew no dedupe_until.
DROP FUNCTION IF EXISTS create_batch(text, text, text, uuid, boolean, text, boolean, int, jsonb, jsonb, text);

-- Makes a batch: a root, or with p_parent a child. Where p_dedupe_key is held by an unfinished root of that name (or by one
-- that finished, until its dedupe_until), or the parent has a child of that name, answers with that one. p_dedupe_until, or
-- p_dedupe_for_s from now: how long the key stays taken when the tree has finished. p_queue: NULL: the parent's. For the rest see `batches`.
-- Raises PW003 where the parent takes no more. Locks the parent FOR KEY SHARE.
CREATE OR REPLACE FUNCTION create_batch(
    p_name text, p_queue text DEFAULT NULL, p_kind text DEFAULT NULL, p_parent uuid DEFAULT NULL,
    p_stream boolean DEFAULT false, p_stream_kind text DEFAULT NULL, p_final boolean DEFAULT false,
    p_max_failures int DEFAULT NULL, p_on_complete jsonb DEFAULT NULL, p_on_failure jsonb DEFAULT NULL,
    p_dedupe_key text DEFAULT NULL, p_dedupe_until timestamptz DEFAULT NULL, p_dedupe_for_s float8 DEFAULT NULL)
RETURNS TABLE (id uuid, created boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    v_wrong text := CASE
        WHEN num_nonnulls(p_dedupe_until, p_dedupe_for_s) > 1
            THEN 'p_dedupe_until and p_dedupe_for_s are both given: pass one of them'
        WHEN p_dedupe_for_s <= 0 THEN 'p_dedupe_for_s must be above 0'
        WHEN num_nonnulls(p_dedupe_until, p_dedupe_for_s) > 0 AND p_dedupe_key IS NULL
            THEN 'p_dedupe_until and p_dedupe_for_s need a p_dedupe_key' END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    LOOP
        SELECT b.id, false INTO id, created FROM batches b
        WHERE b.parent_id IS NULL AND p_parent IS NULL AND b.name = p_name AND b.dedupe_key = p_dedupe_key
              AND (b.tree_finished_at IS NULL OR b.dedupe_until IS NOT NULL) AND (b.tree_finished_at IS NULL OR b.dedupe_until > clock())
           OR b.parent_id = p_parent AND b.name = p_name;
        EXIT WHEN FOUND;
        INSERT INTO batches AS b (name, queue, kind, parent_id, stream, stream_kind, final, max_failures, on_complete,
                                  on_failure, dedupe_key, dedupe_until)
        VALUES (p_name, p_queue, p_kind, p_parent, p_stream, p_stream_kind, p_final, p_max_failures, p_on_complete,
                p_on_failure, p_dedupe_key, coalesce(p_dedupe_until, clock() + make_interval(secs => p_dedupe_for_s)))
        ON CONFLICT DO NOTHING
        RETURNING b.id, true INTO id, created;
        EXIT WHEN FOUND;
    END LOOP;
    RETURN NEXT;
END $$;

-- Locks a batch that is to take more FOR KEY SHARE; raises PW003 if it takes no more. p_what: what is to be added, 'jobs' or
-- 'children'. What was streamed in last may still have to be made into jobs when the batch is sealed: a job of its
-- stream_kind that runs holds it open.
CREATE OR REPLACE FUNCTION enter_batch(p_batch uuid, p_what text) RETURNS batches
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_batch batches;
    v_why   text;
BEGIN
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch USING ERRCODE = 'PW003',
            HINT = 'Check the id: the batch may have been deleted, or its creation rolled back. create_batch() makes one.';
    END IF;
    v_why := CASE
        WHEN v_batch.cancelled_at IS NOT NULL THEN 'was cancelled'
        WHEN v_batch.finished_at IS NOT NULL THEN 'is finished'
        WHEN v_batch.sealed_at IS NULL
            THEN (SELECT 'is sealed' WHERE EXISTS (SELECT FROM batch_additions a WHERE a.batch_id = p_batch AND a.seals))
        WHEN v_batch.stream_kind IS NULL OR p_what <> 'jobs'
          OR NOT EXISTS (SELECT FROM jobs j WHERE j.batch_id = p_batch AND j.status = 'running' AND j.kind = v_batch.stream_kind)
            THEN 'is sealed' END;
    IF v_why IS NOT NULL THEN
        RAISE EXCEPTION 'batch % (%) %: it takes no more %', p_batch, v_batch.name, v_why, p_what USING ERRCODE = 'PW003',
            HINT = CASE v_why WHEN 'is sealed' THEN 'Add all there is before it is sealed, or create another batch.'
                              ELSE 'Create another batch.' END;
    END IF;
    RETURN v_batch;
END $$;

-- Places a new batch in its tree, and refuses what could not be carried out later: at a callback it would be too late. Frees
-- its dedupe_key if a tree that is over has kept it for long enough. Locks the parent FOR KEY SHARE, or that root.
CREATE OR REPLACE FUNCTION batch_created() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_parent batches;
BEGIN
    IF NEW.added + NEW.completed + NEW.dead + NEW.cancelled > 0 OR NEW.finished_at IS NOT NULL THEN
        RAISE EXCEPTION 'batch "%" comes with counters, as from a dump of data only: its jobs would be counted twice', NEW.name
            USING ERRCODE = '55000', HINT = 'Restore with --disable-triggers; a new batch begins without counters.';
    END IF;
    IF NEW.parent_id IS NOT NULL THEN
        v_parent := enter_batch(NEW.parent_id, 'children');
        NEW.queue := coalesce(NEW.queue, v_parent.queue);
        IF NEW.stream AND v_parent.completed > 0 THEN
            RAISE EXCEPTION 'batch % (%) has completed jobs that would be missing in its child "%"', v_parent.id, v_parent.name, NEW.name
                USING ERRCODE = 'PW003', HINT = 'Create children that stream before the parent has jobs.';
        ELSIF v_parent.depth >= 32 THEN
            RAISE EXCEPTION 'batch "%" would be at depth 33 of its tree', NEW.name USING ERRCODE = '22023',
                HINT = 'A tree is at most 32 deep: put jobs into fewer batches, or let a callback begin another tree.';
        END IF;
        NEW.depth := v_parent.depth + 1;
    ELSE
        NEW.depth := 0;
        IF NEW.dedupe_key IS NOT NULL THEN  -- a key is free at the very instant
            UPDATE batches b SET dedupe_until = NULL
            WHERE b.parent_id IS NULL AND b.name = NEW.name AND b.dedupe_key = NEW.dedupe_key
              AND (b.tree_finished_at IS NULL OR b.dedupe_until IS NOT NULL)
              AND b.tree_finished_at IS NOT NULL AND b.dedupe_until <= clock();
        END IF;
    END IF;
    IF NEW.root_id <> coalesce(v_parent.root_id, NEW.id) THEN
        RAISE EXCEPTION 'batch "%" cannot belong to root %', NEW.name, NEW.root_id USING ERRCODE = '22023',
            HINT = 'Leave root_id out: a child belongs to the root of its parent, ' || coalesce(v_parent.root_id, NEW.id) || '.';
    END IF;
    NEW.root_id := coalesce(v_parent.root_id, NEW.id);
    PERFORM check_callback('on_complete', NEW.on_complete);
    PERFORM check_callback('on_failure', NEW.on_failure);
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER batch_created BEFORE INSERT ON batches FOR EACH ROW EXECUTE FUNCTION batch_created();

-- A batch stays where it was made: locks and counters go by its root, and who is below itself has none.
CREATE OR REPLACE FUNCTION batch_moved() RETURNS trigger
LANGUAGE plpgsql SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'batch % (%) cannot be moved', OLD.id, OLD.name USING ERRCODE = '22023',
        HINT = 'Leave parent_id, root_id and depth as they are: create another batch where one is needed.';
END $$;
CREATE OR REPLACE TRIGGER batch_moved BEFORE UPDATE OF id, parent_id, root_id, depth ON batches
    FOR EACH ROW WHEN ((NEW.id, NEW.parent_id, NEW.root_id, NEW.depth) IS DISTINCT FROM (OLD.id, OLD.parent_id, OLD.root_id, OLD.depth))
    EXECUTE FUNCTION batch_moved();

-- At the end of a transaction that has made a child that streams: who has ended jobs of the parent meanwhile could not see the
-- child. (What its own transaction ended is in `added`.) Locks the root, so that whoever is about to end jobs sees it; see
-- batch_ended(); before that as check_dependencies().
CREATE OR REPLACE FUNCTION stream_created() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_parent text;
BEGIN
    PERFORM check_dependencies(), lock_trees(ARRAY[NEW.id]);
    PERFORM fold(ARRAY[NEW.parent_id]);
    SELECT p.name INTO v_parent
    FROM batches c JOIN batches p ON p.id = c.parent_id WHERE c.id = NEW.id AND p.completed > c.added;
    IF FOUND THEN
        RAISE EXCEPTION 'batch % (%) has completed jobs that would be missing in its child "%"', NEW.parent_id, v_parent, NEW.name
            USING ERRCODE = 'PW003', HINT = 'Create children that stream before the parent has jobs.';
    END IF;
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'pgworkd.batches'::regclass AND t.tgname = 'stream_created') THEN
        CREATE CONSTRAINT TRIGGER stream_created AFTER INSERT ON batches
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.stream) EXECUTE FUNCTION stream_created();
    END IF;
END $$;

-- Raises unless call_back() can insert such a job.
CREATE OR REPLACE FUNCTION check_callback(p_column text, p_job jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
DECLARE
    v_known text[] := '{queue,kind,payload,priority,max_attempts,timeout_s,meta,serialize_key,limit_key}';
    v_wrong text := (SELECT min(k.key) FROM jsonb_object_keys(p_job) AS k (key) WHERE k.key <> ALL (v_known));
BEGIN
    v_wrong := CASE
        WHEN v_wrong IS NOT NULL THEN format('knows no "%s"', v_wrong)
        WHEN p_job ->> 'queue' IS NULL THEN 'names no queue'
        WHEN p_job -> 'payload' ? 'batch' THEN 'has a payload with "batch", where the facts of the batch will stand'
        WHEN octet_length(p_job::text) > 1048576 THEN 'is larger than 1 MiB' END;
    IF p_job IS NOT NULL AND v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '% %', p_column, v_wrong USING ERRCODE = '22023',
            HINT = 'Give an object with "queue" and, of ' || array_to_string(v_known[2:], ', ') || ', what is needed.';
    END IF;
    PERFORM jsonb_populate_record(NULL::jobs, p_job);  -- raises what is wrong with the values
END $$;

-- Counts a job into its batch, when it is really there: ON CONFLICT may have passed it over. Raises PW003 if the batch takes
-- no more. Locks the batch FOR KEY SHARE. (What is inserted as `counted` passes by: enqueuers have no right to that column.
-- The condition of the trigger is what jobs without a batch pay.)
CREATE OR REPLACE FUNCTION job_added() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp AS $$
BEGIN
    PERFORM enter_batch(NEW.batch_id, 'jobs');
    INSERT INTO batch_additions (batch_id, added) VALUES (NEW.batch_id, 1);
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER jobs_batched AFTER INSERT ON jobs
    FOR EACH ROW WHEN (NEW.batch_id IS NOT NULL AND NEW.counted IS NOT TRUE) EXECUTE FUNCTION job_added();

-- At the end of a transaction that has added jobs to a batch: cancels them where the batch was cancelled meanwhile, which
-- cancel_batch() could not do, as it did not see them yet. What was cancelled since the transaction's snapshot (REPEATABLE
-- READ), or at the same instant, is left to mend_batches(). Waits for nothing. Locks as cancel_batch(), all with SKIP LOCKED.
CREATE OR REPLACE FUNCTION additions_checked() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_was  text;
    v_jobs record;
BEGIN
    IF (SELECT b.cancelled_at FROM batches b WHERE b.id = NEW.batch_id) IS NULL
       OR current_setting('pgworkd.additions_checked', true) = NEW.batch_id::text THEN  -- one row of many has done it
        RETURN NULL;
    END IF;
    v_was := say_no_wait('on');
    LOOP
        SELECT s.waiting, s.running INTO v_jobs FROM stop_jobs(ARRAY[NEW.batch_id], 10000, true) s;
        EXIT WHEN cardinality(v_jobs.waiting || v_jobs.running) = 0;
        PERFORM bury(v_jobs.waiting, 'cancelled', 'its batch was cancelled', false);
    END LOOP;
    PERFORM say_no_wait(v_was), set_config('pgworkd.additions_checked', NEW.batch_id::text, true);
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'pgworkd.batch_additions'::regclass AND t.tgname = 'additions_checked') THEN
        CREATE CONSTRAINT TRIGGER additions_checked AFTER INSERT ON batch_additions
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NOT NEW.seals) EXECUTE FUNCTION additions_checked();
    END IF;
END $$;

-- Adds a job for each payload, counted at once; their ids, in that order (p_ids: drawn by the caller). What is not given is the
-- batch's. Raises PW003 if the batch takes no more. Locks the batch FOR KEY SHARE.
CREATE OR REPLACE FUNCTION add_jobs(
    p_batch uuid, p_payloads jsonb[], p_kind text DEFAULT NULL, p_queue text DEFAULT NULL, p_priority int DEFAULT NULL,
    p_run_at timestamptz DEFAULT NULL, p_max_attempts int DEFAULT NULL, p_timeout_s float8 DEFAULT NULL, p_meta jsonb DEFAULT NULL,
    p_ids uuid[] DEFAULT NULL)
RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp AS $$
DECLARE
    v_batch batches := enter_batch(p_batch, 'jobs');
    v_ids   uuid[];
BEGIN
    WITH added AS (
        INSERT INTO jobs (id, batch_id, counted, queue, kind, payload, priority, run_at, max_attempts, timeout_s, meta)
        SELECT coalesce(p.id, new_id()), p_batch, true, coalesce(p_queue, v_batch.queue), coalesce(p_kind, v_batch.kind), p.payload,
               coalesce(p_priority, 0), coalesce(p_run_at, clock()), p_max_attempts, p_timeout_s, p_meta
        FROM unnest(p_payloads, p_ids) WITH ORDINALITY AS p (payload, id, place) ORDER BY p.place
        RETURNING id
    )
    SELECT coalesce(array_agg(a.id), '{}') INTO v_ids FROM added a;
    IF cardinality(v_ids) > 0 THEN
        INSERT INTO batch_additions (batch_id, added) VALUES (p_batch, cardinality(v_ids));
    END IF;
    RETURN v_ids;
END $$;

-- Seals a batch: when the caller commits, nothing more can be added to it, and if nothing is left to do, it is finished.
-- False if it was sealed, cancelled or finished before. Raises PW003 if there is no such batch, or if its parent still
-- streams into it: then it is sealed when the parent is finished. Waits for nobody who adds. Locks the batch FOR KEY SHARE.
CREATE OR REPLACE FUNCTION seal_batch(p_batch uuid) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_batch  batches;
    v_parent text;
BEGIN
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch FOR KEY SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    ELSIF num_nonnulls(v_batch.sealed_at, v_batch.cancelled_at, v_batch.finished_at) > 0
          OR EXISTS (SELECT FROM batch_additions a WHERE a.batch_id = p_batch AND a.seals) THEN
        RETURN false;
    ELSIF v_batch.stream THEN
        v_parent := (SELECT p.name FROM batches p WHERE p.id = v_batch.parent_id AND p.finished_at IS NULL);
        IF v_parent IS NOT NULL THEN
            RAISE EXCEPTION 'batch % (%) cannot be sealed while % streams into it', p_batch, v_batch.name, v_parent
                USING ERRCODE = 'PW003', HINT = 'Seal the parent: when that is finished this one is sealed by itself.';
        END IF;
    END IF;
    INSERT INTO batch_additions (batch_id, seals) VALUES (p_batch, true);
    RETURN true;
END $$;

-- At the end of a transaction that seals: carries it out, for all batches at once, so that trees are locked in their
-- order. What REPEATABLE READ has sealed is left to the next one, or to mend_batches(): it might not see who else is done.
-- Locks the roots, and before them as check_dependencies().
CREATE OR REPLACE FUNCTION batch_sealed() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_batches uuid[];
BEGIN
    IF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
        v_batches := ARRAY(SELECT DISTINCT a.batch_id FROM batch_additions a WHERE a.seals);
        IF cardinality(v_batches) > 0 THEN
            PERFORM check_dependencies();  -- its turn may come later, but jobs are locked before trees
            PERFORM lock_trees(v_batches);
            PERFORM fold(v_batches);
            PERFORM advance(v_batches, true);
        END IF;
    END IF;
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'pgworkd.batch_additions'::regclass AND t.tgname = 'batch_sealed') THEN
        CREATE CONSTRAINT TRIGGER batch_sealed AFTER INSERT ON batch_additions
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.seals) EXECUTE FUNCTION batch_sealed();
    END IF;
END $$;

-- For who may not wait: locks the roots of these batches, and the batches, with SKIP LOCKED; those whose root it has, too.
CREATE OR REPLACE FUNCTION free_batches(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_roots uuid[] := ARRAY(SELECT DISTINCT b.root_id FROM batches b WHERE b.id = ANY (p_batches));
BEGIN
    v_roots := ARRAY(SELECT r.id FROM batches r WHERE r.id = ANY (v_roots) ORDER BY r.id FOR NO KEY UPDATE SKIP LOCKED);
    RETURN ARRAY(SELECT b.id FROM batches b WHERE b.id = ANY (p_batches) AND b.root_id = ANY (v_roots)
                 ORDER BY b.id FOR NO KEY UPDATE SKIP LOCKED);
END $$;

-- Locks the roots of these batches, in order of id, whoever does so. Who ends jobs of several batches needs all of them at
-- once. Answers with those of the roots that may be finished: one that waits here can hide a root from who is to finish it.
CREATE OR REPLACE FUNCTION lock_trees(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_roots uuid[] := ARRAY(SELECT DISTINCT b.root_id FROM batches b WHERE b.id = ANY (p_batches));
    v_maybe uuid[];
BEGIN
    IF no_wait() THEN
        v_roots := free_batches(v_roots);
    END IF;
    SELECT array_agg(x.id) FILTER (WHERE x.sealed_at IS NOT NULL AND x.finished_at IS NULL AND x.completed + x.dead + x.cancelled >= x.added)
    INTO v_maybe
    FROM (SELECT r.id, r.sealed_at, r.finished_at, r.completed, r.dead, r.cancelled, r.added
          FROM batches r WHERE r.id = ANY (v_roots) ORDER BY r.id FOR NO KEY UPDATE) x;
    RETURN coalesce(v_maybe, '{}');
END $$;

-- The same for the batches of these jobs, whose rows the caller holds.
CREATE OR REPLACE FUNCTION lock_trees_of(p_jobs uuid[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT lock_trees(array_agg(j.batch_id)) FROM jobs j
    WHERE j.id = ANY (p_jobs) AND j.batch_id IS NOT NULL HAVING count(*) > 0
$$;

-- For whoever has ended jobs of batches, and holds their rows but no queue yet: moves the counters, inserts what is streamed,
-- cancels a batch with too many dead, and finishes what is finished. p_mop: ends up to 1,000 waiting jobs of
-- a batch that is cancelled, of those that hold no key (queues cannot be locked here); the others are left to the next one
-- and to mend_batches(). Locks the roots in order of id, those jobs with SKIP LOCKED.
CREATE OR REPLACE FUNCTION batch_ended(p_ended ended_job[], p_mop boolean DEFAULT true) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_batches   uuid[] := ARRAY(SELECT DISTINCT e.batch_id FROM unnest(p_ended) e);
    v_streams   boolean;                         -- some of them have a child that streams
    v_roots     uuid[];
    v_maybe     uuid[];                          -- may be finished
    v_failed    uuid[];                          -- have too many dead
    v_cancelled uuid[];
BEGIN
    IF no_wait() THEN
        v_maybe := free_batches(v_batches);
        IF cardinality(v_maybe) < cardinality(v_batches) THEN
            PERFORM put_off(array_agg(e)) FROM unnest(p_ended) e
            WHERE e.batch_id <> ALL (v_maybe) AND EXISTS (SELECT FROM batches b WHERE b.id = e.batch_id) HAVING count(*) > 0;
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
               WHERE c.parent_id = ANY (ARRAY(SELECT DISTINCT e.batch_id FROM unnest(p_ended) e WHERE e.status = 'completed' AND e.payload IS NULL))
                 AND c.stream) THEN
        RAISE EXCEPTION 'a batch that streams was created beside the end of jobs that it must not miss'
            USING ERRCODE = 'serialization_failure', HINT = 'Try again: daemons do.';
    END IF;
    WITH moved AS (
        UPDATE batches b
        SET completed = b.completed + n.completed, dead = greatest(b.dead + n.dead, 0), cancelled = b.cancelled + n.cancelled
        FROM (SELECT e.batch_id, count(*) FILTER (WHERE e.status = 'completed') AS completed,
                     count(*) FILTER (WHERE e.status = 'dead' AND NOT e.was_dead)
                     - count(*) FILTER (WHERE e.status <> 'dead' AND e.was_dead) AS dead,
                     count(*) FILTER (WHERE e.status IN ('cancelled', 'expired')) AS cancelled
              FROM unnest(p_ended) e GROUP BY e.batch_id) n
        WHERE b.id = n.batch_id
        RETURNING b.id, b.completed + b.dead + b.cancelled >= b.added AS maybe, b.cancelled_at, b.dead > b.max_failures AS failed, b.finished_at
    )
    SELECT array_agg(m.id) FILTER (WHERE m.maybe), array_agg(m.id) FILTER (WHERE m.failed AND m.cancelled_at IS NULL),
           array_agg(m.id) FILTER (WHERE m.cancelled_at IS NOT NULL)
    INTO v_maybe, v_failed, v_cancelled
    FROM moved m WHERE m.finished_at IS NULL;
    IF v_streams AND EXISTS (SELECT FROM unnest(p_ended) e WHERE e.payload IS NOT NULL) THEN
        v_failed := v_failed || stream(p_ended);
    END IF;
    IF v_failed IS NOT NULL THEN
        v_failed := cancel_below(v_failed);
        v_maybe := v_maybe || v_failed;
        v_cancelled := v_cancelled || v_failed;
    END IF;
    IF p_mop AND v_cancelled IS NOT NULL THEN
        PERFORM bury(s.waiting, 'cancelled', 'its batch was cancelled', false) FROM stop_jobs(v_cancelled, 1000, false) s;
    END IF;
    v_maybe := v_maybe || v_roots;
    IF cardinality(v_maybe) > 0 THEN
        PERFORM fold(v_maybe);
        PERFORM advance(v_maybe, false);
    END IF;
END $$;

-- Inserts a job into each batch that streams from that of a job which completed (those with a payload here); a job that
-- only made others of what was streamed is not streamed on. Answers with batches that have too many dead now: input and
-- result that are too large together make a job that is dead, or the parent could never be settled. The caller holds the
-- roots.
CREATE OR REPLACE FUNCTION stream(p_ended ended_job[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_failed uuid[];
BEGIN
    WITH made AS MATERIALIZED (
        SELECT c.id AS batch_id, c.queue, coalesce(c.stream_kind, c.kind) AS kind, e.id AS source, e.meta,
               jsonb_build_object('input', e.payload, 'result', e.result) AS payload
        FROM unnest(p_ended) e JOIN batches b ON b.id = e.batch_id JOIN batches c ON c.parent_id = b.id
        WHERE e.payload IS NOT NULL AND c.stream AND num_nonnulls(c.sealed_at, c.cancelled_at, c.finished_at) = 0
          AND (b.stream_kind IS NULL OR e.kind IS DISTINCT FROM b.stream_kind)
    ), sized AS MATERIALIZED (
        SELECT m.*, 'input and result of job ' || m.source || ' are larger than 1 MiB together: let it return less' AS error,
               pg_column_size(m.payload) <= 200 OR octet_length(m.payload::text) <= 2097152 AS fits
        FROM made m
    ), added AS (
        INSERT INTO jobs (batch_id, counted, queue, kind, meta, payload, status, failures, failed_at, error, errors)
        SELECT s.batch_id, true, s.queue, s.kind, s.meta,
               CASE WHEN s.fits THEN s.payload ELSE jsonb_build_object('source', s.source) END,
               CASE WHEN s.fits THEN 'pending' ELSE 'dead' END::job_status, CASE WHEN s.fits THEN 0 ELSE 1 END,
               CASE WHEN NOT s.fits THEN clock() END, CASE WHEN NOT s.fits THEN s.error END,
               CASE WHEN s.fits THEN '[]' ELSE jsonb_build_array(jsonb_build_object(
                   'attempt', 0, 'at', clock(), 'type', 'too large', 'message', s.error)) END
        FROM sized s
        RETURNING batch_id, status
    ), counted AS (
        UPDATE batches b SET added = b.added + n.added, dead = b.dead + n.dead
        FROM (SELECT a.batch_id, count(*) AS added, count(*) FILTER (WHERE a.status = 'dead') AS dead FROM added a GROUP BY a.batch_id) n
        WHERE b.id = n.batch_id
        RETURNING b.id, b.dead > b.max_failures AS failed
    )
    SELECT array_agg(c.id) INTO v_failed FROM counted c WHERE c.failed;
    RETURN v_failed;
END $$;

-- Takes what was added to these batches, that they were sealed, and what was put off for them into their rows. The caller
-- holds the roots: nobody else touches what was put off for their trees.
CREATE OR REPLACE FUNCTION fold(p_batches uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_ended ended_job[];
BEGIN
    IF EXISTS (SELECT FROM pending_effects p WHERE p.batch_id = ANY (p_batches)) THEN
        WITH gone AS (
            DELETE FROM pending_effects p WHERE p.batch_id = ANY (p_batches) RETURNING p.batch_id, p.ended
        )
        -- A child that streams may have been created since: it gets what the history knows.
        SELECT array_agg(CASE WHEN (g.ended).status = 'completed' AND (g.ended).payload IS NULL
                                   AND (SELECT true FROM batches c WHERE c.parent_id = g.batch_id AND c.stream LIMIT 1)
                              THEN (SELECT ROW(g.batch_id, 'completed', false, (g.ended).id, f.kind, coalesce(f.payload, '{}'), f.result, f.meta)::ended_job
                                    FROM (SELECT) one LEFT JOIN finished_jobs f ON f.id = (g.ended).id LIMIT 1)
                              ELSE g.ended END)
        INTO v_ended FROM gone g;
        PERFORM batch_ended(v_ended, false);
    END IF;
    WITH gone AS (
        DELETE FROM batch_additions a WHERE a.batch_id = ANY (p_batches) RETURNING a.batch_id, a.added, a.seals
    )
    UPDATE batches b
    SET added = b.added + n.added, sealed_at = coalesce(b.sealed_at, CASE WHEN n.seals THEN clock() END)
    FROM (SELECT g.batch_id, sum(g.added) AS added, bool_or(g.seals) AS seals FROM gone g GROUP BY g.batch_id) n
    WHERE b.id = n.batch_id;
END $$;

-- Finishes those of these batches that are, seals what they streamed into, cancels what a cancelled one still had below it,
-- and so on down; then whole trees. p_exact: does not trust the counters, which rows that were deleted by hand put wrong.
-- The caller holds the roots. Locks batches FOR UPDATE with SKIP LOCKED: a locked one is being added to. (Here and below CASE
-- keeps the planner off the indexes on all unfinished batches.)
CREATE OR REPLACE FUNCTION advance(p_batches uuid[], p_exact boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_todo  uuid[] := p_batches;
    v_ready uuid[];
    v_done  uuid[];
    v_over  uuid[] := '{}';
BEGIN
    LOOP
        v_ready := ARRAY(
            SELECT b.id FROM batches b
            WHERE b.id = ANY (v_todo) AND CASE WHEN b.finished_at IS NULL THEN b.sealed_at IS NOT NULL ELSE false END
              AND (p_exact OR b.completed + b.dead + b.cancelled >= b.added)
              AND (NOT b.stream OR b.cancelled_at IS NOT NULL
                   OR (SELECT p.finished_at FROM batches p WHERE p.id = b.parent_id) IS NOT NULL)
            FOR UPDATE OF b SKIP LOCKED);
        EXIT WHEN cardinality(v_ready) = 0;
        PERFORM fold(v_ready);
        -- A statement of its own: it sees what those have committed who were adding until now. (Not EXISTS, which might
        -- become a join with all jobs of batches.)
        WITH finished AS (
            UPDATE batches b SET finished_at = clock()
            WHERE b.id = ANY (v_ready)
              AND (SELECT true FROM jobs j WHERE j.batch_id = b.id AND j.status IN ('blocked', 'pending', 'running', 'failed') LIMIT 1) IS NULL
              AND (SELECT true FROM pending_effects p WHERE p.batch_id = b.id LIMIT 1) IS NULL  -- its counters lack something
            RETURNING b.id
        )
        SELECT coalesce(array_agg(f.id), '{}') INTO v_done FROM finished f;
        EXIT WHEN cardinality(v_done) = 0;
        v_over := v_over || v_done;
        UPDATE batches c
        SET sealed_at = coalesce(c.sealed_at, clock()),
            cancelled_at = coalesce(c.cancelled_at, CASE WHEN p.cancelled_at IS NOT NULL THEN clock() END)
        FROM batches p
        WHERE p.id = ANY (v_done) AND c.parent_id = p.id
          AND CASE WHEN c.finished_at IS NULL THEN c.stream OR p.cancelled_at IS NOT NULL ELSE false END;
        -- Above: who was making a child when its parent could have been finished does not come by again.
        v_todo := ARRAY(SELECT c.id FROM batches c WHERE c.parent_id = ANY (v_done))
               || ARRAY(SELECT b.parent_id FROM batches b WHERE b.id = ANY (v_done) AND b.parent_id IS NOT NULL);
    END LOOP;
    IF p_exact OR cardinality(v_over) > 0 THEN
        PERFORM call_back(ARRAY(SELECT DISTINCT b.root_id FROM batches b WHERE b.id = ANY (p_batches || v_over)));
    END IF;
END $$;

-- Marks those of these trees in which every batch is finished, and inserts the job of each root's on_complete; or of its
-- on_failure, if it has one and anything of the tree is dead, expired or was cancelled. The job's payload gets a "batch" that
-- tells what became of the tree. A tree that was reopened inserts neither of the two again. The caller holds the roots.
CREATE OR REPLACE FUNCTION call_back(p_roots uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_over uuid[];
BEGIN
    WITH finished AS (
        UPDATE batches r
        SET tree_finished_at = clock(),
            dedupe_until = CASE WHEN r.cancelled_at IS NULL AND r.dedupe_until > clock() THEN r.dedupe_until END
        WHERE r.id = ANY (p_roots) AND r.finished_at IS NOT NULL AND r.tree_finished_at IS NULL
          AND (SELECT true FROM batches b WHERE b.root_id = r.id AND b.finished_at IS NULL LIMIT 1) IS NULL
        RETURNING r.id
    )
    SELECT array_agg(f.id) INTO v_over FROM finished f;
    IF v_over IS NULL THEN
        RETURN;
    END IF;
    WITH over AS MATERIALIZED (
        SELECT r.id, r.name, t.completed, t.dead, t.cancelled, t.stopped, t.failed, t.failed AND r.on_failure IS NOT NULL AS fails,
               CASE WHEN t.failed AND r.on_failure IS NOT NULL THEN r.on_failure ELSE r.on_complete END AS job,
               CASE WHEN t.failed AND r.on_failure IS NOT NULL THEN r.failure_called ELSE r.completed_called END AS called
        FROM batches r,
             LATERAL (SELECT sum(b.completed) AS completed, sum(b.dead) AS dead, sum(b.cancelled) AS cancelled,
                             bool_or(b.parent_id IS NULL AND b.cancelled_at IS NOT NULL) AS stopped,
                             bool_or(b.dead > 0 OR b.cancelled > 0 OR b.cancelled_at IS NOT NULL) AS failed
                      FROM batches b WHERE b.root_id = r.id) t
        WHERE r.id = ANY (v_over)
    ), noted AS (
        UPDATE batches r SET completed_called = r.completed_called OR NOT o.fails, failure_called = r.failure_called OR o.fails
        FROM over o WHERE r.id = o.id AND o.job IS NOT NULL AND NOT o.called
    )
    INSERT INTO jobs (queue, kind, payload, priority, max_attempts, timeout_s, meta, serialize_key, limit_key)
    SELECT j.queue, j.kind,
           coalesce(j.payload, '{}') || jsonb_build_object('batch', jsonb_build_object(
               'id', t.id, 'name', t.name, 'completed', t.completed, 'dead', t.dead, 'cancelled', t.cancelled,
               'state', CASE WHEN t.stopped THEN 'cancelled' WHEN t.failed THEN 'completed with failures' ELSE 'completed' END)),
           coalesce(j.priority, 0), j.max_attempts, j.timeout_s, j.meta, j.serialize_key, j.limit_key
    FROM over t, LATERAL jsonb_populate_record(NULL::jobs, t.job) j
    WHERE t.job IS NOT NULL AND NOT t.called;
END $$;

-- Marks these batches and all below them as cancelled, where they are not finished; their ids. The caller holds the roots.
CREATE OR REPLACE FUNCTION cancel_below(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_below uuid[] := with_below(p_batches);
BEGIN
    WITH marked AS (
        UPDATE batches b SET cancelled_at = coalesce(b.cancelled_at, clock()), sealed_at = coalesce(b.sealed_at, clock())
        WHERE b.id = ANY (v_below) AND CASE WHEN b.finished_at IS NULL THEN true ELSE false END
        RETURNING b.id
    )
    SELECT coalesce(array_agg(m.id), '{}') INTO v_below FROM marked m;
    RETURN v_below;
END $$;

-- These batches and all below them. Level by level: of a recursive query the planner believes that it finds a great many.
CREATE OR REPLACE FUNCTION with_below(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_level uuid[] := p_batches;
    v_all   uuid[] := p_batches;
BEGIN
    FOR i IN 1..32 LOOP
        v_level := ARRAY(SELECT c.id FROM batches c WHERE c.parent_id = ANY (v_level));
        EXIT WHEN cardinality(v_level) = 0;
        v_all := v_all || v_level;
    END LOOP;
    RETURN v_all;
END $$;

-- Asks running jobs of cancelled batches to stop, and locks waiting ones, which the caller is to bury, up to p_limit in
-- all; without p_keyed only such as have no serialize_key. The caller holds the roots. Locks the jobs with SKIP LOCKED.
CREATE OR REPLACE FUNCTION stop_jobs(p_batches uuid[], p_limit int, p_keyed boolean, OUT waiting uuid[], OUT running uuid[])
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    SELECT coalesce(array_agg(x.id) FILTER (WHERE x.status <> 'running'), '{}'),
           coalesce(array_agg(x.id) FILTER (WHERE x.status = 'running'), '{}')
    INTO waiting, running
    FROM (SELECT j.id, j.status FROM jobs j
          WHERE j.batch_id = ANY (p_batches) AND j.status IN ('blocked', 'pending', 'running', 'failed')
            AND CASE j.status WHEN 'running' THEN j.cancel_requested_at IS NULL ELSE p_keyed OR j.serialize_key IS NULL END
          LIMIT p_limit FOR UPDATE SKIP LOCKED) x;
    UPDATE jobs j SET cancel_requested_at = clock() WHERE j.id = ANY (running);
    PERFORM pg_notify('pgworkd', jsonb_build_object('worker', w.worker_id)::text)
    FROM (SELECT DISTINCT j.worker_id FROM jobs j WHERE j.id = ANY (running)) w;
END $$;

-- Dead jobs that are to run again: counts them as live again, opens those of their batches that are finished, with what
-- streams from these, and their trees, and answers with p_jobs without those whose batch is cancelled. p_call_back: what a
-- tree has called back already it shall call again. A tree whose dedupe_key another one has by now goes on without it. The
-- caller holds the jobs. Locks the roots.
CREATE OR REPLACE FUNCTION reopened(p_jobs uuid[], p_call_back boolean) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_jobs  uuid[];
    v_level uuid[];
BEGIN
    PERFORM lock_trees_of(p_jobs);
    v_jobs := ARRAY(
        SELECT j.id FROM jobs j LEFT JOIN batches b ON b.id = j.batch_id
        WHERE j.id = ANY (p_jobs) AND (j.status <> 'dead' OR b.cancelled_at IS NULL)
        ORDER BY j.id);
    UPDATE batches b SET dead = greatest(b.dead - n.dead, 0)
    FROM (SELECT j.batch_id, count(*) AS dead FROM jobs j
          WHERE j.id = ANY (v_jobs) AND j.status = 'dead' AND j.batch_id IS NOT NULL GROUP BY j.batch_id) n
    WHERE b.id = n.batch_id;
    v_level := ARRAY(SELECT b.id FROM batches b WHERE b.finished_at IS NOT NULL AND b.id = ANY (ARRAY(
        SELECT j.batch_id FROM jobs j WHERE j.id = ANY (v_jobs) AND j.status = 'dead' AND j.batch_id IS NOT NULL)));
    UPDATE batches r
    SET tree_finished_at = NULL,
        completed_called = r.completed_called AND NOT p_call_back, failure_called = r.failure_called AND NOT p_call_back,
        dedupe_key = CASE WHEN o.taken THEN NULL ELSE r.dedupe_key END, dedupe_until = CASE WHEN o.taken THEN NULL ELSE r.dedupe_until END
    FROM batches s, LATERAL (SELECT EXISTS (
        SELECT FROM batches t WHERE t.parent_id IS NULL AND t.name = s.name AND t.dedupe_key = s.dedupe_key AND t.id <> s.id
          AND (t.tree_finished_at IS NULL OR t.dedupe_until IS NOT NULL)) AS taken) o
    WHERE r.id = ANY (ARRAY(SELECT DISTINCT b.root_id FROM batches b WHERE b.id = ANY (v_level))) AND s.id = r.id
      AND r.tree_finished_at IS NOT NULL;
    UPDATE batches b SET finished_at = NULL WHERE b.id = ANY (v_level);
    FOR i IN 1..32 LOOP  -- what completes now has to be streamed on
        v_level := ARRAY(SELECT c.id FROM batches c WHERE c.parent_id = ANY (v_level) AND c.stream AND c.cancelled_at IS NULL);
        EXIT WHEN cardinality(v_level) = 0;
        UPDATE batches b SET finished_at = NULL, sealed_at = NULL WHERE b.id = ANY (v_level);
    END LOOP;
    RETURN v_jobs;
END $$;

-- Cancels a batch and all below it: they take nothing more; waiting jobs end now, up to p_limit, and running ones are asked
-- to stop. `more`: call again, or leave the rest to the chores. A batch that is finished stays as it is. Raises PW003 if
-- there is no such batch. Locks the root, then jobs with SKIP LOCKED, then as promote().
CREATE OR REPLACE FUNCTION cancel_batch(p_batch uuid, p_limit int DEFAULT 1000, p_by text DEFAULT NULL,
                                        OUT cancelled int, OUT requested int, OUT more boolean)
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_was   text;
    v_batch batches;
    v_below uuid[];
    v_jobs  record;
BEGIN
    PERFORM lock_trees(ARRAY[p_batch]);
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    END IF;
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(p_by), 'cancel_batch', v_batch.queue, jsonb_build_object('batch', p_batch, 'cancelled_at', NULL),
           jsonb_build_object('batch', p_batch, 'cancelled_at', clock())
    WHERE v_batch.cancelled_at IS NULL AND v_batch.finished_at IS NULL;
    v_below := cancel_below(ARRAY[p_batch]);
    SELECT s.waiting, s.running INTO v_jobs FROM stop_jobs(v_below, least(greatest(p_limit, 1), 10000), true) s;
    v_was := say_no_wait('on');  -- as in cancel()
    cancelled := bury(v_jobs.waiting, 'cancelled', 'its batch was cancelled', false);
    requested := cardinality(v_jobs.running);
    PERFORM fold(v_below);
    PERFORM advance(v_below, true);
    PERFORM say_no_wait(v_was);
    more := EXISTS (SELECT FROM jobs j WHERE j.batch_id = ANY (v_below) AND (j.status IN ('blocked', 'pending', 'failed')
                                             OR j.status = 'running' AND j.cancel_requested_at IS NULL));
END $$;

-- Deletes a batch and all below it from a tree that is finished; how many. Their dead jobs stay, and can be retried: they
-- belong to no tree any more. Raises PW003 if there is no such batch, or its tree is not finished. Locks the root.
CREATE OR REPLACE FUNCTION delete_batch(p_batch uuid, p_by text DEFAULT NULL) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_batch batches;
    v_gone  int;
BEGIN
    PERFORM lock_trees(ARRAY[p_batch]);
    SELECT b.* INTO v_batch FROM batches b WHERE b.id = p_batch;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    ELSIF EXISTS (SELECT FROM batches r WHERE r.id = v_batch.root_id AND r.tree_finished_at IS NULL) THEN
        RAISE EXCEPTION 'batch % (%) belongs to a tree that is not finished', p_batch, v_batch.name USING ERRCODE = 'PW003',
            HINT = 'Cancel the tree with cancel_batch(), and wait until it is finished.';
    END IF;
    INSERT INTO audit (who, what, queue, before, after)
    VALUES (who(p_by), 'delete_batch', v_batch.queue, jsonb_build_object('batch', p_batch, 'name', v_batch.name),
            jsonb_build_object('batch', p_batch, 'name', NULL));
    DELETE FROM batches b WHERE b.id = ANY (with_below(ARRAY[p_batch]));
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;

-- One part of mend_batches(), which has locked the roots: these batches. Locks those jobs with SKIP LOCKED.
CREATE OR REPLACE FUNCTION mend_these(p_batches uuid[]) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_jobs uuid[];
BEGIN
    PERFORM fold(p_batches);
    SELECT s.waiting INTO v_jobs
    FROM stop_jobs(ARRAY(SELECT b.id FROM batches b WHERE b.id = ANY (p_batches) AND b.cancelled_at IS NOT NULL), 10000, true) s;
    PERFORM advance(p_batches, true);
    RETURN v_jobs;
END $$;

-- Finishes batches that nobody came by to finish: someone was adding when the last job ended and rolled back, or rows were
-- deleted by hand. Answers with waiting jobs of cancelled batches, up to 10,000, for the caller to bury; it has locked
-- them. Locks roots, in order, then those jobs, all with SKIP LOCKED.
CREATE OR REPLACE FUNCTION mend_batches() RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_batches uuid[] := free_batches(ARRAY(
        SELECT a.batch_id FROM batch_additions a WHERE a.seals
        UNION
        SELECT b.id FROM batches b
        WHERE b.sealed_at IS NOT NULL AND b.finished_at IS NULL
          AND (b.cancelled_at IS NOT NULL
               OR (SELECT true FROM jobs j WHERE j.batch_id = b.id AND j.status IN ('blocked', 'pending', 'running', 'failed') LIMIT 1) IS NULL)
        UNION
        SELECT r.id FROM batches r
        WHERE r.parent_id IS NULL AND r.finished_at IS NOT NULL AND r.tree_finished_at IS NULL
          AND (SELECT true FROM batches b WHERE b.root_id = r.id AND b.finished_at IS NULL LIMIT 1) IS NULL));
BEGIN
    RETURN ARRAY(SELECT jsonb_array_elements_text(p.jobs)
                 FROM in_parts('mend_batches', v_batches::text[], 'mend batches') AS p (jobs));
END $$;

-- ------------------------------------------------------------------------------------------------
-- 12 Dependencies
-- A job that waits for others is `blocked` with waiting_on > 0, and has so many rows in job_dependencies; whoever deletes
-- such rows counts down, under the job's row lock. Only the transaction that inserts a job says what it waits for, so nobody
-- else can see the job, or depend on it, before it commits. At its commit it locks what its jobs wait for, for that
-- instant, and looks what has ended meanwhile; who ends jobs looks for their dependents in a statement of its own after its
-- row locks: one of the two sees the other, and no daemon waits for what an application has not committed. What was locked,
-- or ended under REPEATABLE READ, which does not see what others commit, and what is to be cancelled, is left to
-- mend_dependencies().
-- ------------------------------------------------------------------------------------------------

-- For whoever has ended jobs, in a statement of its own after its row locks: whether anyone waits for one of them: all that
-- jobs for which nobody waits pay are two probes of an index. Locks nothing.
CREATE OR REPLACE FUNCTION is_awaited(p_ids uuid[]) RETURNS boolean LANGUAGE sql STABLE
    RETURN EXISTS (SELECT FROM job_dependencies d WHERE d.depends_on = ANY (p_ids))
        OR EXISTS (SELECT FROM result_waiters r WHERE r.job_id = ANY (p_ids));

-- Tells those who wait for these jobs that they have ended. p_completed: else they are dead, cancelled or expired. Sees to
-- 1,000 of their dependents, and 4 more for each of the jobs, at most: the others are put off, so that no end takes long,
-- however many wait for it.
-- Locks the dependents in order of id, which counts down a fan-in one settle at a time; where the jobs have not completed,
-- with SKIP LOCKED, because the caller may hold trees. (Who cancels or retries a job together with one that was inserted
-- before it may meet a settle of that in the other order. Postgres ends one of the two: 40P01. Daemons then try again.)
CREATE OR REPLACE FUNCTION pass_on(p_ids uuid[], p_completed boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_most constant int := 1000 + 4 * cardinality(p_ids);
    v_ids  uuid[];                               -- those of p_ids that v_jobs wait for
    v_jobs uuid[];
    v_full boolean;                              -- there may be more
BEGIN
    SELECT array_agg(DISTINCT d.depends_on), array_agg(DISTINCT d.job_id) FILTER (WHERE p_completed OR d.unless = 'run'),
           count(*) = v_most
    INTO v_ids, v_jobs, v_full
    FROM (SELECT w.depends_on, w.job_id, w.unless FROM job_dependencies w WHERE w.depends_on = ANY (p_ids)
          ORDER BY w.depends_on, w.job_id LIMIT v_most) d;
    IF v_jobs IS NOT NULL THEN
        IF p_completed AND NOT no_wait() THEN
            v_jobs := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_jobs) ORDER BY j.id FOR UPDATE);
        ELSE
            v_jobs := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_jobs) FOR UPDATE SKIP LOCKED);
        END IF;
        PERFORM wait_less(v_jobs, v_ids, p_completed);
    END IF;
    IF v_full OR v_jobs IS NOT NULL AND no_wait() THEN
        PERFORM put_off(NULL, array_agg(u.id), p_completed)
        FROM (SELECT DISTINCT unnest(p_ids) AS id) u
        WHERE EXISTS (SELECT FROM job_dependencies d WHERE d.depends_on = u.id AND (p_completed OR v_full OR d.unless = 'run'))
        HAVING count(*) > 0;
    END IF;
    PERFORM tell_waiters(p_ids);
END $$;

DROP FUNCTION IF EXISTS apply_ends(bigint[]);
-- One part of apply_effects(): the ends of jobs for up to p_limit of those that depend on them, in order of id from where
-- the last call left off; true if the next call can go on at once. Releases them, or cancels them where that is their rule.
-- What is locked, or refused, has its turn in another round, which is not begun at once unless something was done. A job that
-- is dead no longer, but retried, has not ended so: who still waits for it goes on doing so. Each effect that was begun goes
-- to the end of the line, so that none waits for a large one. The caller says no_wait(). Locks dependents with SKIP LOCKED,
-- then as bury().
CREATE OR REPLACE FUNCTION apply_ends(p_limit int) RETURNS boolean
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_effect  pending_effects;
    v_page    record;
    v_one     uuid[];                            -- its job
    v_room    int := p_limit;
    v_effects bigint[] := '{}';                  -- begun here, and up to which dependent: NULL if to the last
    v_to      uuid[] := '{}';
    v_of      bigint[] := '{}';                  -- what there is to do: parallel
    v_ids     uuid[] := '{}';
    v_jobs    uuid[] := '{}';
    v_well    uuid[] := '{}';
    v_badly   uuid[] := '{}';
    v_doomed  uuid[] := '{}';                    -- of v_jobs
    v_free    uuid[];
    v_done    boolean;
    v_rounds  boolean;                           -- another one is to begin
BEGIN
    FOR v_effect IN SELECT p.* FROM pending_effects p WHERE p.job_id IS NOT NULL ORDER BY p.id LIMIT p_limit LOOP
        EXIT WHEN v_room = 0;
        v_one := ARRAY[v_effect.job_id];  -- as an array it keeps the planner off the index on job_id alone
        -- That it is not retried is looked up in the same statement: who can wait for its next end is not seen then.
        SELECT coalesce(array_agg(d.job_id) FILTER (WHERE v_effect.completed OR d.unless <> 'wait'), '{}') AS jobs,
               coalesce(array_agg(d.job_id) FILTER (WHERE NOT v_effect.completed AND d.unless = 'cancel'), '{}') AS doomed,
               (array_agg(d.job_id ORDER BY d.job_id DESC))[1] AS last, count(*)::int AS count
        INTO v_page
        FROM (SELECT w.job_id, w.unless FROM job_dependencies w
              WHERE w.depends_on = ANY (v_one)
                AND w.job_id > coalesce(v_effect.done_to, '00000000-0000-0000-0000-000000000000')
                AND (v_effect.completed
                     OR NOT EXISTS (SELECT FROM jobs j WHERE j.id = v_effect.job_id AND j.status IN ('blocked', 'pending', 'running', 'failed'))
                        AND NOT EXISTS (SELECT FROM pending_effects p WHERE p.job_id = v_effect.job_id AND p.completed))
              ORDER BY w.depends_on, w.job_id LIMIT v_room) d;
        v_effects := v_effects || v_effect.id;
        v_to := array_append(v_to, CASE WHEN v_page.count = v_room THEN v_page.last END);
        v_of := v_of || array_fill(v_effect.id, ARRAY[cardinality(v_page.jobs)]);
        v_ids := v_ids || array_fill(v_effect.job_id, ARRAY[cardinality(v_page.jobs)]);
        v_jobs := v_jobs || v_page.jobs;
        v_doomed := v_doomed || v_page.doomed;
        IF v_effect.completed THEN
            v_well := v_well || v_effect.job_id;
        ELSIF v_page.count > 0 THEN  -- else it may be one that was retried, for which others of v_jobs wait, too
            v_badly := v_badly || v_effect.job_id;
        END IF;
        v_room := v_room - v_page.count;
    END LOOP;
    v_free := ARRAY(SELECT u FROM unnest(v_jobs) u EXCEPT SELECT u FROM unnest(v_doomed) u);
    v_free := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_free) AND j.waiting_on > 0 FOR UPDATE SKIP LOCKED);
    v_done := EXISTS (SELECT FROM in_parts('apply_effects', v_free::text[], 'wait less',
                                                jsonb_build_object('well', v_well, 'badly', v_badly)));
    IF cardinality(v_doomed) > 0 THEN
        v_free := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (v_doomed) AND j.waiting_on > 0 FOR UPDATE SKIP LOCKED);
        v_done := EXISTS (SELECT FROM in_parts('apply_effects', v_free::text[], 'cancel dependents')) OR v_done;
    END IF;
    WITH waits AS MATERIALIZED (
        SELECT DISTINCT u.effect FROM unnest(v_of, v_ids, v_jobs) AS u (effect, id, job)
        WHERE EXISTS (SELECT FROM job_dependencies d WHERE d.depends_on = u.id AND d.job_id = u.job)
          AND EXISTS (SELECT FROM jobs j WHERE j.id = u.job AND j.waiting_on > 0)
    ), begun AS (
        DELETE FROM pending_effects p WHERE p.id = ANY (v_effects) RETURNING p.*
    ), again AS (
        INSERT INTO pending_effects (job_id, completed, put_off_at, done_to, left_behind)
        SELECT b.job_id, b.completed, b.put_off_at, u.done_to, u.done_to IS NOT NULL AND (b.left_behind OR w.effect IS NOT NULL)
        FROM begun b JOIN unnest(v_effects, v_to) AS u (id, done_to) ON u.id = b.id LEFT JOIN waits w ON w.effect = b.id
        WHERE u.done_to IS NOT NULL OR b.left_behind OR w.effect IS NOT NULL
        ORDER BY b.id
        RETURNING done_to
    )
    SELECT coalesce(bool_or(a.done_to IS NULL), false) INTO v_rounds FROM again a;
    RETURN v_room = 0 AND (v_done OR NOT v_rounds);
END $$;

-- The same: serialize_keys that are free. The caller has locked the queues. Locks as promote().
CREATE OR REPLACE FUNCTION apply_frees(p_effects bigint[]) RETURNS void
LANGUAGE sql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    WITH gone AS (
        DELETE FROM pending_effects p WHERE p.id = ANY (p_effects) RETURNING p.queue, p.serialize_key
    )
    SELECT promote(array_agg(g.queue), array_agg(g.serialize_key)) FROM gone g HAVING count(*) > 0
$$;

-- Does what was put off, up to p_limit of each kind, where nobody has locked it by now; how much is left, less than 0 if the
-- next call can go on at once, or NULL if another does it right now. Waits for nobody. Locks queues by try-lock, roots and dependents with SKIP LOCKED.
CREATE OR REPLACE FUNCTION apply_effects(p_limit int DEFAULT 1000) RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    v_rows    bigint[];
    v_queues  text[];
    v_batches uuid[];
    v_more    boolean;
BEGIN
    IF NOT EXISTS (SELECT FROM pending_effects) THEN
        RETURN 0;
    ELSIF NOT pg_try_advisory_xact_lock(1886873445, 7) THEN
        RETURN NULL;
    END IF;
    PERFORM say_no_wait('apply');
    v_batches := free_batches(ARRAY(SELECT DISTINCT x.batch_id FROM (
        SELECT p.batch_id FROM pending_effects p
        WHERE p.batch_id IS NOT NULL
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'apply_effects' AND r.key = p.batch_id::text AND r.until > clock())
        ORDER BY p.id LIMIT p_limit) x));
    PERFORM in_parts('apply_effects', v_batches::text[], 'fold batches');
    v_more := apply_ends(p_limit);
    -- Last, so that no queue is held for longer than this takes.
    SELECT array_agg(q.queue) FILTER (WHERE pg_try_advisory_xact_lock(1886873446, hashtext(q.queue))) INTO v_queues
    FROM (SELECT DISTINCT p.queue FROM pending_effects p WHERE p.queue IS NOT NULL) q;
    v_rows := ARRAY(
        SELECT p.id FROM pending_effects p
        WHERE p.queue = ANY (v_queues)
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'apply_effects' AND r.key = p.id::text AND r.until > clock())
        ORDER BY p.id LIMIT p_limit);
    PERFORM say_no_wait('frees');  -- the queues are locked
    PERFORM in_parts('apply_effects', v_rows::text[], 'apply frees');
    PERFORM say_no_wait('');
    RETURN (SELECT count(*) FROM (SELECT FROM pending_effects LIMIT 10000) x) * CASE WHEN v_more THEN -1 ELSE 1 END;
END $$;

-- Deletes what these jobs, which the caller holds, wait for among p_ids (unless p_completed: where that does not matter), counts
-- down, and releases those that wait for nothing more, due from now on at the earliest.
CREATE OR REPLACE FUNCTION wait_less(p_jobs uuid[], p_ids uuid[], p_completed boolean) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_wake text[];
BEGIN
    IF coalesce(cardinality(p_ids), 0) = 0 THEN
        RETURN;
    END IF;
    WITH gone AS (
        DELETE FROM job_dependencies d
        WHERE d.depends_on = ANY (p_ids) AND d.job_id = ANY (p_jobs) AND (p_completed OR d.unless = 'run')
        RETURNING d.job_id
    ), moved AS (
        UPDATE jobs j
        SET waiting_on = j.waiting_on - n.less,
            status = CASE WHEN j.waiting_on > n.less THEN 'blocked' ELSE 'pending' END::job_status,
            run_at = CASE WHEN j.waiting_on > n.less THEN j.run_at ELSE greatest(j.run_at, clock()) END
        FROM (SELECT g.job_id, count(*)::int AS less FROM gone g GROUP BY g.job_id) n
        WHERE j.id = n.job_id AND j.waiting_on > 0
        RETURNING j.queue::text, j.status
    )
    SELECT array_agg(DISTINCT m.queue) FILTER (WHERE m.status = 'pending') INTO v_wake FROM moved m;
    PERFORM wake(v_wake);
END $$;

-- The day before the oldest of these jobs was made, by the time in their ids: what became of them is not in older partitions
-- of the history, unless a client's clock was wrong. NULL unless all are uuids of version 7.
CREATE OR REPLACE FUNCTION made_since(p_ids uuid[]) RETURNS timestamptz
LANGUAGE sql IMMUTABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    SELECT CASE WHEN bool_and(substr(i::text, 15, 1) = '7')
                THEN to_timestamp(('x' || substr(replace(min(i::text), '-', ''), 1, 12))::bit(48)::bigint / 1000.0) - interval '1 day' END
    FROM unnest(p_ids) i
$$;

-- What has become of jobs: their status, `discarded` if it is over because it was dead, or `gone`. Locks nothing. Reads the partitions in which they can be, and all others only for those that are not found there.
-- Planned anew each time, so that only those partitions are locked.
CREATE OR REPLACE FUNCTION became_all(p_ids uuid[]) RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
    v_since timestamptz := made_since(p_ids);
    v_rest  uuid[];
BEGIN
    RETURN QUERY SELECT j.id, j.status::text FROM jobs j WHERE j.id = ANY (p_ids) AND j.status <> 'completed';
    v_rest := ARRAY(SELECT i FROM unnest(p_ids) i
                    EXCEPT SELECT j.id FROM jobs j WHERE j.id = ANY (p_ids) AND j.status <> 'completed');
    IF v_since IS NOT NULL AND cardinality(v_rest) > 0 THEN
        RETURN QUERY SELECT f.id, CASE f.status WHEN 'dead' THEN 'discarded' ELSE f.status::text END
                     FROM finished_jobs f WHERE f.id = ANY (v_rest) AND f.finished_at >= v_since;
        v_rest := ARRAY(SELECT i FROM unnest(v_rest) i
                        EXCEPT SELECT f.id FROM finished_jobs f WHERE f.id = ANY (v_rest) AND f.finished_at >= v_since);
    END IF;
    IF cardinality(v_rest) > 0 THEN
        RETURN QUERY SELECT i, coalesce((SELECT CASE f.status WHEN 'dead' THEN 'discarded' ELSE f.status::text END
                                         FROM finished_jobs f WHERE f.id = i LIMIT 1), 'gone')
                     FROM unnest(v_rest) i;
    END IF;
END $$;

-- The same of one. Asks became_all() only for what is over, so that of a live one no partition of the history is locked.
CREATE OR REPLACE FUNCTION became(p_id uuid) RETURNS text LANGUAGE sql STABLE
    RETURN coalesce((SELECT j.status::text FROM jobs j WHERE j.id = p_id AND j.status <> 'completed'),
                    (SELECT b.status FROM became_all(ARRAY[p_id]) b));

-- True if the row was written by this transaction, in a savepoint or not: it is to be seen, yet its transaction is in
-- progress. (xmin has 32 bits: the nearest of all such numbers is meant.)
CREATE OR REPLACE FUNCTION is_ours(p_xmin xid) RETURNS boolean LANGUAGE sql VOLATILE
    RETURN coalesce(pg_xact_status(((pg_current_xact_id()::text::bigint - 2147483648)
        + ((p_xmin::text::bigint - pg_current_xact_id()::text::bigint + 2147483648) & 4294967295))::text::xid8) = 'in progress', false);

-- Lets a job, which this very transaction has inserted, wait until all of p_after have completed; what has completed already
-- is passed over. p_unless: what to do if one of them dies, is cancelled or expires: 'wait' (until it is retried and
-- completes, or undepend()), 'cancel' this one, too, within a minute or so, or 'run' it all the same. What is said first of a
-- pair holds. Answers how many jobs it waits for now that it did not before. Raises PW004 where that would never end:
-- the job itself, a circle, one that is not there, or, but for 'run', one that can no longer complete. Locks p_after in
-- order of id for the instant of the commit; see check_dependencies().
CREATE OR REPLACE FUNCTION depend(p_job uuid, p_after uuid[], p_unless text DEFAULT 'wait') RETURNS int
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_wrong text := CASE
        WHEN p_job IS NULL THEN 'p_job must not be NULL'
        WHEN p_after IS NULL OR array_position(p_after, NULL) IS NOT NULL THEN 'p_after must not be, or contain, NULL'
        WHEN cardinality(p_after) > 10000 THEN 'p_after has more than 10000 jobs: add them by several calls'
        WHEN p_unless IS NULL OR p_unless NOT IN ('wait', 'cancel', 'run') THEN 'p_unless must be wait, cancel or run' END;
    v_after uuid[];
    v_never uuid;                                -- the first that cannot be waited for
    v_count int;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    ELSIF NOT coalesce((SELECT is_ours(j.xmin) AND j.status IN ('pending', 'blocked') FROM jobs j WHERE j.id = p_job), false) THEN
        RAISE EXCEPTION 'job % was not inserted by this transaction', p_job USING ERRCODE = 'PW004',
            HINT = 'Say what a job waits for in the transaction that inserts it: later it may already be running.';
    ELSIF p_job = ANY (p_after) THEN
        RAISE EXCEPTION 'job % cannot wait for itself', p_job USING ERRCODE = 'PW004', HINT = 'Leave it out of p_after.';
    ELSIF EXISTS (SELECT FROM job_dependencies d WHERE d.depends_on = p_job) AND p_job = ANY (ARRAY(
            WITH RECURSIVE above AS (
                SELECT unnest(p_after) AS id
                UNION
                SELECT d.depends_on FROM above a JOIN job_dependencies d ON d.job_id = a.id
            )
            SELECT a.id FROM above a)) THEN
        RAISE EXCEPTION 'job % would wait, by way of others, for itself', p_job USING ERRCODE = 'PW004',
            HINT = 'Jobs that wait for each other in a circle would never run: leave one of them out of p_after.';
    END IF;
    WITH a AS MATERIALIZED (
        SELECT b.id, b.status FROM became_all(ARRAY(SELECT DISTINCT unnest(p_after))) b
    )
    SELECT array_agg(a.id) FILTER (WHERE a.status IN ('blocked', 'pending', 'running', 'failed')
                                         OR a.status = 'dead' AND p_unless = 'wait'),
           (array_agg(a.id ORDER BY a.id) FILTER (
               WHERE a.status = 'gone' OR a.status IN ('cancelled', 'expired', 'discarded') AND p_unless <> 'run'
                  OR a.status = 'dead' AND p_unless = 'cancel'))[1]
    INTO v_after, v_never FROM a;
    IF v_never IS NOT NULL THEN
        RAISE EXCEPTION 'job % cannot wait for %, which %', p_job, v_never,
            (SELECT CASE b WHEN 'gone' THEN 'does not exist' WHEN 'expired' THEN 'has expired' WHEN 'dead' THEN 'is dead'
                           ELSE 'was ' || b END FROM became(v_never) b)
            USING ERRCODE = 'PW004', HINT = CASE became(v_never)
                WHEN 'gone' THEN 'Check the id: its insert may have been rolled back, or its queue keeps no history.'
                ELSE 'It will not complete: leave it out, or say p_unless => ''run''.' END;
    END IF;
    WITH added AS (
        INSERT INTO job_dependencies (job_id, depends_on, unless, unchecked)
        SELECT p_job, u.id, p_unless, u.place = 1 FROM unnest(v_after) WITH ORDINALITY AS u (id, place)
        ON CONFLICT DO NOTHING
        RETURNING depends_on
    )
    SELECT count(*) INTO v_count FROM added a;
    UPDATE jobs j SET status = 'blocked', waiting_on = j.waiting_on + v_count WHERE j.id = p_job AND v_count > 0;
    RETURN v_count;
END $$;

-- Before a transaction commits that has made jobs wait: locks all that they wait for, in order of id, FOR SHARE (what has
-- changed since the snapshot of a REPEATABLE READ is then 40001), and looks which of those have ended in between.
CREATE OR REPLACE FUNCTION check_dependencies() RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_jobs  uuid[];
    v_after uuid[];
    v_ended record;
BEGIN
    WITH checked AS (UPDATE job_dependencies d SET unchecked = false WHERE d.unchecked RETURNING d.job_id)
    SELECT array_agg(DISTINCT c.job_id) INTO v_jobs FROM checked c;
    IF v_jobs IS NULL THEN
        RETURN;
    END IF;
    v_after := ARRAY(SELECT DISTINCT d.depends_on FROM job_dependencies d WHERE d.job_id = ANY (v_jobs));
    PERFORM FROM jobs j WHERE j.id = ANY (v_after) ORDER BY j.id FOR SHARE;
    SELECT array_agg(a.id) FILTER (WHERE a.status = 'completed') AS well,
           array_agg(a.id) FILTER (WHERE a.status NOT IN ('completed', 'blocked', 'pending', 'running', 'failed')) AS badly,
           array_agg(a.id) FILTER (WHERE a.status = 'gone') AS gone
    INTO v_ended
    FROM became_all(v_after) a;
    IF EXISTS (SELECT FROM job_dependencies d WHERE d.job_id = ANY (v_jobs) AND d.depends_on = ANY (v_ended.gone) AND d.unless <> 'run') THEN
        RAISE EXCEPTION 'job % has ended before this transaction committed, and nothing says how', v_ended.gone[1]
            USING ERRCODE = 'PW004', HINT = 'Its queue keeps no history. Run the transaction again.';
    END IF;
    IF v_ended.well IS NOT NULL THEN
        PERFORM wait_less(v_jobs, v_ended.well, true);
    END IF;
    IF v_ended.badly IS NOT NULL THEN
        PERFORM wait_less(v_jobs, v_ended.badly, false);
    END IF;
END $$;

-- At the end of a transaction that has made jobs wait: the first call sees to all of them. Locks as check_dependencies().
CREATE OR REPLACE FUNCTION dependencies_added() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp AS $$
BEGIN
    PERFORM check_dependencies();
    RETURN NULL;
END $$;
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = 'pgworkd.job_dependencies'::regclass AND t.tgname = 'dependencies_added') THEN
        CREATE CONSTRAINT TRIGGER dependencies_added AFTER INSERT ON job_dependencies
            DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.unchecked) EXECUTE FUNCTION dependencies_added();
    END IF;
END $$;

DROP FUNCTION IF EXISTS mend_dependencies();
-- Sees to dependents that nobody came by to release, and cancels those that go with a job that did not complete, and with them
-- those that go with these, and so on down: up to p_limit of each. Forgets what jobs waited for that have ended themselves.
-- Answers how many it changed: p_limit or more if there may be more. A job whose dependents are put off is left to
-- apply_effects(): its queue may keep no history, and then only the effect says whether it has completed. Reads all rows of
-- job_dependencies. Locks dependents with SKIP LOCKED, then as bury().
CREATE OR REPLACE FUNCTION mend_dependencies(p_limit int DEFAULT 1000) RETURNS int
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET jit = off AS $$
DECLARE
    v_ended record;
    v_jobs  uuid[];
    v_count int;
BEGIN
    IF NOT pg_try_advisory_xact_lock(1886873445, 6) THEN
        RETURN 0;
    END IF;
    PERFORM say_no_wait('on');
    SELECT array_agg(a.id) FILTER (WHERE a.status = 'completed') AS well,
           array_agg(a.id) FILTER (WHERE a.status <> 'completed') AS badly
    INTO v_ended
    FROM became_all(ARRAY(SELECT DISTINCT d.depends_on FROM job_dependencies d LEFT JOIN jobs p ON p.id = d.depends_on
                          WHERE (p.id IS NULL OR p.status IN ('dead', 'completed'))
                            AND NOT EXISTS (SELECT FROM pending_effects e WHERE e.job_id = d.depends_on))) a;
    v_jobs := ARRAY(SELECT DISTINCT x.id FROM (
        SELECT j.id FROM job_dependencies d JOIN jobs j ON j.id = d.job_id
        WHERE (d.depends_on = ANY (v_ended.well) OR d.depends_on = ANY (v_ended.badly) AND d.unless = 'run') AND j.waiting_on > 0
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'mend_dependencies' AND r.key = j.id::text AND r.until > clock())
        LIMIT p_limit FOR UPDATE OF j SKIP LOCKED) x);
    SELECT coalesce(sum(p.released::int), 0) INTO v_count
    FROM in_parts('mend_dependencies', v_jobs::text[], 'wait less', to_jsonb(v_ended)) AS p (released);
    v_jobs := ARRAY(
        SELECT j.id FROM (
            WITH RECURSIVE doomed AS (
                SELECT d.job_id AS id FROM job_dependencies d WHERE d.depends_on = ANY (v_ended.badly) AND d.unless = 'cancel'
                UNION
                SELECT d.job_id FROM doomed a JOIN job_dependencies d ON d.depends_on = a.id WHERE d.unless = 'cancel'
            )
            SELECT a.id FROM doomed a) x JOIN jobs j ON j.id = x.id
        WHERE j.waiting_on > 0
          AND NOT EXISTS (SELECT FROM refused_rows r WHERE r.what = 'mend_dependencies' AND r.key = j.id::text AND r.until > clock())
        LIMIT p_limit FOR UPDATE OF j SKIP LOCKED);
    SELECT v_count + coalesce(sum(p.buried::int), 0) INTO v_count FROM in_parts('mend_dependencies', v_jobs::text[], 'cancel dependents') AS p (buried);
    DELETE FROM job_dependencies d
    WHERE d.ctid = ANY (ARRAY(SELECT o.ctid FROM job_dependencies o
                              WHERE NOT EXISTS (SELECT FROM jobs j WHERE j.id = o.job_id AND j.waiting_on > 0) LIMIT 100 * p_limit));
    RETURN v_count;
END $$;

-- Lets jobs that wait for others run all the same, now; answers with those it changed. Locks the jobs in order of id.
CREATE OR REPLACE FUNCTION undepend(p_jobs uuid[], p_by text DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    v_who text := who(p_by);
    v_ids uuid[] := ARRAY(SELECT j.id FROM jobs j WHERE j.id = ANY (p_jobs) AND j.waiting_on > 0 ORDER BY j.id FOR UPDATE);
BEGIN
    INSERT INTO audit (who, what, queue, job_id, before, after)
    SELECT v_who, 'undepend', j.queue, j.id, jsonb_build_object('status', j.status, 'waiting_on', j.waiting_on),
           '{"status": "pending", "waiting_on": 0}'
    FROM jobs j WHERE j.id = ANY (v_ids) ORDER BY j.id;
    DELETE FROM job_dependencies d WHERE d.job_id = ANY (v_ids);
    UPDATE jobs j SET status = 'pending', waiting_on = 0, run_at = greatest(j.run_at, clock()) WHERE j.id = ANY (v_ids);
    PERFORM wake(ARRAY(SELECT j.queue::text FROM jobs j WHERE j.id = ANY (v_ids)));
    RETURN v_ids;
END $$;

-- ------------------------------------------------------------------------------------------------
-- 13 Results and progress
-- ------------------------------------------------------------------------------------------------

-- Tells who listens that some of these jobs are over: NOTIFY on their channels with a JSON array of ids, up to 190 in each
-- notice (8,000 bytes are the most). Locks nothing: that a job is over once does not end the waiting, a dead one may be retried.
CREATE OR REPLACE FUNCTION tell_waiters(p_ids uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    PERFORM pg_notify(g.channel, g.ids)
    FROM (SELECT w.channel, jsonb_agg(w.job_id ORDER BY w.job_id)::text AS ids
          FROM (SELECT r.channel, r.job_id, (row_number() OVER (PARTITION BY r.channel ORDER BY r.job_id) - 1) / 190 AS part
                FROM result_waiters r WHERE r.job_id = ANY (p_ids) AND r.until > clock()) w
          GROUP BY w.channel, w.part) g;
END $$;

-- Says that whoever LISTENs on p_channel waits for these jobs for p_for_s, and answers with those that are over: their status,
-- `dead` and `gone` (unknown, or forgotten) included; those are no longer waited for. A job that ends while this call
-- commits may be missed by both: so ask again soon, and from time to time as long as some are left. Locks rows of
-- result_waiters in order, which only others that wait on the same channel would meet.
CREATE OR REPLACE FUNCTION await_results(p_jobs uuid[], p_channel text, p_for_s float8) RETURNS TABLE (id uuid, status text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pgworkd, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_over    uuid[];
    v_became  text[];
    v_wrong   text := CASE
        WHEN p_jobs IS NULL OR array_position(p_jobs, NULL) IS NOT NULL THEN 'p_jobs must not be, or contain, NULL'
        WHEN cardinality(p_jobs) > 10000 THEN 'p_jobs has more than 10000 jobs: wait for them by several calls'
        WHEN p_channel IS NULL OR octet_length(p_channel) NOT BETWEEN 1 AND 63 THEN 'p_channel must have 1 to 63 bytes'
        WHEN p_for_s IS NULL OR NOT p_for_s BETWEEN 1 AND 86400 THEN 'p_for_s must be 1 to 86400' END;
BEGIN
    IF v_wrong IS NOT NULL THEN
        RAISE EXCEPTION '%', v_wrong USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO result_waiters (job_id, channel, until)
    SELECT DISTINCT u.id, p_channel, clock() + make_interval(secs => p_for_s) FROM unnest(p_jobs) AS u (id) ORDER BY u.id
    ON CONFLICT (job_id, channel) DO UPDATE SET until = excluded.until;
    SELECT array_agg(a.id) FILTER (WHERE a.status NOT IN ('blocked', 'pending', 'running', 'failed')),
           array_agg(a.status) FILTER (WHERE a.status NOT IN ('blocked', 'pending', 'running', 'failed'))
    INTO v_over, v_became
    FROM became_all(ARRAY(SELECT DISTINCT unnest(p_jobs))) a;
    DELETE FROM result_waiters r WHERE r.channel = p_channel AND r.job_id = ANY (v_over);
    RETURN QUERY SELECT o.id, o.status FROM unnest(v_over, v_became) AS o (id, status);
END $$;

-- What has become of jobs, wherever they are; without a row: unknown, or forgotten (a queue with keep_s = 0 keeps no result).
-- Reads partitions of the history as became_all(). Locks nothing.
CREATE OR REPLACE FUNCTION result_of(p_jobs uuid[])
RETURNS TABLE (id uuid, status text, result jsonb, error text, finished_at timestamptz)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET plan_cache_mode = force_custom_plan AS $$
#variable_conflict use_column
DECLARE
    v_since timestamptz := made_since(p_jobs);
    v_rest  uuid[];
BEGIN
    RETURN QUERY SELECT j.id, j.status::text, NULL::jsonb, j.error::text, NULL::timestamptz FROM jobs j
                 WHERE j.id = ANY (p_jobs) AND j.status <> 'completed';
    v_rest := ARRAY(SELECT i FROM unnest(p_jobs) i
                    EXCEPT SELECT j.id FROM jobs j WHERE j.id = ANY (p_jobs) AND j.status <> 'completed');
    IF v_since IS NOT NULL AND cardinality(v_rest) > 0 THEN
        RETURN QUERY SELECT f.id, f.status::text, f.result::jsonb, f.error::text, f.finished_at::timestamptz
                     FROM finished_jobs f WHERE f.id = ANY (v_rest) AND f.finished_at >= v_since;
        v_rest := ARRAY(SELECT i FROM unnest(v_rest) i
                        EXCEPT SELECT f.id FROM finished_jobs f WHERE f.id = ANY (v_rest) AND f.finished_at >= v_since);
    END IF;
    IF cardinality(v_rest) > 0 THEN
        RETURN QUERY SELECT f.id, f.status::text, f.result::jsonb, f.error::text, f.finished_at::timestamptz FROM finished_jobs f WHERE f.id = ANY (v_rest);
    END IF;
END $$;

-- A page of the results of a batch and all below it: of its final batches; if none is final, of those without children; of
-- all of them if p_all. Completed jobs only, without those that only made others of what was streamed. In order of batch and
-- id; p_after_batch and p_after are those of the last row of the page before. All there is to come is there when the tree
-- is finished, as long as the history keeps it: queues with keep_s = 0 leave no results. Raises PW003 if there is no such
-- batch. Locks nothing.
CREATE OR REPLACE FUNCTION batch_results(p_batch uuid, p_all boolean DEFAULT false, p_after_batch uuid DEFAULT NULL,
                                         p_after uuid DEFAULT NULL, p_limit int DEFAULT 1000)
RETURNS TABLE (batch_id uuid, batch text, id uuid, payload jsonb, result jsonb)
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    v_below uuid[];
    v_final boolean;
    v_batch batches;
    v_left  int := least(greatest(coalesce(p_limit, 1000), 1), 10000);
    v_from  uuid;
    v_found int;
BEGIN
    IF NOT EXISTS (SELECT FROM batches b WHERE b.id = p_batch) THEN
        RAISE EXCEPTION 'batch % does not exist', p_batch USING ERRCODE = 'PW003', HINT = 'Check the id: the batch may have been deleted.';
    ELSIF (p_after_batch IS NULL) <> (p_after IS NULL) THEN
        RAISE EXCEPTION 'p_after and p_after_batch go together' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_below := with_below(ARRAY[p_batch]);
    v_final := EXISTS (SELECT FROM batches b WHERE b.id = ANY (v_below) AND b.final);
    FOR v_batch IN
        SELECT b.* FROM batches b
        WHERE b.id = ANY (v_below) AND (p_after_batch IS NULL OR b.id >= p_after_batch)
          AND (p_all OR CASE WHEN v_final THEN b.final ELSE NOT EXISTS (SELECT FROM batches c WHERE c.parent_id = b.id) END)
        ORDER BY b.id
    LOOP
        v_from := CASE WHEN v_batch.id = p_after_batch THEN p_after ELSE '00000000-0000-0000-0000-000000000000' END;
        RETURN QUERY
        SELECT f.batch_id, v_batch.name::text, f.id, f.payload, f.result::jsonb FROM finished_jobs f
        WHERE f.batch_id = v_batch.id AND f.id > v_from AND f.status = 'completed'
          AND (v_batch.stream_kind IS NULL OR f.kind IS DISTINCT FROM v_batch.stream_kind)
        ORDER BY f.id LIMIT v_left;
        GET DIAGNOSTICS v_found = ROW_COUNT;
        v_left := v_left - v_found;
        EXIT WHEN v_left = 0;
    END LOOP;
END $$;

DROP FUNCTION IF EXISTS report_progress(uuid[], int[], real[], text[]);
-- Notes how far running jobs are: `done` from 0 to 1, and a message, of which 500 characters are kept. Answers with those
-- whose attempt is still the running one, by the fence of the settles; of others nothing is noted. Locks rows of `progress`
-- in order of job_id.
CREATE OR REPLACE FUNCTION report_progress(p_ids uuid[], p_attempts int[], p_done real[], p_messages text[],
                                           p_worker int DEFAULT NULL, p_token uuid DEFAULT NULL) RETURNS uuid[]
LANGUAGE plpgsql VOLATILE SET search_path = pgworkd, pg_catalog, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_nestloop = on
SET jit = off SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    v_won uuid[];
BEGIN
    WITH noted AS (
        INSERT INTO progress AS p (job_id, at, attempt, done, message)
        SELECT j.id, clock(), j.attempts, u.done, left(u.message, 500)
        FROM unnest(p_ids, p_attempts, p_done, p_messages) AS u (id, attempt, done, message)
        JOIN jobs j ON j.id = u.id AND j.attempts = u.attempt AND j.status = 'running'
        WHERE p_worker IS NULL OR j.worker_id = p_worker AND NOT EXISTS (SELECT FROM workers w WHERE w.id = p_worker AND w.token <> p_token)
        ORDER BY j.id
        ON CONFLICT (job_id) DO UPDATE
        SET at = excluded.at, attempt = excluded.attempt, done = excluded.done, message = excluded.message
        WHERE p.attempt <= excluded.attempt
        RETURNING job_id
    )
    SELECT array_agg(n.job_id) INTO v_won FROM noted n;
    RETURN coalesce(v_won, '{}');
END $$;

-- ------------------------------------------------------------------------------------------------
-- 14 Views
-- ------------------------------------------------------------------------------------------------

DO $$  -- as they were when a claim was called a start, and a discarded job dead; only here are rights on them lost
BEGIN
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass('pgworkd.all_jobs') AND a.attname = 'started_at' AND a.attnum < 13) THEN
        DROP VIEW all_jobs;
    END IF;
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass('pgworkd.job_progress') AND a.attname = 'started_at') THEN
        DROP VIEW job_progress;
    END IF;
END $$;

-- Every job there is, live or over, in the order people read. A dead one is `dead`; one that was discarded, by someone or by
-- its age, is `discarded`. `claimed_at`: when a worker took the last attempt; its handler starts when there is a slot for it:
-- `started_at`, of what has completed. Each entry of `errors` has `at`, when an attempt failed, and how long it `ran_s`.
CREATE OR REPLACE VIEW all_jobs AS
SELECT id, queue::text, coalesce(kind, queue)::text AS kind, status::text, payload::jsonb, NULL::jsonb AS result, priority,
       run_at::timestamptz, created_at::timestamptz, started_at::timestamptz AS claimed_at, failed_at::timestamptz, NULL::timestamptz AS finished_at, attempts, failures,
       max_attempts::int, error, errors::jsonb, worker_id, schedule::text, occurrence::timestamptz, dedupe_key::text, serialize_key::text,
       batch_id, meta::jsonb, limit_key::text, expires_at::timestamptz, NULL::timestamptz AS started_at
FROM jobs WHERE status <> 'completed'
UNION ALL
SELECT id, queue, coalesce(kind, queue), CASE status WHEN 'dead' THEN 'discarded' ELSE status::text END, payload, result, priority,
       run_at, created_at, started_at, failed_at, finished_at, attempts, failures,
       max_attempts, error, errors, worker_id, schedule, occurrence, dedupe_key, serialize_key,
       batch_id, meta, limit_key, expires_at, began_at
FROM finished_jobs;

-- The pools, as far as this server knows them: a standby does not have what is unlogged, and would refuse to look. It answers
-- with none. For whoever only reads. Locks nothing.
CREATE OR REPLACE FUNCTION known_pools() RETURNS SETOF pools
LANGUAGE plpgsql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
BEGIN
    IF NOT pg_is_in_recovery() THEN
        RETURN QUERY SELECT * FROM pools;
    END IF;
END $$;

-- One row per queue that has live jobs, a worker or settings. Workers and slots: of those whose lease is not over.
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
    FROM jobs j WHERE j.status <> 'completed' GROUP BY j.queue
), fleet AS (
    SELECT p.queue::text AS queue, count(*) AS workers, sum(p.concurrency) AS slots
    FROM known_pools() p JOIN workers w ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > clock() GROUP BY p.queue
)
SELECT n.queue, coalesce(c.due, 0) AS due, coalesce(c.scheduled, 0) AS scheduled, coalesce(c.running, 0) AS running,
       coalesce(c.failed, 0) AS failed, coalesce(c.blocked, 0) AS blocked, coalesce(c.dead, 0) AS dead,
       extract(epoch FROM clock() - c.oldest_due_at)::float8 AS oldest_due_s,
       coalesce(f.workers, 0) AS workers, coalesce(f.slots, 0) AS slots, q.paused_until
FROM (SELECT queue FROM counts UNION SELECT queue FROM fleet UNION SELECT name FROM queues) n
LEFT JOIN counts c ON c.queue = n.queue
LEFT JOIN fleet f ON f.queue = n.queue
LEFT JOIN queues q ON q.name = n.queue;

-- One row per batch, from its counters and what was added since; no job is counted. `done`: completed, dead or cancelled.
CREATE OR REPLACE VIEW batch_progress AS
SELECT b.id, b.root_id, b.parent_id, b.name::text, b.depth, b.queue::text, b.kind::text,
       CASE WHEN b.finished_at IS NULL AND b.cancelled_at IS NOT NULL THEN 'cancelling'
            WHEN b.finished_at IS NULL AND (b.sealed_at IS NOT NULL OR a.seals) THEN 'sealed'
            WHEN b.finished_at IS NULL THEN 'open'
            WHEN b.cancelled_at IS NOT NULL THEN 'cancelled'
            WHEN b.dead + b.cancelled > 0 THEN 'completed with failures'
            ELSE 'completed' END AS state,
       b.added + coalesce(a.added, 0)::bigint AS total, b.completed + b.dead + b.cancelled AS done,
       b.completed, b.dead, b.cancelled, b.max_failures, b.stream, b.final, b.dedupe_key::text,
       b.created_at, b.sealed_at, b.cancelled_at, b.finished_at, b.tree_finished_at, b.dedupe_until
FROM batches b
LEFT JOIN LATERAL (SELECT sum(x.added) AS added, bool_or(x.seals) AS seals FROM batch_additions x WHERE x.batch_id = b.id) a ON true;

-- The same for a batch and all below it, each before its children, which come in the order in which they were made.
CREATE OR REPLACE FUNCTION batch_tree(p_batch uuid) RETURNS SETOF batch_progress
LANGUAGE sql STABLE SET search_path = pgworkd, pg_catalog, pg_temp AS $$
    WITH RECURSIVE tree AS (
        SELECT b.id, ARRAY[b.id] AS path FROM batches b WHERE b.id = p_batch
        UNION ALL
        SELECT c.id, t.path || c.id FROM tree t JOIN batches c ON c.parent_id = t.id
    )
    SELECT p.* FROM tree t JOIN batch_progress p ON p.id = t.id ORDER BY t.path
$$;

-- One row per tree of batches, by its root: the sums of what batch_progress says.
CREATE OR REPLACE VIEW batch_trees AS
SELECT r.id, r.name::text, r.queue::text,
       CASE WHEN r.tree_finished_at IS NULL THEN CASE WHEN r.cancelled_at IS NULL THEN 'running' ELSE 'cancelling' END
            WHEN r.cancelled_at IS NOT NULL THEN 'cancelled'
            WHEN t.dead + t.cancelled > 0 THEN 'completed with failures'
            ELSE 'completed' END AS state,
       t.batches, t.total, t.done, t.completed, t.dead, t.cancelled, r.created_at, r.tree_finished_at AS finished_at
FROM batches r, LATERAL (
    SELECT count(*) AS batches, sum(p.total)::bigint AS total, sum(p.done)::bigint AS done, sum(p.completed)::bigint AS completed,
           sum(p.dead)::bigint AS dead, sum(p.cancelled)::bigint AS cancelled
    FROM batch_progress p WHERE p.root_id = r.id) t
WHERE r.parent_id IS NULL;

-- Dedupe keys that are still taken although what had them is over: a job (the key is its queue's), or a tree of batches
-- (the key belongs to the name of its root, `batch`). `id`: the job's, or the root's; `became`: how that ended, `gone` where
-- the history has forgotten it. free_key() and free_batch_key() free one before its time.
CREATE OR REPLACE VIEW kept_keys AS
SELECT j.queue::text, j.dedupe_key::text, j.dedupe_until::timestamptz AS until, j.id, NULL::text AS batch,
       coalesce((SELECT f.status::text FROM finished_jobs f  -- the row that keeps a key is as old as the end of its job
                 WHERE f.id = j.id AND f.finished_at >= j.created_at LIMIT 1), 'gone') AS became
FROM jobs j WHERE j.status = 'completed' AND j.dedupe_until > clock()
UNION ALL
SELECT b.queue::text, b.dedupe_key::text, b.dedupe_until, b.id, b.name::text, (SELECT t.state FROM batch_trees t WHERE t.id = b.id)
FROM batches b
WHERE b.parent_id IS NULL AND b.tree_finished_at IS NOT NULL AND b.dedupe_until IS NOT NULL AND b.dedupe_until > clock();

-- One row per blocked job, and why it is. `stuck_on`: the first of those it waits for that will not complete by itself.
CREATE OR REPLACE VIEW blocked_jobs AS
SELECT j.id, j.queue::text, coalesce(j.kind, j.queue)::text AS kind, j.batch_id, j.created_at::timestamptz, j.waiting_on,
       CASE WHEN j.waiting_on = 0 THEN 'waits for its serialize_key'
            ELSE 'waits for ' || j.waiting_on || CASE j.waiting_on WHEN 1 THEN ' job' ELSE ' jobs' END
                 || coalesce('; job ' || s.id || CASE s.status
                     WHEN 'dead' THEN ' is dead: retry it, or undepend() this one'
                     ELSE CASE s.status WHEN 'gone' THEN ' is gone' WHEN 'expired' THEN ' has expired' ELSE ' was ' || s.status END
                          || ': undepend() or cancel this one' END, '') END AS reason,
       s.id AS stuck_on
FROM jobs j
LEFT JOIN LATERAL (
    SELECT e.id, e.status FROM (SELECT d.depends_on AS id, became(d.depends_on) AS status FROM job_dependencies d WHERE d.job_id = j.id) e
    WHERE e.status IN ('dead', 'discarded', 'cancelled', 'expired', 'gone')
      AND e.id <> ALL (ARRAY(SELECT p.job_id FROM pending_effects p WHERE p.completed))  -- apply_effects() comes to this one
    ORDER BY e.id LIMIT 1) s ON j.waiting_on > 0
WHERE j.status = 'blocked';

-- How far running jobs say they are; what an earlier attempt said is not shown.
CREATE OR REPLACE VIEW job_progress AS
SELECT p.job_id AS id, j.queue::text, coalesce(j.kind, j.queue)::text AS kind, j.batch_id, p.attempt, p.done, p.message, p.at,
       j.started_at::timestamptz AS claimed_at
FROM progress p JOIN jobs j ON j.id = p.job_id AND j.attempts = p.attempt AND j.status = 'running';

-- One row per worker. The state of one whose lease is over is `lost`, also when nobody is left to take its jobs back.
CREATE OR REPLACE VIEW worker_stats AS
SELECT w.id, w.name, w.pid, w.version,
       CASE WHEN w.lost_at IS NOT NULL OR w.lease_until <= clock() THEN 'lost' ELSE w.state END AS state, w.started_at, w.seen_at, w.lease_until, w.lost_at,
       (SELECT count(*) FROM jobs j WHERE j.worker_id = w.id AND j.status = 'running') AS running,
       p.queues
FROM workers w LEFT JOIN (SELECT k.worker_id, array_agg(k.queue::text ORDER BY k.queue) AS queues FROM known_pools() k GROUP BY 1) p ON p.worker_id = w.id;

-- What runs with the rights of its owner, who inserts having fewer: nobody else's to call until `pgworkd grants`, or you, say so.
REVOKE EXECUTE ON FUNCTION ensure_partitions, drop_partition, forget_rows, jobs_inserted, jobs_key_wanted, enqueue, create_batch, job_added, additions_checked, add_jobs,
    seal_batch, batch_sealed, stream_created, depend, dependencies_added, await_results FROM PUBLIC;

SELECT mend_sequences();
SELECT ensure_partitions();
INSERT INTO schema_version AS v (version) VALUES (1)
ON CONFLICT (only_row) DO UPDATE SET version = excluded.version, installed_at = excluded.installed_at
WHERE v.version < excluded.version;
UPDATE schema_version SET script = NULL WHERE script IS NOT NULL;
SELECT pg_notify('pgworkd', '{"queues": true}');  -- daemons ask at once what has changed
RESET search_path;
RESET client_min_messages;
