-- Version 13. Does nothing in a fresh database, and nothing from version 13 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 13) THEN
        RETURN;
    END IF;
    -- They return another type.
    DROP FUNCTION IF EXISTS
        next_keys(text, text, int, timestamptz, text[], bigint[]),
        rate_allowance(timestamptz, int, real, int, timestamptz),
        key_allowance(queues, text, int, int, timestamptz), raise_kept();
END $migration$;
