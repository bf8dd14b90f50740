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

    -- The prototypes, until 21 November 2026, are put aside; 0001_prototypes.sql takes their rows.
    IF to_regclass('result_waiters') IS NULL THEN
        SELECT format('CREATE SCHEMA pgworkd AUTHORIZATION %s', n.nspowner::regrole) INTO v_what
        FROM pg_namespace n WHERE n.nspname = 'pgworkd';
        ALTER SCHEMA pgworkd RENAME TO pgworkd_prototype;
        EXECUTE v_what;
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
END $migration$;
