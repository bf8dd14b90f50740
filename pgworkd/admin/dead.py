"""Dead jobs by group of errors, and the muting of groups."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from pgworkd.admin.queries import read
from pgworkd.core import validation
from pgworkd.database.connection import Connection
from pgworkd.errors import UsageError, delay_seconds

Fetch = Callable[..., Awaitable[Sequence[Any]]]
"""Sends a query with its arguments, and returns the rows."""

NEW_FOR_S = 86_400.0
"""A group is new this long after its first death, in seconds, unless told otherwise."""
# The sums count all groups, the list stops at $5.
_GROUPS = """SELECT g.group_id, g.queue, g.kind, g.error_type, g.pattern, g.dead,
        extract(epoch FROM g.first_at)::float8, extract(epoch FROM g.last_at)::float8, coalesce(g.is_new, false),
        extract(epoch FROM nullif(g.muted_until, 'infinity'))::float8, coalesce(g.muted_until > pgworkd.clock(), false),
        g.sample_id, coalesce((SELECT e.place FROM pgworkd.error_groups e WHERE e.id = g.group_id), ''),
        count(*) OVER ()::int, (sum(g.dead) OVER ())::bigint,
        (count(*) FILTER (WHERE g.is_new) OVER ())::int
    FROM {source} g
    ORDER BY coalesce(g.is_new, false) DESC, g.dead DESC, g.queue, g.kind, g.pattern LIMIT $5"""
_SINCE = {
    "since": "pgworkd.clock() - make_interval(secs => $1::float8)",
    "new": "coalesce($2::text::timestamptz, pgworkd.clock() - make_interval(secs => $3::float8))",
}
_ALL = _GROUPS.format(source="pgworkd.dead_groups({since}, {new}, $4::text)".format(**_SINCE))
# The same of the newest $6 deaths, of all queues and of one: what they cost does not grow with the dead.
_NEWEST = """(
        SELECT f.group_id, f.queue, f.kind, e.error_type, e.pattern, count(*) AS dead, min(f.at) AS first_at,
            max(f.at) AS last_at, e.first_at >= {new} AS is_new, e.muted_until,
            (array_agg(f.job_id ORDER BY f.at DESC, f.job_id))[1] AS sample_id
        FROM (SELECT d.* FROM {deaths}) f JOIN pgworkd.error_groups e ON e.id = f.group_id
        GROUP BY f.group_id, f.queue, f.kind, e.id)"""
_OF_ALL = """(
        SELECT * FROM pgworkd.deaths WHERE $1::float8 IS NULL OR at >= {since} ORDER BY at DESC LIMIT $6) d
    JOIN pgworkd.jobs j ON j.id = d.job_id AND j.attempts = d.attempt AND j.status = 'dead' AND $4::text IS NULL"""
_OF_ONE = """(
        SELECT id, attempts FROM pgworkd.jobs
        WHERE status = 'dead' AND queue = $4::text AND ($1::float8 IS NULL OR failed_at >= {since})
        ORDER BY failed_at DESC LIMIT $6) j
    JOIN pgworkd.deaths d ON d.job_id = j.id AND d.attempt = j.attempts"""


def _newest(deaths: str) -> str:
    return _GROUPS.format(source=_NEWEST.format(deaths=deaths.format(**_SINCE), **_SINCE))


_NEWEST_OF_ALL, _NEWEST_OF_ONE = _newest(_OF_ALL), _newest(_OF_ONE)
_ARE_MORE = """SELECT count(*) > $3::bigint FROM (
    SELECT FROM pgworkd.jobs WHERE status = 'dead' AND ($1::text IS NULL OR queue = $1)
        AND ($2::float8 IS NULL OR failed_at >= pgworkd.clock() - make_interval(secs => $2)) LIMIT $3 + 1) x"""
_MUTE = """SELECT pgworkd.mute_errors($1::bigint, u.at, NULL)
    FROM (SELECT coalesce($3::text::timestamptz, pgworkd.clock() + make_interval(secs => $2::float8)) AS at) u
    WHERE u.at > pgworkd.clock()"""
_UNMUTE = "SELECT pgworkd.mute_errors($1::bigint, NULL, NULL)"
_GROUP_MAX = 2**63 - 1
_DIGITS = re.compile(r"\d+")


class DeadGroup(NamedTuple):
    """The dead jobs of one queue, kind and group of errors."""

    group: int | None
    """The group's number, for `mute`; None: not counted yet, or dead since before a version that counts."""
    queue: str
    kind: str
    error_type: str
    error: str
    """The first line of the error, without what differs from job to job."""
    dead: int
    first_at: datetime | None
    """When the first job of the group died."""
    last_at: datetime | None
    new: bool
    """True if the group's first death is not older than asked for."""
    muted_until: datetime | None
    muted: bool
    """True while no alert is sent about the group; without a `muted_until` for good."""
    sample: UUID
    """The job of the group that died last."""
    place: str = ""
    """Where the application raised the error, as far as a traceback tells; "": not known, or not counted yet."""


class DeadGroups(NamedTuple):
    """Groups of dead jobs, new ones first, then the largest; the numbers count all there are, listed or not."""

    rows: list[DeadGroup]
    groups: int
    dead: int
    new: int
    """Groups that are new."""
    newest: int | None = None
    """Only so many of the newest deaths were looked at, as there are more; None: all were."""

    def share(self, row: DeadGroup) -> float:
        """The share of this group in all dead jobs that were asked for, 0 to 1."""
        return row.dead / self.dead


async def dead_groups(
    fetch: Fetch,
    since_s: float | None = None,
    *,
    new_since: datetime | None = None,
    queue: str | None = None,
    limit: int = 20,
    most: int | None = None,
) -> DeadGroups:
    """The dead jobs that died within `since_s` seconds (None: all), of one queue or all, by group.

    `new_since`: a group whose first death was before is not new; None: NEW_FOR_S ago. `limit`: groups listed. `most`:
    where more jobs are dead, only as many of the newest deaths are looked at.
    """
    at = None if new_since is None else new_since.astimezone(UTC).isoformat()
    wanted, newest = (since_s, at, NEW_FOR_S, queue, limit), None
    if most is not None and (await fetch(_ARE_MORE, queue, since_s, most))[0][0]:
        newest = most
        rows = await fetch(_NEWEST_OF_ALL if queue is None else _NEWEST_OF_ONE, *wanted, most)
    else:
        rows = await fetch(_ALL, *wanted)
    found = [_legible(read(DeadGroup, row[:-3])) for row in rows]
    groups, dead, new = rows[0][-3:] if rows else (0, 0, 0)
    return DeadGroups(found, groups, int(dead), new, newest)


def _legible(group: DeadGroup) -> DeadGroup:
    """The pattern of an error, with the number that is part of its type, as in HTTP 422."""
    pattern = _DIGITS.sub("<n>", group.error_type)
    if pattern == group.error_type or not group.error.startswith(pattern):
        return group
    return group._replace(error=group.error_type + group.error[len(pattern) :])


class DeadOperations:
    """`admin.dead`. Raises the errors of `Admin`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def find(
        self, since_s: float | None = None, queue: str | None = None, limit: int = 20, *, most: int | None = None
    ) -> DeadGroups:
        """The groups of the jobs that died within `since_s` seconds and are dead now, at most `limit` (1 to ROWS_MAX).

        Reads all dead jobs of the queue, or of all queues; where there are more than `most`, that many of the newest.
        """
        validation.bounded(limit)
        since_s = None if since_s is None else delay_seconds(since_s, "since_s")
        fetch, of_queue = self._connection.fetch, validation.name(queue)
        return await dead_groups(fetch, since_s, queue=of_queue, limit=limit, most=most)

    async def mute(self, group: int, for_s: float | None = None, until: datetime | None = None) -> bool:
        """Sends no alert about this group for `for_s` seconds, or until `until`; False if there is no such group.

        UsageError unless exactly one of the two is given, and lies ahead by the database's clock.
        """
        if (for_s is None) == (until is None):
            raise UsageError("for_s and until: pass one of them")
        for_s = None if for_s is None else delay_seconds(for_s, "the length of the mute")
        at = None if until is None else validation.instant(until, "until")
        rows = await self._connection.fetch(_MUTE, _number(group), for_s, at)
        if not rows:
            raise UsageError("this mute would already have ended by the database's clock: give a later end")
        return bool(rows[0][0])

    async def unmute(self, group: int) -> bool:
        """Sends alerts about this group again; False if there is no such group."""
        return bool(await self._connection.value(_UNMUTE, _number(group)))


def _number(group: int) -> int:
    return validation.whole(group, "the group", 1, _GROUP_MAX)
