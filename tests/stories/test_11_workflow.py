"""A workflow: fetch, then three shards in parallel, then a report whose result a caller awaits. One shard fails and is
retried."""

from __future__ import annotations

from typing import Any

import anyio
import asyncpg
import pytest

from pgworkd import App, Job
from pgworkd.client import Workflow, enqueue
from pgworkd.core import events
from pgworkd.errors import JobFailed
from pgworkd.results import Results
from tests.kits.daemon import running, status, until, waits_for_status

SHARDS = ("a", "b", "c")


class Etl:
    """An application that fetches, reads shards and reports, and records the order of its steps."""

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


async def test_a_workflow_runs_in_dependency_order_and_its_result_is_awaited(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    """Jobs and dependencies are enqueued in one transaction; a caller waits for the result of the last job."""
    etl = Etl()
    async with running(etl.app, dsn), Results(dsn) as results:
        async with db.transaction():
            ids = await nightly().enqueue(db)
        assert await results.result(ids["report"], timeout_s=5) == {"did": "report"}
        await results.result(ids["clean up"], timeout_s=5)
    assert etl.did[0] == "fetch"
    assert set(etl.did[1:4]) == set(SHARDS)
    assert set(etl.did[4:]) == {"report", "clean up"}


async def test_a_dead_step_blocks_its_dependents_until_it_is_retried(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """`blocked_jobs` gives the reason; `on_failed_dependency="run"` lets the cleanup step run all the same."""
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


async def test_a_job_is_added_to_an_existing_workflow(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """A job may depend on any job that is already enqueued."""
    etl = Etl()
    ids = await nightly().enqueue(db)
    archive = await enqueue(db, "step", {"name": "archive"}, after=[ids["report"]])
    async with running(etl.app, dsn), Results(dsn) as results:
        assert await results.result(archive, timeout_s=5) == {"did": "archive"}
    assert etl.did[-1] == "archive" or etl.did[-2:] == ["archive", "clean up"]
