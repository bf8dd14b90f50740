-- Version 15. Does nothing in a fresh database, and nothing from version 15 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 15) THEN
        RETURN;
    END IF;
END $migration$;
