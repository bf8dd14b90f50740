"""Two daemons share one queue: each job is claimed and completed by exactly one of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import asyncpg
import pytest

from pgworkd import App, Job
from tests.kits.daemon import running, until

pytestmark = pytest.mark.slow("daemons that are killed, and leases that run out")

JOBS = 20_000

AUDIT = """
    CREATE TABLE audit (job uuid, attempt int, old text, new text, worker int);
    CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF TG_OP = 'INSERT' THEN
            INSERT INTO public.audit VALUES (NEW.id, NEW.attempts, NULL, NEW.status, NEW.worker_id);
        ELSIF NEW.status <> OLD.status THEN
            INSERT INTO public.audit VALUES (NEW.id, NEW.attempts, OLD.status, NEW.status, NEW.worker_id);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER audit AFTER UPDATE ON pgworkd.jobs FOR EACH ROW EXECUTE FUNCTION audit();
    CREATE TRIGGER audit AFTER INSERT ON pgworkd.finished_jobs FOR EACH ROW EXECUTE FUNCTION audit();
"""

CHANGES = "SELECT old, new, count(*) AS n FROM audit GROUP BY old, new"


async def test_two_daemons_run_each_of_20000_jobs_exactly_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """The handlers' own count and a trigger in the database agree: one completion per job, from one of the daemons."""
    await db.execute(AUDIT)
    ran: dict[str, Counter[Any]] = {"a": Counter(), "b": Counter()}

    def app_named(name: str) -> App:
        app = App()

        @app.handler("q", concurrency=200)
        async def handle(job: Job) -> None:
            ran[name][job.id] += 1

        return app

    async with running(app_named("a"), dsn) as (a, _), running(app_named("b"), dsn) as (b, _):
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, $1::int)", JOBS)
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
        workers = {a.worker_id, b.worker_id}

    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs WHERE status = 'completed'") == JOBS
    assert await db.fetchval("SELECT count(DISTINCT id) FROM pgworkd.finished_jobs") == JOBS
    # No job ran on both daemons or twice on one, and both daemons did some of the work.
    assert not ran["a"].keys() & ran["b"].keys()
    assert set((ran["a"] + ran["b"]).values()) == {1}
    assert sum(ran["a"].values()) + sum(ran["b"].values()) == JOBS
    assert min(len(ran["a"]), len(ran["b"])) > 0
    # The trigger agrees: one completion per job, and one claim, plus one for each job released before it started.
    seen = {(row["old"], row["new"]): row["n"] for row in await db.fetch(CHANGES)}
    given_back = seen.pop(("running", "pending"), 0)
    assert seen == {("pending", "running"): JOBS + given_back, (None, "completed"): JOBS}
    assert {
        row["worker"] for row in await db.fetch("SELECT DISTINCT worker FROM audit WHERE new = 'running'")
    } == workers


async def test_a_job_goes_to_the_daemon_that_has_a_free_slot(dsn: str, db: asyncpg.Connection[Any]) -> None:
    """With slow jobs a daemon claims no more than it has slots for: the other one gets the next job at once."""
    import anyio

    release = anyio.Event()
    ran: list[str] = []

    def app_named(name: str) -> App:
        app = App()

        @app.handler("q", concurrency=1)
        async def handle() -> None:
            ran.append(name)
            await release.wait()

        return app

    async with running(app_named("a"), dsn), running(app_named("b"), dsn):
        await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'q' FROM generate_series(1, 3)")
        await until(lambda: sorted(ran) == ["a", "b"])
        assert await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'pending'") == 1
        release.set()
        await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"))
    assert len(ran) == 3
