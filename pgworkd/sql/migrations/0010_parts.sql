-- Version 10. Does nothing in a fresh database, and nothing from version 10 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 10) THEN
        RETURN;
    END IF;
    -- Each step of maintenance is a function.
    DROP FUNCTION IF EXISTS do_part(text, text[], jsonb), in_parts(text, text[], text, jsonb),
        try_to_claim(text[], int, text, text[], int[]);
    -- Functions that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', new.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES
                ('in_parts', '{all_done,archive_dead,cancel_dependents,cancel_these,count_down,
                    forget_batches,forget_progress,forget_workers,free_these,give_back,park,
                    presume_dead,promote_these,restore_these}'::text[]),
                ('move', '{forget_audit,forget_kept,forget_tokens,forget_undated}')
            ) AS l (old, names) ON l.old = o.value ->> 'name'
            CROSS JOIN unnest(l.names) AS new (name)), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
END $migration$;
