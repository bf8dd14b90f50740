"""What the settler reports if two attempts of one job are in one flush."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import anyio
import pytest

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.core.fence import Settling
from pgworkd.core.job import Ending, Outcome
from pgworkd.engine.attempts import Attempt, InFlight
from pgworkd.engine.counters import Counters
from pgworkd.engine.settle.settler import Settler
from pgworkd.engine.shared import Shared
from tests.kits.apps import attempt_of

JOB = UUID(int=7)


class Store:
    """Settles attempt 2, which is the one that runs."""

    async def settle(self, ending: Ending, settles: Sequence[Settling], *_: Any, **__: bool) -> dict[UUID, str]:
        status = "completed" if ending is Ending.COMPLETED else "dead"
        return {each.fence.job_id: status for each in settles if each.fence.attempt == 2}


@pytest.mark.parametrize(
    ("ending", "status"),
    [(Ending.COMPLETED, "completed"), (Ending.FAILED, "dead")],
)
@pytest.mark.parametrize("attempts", [(1, 2), (2, 1)])
async def test_two_attempts_of_one_job_in_one_flush_are_reported_separately(
    ending: Ending, status: str, attempts: tuple[int, int]
) -> None:
    """A worker that lost its lease may have an old outcome in flight, and claim the job again before the flush."""
    reports: list[tuple[int, str | None]] = []
    stale: list[int] = []

    def heard(name: str, facts: Any) -> None:
        if name == events.JOB_STALE:
            stale.append(facts["attempt"])

    def settled(held: Attempt, _: Outcome, became: str | None) -> None:
        reports.append((held.claimed.attempt, became))

    events_, planner, store = Events(), SimpleNamespace(following=lambda _: None), Store()
    events_.listen(heard)
    settler = Settler(
        store,  # type: ignore[arg-type]
        Shared(InFlight(), events_, Counters(events_)),
        planner,
        on_completed=lambda batch: reports.extend((each.claimed.attempt, "completed") for each in batch),
        on_settled=settled,
        on_capacity=lambda: None,
    )
    for attempt in attempts:
        settler.put(attempt_of(attempt, JOB), Outcome(ending))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(settler.run)
        await settler.drained()
        tasks.cancel_scope.cancel()
    assert sorted(reports, key=str) == [(1, None), (2, status)]
    assert stale == [1]
