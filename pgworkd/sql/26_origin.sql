-- Where the jobs of this database are to run: in the database and on the server where its first
-- worker started, or for the environment that its workers name. A copy of the database (a dump
-- restored elsewhere, a clone) has the row of what it was copied from: so a worker can tell.
CREATE TABLE IF NOT EXISTS origin (
    server      bigint,      -- NULL: its workers may not see it
    database    text NOT NULL,
    environment text CONSTRAINT environment_must_have_1_to_200_characters
                CHECK (char_length(environment) BETWEEN 1 AND 200),
    since       timestamptz NOT NULL DEFAULT clock(),
    only_row    boolean PRIMARY KEY DEFAULT true CHECK (only_row)
);

-- The identifier of this server's data directory: that of its standbys, snapshots and clones, too,
-- not that of a server into which a dump is restored, nor of one that pg_upgrade has made. NULL
-- where it may not be seen. Locks nothing.
CREATE OR REPLACE FUNCTION server_id() RETURNS bigint LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (SELECT s.system_identifier FROM pg_control_system() s);
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;
END $$;

-- True if jobs of this database may run here, for workers of this environment (NULL: they name
-- none); before the first worker has started, for all. Locks nothing.
CREATE OR REPLACE FUNCTION is_origin(p_environment text) RETURNS boolean LANGUAGE sql STABLE AS $$
    SELECT coalesce((
        SELECT CASE WHEN o.environment IS NOT NULL
                    THEN o.environment IS NOT DISTINCT FROM p_environment
                    ELSE o.database = current_database()
                         AND coalesce(o.server = server_id(), true) END
        FROM origin o), true)
$$;

-- The same, before a worker registers: notes where it is, or for which environment, if nobody has,
-- or if the environment was moved. Locks the row.
CREATE OR REPLACE FUNCTION belong(p_environment text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO origin (server, database, environment)
    VALUES (server_id(), current_database(), p_environment) ON CONFLICT (only_row) DO NOTHING;
    IF FOUND THEN
        RETURN true;
    END IF;
    PERFORM FROM origin FOR UPDATE;  -- two environments that start at once: the first one has it
    IF NOT is_origin(p_environment) THEN
        RETURN false;
    ELSIF NOT EXISTS (SELECT FROM origin o
                      WHERE o.environment IS NOT DISTINCT FROM p_environment
                        AND o.database = current_database()
                        AND (o.server = server_id() OR server_id() IS NULL)) THEN
        PERFORM adopt(p_environment);
    END IF;
    RETURN true;
END $$;

-- From now on the jobs of this database run here, for workers of this environment. Locks the row.
CREATE OR REPLACE FUNCTION adopt(p_environment text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_before jsonb := (SELECT to_jsonb(o) - 'only_row' FROM origin o FOR UPDATE);
BEGIN
    INSERT INTO origin AS o (server, database, environment)
    VALUES (server_id(), current_database(), p_environment)
    ON CONFLICT (only_row) DO UPDATE
    SET server = excluded.server, database = excluded.database,
        environment = excluded.environment, since = excluded.since;
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(), 'adopt', '', coalesce(v_before, '{}'), to_jsonb(o) - 'only_row' FROM origin o;
END $$;
