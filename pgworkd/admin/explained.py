"""Why jobs do not run, as the database explains it."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from uuid import UUID

from pgworkd.admin.queries import read, select
from pgworkd.database.connection import Connection


class Explanation(NamedTuple):
    """One reason why a job does not run; each is enough by itself. `reason`: a word such as paused, key or limit."""

    reason: str
    says: str
    ends: str
    """What ends it: a command, or an event."""
    ends_at: datetime | None
    """When it ends; None: not known."""
    jobs: list[UUID] | None
    """For which it waits, ten at most."""


_EXPLAIN = select(Explanation, "FROM pgworkd.explain($1)")
# Of those that are due, if there are any; else of those that wait for something.
_FIRST_WAITING = """SELECT f.id FROM (
    (SELECT j.id, j.priority::bigint, j.run_at FROM pgworkd.jobs j
     WHERE j.queue = $1 AND pgworkd.waits_plain(j) AND j.run_at <= pgworkd.clock()
     ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1)
    UNION ALL
    (SELECT j.id, j.priority::bigint, j.run_at FROM pgworkd.jobs j
     WHERE j.queue = $1 AND pgworkd.waits_keyed(j) AND j.run_at <= pgworkd.clock()
     ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1)
    UNION ALL
    (SELECT j.id, j.priority::bigint, j.run_at FROM pgworkd.jobs j
     WHERE j.queue = $1 AND pgworkd.waits_suspect(j) AND j.run_at <= pgworkd.clock()
     ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1)
    UNION ALL
    (SELECT j.id, -3000000000, j.run_at FROM pgworkd.jobs j
     WHERE j.queue = $1 AND pgworkd.waits_plain(j)
     ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1)
    UNION ALL
    (SELECT j.id, -3000000000, j.run_at FROM pgworkd.jobs j
     WHERE j.queue = $1 AND pgworkd.waits_keyed(j)
     ORDER BY j.priority DESC, j.run_at, j.id LIMIT 1)
    UNION ALL
    -- As their indexes have them, not by priority: there may be a million.
    (SELECT j.id, -4000000000, j.run_at FROM pgworkd.jobs j
     WHERE j.queue = $1 AND j.status = 'blocked' AND j.waiting_on = 0
     ORDER BY j.serialize_key, j.run_at, j.id LIMIT 1)
    UNION ALL
    (SELECT j.id, -4000000000, j.run_at FROM pgworkd.jobs j
     WHERE j.queue = $1 AND j.waiting_on > 0 ORDER BY j.id LIMIT 1)
) AS f (id, place, run_at) ORDER BY f.place DESC, f.run_at, f.id LIMIT 1"""


async def explain(connection: Connection, job_id: UUID) -> list[Explanation]:
    """Why a job does not run; none: the next claim takes it, or it is unknown."""
    return [read(Explanation, row) for row in await connection.fetch(_EXPLAIN, job_id)]


async def first_waiting(connection: Connection, queue: str) -> UUID | None:
    """The job that is first in its queue; None: none waits."""
    found: UUID | None = await connection.value(_FIRST_WAITING, queue)
    return found
