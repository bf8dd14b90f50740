"""The digest: what an operator should know of the whole database, at the times of an ordinary schedule."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from pgworkd.admin import doctor_queries as health
from pgworkd.admin.dead import DeadGroup, DeadGroups, Fetch, dead_groups
from pgworkd.admin.doctor_queries import BrokenSchedule, QueueHealth, UnknownKind
from pgworkd.alerts.recipient import deliver, read
from pgworkd.core.job import Job
from pgworkd.core.recurrence import Recurrence
from pgworkd.core.validation import counted
from pgworkd.process.redaction import escaped

KIND = "pgworkd.digest"
GROUPS_MAX = 100
"""Groups of errors listed."""
LATE_S = 60.0
"""A queue is late when a job has been due for longer than this, in seconds."""
USUAL_DAYS = 14.0
"""What is usual for a kind is the time before the digest's, up to this many days."""
SLOW_FACTOR, SLOW_S, RUNS_MIN = 2.0, 0.1, 20
"""A kind is slow when its median duration is this many times the usual one, and at least this long, in seconds; both
are of this many runs or more."""
_PERIODS_DAYS = (0.05, 1.5, 8, 32, 367)
# 72 counts of durations: see histogram_bounds().
_COUNTS = ", ".join(f"sum(m.runs[{place}])" for place in range(1, 73))
_SLOW = """WITH sums AS (
        SELECT m.queue, m.kind, m.at >= $1::text::timestamptz AS now, ARRAY[COUNTS]::bigint[] AS runs
        FROM pgworkd.queue_minutes m
        WHERE m.at >= $1::text::timestamptz - make_interval(days => $2::int) GROUP BY 1, 2, 3
    ), medians AS (
        SELECT s.queue, s.kind, s.now, pgworkd.percentile(s.runs, 0.5) AS median_s,
               (SELECT sum(c)::bigint FROM unnest(s.runs) c) AS runs
        FROM sums s
    )
    SELECT n.queue, n.kind, u.median_s, n.median_s, n.runs
    FROM medians n JOIN medians u ON u.queue = n.queue AND u.kind = n.kind AND n.now AND NOT u.now
    WHERE n.median_s >= $3::float8 * u.median_s AND n.median_s >= $4::float8
      AND least(n.runs, u.runs) >= $5::bigint
    ORDER BY n.median_s / u.median_s DESC LIMIT 20""".replace("COUNTS", _COUNTS)  # nosec B608 # ours, of numbers
_NOW = "SELECT extract(epoch FROM pgworkd.clock())::float8"


class SlowKind(NamedTuple):
    """A kind that takes much longer than usual: medians in seconds, and the number of runs since the last digest."""

    queue: str
    kind: str
    usual_s: float
    now_s: float
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A summary. `since`: when the one before was due; a group of errors, or a run, is new after that."""

    at: datetime
    since: datetime
    dead: DeadGroups
    """All dead jobs there are, by group of errors: new groups first; the first GROUPS_MAX."""
    slow: Sequence[SlowKind]
    late: Sequence[QueueHealth]
    """Queues with a job that has been due for more than LATE_S, except those that are paused."""
    schedules: Sequence[BrokenSchedule]
    """Schedules that have no next occurrence."""
    unknown: Sequence[UnknownKind]
    """Kinds that no worker has a handler for: what is still to be written, or to be deployed."""

    @property
    def quiet(self) -> bool:
        """True if there is nothing to report."""
        return not (self.dead.groups or self.slow or self.late or self.schedules or self.unknown)

    @property
    def subject(self) -> str:
        """The digest in one line, for the subject of a mail."""
        if self.quiet:
            return "pgworkd: all is well"
        new = sum(row.new for row in self.dead.rows)
        parts = [f"{counted(self.dead.dead, 'dead job')}" + (f" ({new} new)" if new else "")]
        for found, noun in ((self.slow, "slow kind"), (self.late, "late queue"), (self.schedules, "broken schedule")):
            parts += [counted(len(found), noun)] if found else []
        parts += [counted(len(self.unknown), "unknown kind")] if self.unknown else []
        return f"pgworkd: {', '.join(parts)}"

    def text(self) -> str:
        """The whole digest, for people."""
        parts = [f"From {self.since:%Y-%m-%d %H:%M} to {self.at:%Y-%m-%d %H:%M} UTC."]
        parts += ["Nothing to report."] if self.quiet else []
        if self.dead.groups:
            title = f"{counted(self.dead.dead, 'dead job')} in {counted(self.dead.groups, 'group')} of errors"
            left = self.dead.groups - len(self.dead.rows)
            lines = [
                *map(_group, self.dead.rows),
                *([f"... and {counted(left, 'group')} more: pgworkd dead"] if left else []),
            ]
            parts.append(_section(f"{title} (pgworkd dead)", lines))
        if self.slow:
            lines = [f"{k.queue}, {k.kind}: {k.now_s:.3g} s, usually {k.usual_s:.3g} s" for k in self.slow]
            parts.append(_section("Slow kinds", lines))
        if self.late:
            lines = [f"{q.queue}: due for {q.overdue_s:,.0f} s, {counted(q.workers, 'worker')}" for q in self.late]
            parts.append(_section("Late queues", lines))
        if self.schedules:
            lines = [f"{schedule.name}: {' '.join(schedule.error.split())[:300]}" for schedule in self.schedules]
            parts.append(_section("Schedules without a next occurrence", lines))
        if self.unknown:
            lines = [f"{u.kind}, in queue {u.queue}: at least {counted(u.jobs, 'job')}" for u in self.unknown]
            parts.append(_section("Kinds without a handler, still to be written or deployed", lines))
        return "\n\n".join(parts) + "\n"


async def summary(fetch: Fetch, previous: Callable[[datetime], datetime]) -> Digest:
    """Reads the digest; `previous` computes, from now, when the one before was due."""
    now = datetime.fromtimestamp((await fetch(_NOW))[0][0], UTC)
    since = previous(now)
    names = [row[0] for row in await fetch(health.QUEUES, health.QUEUES_MAX)]
    queues = [QueueHealth(*row) for row in await fetch(health.HEALTH, names, health.PRIORITIES_MAX)]
    slow = (since.isoformat(), int(USUAL_DAYS), SLOW_FACTOR, SLOW_S, RUNS_MIN)
    return Digest(
        at=now,
        since=since,
        dead=await dead_groups(fetch, new_since=since, limit=GROUPS_MAX),
        slow=[SlowKind(*row) for row in await fetch(_SLOW, *slow)],
        late=[queue for queue in queues if queue.overdue_s > LATE_S and not queue.paused],
        schedules=[BrokenSchedule(*row) for row in await fetch(health.SCHEDULES)],
        unknown=[UnknownKind(*row) for row in await fetch(health.UNKNOWN_KINDS, names, health.KINDS_ROWS)],
    )


def digest_handler(
    recurrence: Callable[[], Recurrence | None], to: Callable[[Digest], Awaitable[None] | None] | str
) -> Callable[..., Any]:
    """The handler of the jobs of a digest with that rule. Its result says who got it."""

    async def send(job: Job) -> dict[str, Any]:
        rule = recurrence()
        found = await read(job, lambda fetch: summary(fetch, lambda now: before(rule, job.occurrence or now)))
        return {"to": await deliver(to, found, job), "dead": found.dead.dead, "groups": found.dead.groups}

    return send


def before(rule: Recurrence | None, at: datetime) -> datetime:
    """The last occurrence of the rule before `at`; a day before, if there is none within a year."""
    for days in _PERIODS_DAYS if rule is not None else ():
        found, last = at - timedelta(days=days), None
        while rule is not None and (found := rule.next_after(found)) < at:
            last = found
        if last is not None:
            return last
    return at - timedelta(days=1)


def _group(row: DeadGroup) -> str:
    marks = ("new, " if row.new else "") + ("muted, " if row.muted else "")
    last = f"{row.last_at:%Y-%m-%d %H:%M}" if row.last_at else "?"
    return f"{marks}{row.queue}, {row.kind}: {counted(row.dead, 'job')}, last {last}, as {row.sample}: {row.error}"


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {escaped(line)}" for line in lines)])  # a queue's name may hold a line break
