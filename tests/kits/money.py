"""Daemons whose jobs run in the transactions that claim them: python -m tests.kits.money DSN KEY=VALUE...

Each run first notes itself over a connection of its own, then books into `bookings`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.engine.life.daemon import Daemon
from pgworkd.engine.life.heartbeat import end_process
from tests.kits.daemon import Recorder, made, quick_options, running, until

TABLES = """
    CREATE TABLE runs (job uuid, attempt int, pid int, status text);
    CREATE TABLE bookings (job uuid PRIMARY KEY);
    CREATE TABLE gates (name text PRIMARY KEY);"""
AGED = "UPDATE pgworkd.workers SET started_at = started_at - interval '1 h'"


def app_of(dsn: str) -> App:
    """The app: a run waits for the gate in its payload, and kills its process, or raises, if that says so."""
    app = App()

    @app.handler("money", transaction=True, backoff=0)
    async def book(payload: dict[str, Any], job: Job) -> None:
        notes = await asyncpg.connect(dsn)
        try:
            status = await notes.fetchval("SELECT status::text FROM pgworkd.jobs WHERE id = $1", job.id)
            await notes.execute("INSERT INTO runs VALUES ($1, $2, $3, $4)", job.id, job.attempt, os.getpid(), status)
            async with job.transaction() as connection:
                await connection.execute("INSERT INTO bookings VALUES ($1)", job.id)
                if payload.get("kills"):
                    os.kill(os.getpid(), signal.SIGKILL)
                while "gate" in payload and not await notes.fetchval("SELECT count(*) FROM gates"):
                    await anyio.sleep(0.02)
                if job.failures < payload.get("raises", 0):
                    raise ValueError("not booked")
        finally:
            notes.terminate()

    return app


async def age_workers(db: asyncpg.Connection[Any], count: int = 1) -> None:
    """Makes the workers, that many, older than their leases: before, they claim first, and run then."""
    await until(lambda: db.fetchval("SELECT count(DISTINCT worker_id) >= $1 FROM pgworkd.pools", count))
    await db.execute(AGED)


@contextlib.asynccontextmanager
async def serving(
    handle: Any, dsn: str, db: asyncpg.Connection[Any], *, aged: bool = True, options: Any = (), **changes: Any
) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """A daemon whose handler `handle` of queue `q` runs in the transactions that claim, unless it is not `aged`."""
    app = App()
    app.handler("q", **{"transaction": True, "max_attempts": 2, "backoff": 3600, **dict(options)})(handle)
    async with running(app, dsn, **changes) as (daemon, seen):
        if aged:
            await age_workers(db)
        yield daemon, seen
        await until(lambda: not len(daemon.in_flight))
        await until(lambda: daemon._database.transactions.used == 0)


@contextlib.contextmanager
def money_process(dsn: str, **changes: float) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon process, which is killed at the end if it is still alive."""
    arguments = [f"{key}={value}" for key, value in changes.items()]
    process = subprocess.Popen([sys.executable, "-m", "tests.kits.money", dsn, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def main(dsn: str, changes: dict[str, float]) -> int:
    """Runs the daemon until SIGTERM."""
    daemon = made(app_of(dsn), quick_options(dsn, **changes), end_process=end_process)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, daemon.request_stop)
    return await daemon.run()


if __name__ == "__main__":
    pairs = (argument.split("=") for argument in sys.argv[2:])
    sys.exit(asyncio.run(main(sys.argv[1], {key: float(value) for key, value in pairs})))
