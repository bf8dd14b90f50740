"""What is looked up for a request is one transaction, on a session that others find as new."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.requests import RequestPool
from pgworkd.errors import SchemaError

Db: TypeAlias = "asyncpg.Connection[Any]"
ACTOR = "SELECT coalesce(current_setting('pgworkd.by', true), '')"
LAST = "SELECT pid, query FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%http%'"


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[RequestPool]:
    found = RequestPool(ConnectionOptions(dsn), connections_max=1)
    yield found
    await found.close()


async def test_it_is_the_only_statement(pool: RequestPool, db: Db) -> None:
    lookups = pool.lookups()
    for number in range(2):
        assert await lookups.value("SELECT 40 + $1::int", number) == 40 + number
        assert [row["query"] for row in await db.fetch(LAST)] == ["SELECT 40 + $1::int"], "nothing was reset after it"


async def test_requests_leave_nothing_behind(pool: RequestPool) -> None:
    lookups = pool.lookups()
    for name in ("ada", "bob"):
        async with pool.session(name) as connection:
            assert await connection.value(ACTOR) == name
        assert await lookups.value(ACTOR) == ""
        async with pool.transaction() as driver:
            assert await driver.fetchval(ACTOR) == ""


async def test_a_session_that_has_ended_meanwhile_is_replaced(pool: RequestPool, db: Db) -> None:
    lookups = pool.lookups()
    for _ in range(3):
        assert await lookups.fetch("SELECT 1") == [(1,)]
        ((pid, _),) = await db.fetch(LAST)
        await db.execute("SELECT pg_terminate_backend($1, 5000)", pid)


async def test_an_error_is_translated_and_frees_the_connection(pool: RequestPool) -> None:
    lookups = pool.lookups()
    for _ in range(3):
        with pytest.raises(SchemaError, match="pgworkd migrate"):
            await lookups.fetch("SELECT id FROM pgworkd.nothing")
    assert await lookups.value("SELECT 1") == 1
