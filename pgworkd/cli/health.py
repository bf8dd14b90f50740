"""What `pgworkd doctor` says of queues: what keeps due jobs from running, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from pgworkd.admin.doctor_queries import Health, QueueHealth
from pgworkd.words.validation import counted

OVERDUE_S = 60.0
"""A job that is due for longer than that, and could run, should have: polls and leases are shorter."""
NAMED_MAX = 10


class Finding(NamedTuple):
    """One line of the report."""

    level: Literal["ok", "warn", "bad"]
    subject: str
    finding: str
    remedy: str = ""


def judged(health: Health) -> list[Finding]:
    """What was found, the worst of each kind; one line that says ok of what is well."""
    overdue = [queue for queue in health.queues if queue.overdue_s > OVERDUE_S and not queue.paused]
    return [
        *_or_ok("queues", [*_unserved(overdue), *_idle(overdue)], "no due job waits for want of a worker"),
        *_or_ok("kinds", _kinds(health), "none found without a handler"),
        *_or_ok("schedules", _schedules(health), "none is in error"),
        *_or_ok("dependencies", _behind(health), "no job waits for a dead one"),
        *_or_ok("effects", _effects(health), "of jobs that ended, none waits for long to be applied"),
    ]


def _or_ok(subject: str, findings: Sequence[Finding], well: str) -> Sequence[Finding]:
    return findings or [Finding("ok", subject, well)]


def _unserved(overdue: Iterable[QueueHealth]) -> Iterable[Finding]:
    names = [repr(queue.queue) for queue in overdue if not queue.workers]
    if names:
        more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
        listed = ", ".join(names[:NAMED_MAX]) + more
        yield Finding("bad", "queues", f"due jobs, but no worker: {listed}", "start one: pgworkd run --queue NAME")


def _idle(overdue: Iterable[QueueHealth]) -> Iterable[Finding]:
    """Limits and keys keep jobs from running beside idle slots, as they should: of such jobs nothing is said."""
    for queue in list(overdue)[:NAMED_MAX]:
        if queue.workers and not queue.limited and queue.plain_overdue_s > OVERDUE_S and queue.running < queue.slots:
            yield Finding(
                "bad",
                "queues",
                f"{queue.queue!r}: a job is due for {queue.plain_overdue_s:.0f} s beside "
                f"{counted(queue.slots - queue.running, 'idle slot')} of {counted(queue.workers, 'worker')}",
                "see their logs (database.unavailable? lease.fenced?) and restart them",
            )


def _kinds(health: Health) -> list[Finding]:
    return [
        Finding(
            "bad",
            "kinds",
            f"{kind!r} in queue {queue!r} has no handler where it was claimed: {counted(jobs, 'job')} at least",
            "deploy the handler to all workers of the queue, or pgworkd cancel --queue NAME --kind NAME",
        )
        for queue, kind, jobs in health.unknown_kinds
    ]


def _schedules(health: Health) -> list[Finding]:
    return [
        Finding(
            "bad", "schedules", f"{name!r} has no next occurrence: {' '.join(error.split())[:200]}", "mend its rule"
        )
        for name, error in health.schedules
    ]


def _behind(health: Health) -> list[Finding]:
    return [
        Finding(
            "bad",
            "dependencies",
            f"{counted(waiting, 'job')} waiting for the {status} job {job} (see pgworkd job {example})",
            (f"pgworkd retry {job}, or " if status == "dead" else "")
            + "pgworkd undepend ID for those that may run without it, pgworkd cancel ID for the others",
        )
        for job, waiting, example, status in health.behind
    ]


def _effects(health: Health) -> list[Finding]:
    waiting, oldest_s = health.effects
    if oldest_s <= OVERDUE_S:
        return []
    return [
        Finding(
            "bad",
            "effects",
            f"{counted(waiting, 'effect')} of jobs that ended wait to be applied, the oldest for {oldest_s:.0f} s: "
            "counters of batches, dependents and serialize keys lag behind",
            "end the transaction that locks them (pg_stat_activity, pg_locks); a running daemon then applies them",
        )
    ]
