"""What the engine has to say: facts, stated once, heard by any number of listeners.

The engine never logs, counts or traces; it emits. Logging, metrics and tracing are listeners, so each of
them can be left out, and a broken one harms nobody else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

Listener: TypeAlias = Callable[[str, Mapping[str, Any]], None]
"""Called in the daemon's loop with the event's name and its facts; must return at once."""

# Of one attempt. Facts: job_id, queue, kind, attempt, and what the comment says.
JOB_STARTED: Final = "job.started"
JOB_COMPLETED: Final = "job.completed"  # duration_s
JOB_FAILED: Final = "job.failed"  # duration_s, error, retry_in_s, exception: the traceback, if there is one
JOB_DEAD: Final = "job.dead"  # duration_s, error, exception as above
JOB_RAISED: Final = (
    "job.raised"  # error, exception (its traceback): came when the job was completed, and changes nothing
)
JOB_RELEASED: Final = "job.released"  # reason, delay_s
JOB_CANCELLED: Final = "job.cancelled"  # reason
JOB_STALE: Final = "job.stale"  # outcome: the settle came after the attempt had ended otherwise
OUTCOME_REJECTED: Final = "outcome.rejected"  # error: not even a failure can be stored; it stays in flight
OUTCOMES_DELAYED: Final = (
    "outcomes.delayed"  # count, error, retry_in_s: outcomes that stay in flight and are tried again
)
JOBS_EXPIRED: Final = (
    "jobs.expired"  # queue, kind, count, job_id (of one of them): past expires_at before they could start
)
JOB_LOST: Final = "job.lost"  # worker, status: taken back from a worker that is gone
JOB_SLOW: Final = "job.slow"  # running_s, usual_s
JOB_OVERDUE: Final = "job.overdue"  # timeout_s: a thread that has passed its timeout cannot be stopped

# Of the daemon.
SCHEMA_AWAITED: Final = "schema.awaited"  # error: there is none yet, or an older one; the daemon waits for a migration
SCHEMA_NEWER: Final = "schema.newer"  # found, ours, remedy: nothing more is claimed, what runs is settled
DAEMON_STARTING: Final = "daemon.starting"
DAEMON_READY: Final = "daemon.ready"  # worker_id, queues
DAEMON_STOPPING: Final = "daemon.stopping"  # running, shutdown_s
SHUTDOWN_INCOMPLETE: Final = "shutdown.incomplete"  # reason: what a stop leaves to others; the exit code is 1
DAEMON_STOPPED: Final = "daemon.stopped"  # exit_code
DATABASE_UNAVAILABLE: Final = "database.unavailable"  # part, error, retry_in_s
DATABASE_RECOVERED: Final = "database.recovered"  # part, away_s
STATEMENT_FAILED: Final = "statement.failed"  # part, error, retry_in_s: the database answered, but did not do it
LEASE_FENCED: Final = "lease.fenced"  # since_s: everything that ran was cancelled
LEASE_LOST: Final = "lease.lost"  # worker_id
LEASE_RENEWED: Final = "lease.renewed"  # worker_id: again, after a fence
QUEUE_SETTINGS: Final = "queue.settings"  # queue, concurrency, paused, changed, was: what holds now, and what is new
QUEUE_DIFFERS: Final = "queue.differs"  # queue, ours, theirs, workers, row: daemons whose code says otherwise
KIND_UNKNOWN: Final = "kind.unknown"  # queue, kind, elsewhere: no handler here; has another worker of the queue one?
QUEUE_ADDED: Final = "queue.added"  # queue, concurrency: while the daemon runs
QUEUE_REMOVED: Final = "queue.removed"  # queue: nothing of it is left here
SCHEDULE_FAILED: Final = "schedule.failed"  # schedule, error
SCHEDULE_RETIRED: Final = "schedule.retired"  # schedule: disabled, because it stands in no worker's code any more
SCHEDULE_SKIPPED: Final = "schedule.skipped"  # schedule, occurrence, reason: missed while no worker served its queue
SCHEDULE_RESTORED: Final = "schedule.restored"  # schedule, occurrence
ORPHANS_RELEASED: Final = "orphans.released"  # count
RETENTION_CUT: Final = (
    "retention.cut"  # queue, keep_s, keep_days: the queue's own setting is more than keep_days allows
)
ROWS_REJECTED: Final = (
    "rows.rejected"  # what, sqlstate, count, key, error: maintenance passes these rows by; see the table refused_rows
)
MAINTENANCE_FAILED: Final = "maintenance.failed"  # chore, error
HOOK_FAILED: Final = "hook.failed"  # hook, error

_log = logging.getLogger("pgworkd.events")


class Events:
    """Hands each fact to every listener, in the order they were added."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Listener, frozenset[str]]] = []
        self._has_listener: dict[str, bool] = {}
        """By name, whether anyone hears it; worked out once, because the answer is wanted for every job."""

    def listen(self, listener: Listener, *, except_for: frozenset[str] = frozenset()) -> None:
        """Adds a listener for all events to come, but for those of these names."""
        self._listeners.append((listener, except_for))
        self._has_listener.clear()

    def unlisten(self, listener: Listener) -> None:
        """Removes a listener."""
        self._listeners = [(each, names) for each, names in self._listeners if each is not listener]
        self._has_listener.clear()

    def has_listener(self, name: str) -> bool:
        """Whether anyone would hear an event of this name: if not, its facts need not be gathered."""
        known = self._has_listener.get(name)
        if known is None:
            known = self._has_listener[name] = any(name not in names for _, names in self._listeners)
        return known

    def emit(self, name: str, /, **facts: Any) -> None:
        """States a fact. A listener that raises is reported to the standard log and otherwise ignored."""
        for listener, except_for in self._listeners:
            if name in except_for:
                continue
            try:
                listener(name, facts)
            except Exception:  # noqa: BLE001 - a full disk under the log loses the event; the job must not be lost
                _log.exception("a listener failed on %s", name)
