"""What to claim, and what a claim has taken."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID


class ClaimedJob(NamedTuple):
    """One claimed attempt. Instants are seconds since the epoch. `payload` None: fetch it with `payloads()`."""

    id: UUID
    kind: str
    payload: str | None
    attempt: int
    failures: int
    max_attempts: int
    timeout_s: float | None
    priority: int
    losses: int
    run_at: float
    created_at: float
    schedule: str | None
    occurrence: float | None
    meta: str | None
    serialize_key: str | None = None

    @property
    def is_suspect(self) -> bool:
        """True if two attempts were lost: a worker runs suspects one at a time."""
        return self.losses > 1


_claimed: Callable[[Iterable[Any]], ClaimedJob] = functools.partial(tuple.__new__, ClaimedJob)
"""`Claimed._make` without its check of the length, for speed."""


def _place(row: Sequence[Any]) -> tuple[int, float, UUID]:
    """The place of a row in claim order: of `priority`, `run_at`, `id`."""
    return -row[7], row[9], row[0]


class Claims(list[ClaimedJob]):
    """The attempts that a claim took, in claim order."""

    again_s: float | None = None
    """Seconds until a rate limit admits more; None: no rate holds jobs back."""
    passed: Sequence[tuple[int, float]] = ()
    """(priority, run_at): up to that run_at, only jobs of left-out kinds remain in that priority."""
    places: str | None = None
    """The `places` of the next order, where jobs have keys."""
    own: Any = None
    """The transaction, still open, in which the one job was claimed; None: the claim is committed."""

    @classmethod
    def read(cls, rows: Sequence[Sequence[Any]]) -> Claims:
        """Reads a result. Rows without an id come last: `again_s` and `places` (as `payload`), and `passed`."""
        if not rows or rows[-1][0] is not None:
            return cls(map(_claimed, sorted(rows, key=_place)))
        extra = [ClaimedJob._make(row) for row in rows if row[0] is None]
        claims = cls(map(_claimed, sorted(rows[: -len(extra)], key=_place)))
        claims.again_s, claims.places = extra[0].created_at, extra[0].payload
        claims.passed = [(row.priority, row.run_at) for row in extra if row.run_at is not None]
        return claims


class ClaimOrder(NamedTuple):
    """What to claim: up to `limit` due jobs of a queue.

    `kinds` and `budgets`: max_attempts of the kinds where it is not 3, for jobs without their own. At `priorities`
    (descending) the claim begins behind the place (run_at, id) given for each; see `ClaimCursor`.
    """

    worker_id: int
    queue: str
    limit: int
    kinds: Sequence[str] = ()
    budgets: Sequence[int] = ()
    priorities: Sequence[int] = ()
    run_ats: Sequence[float] = ()
    positions: Sequence[UUID] = ()
    left_out: Sequence[str] = ()
    """Kinds left to other workers."""
    places: str | None = None
    """The `places` of the previous result, where jobs have keys; '{}' at first, None: do not use places."""
    reach_s: float | None = 0.0
    """A claim of jobs with keys begins this many seconds before `places`; None: at every head."""
    since: float | None = None
    """A claim of jobs with keys begins at this run_at at the latest."""
    renew: bool = True
    """False: the result may repeat `places`, which saves computing new ones."""
    careful: bool = False
    """Pass over jobs that are set aside, because something refused to have them claimed."""
