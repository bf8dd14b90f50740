-- Before anything is changed: refuses what this script cannot work with, takes the locks of an
-- installation, and notes who owns each function and who may call it (99_finish.sql).

-- Whatever the server, the database or the role have set. (One message with the whole script is
-- parsed before this: it must have no backslash outside of a body.)
SET LOCAL standard_conforming_strings = on;
SET LOCAL quote_all_identifiers = off;
SET LOCAL check_function_bodies = on;
SET LOCAL default_table_access_method = heap;
SET LOCAL array_nulls = on;
SET LOCAL transform_null_equals = off;
DO $$
DECLARE
    v_table  text;
    v_bodies text;
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'the encoding of this database is %, pgworkd needs UTF8',
            current_setting('server_encoding') USING ERRCODE = '55000',
            HINT = 'CREATE DATABASE ... ENCODING ''UTF8'' TEMPLATE template0';
    END IF;
    -- No partitioned table can be made where this names the database's own.
    PERFORM set_config('default_tablespace', '', true)
    FROM pg_database d JOIN pg_tablespace t ON t.oid = d.dattablespace
    WHERE d.datname = current_database() AND t.spcname = current_setting('default_tablespace');
    PERFORM pg_advisory_xact_lock(1886873445, 0);  -- one installation at a time
    IF to_regclass('pgworkd.schema_version') IS NOT NULL THEN
        IF EXISTS (SELECT FROM pgworkd.schema_version v WHERE v.version > 15) THEN
            RAISE EXCEPTION
                'the schema pgworkd is newer than this script: use that of the newer pgworkd'
                USING ERRCODE = '55000';
        END IF;
    END IF;
    IF to_regnamespace('pgworkd') IS NULL THEN  -- IF NOT EXISTS needs rights even where it exists
        CREATE SCHEMA pgworkd;
    END IF;
    IF to_regclass('pgworkd.schema_version') IS NOT NULL
       AND to_regclass('pgworkd.result_waiters') IS NOT NULL THEN
        -- An upgrade locks at once what it is likely to change, beginning at the door of daemons: a
        -- claim that has `workers` and waits for `jobs` would keep it from changing `workers`.
        IF EXISTS (SELECT FROM pgworkd.schema_version v WHERE v.version < 15) THEN
            LOCK TABLE ONLY pgworkd.workers, ONLY pgworkd.jobs, ONLY pgworkd.queues,
                ONLY pgworkd.batches, ONLY pgworkd.schedules;
        END IF;
    END IF;
    FOREACH v_table IN ARRAY ARRAY['jobs', 'job_dependencies', 'result_waiters', 'batches',
            'batch_additions', 'schedules', 'queues', 'finished_jobs', 'audit'] LOOP
        IF to_regclass('pgworkd.' || v_table) IS NOT NULL THEN  -- all locks, in their order
            EXECUTE format('LOCK TABLE ONLY pgworkd.%I IN SHARE ROW EXCLUSIVE MODE', v_table);
        END IF;
    END LOOP;
    PERFORM set_config('pgworkd.functions_before', coalesce(json_agg(f)::text, '[]'), false)
    FROM (SELECT p.oid, p.proname AS name, p.proowner AS owner, p.proacl IS NULL AS is_publics,
                 ARRAY(SELECT a.grantee FROM aclexplode(p.proacl) a) AS grantees
          FROM pg_proc p WHERE p.pronamespace = 'pgworkd'::regnamespace) f;
    -- Servers refuse to change a table or a domain that a parsed body has as a type (since 15.20):
    -- an upgrade makes these functions again, but for those that something needs.
    WHILE to_regclass('pgworkd.schema_version') IS NOT NULL LOOP
        SELECT string_agg(p.oid::regprocedure::text, ', ') INTO v_bodies
        FROM pg_proc p
        WHERE p.pronamespace = 'pgworkd'::regnamespace AND p.prosqlbody IS NOT NULL
          AND EXISTS (SELECT FROM pgworkd.schema_version v WHERE v.version < 15)
          AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.refclassid = 'pg_proc'::regclass
                          AND d.refobjid = p.oid);
        EXIT WHEN v_bodies IS NULL;
        EXECUTE 'DROP FUNCTION ' || v_bodies;
    END LOOP;
END $$;
SET search_path = pgworkd, pg_catalog;
SET client_min_messages = warning;
