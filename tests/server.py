"""The Postgres that the tests run on, and databases on it that cost some 30 ms each.

One server for a whole run; one template database with the schema; each test gets a copy of that.
"""

from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

from pgworkd.embedded import EmbeddedPostgres

TEMPLATE = "pgworkd_template"

TEST_SETTINGS = {
    "fsync": "off",  # the machine may crash: then the tests are run again
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "log_min_messages": "warning",
    "max_wal_size": "4GB",  # no checkpoint in the middle of a measurement
    "autovacuum_naptime": "10s",
}
"""Fast and forgetful; but synchronous_commit stays on, as in production: without fsync it costs little."""


def start_test_server(pg_bin: Path | None = None) -> EmbeddedPostgres:
    """Starts a server in a temporary directory, from `pg_bin` or from the embedded binaries; stop() it."""
    server = EmbeddedPostgres(settings=TEST_SETTINGS, bin_dir=pg_bin)
    server.start()
    return server


async def create_template(dsn: str, schema_sql: str) -> None:
    """Makes the database `pgworkd_template` afresh by executing the script `schema_sql` in it.

    `dsn` is any database of the server but that one. Raises what the script raises (asyncpg.PostgresError).
    """
    await drop_database(dsn, TEMPLATE)
    await _execute(dsn, f"CREATE DATABASE {_quoted(TEMPLATE)} TEMPLATE template0")
    await _execute(_with_database(dsn, TEMPLATE), schema_sql)


async def create_database(dsn: str, name: str) -> str:
    """Copies the template to a new database `name` and returns its DSN.

    Raises asyncpg.DuplicateDatabaseError when there is one, asyncpg.ObjectInUseError when someone stays connected
    to the template.
    """
    connection = await asyncpg.connect(dsn)
    try:
        # Copying files beats the default of 15+, each page to WAL: 32 against 53 ms. 14 knows nothing else.
        strategy = " STRATEGY file_copy" if connection.get_server_version().major >= 15 else ""
        await connection.execute(f"CREATE DATABASE {_quoted(name)} TEMPLATE {_quoted(TEMPLATE)}{strategy}")
    finally:
        await connection.close()
    return _with_database(dsn, name)


async def drop_database(dsn: str, name: str) -> None:
    """Drops the database `name`, if there is one, under whoever is connected to it."""
    await _execute(dsn, f"DROP DATABASE IF EXISTS {_quoted(name)} WITH (FORCE)")


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _with_database(dsn: str, name: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path="/" + quote(name, safe="")))
