"""What operators ask of the database and do to it: one method per question or verb, no daemon needed.

Every call is one or a few short statements on one connection, each bounded by the link's time limits. Instants
are the database's; one that a foreign client wrote beyond the years 1 to 9999 reads as None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self
from uuid import UUID

from . import client
from .errors import DatabaseError, InvalidPayload, UsageError
from .link import Link, LinkOptions
from .payload import BYTES_MAX, decode

ROWS_MAX = 1000
HISTORY_ROWS_MAX = 100_000
"""How many of the newest finished jobs a filter looks at: the history itself has no bound."""
STATUSES = ("pending", "running", "failed", "dead", "completed", "cancelled", "expired", "blocked")
_FINISHED = ("completed", "cancelled", "expired", "dead")
_UNIQUE_VIOLATION = "23505"


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


_QUEUES = """SELECT queue, due, scheduled, running, failed, blocked, dead, oldest_due_s, workers, slots,
    coalesce(paused_until > pgworkd.clock(), false),
    CASE WHEN paused_until > pgworkd.clock() AND paused_until < '9999-12-30' THEN paused_until END
    FROM pgworkd.queue_stats ORDER BY queue"""
_WORKERS = """SELECT id, name, pid, version,
    CASE WHEN lost_at IS NOT NULL OR lease_until < pgworkd.clock() THEN 'lost' ELSE state END,
    started_at, extract(epoch FROM pgworkd.clock() - seen_at)::float8,
    extract(epoch FROM lease_until - pgworkd.clock())::float8, running, coalesce(queues, '{}')
    FROM pgworkd.worker_stats ORDER BY id"""
# One branch per table, each walked from its newest id and left after as many as are wanted. Live work is small,
# whatever the history, and rare filters (running, dead) have an index there; of the history only the newest part
# is looked at.
_JOB = f"""id, queue::text, coalesce(kind, queue)::text, status::text, priority, {_sane("run_at")}, {_sane("created_at")},
    {_sane("finished_at")}, attempts, failures, max_attempts::int, error"""
_WANTED = """($1::text IS NULL OR queue = $1) AND ($2::text IS NULL OR coalesce(kind, queue) = $2)
    AND ($3::text IS NULL OR status = $3::text::pgworkd.job_status)"""
_LIVE_JOBS = f"""SELECT {_JOB.replace("finished_at", "NULL::timestamptz")}
    FROM pgworkd.jobs WHERE {_WANTED} ORDER BY id DESC LIMIT $4"""  # noqa: S608 - all parts are constants
_OLD_JOBS = f"""SELECT {_JOB} FROM (SELECT * FROM pgworkd.finished_jobs ORDER BY id DESC LIMIT {HISTORY_ROWS_MAX}) f
    WHERE {_WANTED} ORDER BY id DESC LIMIT $4"""  # noqa: S608
_OLDER_JOBS = f"SELECT EXISTS (SELECT FROM pgworkd.finished_jobs ORDER BY id DESC OFFSET {HISTORY_ROWS_MAX} LIMIT 1)"  # noqa: S608
_ONE_JOB = f"""SELECT j.id, j.queue, j.kind, j.status::text, j.priority, {_sane("j.run_at")}, {_sane("j.created_at")},
    {_sane("j.started_at")}, {_sane("j.failed_at")}, {_sane("j.finished_at")}, j.attempts, j.failures, j.max_attempts,
    j.worker_id, (SELECT w.name FROM pgworkd.workers w WHERE w.id = j.worker_id), j.schedule, {_sane("j.occurrence")},
    j.dedupe_key, j.serialize_key, j.batch_id, j.error, j.payload::text, j.result::text, j.meta::text, j.errors::text
    FROM pgworkd.all_jobs j WHERE j.id = $1"""  # noqa: S608
_SCHEDULES = f"""SELECT s.name::text, s.queue::text, coalesce(s.kind, s.queue)::text, s.cron, s.every_s, s.timezone,
    s.missed, s.enabled, s.source, {_sane("s.last_occurrence")}, {_sane("j.run_at")}, j.status::text, s.error
    FROM pgworkd.schedules s LEFT JOIN pgworkd.jobs j ON j.schedule = s.name AND j.status <> 'dead'
    ORDER BY s.name"""  # noqa: S608
_STATS = """SELECT count(*) FILTER (WHERE status IN ('pending', 'failed') AND run_at <= pgworkd.clock()),
    count(*) FILTER (WHERE status = 'pending' AND run_at > pgworkd.clock()),
    count(*) FILTER (WHERE status = 'running'), count(*) FILTER (WHERE status = 'failed'),
    count(*) FILTER (WHERE status = 'dead'),
    coalesce(extract(epoch FROM pgworkd.clock() - min(run_at)
        FILTER (WHERE status IN ('pending', 'failed') AND run_at <= pgworkd.clock())), 0)::float8
    FROM pgworkd.jobs WHERE $1::text IS NULL OR queue = $1"""
_STATUSES = "SELECT id, status::text FROM pgworkd.all_jobs WHERE id = ANY ($1::uuid[])"
_DEAD = """SELECT id FROM pgworkd.jobs WHERE status = 'dead' AND ($1::text IS NULL OR queue = $1)
    AND ($2::text IS NULL OR coalesce(kind, queue) = $2) AND ($3::uuid IS NULL OR id > $3) ORDER BY id LIMIT $4"""
_ENQUEUE = """INSERT INTO pgworkd.jobs (queue, kind, payload, priority, run_at, expires_at, max_attempts, timeout_s,
        dedupe_key)
    VALUES ($1, $2, $3::text::jsonb, $4, coalesce($5::text::timestamptz,
        pgworkd.clock() + make_interval(secs => coalesce($6::float8, 0))), $7::text::timestamptz, $8, $9::float8, $10)
    ON CONFLICT (queue, dedupe_key) WHERE dedupe_key IS NOT NULL AND status <> 'dead' DO NOTHING RETURNING id"""
_HOLDER = "SELECT id FROM pgworkd.jobs WHERE queue = $1 AND dedupe_key = $2 AND status <> 'dead'"
_PAUSE = """INSERT INTO pgworkd.queues AS q (name, paused_until)
    VALUES ($1, coalesce(pgworkd.clock() + make_interval(secs => $2::float8), 'infinity'))
    ON CONFLICT (name) DO UPDATE SET paused_until = excluded.paused_until, updated_at = pgworkd.clock()"""
_RESUME = """UPDATE pgworkd.queues q SET paused_until = NULL, updated_at = pgworkd.clock()
    WHERE q.name = $1 AND q.paused_until > pgworkd.clock() RETURNING true"""
# Makes the queue's workers ask for their settings now instead of at their next heartbeat.
_POKE = """SELECT pg_notify('pgworkd', jsonb_build_object('worker', p.worker_id)::text) FROM pgworkd.pools p
    WHERE p.queue = $1"""
_KNOWN = """SELECT queue::text FROM pgworkd.pools UNION SELECT name::text FROM pgworkd.queues
    UNION SELECT queue::text FROM pgworkd.schedules"""
_SERVED = "SELECT EXISTS (SELECT FROM pgworkd.pools WHERE queue = $1)"
_USED = f"SELECT EXISTS (SELECT FROM pgworkd.jobs WHERE queue = $1) OR EXISTS ({_KNOWN} INTERSECT SELECT $1)"  # noqa: S608
_SERVER = """SELECT current_setting('server_version'), current_setting('server_version_num')::int,
    pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean,
    extract(epoch FROM clock_timestamp())::float8"""
_DOCTOR = """WITH oldest AS (
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


class Admin:
    """The operator's way to the database, on one connection that is made when first needed.

    All methods raise DatabaseUnavailable (away, too slow), SchemaError (not installed), UsageError (a bad
    argument, a refused login) and DatabaseError (the rest).
    """

    def __init__(self, options: LinkOptions) -> None:
        self._link = Link(options, "admin")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()

    # Look

    async def queues(self) -> list[QueueRow]:
        """Every queue that has live jobs, a worker or settings. Reads all live jobs."""
        return [QueueRow(*row) for row in await self._link.fetch(_QUEUES)]

    async def workers(self) -> list[WorkerRow]:
        """Every worker that has not signed off."""
        return [WorkerRow(*row) for row in await self._link.fetch(_WORKERS)]

    async def jobs(
        self,
        queue: str | None = None,
        kind: str | None = None,
        status: str | None = None,
        limit: int = 20,
    ) -> Jobs:
        """The newest jobs, at most `limit` (1 to ROWS_MAX), of those that match everything that is not None.

        Live jobs are all looked at, finished ones back to the newest HISTORY_ROWS_MAX.
        """
        _bounded(limit)
        if status is not None and status not in STATUSES:
            raise UsageError(f"status {status!r}: give one of {', '.join(STATUSES)}")
        wanted = (_name(queue), _name(kind), status, limit)
        rows = [JobRow(*row) for row in await self._link.fetch(_LIVE_JOBS, *wanted)]
        if status not in (None, *_FINISHED):
            return Jobs(rows, complete=True)
        rows += [JobRow(*row) for row in await self._link.fetch(_OLD_JOBS, *wanted)]
        rows = sorted(rows, key=lambda row: row.id, reverse=True)[:limit]
        filtered = (queue, kind, status) != (None, None, None)
        cut = len(rows) < limit and filtered and bool(await self._link.value(_OLDER_JOBS))
        return Jobs(rows, complete=not cut)

    async def job(self, job_id: UUID) -> Job | None:
        """One job whole, live or finished; None when there is none (or its history is forgotten)."""
        rows = await self._link.fetch(_ONE_JOB, job_id)
        return Job(*rows[0]) if rows else None

    async def statuses(self, ids: Sequence[UUID]) -> dict[UUID, str]:
        """The status of each of these jobs (at most ROWS_MAX) that exists."""
        _bounded(len(ids))
        return {row[0]: row[1] for row in await self._link.fetch(_STATUSES, ids)}

    async def schedules(self) -> list[ScheduleRow]:
        """Every schedule."""
        return [ScheduleRow(*row) for row in await self._link.fetch(_SCHEDULES)]

    async def stats(self, queue: str | None = None) -> Stats:
        """Counts over one queue or all; zeros for a queue that nobody knows."""
        return Stats(*(await self._link.fetch(_STATS, _name(queue)))[0])

    # Do

    async def enqueue(
        self,
        queue: str,
        payload_text: str = "{}",
        *,
        kind: str | None = None,
        priority: int = 0,
        delay_s: float | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        timeout_s: float | None = None,
        dedupe_key: str | None = None,
    ) -> Enqueued:
        """Inserts a job whose payload is the JSON object `payload_text`, stored as it is written.

        Bounds are those of client.NewJob; UsageError (InvalidPayload) tells what is out of them.
        """
        if len(payload_text.encode(errors="surrogatepass")) > BYTES_MAX:
            raise InvalidPayload("payload", f"takes more than the {BYTES_MAX:,} bytes that are allowed")
        job = client.NewJob(
            queue,
            decode(payload_text),
            kind=kind,
            priority=priority,
            delay=delay_s,
            run_at=run_at,
            expires_at=expires_at,
            max_attempts=max_attempts,
            timeout_s=timeout_s,
            dedupe_key=dedupe_key,
        )
        row = client._row(job, "")  # noqa: SLF001 - one set of bounds for all doors
        _, _, _, _, at, delay, expires, most, timeout, key, _ = row
        args = (queue, kind, payload_text, priority, at, delay, expires, most, timeout, key)
        # A holder of the key that ends between the two statements leaves room for ours.
        for _attempt in range(3):
            if (made := await self._link.value(_ENQUEUE, *args)) is not None:
                return Enqueued(made, created=True)
            if (found := await self._link.value(_HOLDER, queue, key)) is not None:
                return Enqueued(found, created=False)
        raise DatabaseError("jobs with this dedupe key come and go too fast: try again", sqlstate=_UNIQUE_VIOLATION)

    async def retry(self, ids: Sequence[UUID]) -> Retried:
        """Runs dead jobs again with a fresh budget and waiting retries now; at most ROWS_MAX, others are left alone."""
        _bounded(len(ids))
        try:
            changed = await self._link.value("SELECT pgworkd.retry($1)", ids)
            return Retried(list(changed), [])
        except DatabaseError as error:
            if error.sqlstate != _UNIQUE_VIOLATION:
                raise
            if len(ids) == 1:
                return Retried([], list(ids))
        # One of them cannot be: find out which, half by half.
        halves = [await self.retry(ids[: len(ids) // 2]), await self.retry(ids[len(ids) // 2 :])]
        return Retried([i for half in halves for i in half.changed], [i for half in halves for i in half.held_back])

    async def cancel(self, ids: Sequence[UUID]) -> Mapping[UUID, str]:
        """Ends waiting and dead jobs ('cancelled'), asks the workers of running ones to ('requested'); at most ROWS_MAX."""
        _bounded(len(ids))
        rows = await self._link.fetch("SELECT id, outcome FROM pgworkd.cancel($1)", ids)
        return {row[0]: row[1] for row in rows}

    async def discard(self, ids: Sequence[UUID]) -> int:
        """Moves dead jobs to the history; how many. At most ROWS_MAX, others are left alone."""
        _bounded(len(ids))
        return int(await self._link.value("SELECT pgworkd.discard($1)", ids))

    async def dead_ids(
        self, queue: str | None = None, kind: str | None = None, limit: int = ROWS_MAX, after: UUID | None = None
    ) -> list[UUID]:
        """Dead jobs that match, oldest first; `after` goes on behind the last id of the answer before."""
        _bounded(limit)
        return [row[0] for row in await self._link.fetch(_DEAD, _name(queue), _name(kind), after, limit)]

    async def pause(self, queue: str, for_s: float | None = None) -> None:
        """No daemon starts a job of this queue for `for_s` seconds; None: until `resume`."""
        await self._link.value(_PAUSE, _name(queue), for_s)
        await self._link.fetch(_POKE, queue)

    async def resume(self, queue: str) -> bool:
        """Ends a pause; False if there was none."""
        if not await self._link.value(_RESUME, _name(queue)):
            return False
        await self._link.fetch(_POKE, queue)
        return True

    async def known_queues(self) -> list[str]:
        """The queues that have a worker, settings or a schedule."""
        return [row[0] for row in await self._link.fetch(_KNOWN)]

    async def is_known(self, queue: str) -> bool:
        """True if the queue has a live job, a worker, settings or a schedule."""
        return bool(await self._link.value(_USED, _name(queue)))

    async def is_served(self, queue: str) -> bool:
        """True if some worker serves the queue now."""
        return bool(await self._link.value(_SERVED, _name(queue)))

    # Examine

    async def server(self) -> Server:
        """Facts that need no schema."""
        return Server(*(await self._link.fetch(_SERVER))[0])

    async def schema_version(self) -> int | None:
        """The installed schema's version; None if there is none."""
        if await self._link.value("SELECT to_regclass('pgworkd.schema_version')") is None:
            return None
        found = await self._link.value("SELECT version FROM pgworkd.schema_version")
        return None if found is None else int(found)

    async def doctor(self) -> Doctor:
        """Facts that need the schema."""
        return Doctor(*(await self._link.fetch(_DOCTOR))[0])


def _bounded(count: int) -> None:
    if not 1 <= count <= ROWS_MAX:
        raise UsageError(f"{count:,} jobs at once: 1 to {ROWS_MAX:,} are allowed")


def _name(name: Any) -> Any:
    """A name to look for; UsageError for text that no name can be, before the driver stumbles over it."""
    if isinstance(name, str) and not ("\0" not in name and name.isascii() or name.isprintable()):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError("a name holds a lone surrogate (half a character)") from None
    if isinstance(name, str) and "\0" in name:
        raise UsageError("a name holds a NUL character")
    return name
