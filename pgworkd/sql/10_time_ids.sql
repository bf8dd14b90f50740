-- Time and ids: clock() and new_id(), which the defaults of columns call.

-- The database's time. SET pgworkd.clock = '2027-03-28 00:59:59+00' stops it for one session, if
-- its user may CREATE in the schema; for anybody else the setting has no effect, since a session
-- variable is no privilege. (The bodies of clock and new_id are parsed here, not in the caller's
-- search_path, and clock is inlined.)
CREATE OR REPLACE FUNCTION clock() RETURNS timestamptz LANGUAGE sql STABLE PARALLEL SAFE
    RETURN coalesce(CASE WHEN nullif(current_setting('pgworkd.clock', true), '') IS NOT NULL
                         AND has_schema_privilege(session_user, 'pgworkd', 'CREATE')
                         THEN current_setting('pgworkd.clock', true)::timestamptz END,
                             statement_timestamp());

-- The same at this instant, for a statement that has waited for a lock since it began.
CREATE OR REPLACE FUNCTION clock_after_waiting()
RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN coalesce(CASE WHEN nullif(current_setting('pgworkd.clock', true), '') IS NOT NULL
                         AND has_schema_privilege(session_user, 'pgworkd', 'CREATE')
                         THEN current_setting('pgworkd.clock', true)::timestamptz END,
                             clock_timestamp());

-- A job id: uuid version 7 (RFC 9562), so ids sort by time. Before Postgres 18 we build it
-- ourselves, with the microseconds in the 12 bits after the version, so that order holds within a
-- millisecond too.
DO $$
BEGIN
    IF current_setting('server_version_num')::int >= 180000 THEN
        EXECUTE $def$
            CREATE OR REPLACE FUNCTION new_id() RETURNS uuid
                LANGUAGE sql VOLATILE PARALLEL SAFE RETURN uuidv7()
        $def$;
    ELSE
        EXECUTE $def$
            CREATE OR REPLACE FUNCTION new_id() RETURNS uuid
                LANGUAGE sql VOLATILE PARALLEL SAFE RETURN (
                SELECT (substr(hex, 1, 12) || '7' || substr(hex, 13, 3)
                        || substr(translate(substr(rnd, 1, 1), '0123456789abcdef',
                                            '89ab89ab89ab89ab'), 1, 1)
                        || substr(rnd, 2, 15))::uuid
                FROM (SELECT lpad(to_hex(us / 1000), 12, '0')
                      || lpad(to_hex(us % 1000 * 4096 / 1000), 3, '0') AS hex,
                             left(uuid, 8) || right(uuid, 8) AS rnd
                      FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS us,
                                   gen_random_uuid()::text AS uuid) t) x)
        $def$;
    END IF;
END $$;
