"""Bugs planted into what may be said by an option, a variable or a member of a body."""

from __future__ import annotations

from tests.chaos.bug import python, sql

_DEFAULTS = "tests/sql/test_queue_defaults.py"

BUGS = (
    python(
        "a directory whose name is too long is a traceback",
        "settings/file",
        "if not os.path.isdir(path):",
        "if not path.is_dir():",
        tests="tests/fuzz/test_config.py",
    ),
    python(
        "a secret's variable is a misspelt setting",
        "settings/file",
        " if not each.startswith(SECRET_PREFIX)):",
        " if each):",
        tests="tests/unit/test_config.py -k secret_may",
    ),
    python(
        "the address of the application wins over that of the file",
        "settings/config",
        '    if not {"dsn", "remote"} & origins.keys() and (url := database_url()):',
        '    if "dsn" not in flags and (url := database_url()):',
        tests="tests/unit/test_config.py -k address",
    ),
    python(
        "a look at the schema takes any version for the right one",
        "database/schema",
        '        return f"the schema is at version {found}, newer',
        '        return None and f"the schema is at version {found}, newer',
        tests="tests/engine/test_cli.py -k migrate_check",
    ),
    python(
        "the prefix of an id is read in one route only",
        "gateway/api/routes/jobs",
        "async def get_result(request: Request, job_id: JobId,",
        "async def get_result(request: Request, job_id: UUID,",
        tests="tests/http/test_jobs.py -k prefix",
    ),
    python(
        "a payload that is no object is refused without a remedy",
        "core/payload",
        '}: an object is needed, so {WRAP}")\n    if len(data)',
        '}: an object is needed")\n    if len(data)',
        tests="tests/unit/test_payload.py",
    ),
    python(
        "a job that is played again never expires",
        "admin/jobs",
        "expires_at=ended.expires_at if keep_expires_at else None",
        "expires_at=None",
        tests="tests/http/test_jobs.py -k unless_its_time",
    ),
    python(
        "the time of a callback begins with the answer",
        "push/endpoint",
        "self.timeout_s + self.callback_timeout_s > CALLBACK_S_MAX",
        "self.callback_timeout_s > CALLBACK_S_MAX",
        tests="tests/sql/test_endpoints.py -k seven",
    ),
    python(
        "a log of what is sent has the signature",
        "push/traffic",
        '_SHOWN = ("webhook-id",',
        '_SHOWN = ("webhook-signature", "webhook-id",',
        tests="tests/push/test_traffic.py",
    ),
    python(
        "a log of what is sent has what ends the attempt",
        "log/http",
        '    return without_secrets(body[:BODY_BYTES].decode(errors="replace"))',
        '    return body[:BODY_BYTES].decode(errors="replace")',
        tests="tests/push/test_traffic.py",
    ),
    python(
        "many jobs have no key by their payloads",
        "client/statements",
        '" ELSE pgworkd.payload_key(coalesce({kind}, {queue}), {payload}) END"',
        '" ELSE {payload}::text END"',
        tests="tests/http/test_dedupe_by.py",
    ),
    sql(
        "a key by payload knows no kind",
        "jsonb_build_array(p_kind, p_payload)",
        "jsonb_build_array(p_payload)",
        tests="tests/http/test_dedupe_by.py",
    ),
    sql(
        "a key of a job of a batch is one of its queue",
        "        NEW.dedupe_key := item_key(NEW.batch_id, NEW.dedupe_key);\n",
        "",
        tests="tests/http/test_item_keys.py",
    ),
    sql(
        "who holds a key of a batch is looked for in the queue",
        "j.dedupe_key = item_key(p_batch, v_key) AND",
        "j.dedupe_key = v_key AND",
        tests="tests/http/test_item_keys.py -k added_again",
    ),
    sql(
        "what is added again is counted again",
        "        IF p_on_duplicate = 'skip' OR v_holder.status IN",
        "        INSERT INTO batch_additions (batch_id, added) SELECT p_batch, 1 WHERE p_batch IS NOT NULL;\n"
        "        IF p_on_duplicate = 'skip' OR v_holder.status IN",
        tests="tests/sql/test_dedupe_model.py",
    ),
    sql(
        "an upgrade leaves the keys of ended jobs of batches to their queue",
        "WHERE i.status = 'completed' AND f.id = i.id",
        "WHERE false AND f.id = i.id",
        tests="tests/sql/test_migrations.py -k become_those",
    ),
    python(
        "a tree in one call drops the keys of its jobs",
        "gateway/api/routes/batches",
        "await at.add(some.payloads, **some.options())",
        "await at.add(some.payloads)",
        tests="tests/http/test_item_keys.py -k in_one_call",
    ),
    sql(
        "a streamed job does not ask its batch how often it is tried",
        "s.kind, s.max_attempts, s.meta,",
        "s.kind, NULL, s.meta,",
        tests="tests/http/test_batches.py -k how_often",
    ),
    python(
        "who may see no payloads sees the meta of batches",
        "gateway/api/routes/batches",
        'access.allows("payload", queue) else None',
        "access else None",
        tests="tests/http/test_batches.py -k how_often",
    ),
    sql(
        "a tree whose key is kept with it is kept for ever",
        " OR b.dedupe_until = 'infinity')",
        ")",
        tests="tests/sql/test_kept_keys.py -k as_long",
    ),
    sql(
        "the items of a child stay when its tree is deleted with them",
        "v_below uuid[] := with_below(ARRAY[p_batch]); v_limit",
        "v_below uuid[] := ARRAY[p_batch]; v_limit",
        tests="tests/http/test_batches.py -k deleted_with",
    ),
    sql(
        "two runs of a job may have one number",
        "CHECK (attempts > 0 OR started_at IS NULL),",
        "CHECK (attempts > 0 OR true),",
        tests="tests/sql/test_fence.py -k plain_update",
    ),
    sql(
        "the time of a callback begins with the answer, in SQL",
        "CHECK (mode <> 'callback' OR timeout_s + callback_timeout_s <= 420)\n);",
        "CHECK (mode <> 'callback' OR callback_timeout_s <= 420)\n);",
        tests="tests/sql/test_endpoints.py -k seven",
    ),
    sql(
        "a handler says more than its queue",
        "WHEN v_attempts IS NOT NULL AND j.attempts = 0 THEN coalesce(j.max_attempts, v_attempts)\n",
        "",
        tests=_DEFAULTS,
    ),
    sql(
        "a rule that comes later counts for what has begun",
        "WHEN v_attempts IS NOT NULL AND j.attempts = 0",
        "WHEN v_attempts IS NOT NULL",
        tests=_DEFAULTS,
    ),
    sql(
        "what passed the time limit of its queue gives no reason",
        "coalesce(j.timeout_s, q.timeout_s) AS timeout_s",
        "j.timeout_s AS timeout_s",
        tests="tests/sql/test_attempt_leases.py",
    ),
    sql(
        "the time limit of a queue is that of jobs with one of their own",
        "              coalesce(j.timeout_s, v_timeout_s)::real,",
        "              coalesce(v_timeout_s, j.timeout_s)::real,",
        tests=_DEFAULTS,
    ),
)
