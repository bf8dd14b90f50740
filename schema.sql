-- pgworkd: the contract. Its tables and views, who changes them, and the order of their locks.
--
-- THE STORY
-- An application inserts a row into `jobs`, in its own transaction. A trigger sends one NOTIFY per
-- queue, and only if a pool of it is idle. A daemon, registered in `workers`, calls claim(), which
-- takes due rows in order of (priority, run_at, id), skips locked ones, and marks them `running`
-- with the worker's id. `attempts` rises by one and never falls: (id, attempt, worker) identifies
-- one run for ever, the fence. heartbeat() renews one lease that protects all jobs of the worker.
--
-- Each run ends in exactly one settle_...() call. It changes the row only if that still runs under
-- the same attempt; a late call changes nothing, and its answer leaves the job out.
--   settle_completed   moves the row to finished_jobs, with its result
--   settle_failed      leaves it `failed` until its retry, or `dead` when its budget is used up
--   settle_released    gives it back without a failure: snoozed, released at a stop, unknown kind
--   settle_ended       moves the row to finished_jobs as cancelled or expired
--
-- A worker that stops renewing its lease is presumed dead: rescue() takes its jobs back and counts
-- a loss on each. A job lost once is retried at once, like any other. One lost twice is a suspect;
-- a worker runs one suspect at a time, so that the third loss, the last, names the culprit. After
-- an outage or a clock jump each worker is given the time of its own lease to renew it first.
--
-- A schedule has at most one occurrence that has not failed. The transaction that settles it adds
-- the next; ensure_schedules() finds schedules without one. Batches form trees: whoever ends a job
-- updates the counters of its batch, and the last one inserts the callback job. Jobs may depend on
-- others: whoever completes those counts them down. `jobs` holds live work only and stays small;
-- `finished_jobs` is partitioned by day. All times are the database's, read through clock().
--
-- THE FILES
-- `psql -f schema.sql` and `pgworkd migrate` install this and the files that it includes, in one
-- transaction, on Postgres 14 to 18; again at any time: grants and what others built on it stay.
-- Functions run with their caller's rights (grants.sql); 98_plans.sql lists the exceptions.

\set ON_ERROR_STOP on
BEGIN;
\ir pgworkd/sql/00_begin.sql
\ir pgworkd/sql/migrations/0002_before_versions.sql
\ir pgworkd/sql/migrations/0003_names.sql
\ir pgworkd/sql/migrations/0004_signals.sql
\ir pgworkd/sql/migrations/0005_gateway.sql
\ir pgworkd/sql/migrations/0006_remote.sql
\ir pgworkd/sql/migrations/0007_push.sql
\ir pgworkd/sql/migrations/0008_repairs.sql
\ir pgworkd/sql/migrations/0009_claims.sql
\ir pgworkd/sql/migrations/0010_parts.sql
\ir pgworkd/sql/migrations/0013_turns.sql
\ir pgworkd/sql/migrations/0014_doors.sql
\ir pgworkd/sql/migrations/0015_numbers.sql

-- === Types =======================================================================================
DO $$
BEGIN
    IF to_regtype('pgworkd.job_status') IS NOT NULL THEN
        RETURN;
    END IF;
    CREATE TYPE job_status AS ENUM
        ('blocked', 'pending', 'running', 'failed', 'dead', 'completed', 'cancelled', 'expired');

    -- Bounds are domains, not table CHECKs: a domain checks a value when it is written; a CHECK
    -- would check again at every claim and settle, and unpack a large payload each time.
    CREATE DOMAIN name_text AS text
        CONSTRAINT name_must_have_1_to_200_characters CHECK (char_length(VALUE) BETWEEN 1 AND 200);
    CREATE DOMAIN key_text AS text  -- what is longer fits into no index
        CONSTRAINT key_must_have_1_to_512_characters CHECK (char_length(VALUE) BETWEEN 1 AND 512)
        CONSTRAINT key_must_not_exceed_1536_bytes CHECK (octet_length(VALUE) <= 1536);
    -- 1 MiB of compact text; Postgres prints a space after each comma and colon. A value stored in
    -- 200 bytes is small enough even if it was compressed, or holds numbers like 1e131071.
    CREATE DOMAIN payload_object AS jsonb
        CONSTRAINT value_must_be_a_json_object CHECK (jsonb_typeof(VALUE) = 'object')
        CONSTRAINT value_must_not_exceed_1_mib
            CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152);
    CREATE DOMAIN json_result AS jsonb CONSTRAINT result_must_not_exceed_1_mib
        CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152);
    CREATE DOMAIN error_list AS jsonb
        CONSTRAINT errors_must_be_a_json_array CHECK (jsonb_typeof(VALUE) = 'array');
    CREATE DOMAIN instant AS timestamptz CONSTRAINT instant_must_lie_between_1970_and_2200
        CHECK (VALUE >= '1970-01-01 00:00:00+00' AND VALUE < '2200-01-01 00:00:00+00');
    CREATE DOMAIN attempts_limit AS integer
        CONSTRAINT max_attempts_must_be_1_to_1000 CHECK (VALUE BETWEEN 1 AND 1000);
    CREATE DOMAIN limit_count AS integer
        CONSTRAINT limit_must_be_1_to_a_million CHECK (VALUE BETWEEN 1 AND 1000000);
    CREATE DOMAIN period_s AS real CONSTRAINT period_must_be_above_0_and_at_most_366_days
        CHECK (VALUE > 0 AND VALUE <= 31622400);

    -- A job that ended: what its batch needs to know. What follows `id` is for streaming.
    CREATE TYPE ended_job AS (batch_id uuid, status job_status, was_dead boolean,
                              id uuid, kind text, payload jsonb, result jsonb, meta jsonb);
END $$;

\ir pgworkd/sql/10_time_ids.sql

-- === Tables ======================================================================================
-- Also: stacks (20_...), tokens, calls (24_...), origin (26_...), rates (40_...), pending effects
-- (48_...), refused rows (80_...), statistics (86_...), endpoints to alerts (87_...), operations.

CREATE TABLE IF NOT EXISTS schema_version (
    version      integer NOT NULL,
    installed_at timestamptz NOT NULL DEFAULT clock(),
    script       text,               -- hash of the script, if `pgworkd migrate` ran it
    only_row     boolean PRIMARY KEY DEFAULT true CHECK (only_row)
);

-- One process that claims. Its lease protects every job it runs. `token` is drawn at registration:
-- if an id is issued twice (a restored dump, a failover that lost commits), only one has it.
CREATE TABLE IF NOT EXISTS workers (
    id          integer GENERATED ALWAYS AS IDENTITY (MAXVALUE 1000000000 CYCLE) PRIMARY KEY,
    name        text NOT NULL CHECK (char_length(name) <= 200),  -- host name unless set
    pid integer NOT NULL, version text NOT NULL,
    state       text NOT NULL DEFAULT 'running'
                CHECK (state IN ('running', 'blocked', 'stopping', 'vanished')),  -- its event loop
    lease_s     real NOT NULL CHECK (lease_s BETWEEN 1 AND 3600),
    started_at  timestamptz NOT NULL DEFAULT clock(),
    seen_at     timestamptz NOT NULL DEFAULT clock(),   -- last heartbeat
    steady_since timestamptz NOT NULL DEFAULT clock(),  -- heartbeats without a gap since then
    lease_until timestamptz NOT NULL, lost_at timestamptz,  -- set by rescue(); never cleared
    schedules   text[], rules jsonb, -- declared in its code (declare_rules()); NULL: not reported
    token       uuid,                -- NULL: restored by rescue(); such a row is never renewed
    kinds       text[],              -- its code has handlers for; NULL: not reported
    kind        text NOT NULL DEFAULT 'daemon'  -- remote: claims through a gateway
                CHECK (kind IN ('daemon', 'gateway', 'remote', 'standing')),
    requested   text CHECK (requested IN ('quiet', 'stop'))  -- by an operator: see ask_worker()
);
-- The standing worker is no process: attempts with a lease of their own run under it.
CREATE UNIQUE INDEX IF NOT EXISTS workers_standing ON workers (name) WHERE kind = 'standing';

-- One worker's slots for one queue. Unlogged: after a crash of Postgres workers announce theirs.
CREATE UNLOGGED TABLE IF NOT EXISTS pools (
    worker_id   integer NOT NULL, queue name_text NOT NULL,
    concurrency integer NOT NULL,                 -- in effect
    idle        boolean NOT NULL DEFAULT false,   -- true: inserts must NOTIFY; false: it polls
    code_concurrency integer,                     -- in effect where `queues` has none; its source:
    code_source text CHECK (code_source IN ('code', 'settings', 'default')),
    PRIMARY KEY (queue, worker_id)
);

-- Settings of a queue that override code. NULL: no limit, or as the code says. Limits hold over the
-- whole fleet; those per key count the jobs of each limit_key separately.
CREATE TABLE IF NOT EXISTS queues (
    name         name_text PRIMARY KEY,
    concurrency  integer             -- per worker
                 CONSTRAINT concurrency_must_be_1_to_10000 CHECK (concurrency BETWEEN 1 AND 10000),
    paused_until timestamptz,        -- 'infinity' = until resumed
    keep_s       integer CONSTRAINT keep_must_not_be_negative CHECK (keep_s >= 0),  -- 0: no history
    backoff_s    real
                 CONSTRAINT backoff_must_be_0_to_366_days CHECK (backoff_s BETWEEN 0 AND 31622400),
    backoff_factor real CONSTRAINT backoff_factor_must_be_1_to_1000
                 CHECK (backoff_factor BETWEEN 1 AND 1000),
    backoff_cap_s real CONSTRAINT backoff_cap_must_be_0_to_366_days
                 CHECK (backoff_cap_s BETWEEN 0 AND 31622400),
    max_running  limit_count,        -- at most this many run at once
    limit_per_key limit_count,       -- at most this many of one limit_key run at once
    rate limit_count, rate_period_s period_s,  -- at most this many start in that period, ...
    rate_burst   limit_count,        -- ... and at one instant; the same for each limit_key:
    rate_per_key limit_count, rate_per_key_period_s period_s, rate_per_key_burst limit_count,
    fair         boolean NOT NULL DEFAULT false,  -- limit_keys take turns
    limited      boolean GENERATED ALWAYS AS
                 (num_nonnulls(max_running, limit_per_key, rate, rate_per_key) > 0 OR fair) STORED,
    updated_at   timestamptz NOT NULL DEFAULT clock(),
    max_losses int CONSTRAINT max_losses_must_be_1_to_1000 CHECK (max_losses BETWEEN 1 AND 1000),
    endpoint name_text, serialize_scope name_text,  -- where jobs are sent; see 42_serialize.sql
    max_attempts attempts_limit, timeout_s period_s,  -- of jobs that have none of their own
    CONSTRAINT rate_needs_a_period CHECK ((rate IS NULL) = (rate_period_s IS NULL)),
    CONSTRAINT rate_burst_needs_a_rate CHECK (rate_burst IS NULL OR rate IS NOT NULL),
    CONSTRAINT rate_per_key_needs_a_period
        CHECK ((rate_per_key IS NULL) = (rate_per_key_period_s IS NULL)),
    CONSTRAINT rate_per_key_burst_needs_a_rate
        CHECK (rate_per_key_burst IS NULL OR rate_per_key IS NOT NULL)
);

-- A recurring rule. `cron` is computed by daemons in `timezone`; `every_s` counts from the epoch.
CREATE TABLE IF NOT EXISTS schedules (
    name         name_text PRIMARY KEY,
    queue        name_text NOT NULL, kind name_text,
    payload      payload_object NOT NULL DEFAULT '{}',
    cron         text CHECK (char_length(cron) <= 200),
    every_s      integer CONSTRAINT every_s_must_be_1_to_366_days
                 CHECK (every_s BETWEEN 1 AND 31622400),
    timezone     text NOT NULL DEFAULT 'UTC' CHECK (char_length(timezone) <= 100),
    missed       text NOT NULL DEFAULT 'skip' CONSTRAINT missed_must_be_skip_once_or_all
                 CHECK (missed IN ('skip', 'once', 'all')),
    priority integer NOT NULL DEFAULT 0, max_attempts attempts_limit, timeout_s period_s,
    enabled      boolean NOT NULL DEFAULT true,
    source       text NOT NULL DEFAULT 'sql' CHECK (source IN ('code', 'sql')),
    revision     integer NOT NULL DEFAULT 1,  -- rises with each change of the rule
    last_occurrence timestamptz,     -- the newest one ever inserted; only rises
    error text, created_at timestamptz NOT NULL DEFAULT clock(),  -- error: why there is no next one
    missed_grace_s real NOT NULL DEFAULT 60  -- with missed = 'skip': how late it may still run
                 CONSTRAINT missed_grace_s_must_be_0_to_366_days
                 CHECK (missed_grace_s BETWEEN 0 AND 31622400),
    waits_for_retries boolean NOT NULL DEFAULT false,  -- no next occurrence while one is retried
    retired_at   timestamptz,        -- disabled because it left the code; enabled when it is back
    in_force_since timestamptz NOT NULL DEFAULT clock(),  -- of this rule: no occurrence before it
    CONSTRAINT exactly_one_of_cron_and_every_s_must_be_set CHECK (num_nonnulls(cron, every_s) = 1),
    CONSTRAINT timezone_is_for_cron_only CHECK (every_s IS NULL OR timezone = 'UTC')
);

-- Live work. What each job has comes first: Postgres walks to what follows a NULL. See `all_jobs`.
CREATE TABLE IF NOT EXISTS jobs (
    id           uuid DEFAULT new_id() PRIMARY KEY WITH (fillfactor = 50),  -- see below
    run_at       instant NOT NULL DEFAULT clock(),  -- due from then on
    created_at   instant NOT NULL DEFAULT clock(),
    status       job_status NOT NULL DEFAULT 'pending',
    priority     integer NOT NULL DEFAULT 0,  -- higher first
    attempts     integer NOT NULL DEFAULT 0,  -- claims so far; with id, the fence
    failures     integer NOT NULL DEFAULT 0,  -- counted against max_attempts
    losses       integer NOT NULL DEFAULT 0,  -- attempts that ended with their worker
    waiting_on   integer NOT NULL DEFAULT 0,  -- how many jobs it depends on are not completed
    begun        integer NOT NULL DEFAULT 0,  -- with expires_at: the first attempt to begin
    yields       boolean NOT NULL DEFAULT false,  -- while its retry waits, others may pass
    queue        name_text NOT NULL,
    payload      payload_object NOT NULL DEFAULT '{}',
    errors       error_list NOT NULL DEFAULT '[]',  -- the last 20 failures
    started_at   instant,            -- when the last attempt was claimed; the handler starts later
    failed_at instant, expires_at instant,  -- not begun by then: expired
    dedupe_until instant,            -- dedupe_key stays taken until then, also after the job ended
    lease_until  timestamptz,        -- of a remote worker's attempt: see 36_assignments.sql
    cancel_requested_at instant,
    occurrence   instant,            -- of `schedule`: the instant this run stands for
    promoted     timestamptz,        -- when its serialize_key became free: see pick()
    assignment_id uuid,              -- of an attempt with a lease of its own
    batch_id     uuid,               -- no foreign key: it would cost every insert; see jobs_batched
    max_attempts attempts_limit,     -- NULL: 3, or as the handler says at the first claim
    worker_id    integer,
    timeout_s    period_s,           -- NULL: as the handler says
    lease_s      period_s,           -- how long lease_until lasts; NULL: leased with its worker
    kind         name_text,          -- NULL: the queue's own handler
    meta         payload_object,     -- trace context, tags; passed through
    error        text,               -- of the last failure, one line
    dedupe_key   key_text,           -- at most one live job of the queue has it; see item_key()
    serialize_key key_text, serialize_scope name_text,  -- one at a time, as they are due
    limit_key    key_text,           -- what the queue's limits per key and turns count by
    counted      boolean,            -- add_jobs() has counted it into its batch; not for enqueuers
    schedule     name_text, claim_id integer, listed integer,  -- of remote workers: list_held()
    -- A `completed` row is no job: it keeps the dedupe_key of one that ended, whatever its outcome.
    CONSTRAINT a_job_is_ended_by_cancel_status_must_be_of_a_live_one
        CHECK (status <= 'dead' OR status = 'completed' AND dedupe_until IS NOT NULL),
    CONSTRAINT dedupe_until_needs_a_dedupe_key
        CHECK (dedupe_until IS NULL OR dedupe_key IS NOT NULL),
    CONSTRAINT running_jobs_and_only_they_have_a_worker
        CHECK ((status = 'running') = (worker_id IS NOT NULL)),
    -- rescue() restores an unknown worker; the sequence of ids wraps around at this bound.
    CONSTRAINT worker_id_must_be_1_to_a_billion CHECK (worker_id BETWEEN 1 AND 1000000000),
    CONSTRAINT attempts_never_fall_to_run_a_job_again_call_retry
        CHECK (attempts > 0 OR started_at IS NULL),
    CONSTRAINT counters_must_not_be_negative
        CHECK (attempts >= 0 AND failures >= 0 AND losses >= 0 AND waiting_on >= 0),
    CONSTRAINT blocked_jobs_need_a_serialize_key_or_depend CHECK (
        CASE status WHEN 'blocked' THEN serialize_key IS NOT NULL OR waiting_on > 0
                    ELSE waiting_on = 0 END),
    CONSTRAINT only_a_running_job_has_a_lease CHECK (lease_until IS NULL OR worker_id IS NOT NULL),
    CONSTRAINT a_lease_of_its_own_needs_an_assignment CHECK ((lease_s IS NULL)
        = (assignment_id IS NULL) AND (lease_s IS NULL OR lease_until IS NOT NULL))
) WITH (
    fillfactor = 50,  -- space for the one update that nearly every job goes through
    autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000,
    autovacuum_analyze_scale_factor = 0.0, autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0
);

-- What claim() walks. Suspects, jobs that were lost twice, have an index of their own.
CREATE INDEX IF NOT EXISTS jobs_claimable ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2
      AND serialize_key IS NULL AND limit_key IS NULL;
CREATE INDEX IF NOT EXISTS jobs_claimable_keyed ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2
      AND (serialize_key IS NOT NULL OR limit_key IS NOT NULL);
-- Jobs that became claimable behind the places that claims had reached, in that order.
CREATE INDEX IF NOT EXISTS jobs_promoted ON jobs (queue, priority, promoted, run_at, id)
    WHERE promoted IS NOT NULL AND status IN ('pending', 'failed') AND losses < 2
      AND (serialize_key IS NOT NULL OR limit_key IS NOT NULL);
CREATE INDEX IF NOT EXISTS jobs_suspect ON jobs (queue, priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses > 1;
CREATE INDEX IF NOT EXISTS jobs_running_since ON jobs (worker_id, queue, started_at)
    WHERE status = 'running';
CREATE INDEX IF NOT EXISTS jobs_leased ON jobs (lease_until) WHERE lease_until IS NOT NULL;
-- For wanted(). Without the status, so that wanted() cannot be planned with the index above, which
-- fills with entries of ended jobs while a transaction holds vacuum back.
CREATE INDEX IF NOT EXISTS jobs_cancelling ON jobs (worker_id)
    WHERE worker_id IS NOT NULL AND cancel_requested_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_running_limited ON jobs (queue, limit_key)
    WHERE status = 'running' AND limit_key IS NOT NULL;
CREATE INDEX IF NOT EXISTS jobs_dead ON jobs (queue, failed_at) WHERE status = 'dead';
CREATE INDEX IF NOT EXISTS jobs_expiring ON jobs (expires_at)
    WHERE expires_at IS NOT NULL AND begun = 0 AND status IN ('blocked', 'pending', 'failed');
CREATE UNIQUE INDEX IF NOT EXISTS jobs_dedupe ON jobs (queue, dedupe_key)
    WHERE dedupe_key IS NOT NULL AND status <> 'dead';
CREATE INDEX IF NOT EXISTS jobs_kept_keys ON jobs (dedupe_until) WHERE status = 'completed';
-- The holder of a serialize_key, and those in line for it; a job that waits for others is neither.
CREATE UNIQUE INDEX IF NOT EXISTS jobs_serialize
    ON jobs ((coalesce(serialize_scope, queue)), serialize_key) WHERE serialize_key IS NOT NULL
      AND (status = 'running' OR status = 'failed' AND NOT yields);
CREATE INDEX IF NOT EXISTS jobs_line
    ON jobs ((coalesce(serialize_scope, queue)), serialize_key, run_at, id) WHERE waiting_on = 0
      AND serialize_key IS NOT NULL AND status IN ('blocked', 'pending', 'failed');
CREATE INDEX IF NOT EXISTS jobs_blocked ON jobs (queue, serialize_key, run_at, id)
    WHERE status = 'blocked' AND waiting_on = 0;
CREATE INDEX IF NOT EXISTS jobs_waiting ON jobs (queue, id) WHERE waiting_on > 0;
CREATE INDEX IF NOT EXISTS jobs_turns
    ON jobs (queue, (coalesce(limit_key::text, '')), priority DESC, run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2
      AND (serialize_key IS NOT NULL OR limit_key IS NOT NULL);
-- The same by kind (its hash: three long texts fit into no index), for workers that leave kinds to
-- others. The priority is an expression, so that no other index has the requested order.
CREATE INDEX IF NOT EXISTS jobs_turns_of_kind
    ON jobs (queue, hashtextextended(coalesce(kind, queue)::text, 0), limit_key,
             (- priority::bigint), run_at, id)
    WHERE status IN ('pending', 'failed') AND losses < 2 AND limit_key IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS jobs_occurrence ON jobs (schedule, occurrence)
    WHERE schedule IS NOT NULL;
-- The chain of a schedule: its one occurrence that is waiting or running and has not failed.
CREATE UNIQUE INDEX IF NOT EXISTS jobs_schedule_chain ON jobs (schedule)
    WHERE schedule IS NOT NULL AND status <> 'dead' AND failures = 0;
CREATE INDEX IF NOT EXISTS jobs_batch ON jobs (batch_id, status) WHERE batch_id IS NOT NULL;

-- History: completed, cancelled, expired, and the dead that were discarded or aged out. The columns
-- are those of `jobs`; `started_at` is when the last attempt was claimed.
CREATE TABLE IF NOT EXISTS finished_jobs (
    id uuid NOT NULL, finished_at timestamptz NOT NULL,
    run_at timestamptz NOT NULL, created_at timestamptz NOT NULL, started_at timestamptz,
    failed_at timestamptz, occurrence timestamptz, batch_id uuid,
    status       job_status NOT NULL
                 CHECK (status IN ('completed', 'cancelled', 'expired', 'dead')),
    priority integer NOT NULL, attempts integer NOT NULL, failures integer NOT NULL,
    max_attempts integer, worker_id integer, queue text NOT NULL, kind text,
    payload jsonb NOT NULL, result json_result, meta jsonb, error text, errors jsonb NOT NULL,
    dedupe_key text, serialize_key text, limit_key text, schedule text,
    keep_until   timestamptz,        -- finished_at + the queue's keep_s then; NULL: keep_days
    expires_at timestamptz, began_at timestamptz,  -- when its handler began, if it completed
    PRIMARY KEY (id, finished_at)
) PARTITION BY RANGE (finished_at);
CREATE TABLE IF NOT EXISTS finished_jobs_other PARTITION OF finished_jobs DEFAULT;
CREATE INDEX IF NOT EXISTS finished_jobs_kept ON finished_jobs (keep_until)
    WHERE keep_until IS NOT NULL;
CREATE INDEX IF NOT EXISTS finished_jobs_other_finished ON finished_jobs_other (finished_at);
CREATE INDEX IF NOT EXISTS finished_jobs_batch ON finished_jobs (batch_id, id)
    WHERE batch_id IS NOT NULL;

-- Containers of jobs, in trees; a batch without a parent is the root. It takes jobs until it is
-- sealed; sealed, and without a live job, it is finished, and the tree when all its batches are.
-- The counters are updated under the root's lock, and are in no index: see 91_batch_counts.sql.
CREATE TABLE IF NOT EXISTS batches (
    id           uuid PRIMARY KEY DEFAULT new_id(),
    root_id uuid NOT NULL, parent_id uuid REFERENCES batches,  -- root_id: by a trigger, as `depth`
    created_at timestamptz NOT NULL DEFAULT clock(), sealed_at timestamptz,
    finished_at timestamptz, cancelled_at timestamptz,  -- takes no more jobs, and ends those it has
    tree_finished_at timestamptz,    -- of a root: everything ended, and its callback was inserted
    added        bigint NOT NULL DEFAULT 0,  -- without what is still in batch_additions
    completed bigint NOT NULL DEFAULT 0, dead bigint NOT NULL DEFAULT 0,
    cancelled    bigint NOT NULL DEFAULT 0,  -- expired ones, too
    max_failures integer             -- more dead than this: the batch is cancelled
                 CONSTRAINT max_failures_must_not_be_negative CHECK (max_failures >= 0),
    depth        smallint NOT NULL DEFAULT 0,     -- of a root: 0
    stream       boolean NOT NULL DEFAULT false,  -- each job completed in the parent adds one here
    name name_text NOT NULL, final boolean NOT NULL DEFAULT false,  -- its results are the tree's
    queue name_text NOT NULL, kind name_text,  -- defaults of its jobs
    max_attempts attempts_limit, meta payload_object,  -- of its jobs that say none; passed through
    stream_kind  name_text,          -- streamed jobs get this kind, and add the batch's own jobs
    dedupe_key   key_text,           -- of a root: at most one unfinished tree of name and queue
    dedupe_until timestamptz,        -- a finished tree keeps it until then, unless cancelled
    on_complete  payload_object,     -- of a root: the job to insert when the tree is finished
    on_failure   payload_object,     -- the same if a job died or was cancelled; NULL: on_complete
    completed_called boolean NOT NULL DEFAULT false,  -- on_complete was inserted, ...
    failure_called boolean NOT NULL DEFAULT false,    -- ... on_failure was: not again after a retry
    CONSTRAINT batches_must_not_be_deeper_than_32 CHECK (depth BETWEEN 0 AND 32),
    CONSTRAINT only_a_child_can_stream CHECK (NOT stream OR parent_id IS NOT NULL),
    CONSTRAINT stream_kind_needs_stream CHECK (stream_kind IS NULL OR stream),
    CONSTRAINT stream_kind_must_differ_from_kind
        CHECK (stream_kind IS NULL OR stream_kind <> coalesce(kind::text, queue)),
    CONSTRAINT only_a_root_can_call_back
        CHECK (parent_id IS NULL OR on_complete IS NULL AND on_failure IS NULL),
    CONSTRAINT only_a_root_can_have_a_dedupe_key CHECK (parent_id IS NULL OR dedupe_key IS NULL),
    CONSTRAINT dedupe_until_needs_a_dedupe_key
        CHECK (dedupe_until IS NULL OR dedupe_key IS NOT NULL),
    CONSTRAINT batch_name_must_be_unique_in_its_parent UNIQUE (parent_id, name)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 1000);
CREATE INDEX IF NOT EXISTS batches_tree ON batches (root_id);
CREATE INDEX IF NOT EXISTS batches_unfinished ON batches (root_id) WHERE finished_at IS NULL;
CREATE INDEX IF NOT EXISTS batches_sealed ON batches (id)
    WHERE sealed_at IS NOT NULL AND finished_at IS NULL;
CREATE INDEX IF NOT EXISTS batches_uncalled ON batches (id)
    WHERE parent_id IS NULL AND finished_at IS NOT NULL AND tree_finished_at IS NULL;
CREATE INDEX IF NOT EXISTS batches_over ON batches (tree_finished_at)
    WHERE tree_finished_at IS NOT NULL;
CREATE UNIQUE INDEX IF NOT EXISTS batches_key ON batches (name, dedupe_key, queue)
    WHERE parent_id IS NULL AND dedupe_key IS NOT NULL
      AND (tree_finished_at IS NULL OR dedupe_until IS NOT NULL);
CREATE INDEX IF NOT EXISTS batches_kept_keys ON batches (dedupe_until)
    WHERE tree_finished_at IS NOT NULL AND dedupe_until IS NOT NULL;
-- It makes finished_at part of a key: FOR KEY SHARE then conflicts with finishing a batch, and a
-- REPEATABLE READ transaction with an older snapshot gets 40001.
CREATE UNIQUE INDEX IF NOT EXISTS batches_finished ON batches (id, finished_at);

-- Jobs added to batches, and requests to seal them, until a holder of the root's lock applies them:
-- an application's open transaction holds no lock that a settle needs. Insert and delete only.
CREATE TABLE IF NOT EXISTS batch_additions (
    batch_id     uuid NOT NULL,
    added bigint NOT NULL DEFAULT 0 CHECK (added >= 0), seals boolean NOT NULL DEFAULT false
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);
CREATE INDEX IF NOT EXISTS batch_additions_batch ON batch_additions (batch_id);
CREATE INDEX IF NOT EXISTS batch_additions_seals ON batch_additions (batch_id) WHERE seals;

-- What blocked jobs still wait for: a row is deleted when its `depends_on` has completed.
CREATE TABLE IF NOT EXISTS job_dependencies (
    job_id       uuid NOT NULL,
    depends_on   uuid NOT NULL CHECK (depends_on <> job_id),
    on_failed_dependency text NOT NULL DEFAULT 'wait'  -- if that is dead, cancelled or expired
                 CONSTRAINT on_failed_dependency_must_be_wait_cancel_or_run
                 CHECK (on_failed_dependency IN ('wait', 'cancel', 'run')),
    unchecked    boolean NOT NULL DEFAULT false,  -- one row of each depend(), until it commits
    PRIMARY KEY (depends_on, job_id)
) WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 10000);
CREATE INDEX IF NOT EXISTS job_dependencies_job ON job_dependencies (job_id);
CREATE INDEX IF NOT EXISTS job_dependencies_unchecked ON job_dependencies (job_id) WHERE unchecked;

-- Sessions that wait for a job to end: NOTIFY on `channel` names it. Unlogged: only a hint.
CREATE UNLOGGED TABLE IF NOT EXISTS result_waiters (
    job_id uuid NOT NULL, until timestamptz NOT NULL,
    channel      text NOT NULL CONSTRAINT channel_must_have_1_to_63_bytes
                 CHECK (octet_length(channel) BETWEEN 1 AND 63),
    PRIMARY KEY (job_id, channel)
);
CREATE INDEX IF NOT EXISTS result_waiters_until ON result_waiters (until);

-- What operators did: one row per operation and job (or queue), in the operation's transaction.
CREATE TABLE IF NOT EXISTS audit (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock(),
    who          text NOT NULL CHECK (char_length(who) BETWEEN 1 AND 200),
    what         text NOT NULL
                 CHECK (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch',
                    'delete_batch', 'undepend', 'schedule', 'free_key', 'mute', 'worker', 'token',
                    'endpoint', 'adopt')),
    queue        text NOT NULL,
    job_id       uuid,               -- NULL: settings of the queue, or a batch
    before jsonb NOT NULL, after jsonb NOT NULL  -- of what changed
);
CREATE INDEX IF NOT EXISTS audit_at ON audit (at);
CREATE INDEX IF NOT EXISTS audit_queue ON audit (queue, id);
CREATE INDEX IF NOT EXISTS audit_job ON audit (job_id, id) WHERE job_id IS NOT NULL;

-- === The verbs ===================================================================================
-- Called by A an application, D a daemon, O an operator (CLI, Admin). Locks in the order taken, `s`
-- with SKIP LOCKED, - none. The constraints above may raise, too. All other functions are internal.
--   verb                                          by  locks                          raises
--   INSERT INTO jobs (also many, or COPY)         A   its batch (KEY SHARE)          23505, PW003
--   enqueue, enqueue_once                         A   holder of the dedupe_key       22023, 23505
--   depend                                        A   at commit: p_after (SHARE)     22023, PW004
--   create_batch, add_jobs, seal_batch            A   batch (KEY SHARE); roots       22023, PW003
--   await_results; begin_once, end_once           A   result_waiters; their call     22023
--   result_of, jobs_of, batch_results, batch_tree AO  -                              22023, PW003
--   register, wanted, kinds_elsewhere, next_due,  D   -
--     depth, running_of, ensure_schedules,
--     missed_since, usual_runs, next_alert_s
--   payloads, answer_stack                        D   jobs with expires_at s; request
--   heartbeat, worker_ended, sign_off,            D   worker; pool; origin
--     set_pool, drop_pool, heartbeats, belong
--   claim, claim_for, claim_one, refuse_claims    D   workers (KEY SHARE), queue,    PW001
--                                                     jobs s
--   settle_completed, settle_failed,              D   jobs, dependents, roots,
--     settle_released, settle_ended                   schedules s, queues
--   complete_own (in the handler's transaction)   D   job; the rest is deferred
--   hand_over, extend, fenced, list_held,         D   workers, jobs
--     take_back, abandon
--   report_progress, restore_occurrences          D   progress; schedules s
--   declare_rules, retire_schedules,              D   worker; schedules s
--     fail_schedule
--   rescue, fail_overdue, expire_jobs,            D   workers, jobs s, roots s
--     mend_dependencies, mend_batches
--   apply_effects, unblock, unblock_lines,        D   queues (try), roots s, jobs s
--     free_keys, forget_rates, report_refused,
--     advance_operations
--   prune, ensure_partitions, drop_partition      D   history, 200 ms at most        22023
--   sample_queues, append_minutes, roll_up        D   statistics s
--   count_deaths (makes alerts), declare_alerts   D   deaths s, groups of errors; rules
--   cancel, discard, undepend, retry              O   jobs, roots                    23505
--   edit                                          O   job, queue                     22023, PW002
--   cancel_batch, delete_batch, delete_items      O   root, jobs s, queues           PW003
--   free_key, free_batch_key, set_queue           O   kept key; root; queue row
--   enable_schedule, remove_schedule,             O   schedule; -                    22023
--     run_schedule
--   mute_errors, ask_worker, adopt, ask_stack     O   group; worker; origin; request PW005
--   start_operation, stop_operation               O   -; operation                   22023, 54000
--   set_endpoint, remove_endpoint                 O   endpoint                       23503, 23514
--   enable_endpoint                               O   endpoint, queues
--   disable_endpoint, pause_endpoint, warn_of     D   endpoint (warn_of: s), queues
--   matching, became_all, throughput,             O   -                              22023
--     dead_groups, percentile, explain
--
-- PW001: the worker's lease is gone. PW002: the job's status does not allow it. PW003: the batch
-- does not exist, or takes no more. PW004: the dependency is refused. PW005: it has no stack.
-- === Lock order ==================================================================================
-- Advisory locks of maintenance, workers, jobs, batches (a tree by its root), schedules, endpoints,
-- queues. Several rows of one table: by their key, or with SKIP LOCKED. A queue's lock is an
-- advisory one. Settles take it last, claims before they lock rows; its holder never waits for a
-- row, so the two orders cannot deadlock. Batches below a root are written under the root's lock.
-- No daemon waits for what an application's open transaction has locked by the verbs above.

\ir pgworkd/sql/20_workers.sql
\ir pgworkd/sql/22_remote_workers.sql
\ir pgworkd/sql/24_tokens.sql
\ir pgworkd/sql/26_origin.sql
\ir pgworkd/sql/30_claim.sql
\ir pgworkd/sql/32_refused.sql
\ir pgworkd/sql/35_due.sql
\ir pgworkd/sql/36_assignments.sql
\ir pgworkd/sql/38_locks.sql
\ir pgworkd/sql/40_limits.sql
\ir pgworkd/sql/42_serialize.sql
\ir pgworkd/sql/44_places.sql
\ir pgworkd/sql/46_turns.sql
\ir pgworkd/sql/48_effects.sql
\ir pgworkd/sql/50_enqueue.sql
\ir pgworkd/sql/52_enqueue_once.sql
\ir pgworkd/sql/60_settle.sql
\ir pgworkd/sql/65_archive.sql
\ir pgworkd/sql/66_history.sql
\ir pgworkd/sql/70_schedules.sql
\ir pgworkd/sql/80_maintenance.sql
\ir pgworkd/sql/81_overdue.sql
\ir pgworkd/sql/82_expiry.sql
\ir pgworkd/sql/84_retention.sql
\ir pgworkd/sql/85_operators.sql
\ir pgworkd/sql/86_samples.sql
\ir pgworkd/sql/87_endpoints.sql
\ir pgworkd/sql/88_deaths.sql
\ir pgworkd/sql/89_alerts.sql
\ir pgworkd/sql/90_batches.sql
\ir pgworkd/sql/91_batch_counts.sql
\ir pgworkd/sql/92_dependencies.sql
\ir pgworkd/sql/93_progress.sql
\ir pgworkd/sql/94_batch_operations.sql

-- === Views =======================================================================================
-- Every job, live or ended, in the order people read. A dead one that was discarded, by an operator
-- or by age, is `discarded`. `claimed_at`: when a worker took the last attempt; `started_at`: when
-- its handler began, if it completed. Each entry of `errors` has `at` and `ran_s`.
CREATE OR REPLACE VIEW all_jobs AS
SELECT id, queue::text, coalesce(kind, queue)::text AS kind, status::text, payload::jsonb,
       NULL::jsonb AS result, priority, run_at::timestamptz, created_at::timestamptz,
       started_at::timestamptz AS claimed_at, failed_at::timestamptz,
       NULL::timestamptz AS finished_at, attempts, failures, max_attempts::int, error,
       errors::jsonb, worker_id, schedule::text, occurrence::timestamptz, dedupe_key::text,
       serialize_key::text, batch_id, meta::jsonb, limit_key::text, expires_at::timestamptz,
       NULL::timestamptz AS started_at
FROM jobs WHERE status <> 'completed'
UNION ALL
SELECT id, queue, coalesce(kind, queue),
       CASE status WHEN 'dead' THEN 'discarded' ELSE status::text END, payload, result, priority,
       run_at, created_at, started_at, failed_at, finished_at, attempts, failures, max_attempts,
       error, errors, worker_id, schedule, occurrence, dedupe_key, serialize_key, batch_id, meta,
       limit_key, expires_at, began_at
FROM finished_jobs;

-- One row per queue with live jobs, a worker or settings. `failed`: retries that are not yet `due`.
CREATE OR REPLACE VIEW queue_stats AS
WITH counts AS (
    SELECT j.queue::text AS queue,
           count(*) FILTER (WHERE j.status IN ('pending', 'failed') AND j.run_at <= clock()) AS due,
           count(*) FILTER (WHERE j.status = 'pending' AND j.run_at > clock()) AS scheduled,
           count(*) FILTER (WHERE j.status = 'running') AS running,
           count(*) FILTER (WHERE j.status = 'failed' AND j.run_at > clock()) AS failed,
           count(*) FILTER (WHERE j.status = 'blocked') AS blocked,
           count(*) FILTER (WHERE j.status = 'dead') AS dead,
           min(j.run_at) FILTER (WHERE j.status IN ('pending', 'failed') AND j.run_at <= clock())
               AS oldest_due_at
    FROM jobs j WHERE j.status <> 'completed' GROUP BY j.queue
), fleet AS (
    SELECT p.queue::text AS queue, count(*) AS workers, sum(p.concurrency) AS slots
    FROM known_pools() p JOIN workers w
        ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > clock() GROUP BY p.queue
)
SELECT n.queue, coalesce(c.due, 0) AS due, coalesce(c.scheduled, 0) AS scheduled,
       coalesce(c.running, 0) AS running, coalesce(c.failed, 0) AS failed,
       coalesce(c.blocked, 0) AS blocked, coalesce(c.dead, 0) AS dead,
       extract(epoch FROM clock() - c.oldest_due_at)::float8 AS oldest_due_s,
       coalesce(f.workers, 0) AS workers, coalesce(f.slots, 0) AS slots, q.paused_until
FROM (SELECT queue FROM counts UNION SELECT queue FROM fleet UNION SELECT name FROM queues) n
LEFT JOIN counts c ON c.queue = n.queue LEFT JOIN fleet f ON f.queue = n.queue
LEFT JOIN queues q ON q.name = n.queue;

-- One row per batch, from its counters; no job is counted. `done`: completed, dead or cancelled.
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
       b.created_at, b.sealed_at, b.cancelled_at, b.finished_at, b.tree_finished_at, b.dedupe_until,
       b.max_attempts::int, b.meta::jsonb
FROM batches b
LEFT JOIN LATERAL (SELECT sum(x.added) AS added, bool_or(x.seals) AS seals FROM batch_additions x
                   WHERE x.batch_id = b.id) a ON true;

-- One row per tree of batches, by its root: the sums of batch_progress.
CREATE OR REPLACE VIEW batch_trees AS
SELECT r.id, r.name::text, r.queue::text,
       CASE WHEN r.tree_finished_at IS NULL
            THEN CASE WHEN r.cancelled_at IS NULL THEN 'running' ELSE 'cancelling' END
            WHEN r.cancelled_at IS NOT NULL THEN 'cancelled'
            WHEN t.dead + t.cancelled > 0 THEN 'completed with failures'
            ELSE 'completed' END AS state,
       t.batches, t.total, t.done, t.completed, t.dead, t.cancelled, r.created_at,
       r.tree_finished_at AS finished_at, r.meta::jsonb
FROM batches r, LATERAL (
    SELECT count(*) AS batches, sum(p.total)::bigint AS total, sum(p.done)::bigint AS done,
           sum(p.completed)::bigint AS completed, sum(p.dead)::bigint AS dead,
           sum(p.cancelled)::bigint AS cancelled
    FROM batch_progress p WHERE p.root_id = r.id) t
WHERE r.parent_id IS NULL;

-- Dedupe keys kept after the end of their job (of its queue), or of their tree of batches (of the
-- root's name, `batch`). `became`: how the job or root, `id`, ended; `gone`: no longer in history.
CREATE OR REPLACE VIEW kept_keys AS
SELECT j.queue::text, j.dedupe_key::text, j.dedupe_until::timestamptz AS until, j.id,
       NULL::text AS batch,
       coalesce((SELECT f.status::text FROM finished_jobs f  -- the row is as old as its job's end
                 WHERE f.id = j.id AND f.finished_at >= j.created_at LIMIT 1), 'gone') AS became
FROM jobs j WHERE j.status = 'completed' AND j.dedupe_until > clock()
UNION ALL
SELECT b.queue::text, b.dedupe_key::text, b.dedupe_until, b.id, b.name::text,
       (SELECT t.state FROM batch_trees t WHERE t.id = b.id)
FROM batches b
WHERE b.parent_id IS NULL AND b.tree_finished_at IS NOT NULL AND b.dedupe_until > clock();

-- Progress that running jobs have reported in their present attempt.
CREATE OR REPLACE VIEW job_progress AS
SELECT p.job_id AS id, j.queue::text, coalesce(j.kind, j.queue)::text AS kind, j.batch_id,
       p.attempt, p.done, p.message, p.at, j.started_at::timestamptz AS claimed_at
FROM progress p JOIN jobs j ON j.id = p.job_id AND j.attempts = p.attempt AND j.status = 'running';

-- One row per worker. `lost`: its lease has run out, also if no worker is left to rescue its jobs.
CREATE OR REPLACE VIEW worker_stats AS
SELECT w.id, w.name, w.pid, w.version,
       CASE WHEN w.lost_at IS NOT NULL OR w.lease_until <= clock() THEN 'lost'
            ELSE w.state END AS state, w.started_at, w.seen_at, w.lease_until, w.lost_at,
       (SELECT count(*) FROM jobs j WHERE j.worker_id = w.id AND j.status = 'running') AS running,
       p.queues, w.kind, w.requested
FROM workers w LEFT JOIN (SELECT k.worker_id, array_agg(k.queue::text ORDER BY k.queue) AS queues
                          FROM known_pools() k GROUP BY 1) p ON p.worker_id = w.id;

\ir pgworkd/sql/95_results.sql
\ir pgworkd/sql/96_explain.sql
\ir pgworkd/sql/97_operations.sql
\ir pgworkd/sql/98_plans.sql
\ir pgworkd/sql/migrations/0001_prototypes.sql
\ir pgworkd/sql/99_finish.sql
COMMIT;
