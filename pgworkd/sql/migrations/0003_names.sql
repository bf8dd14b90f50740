-- Version 3: columns, parameters and functions have the names that the client and the docs give
-- them. Does nothing in a fresh database, and nothing from version 3 on.

DO $migration$
DECLARE
    v_what text;
    v_old  text;
    v_new  text;
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 3)
       OR NOT EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = 'pools'::regclass
                      AND a.attname = 'asleep' AND NOT a.attisdropped) THEN
        RETURN;
    END IF;
    ALTER TABLE pools RENAME COLUMN asleep TO idle;
    ALTER TABLE job_dependencies RENAME COLUMN unless TO on_failed_dependency;
    ALTER TABLE job_dependencies RENAME CONSTRAINT unless_must_be_wait_cancel_or_run
        TO on_failed_dependency_must_be_wait_cancel_or_run;
    FOR v_what IN  -- from Postgres 18 on NOT NULL has a name, too
        SELECT format('ALTER TABLE %s RENAME CONSTRAINT %I TO %I', c.conrelid::regclass, c.conname,
                      replace(replace(c.conname, 'asleep', 'idle'),
                              'unless', 'on_failed_dependency'))
        FROM pg_constraint c
        WHERE c.contype = 'n' AND c.conname IN ('pools_asleep_not_null',
                                                'job_dependencies_unless_not_null')
          AND c.connamespace = 'pgworkd'::regnamespace
    LOOP
        EXECUTE v_what;
    END LOOP;
    -- Functions that have other names, or parameters, whose names cannot be changed. 99_finish.sql
    -- gives the new ones their rights.
    FOR v_old, v_new IN SELECT * FROM (VALUES
        ('set_pool(int, text, int, boolean, int, text, uuid)', 'set_pool'),
        ('depend(uuid, uuid[], text)', 'depend'),
        ('batch_ended(ended_job[], boolean)', 'batch_ended'),
        ('bury(uuid[], text, text, boolean)', 'archive'),
        ('freed(text[], text[], text[])', 'after_ended'),
        ('say_no_wait(text)', 'set_no_wait'),
        ('tell_waiters(uuid[])', 'notify_waiters')) AS f (signature, name)
    LOOP
        PERFORM set_config('pgworkd.functions_before', (
            SELECT jsonb_agg(CASE WHEN f ->> 'name' = split_part(v_old, '(', 1)
                                  THEN f || jsonb_build_object('name', v_new) ELSE f END)::text
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f),
            false);
        EXECUTE format('DROP FUNCTION IF EXISTS %s', v_old);
    END LOOP;
    PERFORM set_config('pgworkd.functions_before', (  -- a step of claim() that is new
        SELECT (jsonb_agg(f)
                || jsonb_agg(f || '{"name": "pick_suspect"}') FILTER (WHERE f ->> 'name' = 'claim'))
               ::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
END $migration$;
