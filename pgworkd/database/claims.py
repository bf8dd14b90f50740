"""What a claim asks for, and its answer, as the database gives it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

CLAIM = """SELECT id, kind, payload, attempt, failures, max_attempts, timeout_s, priority, losses, run_at,
    created_at, schedule, occurrence, meta, serialize_key
    FROM pgworkd.claim($1, $2, $3, $4, $5, $6, $7, $8, $14, $9, $10, $11, $12, $13)"""
"""Of a `ClaimOrder`, and the worker's token."""


class Claimed(NamedTuple):
    """One claimed attempt, as `claim()` returns it. Instants in s since the epoch. No payload: ask `payloads()`."""

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
        """True if it was lost twice: of these, a worker runs one at a time."""
        return self.losses > 1


_claimed: Callable[[Iterable[Any]], Claimed] = functools.partial(tuple.__new__, Claimed)
"""`Claimed._make` without its look at the length, which each job would pay."""


class Claims(list[Claimed]):
    """What a claim took, in its order."""

    again_s: float | None = None
    """A rate holds more back, for so long."""
    passed: Sequence[tuple[int, float]] = ()
    """Priorities of which, up to that run_at, only jobs of the kinds left out are left."""
    places: str | None = None
    """Where jobs have keys: what the next order is to say as `places`."""

    @classmethod
    def read(cls, rows: Sequence[Sequence[Any]]) -> Claims:
        """The rows of an answer; those without an id come last: `again_s` and `places` (as `payload`), and `passed`."""
        if not rows or rows[-1][0] is not None:
            return cls(map(_claimed, rows))
        said = [Claimed._make(row) for row in rows if row[0] is None]
        claims = cls(map(_claimed, rows[: -len(said)]))
        claims.again_s, claims.places = said[0].created_at, said[0].payload
        claims.passed = [(row.priority, row.run_at) for row in said if row.run_at is not None]
        return claims


class ClaimOrder(NamedTuple):
    """What to claim: up to `limit` due jobs of a queue.

    `kinds` and `budgets`: max_attempts of the kinds that differ from 3, for jobs that do not say. At `priorities`
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
    """Kinds that are left to other workers."""
    places: str | None = None
    """Where jobs have keys: the `places` of the answer before; '{}' at first, None: not wanted."""
    reach_s: float | None = 0.0
    """Begin so much before those; None: at every head."""
    since: float | None = None
    """And at that run_at at the latest."""
    renew: bool = True
    """False: the answer may have the same `places`, which spares the database to find others."""
