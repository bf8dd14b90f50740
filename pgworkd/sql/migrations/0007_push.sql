-- Version 7: endpoints, to which the jobs of queues are sent by HTTP. Does nothing in a fresh
-- database, and nothing from version 7 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 7)
       OR EXISTS (SELECT FROM pg_attribute a
                  WHERE a.attrelid = 'queues'::regclass AND a.attname = 'endpoint') THEN
        RETURN;
    END IF;
    -- Functions and tables that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', new.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES ('claim', '{pause_endpoint,disable_endpoint,enable_endpoint,hold_queues,
                                     note_endpoint}'::text[]),
                         ('mend_sequences', '{set_endpoint,remove_endpoint,queue_rerouted}'))
                         AS l (like_name, names)
                ON l.like_name = o.value ->> 'name',
                 unnest(l.names) AS new (name)), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
    PERFORM set_config('pgworkd.relations_like', (
        coalesce(nullif(current_setting('pgworkd.relations_like', true), ''), '{}')::jsonb
        || '{"endpoints": "=jobs"}')::text, false);
    ALTER TABLE queues ADD COLUMN endpoint name_text;
    ALTER TABLE audit DROP CONSTRAINT audit_what_check, ADD CONSTRAINT audit_what_check CHECK
        (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch', 'delete_batch',
                  'undepend', 'schedule', 'free_key', 'mute', 'worker', 'token', 'endpoint'));
END $migration$;
