"""The answer of a claim, as the daemon reads it."""

from __future__ import annotations

import itertools
from typing import Any
from uuid import UUID

from pgworkd.core.claims import ClaimedJob, Claims


def _row(**changes: Any) -> tuple[Any, ...]:
    empty = ClaimedJob(UUID(int=0), "k", "{}", 1, 0, 3, None, 0, 0, 0.0, 0.0, None, None, None)
    return tuple(empty._replace(**changes))


def test_jobs_are_in_claim_order_whatever_the_order_of_the_rows() -> None:
    jobs = [
        _row(priority=1, run_at=9.0, id=UUID(int=9)),
        _row(priority=0, run_at=1.0, id=UUID(int=5)),
        _row(priority=0, run_at=2.0, id=UUID(int=3)),
        _row(priority=0, run_at=2.0, id=UUID(int=4)),
        _row(priority=-1, run_at=0.0, id=UUID(int=1)),
    ]
    what_else = _row(id=None, payload="{places}", created_at=0.5, run_at=None)
    passed = _row(id=None, payload=None, created_at=None, priority=7, run_at=3.0)
    for rows in itertools.permutations(jobs):
        assert list(Claims.read(rows)) == jobs
        claims = Claims.read([*rows, what_else, passed])
        assert (list(claims), claims.places, claims.again_s, list(claims.passed)) == (jobs, "{places}", 0.5, [(7, 3.0)])
