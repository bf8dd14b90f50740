"""The engine's events: each is emitted once, with its facts, to any number of listeners.

The engine itself never logs, counts or traces. Logging and metrics are listeners, and tracing is a `tracer`, so each of
them can be left out, and a broken one does not affect the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from pgworkd.core.traces import Trace

Listener: TypeAlias = Callable[[str, Mapping[str, Any]], None]
"""Takes an event's name and facts, in the daemon's loop; events of its watch, in another thread. Must return
at once."""
Tracer: TypeAlias = Callable[[Any], Trace | None]
"""Begins to follow an attempt, right before its `job.started`; returns what follows it. Must not raise."""

# Events of one attempt. Facts: job_id, queue, kind, attempt, and those in the comment.
JOB_STARTED: Final = "job.started"
JOB_COMPLETED: Final = "job.completed"  # duration_s
JOB_FAILED: Final = (
    "job.failed"  # duration_s, error, retry_in_s, exception: the traceback, if there is one; it will be retried
)
JOB_DEAD: Final = "job.dead"  # duration_s, error, exception as above
JOB_RAISED: Final = "job.raised"  # error, exception (its traceback): raised after the job was completed, which it stays
JOB_RELEASED: Final = "job.released"  # reason, delay_s
JOB_CANCELLED: Final = "job.cancelled"  # reason
JOB_HANDED_OVER: Final = "job.handed_over"  # it was accepted by a service, which settles it by a callback
JOB_STALE: Final = "job.stale"  # outcome: not stored, because the attempt had been rescued or settled before
OUTCOME_REJECTED: Final = (
    "outcome.rejected"  # error: not even a plain failure can be stored; the attempt stays in flight
)
OUTCOMES_DELAYED: Final = (
    "outcomes.delayed"  # count, error, retry_in_s: not stored yet; the attempts stay in flight, and are retried
)
JOBS_EXPIRED: Final = (
    "jobs.expired"  # queue, kind, count, job_id (of one of them): past expires_at before they could start
)
JOB_LOST: Final = "job.lost"  # worker, worker_id, status: rescued from a worker that was presumed dead
JOB_LEASE_PASSED: Final = (
    "job.lease_passed"  # worker, worker_id, status, error: a remote attempt past its deadline, or the lease of its own
)
JOB_SLOW: Final = "job.slow"  # running_s, usual_s: the median of its kind
JOB_OVERDUE: Final = "job.overdue"  # reason, timeout_s: it was to end and runs on, in a thread or past a cancellation

# Events of the daemon.
SCHEMA_AWAITED: Final = "schema.awaited"  # error: none is installed, or an older one; the daemon waits for a migration
SCHEMA_NEWER: Final = "schema.newer"  # found, ours, remedy: nothing more is claimed; what runs is settled
DATABASE_COPIED: Final = "database.copied"  # error, remedy: its jobs belong elsewhere; nothing runs until pgworkd adopt
DAEMON_STARTING: Final = "daemon.starting"
DAEMON_READY: Final = "daemon.ready"  # worker_id, queues
DAEMON_STOPPING: Final = "daemon.stopping"  # running, shutdown_s
SHUTDOWN_INCOMPLETE: Final = "shutdown.incomplete"  # reason: what the stop left behind; the exit code is 1
DAEMON_STOPPED: Final = "daemon.stopped"  # exit_code
DATABASE_UNAVAILABLE: Final = "database.unavailable"  # part, error, retry_in_s
DATABASE_REFUSED: Final = "database.refused"  # part, error, retry_in_s: it answers, but not to this user or token
DATABASE_RECOVERED: Final = "database.recovered"  # part, outage_s: how long it lasted
STATEMENT_FAILED: Final = "statement.failed"  # part, error, retry_in_s: the database answered with an error
LEASE_FENCED: Final = "lease.fenced"  # since_s: everything that ran was cancelled
LEASE_LOST: Final = "lease.lost"  # worker_id: presumed dead, its jobs were rescued; the daemon registers anew
LEASE_RENEWED: Final = "lease.renewed"  # worker_id: again, after a fence
QUEUE_SETTINGS: Final = (
    "queue.settings"  # queue, concurrency, paused, changed, was: effective settings, new and old values
)
QUEUE_DIFFERS: Final = "queue.differs"  # queue, ours, theirs, workers, row: workers whose code sets another concurrency
KIND_UNKNOWN: Final = "kind.unknown"  # queue, kind, elsewhere: no handler here; does another worker have one?
QUEUE_ADDED: Final = "queue.added"  # queue, concurrency: while the daemon runs
QUEUE_REMOVED: Final = "queue.removed"  # queue: drained, while the daemon runs
SCHEDULE_FAILED: Final = "schedule.failed"  # schedule, error
SCHEDULE_RETIRED: Final = "schedule.retired"  # schedule: disabled, because no worker declares it any more
SCHEDULE_DIFFERS: Final = "schedule.differs"  # schedule, ours, theirs, worker: another worker's rule is in force
ALERT_DIFFERS: Final = "alert.differs"  # rule: another program declares it otherwise, or an older one of ours
SCHEDULE_SKIPPED: Final = "schedule.skipped"  # schedule, occurrence, reason: missed while no worker served its queue
SCHEDULE_CREATED: Final = "schedule.created"  # schedule, occurrence: its first one
SCHEDULE_RESTORED: Final = "schedule.restored"  # schedule, occurrence: its next one was missing, and is inserted again
ORPHANS_RELEASED: Final = "orphans.released"  # count: running under our id, but not in flight here
RETENTION_CUT: Final = (
    "retention.cut"  # queue, keep_s, keep_days: keep_days is shorter than the queue's keep_s, and wins
)
ROWS_REJECTED: Final = (
    "rows.rejected"  # what, sqlstate, count, key, error: maintenance passes over these rows; see refused_rows
)
MAINTENANCE_FAILED: Final = "maintenance.failed"  # task, error
ENDPOINT_REFUSED: Final = "endpoint.refused"  # endpoint, error: its row or secret is wrong, so nothing is sent to it
PUSH_ANSWERED: Final = "push.answered"  # job_id, queue, kind, attempt, endpoint, host, status or None, bytes, took_s
# job_id, queue, kind, attempt, endpoint, reason: completed without its result; of each endpoint at most one a minute
RESULT_DROPPED: Final = "result.dropped"
ENDPOINT_PAUSED: Final = "endpoint.paused"  # endpoint, for_s, reason: it asks for less, or fails again and again
ENDPOINT_DISABLED: Final = "endpoint.disabled"  # endpoint, reason: it has answered that it is gone
HOOK_FAILED: Final = "hook.failed"  # hook, error
CLAIMS_REFUSED: Final = (
    "claims.refused"  # part, error, since_s: none of it has succeeded since; its next success ends it
)
CLAIMS_RESUMED: Final = "claims.resumed"  # refused_s

# Events of the watch of the event loop, emitted in a thread of their own. Facts: blocked_s; stack: what the loop's
# thread does; and of an attempt, those of above, where the loop is blocked by its handler.
LOOP_BLOCKED: Final = "loop.blocked"  # limit_s: how long it may be
LOOP_RESUMED: Final = "loop.resumed"  # blocked_s: how long it was
LOOP_STUCK: Final = "loop.stuck"  # process_ends: at once; else its lease is not renewed until the loop runs
PROCESS_STALLED: Final = (
    "process.stalled"  # stalled_s, jobs: no thread ran: frozen, no CPU, or a handler held the interpreter lock
)

# Of the process: lines of the log that no listener gets.
DAEMON_ABORTED: Final = "daemon.aborted"  # reason: the process ends itself at once, with exit code 1
SUPERVISOR_GONE: Final = "supervisor.gone"  # the parent of --processes has ended: this process stops
EXIT_FORCED: Final = "exit.forced"  # exit_code, reason: something of the application would keep the process
LOG_DROPPED: Final = "log.dropped"  # count of lines, stream: its reader had not taken them


def names() -> frozenset[str]:
    """The names of all events."""
    return frozenset(value for name, value in globals().items() if name.isupper() and isinstance(value, str))


_log = logging.getLogger("pgworkd.events")


class Events:
    """Passes each event to every listener, in the order they were added."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Listener, frozenset[str]]] = []
        self._has_listener: dict[str, bool] = {}
        """Cache of `has_listener`, which is called for every job."""
        self.tracer: Tracer | None = None
        """Set by the part that traces, if there is one."""

    def listen(self, listener: Listener, *, except_for: frozenset[str] = frozenset()) -> None:
        """Adds a listener for all further events, except those of these names."""
        self._listeners.append((listener, except_for))
        self._has_listener.clear()

    def unlisten(self, listener: Listener) -> None:
        """Removes a listener."""
        self._listeners = [(each, names) for each, names in self._listeners if each is not listener]
        self._has_listener.clear()

    def has_listener(self, name: str) -> bool:
        """True if any listener takes events of this name; if not, their facts need not be gathered."""
        known = self._has_listener.get(name)
        if known is None:
            known = self._has_listener[name] = any(name not in names for _, names in self._listeners)
        return known

    def emit(self, name: str, /, **facts: Any) -> None:
        """Emits an event. A listener that raises is reported to the standard log and otherwise ignored."""
        for listener, except_for in self._listeners:
            if name in except_for:
                continue
            try:
                listener(name, facts)
            except Exception:  # noqa: BLE001 - a full disk may lose the log line, not the job
                _log.exception("a listener failed on %s", name)
