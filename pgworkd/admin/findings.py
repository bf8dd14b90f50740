"""The findings of `pgworkd doctor` about queues: what keeps due jobs from running, and the remedy."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Literal, NamedTuple

from pgworkd.admin.doctor_database import LockWait, Sessions
from pgworkd.admin.doctor_queries import DEAD_MAX, DifferingSchedule, Health, QueueHealth
from pgworkd.core.registration import SESSIONS_MIN
from pgworkd.core.validation import counted

OVERDUE_S = 60.0
"""A job that has been due for longer than this should have started: polls and leases are shorter."""
NAMED_MAX = 10


Level = Literal["ok", "warn", "bad"]


class Finding(NamedTuple):
    """A line of the report of `pgworkd doctor`."""

    level: Level
    subject: str
    finding: str
    remedy: str = ""


def judged(health: Health, *, locked: bool = False) -> list[Finding]:
    """The problems found, and a line with level ok for each subject without one. `locked`: jobs wait for a lock."""
    refused = {queue for each in health.refused for queue in each.queues}
    overdue = [queue for queue in health.queues if queue.overdue_s > OVERDUE_S and not queue.paused]
    return [
        *_or_ok("queues", [*_unserved(overdue), *_idle(overdue, refused, locked)], "no due job lacks a worker"),
        *_or_ok("rows", _refused(health), "none is refused"),
        *_or_ok("endpoints", [*_endpoints(health), *_dropped(health)], "none with queues is paused or disabled"),
        *_or_ok("kinds", _kinds(health), "every kind found has a handler"),
        *_or_ok("schedules", _schedules(health), "no schedule is in error, nor declared twice"),
        *_or_ok("dependencies", _stuck(health), "no job depends on a dead one"),
        *_or_ok("effects", _effects(health), "no effects of finished jobs are overdue"),
        *_or_ok("runs", [*_blocked(health), *_long(health)], "no event loop is blocked, no job runs far too long"),
        *_of_no_day(health.of_no_day),
    ]


def _or_ok(subject: str, findings: Sequence[Finding], well: str) -> Sequence[Finding]:
    """The first findings about a subject, and how many more there are."""
    if len(findings) > NAMED_MAX:
        level: Level = "bad" if any(each.level == "bad" for each in findings[NAMED_MAX:]) else "warn"
        more = Finding(level, subject, f"and {len(findings) - NAMED_MAX:,} more findings like these")
        return [*findings[:NAMED_MAX], more]
    return findings or [Finding("ok", subject, well)]


def _unserved(overdue: Iterable[QueueHealth]) -> Iterable[Finding]:
    unserved = [queue for queue in overdue if not queue.workers]
    if names := [queue.queue for queue in unserved if queue.endpoint is None]:
        said = f"due jobs, but no worker: {_listed(names)}"
        yield Finding("bad", "queues", said, "start one: pgworkd run --queue NAME")
    if names := [queue.queue for queue in unserved if queue.endpoint is not None]:
        said = f"due jobs with an endpoint, but nobody sends them: {_listed(names)}"
        remedy = "start pgworkd push; if one runs, its log says why it does not (endpoint.refused)"
        yield Finding("bad", "queues", said, remedy)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(map(repr, names[:NAMED_MAX])) + more


def _idle(overdue: Iterable[QueueHealth], refused: Collection[str], locked: bool) -> Iterable[Finding]:  # noqa: FBT001
    """Findings about jobs that do not start although slots are idle: held up by limits, keys, locks or a refusal."""
    for queue in [] if locked else [each for each in overdue if each.queue not in refused][:NAMED_MAX]:
        if queue.workers and not queue.limited and queue.plain_overdue_s > OVERDUE_S and queue.running < queue.slots:
            yield Finding(
                "bad",
                "queues",
                f"{queue.queue!r}: a job has been due for {queue.plain_overdue_s:.0f} s although there are "
                f"{counted(queue.slots - queue.running, 'idle slot')} in {counted(queue.workers, 'worker')}",
                "see their logs (database.unavailable? lease.fenced?) and restart them",
            )


def _refused(health: Health) -> list[Finding]:
    return [
        Finding(
            "bad" if each.what == "claim" else "warn",
            "rows",
            {
                "claim": f"{counted(each.rows, 'job')} of {_listed(each.queues)} cannot be claimed",
                "settle": f"{counted(each.rows, 'dead job')} of {_listed(each.queues)} whose outcome was refused",
            }.get(each.what, f"{each.what}() may not change {counted(each.rows, 'row')}")
            + f", such as {each.key}: {' '.join(each.error.split())[:200]}"
            + f" ({each.sqlstate})" * bool(each.sqlstate),
            "correct the trigger, constraint or policy that refuses it; "
            + ("then pgworkd retry ID" if each.what == "settle" else "it is tried again within 10 min"),
        )
        for each in health.refused
    ] + [
        Finding(
            "warn",
            "rows",
            f"row level security is on for {health.with_policies}: jobs that a policy keeps from a daemon's role wait",
            "see pg_policies: workers and gateways need to see and to change every row",
        )
    ] * bool(health.with_policies)


def judged_locks(waits: Sequence[LockWait]) -> list[Finding]:
    """Findings about sessions that wait for a lock, and for whom."""
    return [
        Finding(
            "bad",
            "locks",
            f"{counted(each.waiting, 'session')} waiting for a lock on {each.tables}, for up to {each.waited_s:.0f} s: "
            f"pid {each.pid} ({each.holder}) holds it: {_statement(each.statement)}; "
            f"first in line is pid {each.first_pid}: {_statement(each.first)}",
            f"end that transaction, or SELECT pg_terminate_backend({each.pid}); pg_cancel_backend({each.first_pid}) "
            "lets those behind it pass",
        )
        for each in waits
    ] or [Finding("ok", "locks", "nobody waits for one")]


def _of_no_day(count: int) -> list[Finding]:
    if not count:
        return []
    said = f"{counted(count, 'row')}{' or more' * (count >= DEAD_MAX)} of no day, in finished_jobs_other"
    return [Finding("ok", "history", f"{said}: deleted one by one after keep_days")]


def _statement(sql: str) -> str:
    return " ".join(sql.split())[:150] or "no statement"


def judged_sessions(sessions: Sessions) -> Finding:
    """Findings about whether a daemon could open its sessions."""
    most, left = sessions.most, sessions.most - sessions.used + 1  # ours will be free
    finding = f"{sessions.used} of {most} used, of {sessions.of}"
    remedy = f"a daemon needs {SESSIONS_MIN}, and one for each job.transaction() at a time: raise the limit"
    if left >= SESSIONS_MIN:
        return Finding("ok", "sessions", finding)
    return Finding("bad" if most < SESSIONS_MIN else "warn", "sessions", finding, remedy)


def _endpoints(health: Health) -> list[Finding]:
    late = {queue.queue for queue in health.queues if queue.overdue_s > OVERDUE_S}
    return [
        Finding(
            "bad" if held.disabled and late.intersection(held.queues) else "warn",
            "endpoints",
            f"{held.endpoint!r} is {'disabled' if held.disabled else f'paused for {held.paused_s:.0f} s'} "
            f"({' '.join(held.why.split())[:200]}), and so are its queues: {_listed(held.queues)}",
            f"pgworkd endpoints enable {held.endpoint}"
            + (", or give its queues another" if held.disabled else " ends the pause, which ends by itself"),
        )
        for held in health.endpoints
    ]


def _dropped(health: Health) -> list[Finding]:
    return [
        Finding(
            "warn",
            "endpoints",
            f"{dropped.endpoint!r} has answered 2xx with a result that cannot be stored "
            f"({' '.join(dropped.why.split())[:200]}); {dropped.ago_s / 60:.0f} min ago its job completed without it",
            "answer with a result that can be stored, or with another Content-Type; the log names the jobs that "
            "lost theirs (result.dropped)",
        )
        for dropped in health.dropped
    ]


def _kinds(health: Health) -> list[Finding]:
    return [
        Finding(
            "bad",
            "kinds",
            f"no live worker of queue {queue!r} has a handler for {kind!r}: at least {counted(jobs, 'job')}",
            "deploy the handler to all workers of the queue, or pgworkd cancel --queue NAME --kind NAME",
        )
        if known
        else Finding(
            "warn",
            "kinds",
            f"a worker of queue {queue!r} had no handler for {kind!r}: {counted(jobs, 'job')} of those examined",
            "deploy the handler to all workers of the queue; those in other languages do not say which kinds they know",
        )
        for queue, kind, jobs, known in health.unknown_kinds
    ]


def _schedules(health: Health) -> list[Finding]:
    return [
        Finding(
            "bad", "schedules", f"{name!r} has no next occurrence: {' '.join(error.split())[:200]}", "correct its rule"
        )
        for name, error in health.schedules
    ] + [_differing(each) for each in health.differing]


def _differing(found: DifferingSchedule) -> Finding:
    ours, theirs = json.loads(found.declared), json.loads(found.in_force)
    said = ", ".join(f"{what} {ours[what]!r}, not {theirs[what]!r}" for what in ours if ours[what] != theirs.get(what))
    return Finding(
        "warn",
        "schedules",
        f"{found.name!r} is declared differently by {found.worker}: {said[:200]}",
        "if two services declare it, give one of the kinds another name; else it follows when the workers of the other "
        "release are gone",
    )


def _stuck(health: Health) -> list[Finding]:
    return [
        Finding(
            "bad",
            "dependencies",
            f"{counted(waiting, 'job')} waiting for the {status} job {job} (see pgworkd job {example})",
            (f"pgworkd retry {job}, or " if status == "dead" else "")
            + "pgworkd undepend ID for those that can run without it, pgworkd cancel ID for the others",
        )
        for job, waiting, example, status in health.stuck
    ]


def _blocked(health: Health) -> Iterable[Finding]:
    for name, pid, running in health.blocked:
        said = f"the event loop of worker {name!r} (pid {pid}) is blocked, with {counted(running, 'job')}"
        remedy = "its log says by which handler (loop.blocked): await there, or make it a def handler; then restart it"
        yield Finding("bad", "runs", said, remedy)


def _long(health: Health) -> Iterable[Finding]:
    for run in health.long_runs:
        if run.timeout_s is not None:
            known = f"its time-out is {run.timeout_s:g} s"
        elif run.usual_s is None:
            known = "none of its kind has ended in a week"
        else:
            known = f"99 of 100 of its kind take less than {run.usual_s:.3g} s"
        said = f"{run.kind!r} in {run.queue!r} has been running on {run.worker!r} for {run.claimed_s:.0f} s; {known}"
        remedy = f"see where it is (pgworkd stack {run.job}), pgworkd cancel {run.job}, and give it a time-out"
        yield Finding("warn", "runs", said, remedy)


def _effects(health: Health) -> list[Finding]:
    waiting, oldest_s = health.effects
    if oldest_s <= OVERDUE_S:
        return []
    return [
        Finding(
            "bad",
            "effects",
            f"{counted(waiting, 'effect')} of finished jobs not applied yet, the oldest for {oldest_s:.0f} s: "
            "batch counters, dependent jobs and serialize keys are out of date",
            "end the transaction that locks them (pg_stat_activity, pg_locks); a running daemon then applies them",
        )
    ]
