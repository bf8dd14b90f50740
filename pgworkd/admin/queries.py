"""The rows that `Admin` returns, and the SQL that reads them, all of it static.

Instants are the database's; one outside the years 1 to 9999, as other clients may write, reads as None.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar, get_origin, get_type_hints
from uuid import UUID

Row = TypeVar("Row", bound=tuple[Any, ...])
_INSTANT = datetime | None

HISTORY_ROWS_MAX = 100_000
"""How many of the newest finished jobs a filter searches: the history itself has no bound."""


class QueueRow(NamedTuple):
    """A queue as it is now; each job is in one count. `due`: for the first time or again; `failed`: not due yet.

    `oldest_due_s`: seconds the oldest due job has waited.
    """

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
    """The end of the pause; None while `paused`: until resumed."""
    sample_age_s: float | None
    """How old the counts are, in seconds; None: counted now."""


class WorkerRow(NamedTuple):
    """A worker. `state`: running, blocked (its event loop), stopping, vanished or lost.

    `heartbeat_age_s`: seconds since its last heartbeat. `kind`: daemon, gateway or remote (through one).
    """

    id: int
    name: str
    pid: int
    version: str
    state: str
    started_at: datetime | None
    heartbeat_age_s: float
    lease_left_s: float
    running: int
    queues: Sequence[str]
    kind: str = "daemon"


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
    failed_at: datetime | None
    """When its last attempt failed: of a dead job, when it died."""
    error: str | None


class RowHolder(NamedTuple):
    """The session `pid` has the row of this job locked; `who`: its name, user, state, and for how long."""

    job_id: UUID
    pid: int
    who: str


class Jobs(NamedTuple):
    """The newest jobs that match; `complete` is False if older finished jobs were not searched."""

    rows: list[JobRow]
    complete: bool


class JobDetails(NamedTuple):
    """All fields of one job; `payload`, `result`, `errors` and `meta` are JSON text."""

    id: UUID
    queue: str
    kind: str
    status: str
    priority: int
    run_at: datetime | None
    created_at: datetime | None
    expires_at: datetime | None
    claimed_at: datetime | None
    """When a worker claimed the job last; the handler starts when there is a slot."""
    started_at: datetime | None
    """When the job's handler started; only for completed jobs."""
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
    """What keeps it from running by its own state, its line and its queue's pause: the first reason of these."""
    progress: float | None
    """0 to 1, as reported by a running handler."""
    doing: str | None
    """The message reported with the progress."""
    error: str | None
    payload: str
    result: str | None
    meta: str | None
    errors: str


class ListedSchedule(NamedTuple):
    """A recurring rule. `next_at`: when its pending occurrence is due (None: none yet); `status`: of that job."""

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
    """Counts of live jobs, each in one of them. `depth`: those that are due, be it for the first time or again.

    `failed`: their retry is still to come. `oldest_due_s`: seconds the oldest due job has waited.
    """

    depth: int
    scheduled: int
    running: int
    failed: int
    dead: int
    oldest_due_s: float


class EnqueuedJob(NamedTuple):
    """The job's id: of a new one (`created`), or of the one with the same dedupe key, which may have been `changed`."""

    id: UUID
    created: bool
    changed: bool


class AuditRow(NamedTuple):
    """An operation on a job or on a queue's settings; `before` and `after` are JSON text of what changed."""

    id: int
    at: datetime | None
    who: str
    what: str
    queue: str
    job_id: UUID | None
    before: str
    after: str


def read(row_type: Callable[..., Row], row: Sequence[Any]) -> Row:
    """A row as `row_type`: its instants, seconds since the epoch in SQL, as datetimes; its dicts from JSON text."""
    return row_type(*(parse(value) if parse else value for parse, value in zip(_parsers(row_type), row, strict=True)))


def select(row_type: Callable[..., Any], rest: str, table: str = "", **others: str) -> str:
    """A SELECT of rows for `read`, each field from the column of its name; `rest` begins with FROM.

    `table`: what stands before these names, such as "j."; `others`: by field, what to select in place of its column.
    """
    casts = {str: "{}::text", str | None: "{}::text", _INSTANT: "extract(epoch FROM {})::float8"}
    columns = {name: casts.get(kind, "{}").format(table + name) for name, kind in _types(row_type).items()}
    return f"SELECT {', '.join((columns | others).values())} {rest}"


@functools.cache
def _types(row_type: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(row_type)


@functools.cache
def _parsers(row_type: Callable[..., Any]) -> list[Callable[[Any], Any] | None]:
    kinds = _types(row_type).values()
    return [_instant if kind == _INSTANT else json.loads if get_origin(kind) is dict else None for kind in kinds]


def _instant(epoch_s: float | None) -> datetime | None:
    # Other clients may write 'infinity' or years that no datetime can represent: such a row must not fail the others.
    try:
        return None if epoch_s is None else datetime.fromtimestamp(epoch_s, UTC)
    except (OverflowError, ValueError, OSError):
        return None


QUEUES = """SELECT queue, due, scheduled, running, failed, blocked, dead, oldest_due_s, workers, slots,
    coalesce(paused_until > pgworkd.clock(), false),
    CASE WHEN paused_until > pgworkd.clock() THEN extract(epoch FROM paused_until)::float8 END, NULL
    FROM pgworkd.queue_stats ORDER BY queue"""
QUEUES_SAMPLED = """SELECT d.queue, d.due, d.scheduled, d.running, d.failed, d.blocked, d.dead, d.oldest_due_s,
    coalesce(f.workers, 0), coalesce(f.slots, 0), coalesce(q.paused_until > pgworkd.clock(), false),
    CASE WHEN q.paused_until > pgworkd.clock() THEN extract(epoch FROM q.paused_until)::float8 END, d.sample_age_s
    FROM pgworkd.queue_depths d LEFT JOIN pgworkd.queues q ON q.name = d.queue
    LEFT JOIN (SELECT p.queue, count(*) AS workers, sum(p.concurrency)::bigint AS slots
               FROM pgworkd.known_pools() p JOIN pgworkd.workers w
                   ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
               GROUP BY p.queue) f ON f.queue = d.queue
    ORDER BY d.queue"""
SAMPLING = """SELECT took_s, extract(epoch FROM pgworkd.clock() - at)::float8 FROM pgworkd.samples
    ORDER BY at DESC LIMIT 1"""
WORKERS = """SELECT id, name, pid, version,
    CASE WHEN lost_at IS NOT NULL OR lease_until < pgworkd.clock() THEN 'lost' ELSE state END,
    extract(epoch FROM started_at)::float8, extract(epoch FROM pgworkd.clock() - seen_at)::float8,
    extract(epoch FROM lease_until - pgworkd.clock())::float8, running, coalesce(queues, '{}'), kind
    FROM pgworkd.worker_stats WHERE kind <> 'standing' ORDER BY id"""
OF_JOB = {"kind": "coalesce(kind, queue)::text", "max_attempts": "max_attempts::int"}
ENDED_AS = "CASE status WHEN 'dead' THEN 'discarded' ELSE status::text END"
"""The status of a job in the history."""
# One statement per table, each read from its newest id on until the limit. Live jobs are few, whatever the size of the
# history, and their rare statuses (running, dead) are indexed; of the history only the newest part is searched.
LIVE_JOBS = select(
    JobRow,
    """FROM pgworkd.jobs
    WHERE status <> 'completed'  -- rows that only keep a dedupe key
      AND ($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
      AND ($3::text IS NULL OR status = $3::text::pgworkd.job_status)
    ORDER BY id DESC LIMIT $4""",
    finished_at="NULL::float8",
    **OF_JOB,
)
FINISHED_JOBS = select(
    JobRow,
    """FROM (SELECT * FROM pgworkd.finished_jobs ORDER BY id DESC LIMIT $5) newest
    WHERE ($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
      AND ($3::text IS NULL OR CASE status WHEN 'dead' THEN 'discarded' ELSE status::text END = $3)
    ORDER BY id DESC LIMIT $4""",
    status=ENDED_AS,
    **OF_JOB,
)
MORE_FINISHED_JOBS = "SELECT EXISTS (SELECT FROM pgworkd.finished_jobs ORDER BY id DESC OFFSET $1 LIMIT 1)"
_WAITS = """(SELECT h.says FROM pgworkd.jobs w LEFT JOIN pgworkd.queues q ON q.name = w.queue,
        pgworkd.held_back(w, q, pgworkd.clock()) h
    WHERE w.id = j.id AND w.status <> 'completed' AND h.reason NOT IN ('running', 'lost', 'dead') LIMIT 1)"""
ONE_JOB = select(
    JobDetails,
    "FROM pgworkd.jobs_of(ARRAY[$1::uuid]) j LEFT JOIN pgworkd.job_progress p ON p.id = j.id",
    "j.",
    worker="(SELECT w.name FROM pgworkd.workers w WHERE w.id = j.worker_id)",
    waits=_WAITS,
    progress="p.done::float8",
    doing="nullif(p.message, '')",
)
# Progress is in an unlogged table, which a standby does not have.
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
    count(*) FILTER (WHERE status = 'running'),
    count(*) FILTER (WHERE status = 'failed' AND run_at > pgworkd.clock()),
    count(*) FILTER (WHERE status = 'dead'),
    coalesce(extract(epoch FROM pgworkd.clock() - min(run_at)
        FILTER (WHERE status IN ('pending', 'failed') AND run_at <= pgworkd.clock())), 0)::float8
    FROM pgworkd.jobs WHERE $1::text IS NULL OR queue = $1"""
DEPTH = "SELECT pgworkd.depth($1, $2)"
STATUSES = "SELECT id, status FROM pgworkd.jobs_of($1)"
HOLDERS = """SELECT j.id, l.pid, concat_ws(', ', nullif(a.application_name, ''), a.usename, a.state,
        'in a transaction for ' || extract(epoch FROM clock_timestamp() - a.xact_start)::int || ' s')
    FROM pgworkd.jobs j JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = j.xmax AND l.granted
    LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE j.id = ANY ($1::uuid[]) AND l.pid <> pg_backend_pid() ORDER BY j.id"""
QUEUES_OF = "SELECT id, queue FROM pgworkd.jobs_of($1)"
MATCHING = "SELECT ids, last FROM pgworkd.matching($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)"
EDIT = """SELECT coalesce(array_agg(k.name ORDER BY k.name), '{}') FROM jsonb_object_keys(pgworkd.edit($1,
    $2::text::jsonb, coalesce($3::text::timestamptz, pgworkd.clock() + make_interval(secs => $4::float8)), $5)
    ) AS k (name)"""
# All are locked first, in the order of their ids as by cancel(): those that are claimed meanwhile are left out.
PRIORITIZE = """WITH waiting AS MATERIALIZED (
        SELECT j.id FROM pgworkd.jobs j WHERE j.id = ANY ($1::uuid[]) AND j.status IN ('pending', 'blocked', 'failed')
        ORDER BY j.id FOR UPDATE)
    SELECT w.id, pgworkd.edit(w.id, p_priority => $2::int) FROM waiting w"""
AUDIT = """SELECT id, extract(epoch FROM at)::float8, who, what, queue, job_id, before::text, after::text
    FROM pgworkd.audit WHERE ($1::uuid IS NULL OR job_id = $1) AND ($2::text IS NULL OR queue = $2)
        AND ($4::bigint IS NULL OR id < $4)
    ORDER BY id DESC LIMIT $3"""
NOTE_DEBUG = """INSERT INTO pgworkd.audit (who, what, queue, before, after)
    VALUES (pgworkd.who(NULL), 'worker', '', '{}', jsonb_build_object('name', $2::text, 'debug', $1::text))"""
KNOWN = """SELECT queue::text FROM pgworkd.known_pools() UNION SELECT name::text FROM pgworkd.queues
    UNION SELECT queue::text FROM pgworkd.schedules
    UNION SELECT queue::text FROM pgworkd.jobs WHERE status <> 'completed'"""
IS_SERVED = """SELECT EXISTS (
    SELECT FROM pgworkd.pools p
    JOIN pgworkd.workers w ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
    WHERE p.queue = $1::text AND p.concurrency > 0)"""
IS_KNOWN = """SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE queue = $1::text AND status <> 'completed')
    OR EXISTS (SELECT FROM pgworkd.pools WHERE queue = $1::text)
    OR EXISTS (SELECT FROM pgworkd.queues WHERE name = $1::text)
    OR EXISTS (SELECT FROM pgworkd.schedules WHERE queue = $1::text)"""
