"""A client that does not read, frozen or with a blocked event loop, does not hold locks for long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit, urlunsplit

import anyio
import asyncpg
import pytest

from pgworkd.core.claims import ClaimOrder
from pgworkd.database import session
from pgworkd.database.connection import ConnectionOptions, connect
from pgworkd.database.store import CLAIM
from pgworkd.engine.claim.pool import CLAIM_MAX, CLAIM_SOCKET_MAX
from tests.engine.test_large_work import insert_large
from tests.kits.daemon import until

pytestmark = pytest.mark.slow("each statement, read by a client that stops reading")

Db: TypeAlias = "asyncpg.Connection[Any]"


@contextlib.asynccontextmanager
async def frozen(dsn: str, sql: str, *args: object) -> AsyncIterator[tuple[Db, asyncio.Task[Any]]]:
    """A connection that sends a statement and does not read the response."""
    connection = await connect(ConnectionOptions(dsn, command_timeout_s=120), "frozen")  # only the server ends it
    statement = await connection.prepare(sql)
    connection._transport.pause_reading()
    call = asyncio.get_running_loop().create_task(statement.fetch(*args))
    try:
        yield connection, call
    finally:
        connection.terminate()
        with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await call


async def over_unix_socket(dsn: str, db: Db) -> str:
    """The DSN of the same database by the server's Unix socket."""
    folder = await db.fetchval(
        """SELECT rtrim(d.setting || '/' || u.setting, '/.') FROM pg_settings d, pg_settings u
           WHERE d.name = 'data_directory' AND u.name = 'unix_socket_directories'"""
    )
    parts = urlsplit(dsn)
    login, _, address = parts.netloc.rpartition("@")
    query = f"host={quote(folder, safe='')}&port={address.rpartition(':')[2]}"
    return urlunsplit(parts._replace(netloc=f"{login}@", query=query))


@pytest.mark.parametrize("kind", ["tcp", "unix"])
@pytest.mark.parametrize(
    ("jobs", "size", "meta"), [(1_200, 0, 0), (1_200, 150, 0), (1_200, 2000, 0), (40, 9, 500_000), (30, 10**6, 0)]
)
async def test_a_claim_ends_although_its_client_does_not_read_the_response(
    dsn: str, db: Db, kind: str, jobs: int, size: int, meta: int
) -> None:
    """The response of any claim fits into the socket buffers, so its locks are released."""
    await insert_large(db, "large", jobs, size, meta)
    worker = await db.fetchval("SELECT pgworkd.register('frozen', 1, '1', 3600)")
    order = ClaimOrder(worker, "large", CLAIM_MAX)
    most = min(jobs, CLAIM_MAX if kind == "tcp" else CLAIM_SOCKET_MAX)

    async def all_claimed() -> bool:
        return await db.fetchval("SELECT count(*) FROM pgworkd.jobs WHERE status = 'running'") == most

    address = dsn if kind == "tcp" else await over_unix_socket(dsn, db)
    async with frozen(address, CLAIM, *order, None) as (connection, call):
        await until(all_claimed, limit_s=5)
        assert not call.done()
        connection._transport.resume_reading()
        assert len(await call) == most


async def test_the_server_ends_a_session_whose_client_does_not_read(
    dsn: str, db: Db, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "USER_TIMEOUT_MS", "1000")
    sql = "SELECT pg_advisory_xact_lock(7), repeat('x', 1000000) FROM generate_series(1, 100)"

    async def locked() -> bool:
        return await db.fetchval("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7") > 0

    async def free() -> bool:
        return not await locked()

    async with frozen(dsn, sql) as (connection, call):
        await until(locked)
        await until(free)
        connection._transport.resume_reading()
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)), anyio.fail_after(10):
            await call
