"""pgbouncer: applications enqueue through it; a daemon works through it in session mode, and refuses another."""

from __future__ import annotations

import contextlib
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

import anyio
import asyncpg
import psycopg
import pytest

from pgworkd import App, Job
from pgworkd.client import NewJob, batch, enqueue, enqueue_many
from pgworkd.database import schema, session
from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.database.session import settings
from pgworkd.errors import UsageError
from tests.kits.daemon import insert, running, until, waits_for_status
from tests.kits.process import app

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.skipif(PGBOUNCER is None, reason="there is no pgbouncer on this machine"),
    pytest.mark.slow("daemons under faults"),
]
_CONFIG = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = plain
auth_file = {users}
default_pool_size = 20
"""
OURS = ",".join(settings("x", 1.0, "somebody"))
IGNORING = f"ignore_startup_parameters = {OURS}"


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_pooled", set())


@pytest.fixture
def pooled(dsn: str) -> Iterator[str]:
    """The DSN of the test's database through a pgbouncer in transaction mode."""
    with pooler(dsn, "pool_mode = transaction") as there:
        yield there


@contextlib.contextmanager
def pooler(dsn: str, *lines: str) -> Iterator[str]:
    """A pgbouncer with these lines in its configuration, and the DSN of the database through it."""
    parts = urlsplit(dsn)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    directory = Path(tempfile.mkdtemp(prefix="pgbouncer-"))  # not below tmp_path, which other users cannot enter
    users, config = directory / "users", directory / "pgbouncer.ini"
    users.write_text(f'"{parts.username}" "{parts.password}"\n')
    text = _CONFIG.format(host=parts.hostname, port=parts.port, listen_port=port, users=users)
    config.write_text("\n".join([text, *lines, ""]))
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


POOLS = {
    "last first": [],
    "round robin": ["server_round_robin = 1"],
    "one": ["default_pool_size = 1"],
    "two, round robin": ["default_pool_size = 2", "server_round_robin = 1"],
}


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize("ignores", [True, False])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("busy", [True, False])
async def test_sessions_that_are_shared_are_refused(
    dsn: str, mode: str, pool: str, *, ignores: bool, busy: bool
) -> None:
    with pooler(dsn, f"pool_mode = {mode}", *POOLS[pool], IGNORING if ignores else "") as there:
        async with anyio.create_task_group() as others:
            if busy:
                for _ in range(4):
                    others.start_soon(_ask, there)
            with pytest.raises(UsageError, match=r"pooler in transaction mode.*the address of Postgres itself"):
                await schema.verify(ConnectionOptions(there))
            others.cancel_scope.cancel()
    assert not session._pooled


async def _ask(there: str) -> None:
    connection = await asyncpg.connect(there, statement_cache_size=0)
    try:
        while True:
            await connection.execute("SELECT pg_sleep(0.001)")
    finally:
        connection.terminate()


@pytest.mark.parametrize("lines", [(), (IGNORING,)], ids=["refuses", "ignores"])
async def test_in_session_mode_a_daemon_works_with_its_own_settings(
    dsn: str, db: asyncpg.Connection[Any], lines: tuple[str, ...]
) -> None:
    """With pgbouncer's defaults: it refuses settings in the startup; or told to ignore them, which is worse."""
    options: list[Any] = []
    made = App()

    @made.handler("q")
    async def handle(payload: dict[str, Any], job: Job) -> None:
        async with job.transaction() as connection:
            options.append(await connection.fetch(SETTINGS))

    await db.execute("ALTER ROLE CURRENT_USER SET synchronous_commit = off")
    try:
        with pooler(dsn, *lines) as there:
            async with running(made, there) as (daemon, _):
                for _ in range(3):  # on one session, which is reset in between
                    await until(waits_for_status(db, await insert(db, "q"), "completed"))
                assert daemon.listening
                assert options == [options[0]] * 3
                assert dict(options[0]) == {
                    "application_name": "pgworkd transaction",
                    "lock_timeout": "4000",
                    "statement_timeout": "0",
                    "synchronous_commit": "on",
                    "TimeZone": "UTC",
                }
            connection = Connection(ConnectionOptions(there, lock_timeout_s=0.5, by="o'brien"), "test")
            assert await connection.value("SHOW lock_timeout") == "500ms"
            assert await connection.value("SHOW pgworkd.by") == "o'brien"
            await connection.close()
    finally:
        await db.execute("ALTER ROLE CURRENT_USER RESET synchronous_commit")


SETTINGS = """SELECT name, setting FROM pg_settings
    WHERE name IN ('application_name', 'lock_timeout', 'statement_timeout', 'synchronous_commit', 'TimeZone')"""


async def test_what_the_dsn_adds_and_the_pooler_refuses_is_named(dsn: str) -> None:
    with (
        pooler(dsn) as there,
        pytest.raises(UsageError, match=r"unsupported startup parameter: options; remove it from the DSN or"),
    ):
        await schema.verify(ConnectionOptions(f"{there}?options=-c%20geqo%3Doff"))


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
