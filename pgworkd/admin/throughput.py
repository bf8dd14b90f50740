"""What ended in queues, how long it waited and ran, and how much was due, by steps of time, at a bounded cost.

`throughput()` in SQL reads all rows of the statistics in a span, which may be a million. Here at most COUNTED_ROWS are
added up, and for percentiles HISTOGRAM_ROWS: of more, a part of each step, which stands for the whole of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pgworkd.core import validation
from pgworkd.core.histogram import BOUNDS_S, percentile
from pgworkd.database.connection import Connection
from pgworkd.errors import UsageError

COUNTED_ROWS = 60_000
HISTOGRAM_ROWS = 4_000
STEPS_MAX = 500


class ThroughputStep(NamedTuple):
    """What ended in one step of time; durations in seconds, None: nothing was measured.

    `share`: the part of the step that was added up, for which its counts stand; 1: all of it.
    """

    at: datetime
    started: int
    completed: int
    failed: int
    dead: int
    cancelled: int
    expired: int
    wait_p50_s: float | None
    wait_p95_s: float | None
    run_p50_s: float | None
    run_p95_s: float | None
    share: float


class DepthStep(NamedTuple):
    """The most jobs that were due at a sample in one step of time."""

    at: datetime
    due: int


class Activity(NamedTuple):
    """What ended in a queue in one step of time; `failed`: attempts, and jobs that died."""

    queue: str
    at: datetime
    completed: int
    failed: int


# Of some queues rows are found by queue, of all by period: these are the indexes. Counting reads the index only.
_ROWS_OF_SOME = """SELECT NULL::int, count(*) FROM pgworkd.queue_minutes m
    WHERE m.queue = ANY ($3::text[]) AND m.at >= $1::timestamptz AND m.at < $2::timestamptz"""
_ROWS_OF_ALL = """WITH RECURSIVE periods (period_s) AS (
        SELECT min(m.period_s) FROM pgworkd.queue_minutes m
        UNION ALL SELECT (SELECT min(m.period_s) FROM pgworkd.queue_minutes m WHERE m.period_s > p.period_s)
        FROM periods p WHERE p.period_s IS NOT NULL)
    SELECT p.period_s, (SELECT count(*) FROM pgworkd.queue_minutes m WHERE m.period_s = p.period_s
                        AND m.at >= $1::timestamptz AND m.at < $2::timestamptz)
    FROM periods p WHERE p.period_s IS NOT NULL AND $3::text[] IS NULL"""
# The place of the part within its step differs from step to step: what comes each hour is in some of them. Of a step
# that is not over it lies in what has passed (l).
_READ = """SELECT extract(epoch FROM s.at)::float8, q.queue, b.share, m.*
    FROM (SELECT g.at, (hashint8(g.place) & 65535) / 65536.0::float8 AS chance
          FROM (SELECT t AS at, (extract(epoch FROM t) / $3)::bigint AS place
                FROM generate_series($1::timestamptz, $2::timestamptz - interval '1 us', make_interval(secs => $3)) t
               ) g) s
    CROSS JOIN unnest($4::int[], $5::int[], $7::int[]) AS p (unit_s, width_s, period_s)
    CROSS JOIN unnest(coalesce($6::text[], ARRAY[NULL])) AS q (queue)
    CROSS JOIN LATERAL (
        SELECT greatest(least(extract(epoch FROM pgworkd.clock() - s.at), $3), p.width_s)::float8 AS s) l
    CROSS JOIN LATERAL (SELECT p.width_s / l.s AS share, s.at + make_interval(
        secs => floor(s.chance * (l.s - p.width_s) / p.unit_s) * p.unit_s) AS at) b
    CROSS JOIN LATERAL (
        SELECT {sums} FROM pgworkd.queue_minutes r
        WHERE {which} AND r.at >= b.at AND r.at < b.at + make_interval(secs => p.width_s) AND r.at < $2
        HAVING count(*) > 0) m"""
_COUNTS = ("started", "completed", "failed", "dead", "cancelled", "expired")
_PLACES = range(1, len(BOUNDS_S) + 2)


def _both(sums: str) -> tuple[str, str]:
    """The statements for all queues, and for some."""
    return _READ.format(sums=sums, which="r.period_s = p.period_s"), _READ.format(sums=sums, which="r.queue = q.queue")


_COUNTED = _both(", ".join(f"sum(r.{name})::float8 / b.share" for name in _COUNTS))
_MEASURED = _both(
    ", ".join(
        "ARRAY[" + ", ".join(f"sum(r.{column}[{place}])::float8 / b.share" for place in _PLACES) + "]"
        for column in ("waits", "runs")
    )
)
_DEPTHS = """SELECT extract(epoch FROM date_bin(make_interval(secs => $3), s.at, 'epoch'))::float8 AS step,
        coalesce(max(q.due), 0)::bigint
    FROM pgworkd.samples s LEFT JOIN pgworkd.queue_samples q
        ON q.queue = $4::text AND q.at = s.at AND q.at >= $1::timestamptz AND q.at < $2::timestamptz
    WHERE s.at >= $1::timestamptz AND s.at < $2::timestamptz GROUP BY 1 ORDER BY 1"""


def checked(since: datetime, until: datetime, step_s: int) -> None:
    """Raises UsageError for a span that has no steps, or too many."""
    validation.whole(step_s, "step_s", 60, 86_400)
    if since.utcoffset() is None or until.utcoffset() is None:
        raise UsageError("since or until has no time zone: without one the instant is ambiguous")
    if not 0 < (until - since).total_seconds() <= STEPS_MAX * step_s:
        raise UsageError(f"until must be later than since, by at most {STEPS_MAX} times step_s")


class _Statistics:
    """Reads statistics of some queues (None: of all) from `since` to `until`: a part of each step, if they are many."""

    def __init__(
        self, connection: Connection, since: datetime, until: datetime, step_s: int, queues: Sequence[str] | None
    ) -> None:
        checked(since, until, step_s)
        self._fetch, self._span, self._step_s, self._queues = connection.fetch, (since, until), step_s, queues

    async def rows(self) -> list[tuple[int | None, int]]:
        """How many rows there are of each period; of some queues: of all periods together, which is None."""
        found = await self._fetch(_ROWS_OF_ALL if self._queues is None else _ROWS_OF_SOME, *self._span, self._queues)
        return [(period_s, rows) for period_s, rows in found if rows]

    async def sums(
        self, statements: tuple[str, str], rows: Sequence[tuple[int | None, int]], rows_max: int
    ) -> Sequence[Any]:
        """Sums of at most some `rows_max` of these rows: when the step began, queue, the share that was read, sums."""
        share = rows_max / max(sum(count for _, count in rows), 1)
        # whole periods, as rows of a period all stand at its beginning
        longest_s = 3600 if self._step_s % 3600 == 0 else 60
        units = [min(period_s or longest_s, self._step_s) for period_s, _ in rows]
        widths = [min(math.ceil(self._step_s * min(share, 1.0) / unit) * unit, self._step_s) for unit in units]
        statement = statements[self._queues is not None]
        periods = [period_s for period_s, _ in rows]
        return await self._fetch(statement, *self._span, self._step_s, units, widths, self._queues, periods)


async def throughput(
    connection: Connection, since: datetime, until: datetime, step_s: int, queue: str | None
) -> list[ThroughputStep]:
    """What ended in each step from `since` on; steps in which nothing did are left out."""
    statistics = _Statistics(connection, since, until, step_s, None if queue is None else [queue])
    rows = await statistics.rows()
    counts: dict[float, list[float]] = {}
    for at, _, share, *more in await statistics.sums(_COUNTED, rows, COUNTED_ROWS) if rows else ():
        had = counts.setdefault(at, [1.0] + [0.0] * len(_COUNTS))
        counts[at] = [min(had[0], share), *map(sum, zip(had[1:], more, strict=True))]
    histograms: dict[float, list[list[float]]] = {}
    for at, _, _, *more in await statistics.sums(_MEASURED, rows, HISTOGRAM_ROWS) if rows else ():
        had_both = histograms.get(at, [[0.0] * len(_PLACES)] * 2)
        histograms[at] = [[*map(sum, zip(*both, strict=True))] for both in zip(had_both, more, strict=True)]
    return [_step(at, counts[at], histograms.get(at, [[], []])) for at in sorted(counts)]


def _step(at: float, counts: Sequence[float], histograms: Sequence[Sequence[float]]) -> ThroughputStep:
    share, *whole = counts
    durations = [percentile([round(n) for n in each], part) for each in histograms for part in (0.5, 0.95)]
    return ThroughputStep._make([datetime.fromtimestamp(at, UTC), *map(round, whole), *durations, share])


async def activity(
    connection: Connection, since: datetime, until: datetime, step_s: int, queues: Sequence[str]
) -> list[Activity]:
    """What ended in each of these queues in each step from `since` on; steps in which nothing did are left out."""
    statistics = _Statistics(connection, since, until, step_s, queues)
    rows = await statistics.rows()
    found = await statistics.sums(_COUNTED, rows, COUNTED_ROWS) if rows else ()
    return [
        Activity(queue, datetime.fromtimestamp(at, UTC), round(completed), round(failed + dead))
        for at, queue, _, _, completed, failed, dead, *_ in found
    ]


async def depths(connection: Connection, since: datetime, until: datetime, step_s: int, queue: str) -> list[DepthStep]:
    """How much was due in each step from `since` on; steps without a sample are left out."""
    checked(since, until, step_s)
    rows = await connection.fetch(_DEPTHS, since, until, step_s, queue)
    return [DepthStep(datetime.fromtimestamp(at, UTC), due) for at, due in rows]
