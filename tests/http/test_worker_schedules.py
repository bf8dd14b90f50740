"""Occurrences that remote workers run: each end is followed by the next, in the same transaction."""

from __future__ import annotations

from typing import Any, TypeAlias

import asyncpg
import pytest

from pgworkd.core import events
from tests.kits.daemon import Recorder
from tests.kits.gateway import Caller, calling
from tests.kits.workers import registered

pytestmark = pytest.mark.slow("each end through each gateway, a second each until the schedule is due")

Db: TypeAlias = "asyncpg.Connection[Any]"
RUNS = 2
WAYS: dict[str, dict[str, Any]] = {
    "complete": {},
    "complete with jobs": {"enqueue": [{"queue": "next"}]},
    "many": {},
    "fail": {"retryable": False},
}


def heard(call: Caller) -> Recorder:
    """The events of a gateway in this process."""
    recorder = Recorder()
    call.client._transport.app.gateway.remote.events.listen(recorder)  # type: ignore[attr-defined]
    return recorder


async def settle(call: Caller, got: dict[str, Any], way: str) -> str:
    """Settles an attempt in that way; the job's new status."""
    if way == "many":
        body = {"settlements": [{"assignment": got["assignment"], "outcome": "complete"}]}
        return str((await call.ok("POST", "/v1/settlements", body))["settlements"][0]["status"])
    path = f"/v1/assignments/{got['assignment']}/{way.split()[0]}"
    return str((await call.ok("POST", path, WAYS[way]))["status"])


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same gateway", "another gateway"])
@pytest.mark.parametrize("own", [{}, {"lease": "job", "lease_s": 60}], ids=["worker's lease", "own lease"])
@pytest.mark.parametrize("way", WAYS)
async def test_each_end_inserts_the_next_occurrence(
    dsn: str, db: Db, way: str, own: dict[str, Any], elsewhere: bool
) -> None:
    async with calling(dsn, workers=True) as one, calling(dsn, workers=True) as other:
        recorders = heard(one), heard(other)
        await one.ok("PUT", "/v1/schedules/tick", {"queue": "q", "every_s": 1, "missed": "all"})
        worker, settles = await registered(one), other if elsewhere else one
        for run in range(RUNS):
            (got,) = await worker.claim(wait_s=10, **own)
            assert got["job"]["schedule"] == "tick"
            if run == 0:  # from here on both know the schedule
                for each in recorders:
                    each.seen.clear()
            assert await settle(settles, got, way) == ("dead" if way == "fail" else "completed")
            following = "SELECT count(*) FROM pgworkd.jobs WHERE schedule = 'tick' AND status <> 'dead'"
            assert await db.fetchval(following) == 1, "it is there when the settle is answered"
        assert not any(each.all(events.SCHEDULE_RESTORED) for each in recorders), "nothing had to be repaired"
        occurrences = await db.fetch("SELECT occurrence FROM pgworkd.all_jobs WHERE schedule = 'tick' ORDER BY 1")
        assert len({each["occurrence"] for each in occurrences}) == len(occurrences) == RUNS + 1
