"""The questions of operators: the rows they are answered with, and their SQL, all static.

Instants are the database's; one that a foreign client wrote beyond the years 1 to 9999 reads as None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

Row = TypeVar("Row", bound=tuple[Any, ...])

HISTORY_ROWS_MAX = 100_000
"""How many of the newest finished jobs a filter looks at: the history itself has no bound."""
_INSTANTS = {
    *("run_at", "created_at", "started_at", "claimed_at", "failed_at", "finished_at", "occurrence"),
    *("last_at", "next_at", "expires_at", "until"),
    "paused_until",
    "at",
}


class QueueRow(NamedTuple):
    """A queue as it is now; `failed` wait for their retry, `oldest_due_s` is how long the oldest due job waits."""

    queue: str
    due: int
    scheduled: int
    running: int
    failed: int
    blocked: int
    dead: int
    oldest_due_s: float | None
    workers: int
    slots: int
    paused: bool
    paused_until: datetime | None
    """None while paused: until resumed."""


class WorkerRow(NamedTuple):
    """A worker; `state` is running, stopping, vanished or lost, `silent_s` counts from its last heartbeat."""

    id: int
    name: str
    pid: int
    version: str
    state: str
    started_at: datetime | None
    silent_s: float
    lease_left_s: float
    running: int
    queues: Sequence[str]


class JobRow(NamedTuple):
    """A job in a list, live or finished."""

    id: UUID
    queue: str
    kind: str
    status: str
    priority: int
    run_at: datetime | None
    created_at: datetime | None
    finished_at: datetime | None
    attempts: int
    failures: int
    max_attempts: int | None
    error: str | None


class Jobs(NamedTuple):
    """The newest jobs that match; not `complete`: older finished ones were not looked at."""

    rows: list[JobRow]
    complete: bool


class Job(NamedTuple):
    """All there is to know about one job; `payload`, `result`, `errors` and `meta` are JSON texts."""

    id: UUID
    queue: str
    kind: str
    status: str
    priority: int
    run_at: datetime | None
    created_at: datetime | None
    expires_at: datetime | None
    claimed_at: datetime | None
    """When a worker took the last attempt; its handler starts when there is a slot for it."""
    started_at: datetime | None
    """When its handler started; of a completed job."""
    failed_at: datetime | None
    finished_at: datetime | None
    attempts: int
    failures: int
    max_attempts: int | None
    worker_id: int | None
    worker: str | None
    schedule: str | None
    occurrence: datetime | None
    dedupe_key: str | None
    serialize_key: str | None
    limit_key: str | None
    batch_id: UUID | None
    waits: str | None
    """Of a blocked job: for what."""
    progress: float | None
    """0 to 1, of what runs and has said so."""
    doing: str | None
    """What it said with that."""
    error: str | None
    payload: str
    result: str | None
    meta: str | None
    errors: str


class ScheduleRow(NamedTuple):
    """A recurring rule; `next_at` is its live occurrence (None: no daemon has planned it), `status` that job's."""

    name: str
    queue: str
    kind: str
    cron: str | None
    every_s: int | None
    timezone: str
    missed: str
    enabled: bool
    source: str
    last_at: datetime | None
    next_at: datetime | None
    status: str | None
    error: str | None


class Stats(NamedTuple):
    """Counts of live jobs; `depth` could run now if there were a slot, `oldest_due_s` is 0 when none could."""

    depth: int
    scheduled: int
    running: int
    failed: int
    dead: int
    oldest_due_s: float


class Enqueued(NamedTuple):
    """The job's id; not `created`: it holds the dedupe key already. `changed`: what was asked for was done to it."""

    id: UUID
    created: bool
    changed: bool


class AuditRow(NamedTuple):
    """What someone did to a job (or to a queue's settings); `before` and `after` are JSON texts of what changed."""

    id: int
    at: datetime | None
    who: str
    what: str
    queue: str
    job_id: UUID | None
    before: str
    after: str


class Doctor(NamedTuple):
    """Facts about a database that has the schema. Times in seconds; None: this user may not see it."""

    autovacuum: bool
    oldest_transaction_s: float | None
    oldest_transaction: str | None
    sees_all_sessions: bool
    workers: int
    workers_lost: int
    dead: int
    tomorrow: bool
    """The history has a partition for tomorrow."""
    notify_queue: float
    """Part of the server's notification queue that is filled, 0 to 1."""


class Server(NamedTuple):
    """Facts about any server. `clock_s` is its time in seconds since the epoch."""

    version: str
    version_num: int
    read_only: bool
    clock_s: float
    standby: bool = False


def read(row_type: Callable[..., Row], row: Sequence[Any]) -> Row:
    """A row as `row_type`, its instants (seconds since the epoch in SQL) as datetimes."""
    names = row_type._fields  # type: ignore[attr-defined]
    return row_type(*(_instant(v) if n in _INSTANTS else v for n, v in zip(names, row, strict=True)))


def _instant(epoch_s: float | None) -> datetime | None:
    # Foreign clients may write 'infinity' or years that no datetime can hold: such a row must not spoil the others.
    try:
        return None if epoch_s is None else datetime.fromtimestamp(epoch_s, UTC)
    except (OverflowError, ValueError, OSError):
        return None


QUEUES = """SELECT queue, due, scheduled, running, failed, blocked, dead, oldest_due_s, workers, slots,
    coalesce(paused_until > pgworkd.clock(), false),
    CASE WHEN paused_until > pgworkd.clock() THEN extract(epoch FROM paused_until)::float8 END
    FROM pgworkd.queue_stats ORDER BY queue"""
WORKERS = """SELECT id, name, pid, version,
    CASE WHEN lost_at IS NOT NULL OR lease_until < pgworkd.clock() THEN 'lost' ELSE state END,
    extract(epoch FROM started_at)::float8, extract(epoch FROM pgworkd.clock() - seen_at)::float8,
    extract(epoch FROM lease_until - pgworkd.clock())::float8, running, coalesce(queues, '{}')
    FROM pgworkd.worker_stats ORDER BY id"""
# One statement per table, each walked from its newest id and left after as many as are wanted. Live work is small,
# whatever the history, and what is rare in it (running, dead) has an index; of the history only the newest part is
# looked at.
LIVE_JOBS = """SELECT id, queue::text, coalesce(kind, queue)::text, status::text, priority,
        extract(epoch FROM run_at)::float8, extract(epoch FROM created_at)::float8, NULL::float8,
        attempts, failures, max_attempts::int, error
    FROM pgworkd.jobs
    WHERE status <> 'completed'  -- which only hold keys
      AND ($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
      AND ($3::text IS NULL OR status = $3::text::pgworkd.job_status)
    ORDER BY id DESC LIMIT $4"""
FINISHED_JOBS = """SELECT id, queue, coalesce(kind, queue),
        CASE status WHEN 'dead' THEN 'discarded' ELSE status::text END, priority,
        extract(epoch FROM run_at)::float8, extract(epoch FROM created_at)::float8,
        extract(epoch FROM finished_at)::float8, attempts, failures, max_attempts, error
    FROM (SELECT * FROM pgworkd.finished_jobs ORDER BY id DESC LIMIT $5) newest
    WHERE ($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
      AND ($3::text IS NULL OR CASE status WHEN 'dead' THEN 'discarded' ELSE status::text END = $3)
    ORDER BY id DESC LIMIT $4"""
MORE_FINISHED_JOBS = "SELECT EXISTS (SELECT FROM pgworkd.finished_jobs ORDER BY id DESC OFFSET $1 LIMIT 1)"
ONE_JOB = """SELECT j.id, j.queue, j.kind, j.status::text, j.priority, extract(epoch FROM j.run_at)::float8,
        extract(epoch FROM j.created_at)::float8, extract(epoch FROM j.expires_at)::float8,
        extract(epoch FROM j.claimed_at)::float8, extract(epoch FROM j.started_at)::float8,
        extract(epoch FROM j.failed_at)::float8, extract(epoch FROM j.finished_at)::float8,
        j.attempts, j.failures, j.max_attempts, j.worker_id,
        (SELECT w.name FROM pgworkd.workers w WHERE w.id = j.worker_id), j.schedule,
        extract(epoch FROM j.occurrence)::float8, j.dedupe_key, j.serialize_key, j.limit_key, j.batch_id,
        (SELECT b.reason FROM pgworkd.blocked_jobs b WHERE b.id = j.id), p.done::float8, nullif(p.message, ''), j.error,
        j.payload::text, j.result::text, j.meta::text, j.errors::text
    FROM pgworkd.all_jobs j LEFT JOIN pgworkd.job_progress p ON p.id = j.id WHERE j.id = $1"""
# Progress is not logged, so a standby has none.
ONE_JOB_ON_STANDBY = ONE_JOB.replace(
    "pgworkd.job_progress p", "(SELECT NULL::uuid AS id, NULL::float8 AS done, NULL::text AS message) p"
)
IS_STANDBY = "SELECT pg_is_in_recovery()"
SCHEDULES = """SELECT s.name::text, s.queue::text, coalesce(s.kind, s.queue)::text, s.cron, s.every_s, s.timezone,
        s.missed, s.enabled, s.source, extract(epoch FROM s.last_occurrence)::float8,
        extract(epoch FROM j.run_at)::float8, j.status::text, s.error
    FROM pgworkd.schedules s
    LEFT JOIN LATERAL (SELECT o.run_at, o.status FROM pgworkd.jobs o WHERE o.schedule = s.name AND o.status <> 'dead'
                       ORDER BY o.failures > 0, o.run_at LIMIT 1) j ON true
    ORDER BY s.name"""
STATS = """SELECT count(*) FILTER (WHERE status IN ('pending', 'failed') AND run_at <= pgworkd.clock()),
    count(*) FILTER (WHERE status = 'pending' AND run_at > pgworkd.clock()),
    count(*) FILTER (WHERE status = 'running'), count(*) FILTER (WHERE status = 'failed'),
    count(*) FILTER (WHERE status = 'dead'),
    coalesce(extract(epoch FROM pgworkd.clock() - min(run_at)
        FILTER (WHERE status IN ('pending', 'failed') AND run_at <= pgworkd.clock())), 0)::float8
    FROM pgworkd.jobs WHERE $1::text IS NULL OR queue = $1"""
DEPTH = "SELECT pgworkd.depth($1, $2)"
STATUSES = """SELECT id, status FROM pgworkd.all_jobs WHERE id = ANY ($1::uuid[])"""
MATCHING = "SELECT ids, last FROM pgworkd.matching($1, $2, $3, $4, $5, $6, $7, $8, $9)"
EDIT = """SELECT coalesce(array_agg(k.name ORDER BY k.name), '{}') FROM jsonb_object_keys(pgworkd.edit($1,
    $2::text::jsonb, coalesce($3::text::timestamptz, pgworkd.clock() + make_interval(secs => $4::float8)), $5)
    ) AS k (name)"""
AUDIT = """SELECT id, extract(epoch FROM at)::float8, who, what, queue, job_id, before::text, after::text
    FROM pgworkd.audit WHERE ($1::uuid IS NULL OR job_id = $1) AND ($2::text IS NULL OR queue = $2)
    ORDER BY id DESC LIMIT $3"""
ENQUEUE = """SELECT id, created, changed FROM pgworkd.enqueue($1::text, p_kind => $2::text,
    p_payload => $3::text::jsonb, p_priority => $4::int, p_run_at => $5::text::timestamptz, p_delay_s => $6::float8,
    p_expires_at => $7::text::timestamptz, p_max_attempts => $8::int, p_timeout_s => $9::float8,
    p_dedupe_key => $10::text, p_dedupe_for_s => $11::float8, p_serialize_key => $12::text, p_limit_key => $13::text,
    p_on_retry => $14::text, p_on_duplicate => $15::text)"""
KNOWN = """SELECT queue::text FROM pgworkd.known_pools() UNION SELECT name::text FROM pgworkd.queues
    UNION SELECT queue::text FROM pgworkd.schedules
    UNION SELECT queue::text FROM pgworkd.jobs WHERE status <> 'completed'"""
IS_SERVED = """SELECT EXISTS (
    SELECT FROM pgworkd.pools p
    JOIN pgworkd.workers w ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
    WHERE p.queue = $1::text)"""
IS_KNOWN = """SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE queue = $1::text AND status <> 'completed')
    OR EXISTS (SELECT FROM pgworkd.pools WHERE queue = $1::text)
    OR EXISTS (SELECT FROM pgworkd.queues WHERE name = $1::text)
    OR EXISTS (SELECT FROM pgworkd.schedules WHERE queue = $1::text)"""
SERVER = """SELECT current_setting('server_version'), current_setting('server_version_num')::int,
    pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean,
    extract(epoch FROM clock_timestamp())::float8, pg_is_in_recovery()"""
DOCTOR = """WITH oldest AS (
        SELECT extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age_s,
               format('pid %s (%s, %s)', a.pid, coalesce(nullif(a.application_name, ''), a.usename), a.state) AS who
        FROM pg_stat_activity a
        WHERE a.xact_start IS NOT NULL AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
          AND a.datname = current_database()
        UNION ALL
        SELECT extract(epoch FROM clock_timestamp() - p.prepared)::float8, format('prepared transaction %L', p.gid)
        FROM pg_prepared_xacts p WHERE p.database = current_database()
        ORDER BY 1 DESC LIMIT 1)
    SELECT current_setting('autovacuum')::boolean AND NOT EXISTS (
               SELECT FROM pg_class c WHERE c.oid = 'pgworkd.jobs'::regclass
               AND c.reloptions && ARRAY['autovacuum_enabled=false', 'autovacuum_enabled=off']),
           (SELECT o.age_s FROM oldest o), (SELECT o.who FROM oldest o),
           pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
           (SELECT count(*) FROM pgworkd.workers WHERE lost_at IS NULL AND lease_until >= pgworkd.clock()),
           (SELECT count(*) FROM pgworkd.workers WHERE lost_at IS NOT NULL OR lease_until < pgworkd.clock()),
           (SELECT count(*) FROM (SELECT FROM pgworkd.jobs WHERE status = 'dead' LIMIT $1) d),
           to_regclass('pgworkd.finished_jobs_' || to_char((pgworkd.clock() AT TIME ZONE 'UTC') + interval '1 day',
                                                           'YYYYMMDD')) IS NOT NULL,
           pg_notification_queue_usage()"""
