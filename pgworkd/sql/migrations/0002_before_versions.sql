-- Version 2: everything that databases of version 1 may lack, which changed while it was in use and
-- never raised its number. Does nothing in a fresh database, and nothing from version 2 on.

DO $migration$
DECLARE
    v_what text;
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 2) THEN
        RETURN;
    END IF;

    -- Columns. Only what is missing is altered: each ALTER TABLE waits for all readers.
    IF NOT EXISTS (SELECT FROM pg_attribute a
                   WHERE a.attrelid = 'workers'::regclass AND a.attname = 'token') THEN
        PERFORM setval('workers_id_seq',
                       coalesce((SELECT max(w.id) FROM workers w WHERE w.id < 1000000000), 1))
        FROM workers_id_seq q WHERE q.last_value >= 1000000000;
        ALTER TABLE workers ALTER COLUMN id SET MAXVALUE 1000000000 SET CYCLE;
    END IF;
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'queues'::regclass
               AND a.attname = 'ageing_s' AND NOT a.attisdropped) THEN
        ALTER TABLE queues DROP COLUMN limited, DROP COLUMN ageing_s,
            ADD COLUMN limited boolean GENERATED ALWAYS AS
                (num_nonnulls(max_running, limit_per_key, rate, rate_per_key) > 0 OR fair) STORED;
    END IF;
    FOR v_what IN
        SELECT format('ALTER TABLE %I ADD COLUMN %I %s', c.relation, c.name, c.definition)
        FROM (VALUES
            ('schema_version', 'script', 'text'),
            ('workers', 'schedules', 'text[]'),
            ('workers', 'token', 'uuid'),
            ('workers', 'kinds', 'text[]'),
            ('queues', 'max_losses', 'integer CONSTRAINT max_losses_must_be_1_to_1000
                CHECK (max_losses BETWEEN 1 AND 1000)'),
            ('rates', 'searched', 'text'),
            ('schedules', 'missed_grace_s', 'real NOT NULL DEFAULT 60
                CONSTRAINT missed_grace_s_must_be_0_to_366_days
                CHECK (missed_grace_s BETWEEN 0 AND 31622400)'),
            ('schedules', 'waits_for_retries', 'boolean NOT NULL DEFAULT false'),
            ('schedules', 'retired_at', 'timestamptz'),
            ('schedules', 'in_force_since', 'timestamptz NOT NULL DEFAULT clock()'),
            ('jobs', 'counted', 'boolean'),
            ('jobs', 'promoted', 'timestamptz'),
            ('finished_jobs', 'keep_until', 'timestamptz'),
            ('finished_jobs', 'expires_at', 'timestamptz'),
            ('finished_jobs', 'began_at', 'timestamptz'),
            ('batches', 'dedupe_until', 'timestamptz CONSTRAINT dedupe_until_needs_a_dedupe_key
                CHECK (dedupe_until IS NULL OR dedupe_key IS NOT NULL)'),
            ('batches', 'completed_called', 'boolean NOT NULL DEFAULT false'),
            ('batches', 'failure_called', 'boolean NOT NULL DEFAULT false'),
            ('pending_effects', 'put_off_at', 'timestamptz NOT NULL DEFAULT clock()'),
            ('pending_effects', 'done_to', 'uuid'),
            ('pending_effects', 'left_behind', 'boolean NOT NULL DEFAULT false')
        ) AS c (relation, name, definition)
        WHERE to_regclass(c.relation) IS NOT NULL
          AND NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass(c.relation)
                          AND a.attname = c.name AND NOT a.attisdropped)
    LOOP
        EXECUTE v_what;
    END LOOP;

    -- Constraints. Values already stored are not checked again.
    IF EXISTS (SELECT FROM pg_constraint c WHERE c.contypid = 'json_result'::regtype
               AND pg_get_constraintdef(c.oid) LIKE '%<= 2000)%') THEN
        ALTER DOMAIN payload_object DROP CONSTRAINT value_must_not_exceed_1_mib;
        ALTER DOMAIN payload_object ADD CONSTRAINT value_must_not_exceed_1_mib
            CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152) NOT VALID;
        ALTER DOMAIN json_result DROP CONSTRAINT result_must_not_exceed_1_mib;
        ALTER DOMAIN json_result ADD CONSTRAINT result_must_not_exceed_1_mib
            CHECK (pg_column_size(VALUE) <= 200 OR octet_length(VALUE::text) <= 2097152) NOT VALID;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = to_regclass('audit')
                   AND pg_get_constraintdef(c.oid) LIKE '%free_key%') THEN
        ALTER TABLE IF EXISTS audit DROP CONSTRAINT IF EXISTS audit_what_check;
        ALTER TABLE IF EXISTS audit ADD CONSTRAINT audit_what_check
            CHECK (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch',
                            'delete_batch', 'undepend', 'schedule', 'free_key'));
    END IF;

    -- Indexes that others have replaced: those of jobs for which one loss made a suspect, too.
    FOR v_what IN
        SELECT i.indexrelid::regclass::text FROM pg_index i
        WHERE i.indrelid = 'jobs'::regclass
          AND pg_get_expr(i.indpred, i.indrelid) ~ 'losses [=>] 0'
    LOOP
        EXECUTE format('DROP INDEX %s', v_what);
    END LOOP;
    DROP INDEX IF EXISTS jobs_running, jobs_running_of, jobs_schedule_live, batches_dedupe;

    -- Views whose columns have other names or another order; rights on them are lost.
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass('all_jobs')
               AND a.attname = 'started_at' AND a.attnum < 13) THEN
        DROP VIEW all_jobs;
    END IF;
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass('job_progress')
               AND a.attname = 'started_at') THEN
        DROP VIEW job_progress;
    END IF;

    -- Functions with other arguments, or another result. None of them is called by daemons whose
    -- schema was brought up to date with their own script.
    IF to_regprocedure('forget(int, int)') IS NOT NULL THEN
        DROP FUNCTION forget(int, int);
        DROP FUNCTION prune(int, int, int);
    END IF;
    FOREACH v_what IN ARRAY ARRAY[
        'allowance(text, int)',
        'apply_ends(bigint[])',
        'by_turn(queues, int, tid[], tid[])',
        'by_turn(queues, int, tid[], tid[], timestamptz)',
        'by_turn(queues, int, tid[], tid[], timestamptz, boolean)',
        'by_turn(queues, int, tid[], tid[], timestamptz, boolean, text[])',
        'claim(int, text, int, text[], int[], int[], float8[], uuid[], int)',
        'claim(int, text, int, text[], int[], int[], float8[], uuid[], int, uuid)',
        'claim(int, text, int, text[], int[], int[], float8[], uuid[], uuid)',
        'claim(int, text, int, text[], int[], int[], float8[], uuid[], uuid, text[])',
        'complete_own(uuid[], int[], text[], text[], timestamptz[], int[], int, uuid)',
        'create_batch(text, text, text, uuid, boolean, text, boolean, int, jsonb, jsonb, text)',
        'drop_pool(int, text)',
        'due_keys(text, int, timestamptz)',
        'heartbeat(int, text)',
        'in_order(text, int, tid[], boolean)',
        'in_order(text, int, tid[], boolean, text[])',
        'in_order(text, int, tid[], boolean, text[], claim_place[])',
        'in_order(text, int, tid[], real, boolean)',
        'key_allowance(queues, text, int, int)',
        'key_has_room(text, text)',
        'mend_dependencies()',
        'next_due(text[])',
        'next_keys(text, text, int, timestamptz)',
        'of_key(text, text, int, tid[])',
        'of_key(text, text, int, tid[], text[])',
        'payloads(uuid[], int[], int)',
        'pick(text, int, tid[])',
        'pick(text, int, tid[], timestamptz)',
        'pick(text, int, tid[], timestamptz, text[])',
        'put_schedule(text, text, text, text, int, text, text, text)',
        'rate_allowance(timestamptz, int, real, int)',
        'register(text, int, text, real)',
        'register(text, int, text, real, uuid)',
        'reopened(uuid[])',
        'report_progress(uuid[], int[], real[], text[])',
        'retry(uuid[], text)',
        'running_of(int, float8)',
        'running_of(int, uuid, float8)',
        'set_pool(int, text, int, boolean, int, text)',
        'settle_and_claim(uuid[], int[], text[], int, text, int, text[], int[], int[],
          float8[], uuid[], int)',
        'settle_and_claim(uuid[], int[], text[], int, text, int, text[], int[], int[],
          float8[], uuid[], int, uuid)',
        'settle_completed(uuid[], int[], text[], text[], timestamptz[], int[], int, uuid)',
        'settle_completed(uuid[], int[], text[], text[], timestamptz[], int[], text)',
        'settle_completed(uuid[], int[], text[], text[], timestamptz[], int[], text, int, uuid)',
        'settle_ended(uuid[], int[], text[], text[])',
        'settle_failed(uuid[], int[], float8[], boolean[], text[], text[], text[],
          timestamptz[], int[])',
        'settle_released(uuid[], int[], float8[], text[])',
        'sign_off(int)',
        'spend(text, tid[])',
        'wanted(int)',
        'wanted(int, text)'
    ] LOOP
        EXECUTE format('DROP FUNCTION IF EXISTS %s', v_what);
    END LOOP;
END $migration$;
