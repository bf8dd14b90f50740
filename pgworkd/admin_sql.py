"""The questions of operators: the row each answers with, and its SQL. All static, all parameters NULL-able.

Instants are the database's; one that a foreign client wrote beyond the years 1 to 9999 reads as None.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple
from uuid import UUID

HISTORY_ROWS_MAX = 100_000
"""How many of the newest finished jobs a filter looks at: the history itself has no bound."""


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


def _sane(column: str) -> str:
    """SQL for an instant that Python's datetime can hold."""
    return f"CASE WHEN {column} BETWEEN '0001-01-02' AND '9999-12-30' THEN {column}::timestamptz END"


QUEUES = """SELECT queue, due, scheduled, running, failed, blocked, dead, oldest_due_s, workers, slots,
    coalesce(paused_until > pgworkd.clock(), false),
    CASE WHEN paused_until > pgworkd.clock() AND paused_until < '9999-12-30' THEN paused_until END
    FROM pgworkd.queue_stats ORDER BY queue"""
WORKERS = """SELECT id, name, pid, version,
    CASE WHEN lost_at IS NOT NULL OR lease_until < pgworkd.clock() THEN 'lost' ELSE state END,
    started_at, extract(epoch FROM pgworkd.clock() - seen_at)::float8,
    extract(epoch FROM lease_until - pgworkd.clock())::float8, running, coalesce(queues, '{}')
    FROM pgworkd.worker_stats ORDER BY id"""
# One branch per table, each walked from its newest id and left after as many as are wanted. Live work is small,
# whatever the history, and rare filters (running, dead) have an index there; of the history only the newest part
# is looked at.
JOB = f"""id, queue::text, coalesce(kind, queue)::text, status::text, priority, {_sane("run_at")},
    {_sane("created_at")}, {_sane("finished_at")}, attempts, failures, max_attempts::int, error"""
WANTED = """($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
    AND ($3::text IS NULL OR status = $3::text::pgworkd.job_status)"""
LIVE_JOBS = f"""SELECT {JOB.replace("finished_at", "NULL::timestamptz")}
    FROM pgworkd.jobs WHERE {WANTED} ORDER BY id DESC LIMIT $4"""  # noqa: S608 - all parts are constants
OLD_JOBS = f"""SELECT {JOB} FROM (SELECT * FROM pgworkd.finished_jobs ORDER BY id DESC LIMIT {HISTORY_ROWS_MAX}) f
    WHERE {WANTED} ORDER BY id DESC LIMIT $4"""  # noqa: S608
OLDER_JOBS = f"SELECT EXISTS (SELECT FROM pgworkd.finished_jobs ORDER BY id DESC OFFSET {HISTORY_ROWS_MAX} LIMIT 1)"  # noqa: S608
ONE_JOB = f"""SELECT j.id, j.queue, j.kind, j.status::text, j.priority, {_sane("j.run_at")}, {_sane("j.created_at")},
    {_sane("j.started_at")}, {_sane("j.failed_at")}, {_sane("j.finished_at")}, j.attempts, j.failures, j.max_attempts,
    j.worker_id, (SELECT w.name FROM pgworkd.workers w WHERE w.id = j.worker_id), j.schedule, {_sane("j.occurrence")},
    j.dedupe_key, j.serialize_key, j.batch_id, j.error, j.payload::text, j.result::text, j.meta::text, j.errors::text
    FROM pgworkd.all_jobs j WHERE j.id = $1"""  # noqa: S608
SCHEDULES = f"""SELECT s.name::text, s.queue::text, coalesce(s.kind, s.queue)::text, s.cron, s.every_s, s.timezone,
    s.missed, s.enabled, s.source, {_sane("s.last_occurrence")}, {_sane("j.run_at")}, j.status::text, s.error
    FROM pgworkd.schedules s LEFT JOIN pgworkd.jobs j ON j.schedule = s.name AND j.status <> 'dead'
    ORDER BY s.name"""  # noqa: S608
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
    UNION SELECT queue::text FROM pgworkd.schedules"""
SERVED = "SELECT EXISTS (SELECT FROM pgworkd.pools WHERE queue = $1::text)"
USED = f"SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE queue = $1::text) OR EXISTS ({KNOWN} INTERSECT SELECT $1::text)"  # noqa: S608
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
