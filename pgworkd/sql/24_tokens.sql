-- Tokens: who may call the gateway, and for what; and which calls it has answered.

-- A token is pgw_<id>_<secret>; of the secret only its SHA-256 is stored. `scopes`: a JSON object
-- whose members are scopes, each with the queues that it is narrowed to (patterns, as in a shell),
-- or null for all: {"enqueue": ["mail", "report-*"], "read": null}. Forgotten with the audit, once
-- expired or revoked.
CREATE TABLE IF NOT EXISTS tokens (
    id           text PRIMARY KEY CONSTRAINT token_id_must_have_8_to_32_letters_and_digits
                 CHECK (id ~ '^[a-z0-9]{8,32}$'),
    name         text NOT NULL CONSTRAINT token_name_must_have_1_to_200_characters
                 CHECK (char_length(name) BETWEEN 1 AND 200),
    sha256       bytea NOT NULL CONSTRAINT token_sha256_must_have_32_bytes
                 CHECK (octet_length(sha256) = 32),
    scopes       jsonb NOT NULL CONSTRAINT token_scopes_must_be_a_json_object
                 CHECK (jsonb_typeof(scopes) = 'object'),
    created_at   timestamptz NOT NULL DEFAULT clock(),
    created_by   text NOT NULL DEFAULT '',
    expires_at   timestamptz,
    revoked_at   timestamptz
);

-- Calls with a key of the caller's, done at most once: `answer` is what such a call was answered,
-- and is given again to one with the same `sha256` (of its method, path and body). Kept for a day.
CREATE TABLE IF NOT EXISTS idempotent_calls (
    caller       text NOT NULL,
    key          text NOT NULL CONSTRAINT idempotency_key_must_have_1_to_255_characters
                 CHECK (char_length(key) BETWEEN 1 AND 255),
    sha256       bytea NOT NULL,
    answer       text,
    at           timestamptz NOT NULL DEFAULT clock(),
    PRIMARY KEY (caller, key)
);
CREATE INDEX IF NOT EXISTS idempotent_calls_at ON idempotent_calls (at);

-- Begins a call in the transaction that does what it asks for. `is_new`: do it, and call
-- end_once(). Else it was done, or is of another digest (`same` false), and `answer` is what it was
-- answered. Of two at once the second waits for the end of the first one's transaction. Locks the
-- key (its row).
CREATE OR REPLACE FUNCTION begin_once(p_caller text, p_key text, p_sha256 bytea)
RETURNS TABLE (is_new boolean, same boolean, answer text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    LOOP
        INSERT INTO idempotent_calls (caller, key, sha256) VALUES (p_caller, p_key, p_sha256)
        ON CONFLICT DO NOTHING;
        is_new := FOUND;
        EXIT WHEN is_new;
        SELECT c.sha256 = p_sha256, c.answer INTO same, answer FROM idempotent_calls c
        WHERE c.caller = p_caller AND c.key = p_key;
        EXIT WHEN FOUND;  -- else it was deleted in between
    END LOOP;
    RETURN NEXT;
END $$;

-- Notes what a call is answered. Locks its row.
CREATE OR REPLACE FUNCTION end_once(p_caller text, p_key text, p_answer text) RETURNS void
LANGUAGE sql VOLATILE AS $$
    UPDATE idempotent_calls c SET answer = p_answer WHERE c.caller = p_caller AND c.key = p_key
$$;
