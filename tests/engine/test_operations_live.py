"""Operations on a busy fleet: each job ends once, each operation is audited, and daemons are notified."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import anyio
import anyio.lowlevel
import asyncpg

from pgworkd import App, Job
from pgworkd.admin import Admin
from pgworkd.admin.jobs import JobSelection
from pgworkd.database.connection import ConnectionOptions
from tests.kits.daemon import insert, running, until, waits_for_status

JOBS = 3000


def an_app(returned: list[UUID]) -> App:
    """Most jobs return at once; each tenth runs until it is cancelled. (Others are not due yet.)"""
    app = App()

    @app.handler("q", concurrency=20)
    async def handle(payload: dict[str, Any], job: Job) -> None:
        if payload["n"] % 10 == 0:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        returned.append(job.id)

    return app


async def cancel_all(dsn: str) -> dict[UUID, str]:
    """Cancels matching jobs until none is left; the result for each."""
    answers: dict[UUID, str] = {}
    async with Admin(ConnectionOptions(dsn, by="ann@desk")) as admin:
        last = None
        while True:
            found = await admin.jobs.matching("cancel", JobSelection(queue="q"), last, 100)
            if found.ids:
                outcomes = await admin.jobs.cancel(list(found.ids))
                assert not outcomes.keys() & answers.keys(), "a job was matched twice"
                answers |= outcomes
            if (last := found.last) is None:
                return answers


async def test_cancel_by_filter_while_two_daemons_claim(dsn: str, db: asyncpg.Connection[Any]) -> None:
    returned: list[UUID] = []
    async with running(an_app(returned), dsn), running(an_app(returned), dsn):
        await db.execute(
            "INSERT INTO pgworkd.jobs (queue, payload, run_at)"
            " SELECT 'q', jsonb_build_object('n', n), CASE n % 5 WHEN 1 THEN now() + '1 h' ELSE now() END"
            " FROM generate_series(1, $1::int) n",
            JOBS,
        )
        await until(lambda: db.fetchval("SELECT count(*) >= 100 FROM pgworkd.finished_jobs"))
        answers = await cancel_all(dsn)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))

    ended: dict[str, set[UUID]] = {"completed": set(), "cancelled": set()}
    rows = await db.fetch("SELECT id, status::text AS status FROM pgworkd.finished_jobs")
    for row in rows:
        ended[row["status"]].add(row["id"])
    assert len(rows) == JOBS, "none lost, none twice"
    assert len(ended["completed"] | ended["cancelled"]) == JOBS
    assert len(returned) == len(set(returned)), "none ran twice"
    assert set(returned) == ended["completed"], "what came to its end is completed, and only that"

    told = {outcome: {i for i, o in answers.items() if o == outcome} for outcome in ("cancelled", "requested")}
    assert told["cancelled"], "some waited"
    assert told["requested"], "some ran"
    assert told["cancelled"] <= ended["cancelled"] <= answers.keys()
    assert answers.keys() - ended["cancelled"] <= told["requested"], "those were quicker than the request"

    notes = await db.fetch("SELECT job_id, who, what, after FROM pgworkd.audit")
    assert {(note["who"], note["what"]) for note in notes} == {("ann@desk", "cancel")}
    ended_by_act = [note["job_id"] for note in notes if json.loads(note["after"]) == {"status": "cancelled"}]
    assert sorted(ended_by_act) == sorted(told["cancelled"])
    assert sorted(note["job_id"] for note in notes) == sorted(answers), "one note per act"
    quicker = len(answers) - len(ended["cancelled"])
    assert len(notes) == len(ended["cancelled"]) + quicker


async def test_a_job_edited_to_be_due_runs_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The daemon is idle and no poll happens during the test, so only the notification can wake it."""
    app, ran = App(), []

    @app.handler("q")
    async def handle(payload: dict[str, Any]) -> None:
        ran.append(payload)

    job_id = await insert(db, "q", run_at=datetime.now(UTC) + timedelta(days=1))
    async with running(app, dsn, poll_s=600), Admin(ConnectionOptions(dsn)) as admin:
        await until(lambda: db.fetchval("SELECT idle FROM pgworkd.pools"))
        assert await admin.jobs.edit(job_id, '{"now": true}', delay_s=0, priority=1) == [
            "payload",
            "priority",
            "run_at",
        ]
        await until(waits_for_status(db, job_id, "completed"))
    assert ran == [{"now": True}]
