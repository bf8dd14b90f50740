-- Endpoints: where the jobs of a queue are sent by HTTP. Only operators write them; a job never
-- names one. While an endpoint is paused or disabled, so are the queues that are sent to it.

-- `secret_name`: what signs the requests, as the daemon's environment or files have it, never as a
-- row. With mode `callback` an answer 202 leaves the attempt to a later request, for
-- callback_timeout_s.
CREATE TABLE IF NOT EXISTS endpoints (
    name         name_text PRIMARY KEY,
    url          text NOT NULL CONSTRAINT endpoint_url_must_begin_with_http_or_https
                 CHECK (url ~ '^https?://[^/?#]' AND char_length(url) <= 2000),
    mode         text NOT NULL DEFAULT 'sync' CONSTRAINT endpoint_mode_must_be_sync_or_callback
                 CHECK (mode IN ('sync', 'callback')),
    timeout_s    real NOT NULL DEFAULT 30 CONSTRAINT endpoint_timeout_must_be_0_1_s_to_an_hour
                 CHECK (timeout_s BETWEEN 0.1 AND 3600),
    callback_timeout_s real NOT NULL DEFAULT 300
                 CONSTRAINT endpoint_callback_timeout_must_be_10_s_to_7_min
                 CHECK (callback_timeout_s BETWEEN 10 AND 420),
    headers      jsonb NOT NULL DEFAULT '{}' CONSTRAINT endpoint_headers_must_be_a_json_object
                 CHECK (jsonb_typeof(headers) = 'object'),
    secret_name  text CONSTRAINT endpoint_secret_must_be_a_name
                 CHECK (secret_name ~ '^[A-Za-z][A-Za-z0-9_-]{0,63}$'),
    unsigned     boolean NOT NULL DEFAULT false,
    allow_private boolean NOT NULL DEFAULT false,  -- addresses that are not of the public internet
    strict_results boolean NOT NULL DEFAULT false, -- a 2xx whose result cannot be stored: dead
    warned_at    timestamptz, warned_why text,     -- the last such answer: see warn_of()
    paused_until timestamptz, paused_why text,
    disabled_at timestamptz, disabled_why text,
    disabled_queues text[] NOT NULL DEFAULT '{}',  -- those that were paused with it
    created_at   timestamptz NOT NULL DEFAULT clock(),
    updated_at   timestamptz NOT NULL DEFAULT clock(),
    CONSTRAINT endpoint_needs_a_secret_or_unsigned CHECK (unsigned = (secret_name IS NULL)),
    CONSTRAINT endpoint_timeouts_of_callbacks_must_be_7_min_together
        CHECK (mode <> 'callback' OR timeout_s + callback_timeout_s <= 420)
);

DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = 'queues'::regclass
                     AND c.conname = 'queue_endpoint_must_exist') THEN
        ALTER TABLE queues ADD CONSTRAINT queue_endpoint_must_exist
            FOREIGN KEY (endpoint) REFERENCES endpoints (name) ON UPDATE CASCADE;
    END IF;
END $$;

-- Daemons read the endpoints again, whoever changes one; sets updated_at. Locks nothing.
CREATE OR REPLACE TRIGGER endpoints_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE
    ON endpoints FOR EACH STATEMENT EXECUTE FUNCTION queues_changed();
CREATE OR REPLACE TRIGGER endpoint_dated BEFORE UPDATE ON endpoints FOR EACH ROW
    EXECUTE FUNCTION queue_dated();

-- A queue that is sent elsewhere, or nowhere, goes on if it was paused because of its endpoint.
-- Locks nothing.
CREATE OR REPLACE FUNCTION queue_rerouted() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.paused_until = OLD.paused_until AND EXISTS (
           SELECT FROM endpoints e WHERE e.name = OLD.endpoint
             AND (NEW.paused_until = e.paused_until
                  OR NEW.paused_until = 'infinity' AND OLD.name = ANY (e.disabled_queues))) THEN
        NEW.paused_until := NULL;
    END IF;
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER queue_rerouted BEFORE UPDATE OF endpoint ON queues FOR EACH ROW
    WHEN (NEW.endpoint IS DISTINCT FROM OLD.endpoint) EXECUTE FUNCTION queue_rerouted();

-- Changes an endpoint: p_changes names columns of `endpoints`, null resets one. Audited, without
-- `url` and `headers`, in which a secret may stand. False: there is none of that name, and p_create
-- is false. Locks the endpoint's row.
CREATE OR REPLACE FUNCTION set_endpoint(p_name text, p_changes jsonb, p_create boolean DEFAULT true,
                                        p_who text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_changes jsonb := p_changes - '{name,created_at,updated_at,disabled_at,disabled_why,
                                     disabled_queues,paused_until,paused_why,warned_at,
                                     warned_why}'::text[];
    v_new     endpoints;
    v_before  jsonb;
    v_is_new  boolean;
BEGIN
    LOOP
        SELECT e.* INTO v_new FROM endpoints e WHERE e.name = p_name FOR UPDATE;
        v_is_new := NOT FOUND;
        IF v_is_new AND NOT p_create THEN
            RETURN false;
        END IF;
        v_before := CASE WHEN v_is_new THEN '{}' ELSE to_jsonb(v_new) END;
        v_new := jsonb_populate_record(v_new, v_changes);
        v_new.mode := coalesce(v_new.mode, 'sync');
        v_new.timeout_s := coalesce(v_new.timeout_s, 30);
        v_new.callback_timeout_s := coalesce(v_new.callback_timeout_s, 300);
        v_new.headers := coalesce(v_new.headers, '{}');
        v_new.unsigned := coalesce(v_new.unsigned, false);
        v_new.allow_private := coalesce(v_new.allow_private, false);
        v_new.strict_results := coalesce(v_new.strict_results, false);
        IF v_is_new THEN
            INSERT INTO endpoints (name, url, mode, timeout_s, callback_timeout_s, headers,
                                   secret_name, unsigned, allow_private, strict_results)
            VALUES (p_name, v_new.url, v_new.mode, v_new.timeout_s, v_new.callback_timeout_s,
                    v_new.headers, v_new.secret_name, v_new.unsigned, v_new.allow_private,
                    v_new.strict_results)
            ON CONFLICT DO NOTHING;
            EXIT WHEN FOUND;  -- else someone has made the row meanwhile
        ELSE
            UPDATE endpoints e
            SET url = v_new.url, mode = v_new.mode, timeout_s = v_new.timeout_s,
                callback_timeout_s = v_new.callback_timeout_s, headers = v_new.headers,
                secret_name = v_new.secret_name, unsigned = v_new.unsigned,
                allow_private = v_new.allow_private, strict_results = v_new.strict_results
            WHERE e.name = p_name;
            EXIT;
        END IF;
    END LOOP;
    PERFORM note_endpoint(p_name, v_before, to_jsonb(v_new), p_who);
    RETURN true;
END $$;

-- Adds to the audit what has changed of an endpoint; of `url` and `headers` only that they have.
-- Locks nothing.
CREATE OR REPLACE FUNCTION note_endpoint(p_name text, p_before jsonb, p_after jsonb, p_who text)
RETURNS void
LANGUAGE sql VOLATILE AS $$
    INSERT INTO audit (who, what, queue, before, after)
    SELECT who(p_who), 'endpoint', '', n.named || coalesce(
               jsonb_object_agg(c.name, c.before) FILTER (WHERE c.before IS NOT NULL), '{}'),
           n.named || coalesce(
               jsonb_object_agg(c.name, c.after) FILTER (WHERE c.name IS NOT NULL), '{}')
    FROM (SELECT jsonb_build_object('endpoint', p_name) AS named) n LEFT JOIN (
          SELECT a.key AS name,
                 CASE WHEN a.key NOT IN ('url', 'headers') THEN p_before -> a.key
                      WHEN p_before ? a.key THEN '"..."' END AS before,
                 CASE WHEN a.key IN ('url', 'headers') THEN '"..."' ELSE a.value END AS after
          FROM jsonb_each(p_after) a
          WHERE a.value IS DISTINCT FROM coalesce(p_before -> a.key, 'null')
            AND a.key NOT IN ('name', 'created_at', 'updated_at')) c ON true
    GROUP BY n.named
$$;

-- Pauses an endpoint for at least p_for_s seconds, and the queues that are sent to it. Returns the
-- end of the pause; NULL: there is no such endpoint, or it is disabled. Locks the endpoint's row,
-- then the rows of its queues in order of name.
CREATE OR REPLACE FUNCTION pause_endpoint(p_name text, p_for_s float8, p_why text)
RETURNS timestamptz
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_until timestamptz;
BEGIN
    UPDATE endpoints e
    SET paused_until = greatest(e.paused_until, clock() + make_interval(secs => p_for_s)),
        paused_why = left(p_why, 500)
    WHERE e.name = p_name AND e.disabled_at IS NULL
    RETURNING e.paused_until INTO v_until;
    IF FOUND THEN
        PERFORM hold_queues(p_name, v_until);
    END IF;
    RETURN v_until;
END $$;

-- Pauses the queues of an endpoint until then at least; returns those that were paused for less.
-- Locks their rows in order of name.
CREATE OR REPLACE FUNCTION hold_queues(p_endpoint text, p_until timestamptz) RETURNS text[]
LANGUAGE sql VOLATILE AS $$
    WITH locked AS MATERIALIZED (
        SELECT q.name FROM queues q
        WHERE q.endpoint = p_endpoint AND coalesce(q.paused_until < p_until, true)
        ORDER BY q.name FOR NO KEY UPDATE
    ), held AS (
        UPDATE queues q SET paused_until = p_until FROM locked l WHERE q.name = l.name
        RETURNING q.name::text
    )
    SELECT coalesce(array_agg(h.name ORDER BY h.name), '{}') FROM held h
$$;

-- Notes for operators that an endpoint has answered 2xx with a result that cannot be stored. Locks
-- the endpoint's row, unless that is locked: then nothing is noted.
CREATE OR REPLACE FUNCTION warn_of(p_name text, p_why text) RETURNS void
LANGUAGE sql VOLATILE AS $$
    UPDATE endpoints e SET warned_at = clock(), warned_why = left(p_why, 500)
    FROM (SELECT w.name FROM endpoints w WHERE w.name = p_name FOR NO KEY UPDATE SKIP LOCKED) l
    WHERE e.name = l.name
$$;

-- Disables an endpoint, and pauses the queues that are sent to it until it is enabled. Audited.
-- False: there is none of that name, or it is disabled already. Locks as pause_endpoint().
CREATE OR REPLACE FUNCTION disable_endpoint(p_name text, p_why text, p_who text DEFAULT NULL)
RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    UPDATE endpoints e SET disabled_at = clock(), disabled_why = left(p_why, 500)
    WHERE e.name = p_name AND e.disabled_at IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE endpoints e SET disabled_queues = hold_queues(p_name, 'infinity') WHERE e.name = p_name;
    PERFORM note_endpoint(p_name, '{"disabled": false}',
                          jsonb_build_object('disabled', true, 'why', left(p_why, 500)), p_who);
    RETURN true;
END $$;

-- Enables an endpoint and ends its pause; and so those of its queues that are paused because of it.
-- Audited. False: there is none of that name. Locks as pause_endpoint().
CREATE OR REPLACE FUNCTION enable_endpoint(p_name text, p_who text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_was endpoints;
BEGIN
    SELECT e.* INTO v_was FROM endpoints e WHERE e.name = p_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE endpoints e
    SET disabled_at = NULL, disabled_why = NULL, disabled_queues = '{}', paused_until = NULL,
        paused_why = NULL
    WHERE e.name = p_name;
    WITH locked AS MATERIALIZED (
        SELECT q.name FROM queues q
        WHERE q.endpoint = p_name AND (q.paused_until = v_was.paused_until
            OR q.paused_until = 'infinity' AND q.name = ANY (v_was.disabled_queues))
        ORDER BY q.name FOR NO KEY UPDATE
    )
    UPDATE queues q SET paused_until = NULL FROM locked l WHERE q.name = l.name;
    PERFORM note_endpoint(p_name, jsonb_build_object('disabled', v_was.disabled_at IS NOT NULL),
                          '{"disabled": false}', p_who);
    RETURN true;
END $$;

-- Deletes an endpoint, to which no queue is sent any more (else a foreign key violation). Audited.
-- False: there is none of that name. Locks the endpoint's row.
CREATE OR REPLACE FUNCTION remove_endpoint(p_name text, p_who text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    DELETE FROM endpoints e WHERE e.name = p_name;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM note_endpoint(p_name, '{}', '{"removed": true}', p_who);
    RETURN true;
END $$;
