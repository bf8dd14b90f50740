"""The statements that end attempts, as the store sends them."""

from __future__ import annotations

import functools

COMPLETED = "SELECT pgworkd.settle_completed($1, $2, $3, $4, $5, $6, $7, $8, $9)"
COMPLETED_BY_HANDLER = "SELECT pgworkd.complete_own($1, $2, $3, $4, $5, $6, $7, $8, $9)"
FAILED = "SELECT id, status FROM pgworkd.settle_failed($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
RELEASED = "SELECT pgworkd.settle_released($1, $2, $3, $4, $5, $6, $7)"
ENDED = "SELECT pgworkd.settle_ended($1, $2, $3, $4, $5, $6)"
SETTLED = """SELECT a.id, CASE a.status WHEN 'discarded' THEN 'dead' ELSE a.status END
    FROM unnest($1::uuid[], $2::int[]) AS s (id, attempt)
    JOIN pgworkd.jobs_of($1) a ON a.id = s.id AND a.attempts = s.attempt AND a.status <> 'running'
    WHERE ($3::int IS NULL OR coalesce(a.worker_id, $3) = $3)
      AND NOT coalesce(a.errors -> -1 @> jsonb_build_object('type', 'lost', 'attempt', s.attempt), false)"""
STILL_RUNNING = """SELECT j.id FROM pgworkd.jobs j JOIN unnest($1::uuid[], $2::int[]) AS s (id, attempt)
    ON j.id = s.id AND j.attempts = s.attempt WHERE j.id = ANY ($1) AND j.status = 'running'
      AND ($3::int IS NULL OR j.worker_id = $3)
      AND NOT EXISTS (SELECT FROM pgworkd.workers w WHERE w.id = $3 AND w.token <> $4::uuid)"""


@functools.cache
def variant(sql: str, /, *, attempts: str = "$2", skip_locked: bool = False, deferred: bool = False) -> str:
    """One of these; `attempts`: the expression for those.

    `skip_locked`: skips rows that other transactions have locked. `deferred`: leaves all effects on other rows to
    maintenance, which sets aside what is refused.
    """
    if skip_locked:
        attempts = f"pgworkd.unlocked($1, {attempts})"
    if deferred:
        attempts = f"pgworkd.deferred({attempts})"
    return sql.replace("$1, $2", f"$1, {attempts}", 1)
