"""Faults of the database. None of them may cost a daemon its lease, however long it lasts."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import anyio
import asyncpg
from anyio.to_thread import run_sync

from tests.chaos.clocks import LIBRARY, put_forward
from tests.chaos.disk import fill
from tests.chaos.faults import LONG_S, SHORT_S, fault
from tests.chaos.fleet import Fleet
from tests.chaos.history import AWAY
from tests.chaos.workload import CLOCK_STEP_S

SESSIONS = ("claim", "settle", "maintenance", "lease", "listen", "transaction")
_SESSIONS = "SELECT pid FROM pg_stat_activity WHERE application_name = 'pgworkd ' || $1"


@contextlib.asynccontextmanager
async def _down(fleet: Fleet) -> AsyncIterator[None]:
    await run_sync(fleet.server.kill)
    try:
        yield
    finally:
        await run_sync(fleet.start_server)
        fleet.note("postgres_back")
        fleet.disturb()


@fault
async def postgres_down(fleet: Fleet) -> None:
    """Postgres is killed and back within moments."""
    async with _down(fleet):
        await anyio.sleep(fleet.dice.uniform(0, SHORT_S))


@fault
async def postgres_down_long(fleet: Fleet) -> None:
    """Postgres is unavailable for longer than the lease."""
    async with _down(fleet):
        await anyio.sleep(LONG_S)


@fault
async def postgres_restart(fleet: Fleet) -> None:
    """Postgres is restarted as an administrator would do it."""
    await run_sync(fleet.restart_server)
    fleet.note("postgres_back")
    fleet.disturb()


@fault
async def terminate_sessions(fleet: Fleet) -> None:
    """Each kind of session in turn is terminated."""
    async with fleet.connection() as db:
        for session in SESSIONS:
            await db.execute(f"SELECT pg_terminate_backend(pid) FROM ({_SESSIONS}) s", session)  # noqa: S608 - ours
            await anyio.sleep(0.05)


@fault
async def freeze_session(fleet: Fleet) -> None:
    """One backend of the server is frozen for a while, with the locks that it holds."""
    async with fleet.connection() as db:
        pids = await db.fetch(_SESSIONS, fleet.dice.choice(("claim", "settle", "maintenance", "listen")))
    for row in fleet.dice.sample(pids, min(1, len(pids))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(row["pid"], signal.SIGSTOP)
            await anyio.sleep(LONG_S)
            os.kill(row["pid"], signal.SIGCONT)
    fleet.disturb()  # it may have held the lock for rescues


@contextlib.asynccontextmanager
async def _configured(fleet: Fleet, name: str, value: str) -> AsyncIterator[None]:
    await _tell(fleet, f"ALTER SYSTEM SET {name} = '{value}'")
    try:
        yield
    finally:
        await _tell(fleet, f"ALTER SYSTEM RESET {name}")
        fleet.disturb()


async def _tell(fleet: Fleet, statement: str) -> None:
    """Changes the server's settings, even if our own connections break meanwhile."""
    while True:
        try:
            async with fleet.connection(120) as db:
                await db.execute(statement)
                await db.execute("SELECT pg_reload_conf()")
            return
        except AWAY:
            await anyio.sleep(0.05)


@fault
async def read_only(fleet: Fleet) -> None:
    """The server is read-only, as after a failover to a server that is still a standby."""
    async with _configured(fleet, "default_transaction_read_only", "on"):
        await anyio.sleep(SHORT_S)


@fault
async def short_timeouts(fleet: Fleet) -> None:
    """An administrator sets timeouts that are far too short, for all roles."""
    async with (
        _configured(fleet, "statement_timeout", "1ms"),
        _configured(fleet, "lock_timeout", "1ms"),
        _configured(fleet, "idle_session_timeout", "50ms"),
    ):
        await anyio.sleep(SHORT_S)


@contextlib.asynccontextmanager
async def _locked(fleet: Fleet, table: str) -> AsyncIterator[None]:
    async with fleet.connection() as db, db.transaction():
        await db.execute(f"LOCK TABLE pgworkd.{table} IN ACCESS EXCLUSIVE MODE")
        yield
    fleet.disturb()


@fault
async def lock_jobs(fleet: Fleet) -> None:
    """The table `jobs` is locked for the length of two leases."""
    async with _locked(fleet, "jobs"):
        await anyio.sleep(2 * LONG_S / 1.5)


@fault
async def lock_workers(fleet: Fleet) -> None:
    """No lease can be renewed for longer than a lease lasts."""
    async with _locked(fleet, "workers"):
        await anyio.sleep(LONG_S)


@fault
async def old_snapshot(fleet: Fleet) -> None:
    """A long transaction holds back vacuum while the daemons keep working."""
    async with fleet.connection() as db, db.transaction(isolation="repeatable_read"):
        await db.fetchval("SELECT count(*) FROM pgworkd.jobs")
        await anyio.sleep(LONG_S)


@fault
async def no_connection_left(fleet: Fleet) -> None:
    """Other clients use up max_connections."""
    taken: list[asyncpg.Connection[Any]] = []
    try:
        with contextlib.suppress(*AWAY):
            while True:
                taken.append(await asyncpg.connect(fleet.dsn, timeout=2))
        for member in fleet.any():
            member.proxy.cut()
        await anyio.sleep(SHORT_S / 2)
    finally:
        for connection in taken:
            connection.terminate()
        fleet.disturb()


@fault
async def notify_flood(fleet: Fleet) -> None:
    """Thousands of notifications, most of them invalid, on our channel."""
    async with fleet.connection() as db:
        for text in ("", "x", "[]", "{}", '{"queue": 7}', '{"queue": "mixed"}', '{"worker": 1}', "\\", "9" * 7000):
            await db.execute("SELECT pg_notify('pgworkd', $1 || repeat(' ', n)) FROM generate_series(1, 300) n", text)


@fault
async def burst(fleet: Fleet) -> None:
    """Hundreds of jobs fall due at one instant."""
    await fleet.insert("mixed", {"seconds": 0}, kind="plain", count=500, delay_s=SHORT_S)
    await fleet.insert("limited", {"seconds": 0.02}, count=100, delay_s=SHORT_S)
    await anyio.sleep(SHORT_S)


@fault
async def clock_step(fleet: Fleet) -> None:
    """The database's clock is set forward by more than a lease, and back again."""
    await run_sync(put_forward, fleet.directory / "server.clock", CLOCK_STEP_S)
    fleet.disturb()  # each of the two steps counts as an outage
    await anyio.sleep(LONG_S)
    fleet.note("clock_put_back")
    await run_sync(put_forward, fleet.directory / "server.clock", 0)
    await anyio.sleep(1.5)
    fleet.disturb()


@fault
async def disk_full(fleet: Fleet) -> None:
    """The database's disk is full for a while; the server may crash."""
    ballast = await run_sync(fill, fleet.directory / "disk")
    await anyio.sleep(SHORT_S)
    await run_sync(ballast.unlink)
    fleet.note("was_full", alive=fleet.server.pid is not None)
    await anyio.sleep(0.5)  # the server may not have noticed yet
    if fleet.server.pid is None:
        await run_sync(fleet.start_server)
    fleet.note("postgres_back")
    fleet.disturb()


def impossible(fleet_disk: bool) -> dict[str, str]:
    """Faults that cannot be injected here, and why."""
    found = {} if LIBRARY is not None else dict.fromkeys(("clock_step", "worker_clock"), "there is no libfaketime")
    return found if fleet_disk else found | {"disk_full": "only root may mount a disk"}
