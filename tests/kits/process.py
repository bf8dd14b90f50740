"""A daemon in its own process, for tests that kill, freeze or block it: python -m tests.kits.process DSN KEY=VALUE...

The app's handlers record their runs in the table `runs` over a connection of their own, so that the test can
compare what really ran with what the engine reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.engine.life.kill_timer import KillTimer
from tests.kits.daemon import made, quick_options

TABLES = """
    CREATE TABLE runs (job uuid, attempt int, pid int, started timestamptz DEFAULT clock_timestamp(),
                       ended timestamptz, PRIMARY KEY (job, attempt));
    CREATE TABLE gates (name text PRIMARY KEY);

    CREATE TABLE given_back (job uuid, attempt int, PRIMARY KEY (job, attempt));
    CREATE FUNCTION note_given_back() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.given_back VALUES (NEW.id, NEW.attempts);
        RETURN NULL;
    END $$;
    CREATE TRIGGER given_back AFTER UPDATE ON pgworkd.jobs FOR EACH ROW
    WHEN (OLD.status = 'running' AND NEW.status::text IN ('pending', 'blocked', 'failed')  -- a job that keeps its key
          AND NEW.failures = OLD.failures
          AND to_jsonb(NEW) -> 'losses' IS NOT DISTINCT FROM to_jsonb(OLD) -> 'losses')  -- older schemas have none
    EXECUTE FUNCTION note_given_back();
"""

EXPLAINED = """
    SELECT f.id, f.status::text, f.attempts, f.failures,
           (SELECT count(*) FROM jsonb_array_elements(f.errors) e WHERE e ->> 'type' = 'lost') AS lost,
           (SELECT count(*) FROM given_back g WHERE g.job = f.id) AS given_back, to_jsonb(f)::text AS whole
    FROM pgworkd.finished_jobs f"""
"""Finished jobs and the fate of each attempt: a daemon that stalls releases the prefetched jobs it has not started."""

SERVES = """
    SELECT EXISTS (SELECT FROM pgworkd.pools p JOIN pgworkd.workers w ON w.id = p.worker_id WHERE w.pid = $1)"""
"""The daemon of this process has started."""

app = App()
_pool: asyncpg.Pool[Any] | None = None
_file: int | None = None


@app.handler("work", concurrency=1000, max_attempts=10)
async def work(payload: dict[str, Any], job: Job) -> None:
    """Records its start, waits for the gate if its payload names one, records its end."""
    assert _pool is not None
    await _pool.execute("INSERT INTO runs (job, attempt, pid) VALUES ($1, $2, $3)", job.id, job.attempt, os.getpid())
    if (gate := payload.get("gate")) is not None:
        while not await _pool.fetchval("SELECT count(*) FROM gates WHERE name = $1", gate):
            await anyio.sleep(0.05)
    await _pool.execute(
        "UPDATE runs SET ended = clock_timestamp() WHERE job = $1 AND attempt = $2", job.id, job.attempt
    )


@app.handler("quick", concurrency=100, max_attempts=10)
async def quick(job: Job) -> None:
    """Appends its start to the file RUNS_FILE, in one write that survives a kill of the process.

    32 bytes: a kill may truncate a write at a page boundary of the file, and none of these crosses one.
    """
    global _file
    if _file is None:
        _file = os.open(os.environ["RUNS_FILE"], os.O_WRONLY | os.O_APPEND)
    os.write(_file, job.id.bytes + job.attempt.to_bytes(16, "big"))


@app.handler("stage", concurrency=100, max_attempts=100)
async def stage(payload: dict[str, Any]) -> dict[str, int]:
    """The previous stage's number plus one."""
    return {"n": payload.get("result", payload)["n"] + 1}


@app.handler("told", concurrency=10, max_attempts=100)
async def told() -> None:
    """The callback of a batch tree."""


@app.handler("block", concurrency=1)
async def block(payload: dict[str, Any], job: Job) -> None:
    """Blocks the event loop, as a careless handler does."""
    assert _pool is not None
    await _pool.execute("INSERT INTO runs (job, attempt, pid) VALUES ($1, $2, $3)", job.id, job.attempt, os.getpid())
    time.sleep(payload["seconds"])  # noqa: ASYNC251 - that is the point


@app.handler("poison", concurrency=10, max_attempts=10)
async def poison(payload: dict[str, Any], job: Job) -> None:
    """Kills the whole process, or is only an innocent neighbour of a job that does."""
    if payload["deadly"]:
        os.kill(os.getpid(), signal.SIGKILL)
    await anyio.sleep(payload.get("seconds", 0.0))


async def main(dsn: str, changes: dict[str, float]) -> int:
    """Runs the daemon until SIGTERM."""
    global _pool
    _pool = await asyncpg.create_pool(dsn, min_size=1, max_size=5)
    is_ours = not changes.pop("embedded", False)
    ends = {"end_process": end_process, "kill_timer": KillTimer.made()} if is_ours else {}
    daemon = made(app, quick_options(dsn, **changes), **ends)
    daemon.events.listen(lambda name, facts: print(name, dict(facts), file=sys.stderr, flush=True))  # noqa: T201
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.request_stop)
    return await daemon.run()


@contextlib.contextmanager
def daemon_process(dsn: str, log: Any = subprocess.DEVNULL, **changes: float) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a daemon process; it is killed at the end if it is still alive.

    `embedded=1`: a daemon in a process that belongs to its host.
    """
    arguments = [f"{key}={value}" for key, value in changes.items()]
    process = subprocess.Popen([sys.executable, "-m", "tests.kits.process", dsn, *arguments], stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    pairs = (argument.split("=") for argument in sys.argv[2:])
    sys.exit(asyncio.run(main(sys.argv[1], {key: float(value) for key, value in pairs})))
