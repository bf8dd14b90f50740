-- Version 3: columns and parameters have the names that the client gives them. Does nothing in a
-- fresh database, and nothing from version 3 on.

DO $migration$
DECLARE
    v_what text;
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
    -- A parameter's name cannot be changed. 99_finish.sql gives their rights to the new ones.
    DROP FUNCTION set_pool(int, text, int, boolean, int, text, uuid);
    DROP FUNCTION depend(uuid, uuid[], text);
END $migration$;
