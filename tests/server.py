"""The Postgres that the tests run on, and databases on it that cost 8 ms each, or as much as the disk wants.

One server for a whole run; one template database with the schema; each test gets a copy of that.
"""

import shutil
import tempfile
from pathlib import Path
from unittest import mock
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg

from pgworkd.embedded import EmbeddedPostgres

TEMPLATE = "pgworkd_template"
MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes our own directory in it

TEST_SETTINGS = {
    "fsync": "off",  # the machine may crash: then the tests are run again
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "log_min_messages": "warning",
    "autovacuum_naptime": "10s",
}
"""Fast and forgetful; but synchronous_commit stays on, as in production: without fsync it costs little."""


def start_test_server(pg_bin: Path | None = None, **settings: str) -> EmbeddedPostgres:
    """Starts a server in a temporary directory, from `pg_bin` or from the embedded binaries; stop() it.

    The directory is in memory if that has 4 GiB to spare: a database then takes 8 ms, on a slow disk 250 ms.
    """
    server = EmbeddedPostgres(settings=TEST_SETTINGS | settings, bin_dir=pg_bin)
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30
    with mock.patch.object(tempfile, "tempdir", str(MEMORY) if roomy else tempfile.tempdir):
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

    Raises asyncpg.DuplicateDatabaseError when there is one, asyncpg.ObjectInUseError when someone stays
    connected to the template.
    """
    connection = await asyncpg.connect(dsn)
    try:
        # Copying files beats the default of 15+, each page to WAL: 8 against 10 ms. 14 knows nothing else.
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
