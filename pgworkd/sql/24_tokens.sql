-- Tokens: who may call the gateway, and for what.

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
