"""What operators do to queues: change their settings, pause and resume them; and what holds in each, and why.

Every daemon follows within moments: a trigger on the table tells them, whoever changes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime

from pgworkd.database.connection import Connection
from pgworkd.errors import DatabaseError, UsageError, delay_seconds
from pgworkd.settings.queue import REMEDIES, InForce, checked, in_force
from pgworkd.words import validation

_SET = "SELECT pgworkd.set_queue($1::text, $2::text::jsonb)"
_PAUSE = """SELECT pgworkd.set_queue($1::text, jsonb_build_object('paused_until', u.at))
    FROM (SELECT coalesce($3::text::timestamptz, pgworkd.clock() + make_interval(secs => $2::float8),
                          'infinity') AS at) u
    WHERE u.at > pgworkd.clock()"""
_RESUME = """SELECT pgworkd.set_queue(q.name, '{"paused_until": null}') FROM pgworkd.queues q
    WHERE q.name = $1::text AND q.paused_until > pgworkd.clock()"""
_SETTINGS = """SELECT n.queue,
        coalesce(to_jsonb(q) || jsonb_build_object('paused', q.paused_until > pgworkd.clock()), '{}')::text,
        (SELECT coalesce(jsonb_agg(DISTINCT jsonb_build_array(p.code_concurrency, p.code_source)), '[]')
         FROM pgworkd.known_pools() p
         JOIN pgworkd.workers w ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
         WHERE p.queue = n.queue AND p.code_concurrency IS NOT NULL)::text
    FROM (SELECT queue::text FROM pgworkd.known_pools() UNION SELECT name::text FROM pgworkd.queues) n
    LEFT JOIN pgworkd.queues q ON q.name = n.queue ORDER BY n.queue"""


class QueueActs:
    """The part of `Admin` that is about queues. Raises what that raises."""

    _connection: Connection

    async def set_queue(self, queue: str, changes: Mapping[str, object]) -> None:
        """Changes settings of a queue, named as the columns of `queues`; None: back to code. The rest stays as it is.

        UsageError names what is unknown or out of bounds, or lacks its counterpart (a burst without a rate).
        """
        wanted = json.dumps(checked(changes))
        try:
            await self._connection.fetch(_SET, validation.text(queue, "the queue's name", 200), wanted)
        except DatabaseError as error:
            if (remedy := REMEDIES.get(error.constraint or "")) is not None:
                raise UsageError(remedy) from None
            raise

    async def pause(self, queue: str, for_s: float | None = None, until: datetime | None = None) -> None:
        """No daemon starts a job of this queue for `for_s` seconds, or `until` then; neither: until `resume`."""
        if for_s is not None and until is not None:
            raise UsageError("for_s and until are both given: pass one of them")
        for_s = None if for_s is None else delay_seconds(for_s, "the length of the pause")
        if until is not None and until.utcoffset() is None:
            raise UsageError("until has no time zone: which instant it means would be a guess")
        at = None if until is None else until.astimezone(UTC).isoformat()
        if not await self._connection.fetch(_PAUSE, validation.text(queue, "the queue's name", 200), for_s, at):
            raise UsageError("by the database's clock this pause would be over already: give a later end")

    async def resume(self, queue: str) -> bool:
        """Ends a pause; False if there was none."""
        return bool(await self._connection.fetch(_RESUME, validation.name(queue)))

    async def settings(self) -> dict[str, list[InForce]]:
        """What holds in each queue that has settings or a worker, and where it comes from."""
        rows = await self._connection.fetch(_SETTINGS)
        return {queue: in_force(json.loads(row), [tuple(c) for c in json.loads(code)]) for queue, row, code in rows}
