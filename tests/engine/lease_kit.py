"""A way to Postgres that can be blocked, daemons behind it, and handlers that wait."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import anyio
from anyio.abc import SocketAttribute, SocketStream, TaskGroup

from pgworkd.app import App
from pgworkd.daemon import Daemon
from pgworkd.job import Job
from pgworkd.link import LinkOptions
from tests.kit import LIMIT_S, Recorder, quick_options

LEASE_S = 1.5
QUICK = {"lease_s": LEASE_S, "heartbeat_s": 0.1}

LEFT_S = "SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float8 FROM pgworkd.workers"
"""What is left of the leases, as the database sees it."""


class Proxy:
    """A way to Postgres that can be blocked: `hole` swallows everything silently, as a dead network does."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open = anyio.Event()
        self._open.set()

    def hole(self) -> None:
        """From now on nothing passes; no connection is closed, new ones are accepted and never answered."""
        if self._open.is_set():
            self._open = anyio.Event()

    def mend(self) -> None:
        """What was held up passes now."""
        self._open.set()

    async def serve(self, client: SocketStream) -> None:
        async with client:
            await self._open.wait()
            server = await anyio.connect_tcp(*self._target)
            async with server, anyio.create_task_group() as both:
                both.start_soon(self._copy, client, server, both)
                both.start_soon(self._copy, server, client, both)

    async def _copy(self, source: SocketStream, sink: SocketStream, both: TaskGroup) -> None:
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                data = await source.receive()
                await self._open.wait()
                await sink.send(data)
        both.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def through_proxy(dsn: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before the test's server, and the DSN that leads through it."""
    parts = urlsplit(dsn)
    login = parts.netloc.rpartition("@")[0]
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no Django
        async with anyio.create_task_group() as tasks:
            proxy = Proxy(parts.hostname or "127.0.0.1", parts.port or 5432)
            tasks.start_soon(listener.serve, proxy.serve)
            yield proxy, urlunsplit(parts._replace(netloc=f"{login}@127.0.0.1:{port}"))
            tasks.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def daemon_of(app: App, dsn: str, ended: list[str], **changes: Any) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """A daemon that only notes that it would end the process; like kit.running otherwise."""
    seen = Recorder()
    link = LinkOptions(dsn, connect_timeout_s=0.2, command_timeout_s=0.2)
    options = quick_options(dsn, **({"link": link, "shutdown_s": 0.1} | QUICK | changes))
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
    """Handlers that wait, and what became of each (job, attempt)."""

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
