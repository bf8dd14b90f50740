"""The digest: what an operator should know of the whole database, at the times of an ordinary schedule."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

from pgworkd.admin import doctor_queries as health
from pgworkd.admin.dead import DeadGroup, DeadGroups, Fetch, dead_groups
from pgworkd.admin.doctor_queries import BrokenSchedule, DroppedResult, HeldEndpoint, QueueHealth, UnknownKind
from pgworkd.alerts.recipient import MessageOrigin, deliver, origin, read
from pgworkd.core.durations import spelled
from pgworkd.core.job import Job
from pgworkd.core.recurrence import Recurrence
from pgworkd.core.validation import counted
from pgworkd.process.redaction import escaped

KIND = "pgworkd.digest"
GROUPS_MAX, LINES_MAX = 100, 20
"""Groups of errors listed; lines of each other list in the text."""
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

    id: UUID
    """Id of the job that sends the digest."""
    origin: MessageOrigin
    at: datetime
    since: datetime
    timezone: str
    """Time zone of the times in the text."""
    dead: DeadGroups
    """All dead jobs there are, by group of errors: new groups first; the first GROUPS_MAX."""
    slow: Sequence[SlowKind]
    late: Sequence[QueueHealth]
    """Queues with a job that has been due for more than LATE_S, except those that are paused."""
    endpoints: Sequence[HeldEndpoint]
    """Endpoints that are paused or disabled, whose queues wait."""
    dropped: Sequence[DroppedResult]
    """Endpoints that have answered with a result that cannot be stored, within a day."""
    schedules: Sequence[BrokenSchedule]
    """Schedules that have no next occurrence."""
    unknown: Sequence[UnknownKind]
    """Kinds that no worker has a handler for: what is still to be written, or to be deployed."""

    @property
    def quiet(self) -> bool:
        """True if there is nothing to report."""
        urgent = self.endpoints or self.late or self.unknown or self.schedules or self.dropped
        return not (urgent or self.dead.groups or self.slow)

    @property
    def subject(self) -> str:
        """The digest in one line, for the subject of a mail."""
        if self.quiet:
            return f"{self.origin.subject}: all is well"
        counts = (
            (len(self.endpoints), "paused or disabled endpoint"),
            (len(self.late), "late queue"),
            (len(self.unknown), "unknown kind"),
            (len(self.schedules), "broken schedule"),
            (len(self.dropped), "lossy endpoint"),
            (self.dead.dead, "dead job"),
            (len(self.slow), "slow kind"),
        )
        parts = [
            counted(count, what) + (self._of_errors if what == "dead job" else "") for count, what in counts if count
        ]
        return escaped(f"{self.origin.subject}: {', '.join(parts)}")

    @property
    def _of_errors(self) -> str:
        new = f", {self.dead.new:,} of them new" if self.dead.new else ""
        return f" in {counted(self.dead.groups, 'group')} of errors{new}"

    def text(self) -> str:
        """The whole digest, for people: what keeps work from being done comes first."""
        since, at = self._local(self.since), self._local(self.at)
        parts = [f"Summary of {escaped(self.origin.line)}\nfrom {since} to {at}, {self.timezone}."]
        parts += ["Nothing to report."] if self.quiet else []
        parts += [_section(title, lines) for title, lines in (*self._urgent(), *self._lasting()) if lines]
        return "\n\n".join(parts) + "\n"

    def _urgent(self) -> list[tuple[str, list[str]]]:
        held = [
            f"{e.endpoint}: {'disabled' if e.disabled else f'paused for {spelled(e.paused_s)} more'}, "
            f"{', '.join(e.queues)} {'waits' if len(e.queues) == 1 else 'wait'}: {' '.join(e.why.split())[:300]}"
            for e in self.endpoints
        ]
        late = [f"{q.queue}: due for {spelled(q.overdue_s)}, {counted(q.workers, 'worker')}" for q in self.late]
        unknown = [f"{u.kind}, in queue {u.queue}: at least {counted(u.jobs, 'job')}" for u in self.unknown]
        broken = [f"{schedule.name}: {' '.join(schedule.error.split())[:300]}" for schedule in self.schedules]
        dropped = [f"{d.endpoint}: {spelled(d.ago_s)} ago: {' '.join(d.why.split())[:300]}" for d in self.dropped]
        return [
            ("Endpoints that are paused or disabled (pgworkd endpoints)", _cut(held)),
            ("Late queues", _cut(late)),
            ("Kinds without a handler, still to be written or deployed", _cut(unknown)),
            ("Schedules without a next occurrence", _cut(broken)),
            ("Endpoints whose results could not be stored", _cut(dropped)),
        ]

    def _lasting(self) -> list[tuple[str, list[str]]]:
        title = (
            f"{counted(self.dead.dead, 'dead job')} in {counted(self.dead.groups, 'group')} of errors (pgworkd dead)"
        )
        left = self.dead.groups - len(self.dead.rows)
        dead = [
            *map(self._group, self.dead.rows),
            *([f"... and {counted(left, 'group')} more: pgworkd dead"] if left else []),
        ]
        slow = [f"{k.queue}, {k.kind}: {k.now_s:.3g} s, usually {k.usual_s:.3g} s" for k in self.slow]
        return [(title, dead), ("Slow kinds", slow)]

    def _local(self, at: datetime | None) -> str:
        return "?" if at is None else f"{at.astimezone(ZoneInfo(self.timezone)):%Y-%m-%d %H:%M}"

    def _group(self, row: DeadGroup) -> str:
        marks = ("new, " if row.new else "") + ("muted, " if row.muted else "")
        last = self._local(row.last_at)
        number = "" if row.group is None else f" (group {row.group})"
        jobs = counted(row.dead, "job") + number
        return f"{marks}{row.queue}, {row.kind}: {jobs}, last {last}, as {row.sample}: {row.error}"


async def summary(
    fetch: Fetch, previous: Callable[[datetime], datetime], timezone: str = "UTC", job_id: UUID | None = None
) -> Digest:
    """Reads the digest; `previous` computes, from now, when the one before was due."""
    now = datetime.fromtimestamp((await fetch(_NOW))[0][0], UTC)
    since = previous(now)
    names = [row[0] for row in await fetch(health.QUEUES, health.QUEUES_MAX)]
    queues = [QueueHealth(*row) for row in await fetch(health.HEALTH, names, health.PRIORITIES_MAX)]
    slow = (since.isoformat(), int(USUAL_DAYS), SLOW_FACTOR, SLOW_S, RUNS_MIN)
    return Digest(
        id=job_id or uuid4(),
        origin=await origin(fetch),
        at=now,
        since=since,
        timezone=timezone,
        dead=await dead_groups(fetch, new_since=since, limit=GROUPS_MAX),
        slow=[SlowKind(*row) for row in await fetch(_SLOW, *slow)],
        late=[queue for queue in queues if queue.overdue_s > LATE_S and not queue.paused],
        endpoints=[HeldEndpoint(*row) for row in await fetch(health.ENDPOINTS)],
        dropped=[DroppedResult(*row) for row in await fetch(health.DROPPED, health.DROPPED_S)],
        schedules=[BrokenSchedule(*row) for row in await fetch(health.SCHEDULES)],
        unknown=[UnknownKind(*row) for row in await fetch(health.UNKNOWN_KINDS, names, health.KINDS_ROWS)],
    )


def digest_handler(
    recurrence: Callable[[], Recurrence | None], to: Callable[[Digest], Awaitable[None] | None] | str
) -> Callable[..., Any]:
    """The handler of the jobs of a digest with that rule. Its result says who got it."""

    async def send(job: Job) -> dict[str, Any]:
        rule = recurrence()
        zone = "UTC" if rule is None else rule.timezone

        async def look(fetch: Fetch) -> Digest:
            return await summary(fetch, lambda now: before(rule, job.occurrence or now), zone, job.id)

        found = await read(job, look)
        return {"to": await deliver(to, found), "dead": found.dead.dead, "groups": found.dead.groups}

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


def _cut(lines: list[str]) -> list[str]:
    """The first lines of a list, and how many more there are."""
    left = len(lines) - LINES_MAX
    return [*lines[:LINES_MAX], f"... and {left:,} more: pgworkd doctor"] if left > 0 else lines


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {escaped(line)}" for line in lines)])  # a queue's name may hold a line break
