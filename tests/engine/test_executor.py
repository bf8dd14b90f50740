"""No slot is idle while a job is due, regardless of the order in which jobs end and are claimed."""

from __future__ import annotations

import math
from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App
from pgworkd.core.claims import Claims
from pgworkd.database.store import Store
from pgworkd.engine.claim.poll_mode import PollMode
from pgworkd.engine.claim.pool import Pool
from tests.kits.daemon import insert, running, until


def _announces_nothing(self: PollMode, claimed: int, now: float, *, full: bool) -> None:
    self._full_claims = int(full)


async def test_a_slot_whose_job_was_taken_by_another_task_is_filled(
    dsn: str, db: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots: the first job ends and one is claimed; as it arrives, the second ends and its task takes it."""
    app, began = App(), list[int]()
    ends = [anyio.Event() for _ in range(5)]

    @app.handler("q", concurrency=2)
    async def handle(payload: dict[str, int]) -> None:
        began.append(payload["n"])
        await ends[payload["n"]].wait()

    claim = Store.claim

    async def claim_while_the_second_ends(self: Store, order: Any) -> Claims:
        claims = await claim(self, order)
        if [job.payload for job in claims] == ['{"n": 2}']:
            ends[1].set()
        return claims

    monkeypatch.setattr(Store, "claim", claim_while_the_second_ends)
    monkeypatch.setattr(Pool, "_ahead", 0)  # as if jobs took long
    monkeypatch.setattr(PollMode, "after_claim", _announces_nothing)
    monkeypatch.setattr(PollMode, "next_claim_s", lambda self, _: 0.0 if self._full_claims else math.inf)
    async with running(app, dsn, poll_s=60):
        for n in range(5):
            await insert(db, "q", f'{{"n": {n}}}')
        await until(lambda: began == [0, 1])
        ends[0].set()
        await until(lambda: began == [0, 1, 2, 3])
        for end in ends:
            end.set()
        await until(lambda: len(began) == 5)
