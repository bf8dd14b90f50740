-- What a fresh installation needs before it is used, and the version that it has now.

DO $$
BEGIN
    PERFORM mend_sequences();
    PERFORM ensure_partitions();
    INSERT INTO schema_version AS v (version) VALUES (2)
    ON CONFLICT (only_row) DO UPDATE
    SET version = excluded.version, installed_at = excluded.installed_at
    WHERE v.version < excluded.version;
    UPDATE schema_version SET script = NULL WHERE script IS NOT NULL;
    PERFORM pg_notify('pgworkd', '{"queues": true}');  -- daemons read their settings again at once
END $$;
RESET search_path;
RESET client_min_messages;
