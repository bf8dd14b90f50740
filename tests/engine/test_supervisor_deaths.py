"""`pgworkd run --processes N`: jobs of a dead process run again at once, but never while its handler processes live."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.engine.test_supervisor import play
from tests.kits.commands import ended, events, logged, start
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("commands and daemons in processes of their own")

__all__ = ["play", "start"]  # fixtures
APP = """
import ctypes

def wait_for(name):
    while not Path(name).exists():
        time.sleep(0.01)

@app.handler("outlives", run_in="process", concurrency=2)
def outlives(payload: dict, job: Job):
    if job.attempt > 1:
        return Path("left").exists()
    ctypes.CDLL(None).prctl(1, 0)  # PR_SET_PDEATHSIG: it does not end with the daemon
    Path("began").touch()
    wait_for("go")
    Path("left").touch()
    os._exit(0)

@app.handler("forks", run_in="process", concurrency=2)
def forks(payload: dict, job: Job):
    if job.attempt > 1:
        return Path("go").exists()
    if os.fork() == 0:
        wait_for("go")
        os._exit(0)
    Path("began").touch()
    while True:
        time.sleep(1)

@app.handler("many", concurrency=20)
async def many(job: Job):
    if job.attempt == 1:
        await anyio.sleep_forever()
"""
LONG = {"PGWORKD_LEASE_S": "60", "PGWORKD_HEARTBEAT_S": "20"}
DONE = "SELECT count(*) = $1 FROM pgworkd.finished_jobs WHERE status = 'completed'"
OWNER = "SELECT DISTINCT w.id, w.pid FROM pgworkd.workers w JOIN pgworkd.jobs j ON j.worker_id = w.id"


async def kill_owner(db: asyncpg.Connection[Any]) -> None:
    """Kills a process that runs jobs."""
    victim = (await db.fetch(OWNER))[0]
    os.kill(victim["pid"], signal.SIGKILL)


async def test_jobs_of_a_killed_process_run_again_at_once(play: Any, dsn: str, db: asyncpg.Connection[Any]) -> None:
    run = play(dsn, more=APP, **LONG)
    await logged(run, "daemon.ready", 2)
    await db.execute("INSERT INTO pgworkd.jobs (queue) SELECT 'many' FROM generate_series(1, 10)")
    await until(lambda: db.fetchval("SELECT count(*) = 10 FROM pgworkd.jobs WHERE status = 'running'"))
    for left in await db.fetch(OWNER):
        os.kill(left["pid"], signal.SIGKILL)
    await until(lambda: db.fetchval(DONE, 10), limit_s=10)
    rows = await db.fetch("SELECT attempts, failures, error FROM pgworkd.finished_jobs")
    assert {(row["attempts"], row["failures"]) for row in rows} == {(2, 0)}
    assert all(row["error"].endswith("has ended") for row in rows)
    assert len(events(run, "job.lost")) == 10
    run.stop()
    assert await ended(run) == 0
    assert await db.fetchval("SELECT count(*) FROM pgworkd.workers") == 0


@pytest.mark.parametrize(("kind", "waits"), [("outlives", True), ("forks", False)])
async def test_jobs_are_retried_as_soon_as_no_handler_process_of_the_dead_one_lives(
    play: Any, dsn: str, db: asyncpg.Connection[Any], tmp_path: Path, kind: str, waits: bool
) -> None:
    """What a handler has forked is not waited for: it may live for ever."""
    run = play(dsn, more=APP, **LONG)
    await logged(run, "daemon.ready", 2)
    await db.execute("INSERT INTO pgworkd.jobs (queue) VALUES ($1)", kind)
    await until((tmp_path / "began").exists)
    try:
        await kill_owner(db)
        await logged(run, "process.ended")
        await logged(run, "daemon.ready", 3)
        if waits:
            assert await db.fetchval("SELECT count(*) = 1 FROM pgworkd.jobs WHERE status = 'running' AND attempts = 1")
        else:
            await until(lambda: db.fetchval(DONE, 1), limit_s=10)
    finally:
        (tmp_path / "go").touch()  # no process must outlive the test
    await until(lambda: db.fetchval(DONE, 1), limit_s=10)
    assert json.loads(await db.fetchval("SELECT result FROM pgworkd.finished_jobs")) is waits
    run.stop()
    assert await ended(run) == 0


@pytest.mark.parametrize("token", ["gen_random_uuid()", "NULL"])
async def test_a_newer_registration_of_the_same_id_is_not_touched(db: asyncpg.Connection[Any], token: str) -> None:
    worker_id = await db.fetchval("SELECT pgworkd.register('w', 1, 'v', 60)")
    assert not await db.fetchval(f"SELECT pgworkd.worker_ended($1, {token})", worker_id)
    assert await db.fetchval("SELECT lost_at IS NULL FROM pgworkd.workers")
