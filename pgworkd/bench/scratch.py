"""The scratch queue of a run: its rows, and how they are removed, also those that a dead run has left.

A run registers a worker that has the queue's name before it writes anything else, and the row of `queues` before any
job. So whatever a run has left is found by these few rows, and a run whose worker's lease holds is alive.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio

from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.errors import DatabaseUnavailable

PREFIX = "pgworkd-bench-"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{12}}")
"""The name of a scratch queue: only such a queue is removed; changes of its settings are kept out of the audit."""
DELETE_STEP = 10_000
REMOVE_S = 30.0
"""How long each step of a removal is tried again while the database does not answer."""
_AGAIN_S = 0.5

_FOUND = """SELECT n, EXISTS (SELECT FROM pgworkd.workers
        WHERE name = n AND lost_at IS NULL AND lease_until > pgworkd.clock())
    FROM (SELECT name::text AS n FROM pgworkd.queues UNION SELECT name FROM pgworkd.workers
        UNION SELECT queue::text FROM pgworkd.pools) found WHERE starts_with(n, $1) ORDER BY n"""
_CREATE = "INSERT INTO pgworkd.queues (name, keep_s) VALUES ($1, 0)"
# A statement that got no answer may still run. The rights of the same user, or of a member of its role, suffice.
_END_SESSIONS = """SELECT count(pg_terminate_backend(pid, 2000)) FROM pg_stat_activity
    WHERE starts_with(application_name, 'pgworkd ' || $1) AND datname = current_database()
      AND usename = current_user AND pid <> pg_backend_pid()"""
# By one index each, whatever the size of the table: the conditions are those of the indexes. One statement, so that no
# job is missed which a rescue moves from running to failed meanwhile.
_DELETE_JOBS = """WITH gone AS (DELETE FROM pgworkd.jobs WHERE id = ANY (ARRAY(
        (SELECT id FROM pgworkd.jobs WHERE queue = $1 AND status IN ('pending', 'failed') AND losses < 2
             AND serialize_key IS NULL AND limit_key IS NULL LIMIT $2)
        UNION ALL SELECT id FROM pgworkd.jobs WHERE queue = $1 AND status IN ('pending', 'failed') AND losses > 1
        UNION ALL SELECT id FROM pgworkd.jobs WHERE queue = $1 AND status = 'dead'
        UNION ALL SELECT j.id FROM pgworkd.workers w JOIN pgworkd.jobs j
            ON j.worker_id = w.id AND j.queue = $1 AND j.status = 'running' WHERE w.name = $1)) RETURNING 1)
    SELECT count(*) FROM gone"""
_DELETE_ROWS = """WITH pools AS (DELETE FROM pgworkd.pools WHERE queue = $1),
    workers AS (DELETE FROM pgworkd.workers WHERE name = $1),
    samples AS (DELETE FROM pgworkd.queue_samples WHERE queue = $1)
    DELETE FROM pgworkd.queues WHERE name = $1"""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ScratchOptions(ConnectionOptions):
    """How to connect for a run: all its sessions bear the name of its queue in pg_stat_activity."""

    queue: str = ""
    synced: bool = True
    """False: commits do not wait for the disk."""

    def settings(self, name: str) -> dict[str, str]:
        """The settings of a session; see `ConnectionOptions`."""
        given = ConnectionOptions.settings(self, f"{self.queue} {name}")
        return given if self.synced else given | {"synchronous_commit": "off"}


def new_name() -> str:
    """A name that no other run has."""
    return PREFIX + secrets.token_hex(6)


async def create(connection: Connection, queue: str) -> None:
    """Stores the settings of a scratch queue: it keeps no history."""
    await connection.fetch(_CREATE, queue)


async def remove(connection: Connection, queue: str) -> None:
    """Removes every row of a scratch queue, for REMOVE_S if need be. Raises PgworkdError."""
    await _insist(partial(connection.value, _END_SESSIONS, queue))
    while await _insist(partial(connection.value, _DELETE_JOBS, queue, DELETE_STEP)):
        pass
    await _insist(partial(connection.fetch, _DELETE_ROWS, queue))


async def remove_leftovers(connection: Connection) -> tuple[list[str], list[str]]:
    """Removes the scratch queues of dead runs. The removed ones, and those left whose worker's lease still holds.

    Raises PgworkdError.
    """
    removed: list[str] = []
    alive: list[str] = []
    for name, leased in await connection.fetch(_FOUND, PREFIX):
        if leased:
            alive.append(name)
        elif _NAME.fullmatch(name):
            await remove(connection, name)
            removed.append(name)
    return removed, alive


async def _insist(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Repeats the call while the database does not answer, for REMOVE_S."""
    until = anyio.current_time() + REMOVE_S
    while True:
        try:
            return await call()
        except DatabaseUnavailable:
            if anyio.current_time() >= until:
                raise
        await anyio.sleep(_AGAIN_S)
