"""Why cancel, retry and discard leave a job alone: one reason for each, and what to do instead."""

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
        FROM pgworkd.finished_jobs f WHERE f.id = u.id
        LIMIT 1) s ON true
    LEFT JOIN LATERAL (
        SELECT h.id, h.status FROM pgworkd.jobs h
        WHERE s.status = 'dead' AND h.queue = s.queue AND h.dedupe_key = s.dedupe_key AND h.status <> 'dead'
        LIMIT 1) k ON true"""

_INSTEAD = {
    "cancel": {"dead": "a dead job has ended: pgworkd discard moves it to the history, pgworkd retry runs it again"},
    "retry": {
        "running": "it runs now: cancel it, or let it end",
        "pending": "it waits to run already",
        "blocked": "it waits for its key or for other jobs: pgworkd undepend lets it run without those",
        "failed": "it waits for its retry",
    },
    "discard": dict.fromkeys(("pending", "blocked", "failed", "running"), "only dead jobs can be discarded: cancel it"),
}
_UNKNOWN = "check the id; its history may be forgotten"
_RULES = {
    "cancel": "it is over: only waiting and running jobs can be cancelled",
    "retry": "it is over: only dead and failed jobs can run again, so enqueue a new one",
    "discard": "it is over: only dead jobs can be discarded",
}


class Refused(NamedTuple):
    """A job that was left alone: its status (`unknown`: there is none), and why, with the remedy.

    `holder`: of a dead job, the one that has its dedupe key.
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


def reasons(act: str, rows: Iterable[Sequence[object]]) -> dict[UUID, Refused]:
    """Why `act` (cancel, retry, discard) leaves these alone, from the rows of SQL."""
    return {facts.id: _refused(act, facts) for facts in (read(_Facts, row) for row in rows)}


def _refused(act: str, facts: _Facts) -> Refused:
    holder = None
    if facts.status == "unknown":
        why = _UNKNOWN
    elif act == "retry" and facts.status == "dead" and facts.cancelled:
        why = "its batch was cancelled: delete that first (pgworkd batches delete), and it can run again by itself"
    elif act == "retry" and facts.status == "dead" and facts.holder is not None:
        holder = facts.holder
        why = (
            "its dedupe key is kept by a job that has ended, until its dedupe_until: try again then, or free the key "
            "with pgworkd keys free"
            if facts.kept
            else "a live job holds its dedupe key: wait until that has ended, or cancel it"
        )
    elif facts.status in ("dead", "failed") and act != "cancel":
        why = "it has changed meanwhile: try again"
    else:
        why = _INSTEAD[act].get(facts.status, _RULES[act])
    return Refused(facts.id, facts.status, why, holder)


def grouped(refused: Iterable[Refused]) -> list[tuple[int, str, str]]:
    """(jobs, status, reason), the most frequent first."""
    counts = Counter((one.status, one.reason) for one in refused)
    return [(count, *key) for key, count in counts.most_common()]
