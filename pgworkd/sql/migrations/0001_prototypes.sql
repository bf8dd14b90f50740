-- Takes over the rows of a prototype, which 0002_before_versions.sql has put aside as the schema
-- pgworkd_prototype. It stays: nothing reads it any more, and it may be dropped. Does nothing in
-- any other database.

DO $migration$
DECLARE
    v_table   text;
    v_columns text;
    v_values  text;
BEGIN
    IF to_regclass('pgworkd_prototype.schema_version') IS NULL
       OR to_regclass('schema_version') IS NOT NULL AND EXISTS (SELECT FROM schema_version) THEN
        RETURN;
    END IF;
    PERFORM ensure_partitions();  -- before the default one has rows of these days
    FOREACH v_table IN ARRAY ARRAY['workers', 'queues', 'schedules', 'batches', 'batch_additions',
                                   'jobs', 'finished_jobs', 'audit'] LOOP
        SELECT string_agg(quote_ident(n.attname), ', '),
               string_agg(format('o.%I::text::%s', n.attname,
                                 format_type(n.atttypid, n.atttypmod)), ', ')
        INTO v_columns, v_values
        FROM pg_attribute n JOIN pg_attribute o ON o.attname = n.attname
        WHERE n.attrelid = v_table::regclass AND n.attnum > 0 AND n.attgenerated = ''
          AND o.attrelid = to_regclass('pgworkd_prototype.' || v_table) AND NOT o.attisdropped;
        CONTINUE WHEN v_columns IS NULL;
        EXECUTE format('ALTER TABLE %I DISABLE TRIGGER USER', v_table);
        EXECUTE format('INSERT INTO %I (%s) OVERRIDING SYSTEM VALUE SELECT %s FROM '
                       'pgworkd_prototype.%1$I o', v_table, v_columns, v_values);
        EXECUTE format('ALTER TABLE %I ENABLE TRIGGER USER', v_table);
    END LOOP;
    DROP TABLE pgworkd_prototype.schema_version;  -- so that this is not done again
END $migration$;
