"""The queries of `pgworkd doctor` about queues, and their rows: at a bounded cost, however many jobs there are.

Queues are found with a loose index scan, and of each queue only the first job of each priority is read. Kinds without a
handler are searched among the first KINDS_ROWS waiting jobs of a queue, those due earliest. Dead jobs are counted up to
DEAD_MAX. No query takes a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pgworkd.admin.doctor_database import RefusedRows

QUEUES_MAX = 200
"""The largest number of queues examined."""
PRIORITIES_MAX = 100
KINDS_ROWS = 1000
DEAD_MAX = 10_000
LONG_S, LONG_FACTOR, LONG_UNKNOWN_S = 600, 10, 3600
"""A job runs for far too long after this many seconds, if that is this many times its time-out, or what is usual for
its kind; where nothing is known of the kind, after so many."""
LONG_ROWS, LONG_KINDS = 20, 50
"""The oldest jobs of each pool that are examined, and kinds."""


class QueueHealth(NamedTuple):
    """A queue that has waiting jobs."""

    queue: str
    overdue_s: float
    """Seconds since its oldest due job became due; 0 or less if none is."""
    plain_overdue_s: float
    """Seconds since the oldest due job became due that has no key and was never lost: only a lack of slots holds it."""
    workers: int
    """Live workers that serve the queue."""
    slots: int
    """The slots of all live workers that serve the queue."""
    running: int
    paused: bool
    limited: bool
    endpoint: str | None
    """Where the jobs of the queue are sent by HTTP."""


class HeldEndpoint(NamedTuple):
    """An endpoint that is paused or disabled, and the queues that wait for it."""

    endpoint: str
    why: str
    disabled: bool
    paused_s: float
    """Seconds until the pause ends."""
    queues: Sequence[str]


class DroppedResult(NamedTuple):
    """An endpoint that has answered 2xx with a result that cannot be stored, `ago_s` seconds ago, and why it cannot."""

    endpoint: str
    why: str
    ago_s: float


class UnknownKind(NamedTuple):
    """A kind for which no live worker of the queue has a handler; `jobs` counts the examined jobs of that kind.

    `known` False: a worker of the queue does not report its kinds, and may have one; another one had none.
    """

    queue: str
    kind: str
    jobs: int
    known: bool


class PendingEffects(NamedTuple):
    """Effects of finished jobs that were postponed because of a lock: how many, up to DEAD_MAX; age of the oldest."""

    waiting: int
    oldest_s: float


class BrokenSchedule(NamedTuple):
    """A schedule without a next occurrence, and the error."""

    name: str
    error: str


class DifferingSchedule(NamedTuple):
    """A schedule for which live workers declare different rules; `declared` and `in_force` are JSON."""

    name: str
    worker: str
    """The worker that declares another rule than the one in force."""
    declared: str
    in_force: str


class StuckDependency(NamedTuple):
    """A job that cannot complete by itself, and how many jobs depend on it, with the id of one as an example."""

    job: str
    waiting: int
    example: str
    status: str
    """dead; or cancelled, expired or discarded, which cannot be retried."""


# A loose index scan: each min() reads the first entry of an index; the walks down the priorities do the same.
QUEUES = """WITH RECURSIVE leap (queue) AS (
        SELECT least((SELECT min(j.queue) FROM pgworkd.jobs j WHERE pgworkd.waits_plain(j)),
                     (SELECT min(j.queue) FROM pgworkd.jobs j WHERE pgworkd.waits_keyed(j)),
                     (SELECT min(j.queue) FROM pgworkd.jobs j WHERE pgworkd.waits_suspect(j)))
        UNION ALL
        SELECT least((SELECT min(j.queue) FROM pgworkd.jobs j WHERE pgworkd.waits_plain(j) AND j.queue > l.queue),
                     (SELECT min(j.queue) FROM pgworkd.jobs j WHERE pgworkd.waits_keyed(j) AND j.queue > l.queue),
                     (SELECT min(j.queue) FROM pgworkd.jobs j WHERE pgworkd.waits_suspect(j) AND j.queue > l.queue))
        FROM leap l WHERE l.queue IS NOT NULL
    ) SELECT l.queue::text FROM leap l WHERE l.queue IS NOT NULL LIMIT $1"""
HEALTH = """SELECT q.queue,
        coalesce(extract(epoch FROM pgworkd.clock() - least(plain.at, keyed.at, suspect.at)), 0)::float8,
        coalesce(extract(epoch FROM pgworkd.clock() - plain.at), 0)::float8,
        fleet.workers, fleet.slots, fleet.running,
        coalesce(s.paused_until > pgworkd.clock(), false), coalesce(s.limited, false), s.endpoint::text
    FROM unnest($1::text[]) q (queue) LEFT JOIN pgworkd.queues s ON s.name = q.queue
    CROSS JOIN LATERAL (
        WITH RECURSIVE walk AS (
            (SELECT j.priority, j.run_at FROM pgworkd.jobs j WHERE j.queue = q.queue AND pgworkd.waits_plain(j)
             ORDER BY j.priority DESC, j.run_at LIMIT 1)
            UNION ALL
            SELECT n.priority, n.run_at FROM walk w CROSS JOIN LATERAL (
                SELECT j.priority, j.run_at FROM pgworkd.jobs j
                WHERE j.queue = q.queue AND pgworkd.waits_plain(j) AND j.priority < w.priority
                ORDER BY j.priority DESC, j.run_at LIMIT 1) n)
        SELECT min(f.run_at) AS at FROM (SELECT w.run_at FROM walk w LIMIT $2) f) plain
    CROSS JOIN LATERAL (
        WITH RECURSIVE walk AS (
            (SELECT j.priority, j.run_at FROM pgworkd.jobs j WHERE j.queue = q.queue AND pgworkd.waits_keyed(j)
             ORDER BY j.priority DESC, j.run_at LIMIT 1)
            UNION ALL
            SELECT n.priority, n.run_at FROM walk w CROSS JOIN LATERAL (
                SELECT j.priority, j.run_at FROM pgworkd.jobs j
                WHERE j.queue = q.queue AND pgworkd.waits_keyed(j) AND j.priority < w.priority
                ORDER BY j.priority DESC, j.run_at LIMIT 1) n)
        SELECT min(f.run_at) AS at FROM (SELECT w.run_at FROM walk w LIMIT $2) f) keyed
    CROSS JOIN LATERAL (
        SELECT min(j.run_at) AS at FROM pgworkd.jobs j WHERE j.queue = q.queue AND pgworkd.waits_suspect(j)) suspect
    CROSS JOIN LATERAL (
        SELECT count(*)::int AS workers, coalesce(sum(p.concurrency), 0)::int AS slots,
            coalesce(sum((SELECT count(*) FROM pgworkd.jobs j
                          WHERE j.worker_id = w.id AND j.queue = q.queue AND j.status = 'running')), 0)::int AS running
        FROM pgworkd.pools p JOIN pgworkd.workers w ON w.id = p.worker_id
        WHERE p.queue = q.queue AND p.concurrency > 0
          AND w.lost_at IS NULL AND w.lease_until >= pgworkd.clock()) fleet
    ORDER BY 2 DESC"""
UNKNOWN_KINDS = """SELECT q.queue, r.kind, count(*)::int, reported.knows
    FROM unnest($1::text[]) q (queue) CROSS JOIN LATERAL (
        SELECT coalesce(bool_and(w.kinds IS NOT NULL), false) AS knows,
               ARRAY(SELECT DISTINCT k.kind FROM pgworkd.pools p JOIN pgworkd.workers o ON o.id = p.worker_id,
                            unnest(o.kinds) AS k (kind)
                     WHERE p.queue = q.queue AND o.lost_at IS NULL AND o.lease_until >= pgworkd.clock()) AS kinds
        FROM pgworkd.pools p JOIN pgworkd.workers w ON w.id = p.worker_id
        WHERE p.queue = q.queue AND p.concurrency > 0
          AND w.lost_at IS NULL AND w.lease_until >= pgworkd.clock()) reported
    CROSS JOIN LATERAL (
        SELECT DISTINCT ON (j.id) coalesce(j.kind, j.queue)::text AS kind, j.error FROM (
            (SELECT i.id, i.kind, i.queue, i.error FROM pgworkd.jobs i
             WHERE i.queue = q.queue AND pgworkd.waits_plain(i) AND i.priority = 0
             AND i.run_at > pgworkd.clock() - interval '1 min' ORDER BY i.run_at LIMIT $2)
            UNION ALL
            (SELECT i.id, i.kind, i.queue, i.error FROM pgworkd.jobs i
             WHERE i.queue = q.queue AND pgworkd.waits_plain(i)
             ORDER BY i.priority DESC, i.run_at LIMIT $2)
            UNION ALL
            (SELECT i.id, i.kind, i.queue, i.error FROM pgworkd.jobs i
             WHERE i.queue = q.queue AND pgworkd.waits_keyed(i)
             ORDER BY i.priority DESC, i.run_at LIMIT $2)) j
        WHERE CASE WHEN reported.knows THEN coalesce(j.kind, j.queue)::text <> ALL (reported.kinds)
                   ELSE j.error LIKE 'no handler for kind %' END) r
    GROUP BY 1, 2, 4 ORDER BY 3 DESC, 1, 2 LIMIT 1000"""
ENDPOINTS = """SELECT e.name::text,
        coalesce(CASE WHEN e.disabled_at IS NULL THEN e.paused_why ELSE e.disabled_why END, ''),
        e.disabled_at IS NOT NULL, coalesce(extract(epoch FROM e.paused_until - pgworkd.clock()), 0)::float8, q.names
    FROM pgworkd.endpoints e CROSS JOIN LATERAL (
        SELECT array_agg(q.name::text ORDER BY q.name) AS names FROM pgworkd.queues q WHERE q.endpoint = e.name) q
    WHERE (e.disabled_at IS NOT NULL OR e.paused_until > pgworkd.clock()) AND q.names IS NOT NULL
    ORDER BY e.disabled_at IS NULL, e.name LIMIT 1000"""
DROPPED_S = 86_400.0
DROPPED = """SELECT name::text, warned_why, extract(epoch FROM pgworkd.clock() - warned_at)::float8
    FROM pgworkd.endpoints WHERE warned_at > pgworkd.clock() - make_interval(secs => $1) AND NOT strict_results
    ORDER BY warned_at DESC LIMIT 1000"""
SCHEDULES = """SELECT name::text, error FROM pgworkd.schedules WHERE enabled AND error IS NOT NULL
    ORDER BY name LIMIT 1000"""
DIFFERING = """SELECT DISTINCT ON (s.name) s.name::text, w.name || ' (id ' || w.id || ')',
        (w.rules -> s.name)::text, pgworkd.rule_of(s)::text
    FROM pgworkd.workers w CROSS JOIN LATERAL jsonb_object_keys(w.rules) n (name)
    JOIN pgworkd.schedules s ON s.name = n.name AND s.source = 'code'
    WHERE w.lost_at IS NULL AND w.lease_until > pgworkd.clock() AND w.rules -> n.name <> pgworkd.rule_of(s)
    ORDER BY s.name, w.id LIMIT 1000"""
STUCK_DEPENDENCIES = """WITH waits AS MATERIALIZED (
        SELECT w.depends_on, w.job_id FROM pgworkd.job_dependencies w
        WHERE w.on_failed_dependency = 'wait' AND NOT EXISTS (
            SELECT FROM pgworkd.jobs j WHERE j.id = w.depends_on AND j.status NOT IN ('completed', 'dead'))
        LIMIT $1
    )
    SELECT w.depends_on::text, count(*)::int, min(w.job_id::text), b.status
    FROM waits w JOIN pgworkd.became_all(ARRAY(SELECT DISTINCT i.depends_on FROM waits i)) b ON b.id = w.depends_on
    WHERE b.status IN ('dead', 'cancelled', 'expired', 'discarded')
      AND EXISTS (SELECT FROM pgworkd.jobs j WHERE j.id = w.job_id AND j.status = 'blocked')
    GROUP BY w.depends_on, b.status ORDER BY 2 DESC, 1 LIMIT 1000"""


EFFECTS = """SELECT (SELECT count(*)::int FROM (SELECT FROM pgworkd.pending_effects LIMIT $1) x),
        coalesce((SELECT extract(epoch FROM pgworkd.clock() - min(e.put_off_at))
                  FROM (SELECT put_off_at FROM pgworkd.pending_effects LIMIT $1) e), 0)::float8"""


class BlockedWorker(NamedTuple):
    """A worker that renews its lease, and whose event loop does not run."""

    name: str
    pid: int
    running: int
    """How many jobs the worker runs."""


class LongRun(NamedTuple):
    """The oldest running job of a kind, which has run for far longer than such jobs do."""

    job: str
    queue: str
    kind: str
    worker: str
    claimed_s: float
    """Seconds since the job was claimed."""
    timeout_s: float | None
    """The job's own time-out."""
    usual_s: float | None
    """99 of 100 runs of the job's kind took less, within 8 days; None: none has ended."""


BLOCKED_WORKERS = """SELECT w.name, w.pid,
        (SELECT count(*)::int FROM pgworkd.jobs j WHERE j.worker_id = w.id AND j.status = 'running')
    FROM pgworkd.workers w
    WHERE w.state = 'blocked' AND w.lost_at IS NULL AND w.lease_until >= pgworkd.clock() ORDER BY 1, 2 LIMIT 1000"""
# Of each pool the jobs that were claimed first, by index; of each kind the oldest of these.
LONG_RUNS = """WITH oldest AS MATERIALIZED (
        SELECT DISTINCT ON (j.queue, j.kind) j.* FROM pgworkd.known_pools() p
        JOIN pgworkd.workers w ON w.id = p.worker_id AND w.lost_at IS NULL
        CROSS JOIN LATERAL (
            SELECT j.id, j.queue::text, coalesce(j.kind, j.queue)::text AS kind, w.name, j.timeout_s,
                   extract(epoch FROM pgworkd.clock() - j.started_at)::float8 AS claimed_s
            FROM pgworkd.jobs j
            WHERE j.worker_id = p.worker_id AND j.queue = p.queue AND j.status = 'running'
            ORDER BY j.started_at LIMIT $1) j
        WHERE j.claimed_s > $3
        ORDER BY j.queue, j.kind, j.claimed_s DESC LIMIT $2)
    SELECT o.id::text, o.queue, o.kind, o.name, o.claimed_s, o.timeout_s::float8, u.usual_s
    FROM oldest o CROSS JOIN LATERAL (
        SELECT pgworkd.percentile(array_agg(c.runs ORDER BY c.place), 0.99) AS usual_s
        FROM (SELECT r.place, sum(r.run)::bigint AS runs
              FROM pgworkd.queue_minutes m, unnest(m.runs) WITH ORDINALITY AS r (run, place)
              WHERE m.queue = o.queue AND m.kind = o.kind AND m.at > pgworkd.clock() - interval '8 days'
              GROUP BY r.place) c) u
    WHERE o.claimed_s > CASE WHEN o.timeout_s IS NOT NULL THEN $4 * o.timeout_s
                             WHEN u.usual_s IS NOT NULL THEN $4 * u.usual_s ELSE $5 END
    ORDER BY o.claimed_s DESC LIMIT 1000"""


class Health(NamedTuple):
    """The findings of `Admin.health`."""

    queues: Sequence[QueueHealth]
    unknown_kinds: Sequence[UnknownKind]
    endpoints: Sequence[HeldEndpoint]
    dropped: Sequence[DroppedResult]
    schedules: Sequence[BrokenSchedule]
    stuck: Sequence[StuckDependency]
    effects: PendingEffects
    differing: Sequence[DifferingSchedule]
    blocked: Sequence[BlockedWorker]
    long_runs: Sequence[LongRun]
    refused: Sequence[RefusedRows]
    of_no_day: int
    """Rows of the history that are in no day's partition, up to DEAD_MAX."""
    with_policies: str
    """Tables whose row level security is on."""
