"""A workflow: fetch, three shards at once, a report; somebody waits for it. A shard fails, and is replayed."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.client import Workflow, enqueue
from pgworkd.errors import JobFailed
from pgworkd.results import Results
from pgworkd.words import events
from tests.kit import running, status, until, waits_for_status

SHARDS = ("a", "b", "c")


class Etl:
    """An application that fetches, reads shards, and reports; the order in which it did so."""

    def __init__(self) -> None:
        self.app = App()
        self.did: list[str] = []
        self.disk_is_full = False
        self.app.handler("step", concurrency=10, max_attempts=1)(self.step)

    async def step(self, payload: dict[str, Any], job: Job) -> dict[str, str]:
        name = payload["name"]
        if name == "b" and self.disk_is_full:
            raise OSError("the disk is full")
        self.did.append(name)
        job.progress(1, name)
        return {"did": name}


def nightly() -> Workflow:
    flow = Workflow()
    flow.add("fetch", "step", {"name": "fetch"})
    for shard in SHARDS:
        flow.add(shard, "step", {"name": shard}, after=["fetch"])
    flow.add("report", "step", {"name": "report"}, after=SHARDS)
    flow.add("clean up", "step", {"name": "clean up"}, after=SHARDS, on_failed_dependency="run")
    return flow


async def test_a_flow_runs_in_its_order_and_somebody_waits_for_its_end(dsn: str, db: asyncpg.Connection[Any]) -> None:
    etl = Etl()
    async with running(etl.app, dsn), Results(dsn) as results:
        async with db.transaction():
            ids = await nightly().enqueue(db)
        assert await results.result(ids["report"], timeout_s=5) == {"did": "report"}
        await results.result(ids["clean up"], timeout_s=5)
    assert etl.did[0] == "fetch"
    assert set(etl.did[1:4]) == set(SHARDS)
    assert set(etl.did[4:]) == {"report", "clean up"}


async def test_a_dead_step_holds_up_what_needs_it_until_it_is_replayed(dsn: str, db: asyncpg.Connection[Any]) -> None:
    etl = Etl()
    etl.disk_is_full = True
    async with running(etl.app, dsn) as (_, seen), Results(dsn) as results:
        ids = await nightly().enqueue(db)
        with pytest.raises(JobFailed, match="the disk is full"):
            await results.result(ids["b"], timeout_s=5)
        await until(waits_for_status(db, ids["clean up"], "completed"))
        assert await status(db, ids["report"]) == "blocked"
        why = await db.fetchval("SELECT reason FROM pgworkd.blocked_jobs WHERE id = $1", ids["report"])
        assert why == f"waits for 1 job; job {ids['b']} is dead: retry it, or undepend() this one"

        etl.disk_is_full = False
        async with anyio.create_task_group() as tasks:
            answers: list[Any] = []

            async def wait() -> None:
                answers.append(await results.result(ids["report"], timeout_s=5))

            tasks.start_soon(wait)
            await db.execute("SELECT pgworkd.retry(ARRAY[$1::uuid])", ids["b"])
        assert answers == [{"did": "report"}]
        assert len(seen.all(events.JOB_DEAD)) == 1


async def test_one_more_is_added_to_a_flow_that_runs(dsn: str, db: asyncpg.Connection[Any]) -> None:
    etl = Etl()
    ids = await nightly().enqueue(db)
    archive = await enqueue(db, "step", {"name": "archive"}, after=[ids["report"]])
    async with running(etl.app, dsn), Results(dsn) as results:
        assert await results.result(archive, timeout_s=5) == {"did": "archive"}
    assert etl.did[-1] == "archive" or etl.did[-2:] == ["archive", "clean up"]
