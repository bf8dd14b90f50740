"""Daemons end what remote workers do not: attempts past their deadline, or past the lease of their own."""

from __future__ import annotations

from typing import Any

import pytest

from pgworkd import App
from pgworkd.core import events
from pgworkd.engine.life.maintenance import Periods
from tests.kits.daemon import running
from tests.kits.remote import Waiter, claim_for, registered
from tests.kits.verbs import Db, one, statuses


@pytest.mark.parametrize(("max_attempts", "status"), [(3, "failed"), (1, "dead")])
async def test_a_daemon_fails_what_is_overdue_and_reports_it(dsn: str, db: Db, max_attempts: int, status: str) -> None:
    """The gateway has been there for longer than the lease; time is moved in the rows."""
    gateway, remote = await registered(db, "gateway", 3600), await registered(db, name="go-7")
    job_id = await one(db, "mail", max_attempts=max_attempts)
    await claim_for(db, Waiter(remote, 1, 60), queue="mail")
    await db.execute("UPDATE pgworkd.workers SET steady_since = now() - interval '1 day' WHERE id = $1", gateway)
    await db.execute("UPDATE pgworkd.jobs SET lease_s = 0.1, lease_until = now() - interval '2 hours'")
    died, app = [], App()

    @app.handler("other")
    async def handle() -> None:
        """Has nothing to do."""

    @app.on_dead
    async def noted(job: Any) -> None:
        died.append(job.id)

    async with running(app, dsn, periods=Periods(rescue_s=0.1)) as (_, seen):
        fact = await seen.wait(events.JOB_LEASE_PASSED)
        if status == "dead":
            await seen.wait(events.JOB_DEAD)
    assert fact["job_id"] == str(job_id)
    assert (fact["queue"], fact["attempt"], fact["worker"], fact["status"]) == ("mail", 1, "assignments", status)
    assert fact["error"] == "its lease of 0.1 s was not renewed"
    assert await statuses(db, [job_id]) == [status]
    assert died == ([str(job_id)] if status == "dead" else [])
