"""The statements with which application code inserts jobs and manages batches, in each driver's parameter style.

The parameters of a job stand in the order of `new_job.FIELDS`.
"""

from __future__ import annotations

from re import sub
from typing import NamedTuple


class Statement(NamedTuple):
    """A statement in each style of parameters: $1, %s and :p1."""

    numbered: str
    format: str
    named: str


def styles(sql: str) -> Statement:
    """A statement whose parameters $1, $2, ... occur once each, in order."""
    return Statement(sql, sub(r"\$\d+", "%s", sql), sub(r"\$(\d+)", r":p\1", sql))


# The client draws the ids: RETURNING guarantees no order, and a server without OpenSSL opens /dev/urandom for each.
# All values are sent as text or numbers, so that no codec or adapter of the caller for jsonb or uuid interferes.
# Drivers are slow for each element of a list: ids and payloads are one text each, which the server splits, and a value
# common to all jobs of the statement is sent once, beside an empty list, which unnest() fills with NULLs.
INSERT_ONE = styles("""
INSERT INTO pgworkd.jobs
       (id, payload, queue, kind, priority,
        run_at, expires_at, max_attempts, timeout_s,
        dedupe_key, meta, serialize_key, limit_key,
        yields, dedupe_until)
VALUES (CAST(CAST($1 AS text) AS uuid), CAST(CAST($2 AS text) AS jsonb),
        CAST($3 AS text), CAST($4 AS text), CAST($5 AS int),
        coalesce(CAST(CAST($6 AS text) AS timestamptz),
                 pgworkd.clock() + make_interval(secs => coalesce(CAST($7 AS float8), 0))),
        CAST(CAST($8 AS text) AS timestamptz), CAST($9 AS int), CAST($10 AS float8),
        CAST($11 AS text), CAST(CAST($12 AS text) AS jsonb), CAST($13 AS text), CAST($14 AS text),
        coalesce(CAST($15 AS text) = 'yield', false),
        coalesce(CAST(CAST($16 AS text) AS timestamptz),
                 pgworkd.clock() + make_interval(secs => CAST($17 AS float8))))
RETURNING 1""")
INSERT = styles("""
WITH stored AS (
    INSERT INTO pgworkd.jobs
           (id, payload, queue, kind, priority,
            run_at, expires_at, max_attempts, timeout_s,
            dedupe_key, meta, serialize_key, limit_key,
            yields, dedupe_until)
    SELECT CAST(id AS uuid), CAST(payload AS jsonb),
           coalesce(queue, CAST($1 AS text)), coalesce(kind, CAST($2 AS text)), coalesce(priority, CAST($3 AS int)),
           coalesce(CAST(coalesce(run_at, CAST($4 AS text)) AS timestamptz),
                    pgworkd.clock() + make_interval(secs => coalesce(delay_s, CAST($5 AS float8), 0))),
           CAST(coalesce(expires_at, CAST($6 AS text)) AS timestamptz),
           coalesce(max_attempts, CAST($7 AS int)), coalesce(timeout_s, CAST($8 AS float8)),
           coalesce(dedupe_key, CAST($9 AS text)), CAST(coalesce(meta, CAST($10 AS text)) AS jsonb),
           coalesce(serialize_key, CAST($11 AS text)), coalesce(limit_key, CAST($12 AS text)),
           coalesce(coalesce(on_retry, CAST($13 AS text)) = 'yield', false),
           coalesce(CAST(coalesce(dedupe_until, CAST($14 AS text)) AS timestamptz),
                    pgworkd.clock() + make_interval(secs => coalesce(dedupe_for_s, CAST($15 AS float8))))
    FROM unnest(string_to_array(CAST($16 AS text), chr(10)), string_to_array(CAST($17 AS text), chr(10)),
                CAST($18 AS text[]), CAST($19 AS text[]), CAST($20 AS int[]), CAST($21 AS text[]),
                CAST($22 AS float8[]), CAST($23 AS text[]), CAST($24 AS int[]), CAST($25 AS float8[]),
                CAST($26 AS text[]), CAST($27 AS text[]), CAST($28 AS text[]), CAST($29 AS text[]),
                CAST($30 AS text[]), CAST($31 AS text[]), CAST($32 AS float8[])) AS new
        (id, payload, queue, kind, priority, run_at, delay_s, expires_at, max_attempts, timeout_s, dedupe_key, meta,
         serialize_key, limit_key, on_retry, dedupe_until, dedupe_for_s)
    RETURNING 1
)
SELECT count(*) FROM stored""")
ENQUEUE = styles("""
SELECT CAST(id AS text), created, changed
FROM pgworkd.enqueue(
    CAST($1 AS text), p_kind => CAST($2 AS text), p_payload => CAST(CAST($3 AS text) AS jsonb),
    p_priority => CAST($4 AS int), p_run_at => CAST(CAST($5 AS text) AS timestamptz), p_delay_s => CAST($6 AS float8),
    p_expires_at => CAST(CAST($7 AS text) AS timestamptz), p_max_attempts => CAST($8 AS int),
    p_timeout_s => CAST($9 AS float8), p_dedupe_key => CAST($10 AS text), p_meta => CAST(CAST($11 AS text) AS jsonb),
    p_serialize_key => CAST($12 AS text), p_limit_key => CAST($13 AS text),
    p_on_retry => coalesce(CAST($14 AS text), 'hold'), p_dedupe_until => CAST(CAST($15 AS text) AS timestamptz),
    p_dedupe_for_s => CAST($16 AS float8), p_on_duplicate => CAST($17 AS text))""")

ENQUEUE_ONCE = styles("""
SELECT created, same, status, keep_s
FROM pgworkd.enqueue_once(
    CAST(CAST($1 AS text) AS uuid), CAST($2 AS text), p_kind => CAST($3 AS text),
    p_payload => CAST(CAST($4 AS text) AS jsonb), p_priority => CAST($5 AS int),
    p_run_at => CAST(CAST($6 AS text) AS timestamptz), p_delay_s => CAST($7 AS float8),
    p_expires_at => CAST(CAST($8 AS text) AS timestamptz), p_max_attempts => CAST($9 AS int),
    p_timeout_s => CAST($10 AS float8), p_dedupe_key => CAST($11 AS text),
    p_meta => CAST(CAST($12 AS text) AS jsonb), p_serialize_key => CAST($13 AS text),
    p_limit_key => CAST($14 AS text), p_on_retry => coalesce(CAST($15 AS text), 'hold'),
    p_dedupe_until => CAST(CAST($16 AS text) AS timestamptz), p_dedupe_for_s => CAST($17 AS float8))""")

DEPEND = styles("""
SELECT sum(pgworkd.depend(CAST(job AS uuid), CAST(after AS uuid[]), on_failed_dependency))
FROM unnest(CAST($1 AS text[]), CAST($2 AS text[]), CAST($3 AS text[])) AS new (job, after, on_failed_dependency)""")

CREATE_BATCH = styles("""
SELECT CAST(id AS text), created
FROM pgworkd.create_batch(
    p_name => CAST($1 AS text), p_parent => CAST(CAST($2 AS text) AS uuid), p_queue => CAST($3 AS text),
    p_kind => CAST($4 AS text), p_stream => CAST($5 AS boolean), p_stream_kind => CAST($6 AS text),
    p_final => CAST($7 AS boolean), p_max_failures => CAST($8 AS int), p_dedupe_key => CAST($9 AS text),
    p_dedupe_until => CAST(CAST($10 AS text) AS timestamptz), p_dedupe_for_s => CAST($11 AS float8),
    p_on_complete => CAST(CAST($12 AS text) AS jsonb), p_on_failure => CAST(CAST($13 AS text) AS jsonb))""")
ADD_JOBS = styles("""
SELECT cardinality(pgworkd.add_jobs(
    CAST(CAST($1 AS text) AS uuid), p_ids => CAST(CAST($2 AS text[]) AS uuid[]),
    p_payloads => CAST(CAST($3 AS text[]) AS jsonb[]), p_queue => CAST($4 AS text), p_kind => CAST($5 AS text),
    p_priority => CAST($6 AS int), p_run_at => CAST(CAST($7 AS text) AS timestamptz), p_max_attempts => CAST($8 AS int),
    p_timeout_s => CAST($9 AS float8), p_meta => CAST(CAST($10 AS text) AS jsonb)))""")
SEAL_BATCH = styles("SELECT pgworkd.seal_batch(CAST(CAST($1 AS text) AS uuid))")
CANCEL_BATCH = styles(
    "SELECT cancelled, requested, more FROM pgworkd.cancel_batch(CAST(CAST($1 AS text) AS uuid), 10000)"
)
BATCH_PROGRESS = styles("""
SELECT CAST(id AS text), name, depth, state, total, done, completed, dead, cancelled
FROM pgworkd.batch_tree(CAST(CAST($1 AS text) AS uuid))""")
