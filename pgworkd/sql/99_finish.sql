-- What a fresh installation needs before it is used, and the version that it has now.

-- Functions that a migration has dropped and created again get the owner and the rights that those
-- of that name had (see 00_begin.sql).
DO $$
DECLARE
    v_function record;
    v_grantee  oid;
BEGIN
    FOR v_function IN
        WITH old AS (SELECT * FROM json_to_recordset(
            current_setting('pgworkd.functions_before')::json)
            AS o (oid oid, name name, owner oid, is_publics boolean, grantees oid[]))
        SELECT p.oid::regprocedure AS signature, p.proowner, o.owner, o.is_publics, o.grantees
        FROM pg_proc p JOIN old o ON o.name = p.proname
        WHERE p.pronamespace = 'pgworkd'::regnamespace AND p.oid NOT IN (SELECT n.oid FROM old n)
    LOOP
        IF v_function.owner <> v_function.proowner THEN
            EXECUTE format('ALTER FUNCTION %s OWNER TO %s', v_function.signature,
                           v_function.owner::regrole);
        END IF;
        CONTINUE WHEN v_function.is_publics;
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', v_function.signature);
        FOREACH v_grantee IN ARRAY v_function.grantees LOOP
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %s', v_function.signature,
                           CASE WHEN v_grantee = 0 THEN 'PUBLIC'
                                ELSE v_grantee::regrole::text END);
        END LOOP;
    END LOOP;
END $$;

-- Tables and views that are new get the owner and the rights of those that a migration has named,
-- and with a = before that name the owner only.
DO $$
DECLARE
    v_new  record;
    v_right record;
BEGIN
    FOR v_new IN
        SELECT n.oid::regclass AS name, n.relowner AS now, o.relowner AS owner,
               CASE WHEN l.value NOT LIKE '=%' THEN o.relacl END AS relacl
        FROM jsonb_each_text(coalesce(nullif(current_setting('pgworkd.relations_like', true), ''),
                                      '{}')::jsonb) l
        JOIN pg_class n ON n.relname = l.key AND n.relnamespace = 'pgworkd'::regnamespace
        JOIN pg_class o ON o.relname = ltrim(l.value, '=')
                       AND o.relnamespace = 'pgworkd'::regnamespace
    LOOP
        IF v_new.owner <> v_new.now THEN
            EXECUTE format('ALTER TABLE %s OWNER TO %s', v_new.name, v_new.owner::regrole);
        END IF;
        FOR v_right IN SELECT a.privilege_type, a.grantee FROM aclexplode(v_new.relacl) a
                       WHERE a.grantee <> v_new.owner LOOP
            EXECUTE format('GRANT %s ON TABLE %s TO %s', v_right.privilege_type, v_new.name,
                           CASE WHEN v_right.grantee = 0 THEN 'PUBLIC'
                                ELSE v_right.grantee::regrole::text END);
        END LOOP;
    END LOOP;
END $$;

DO $$
BEGIN
    PERFORM mend_sequences();
    PERFORM ensure_partitions();
    INSERT INTO schema_version AS v (version) VALUES (15)
    ON CONFLICT (only_row) DO UPDATE
    SET version = excluded.version, installed_at = excluded.installed_at
    WHERE v.version < excluded.version;
    UPDATE schema_version SET script = NULL WHERE script IS NOT NULL;
    PERFORM pg_notify('pgworkd', '{"queues": true}');  -- daemons read their settings again at once
END $$;
RESET pgworkd.functions_before;
RESET pgworkd.relations_like;
RESET search_path;
RESET client_min_messages;
