-- Version 9. Does nothing in a fresh database, and nothing from version 9 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 9) THEN
        RETURN;
    END IF;
    -- Remote workers number their claims. Each has one more argument.
    DROP FUNCTION IF EXISTS
        claim(int, text, int, text[], int[], int[], float8[], uuid[], uuid, text[], text, float8,
              float8, boolean),
        claim_for(int[], uuid[], int[], real[], int, uuid, text, int[], float8[], uuid[], text,
                  float8, float8, boolean, text[], int[]);
    ALTER TABLE jobs ADD COLUMN IF NOT EXISTS claim_id integer,
        ADD COLUMN IF NOT EXISTS listed integer;
    -- Functions that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', new.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            CROSS JOIN (VALUES ('list_held'), ('take_back')) AS new (name)
            WHERE o.value ->> 'name' = 'extend'), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
END $migration$;
