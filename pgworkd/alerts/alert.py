"""Alerts: a message about a group of errors that is new, or of which many jobs died.

Which deaths make an alert is decided in SQL, by count_deaths(), which inserts a job for each; here that job is run. It
looks again before it sends: meanwhile the group may have been muted, or all of its jobs retried or discarded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from pgworkd.admin.dead import Fetch
from pgworkd.alerts.recipient import deliver, read
from pgworkd.core import validation
from pgworkd.core.job import Job
from pgworkd.core.validation import counted
from pgworkd.database.signal_store import AlertRule
from pgworkd.errors import PermanentError, UsageError

KIND = "pgworkd.alert."
"""The kind of the jobs that send alerts begins with this; the rule's name follows."""
QUEUE = "alerts"
DEAD_MAX = 10_000
"""Dead jobs are counted up to this number."""
_GROUP = """SELECT g.id, g.queue, g.kind, g.error_type, g.pattern, extract(epoch FROM g.first_at)::float8,
        extract(epoch FROM g.last_at)::float8, coalesce(g.muted_until > pgworkd.clock(), false),
        s.dead, s.sample, s.error
    FROM pgworkd.error_groups g CROSS JOIN LATERAL (
        SELECT count(*)::int AS dead, (array_agg(x.job_id ORDER BY x.at DESC))[1] AS sample,
               (array_agg(x.error ORDER BY x.at DESC))[1] AS error
        FROM (SELECT d.job_id, d.at, d.error FROM pgworkd.deaths d
              JOIN pgworkd.jobs j ON j.id = d.job_id AND j.attempts = d.attempt AND j.status = 'dead'
              WHERE d.group_id = g.id ORDER BY d.at DESC LIMIT $2) x) s
    WHERE g.id = $1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A group of errors, as of when the alert is sent. `first_at` and `last_at`: its first and last death so far."""

    rule: str
    reason: str
    """`new`: the group's first death; `many`: as many deaths as the rule says."""
    deaths: int
    """Deaths of the group within the rule's time, when the alert was made."""
    within_s: int
    group: int
    """The group's number, for `pgworkd mute`."""
    queue: str
    kind: str
    error_type: str
    pattern: str
    """The error of the group without what differs from job to job."""
    error: str
    """The error of `sample`: its first 1,000 characters."""
    dead: int
    """Jobs of the group that are dead now, up to DEAD_MAX."""
    sample: UUID
    """The job of the group that died last."""
    first_at: datetime
    last_at: datetime

    @property
    def subject(self) -> str:
        """The alert in one line, for the subject of a mail."""
        what = "new error" if self.reason == "new" else counted(self.deaths, "death")
        return f"pgworkd: {what} in {self.queue}, {self.kind}: {self.pattern}"

    def text(self) -> str:
        """The whole alert, with what to do."""
        if self.reason == "new":
            why = "Jobs die of an error that is new."
        else:
            why = f"{counted(self.deaths, 'job')} died of one error within {self.within_s:,} s."
        more = "or more " if self.dead >= DEAD_MAX else ""
        return (
            f"{why}\n\n"
            f"queue:        {self.queue}\n"
            f"kind:         {self.kind}\n"
            f"error:        {self.error}\n"
            f"dead now:     {self.dead:,} {more}\n"
            f"first death:  {self.first_at:%Y-%m-%d %H:%M:%SZ}\n"
            f"last death:   {self.last_at:%Y-%m-%d %H:%M:%SZ}\n\n"
            f"One of them:             pgworkd job {self.sample}\n"
            f"All groups of errors:    pgworkd dead\n"
            f"Once the cause is gone:  pgworkd retry --group {self.group}, or pgworkd discard --group {self.group}\n"
            f"No alerts for a while:   pgworkd mute {self.group} --until 2h\n"
        )


def alert_rule(
    name: object, queue: object, queues: object, *, on_new: object, deaths: object, within_s: object, cooldown_s: object
) -> AlertRule:
    """An alert rule of these values; UsageError for one that is out of bounds."""
    name, queue = validation.text(name, "the alert's name", 150), validation.text(queue, "the alert's queue", 200)
    if not isinstance(on_new, bool):
        raise UsageError("on_new must be True or False")
    if not on_new and deaths is None:
        raise UsageError("an alert with on_new=False needs deaths=N: it would never be sent")
    if isinstance(queues, str) or not isinstance(queues, Sequence | set | frozenset | None):
        raise UsageError("queues must be a list of names")
    if queues is not None and not queues:
        raise UsageError("queues is empty: leave it out for all queues")
    names = None if queues is None else sorted(validation.text(each, "a name in queues", 200) for each in queues)
    number = validation.whole
    return AlertRule(
        name,
        queue,
        KIND + name,
        names,
        on_new,
        None if deaths is None else number(deaths, "deaths", 1, 1_000_000),
        number(within_s, "within_s", 1, 86_400),
        number(cooldown_s, "cooldown_s", 0, 30 * 86_400),
    )


def alert_handler(rule: AlertRule, to: Callable[[Alert], Awaitable[None] | None] | str) -> Callable[..., Any]:
    """The handler of the jobs of a rule. Its result says whether the alert was sent, and if not, why."""

    async def send(payload: dict[str, Any], job: Job) -> dict[str, Any]:
        group = payload.get("group")
        if isinstance(group, bool) or not isinstance(group, int):
            raise PermanentError("the payload names no group of errors: these jobs are inserted by count_deaths() only")
        facts = await read(job, lambda fetch: _facts(fetch, group))
        if isinstance(facts, str):
            return {"sent": False, "why": facts}
        known: dict[str, Any] = {"rule": rule.name, "reason": str(payload.get("reason")), "within_s": rule.within_s}
        alert = Alert(**known, deaths=int(payload.get("deaths") or 0), **facts)
        return {"sent": True, "to": await deliver(to, alert, job)}

    return send


async def _facts(fetch: Fetch, group: int) -> dict[str, Any] | str:
    """The alert about a group of errors; or why no alert is sent."""
    rows = await fetch(_GROUP, group, DEAD_MAX)
    if not rows:
        return "the group of errors was forgotten: no death of it is kept any more"
    number, queue, kind, error_type, pattern, first_s, last_s, muted, dead, sample, error = rows[0]
    if muted:
        return "the group was muted meanwhile"
    if not dead:
        return "no job of the group is dead any more"
    return {
        "group": number,
        "queue": queue,
        "kind": kind,
        "error_type": error_type,
        "pattern": pattern,
        "error": error,
        "dead": dead,
        "sample": UUID(str(sample)),
        "first_at": datetime.fromtimestamp(first_s, UTC),
        "last_at": datetime.fromtimestamp(last_s, UTC),
    }
