-- Version 5: kinds of workers, leases of single attempts, tokens. Does nothing in a fresh database,
-- and nothing from version 5 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 5)
       OR EXISTS (SELECT FROM pg_attribute a
                  WHERE a.attrelid = 'workers'::regclass AND a.attname = 'requested') THEN
        RETURN;
    END IF;
    -- Functions and tables that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', new.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES ('enqueue', '{enqueue_once}'::text[]),
                         ('claim', '{live_gateways,had_time,standing_worker,heartbeats,abandon,
                                     ask_worker,claim_for,deadline,hand_over,fenced,extend,
                                     fail_overdue,overdue_jobs,retry_delay_s}'))
                         AS l (like_name, names)
                ON l.like_name = o.value ->> 'name',
                 unnest(l.names) AS new (name)), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
    PERFORM set_config('pgworkd.relations_like', (
        coalesce(nullif(current_setting('pgworkd.relations_like', true), ''), '{}')::jsonb
        || '{"tokens": "=jobs"}')::text, false);
    DROP FUNCTION IF EXISTS register(text, int, text, real, uuid, text[]);
    DROP FUNCTION IF EXISTS enqueue(text, jsonb, text, int, timestamptz, float8, timestamptz, int,
                          float8, jsonb, text, timestamptz, float8, text, text, text, text);
    ALTER TABLE workers
        ADD COLUMN kind text NOT NULL DEFAULT 'daemon' CONSTRAINT workers_kind_check
            CHECK (kind IN ('daemon', 'gateway', 'remote', 'standing')),
        ADD COLUMN requested text CONSTRAINT workers_requested_check
            CHECK (requested IN ('quiet', 'stop'));
    ALTER TABLE jobs
        DROP CONSTRAINT remote_claims_are_not_available_yet,
        ADD COLUMN lease_s period_s,
        ADD CONSTRAINT only_a_running_job_has_a_lease
            CHECK (lease_until IS NULL OR worker_id IS NOT NULL),
        ADD CONSTRAINT a_lease_of_its_own_needs_an_assignment
            CHECK ((lease_s IS NULL) = (assignment_id IS NULL)
                   AND (lease_s IS NULL OR lease_until IS NOT NULL));
    ALTER TABLE audit DROP CONSTRAINT audit_what_check, ADD CONSTRAINT audit_what_check CHECK
        (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch', 'delete_batch',
                  'undepend', 'schedule', 'free_key', 'mute', 'worker', 'token'));
END $migration$;
