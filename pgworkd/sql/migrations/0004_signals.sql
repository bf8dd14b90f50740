-- Version 4: the walks over priorities share a step. Does nothing in a fresh database, and nothing
-- from version 4 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 4) THEN
        RETURN;
    END IF;
    -- Functions that are new get the rights of those whose steps they are: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(old || jsonb_build_object('name', new.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) old
            JOIN (VALUES ('depth', 'next_priority'),
                         ('next_due', 'first_run_at')) AS new (step_of, name)
                ON new.step_of = old ->> 'name'), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
END $migration$;
