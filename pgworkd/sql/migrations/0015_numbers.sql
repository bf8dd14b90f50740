-- Version 15. Does nothing in a fresh database, and nothing from version 15 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 15) THEN
        RETURN;
    END IF;
    ALTER TABLE IF EXISTS queue_minutes
        ADD COLUMN IF NOT EXISTS cancelled bigint NOT NULL DEFAULT 0,
        ADD COLUMN IF NOT EXISTS expired bigint NOT NULL DEFAULT 0;
    -- It returns more columns.
    DROP FUNCTION IF EXISTS throughput(timestamptz, timestamptz, int, text, text);
    -- Functions that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', l.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES ('append_minutes', 'finer_counts'),
                         ('append_minutes', 'usual_runs'), ('archive', 'count_ended'))
                AS l (old, name) ON l.old = o.value ->> 'name'), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
END $migration$;
