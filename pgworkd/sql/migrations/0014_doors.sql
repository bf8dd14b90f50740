-- Version 14. Does nothing in a fresh database, and nothing from version 14 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 14) THEN
        RETURN;
    END IF;
    DROP INDEX IF EXISTS batches_key;  -- a key belongs to its queue
    ALTER TABLE IF EXISTS endpoints
        ADD COLUMN IF NOT EXISTS strict_results boolean NOT NULL DEFAULT false,
        ADD COLUMN IF NOT EXISTS warned_at timestamptz,
        ADD COLUMN IF NOT EXISTS warned_why text;
    -- Functions that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', l.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES ('pause_endpoint', 'warn_of'), ('set_endpoint', 'begin_once'),
                         ('set_endpoint', 'end_once'), ('forget_tokens', 'forget_calls'))
                AS l (old, name) ON l.old = o.value ->> 'name'), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
    PERFORM set_config('pgworkd.relations_like', (
        coalesce(nullif(current_setting('pgworkd.relations_like', true), ''), '{}')::jsonb
        || '{"idempotent_calls": "=jobs"}')::text, false);
END $migration$;
