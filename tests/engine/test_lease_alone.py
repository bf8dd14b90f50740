"""The heartbeat by itself, with a fake lease holder."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from pgworkd.core.registration import Registration
from pgworkd.core.source import Instructions
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.store import Store
from pgworkd.engine.life.heartbeat import Heartbeat, LeaseOptions, boot_time_s
from tests.kits.daemon import until
from tests.kits.proxy import Proxy

pytestmark = [
    pytest.mark.slow("leases that run out, each test alone on the machine"),
    pytest.mark.alone("leases of a second or two: who cannot renew in time must stop"),
]


class LeaseHolder:
    """Records the calls of the lease. `running`: how many jobs do not stop."""

    def __init__(self) -> None:
        self.answers: list[Instructions] = []
        self.fenced: list[float] = []
        self.lost = 0
        self.troubles: list[Exception] = []
        self.running = 0
        self.threads: set[int] = set()

    def lease_renewed(self) -> None:
        self.threads.add(threading.get_ident())

    def on_instructions(self, instructions: Instructions) -> None:
        self.threads.add(threading.get_ident())
        self.answers.append(instructions)

    def lease_fenced(self, since_s: float) -> None:
        self.threads.add(threading.get_ident())
        self.fenced.append(since_s)

    def worker_lost(self) -> None:
        self.threads.add(threading.get_ident())
        self.lost += 1

    def renewal_failed(self, error: Exception) -> None:
        self.threads.add(threading.get_ident())
        self.troubles.append(error)

    def still_running(self) -> int:
        return self.running


async def registered(db: asyncpg.Connection[Any]) -> Registration:
    """A worker with a lease of 2 s."""
    token = uuid4()
    return Registration.of(await db.fetchval("SELECT pgworkd.register('alone', 1, 't', 2, $1)", token), token)


@contextlib.asynccontextmanager
async def lease_of(
    holder: LeaseHolder, dsn: str, db: asyncpg.Connection[Any], ended: list[str], **changes: float
) -> AsyncIterator[Heartbeat]:
    worker_id = await registered(db)
    options = ConnectionOptions(dsn, connect_timeout_s=0.2, command_timeout_s=0.2)
    times = {"lease_s": 1.2, "heartbeat_s": 0.05} | changes
    lease = Heartbeat(Store(options).heartbeats, worker_id, holder, LeaseOptions(end_process=ended.append, **times))
    lease.start()
    try:
        yield lease
    finally:
        await lease.stop()
        assert not lease._thread.is_alive()


@pytest.mark.fast
async def test_the_lease_is_renewed_periodically_and_instructions_are_delivered(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    holder, ended = LeaseHolder(), list[str]()
    await db.execute("INSERT INTO pgworkd.queues (name, concurrency, paused_until) VALUES ('q', 3, 'infinity')")
    await db.execute("INSERT INTO pgworkd.queues (name) VALUES ('p')")
    async with lease_of(holder, dsn, db, ended) as lease:
        await until(lambda: len(holder.answers) >= 3)
        assert lease.fresh
        assert holder.answers[-1].queues == {
            "q": {"concurrency": 3, "paused": True, "paused_until": "infinity", "fair": False, "limited": False},
            "p": {"paused": False, "fair": False, "limited": False},
        }
        assert await db.fetchval("SELECT state FROM pgworkd.workers") == "running"
        lease.state = "stopping"
        await until(lambda: db.fetchval("SELECT state = 'stopping' FROM pgworkd.workers"))
    assert holder.threads == {threading.get_ident()}, "it must speak in the loop's thread only"
    assert (holder.fenced, holder.lost, ended) == ([], 0, [])


async def test_a_requested_heartbeat_renews_at_once(dsn: str, db: asyncpg.Connection[Any]) -> None:
    holder = LeaseHolder()
    async with lease_of(holder, dsn, db, [], lease_s=3600, heartbeat_s=900) as lease:
        for n in range(1, 6):
            await until(lambda n=n: len(holder.answers) >= n, limit_s=2)  # type: ignore[misc]
            lease.renew_now()


async def test_the_fence_fires_once_per_outage_and_ends_only_a_busy_process(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    holder, ended = LeaseHolder(), list[str]()
    async with Proxy(dsn) as proxy, lease_of(holder, proxy.dsn, db, ended) as lease:
        for n in (1, 2):
            await until(lambda: lease.fresh)
            proxy.mode = "hold"
            await until(lambda n=n: len(holder.fenced) == n)  # type: ignore[misc]
            assert not lease.fresh
            if n == 2:
                holder.running = 2
                await until(lambda: ended)
            proxy.mode = "pass"
        holder.running = 0
    assert all(1.0 <= since_s < 1.16 for since_s in holder.fenced)
    assert set(ended) == {"the lease expires and 2 handlers would not stop"}
    assert holder.troubles
    assert holder.lost == 0


@pytest.mark.fast
async def test_a_lost_lease_is_reported_once_and_a_new_id_starts_a_new_one(
    dsn: str, db: asyncpg.Connection[Any]
) -> None:
    holder, ended = LeaseHolder(), list[str]()
    async with lease_of(holder, dsn, db, ended) as lease:
        await until(lambda: holder.answers)
        await db.execute("DELETE FROM pgworkd.workers")
        await until(lambda: holder.lost)
        assert not lease.fresh
        tried = lease.tried_at_s
        await until(lambda: lease.tried_at_s > tried)
        assert holder.lost == 1
        began = boot_time_s()
        lease.adopt(await registered(db), began)
        answers = len(holder.answers)
        await until(lambda: len(holder.answers) > answers)
        assert lease.fresh
    assert (holder.lost, ended) == (1, [])


@pytest.mark.fast
async def test_the_lease_is_renewed_while_the_loop_is_blocked(dsn: str, db: asyncpg.Connection[Any]) -> None:
    holder, ended = LeaseHolder(), list[str]()
    async with lease_of(holder, dsn, db, ended, lease_s=1.8):
        await until(lambda: holder.answers)
        holder.running = 1
        time.sleep(2.5)  # noqa: ASYNC251 - blocks the loop on purpose
        assert await db.fetchval("SELECT seen_at > now() - interval '900 ms' FROM pgworkd.workers")
    assert (holder.fenced, ended) == ([], [])
