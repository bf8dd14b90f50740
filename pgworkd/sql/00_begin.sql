-- Before anything is changed: refuses what this script cannot work with, takes the locks of an
-- installation, and notes who owns each function and who may call it (99_finish.sql).

DO $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'the encoding of this database is %, pgworkd needs UTF8',
            current_setting('server_encoding') USING ERRCODE = '55000',
            HINT = 'CREATE DATABASE ... ENCODING ''UTF8'' TEMPLATE template0';
    END IF;
    PERFORM pg_advisory_xact_lock(1886873445, 0);  -- one installation at a time
    IF to_regclass('pgworkd.schema_version') IS NOT NULL THEN
        IF EXISTS (SELECT FROM pgworkd.schema_version v WHERE v.version > 7) THEN
            RAISE EXCEPTION
                'the schema pgworkd is newer than this script: use that of the newer pgworkd'
                USING ERRCODE = '55000';
        END IF;
    END IF;
    IF to_regnamespace('pgworkd') IS NULL THEN  -- IF NOT EXISTS needs rights even where it exists
        CREATE SCHEMA pgworkd;
    END IF;
    IF to_regclass('pgworkd.audit') IS NOT NULL THEN  -- all that a second run locks, in lock order
        LOCK TABLE ONLY pgworkd.jobs, ONLY pgworkd.job_dependencies, ONLY pgworkd.result_waiters,
            ONLY pgworkd.batches, ONLY pgworkd.batch_additions, ONLY pgworkd.schedules,
            ONLY pgworkd.queues, ONLY pgworkd.finished_jobs, ONLY pgworkd.audit
            IN SHARE ROW EXCLUSIVE MODE;
    END IF;
    PERFORM set_config('pgworkd.functions_before', coalesce(json_agg(f)::text, '[]'), false)
    FROM (SELECT p.oid, p.proname AS name, p.proowner AS owner, p.proacl IS NULL AS is_publics,
                 ARRAY(SELECT a.grantee FROM aclexplode(p.proacl) a) AS grantees
          FROM pg_proc p WHERE p.pronamespace = 'pgworkd'::regnamespace) f;
END $$;
SET search_path = pgworkd, pg_catalog;
SET client_min_messages = warning;
