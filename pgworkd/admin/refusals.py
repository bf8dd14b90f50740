"""Why cancel, retry or discard does not apply to a job: a reason for each status, and what to do instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin.queries import read

SQL = """SELECT u.id, coalesce(s.status, 'unknown'), coalesce(s.cancelled, false), k.id,
        coalesce(k.status = 'completed', false)
    FROM (SELECT DISTINCT unnest($1::uuid[]) AS id) u
    LEFT JOIN LATERAL (
        SELECT j.status::text AS status, j.queue, j.dedupe_key, j.status = 'dead' AND EXISTS (
                   SELECT FROM pgworkd.batches b WHERE b.id = j.batch_id AND b.cancelled_at IS NOT NULL) AS cancelled
        FROM pgworkd.jobs j WHERE j.id = u.id AND j.status <> 'completed'
        UNION ALL
        SELECT CASE f.status WHEN 'dead' THEN 'discarded' ELSE f.status::text END, NULL, NULL, false
        FROM pgworkd.finished_of(ARRAY[u.id]) f
        LIMIT 1) s ON true
    LEFT JOIN LATERAL (
        SELECT h.id, h.status FROM pgworkd.jobs h
        WHERE s.status = 'dead' AND h.queue = s.queue AND h.dedupe_key = s.dedupe_key AND h.status <> 'dead'
        LIMIT 1) k ON true"""

_INSTEAD = {
    "cancel": {
        "dead": "a dead job cannot be cancelled: pgworkd discard moves it to the history, pgworkd retry runs it again"
    },
    "retry": {
        "running": "it is running: cancel it, or wait until it ends",
        "pending": "it is already waiting to run",
        "blocked": "it waits for its serialize key or for other jobs: pgworkd undepend drops its dependencies",
        "failed": "it is waiting for its retry",
    },
    "discard": dict.fromkeys(("pending", "blocked", "failed", "running"), "only dead jobs can be discarded: cancel it"),
}
_UNKNOWN = "check the id; its history may have been deleted"
_RULES = {
    "cancel": "it has finished: only waiting and running jobs can be cancelled",
    "retry": "it has finished: only dead and failed jobs can be retried, so enqueue a new one",
    "discard": "it has finished: only dead jobs can be discarded",
}


class Refused(NamedTuple):
    """A job to which an operation does not apply: its status (`unknown`: no such job), and the reason with the remedy.

    `holder`: the job that has the dedupe key of a dead job.
    """

    id: UUID
    status: str
    reason: str
    holder: UUID | None = None


class _Facts(NamedTuple):
    id: UUID
    status: str
    cancelled: bool
    holder: UUID | None
    kept: bool


def reasons(operation: str, rows: Iterable[Sequence[object]]) -> dict[UUID, Refused]:
    """Why the operation (cancel, retry, discard) does not apply to these jobs, from the rows of SQL."""
    return {facts.id: _refused(operation, facts) for facts in (read(_Facts, row) for row in rows)}


def _refused(operation: str, facts: _Facts) -> Refused:
    holder = None
    if facts.status == "unknown":
        why = _UNKNOWN
    elif operation == "retry" and facts.status == "dead" and facts.cancelled:
        why = "its batch was cancelled: delete the batch first (pgworkd batches delete), then retry the job on its own"
    elif operation == "retry" and facts.status == "dead" and facts.holder is not None:
        holder = facts.holder
        why = (
            "a finished job keeps its dedupe key until dedupe_until: try again after that, or free the key with "
            "pgworkd keys free"
            if facts.kept
            else "a live job has its dedupe key: wait until that job has finished, or cancel it"
        )
    elif facts.status in ("dead", "failed") and operation != "cancel":
        why = "it changed in the meantime: try again"
    else:
        why = _INSTEAD[operation].get(facts.status, _RULES[operation])
    return Refused(facts.id, facts.status, why, holder)


def grouped(refused: Iterable[Refused]) -> list[tuple[int, str, str]]:
    """(jobs, status, reason), the most frequent first."""
    counts = Counter((one.status, one.reason) for one in refused)
    return [(count, *key) for key, count in counts.most_common()]
