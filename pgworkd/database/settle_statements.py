"""The statements that end attempts, as the store sends them."""

from __future__ import annotations

COMPLETED = "SELECT pgworkd.settle_completed($1, $2, $3, $4, $5, $6, $7, $8, $9)"
COMPLETED_BY_HANDLER = "SELECT pgworkd.complete_own($1, $2, $3, $4, $5, $6, $7, $8, $9)"
FAILED = "SELECT id, status FROM pgworkd.settle_failed($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
RELEASED = "SELECT pgworkd.settle_released($1, $2, $3, $4, $5, $6, $7)"
ENDED = "SELECT pgworkd.settle_ended($1, $2, $3, $4, $5, $6)"
SETTLED = """SELECT a.id, CASE a.status WHEN 'discarded' THEN 'dead' ELSE a.status END
    FROM unnest($1::uuid[], $2::int[]) AS s (id, attempt)
    JOIN pgworkd.all_jobs a ON a.id = s.id AND a.attempts = s.attempt AND a.status <> 'running'
    WHERE a.id = ANY ($1) AND ($3::int IS NULL OR coalesce(a.worker_id, $3) = $3)
      AND NOT coalesce(a.errors -> -1 @> jsonb_build_object('type', 'lost', 'attempt', s.attempt), false)"""
STILL_RUNNING = """SELECT j.id FROM pgworkd.jobs j JOIN unnest($1::uuid[], $2::int[]) AS s (id, attempt)
    ON j.id = s.id AND j.attempts = s.attempt WHERE j.id = ANY ($1) AND j.status = 'running'
      AND ($3::int IS NULL OR j.worker_id = $3)
      AND NOT EXISTS (SELECT FROM pgworkd.workers w WHERE w.id = $3 AND w.token <> $4::uuid)"""
SKIPPING = {
    sql: sql.replace("$1, $2", "$1, pgworkd.unlocked($1, $2)", 1) for sql in (COMPLETED, FAILED, RELEASED, ENDED)
}
"""The same, skipping rows that other transactions have locked."""
