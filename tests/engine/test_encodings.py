"""A database whose encoding is not UTF8 is refused with a remedy, before anything is changed."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest

from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.engine.life.daemon import Daemon
from pgworkd.errors import SchemaError
from tests.kits.apps import app_of_one
from tests.kits.daemon import quick_options
from tests.kits.server import drop_database

SCHEMA = """CREATE SCHEMA pgworkd; CREATE TABLE pgworkd.schema_version (version int, installed_at timestamptz);
    INSERT INTO pgworkd.schema_version VALUES (1, now())"""
"""As if the schema had been installed before this was refused."""


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
async def odd(server_dsn: str, request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, str]]:
    """The DSN of an empty database in another encoding, and that encoding."""
    name = f"pgworkd_odd_{uuid.uuid4().hex[:12]}"
    connection = await asyncpg.connect(server_dsn)
    try:
        await connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{request.param}' LC_COLLATE 'C' LC_CTYPE 'C'"
        )
    finally:
        await connection.close()
    yield server_dsn.rsplit("/", 1)[0] + "/" + name, request.param
    await drop_database(server_dsn, name)


async def test_migrate_refuses_another_encoding_and_leaves_nothing(odd: tuple[str, str]) -> None:
    dsn, encoding = odd
    with pytest.raises(
        SchemaError, match=rf"has the encoding {encoding}, pgworkd needs UTF8: .*TEMPLATE template0.*dsn"
    ):
        await schema.migrate(ConnectionOptions(dsn))
    connection = await asyncpg.connect(dsn)
    try:
        with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match=f"is {encoding}, pgworkd needs UTF8"):
            await connection.execute(schema.text())
        assert await connection.fetchval("SELECT to_regnamespace('pgworkd')") is None
    finally:
        await connection.close()


async def test_a_daemon_refuses_another_encoding(odd: tuple[str, str]) -> None:
    dsn, encoding = odd
    connection = await asyncpg.connect(dsn)
    await connection.execute(SCHEMA)
    await connection.close()
    with pytest.raises(SchemaError, match=f"has the encoding {encoding}, pgworkd needs UTF8"):
        await Daemon(app_of_one(), quick_options(dsn)).run()
