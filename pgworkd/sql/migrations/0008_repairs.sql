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
END $migration$;
