-- Version 4: the walks over priorities share a step; statistics, deaths, alerts. Does nothing in a
-- fresh database, and nothing from version 4 on.

DO $migration$
BEGIN
    IF to_regclass('pgworkd.schema_version') IS NULL THEN
        RETURN;
    ELSIF EXISTS (SELECT FROM schema_version v WHERE v.version >= 4) THEN
        RETURN;
    END IF;
    -- Functions and tables that are new get the rights of others: see 99_finish.sql.
    PERFORM set_config('pgworkd.functions_before', (
        SELECT (jsonb_agg(f) || coalesce((
            SELECT jsonb_agg(o.value || jsonb_build_object('name', new.name))
            FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) o
            JOIN (VALUES ('next_due', '{first_run_at}'::text[]),
                         ('depth', '{next_priority,histogram_bounds,percentile,throughput,
                                     error_message,error_pattern,error_group,dead_groups}'),
                         ('prune', '{sample_queues,append_minutes,sum_minutes,thin_samples,roll_up,
                                     note_deaths,count_deaths,make_alert,declare_alerts,
                                     forget_deaths}'),
                         ('cancel', '{mute_errors}')) AS l (like_name, names)
                ON l.like_name = o.value ->> 'name',
                 unnest(l.names) AS new (name)), '[]'))::text
        FROM jsonb_array_elements(current_setting('pgworkd.functions_before')::jsonb) f), false);
    PERFORM set_config('pgworkd.relations_like', '{"samples": "progress",
        "queue_samples": "progress", "queue_minutes": "progress", "deaths": "progress",
        "error_groups": "progress", "alert_rules": "progress", "alerts": "progress",
        "queue_depths": "queue_stats"}', false);
    ALTER TABLE audit DROP CONSTRAINT audit_what_check, ADD CONSTRAINT audit_what_check CHECK
        (what IN ('cancel', 'retry', 'discard', 'edit', 'queue', 'cancel_batch',
                  'delete_batch', 'undepend', 'schedule', 'free_key', 'mute'));
END $migration$;
