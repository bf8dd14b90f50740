"""Daemons that share queues with keys and limits, and a log of their handlers' runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.engine.life.daemon import Daemon
from tests.kits.daemon import Recorder, running, until

NOTHING_LEFT = "SELECT NOT EXISTS (SELECT FROM pgworkd.jobs WHERE status <> 'dead')"
RUNNING = "SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'"


class Run(NamedTuple):
    """One call of the handler; times on one clock for all daemons of the test."""

    daemon: str
    key: str
    number: int
    began: float
    ended: float


class Log:
    """The runs of the handlers of all daemons, ordered by their end."""

    def __init__(self, took_s: float = 0.0) -> None:
        self.runs: list[Run] = []
        self.took_s = took_s
        self.now = self.most = 0

    def app(self, name: str, concurrency: int = 10) -> App:
        """An app for one daemon, with one queue `q`, whose payloads are {"key": .., "n": ..}."""
        app = App()

        @app.handler("q", concurrency=concurrency)
        async def handle(payload: dict[str, Any], job: Job) -> None:
            began = time.monotonic()
            self.now += 1
            self.most = max(self.most, self.now)
            if self.took_s:
                await anyio.sleep(self.took_s)
            self.now -= 1
            self.runs.append(Run(name, payload.get("key", ""), payload.get("n", 0), began, time.monotonic()))

        return app

    def of(self, key: str) -> list[Run]:
        """The runs of one key, ordered by their start."""
        return sorted((run for run in self.runs if run.key == key), key=lambda run: run.began)

    def took(self) -> float:
        """Seconds from the first start to the last end."""
        return max(run.ended for run in self.runs) - min(run.began for run in self.runs)


@contextlib.asynccontextmanager
async def fleet(
    log: Log, dsn: str, names: Sequence[str], concurrency: int = 10, **changes: Any
) -> AsyncIterator[list[tuple[Daemon, Recorder]]]:
    """Daemons with these names, all ready; `changes`: changed options."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(log.app(name, concurrency), dsn, **changes)) for name in names]


async def fill(db: asyncpg.Connection[Any], count: int, column: str, *keys: str) -> None:
    """Inserts `count` jobs for each key, interleaved; `column`: serialize_key or limit_key."""
    assert column in ("serialize_key", "limit_key")
    await db.execute(
        f"INSERT INTO pgworkd.jobs (queue, {column}, payload) "  # noqa: S608 - as checked
        "SELECT 'q', nullif(k, ''), jsonb_build_object('key', k, 'n', n)"
        " FROM generate_series(1, $1::int) n, unnest($2::text[]) k ORDER BY n",
        count,
        keys,
    )


async def all_finished(db: asyncpg.Connection[Any], limit_s: float = 10) -> None:
    """Waits until no job is left."""
    await until(lambda: db.fetchval(NOTHING_LEFT), limit_s)


class Observer:
    """A connection that counts running rows continuously."""

    def __init__(self, db: asyncpg.Connection[Any]) -> None:
        self._db = db
        self.most = self.looks = 0

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            self.most = max(self.most, await self._db.fetchval(RUNNING))
            self.looks += 1


@contextlib.asynccontextmanager
async def observed(dsn: str) -> AsyncIterator[Observer]:
    """Counts running rows on a connection of its own until the block ends."""
    db = await asyncpg.connect(dsn)
    observer = Observer(db)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer.watch)
        yield observer
        tasks.cancel_scope.cancel()
    db.terminate()
