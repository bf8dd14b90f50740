"""Operations on queues: read and change their settings, pause and resume them.

Every daemon applies a change within moments: a trigger on the table `queues` notifies them, whoever makes the change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from pgworkd.admin import queries as sql
from pgworkd.admin import throughput as history
from pgworkd.admin.queries import QueueRow
from pgworkd.admin.throughput import Activity, DepthStep, ThroughputStep
from pgworkd.core import validation
from pgworkd.database.connection import Connection
from pgworkd.errors import DatabaseError, UsageError, delay_seconds
from pgworkd.settings.queue import REMEDIES, EffectiveSetting, checked, effective_settings

_SET = "SELECT pgworkd.set_queue($1::text, $2::text::jsonb)"
_PAUSE = """SELECT pgworkd.set_queue($1::text, jsonb_build_object('paused_until', u.at))
    FROM (SELECT coalesce($3::text::timestamptz, pgworkd.clock() + make_interval(secs => $2::float8),
                          'infinity') AS at) u
    WHERE u.at > pgworkd.clock()"""
_RESUME = """SELECT pgworkd.set_queue(q.name, '{"paused_until": null}') FROM pgworkd.queues q
    WHERE ($1::text IS NULL OR q.name = $1) AND q.paused_until > pgworkd.clock()"""
_SETTINGS = """SELECT n.queue,
        coalesce(to_jsonb(q) || jsonb_build_object('paused', q.paused_until > pgworkd.clock()), '{}')::text,
        (SELECT coalesce(jsonb_agg(DISTINCT jsonb_build_array(p.code_concurrency, p.code_source)), '[]')
         FROM pgworkd.known_pools() p
         JOIN pgworkd.workers w ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
         WHERE p.queue = n.queue AND p.code_concurrency IS NOT NULL)::text
    FROM (SELECT queue::text FROM pgworkd.known_pools() UNION SELECT name::text FROM pgworkd.queues) n
    LEFT JOIN pgworkd.queues q ON q.name = n.queue ORDER BY n.queue"""


EXACT_S = 0.2
"""Counting that takes longer than this is left to the daemons, which do it for all."""
SAMPLE_AGE_S_MAX = 120.0
"""A sample that is older than this is not used: no daemon may be left to take another."""


class QueueOperations:
    """`admin.queues`. Raises the errors of `Admin`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(self, *, exact: bool = False) -> list[QueueRow]:
        """Every queue that has live jobs, a worker or settings.

        Reads all live jobs; where daemons have found that to take longer than EXACT_S, their last sample instead, whose
        age each row states, unless `exact`.
        """
        sampling = [] if exact else await self._connection.fetch(sql.SAMPLING)
        sampled = any(took_s > EXACT_S and 0 <= age_s <= SAMPLE_AGE_S_MAX for took_s, age_s in sampling)
        rows = await self._connection.fetch(sql.QUEUES_SAMPLED if sampled else sql.QUEUES)
        return [sql.read(QueueRow, row) for row in rows]

    async def names(self) -> list[str]:
        """The queues that have a live job, a worker, settings or a schedule. Reads all live jobs."""
        return [row[0] for row in await self._connection.fetch(sql.KNOWN)]

    async def exists(self, queue: str) -> bool:
        """True if the queue has a live job, a worker, settings or a schedule; always True on a standby."""
        if await self._connection.value(sql.IS_STANDBY):
            return True
        return bool(await self._connection.value(sql.IS_KNOWN, validation.name(queue)))

    async def is_served(self, queue: str) -> bool:
        """True if a live worker serves the queue."""
        return bool(await self._connection.value(sql.IS_SERVED, validation.name(queue)))

    async def depth(self, queue: str, most: int = 100_000) -> int:
        """The number of jobs of the queue that could run now, counted up to `most`. Reads no other jobs."""
        return int(await self._connection.value(sql.DEPTH, validation.name(queue), most))

    async def throughput(
        self, since: datetime, until: datetime, step_s: int, queue: str | None = None
    ) -> list[ThroughputStep]:
        """What ended in each step of time, with percentiles, in one queue or all; steps without an end are absent.

        `step_s`: 60 to 86,400 seconds; at most history.STEPS_MAX steps. Reads a bounded part of the
        statistics: each step says its share.
        """
        return await history.throughput(self._connection, since, until, step_s, validation.name(queue))

    async def depths(self, since: datetime, until: datetime, step_s: int, queue: str) -> list[DepthStep]:
        """The most that was due in each step of time, by the samples; steps without a sample are absent."""
        return await history.depths(self._connection, since, until, step_s, queue)

    async def activity(self, since: datetime, until: datetime, step_s: int, queues: Sequence[str]) -> list[Activity]:
        """What ended in each of these queues in each step of time; steps without an end are absent."""
        return await history.activity(self._connection, since, until, step_s, queues)

    async def settings(self) -> dict[str, list[EffectiveSetting]]:
        """The effective settings, and their sources, of every queue that has a row in `queues` or a worker."""
        rows = await self._connection.fetch(_SETTINGS)
        return {
            queue: effective_settings(json.loads(row), [tuple(each) for each in json.loads(code)])
            for queue, row, code in rows
        }

    async def set(self, queue: str, changes: Mapping[str, object]) -> None:
        """Changes settings of a queue, named as the columns of `queues`; None restores the default from code.

        UsageError for an unknown name, a value out of bounds, or a missing counterpart (a burst without a rate).
        """
        wanted = json.dumps(checked(changes))
        try:
            await self._connection.fetch(_SET, validation.text(queue, "the queue's name", 200), wanted)
        except DatabaseError as error:
            if (remedy := REMEDIES.get(error.constraint or "")) is not None:
                raise UsageError(remedy) from None
            raise

    async def pause(self, queue: str, for_s: float | None = None, until: datetime | None = None) -> None:
        """No daemon starts a job of the queue for `for_s` seconds, or until the instant `until`, or until `resume`."""
        if for_s is not None and until is not None:
            raise UsageError("for_s and until are both given: pass one of them")
        for_s = None if for_s is None else delay_seconds(for_s, "the length of the pause")
        if until is not None and until.utcoffset() is None:
            raise UsageError("until has no time zone: without one the instant is ambiguous")
        at = None if until is None else until.astimezone(UTC).isoformat()
        if not await self._connection.fetch(_PAUSE, validation.text(queue, "the queue's name", 200), for_s, at):
            raise UsageError("this pause would already have ended by the database's clock: give a later end")

    async def resume(self, queue: str | None) -> int:
        """Ends the pause of a queue, None: of all; how many were paused."""
        return len(await self._connection.fetch(_RESUME, validation.name(queue)))
