"""pgbouncer in transaction mode: applications enqueue through it; a daemon reports that it needs direct sessions."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import psycopg
import pytest

from pgworkd.client import NewJob, batch, enqueue, enqueue_many
from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.errors import UsageError
from tests.kits.daemon import running, until
from tests.kits.process import app

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="there is no pgbouncer on this machine")
_CONFIG = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = plain
auth_file = {users}
pool_mode = transaction
default_pool_size = 2
"""


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def pooled(dsn: str) -> Iterator[str]:
    """The DSN of the test's database through a pgbouncer."""
    parts = urlsplit(dsn)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = Path(tempfile.mkdtemp(prefix="pgbouncer-"))  # not below tmp_path, which other users cannot enter
    users, config = directory / "users", directory / "pgbouncer.ini"
    users.write_text(f'"{parts.username}" "{parts.password}"\n')
    config.write_text(_CONFIG.format(host=parts.hostname, port=parts.port, listen_port=port, users=users))
    command = [str(PGBOUNCER), str(config)]
    if os.geteuid() == 0:  # pgbouncer refuses to run as root
        command += ["-u", "nobody"]
        for path in (users, config, directory):
            path.chmod(0o755)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        give_up = time.monotonic() + 5
        while not _answers(port):
            assert time.monotonic() < give_up, "pgbouncer does not start"
            time.sleep(0.02)
        yield dsn.replace(f":{parts.port}/", f":{port}/")
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


async def test_a_daemon_behind_pgbouncer_fails_with_a_clear_error(pooled: str) -> None:
    with pytest.raises(UsageError, match=r"pooler.*the address of Postgres itself"):
        await schema.verify(ConnectionOptions(pooled))


async def test_applications_enqueue_through_pgbouncer(dsn: str, db: asyncpg.Connection[Any], pooled: str) -> None:
    connection = await asyncpg.connect(pooled, statement_cache_size=0)
    await enqueue(connection, "told")
    await enqueue_many(connection, [NewJob("told") for _ in range(6_000)])
    async with connection.transaction():
        first = await enqueue(connection, "told", dedupe_key="k", on_duplicate="skip")
        await enqueue(connection, "told", after=[first.id])
        async with batch(connection, "root", kind="told") as root:
            await root.add([{}])
    await connection.close()
    with psycopg.connect(pooled, prepare_threshold=None) as other:
        enqueue(other, "told", {"by": "psycopg"})
    async with running(app, dsn, queues={"told": None}):
        await until(lambda: db.fetchval("SELECT count(*) = 6005 FROM pgworkd.finished_jobs"))
