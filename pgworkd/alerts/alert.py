"""Alerts: messages about groups of errors that are new, or of which many jobs died.

What is to be told, and when, is decided in SQL, by count_deaths(), which inserts one job for a rule's next message.
That job composes the message when it is sent, of all that is untold by then: meanwhile groups may have come, been
muted, or have no dead job any more. What was told is noted in the transaction that completes the job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID, uuid5

from pgworkd.admin.dead import Fetch
from pgworkd.alerts.recipient import MessageOrigin, deliver, origin, read
from pgworkd.core import validation
from pgworkd.core.durations import spelled
from pgworkd.core.job import Job
from pgworkd.core.validation import counted
from pgworkd.database.signal_store import AlertRule
from pgworkd.errors import UsageError
from pgworkd.process.redaction import escaped

KIND = "pgworkd.alert."
"""The kind of the jobs that send alerts begins with this; the rule's name follows."""
QUEUE = "alerts"
DEAD_MAX = 10_000
"""Dead jobs are counted up to this number."""
LISTED_MAX = 20
"""Groups that one message lists."""
GROUPS_MAX = 10_000
"""Groups that one message tells of; what is left is in the next one."""
OVER = "no job of the group is dead any more"
_DEAD = """FROM pgworkd.deaths d
    JOIN pgworkd.jobs j ON j.id = d.job_id AND j.attempts = d.attempt AND j.status = 'dead'"""
_DUE = """SELECT a.group_id, g.id IS NOT NULL, coalesce(g.deaths, a.told), a.told,
        extract(epoch FROM coalesce(a.at, g.first_at))::float8, a.reason,
        coalesce(g.muted_until > pgworkd.clock(), false), EXISTS (SELECT DEAD WHERE d.group_id = a.group_id)
    FROM pgworkd.alerts a LEFT JOIN pgworkd.error_groups g ON g.id = a.group_id
    WHERE a.rule = $1::text AND a.due_at IS NOT NULL AND EXISTS (
        SELECT FROM pgworkd.alerts o
        WHERE o.rule = $1::text AND o.due_at IS NOT NULL AND NOT pgworkd.is_later(o.due_at, $2::int))
    ORDER BY a.due_at, a.group_id LIMIT $3::int""".replace("DEAD", _DEAD)  # nosec B608 # ours, of constants
_GROUPS = """SELECT g.id, g.queue, g.kind, g.error_type, g.pattern, g.place, extract(epoch FROM g.first_at)::float8,
        extract(epoch FROM g.last_at)::float8, s.dead, s.sample, s.error
    FROM unnest($1::bigint[]) WITH ORDINALITY AS u (id, place) JOIN pgworkd.error_groups g ON g.id = u.id
    CROSS JOIN LATERAL (
        SELECT count(*)::int AS dead, (array_agg(x.job_id ORDER BY x.at DESC))[1] AS sample,
               (array_agg(x.error ORDER BY x.at DESC))[1] AS error
        FROM (SELECT d.job_id, d.at, d.error DEAD WHERE d.group_id = g.id ORDER BY d.at DESC LIMIT $2::int) x) s
    WHERE s.dead > 0 ORDER BY u.place""".replace("DEAD", _DEAD)  # nosec B608 # ours, of constants
_TOLD = "SELECT pgworkd.told($1::text, $2::bigint[], $3::bigint[])"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertedGroup:
    """A group of errors, as of when the alert is sent. `first_at` and `last_at`: its first and last death so far."""

    reason: str
    """`new`: the group's first death; `many`: as many deaths as the rule says; `more`: it goes on."""
    deaths: int
    """Deaths of the group that no alert has told of before."""
    group: int
    """The group's number, for `pgworkd mute`."""
    queue: str
    kind: str
    error_type: str
    pattern: str
    """The error of the group without what differs from job to job."""
    place: str
    """File and function where it was raised; empty if that is not known."""
    error: str
    """The error of `sample`: its first 1,000 characters."""
    dead: int
    """Jobs of the group that are dead now, up to DEAD_MAX."""
    sample: UUID
    """The job of the group that died last."""
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """All that a rule has to tell, as of `at`: of one group of errors, or of many."""

    id: UUID
    """A second attempt to send this alert has the same one, so that a receiver can drop it."""
    rule: str
    origin: MessageOrigin
    at: datetime
    since: datetime
    """The jobs have died since then."""
    groups: int
    """Groups of errors that are told of, `new` of them for the first time."""
    new: int
    deaths: int
    """Deaths in all of these groups that no alert of the rule has told of before."""
    errors: Sequence[AlertedGroup]
    """The first LISTED_MAX groups: new ones first, then those with most deaths."""

    @property
    def subject(self) -> str:
        """The alert in one line, for the subject of a mail."""
        error = self.errors[0]
        if self.groups == 1 or self.new == 1:
            what = "new error" if error.reason == "new" else counted(self.deaths, "death")
            others = f" and {counted(self.groups - 1, 'known error')}" if self.groups > 1 else ""
            return escaped(f"{self.origin.subject}: {what}{others} in {error.queue}, {error.kind}: {error.pattern}")
        noun = "new error" if self.new == self.groups else "error"
        some = f" ({self.new:,} new)" if 0 < self.new < self.groups else ""
        what = f"{counted(self.groups, noun)}{some} in {self._span}"
        return escaped(f"{self.origin.subject}: {what}, {counted(self.deaths, 'death')}")

    def text(self) -> str:
        """The whole alert, with what to do."""
        where = f"database:     {self.origin.line}\nalert rule:   {self.rule}"
        return self._one(self.errors[0], where) if self.groups == 1 else self._many(where)

    @property
    def _span(self) -> str:
        """From the first of these deaths to the last: how long the sending took is no part of it."""
        return spelled((self._last_at - self.since).total_seconds())

    @property
    def _last_at(self) -> datetime:
        return max(each.last_at for each in self.errors)

    def _one(self, error: AlertedGroup, where: str) -> str:
        if error.reason == "new":
            why = "Jobs die of an error that is new."
        elif error.reason == "many":
            why = f"{counted(self.deaths, 'job')} died of one error in {self._span}."
        else:
            why = f"Jobs go on dying of an error: {counted(self.deaths, 'more death')} in {self._span}."
        more = " or more" if error.dead >= DEAD_MAX else ""
        place = [f"raised in:    {error.place}"] if error.place else []
        facts = [
            *where.splitlines(),
            f"queue:        {error.queue}",
            f"kind:         {error.kind}",
            f"error:        {error.error}",
            *place,
            f"deaths:       {self.deaths:,}",
            f"dead now:     {error.dead:,}{more}",
            f"first death:  {error.first_at:%Y-%m-%d %H:%M:%SZ}",
            f"last death:   {error.last_at:%Y-%m-%d %H:%M:%SZ}",
        ]
        number = error.group
        return (
            f"{why}\n\n" + "".join(f"{escaped(fact)}\n" for fact in facts) + "\n"
            f"One of them:             pgworkd job {error.sample}\n"
            f"All groups of errors:    pgworkd dead\n"
            f"Once the cause is gone:  pgworkd retry --group {number}, or pgworkd discard --group {number}\n"
            f"No alerts for a while:   pgworkd mute {number} --until 2h\n"
        )

    def _many(self, where: str) -> str:
        new = f", {self.new:,} of them new" if self.new else ""
        when = f"in {self._span} until {self._last_at:%Y-%m-%d %H:%M:%SZ}"
        why = f"{counted(self.deaths, 'job')} died of {counted(self.groups, 'error')}{new}, {when}."
        left = self.groups - len(self.errors)
        lines = [*map(_line, self.errors), *([f"... and {counted(left, 'error')} more: pgworkd dead"] if left else [])]
        return (
            f"{why}\n\n" + "".join(f"{escaped(fact)}\n" for fact in where.splitlines()) + "\n"
            "Group, queue and kind, deaths, dead now, one of the jobs, its error:\n"
            + "".join(f"  {escaped(line)}\n" for line in lines)
            + "\nOne of the jobs:         pgworkd job ID\n"
            "All groups of errors:    pgworkd dead\n"
            "Once the cause is gone:  pgworkd retry --group GROUP, or pgworkd discard --group GROUP\n"
            "No alerts for a while:   pgworkd mute GROUP --until 2h\n"
        )


class _Due(NamedTuple):
    """A group that is to be told of: `deaths` so far, of which `told` need no telling; since when the others died."""

    group: int
    known: bool
    deaths: int
    told: int
    since_s: float | None
    reason: str | None
    muted: bool
    dead: bool

    @property
    def why_not(self) -> str | None:
        """Why nothing is said of the group after all; None: it is told of."""
        if not self.known:
            return "the group of errors was forgotten: no death of it is kept any more"
        if self.muted:
            return "the group was muted meanwhile"
        return None if self.dead else OVER


def alert_rule(name: object, queue: object, queues: object, *, on_new: object, **limits: object) -> AlertRule:
    """An alert rule of these values; UsageError for one that is out of bounds.

    limits: deaths, within_s, cooldown_s and bundle_s, as of `App.alert`.
    """
    deaths = limits["deaths"]
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
        number(limits["within_s"], "within_s", 1, 86_400),
        number(limits["cooldown_s"], "cooldown_s", 0, 30 * 86_400),
        number(limits["bundle_s"], "bundle_s", 0, 86_400),
    )


def alert_handler(rule: AlertRule, to: Callable[[Alert], Awaitable[None] | None] | str) -> Callable[..., Any]:
    """The handler of the jobs of a rule. Its result says whether an alert was sent, and if not, why."""

    async def send(job: Job) -> dict[str, Any] | None:
        due, alert = await read(job, lambda fetch: _composed(fetch, rule, job.id))
        if not due:
            return {"sent": False, "why": "nothing is due: another message has told of it"}
        if alert is None:
            result: dict[str, Any] = {"sent": False, "why": "; ".join(sorted({row.why_not or OVER for row in due}))}
        else:
            sent_to = await deliver(to, alert)
            result = {"sent": True, "to": sent_to, "groups": alert.groups, "deaths": alert.deaths}
        job.result = result
        async with job.transaction() as connection:
            await connection.fetch(_TOLD, rule.name, [row.group for row in due], [row.deaths for row in due])
        return None

    return send


async def _composed(fetch: Fetch, rule: AlertRule, job_id: UUID) -> tuple[list[_Due], Alert | None]:
    """The groups that are due, and the alert about those of them that are still to be told of."""
    due = [_Due(*row) for row in await fetch(_DUE, rule.name, rule.cooldown_s, GROUPS_MAX)]
    live = [row for row in due if row.why_not is None]
    live.sort(key=lambda row: (row.reason != "new", row.told - row.deaths, row.group))
    errors = await _alerted(fetch, live[:LISTED_MAX])
    if not errors:
        return due, None
    told = [(row.group, row.deaths) for row in live]
    at = datetime.now(UTC)
    alert = Alert(
        id=uuid5(job_id, repr(sorted(told))),
        rule=rule.name,
        origin=await origin(fetch),
        at=at,
        since=min(at, *(datetime.fromtimestamp(row.since_s or 0, UTC) for row in live)),
        groups=len(live),
        new=sum(row.reason == "new" for row in live),
        deaths=sum(row.deaths - row.told for row in live),
        errors=errors,
    )
    return due, alert


async def _alerted(fetch: Fetch, rows: Sequence[_Due]) -> list[AlertedGroup]:
    """What an alert says of each of these groups."""
    by_group = {row.group: row for row in rows}
    found = []
    for row in await fetch(_GROUPS, list(by_group), DEAD_MAX):
        number, queue, kind, error_type, pattern, place, first_s, last_s, dead, sample, error = row
        due = by_group[number]
        found.append(
            AlertedGroup(
                reason=due.reason or "more",
                deaths=due.deaths - due.told,
                group=number,
                queue=queue,
                kind=kind,
                error_type=error_type,
                pattern=pattern,
                place=place,
                error=error,
                dead=dead,
                sample=UUID(str(sample)),
                first_at=datetime.fromtimestamp(first_s, UTC),
                last_at=datetime.fromtimestamp(last_s, UTC),
            )
        )
    return found


def _line(error: AlertedGroup) -> str:
    new = "new, " if error.reason == "new" else ""
    told = f"{counted(error.deaths, 'death')}, {error.dead:,} dead now, {error.sample}"
    return f"{error.group}, {new}{error.queue}, {error.kind}: {told}: {error.error[:300]}"
