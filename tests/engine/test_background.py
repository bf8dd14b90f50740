"""Operations in the background, as daemons do them and as the command line starts them."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.engine.life.maintenance import Periods
from tests.kits import verbs as v
from tests.kits.cli import Shell, clean, shell
from tests.kits.daemon import running, until
from tests.kits.verbs import Db

__all__ = ["clean", "shell"]  # fixtures


async def dead(db: Db, count: int, queue: str = "q") -> None:
    """Dead jobs."""
    await v.insert(db, count, queue, status="dead", attempts=1, failures=1, failed_at=datetime.now(UTC))


def app_that_notes(seen: set[uuid.UUID]) -> App:
    """Its handler notes the jobs that it runs."""
    app = App()

    @app.handler("q", concurrency=20)
    async def handle(job: Job) -> None:
        seen.add(job.id)

    return app


async def test_daemons_begin_at_once_and_do_it_to_the_end_beside_their_jobs(dsn: str, db: Db) -> None:
    seen: set[uuid.UUID] = set()
    rarely = Periods(prune_s=3600)

    async def has_looked() -> bool:
        return sum(daemon.counters.maintenance_s["operations"].counts) > 0

    async with (
        running(app_that_notes(seen), dsn, periods=rarely),
        running(app_that_notes(seen), dsn, periods=rarely) as (daemon, _),
    ):
        await until(has_looked)
        await dead(db, 3000)
        with anyio.fail_after(60):
            await db.execute("SELECT pgworkd.start_operation('retry', 'q')")
            await until(lambda: db.fetchval("SELECT finished_at IS NOT NULL FROM pgworkd.operations"), 60)
            await until(lambda: db.fetchval("SELECT NOT EXISTS (SELECT FROM pgworkd.jobs)"), 60)
    assert await db.fetchval("SELECT done FROM pgworkd.operations") == 3000
    assert len(seen) == 3000
    assert await db.fetchval("SELECT count(*) FROM pgworkd.audit WHERE what = 'retry' AND job_id IS NULL") == 2


async def test_jobs_that_are_locked_hold_up_neither_the_others_nor_the_daemon(dsn: str, db: Db) -> None:
    await dead(db, 40)
    other = await asyncpg.connect(dsn)
    try:
        held = other.transaction()
        await held.start()
        await other.fetch("SELECT FROM pgworkd.jobs ORDER BY id LIMIT 3 FOR UPDATE")
        async with running(app_that_notes(set()), dsn) as (_, recorder):
            await db.execute("SELECT pgworkd.start_operation('discard', 'q')")
            await until(lambda: db.fetchval("SELECT done = 37 FROM pgworkd.operations"), 60)
            await held.rollback()
            await until(lambda: db.fetchval("SELECT finished_at IS NOT NULL FROM pgworkd.operations"), 60)
            assert recorder.all("statement.failed") == []
    finally:
        other.terminate()
    assert await db.fetchval("SELECT count(*) FROM pgworkd.finished_jobs") == 40


def test_the_command_starts_lists_and_stops(shell: Shell) -> None:
    for _ in range(3):
        shell.die()
    said = shell("retry", "--queue", "q", "--background").stdout
    assert said == "operation 1 started: 3 jobs matched; pgworkd operations shows how far it is\n"
    (row,) = json.loads(shell("operations", "--json").stdout)
    assert (row["what"], row["queue"], row["state"], row["expected"]) == ("retry", "q", "running", 3)
    assert "queue q, status dead" in shell("operations").stdout
    assert shell("operations", "stop", "1").stdout == "operation 1 is stopped\n"
    assert "is over, or unknown" in shell("operations", "stop", "1", code=1).stderr
    assert json.loads(shell("operations", "--json").stdout)[0]["state"] == "stopped"
    assert json.loads(shell("cancel", "--queue", "q", "--background", "--json").stdout)["expected"] == 0


def test_what_makes_no_sense_is_refused(shell: Shell) -> None:
    one = shell.die()
    assert "--background is for filters" in shell("retry", one, "--background", code=2).stderr
    assert (
        "--limit is not for --background"
        in shell("discard", "--queue", "q", "--background", "--limit", "7", code=2).stderr
    )
    assert "no jobs selected" in shell("cancel", "--background", code=2).stderr
