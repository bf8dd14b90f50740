"""Places to play in: a source of work, and the hands of those who insert, lock, cancel and count on its other side."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol
from uuid import UUID

import asyncpg

from pgworkd.core.claims import ClaimOrder, Claims
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.store import Store
from pgworkd.remote import store as gateway_store
from pgworkd.remote.client import GatewayAddress
from pgworkd.remote.store import GatewayStore
from tests.kits.verbs import insert
from tests.simulation.network import Network
from tests.simulation.store import SimulatedStore, Watcher
from tests.simulation.table import Row, Table

LEASE_S, LIMIT_S, SLOTS = 30.0, 10.0, 50
NOTHING_S = 0.3
"""How long a claim that finds nothing may wait."""


class Place(Protocol):
    """One queue, whose jobs a source gives out."""

    source: Any
    queue: str

    async def insert(self, count: int = 1, **columns: Any) -> list[UUID]:
        """Inserts jobs that are due; their ids, in the order in which they are to be claimed."""

    async def statuses(self, ids: Sequence[UUID]) -> list[str | None]:
        """Their statuses."""

    def locked(self, job_id: UUID) -> contextlib.AbstractAsyncContextManager[None]:
        """Within the block somebody else has locked the job."""

    async def cancel(self, job_id: UUID) -> None:
        """An operator cancels it."""

    async def lose(self, worker: int) -> None:
        """The worker's lease has run out, and its jobs were taken back."""

    async def make_due(self, job_id: UUID) -> None:
        """The time of its retry has come."""

    def lose_answers(self) -> None:
        """From now on the source learns of no settle that it was stored."""


async def register(place: Place) -> int:
    """A new worker of the source."""
    worker: int = await place.source.register("w", 1, "v", LEASE_S, (), "")
    return worker


async def claim(place: Place, worker: int, limit: int = 10) -> Claims:
    """Claims from the place's queue."""
    found: Claims = await place.source.claim(ClaimOrder(worker, place.queue, limit))
    return found


class InDatabase:
    """The work is in Postgres, and so are these hands."""

    numbers = itertools.count()

    def __init__(self, db: asyncpg.Connection[Any], dsn: str, source: Any) -> None:
        self.db, self.dsn, self.source = db, dsn, source
        self.queue = f"q{next(self.numbers)}"

    async def insert(self, count: int = 1, **columns: Any) -> list[UUID]:
        return await insert(self.db, count, **{"queue": self.queue, **columns})

    async def statuses(self, ids: Sequence[UUID]) -> list[str | None]:
        rows = await self.db.fetch("SELECT id, status::text FROM pgworkd.all_jobs WHERE id = ANY ($1)", ids)
        found = {row[0]: row[1] for row in rows}
        return [found.get(job_id) for job_id in ids]

    @contextlib.asynccontextmanager
    async def locked(self, job_id: UUID) -> AsyncIterator[None]:
        other = await asyncpg.connect(self.dsn)
        try:
            await other.execute("BEGIN")
            await other.execute("SELECT FROM pgworkd.jobs WHERE id = $1 FOR UPDATE", job_id)
            yield
            await other.execute("ROLLBACK")
        finally:
            other.terminate()

    async def cancel(self, job_id: UUID) -> None:
        await self.db.execute("SELECT pgworkd.cancel($1)", [job_id])

    async def lose(self, worker: int) -> None:
        await self.db.execute("UPDATE pgworkd.workers SET lost_at = pgworkd.clock() WHERE id = $1", int(worker))
        rescuer = await self.db.fetchval("SELECT pgworkd.register('rescuer', 1, 'v', 30)")
        while await self.db.fetchval("SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE worker_id = $1)", int(worker)):
            await self.db.fetch("SELECT FROM pgworkd.rescue($1)", rescuer)

    async def make_due(self, job_id: UUID) -> None:
        await self.db.execute("UPDATE pgworkd.jobs SET run_at = pgworkd.clock() WHERE id = $1", job_id)

    def lose_answers(self) -> None:
        if isinstance(self.source, GatewayStore):
            self.source.held.remove = lambda _: None  # type: ignore[method-assign]


def in_postgres(db: asyncpg.Connection[Any], dsn: str) -> InDatabase:
    """A daemon's calls to its database."""
    return InDatabase(db, dsn, Store(ConnectionOptions(dsn)))


def behind_a_gateway(db: asyncpg.Connection[Any], dsn: str, url: str, token: str) -> InDatabase:
    """A daemon's calls to a gateway."""

    def told(_state: str, _cancels: object) -> None:
        """The instructions say so, too."""

    place = InDatabase(db, dsn, None)
    gateway = GatewayAddress(url, token, LIMIT_S)
    place.source = GatewayStore(gateway, lambda: {place.queue: SLOTS}, told)
    return place


class InSimulation:
    """The work is in the table of the simulation, whose network is calm."""

    queue = "q"

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.table = Table(loop.time, lambda _: None, lambda _row, _outcome: None)
        network = Network(self.table, random.Random(7), lambda _: None)  # noqa: S311
        self.source: Any = SimulatedStore(network, Watcher(), None)
        self._numbers = itertools.count(1)

    async def insert(self, count: int = 1, **columns: Any) -> list[UUID]:
        facts = {"priority": 0, "run_at": self.table.now, "max_attempts": 3, "timeout_s": None, **columns}
        rows = [Row(id=UUID(int=next(self._numbers)), queue=self.queue, **facts) for _ in range(count)]
        self.table.insert(rows)
        return [row.id for row in rows]

    async def statuses(self, ids: Sequence[UUID]) -> list[str | None]:
        return [self.table.rows[job_id].status for job_id in ids]

    @contextlib.asynccontextmanager
    async def locked(self, job_id: UUID) -> AsyncIterator[None]:
        self.table.locked.add(job_id)
        yield
        self.table.locked.discard(job_id)

    async def cancel(self, job_id: UUID) -> None:
        self.table.cancel(self.table.rows[job_id])

    async def lose(self, worker: int) -> None:
        self.table.workers[worker].lease_until = self.table.now
        self.table.rescue()

    async def make_due(self, job_id: UUID) -> None:
        self.table.rows[job_id].run_at = self.table.now

    def lose_answers(self) -> None:
        """It keeps no note of them."""


def hasten(monkeypatch: Any) -> None:
    """A claim that finds nothing is answered soon."""
    monkeypatch.setattr(gateway_store, "WAIT_S", NOTHING_S)


Make = Callable[[], Place]
