-- Version 8. Does nothing in a fresh database, and nothing from version 8 on.

DO $migration$
DECLARE
    v_what text;
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 8) THEN
        RETURN;
    END IF;
    -- Up to 5, one number stood for several schemas, whose functions have other arguments or
    -- another result. All but those that something needs are made again; 99_finish.sql gives them
    -- their rights.
    WHILE EXISTS (SELECT FROM schema_version v WHERE v.version < 6) LOOP
        SELECT string_agg(p.oid::regprocedure::text, ', ') INTO v_what
        FROM pg_proc p
        WHERE p.pronamespace = 'pgworkd'::regnamespace
          AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_proc'::regclass
                          AND d.refobjid = p.oid);
        EXIT WHEN v_what IS NULL;
        EXECUTE 'DROP FUNCTION ' || v_what;
    END LOOP;
    DROP INDEX IF EXISTS tokens_expired;
    DROP FUNCTION IF EXISTS made_since(uuid[]),
        -- it has one more argument
        matching(text, text, text, text, uuid, text, uuid, int, boolean);
    -- Functions and tables that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', new.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES ('claim', '{declare_rules,declarer}'::text[]),
                         ('depth', '{rule_of}'),
                         ('schedule_changed', '{schedule_ended}'),
                         ('claim', '{raise_kept,refuse,is_no_rows_fault,carefully,is_careful,
                                     is_refused,refuse_claims,try_to_claim,defers,deferred,
                                     check_settled}'::text[]),
                         ('count_deaths', '{count_these}'),
                         ('prune', '{days_ruled_out,rule_out_days,validate_days}'),
                         ('became_all', '{made_at,finished_of,jobs_of}'),
                         ('register', '{belong,adopt}'),
                         ('depth', '{server_id,is_origin}'))
                         AS l (like_name, names)
                ON l.like_name = o.value ->> 'name',
                 unnest(l.names) AS new (name)), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
    DROP FUNCTION IF EXISTS payloads(uuid[], int[], int, int, uuid),
        settle_released(uuid[], int[], float8[], text[], int, uuid);
    ALTER TABLE workers ADD COLUMN IF NOT EXISTS rules jsonb;
    ALTER TABLE jobs ADD COLUMN IF NOT EXISTS begun integer NOT NULL DEFAULT 0;
    UPDATE jobs SET begun = 1 WHERE expires_at IS NOT NULL AND attempts > 0;
    DROP INDEX IF EXISTS jobs_expiring;
    ALTER TABLE workers DROP CONSTRAINT workers_state_check, ADD CONSTRAINT workers_state_check
        CHECK (state IN ('running', 'blocked', 'stopping', 'vanished'));
    -- The time zone of an interval has never meant anything.
    UPDATE schedules s SET timezone = 'UTC' WHERE s.every_s IS NOT NULL AND s.timezone <> 'UTC';
    ALTER TABLE schedules
        DROP CONSTRAINT IF EXISTS timezone_is_for_cron_only,
        ADD CONSTRAINT timezone_is_for_cron_only CHECK (every_s IS NULL OR timezone = 'UTC');
    -- The hash of a group was MD5, which servers in FIPS mode do not have.
    IF to_regclass('pgworkd.error_groups') IS NOT NULL THEN
        UPDATE error_groups g
        SET error_group = left(encode(sha256(convert_to(g.error_type || ': ' || g.pattern, 'UTF8')),
                                      'hex'), 32)::uuid;
    END IF;
    PERFORM set_config('pgworkd.relations_like', (
        coalesce(nullif(current_setting('pgworkd.relations_like', true), ''), '{}')::jsonb
        || '{"origin": "schedules"}')::text, false);
    ALTER TABLE audit DROP CONSTRAINT audit_what_check, ADD CONSTRAINT audit_what_check CHECK
        (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch', 'delete_batch',
                  'undepend', 'schedule', 'free_key', 'mute', 'worker', 'token', 'endpoint',
                  'adopt'));
END $migration$;
