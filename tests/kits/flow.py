"""Serialize keys, limits and rates: claims in SQL, and daemons that share queues, with a log of what ran when."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import anyio
import asyncpg

from pgworkd import App, Job
from pgworkd.engine.life.daemon import Daemon
from tests.kits.daemon import Recorder, running, until
from tests.kits.verbs import Db, claim, complete

HOLDERS = """SELECT count(*) FROM pgworkd.jobs
    WHERE serialize_key IS NOT NULL AND (status = 'running' OR status = 'failed' AND NOT yields)
    GROUP BY coalesce(serialize_scope, queue), serialize_key HAVING count(*) > 1"""
"""A row for each serialize_key that is held by two jobs."""


class Taken(NamedTuple):
    """The answer to a claim: the jobs it took, and after how many seconds a rate says to claim again."""

    ids: list[uuid.UUID]
    again_s: float | None


async def take(db: Db, worker_id: int, limit: int = 10, queue: str = "q") -> Taken:
    """Claims."""
    rows = await claim(db, worker_id, limit, queue)
    if rows and rows[-1]["id"] is None:
        return Taken([row["id"] for row in rows[:-1]], rows[-1]["created_at"])
    return Taken([row["id"] for row in rows], None)


async def take_ids(db: Db, worker_id: int, limit: int = 10, queue: str = "q") -> list[uuid.UUID]:
    """Claims; the ids in the order returned."""
    return (await take(db, worker_id, limit, queue)).ids


async def settings(db: Db, queue: str = "q", **values: Any) -> None:
    """Sets these columns of the queue's row; the others keep their values."""
    names = list(values)
    marks = ", ".join(f"${number}" for number in range(2, len(names) + 2))
    updates = ", ".join(f"{name} = excluded.{name}" for name in names)
    await db.execute(
        f"INSERT INTO pgworkd.queues (name, {', '.join(names)}) VALUES ($1, {marks}) "  # noqa: S608 - names are ours
        f"ON CONFLICT (name) DO UPDATE SET {updates}",
        queue,
        *values.values(),
    )


async def line(db: Db, *keys: str, queue: str = "q", **columns: Any) -> list[uuid.UUID]:
    """Inserts a job for each of these serialize_keys; their ids."""
    ids = []
    for key in keys:
        names = ["queue", "serialize_key", *columns]
        marks = ", ".join(f"${number}" for number in range(1, len(names) + 1))
        sql = f"INSERT INTO pgworkd.jobs ({', '.join(names)}) VALUES ({marks}) RETURNING id"  # noqa: S608 - as above
        ids.append(await db.fetchval(sql, queue, key, *columns.values()))
    return ids


async def unblock(db: Db) -> int:
    """unblock; the number of keys it repaired."""
    return int(await db.fetchval("SELECT pgworkd.unblock()"))


async def expire(db: Db) -> int:
    """expire; the number of jobs it finished."""
    return int(await db.fetchval("SELECT pgworkd.expire()"))


async def run_all(db: Db, worker_id: int, queue: str = "q", limit: int = 1) -> list[uuid.UUID]:
    """Claims and completes until nothing is left, without maintenance; the ids in the order of their starts."""
    order: list[uuid.UUID] = []
    while ids := await take_ids(db, worker_id, limit, queue):
        order += ids
        attempts = await db.fetch("SELECT id, attempts FROM pgworkd.jobs WHERE id = ANY ($1)", ids)
        by_id = {row["id"]: row["attempts"] for row in attempts}
        assert await complete(db, ids, [by_id[job_id] for job_id in ids]) == set(ids)
    return order


def most_in_window(instants: Sequence[datetime], window_s: float) -> int:
    """The maximum number of these instants in any window of that length, both ends included."""
    ordered = sorted(instants)
    return max(
        (sum(1 for at in ordered[n:] if (at - first).total_seconds() <= window_s) for n, first in enumerate(ordered)),
        default=0,
    )


# Daemons

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
