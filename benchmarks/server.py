"""The Postgres server of all contenders, durable for all, and fresh databases on it."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import anyio
import asyncpg

from pgworkd.embedded import EmbeddedPostgres

from .processes import cpu_s, name_of, parent_of

MEMORY_FOR_4GB = 12 << 30
SHOWN = """
    server_version shared_buffers max_wal_size checkpoint_timeout fsync full_page_writes synchronous_commit
    max_connections random_page_cost autovacuum wal_level data_checksums
""".split()
"""Settings that the report names, as the server has them."""


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def settings() -> dict[str, str]:
    """Settings of the embedded server: durable, and large enough not to measure the disk's speed."""
    small = memory_bytes() < MEMORY_FOR_4GB
    return {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "shared_buffers": f"{memory_bytes() // 3 >> 20}MB" if small else "4GB",
        "max_wal_size": "16GB",
        "checkpoint_timeout": "30min",
        "max_connections": "200",
        "random_page_cost": "1.1",
    }


def default_scratch() -> Path:
    """A directory below the user's cache; for root the system's, as its server runs as another user."""
    if os.geteuid() == 0:
        return Path("/var/cache/pgworkd-benchmarks")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pgworkd-benchmarks"


@contextmanager
def embedded(scratch: Path, bin_dir: Path | None) -> Iterator[str]:
    """The DSN of a new server with its data below `scratch`; both are gone at the end."""
    scratch.mkdir(0o711, parents=True, exist_ok=True)
    data = scratch / f"server-{secrets.token_hex(4)}"
    if _in_memory(scratch):
        sys.stderr.write(f"warning: {scratch} is in memory: nothing is durable there, and commits cost nothing\n")
    server = EmbeddedPostgres(data, settings=settings(), bin_dir=bin_dir)
    try:
        server.start()
        yield server.dsn()
    finally:
        server.stop("immediate")
        shutil.rmtree(data, ignore_errors=True)


def _in_memory(path: Path) -> bool:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    under = [(where, kind) for where, kind in mounts if path.resolve().is_relative_to(where)]
    return bool(under) and max(under, key=lambda found: len(found[0]))[1] in {"tmpfs", "ramfs"}


class Server:
    """Creates and drops databases; measures the server's processes."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.own_sessions: set[int] = set()
        """Backends of the driver, whose CPU does not count."""
        self._token = secrets.token_hex(3)
        self._numbers = itertools.count(1)
        self._templates: dict[str, str] = {}
        self._postmaster: int | None = None
        self._strategy = ""

    async def start(self) -> None:
        """Finds out what the server can do, and its processes if they are on this machine."""
        async with self.connected(self.dsn) as connection:
            parent = parent_of(await connection.fetchval("SELECT pg_backend_pid()"))
            if connection.get_server_version().major >= 15:
                self._strategy = " STRATEGY file_copy"  # the default writes each page to WAL; 14 knows nothing else
            self._postmaster = parent if name_of(parent).startswith("postgres") else None

    async def close(self) -> None:
        """Drops the templates."""
        with anyio.CancelScope(shield=True):
            for name in self._templates.values():
                await self._drop(name)

    def cpu_s(self) -> float | None:
        """CPU seconds of the server except the driver's sessions; None if it is on another machine."""
        return None if self._postmaster is None else cpu_s(self._postmaster, self.own_sessions)

    async def settings(self) -> dict[str, str]:
        """The settings worth naming."""
        async with self.connected(self.dsn) as connection:
            return {name: await connection.fetchval("SELECT current_setting($1)", name) for name in SHOWN}

    @asynccontextmanager
    async def connected(self, dsn: str) -> AsyncIterator[asyncpg.Connection[Any]]:
        """A connection of the driver's own."""
        connection = await asyncpg.connect(dsn, command_timeout=3600, server_settings={"application_name": "driver"})
        pid = connection.get_server_pid()
        self.own_sessions.add(pid)
        try:
            yield connection
        finally:
            connection.terminate()
            self.own_sessions.discard(pid)

    async def template(self, name: str, make: Callable[[str], Awaitable[None]]) -> str:
        """The template of that name, made at its first use by a function that is given its DSN."""
        if name not in self._templates:
            database = f"pgworkd_bench_{self._token}_{name}".replace("-", "_")
            self._templates[name] = database
            await self._execute(f'CREATE DATABASE "{database}" TEMPLATE template0')
            await make(self.dsn_of(database))
        return self._templates[name]

    async def forget(self, name: str) -> None:
        """Drops a large template after its use."""
        if (database := self._templates.pop(name, None)) is not None:
            await self._drop(database)

    @asynccontextmanager
    async def database(self, template: str) -> AsyncIterator[str]:
        """The DSN of a copy of the template of that name, which must have been made; dropped at the end."""
        database = f"pgworkd_bench_{self._token}_{next(self._numbers)}"
        try:
            source = self._templates[template]
            await self._execute(f'CREATE DATABASE "{database}" TEMPLATE "{source}"{self._strategy}')
            yield self.dsn_of(database)
        finally:
            with anyio.CancelScope(shield=True):
                await self._drop(database)

    @asynccontextmanager
    async def without_autovacuum(self) -> AsyncIterator[None]:
        """Keeps the server's own transactions out of the count of ours."""
        await self._execute("ALTER SYSTEM SET autovacuum = off", "SELECT pg_reload_conf()")
        try:
            yield
        finally:
            await self._execute("ALTER SYSTEM RESET autovacuum", "SELECT pg_reload_conf()")

    def dsn_of(self, database: str) -> str:
        """The address of another database of this server."""
        return urlunsplit(urlsplit(self.dsn)._replace(path="/" + quote(database, safe="")))

    async def _drop(self, database: str) -> None:
        await self._execute(f'DROP DATABASE IF EXISTS "{database}" WITH (FORCE)')

    async def _execute(self, *statements: str) -> None:
        async with self.connected(self.dsn) as connection:
            for statement in statements:
                await connection.execute(statement)
