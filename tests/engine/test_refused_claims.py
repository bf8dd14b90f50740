"""A job that something refuses to have claimed or ended: it is named, runs no second time, and holds up no other."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from anyio.to_thread import run_sync

from pgworkd import App, Job
from pgworkd.core import events
from pgworkd.engine.life.maintenance import Periods
from tests.engine.test_cli_health import found
from tests.http.test_workers import insert as insert_remote
from tests.kits.batches import depend
from tests.kits.cli import Shell, clean, shell
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.gateway import calling
from tests.kits.others import Thing, marked, things
from tests.kits.verbs import Db, worker
from tests.kits.workers import registered

__all__ = ["clean", "shell"]  # fixtures

OF_JOBS = {thing.name: thing for thing in things((), ())}
PERIODS = Periods(rescue_s=0.1, expire_s=0.1, orphans_s=0.1)
OTHERS = 200
KEEPS = OF_JOBS["jobs: before delete returns null"]


def _app(ran: list[Any]) -> App:
    app = App()

    @app.handler("q", concurrency=50)
    @app.handler("once", queue="q", max_attempts=1)
    async def handle(job: Job) -> None:
        ran.append((job.id, job.attempt))

    @app.handler("writes", queue="q", max_attempts=1)
    async def writes(job: Job) -> None:
        ran.append((job.id, job.attempt))
        async with job.transaction() as connection:
            await connection.execute("INSERT INTO public.written VALUES ($1)", job.id)

    return app


@pytest.mark.parametrize(
    "thing",
    [OF_JOBS[f"jobs: {what}"] for what in ("before update raises", "before update returns null", "a unique index")],
    ids=repr,
)
async def test_a_job_that_cannot_be_claimed_holds_up_no_other(dsn: str, db: Db, shell: Shell, thing: Thing) -> None:
    ran: list[Any] = []
    bad = [marked(), marked()] if "unique" in thing.name else [marked()]
    for job_id in bad:
        await insert(db, "q", id=job_id, priority=1)
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1)", OTHERS)
    await db.execute(thing.create)
    if "unique" in thing.name:  # another attempt holds what is unique
        sql = "UPDATE pgworkd.jobs SET status = 'running', worker_id = $2, attempts = 1 WHERE id = $1"
        await db.execute(sql, bad.pop(0), await worker(db))
    async with running(_app(ran), dsn) as (_, seen):
        began = time.monotonic()
        await seen.wait(events.JOB_COMPLETED, OTHERS)
        assert time.monotonic() - began < 5
        fact = await seen.wait(events.ROWS_REJECTED)
        assert (fact["what"], fact["count"], fact["key"]) == ("claim", 1, str(bad[0]))
        rows = (await run_sync(found, shell))["rows"]
        assert rows[0].startswith(f"1 job of 'q' cannot be claimed, such as {bad[0]}: ")
        await db.execute(thing.drop)
        await db.execute("UPDATE pgworkd.refused_rows SET until = now()")  # it is tried again at once
        await until(waits_for_status(db, bad[0], "completed"))
        assert "rows" not in await run_sync(found, shell, 0)
    assert len(ran) == len(set(ran)) == OTHERS + 1
    assert len(seen.all(events.ROWS_REJECTED)) == 1


@pytest.mark.slow("a claim that waits as long as it may")
async def test_a_job_whose_claim_waits_holds_up_no_other(dsn: str, db: Db) -> None:
    """As a trigger does that asks another system; and it runs soon after that is over."""
    ran: list[Any] = []
    thing, bad = OF_JOBS["jobs: before update waits"], marked()
    await insert(db, "q", id=bad, priority=1)
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1)", OTHERS)
    await db.execute(thing.create.replace("pg_sleep(0.25)", "pg_sleep(60)"))
    async with running(_app(ran), dsn) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, OTHERS)
        await seen.wait(events.ROWS_REJECTED, what="claim", key=str(bad), sqlstate="57014")
        await insert(db, "q")
        began = time.monotonic()
        await seen.wait(events.JOB_COMPLETED, OTHERS + 1)
        assert time.monotonic() - began < 2
        await db.execute(thing.drop)
        await until(waits_for_status(db, bad, "completed"))


@pytest.mark.parametrize("kind", ["once", "writes", "q"])
async def test_an_ended_attempt_whose_row_is_kept_runs_no_second_time(
    dsn: str, db: Db, shell: Shell, kind: str
) -> None:
    """As a "soft delete" does. The row is then none that this daemon has forgotten: it is dead, and named."""
    ran: list[Any] = []
    await db.execute("CREATE TABLE public.written (job uuid)")
    await db.execute(KEEPS.create)
    bad = await insert(db, "q", kind=kind, id=marked())
    async with running(_app(ran), dsn, periods=PERIODS) as (_, seen):
        await until(waits_for_status(db, bad, "dead"))
        other = await insert(db, "q", kind=kind)
        await until(waits_for_status(db, other, "completed"))
        fact = await seen.wait(events.JOB_DEAD, job_id=str(bad))
        assert "a trigger keeps the row" in fact["error"]
        if kind != "writes":  # whose handler has failed
            line = await run_sync(_of_rows, shell)
            assert line.startswith(
                f"1 dead job of 'q' whose outcome was refused, such as {bad}: the outcome 'completed'"
            )
    assert ran == [(bad, 1), (other, 1)]
    assert seen.all(events.JOB_RELEASED) == seen.all(events.ORPHANS_RELEASED) == []
    written = [row[0] for row in await db.fetch("SELECT job FROM public.written")]
    assert written == ([other] if kind == "writes" else [])


def _of_rows(shell: Shell) -> str:
    lines = json.loads(shell("doctor", "--json").stdout)
    return next(str(each["finding"]) for each in lines if each["subject"] == "rows")


async def test_an_outcome_is_stored_although_what_follows_from_it_is_refused(dsn: str, db: Db) -> None:
    """A job that depends on another, and the next of a key: what refuses them is no fault of the one that has ended."""
    ran: list[Any] = []
    thing = OF_JOBS["jobs: before update raises"]
    first = [await insert(db, "q", serialize_key=key) for key in (None, None, "k", "l")]
    async with db.transaction():
        children = [await insert(db, "q", id=marked()), await insert(db, "q")]
        for child, parent in zip(children, first, strict=False):
            await depend(db, child, parent)
    behind = [await insert(db, "q", serialize_key="k", id=marked()), await insert(db, "q", serialize_key="l")]
    await db.execute("UPDATE pgworkd.jobs SET status = 'blocked' WHERE id = ANY ($1)", behind)
    await db.execute(thing.create)
    async with running(_app(ran), dsn, periods=PERIODS) as (_, seen):
        await seen.wait(events.JOB_COMPLETED, 6)
        await seen.wait(events.ROWS_REJECTED)
        assert sorted(ran) == sorted((each, 1) for each in (*first, children[1], behind[1]))
        await db.execute(thing.drop)
        await db.execute("UPDATE pgworkd.refused_rows SET until = now()")
        await seen.wait(events.JOB_COMPLETED, 8)
    assert len(ran) == len(set(ran)) == 8
    assert seen.all(events.OUTCOME_REJECTED) == seen.all(events.JOB_DEAD) == []


async def test_a_gateway_claims_the_others(dsn: str, db: Db) -> None:
    thing = OF_JOBS["jobs: before update raises"]
    await insert_remote(db, 3)
    bad = marked()
    await db.execute("UPDATE pgworkd.jobs SET id = $1 WHERE id = (SELECT min(id::text)::uuid FROM pgworkd.jobs)", bad)
    await db.execute(thing.create)
    async with calling(dsn, workers=True) as call:
        remote = await registered(call)
        claimed: list[str] = []
        while len(claimed) < 2:
            claimed += [each["job"]["id"] for each in await remote.claim(most=2, wait_s=5)]
        assert str(bad) not in claimed
        await db.execute(thing.drop)
        await db.execute("UPDATE pgworkd.refused_rows SET until = now()")
        while not (last := await remote.claim(wait_s=5)):
            pass
        assert last[0]["job"]["id"] == str(bad)
