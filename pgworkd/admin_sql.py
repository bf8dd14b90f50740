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
    *("run_at", "created_at", "started_at", "failed_at", "finished_at", "occurrence", "last_at", "next_at"),
    "paused_until",
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
    started_at: datetime | None
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
    batch_id: UUID | None
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
    """The job's id; not `created`: a live job already holds the dedupe key, and this is its id."""

    id: UUID
    created: bool


class Retried(NamedTuple):
    """`changed` run again; `held_back` would, but another live job holds their dedupe key."""

    changed: list[UUID]
    held_back: list[UUID]


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
    unserved: Sequence[str]
    """Queues whose due jobs have waited for a minute and that no worker serves."""


class Server(NamedTuple):
    """Facts about any server. `clock_s` is its time in seconds since the epoch."""

    version: str
    version_num: int
    read_only: bool
    clock_s: float


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
    WHERE ($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
      AND ($3::text IS NULL OR status = $3::text::pgworkd.job_status)
    ORDER BY id DESC LIMIT $4"""
FINISHED_JOBS = """SELECT id, queue, coalesce(kind, queue), status::text, priority,
        extract(epoch FROM run_at)::float8, extract(epoch FROM created_at)::float8,
        extract(epoch FROM finished_at)::float8, attempts, failures, max_attempts, error
    FROM (SELECT * FROM pgworkd.finished_jobs ORDER BY id DESC LIMIT $5) newest
    WHERE ($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
      AND ($3::text IS NULL OR status = $3::text::pgworkd.job_status)
    ORDER BY id DESC LIMIT $4"""
MORE_FINISHED_JOBS = "SELECT EXISTS (SELECT FROM pgworkd.finished_jobs ORDER BY id DESC OFFSET $1 LIMIT 1)"
ONE_JOB = """SELECT j.id, j.queue, j.kind, j.status::text, j.priority, extract(epoch FROM j.run_at)::float8,
        extract(epoch FROM j.created_at)::float8, extract(epoch FROM j.started_at)::float8,
        extract(epoch FROM j.failed_at)::float8, extract(epoch FROM j.finished_at)::float8,
        j.attempts, j.failures, j.max_attempts, j.worker_id,
        (SELECT w.name FROM pgworkd.workers w WHERE w.id = j.worker_id), j.schedule,
        extract(epoch FROM j.occurrence)::float8, j.dedupe_key, j.serialize_key, j.batch_id, j.error,
        j.payload::text, j.result::text, j.meta::text, j.errors::text
    FROM pgworkd.all_jobs j WHERE j.id = $1"""
SCHEDULES = """SELECT s.name::text, s.queue::text, coalesce(s.kind, s.queue)::text, s.cron, s.every_s, s.timezone,
        s.missed, s.enabled, s.source, extract(epoch FROM s.last_occurrence)::float8,
        extract(epoch FROM j.run_at)::float8, j.status::text, s.error
    FROM pgworkd.schedules s LEFT JOIN pgworkd.jobs j ON j.schedule = s.name AND j.status <> 'dead'
    ORDER BY s.name"""
STATS = """SELECT count(*) FILTER (WHERE status IN ('pending', 'failed') AND run_at <= pgworkd.clock()),
    count(*) FILTER (WHERE status = 'pending' AND run_at > pgworkd.clock()),
    count(*) FILTER (WHERE status = 'running'), count(*) FILTER (WHERE status = 'failed'),
    count(*) FILTER (WHERE status = 'dead'),
    coalesce(extract(epoch FROM pgworkd.clock() - min(run_at)
        FILTER (WHERE status IN ('pending', 'failed') AND run_at <= pgworkd.clock())), 0)::float8
    FROM pgworkd.jobs WHERE $1::text IS NULL OR queue = $1"""
STATUSES = "SELECT id, status::text FROM pgworkd.all_jobs WHERE id = ANY ($1::uuid[])"
DEAD = """SELECT id FROM pgworkd.jobs WHERE status = 'dead' AND ($1::text IS NULL OR queue = $1)
    AND ($2::text IS NULL OR coalesce(kind, queue) = $2) AND ($3::uuid IS NULL OR id > $3) ORDER BY id LIMIT $4"""
ENQUEUE = """INSERT INTO pgworkd.jobs (queue, kind, payload, priority, run_at, expires_at, max_attempts, timeout_s,
        dedupe_key)
    VALUES ($1::text, $2::text, $3::text::jsonb, $4,
        coalesce($5::text::timestamptz, pgworkd.clock() + make_interval(secs => coalesce($6::float8, 0))),
        $7::text::timestamptz, $8::int, $9::float8, $10::text)
    ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead' DO NOTHING RETURNING id"""
HOLDER = "SELECT id FROM pgworkd.jobs WHERE queue = $1::text AND dedupe_key = $2::text AND status <> 'dead'"
PAUSE = """INSERT INTO pgworkd.queues AS q (name, paused_until)
    VALUES ($1::text, coalesce(pgworkd.clock() + make_interval(secs => $2::float8), 'infinity'))
    ON CONFLICT (name) DO UPDATE SET paused_until = excluded.paused_until, updated_at = pgworkd.clock()"""
RESUME = """UPDATE pgworkd.queues q SET paused_until = NULL, updated_at = pgworkd.clock()
    WHERE q.name = $1::text AND q.paused_until > pgworkd.clock() RETURNING true"""
# Makes the queue's workers ask for their settings now instead of at their next heartbeat.
POKE = """SELECT pg_notify('pgworkd', jsonb_build_object('worker', p.worker_id)::text) FROM pgworkd.pools p
    WHERE p.queue = $1::text"""
KNOWN = """SELECT queue::text FROM pgworkd.pools UNION SELECT name::text FROM pgworkd.queues
    UNION SELECT queue::text FROM pgworkd.schedules UNION SELECT queue::text FROM pgworkd.jobs"""
IS_SERVED = "SELECT EXISTS (SELECT FROM pgworkd.pools WHERE queue = $1::text)"
IS_KNOWN = """SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE queue = $1::text)
    OR EXISTS (SELECT FROM pgworkd.pools WHERE queue = $1::text)
    OR EXISTS (SELECT FROM pgworkd.queues WHERE name = $1::text)
    OR EXISTS (SELECT FROM pgworkd.schedules WHERE queue = $1::text)"""
SERVER = """SELECT current_setting('server_version'), current_setting('server_version_num')::int,
    pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean,
    extract(epoch FROM clock_timestamp())::float8"""
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
           (SELECT count(*) FROM pgworkd.jobs WHERE status = 'dead'),
           to_regclass('pgworkd.finished_jobs_' || to_char((pgworkd.clock() AT TIME ZONE 'UTC') + interval '1 day',
                                                           'YYYYMMDD')) IS NOT NULL,
           pg_notification_queue_usage(),
           ARRAY(SELECT queue FROM pgworkd.queue_stats WHERE oldest_due_s > 60 AND workers = 0
                 AND coalesce(paused_until <= pgworkd.clock(), true) ORDER BY oldest_due_s DESC LIMIT 10)"""
