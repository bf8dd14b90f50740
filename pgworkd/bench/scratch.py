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
from typing import Any, TypeVar

import anyio

from pgworkd.database.connection import Connection, ConnectionOptions
from pgworkd.errors import DatabaseUnavailable, PgworkdError, UsageError

PREFIX = "pgworkd-bench-"
_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{12}}")
"""The name of a scratch queue: only such a queue is removed; changes of its settings are kept out of the audit."""
DELETE_STEP = 10_000
REMOVE_S = 30.0
"""How long each step of a removal is tried again while the database does not answer."""
_AGAIN_S = 0.5
_RENEWS_S = 0.5
"""Time between two looks at whether the worker of another run still renews its lease."""

_RIGHTS = """SELECT r.what FROM (
        SELECT r || ' on pgworkd.' || t AS what, has_table_privilege('pgworkd.' || t, r) AS has
        FROM unnest(ARRAY['jobs', 'queues', 'workers', 'pools']) t,
             unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) r
        UNION ALL
        SELECT 'EXECUTE on pgworkd.' || p.proname, has_function_privilege(p.oid, 'EXECUTE') FROM pg_proc p
        WHERE p.pronamespace = 'pgworkd'::regnamespace
          AND p.proname IN ('register', 'claim', 'settle_completed', 'sign_off')
    ) r WHERE NOT r.has ORDER BY 1"""
_NAMES = """SELECT name::text FROM pgworkd.queues WHERE starts_with(name, $1)
    UNION SELECT name FROM pgworkd.workers WHERE starts_with(name, $1)
    UNION SELECT queue::text FROM pgworkd.pools WHERE starts_with(queue, $1)"""
_LEASES = """SELECT name, seen_at, extract(epoch FROM lease_until - pgworkd.clock())::float8 FROM pgworkd.workers
    WHERE starts_with(name, $1) AND lost_at IS NULL AND lease_until > pgworkd.clock()"""
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


async def check_rights(connection: Connection) -> None:
    """Raises UsageError, which names what is missing, where a run would fail half-way for want of a right."""
    missing = [str(row[0]) for row in await connection.fetch(_RIGHTS)]
    if missing:
        user = await connection.value("SELECT current_user::text")
        raise UsageError(
            f"the role {user!r} lacks {', '.join(missing)}: connect as a role that daemons use, or, in the roles of "
            f'pgworkd grants, GRANT pgworkd_worker TO "{user}"'
        )


class Scratch:
    """The scratch queue `queue`, over a connection of its own."""

    def __init__(self, connection: Connection, queue: str) -> None:
        self.queue = queue
        self._connection = connection

    async def create(self) -> None:
        """Stores the queue's settings: it keeps no history."""
        await self._connection.fetch(_CREATE, self.queue)

    async def remove(self) -> None:
        """Removes every row of the queue; raises PgworkdError that names what is left if it cannot, for REMOVE_S."""
        try:
            await _remove(self._connection, self.queue)
        except PgworkdError as error:
            raise PgworkdError(
                f"the scratch queue {self.queue} could not be removed ({error}): its jobs and its rows in "
                "pgworkd.queues, pools and workers are left; remove them with: pgworkd bench --clean"
            ) from None


async def remove_leftovers(connection: Connection, say: Callable[[str], None]) -> list[str]:
    """Removes the scratch queues of dead runs and returns their names; leaves those of runs that are alive.

    A run that was killed counts as alive until it has let its lease expire: waits for that, and says so. Raises
    PgworkdError.
    """
    names = {str(row[0]) for row in await connection.fetch(_NAMES, PREFIX) if _NAME.fullmatch(str(row[0]))}
    if not names:
        return []
    alive = await _alive(connection, names, say)
    removed = sorted(names - alive)
    for name in removed:
        await _remove(connection, name)
    return removed


async def _alive(connection: Connection, names: set[str], say: Callable[[str], None]) -> set[str]:
    """The runs whose worker renews its lease: watches each until it does, or the lease has expired."""
    first: dict[str, Any] = {}
    alive: set[str] = set()
    while True:
        leases = {str(name): (seen, left_s) for name, seen, left_s in await connection.fetch(_LEASES, PREFIX)}
        unclear = [name for name in leases if name in names and name not in alive]
        for name in unclear:
            seen, left_s = leases[name]
            if name not in first:
                first[name] = seen
                say(f"waiting up to {left_s:.0f} s to see whether the run of {name} is alive")
            elif first[name] != seen:
                alive.add(name)
        if not [name for name in unclear if name not in alive]:
            return alive
        await anyio.sleep(_RENEWS_S)


async def _remove(connection: Connection, queue: str) -> None:
    await _insist(partial(connection.value, _END_SESSIONS, queue))
    while await _insist(partial(connection.value, _DELETE_JOBS, queue, DELETE_STEP)):
        pass
    await _insist(partial(connection.fetch, _DELETE_ROWS, queue))


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
