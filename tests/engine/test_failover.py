"""A daemon whose database lost commits or was restored from a dump: the fence decides who has which job."""

from __future__ import annotations

import uuid
from typing import Any

import asyncpg
import pytest

from pgworkd.core import events
from tests.kits.apps import Sleepers
from tests.kits.daemon import daemon_of, insert, until, waits_for_status

LOSE_CLAIM = """UPDATE pgworkd.jobs SET status = 'pending', worker_id = NULL, started_at = NULL, attempts = 0"""
"""As on a promoted standby that lacks the commit of the claim."""


async def test_a_job_in_flight_whose_claim_was_lost_is_not_started_again(dsn: str, db: asyncpg.Connection[Any]) -> None:
    sleepers, ended = Sleepers(), list[str]()
    async with daemon_of(sleepers.app, dsn, ended, lease_s=6.0) as (daemon, seen):
        ids = [await insert(db, "q") for _ in range(3)]
        await seen.wait(events.JOB_STARTED, count=3)
        await db.execute(LOSE_CLAIM)
        last = await insert(db, "q")
        await until(lambda: db.fetchval("SELECT count(*) = 4 FROM pgworkd.jobs WHERE status = 'running'"))
        await seen.wait(events.JOB_STARTED, job_id=str(last))
        assert {row[0] for row in await db.fetch("SELECT attempts FROM pgworkd.jobs")} == {1}
        sleepers.go_on.set()
        for job_id in [*ids, last]:
            await until(waits_for_status(db, job_id, "completed"))
        assert len(seen.all(events.JOB_STARTED)) == 4
        assert len(seen.all(events.JOB_COMPLETED)) == 4
        assert daemon.worker_id == await db.fetchval("SELECT max(worker_id) FROM pgworkd.finished_jobs")
    assert (sleepers.twice, ended) == (0, [])


@pytest.mark.parametrize("id_comes_again", [False, True])
async def test_a_daemon_whose_id_was_reused_leaves_those_jobs_and_registers_anew(
    dsn: str, db: asyncpg.Connection[Any], *, id_comes_again: bool
) -> None:
    """A dump was restored under live daemons: the job that ran under this id now belongs to another worker."""
    sleepers, ended = Sleepers(), list[str]()
    async with daemon_of(sleepers.app, dsn, ended, lease_s=6.0) as (daemon, seen):
        job_id = await insert(db, "q")
        await seen.wait(events.JOB_STARTED, job_id=str(job_id))
        old = daemon.worker_id
        if id_comes_again:  # the same id again: the registration was lost together with the sequence's value
            await db.execute(LOSE_CLAIM)
            await db.execute("UPDATE pgworkd.jobs SET run_at = now() + interval '1 day'")
            await db.execute("DELETE FROM pgworkd.workers")
            await db.execute("SELECT setval('pgworkd.workers_id_seq', $1, false)", old)
        else:
            await db.execute("UPDATE pgworkd.workers SET token = $1", uuid.uuid4())
        await seen.wait(events.LEASE_LOST)
        await seen.wait(events.LEASE_RENEWED)
        assert (daemon.worker_id == old) is id_comes_again
        again = await insert(db, "q")
        await seen.wait(events.JOB_STARTED, job_id=str(again))
        sleepers.go_on.set()
        await until(waits_for_status(db, again, "completed"))
        row = await db.fetchrow("SELECT status::text, worker_id, losses FROM pgworkd.jobs WHERE id = $1", job_id)
        assert row == (("pending", None, 0) if id_comes_again else ("running", old, 0))
        assert seen.all(events.ORPHANS_RELEASED) == []
        assert len(seen.all(events.JOB_STALE, job_id=str(job_id))) == 1
        await db.execute("DELETE FROM pgworkd.jobs")
    assert ended == []
