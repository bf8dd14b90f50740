-- Version 6: remote workers state the max_attempts of their kinds. Does nothing in a fresh
-- database, and nothing from version 6 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 6) THEN
        RETURN;
    END IF;
    DROP FUNCTION IF EXISTS claim_for(int[], uuid[], int[], real[], int, uuid, text, int[],
                                      float8[], uuid[], text, float8, float8, boolean);
END $migration$;
