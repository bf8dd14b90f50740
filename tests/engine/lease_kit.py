"""Daemons with short leases, and handlers that wait."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import anyio

from pgworkd import App, Job
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.daemon import Daemon
from tests.kits.daemon import LIMIT_S, Recorder, quick_options

LEASE_S = 1.5
QUICK = {"lease_s": LEASE_S, "heartbeat_s": 0.1}

LEFT_S = "SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float8 FROM pgworkd.workers"
"""The remaining time of the leases, according to the database."""


@contextlib.asynccontextmanager
async def daemon_of(app: App, dsn: str, ended: list[str], **changes: Any) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """Like kit.running, but the daemon only records that it would end the process."""
    seen = Recorder()
    connection = ConnectionOptions(dsn, connect_timeout_s=0.2, command_timeout_s=0.2)
    options = quick_options(dsn, **({"connection": connection, "shutdown_s": 0.1} | QUICK | changes))
    daemon = Daemon(app, options, end_process=ended.append)
    daemon.events.listen(seen)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        with anyio.fail_after(LIMIT_S):
            await daemon.ready.wait()
        try:
            yield daemon, seen
        finally:
            daemon.request_stop()


class Sleepers:
    """Handlers that wait, and the outcome of each (job, attempt)."""

    def __init__(self) -> None:
        self.app = App()
        self.began: dict[tuple[UUID, int], float] = {}
        self.ended: dict[tuple[UUID, int], float] = {}
        self.returned: set[tuple[UUID, int]] = set()
        self.go_on = anyio.Event()
        self.together: Counter[UUID] = Counter()
        self.twice = 0

        @self.app.handler("q")
        async def handle(job: Job) -> None:
            run = (job.id, job.attempt)
            self.began[run] = time.monotonic()
            self.together[job.id] += 1
            self.twice += self.together[job.id] > 1
            try:
                await self.go_on.wait()
                self.returned.add(run)
            finally:
                self.together[job.id] -= 1
                self.ended[run] = time.monotonic()
