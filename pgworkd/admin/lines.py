"""What runs and waits under a key, in its order, and which keys are in use: by index alone, each within a bound."""

from __future__ import annotations

from typing import NamedTuple

from pgworkd.admin.queries import OF_JOB, JobRow, read, select
from pgworkd.core import validation
from pgworkd.database.connection import Connection


def _jobs(where: str) -> str:
    return select(JobRow, f"FROM pgworkd.jobs {where} LIMIT $3", finished_at="NULL::float8", **OF_JOB)


# Each in the order of an index. A serialize_key belongs to its queue, or to the scope that this has.
_OF_LINE = """coalesce(serialize_scope, queue) = coalesce(
        (SELECT q.serialize_scope FROM pgworkd.queues q WHERE q.name = $1::text), $1::text)
    AND serialize_key = $2::text"""
_HOLDER = _jobs("WHERE " + _OF_LINE + " AND (status = 'running' OR status = 'failed' AND NOT yields)")
_LINE = _jobs(
    "WHERE " + _OF_LINE + " AND waiting_on = 0 AND status IN ('blocked', 'pending', 'failed')"
    " AND (status <> 'failed' OR yields) ORDER BY coalesce(serialize_scope, queue), serialize_key, run_at, id"
)
_RUNNING = _jobs("WHERE status = 'running' AND queue = $1::text AND limit_key = $2::text ORDER BY queue, limit_key")
_WAITING = _jobs("""WHERE status IN ('pending', 'failed') AND losses < 2 AND limit_key IS NOT NULL
    AND queue = $1::text AND coalesce(limit_key::text, '') = $2::text
    ORDER BY queue, coalesce(limit_key::text, ''), priority DESC, run_at, id""")
_LIMITS = """SELECT q.limit_per_key::int, q.rate_per_key::int, q.rate_per_key_period_s::float8, l.room, l.again_s
    FROM pgworkd.queues q LEFT JOIN LATERAL pgworkd.rate_left(
        q.name, $2::text, q.rate_per_key, q.rate_per_key_period_s, q.rate_per_key_burst, pgworkd.clock()
    ) l ON q.rate_per_key > 0
    WHERE q.name = $1::text"""
# Loose scans: from each key the next one is found, so that a key with many jobs costs no more than one with few.
_IN_USE = """WITH RECURSIVE limited AS (
        (SELECT j.queue, j.limit_key AS key FROM pgworkd.jobs j
         WHERE j.status = 'running' AND j.limit_key IS NOT NULL AND j.queue >= coalesce($1::text, '')
         ORDER BY j.queue, j.limit_key LIMIT 1)
        UNION ALL
        SELECT n.queue, n.limit_key FROM limited k CROSS JOIN LATERAL (
            SELECT j.queue, j.limit_key FROM pgworkd.jobs j
            WHERE j.status = 'running' AND j.limit_key IS NOT NULL AND (j.queue, j.limit_key) > (k.queue, k.key)
            ORDER BY j.queue, j.limit_key LIMIT 1) n
        WHERE $1 IS NULL OR k.queue = $1
    ), held AS (
        (SELECT coalesce(j.serialize_scope, j.queue) AS queue, j.serialize_key AS key FROM pgworkd.jobs j
         WHERE j.serialize_key IS NOT NULL AND (j.status = 'running' OR j.status = 'failed' AND NOT j.yields)
           AND coalesce(j.serialize_scope, j.queue) >= coalesce($1::text, '')
         ORDER BY coalesce(j.serialize_scope, j.queue), j.serialize_key LIMIT 1)
        UNION ALL
        SELECT n.queue, n.serialize_key FROM held k CROSS JOIN LATERAL (
            SELECT coalesce(j.serialize_scope, j.queue) AS queue, j.serialize_key FROM pgworkd.jobs j
            WHERE j.serialize_key IS NOT NULL AND (j.status = 'running' OR j.status = 'failed' AND NOT j.yields)
              AND (coalesce(j.serialize_scope, j.queue), j.serialize_key) > (k.queue, k.key)
            ORDER BY coalesce(j.serialize_scope, j.queue), j.serialize_key LIMIT 1) n
        WHERE $1 IS NULL OR k.queue = $1
    )
    (SELECT l.queue::text, l.key::text, 'limit_key' FROM limited l WHERE $1 IS NULL OR l.queue = $1 LIMIT $2)
    UNION ALL
    (SELECT h.queue::text, h.key::text, 'serialize_key' FROM held h WHERE $1 IS NULL OR h.queue = $1 LIMIT $2)"""


class KeyLimits(NamedTuple):
    """What the queue's settings allow each limit_key; None: as much as there is."""

    limit: int | None = None
    """Jobs that may run at once."""
    rate: int | None = None
    """Jobs that may start in each period."""
    period_s: float | None = None
    room: int | None = None
    """How many the rate lets start now."""
    again_s: float | None = None
    """When the rate lets one more start after those, in seconds."""


class UnderKey(NamedTuple):
    """The jobs with a key: in each list at most as many as were asked for, in the order in which they start."""

    holder: list[JobRow]
    """The job that has it as its serialize_key: it runs, or waits for its retry."""
    line: list[JobRow]
    """The jobs that wait behind that one."""
    running: list[JobRow]
    """The jobs that run with it as their limit_key."""
    waiting: list[JobRow]
    """The jobs that wait with it as their limit_key."""
    limits: KeyLimits


class KeyInUse(NamedTuple):
    """A key with which a job runs, or waits for its retry. `queue`: or the scope of its serialize_key."""

    queue: str
    key: str
    used_as: str
    """limit_key or serialize_key."""


async def under(connection: Connection, queue: str, key: str, limit: int) -> UnderKey:
    """The jobs with a key of a queue, in each list at most `limit` (1 to ROWS_MAX)."""
    validation.bounded(limit)
    wanted = (validation.name(queue), validation.name(key))
    holder, line, running, waiting = [
        [read(JobRow, row) for row in await connection.fetch(sql, *wanted, limit)]
        for sql in (_HOLDER, _LINE, _RUNNING, _WAITING)
    ]
    limits = [KeyLimits(*row) for row in await connection.fetch(_LIMITS, *wanted)]
    return UnderKey(holder, line, running, waiting, limits[0] if limits else KeyLimits())


async def in_use(connection: Connection, queue: str | None, limit: int) -> list[KeyInUse]:
    """The first keys by name with which jobs run, of each use at most `limit` (1 to ROWS_MAX)."""
    validation.bounded(limit)
    return [KeyInUse(*row) for row in await connection.fetch(_IN_USE, validation.name(queue), limit)]
