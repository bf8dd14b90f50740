"""A daemon in this process, its events and its jobs; and waiting for conditions instead of sleeping."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, ClassVar

import anyio
import asyncpg

from pgworkd import App
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.engine.life.maintenance import Periods
from pgworkd.remote.client import LEASE_S_MIN, GatewayAddress
from pgworkd.remote.daemon import RemoteDaemon

_TEXTS = ("queue", "payload", "kind", "dedupe_key", "serialize_key", "limit_key", "meta")
_CASTS = dict.fromkeys(_TEXTS, "::text") | dict.fromkeys(("payload", "meta"), "::text::jsonb")
"""Else the driver looks up the domains of these columns, which takes longer than many a test."""
REMOTE = "PGWORKD_TESTS_REMOTE"
"""In the environment: the address of a gateway, and a token."""
LIMIT_S = 20.0
"""Time limit of every wait; then the test fails and shows what it saw."""
LEASE_S = 1.5
"""Of `daemon_of`."""
LEFT_S = "SELECT extract(epoch FROM min(lease_until) - clock_timestamp())::float8 FROM pgworkd.workers"
"""The remaining time of the leases, according to the database."""


class Recorder:
    """Records all events of a daemon and lets a test wait for one."""

    present: ClassVar[weakref.WeakSet[Recorder]] = weakref.WeakSet()

    def __init__(self) -> None:
        self.seen: list[tuple[str, Mapping[str, Any]]] = []
        self.present.add(self)
        self._arrived = anyio.Event()

    def __call__(self, name: str, facts: Mapping[str, Any]) -> None:
        self.seen.append((name, facts))
        arrived, self._arrived = self._arrived, anyio.Event()
        arrived.set()

    def all(self, name: str, **facts: Any) -> list[Mapping[str, Any]]:
        """The fields of every event of that name that match the given ones."""
        return [f for n, f in self.seen if n == name and facts.items() <= dict(f).items()]

    async def wait(self, name: str, count: int = 1, **facts: Any) -> Mapping[str, Any]:
        """Waits for the count-th such event, past ones included."""
        with anyio.move_on_after(LIMIT_S):
            while len(found := self.all(name, **facts)) < count:
                await self._arrived.wait()
            return found[count - 1]
        raise AssertionError(f"no {name} {facts} (x{count}) within {LIMIT_S} s; saw: {self.seen[-20:]}")


async def until(fact: Callable[[], Any], limit_s: float = LIMIT_S) -> Any:
    """Polls `fact`, which may be async, until it returns a true value; returns that."""
    answer: Any = None
    with anyio.move_on_after(limit_s):
        while True:
            answer = fact()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await anyio.sleep(0.01)
    raise AssertionError(f"not true within {limit_s} s; the last answer was {answer!r}")


def quick_options(dsn: str, **changes: Any) -> DaemonOptions:
    """Options with periods short enough for a test; everything else as in production."""
    connection = ConnectionOptions(dsn, connect_timeout_s=5, command_timeout_s=5)
    periods = Periods(rescue_s=0.1, expire_s=0.1, schedules_s=0.1, orphans_s=0.1)
    options = DaemonOptions(
        connection, worker_name="test", lease_s=3.0, heartbeat_s=0.2, poll_s=0.1, shutdown_s=10, periods=periods
    )
    return dataclasses.replace(options, **changes)


def made(app: App, options: DaemonOptions, **more: Any) -> Daemon:
    """A daemon; one that works through a gateway, if the environment names one (see `tests.kits.remote_daemon`)."""
    if REMOTE not in os.environ:
        return Daemon(app, options, **more)
    url, token = os.environ[REMOTE].split()
    name = f"{options.worker_name} lease {options.lease_s}"
    gateway = GatewayAddress(url, token, options.connection.command_timeout_s)
    times = dataclasses.replace(options.connection, dsn="postgresql://")
    daemon = RemoteDaemon(app, dataclasses.replace(options, worker_name=name, connection=times), gateway, **more)
    register = daemon._store.register

    async def register_for_long(name: str, pid: int, version: str, lease_s: float, *rest: Any) -> Any:
        return await register(name, pid, version, max(LEASE_S_MIN, lease_s), *rest)  # the database shortens it again

    daemon._store.register = register_for_long  # type: ignore[method-assign]
    return daemon


@contextlib.asynccontextmanager
async def running(
    app: App,
    dsn: str,
    *,
    queues: Mapping[str, int | None] | None = None,
    parts: tuple[Any, ...] = (),
    end_process: Callable[[str], None] | None = end_process,
    **changes: Any,
) -> AsyncIterator[tuple[Daemon, Recorder]]:
    """A daemon in this process, ready; stopped gracefully at the end."""
    recorder = Recorder()
    daemon = made(app, quick_options(dsn, **changes), queues=queues, parts=parts, end_process=end_process)
    daemon.events.listen(recorder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(daemon.run)
        with anyio.fail_after(LIMIT_S):
            await daemon.ready.wait()
        try:
            yield daemon, recorder
        finally:
            daemon.request_stop()


def daemon_of(
    app: App, dsn: str, ended: list[str], **changes: Any
) -> contextlib.AbstractAsyncContextManager[tuple[Daemon, Recorder]]:
    """A daemon with a short lease that only records in `ended` that it would end the process."""
    connection = ConnectionOptions(dsn, connect_timeout_s=0.2, command_timeout_s=0.2)
    options = {"connection": connection, "shutdown_s": 0.1, "lease_s": LEASE_S, "heartbeat_s": 0.1}
    return running(app, dsn, end_process=ended.append, **options | changes)


async def insert(db: asyncpg.Connection[Any], queue: str, payload: str = "{}", **columns: Any) -> Any:
    """Inserts one job as an application would; returns its id."""
    names = ["queue", "payload", *columns]
    casts = [_CASTS.get(name, "") for name in names]
    marks = ", ".join(f"${i}{cast}" for i, cast in enumerate(casts, 1))
    sql = f"INSERT INTO pgworkd.jobs ({', '.join(names)}) VALUES ({marks}) RETURNING id"  # noqa: S608 - names are ours
    return await db.fetchval(sql, queue, payload, *columns.values())


async def status(db: asyncpg.Connection[Any], job_id: Any) -> str | None:
    """The status of a job, live or finished; None if there is no such job."""
    found = await db.fetchval("SELECT status::text FROM pgworkd.all_jobs WHERE id = $1", job_id)
    return None if found is None else str(found)


def waits_for_status(db: asyncpg.Connection[Any], job_id: Any, wanted: str) -> Callable[[], Awaitable[bool]]:
    """A condition for `until`: the job has that status."""

    async def fact() -> bool:
        return await status(db, job_id) == wanted

    return fact


async def cancel(db: asyncpg.Connection[Any], *job_ids: Any) -> dict[Any, str]:
    """Cancels like an operator; the results by id."""
    return dict(await db.fetch("SELECT id, outcome FROM pgworkd.cancel($1)", job_ids))
