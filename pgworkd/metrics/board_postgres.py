"""The board that asks Postgres itself, as a reader, where there is no Prometheus.

All of it comes from samples, minutes and other small tables: no panel counts jobs, and none reads the history. What
only processes know (how long claims take, leases, notifications) is not there.
"""

from __future__ import annotations

from typing import Any, Literal

from pgworkd.metrics.boards import Board, Panel, Query, Row

# $__timeFilter() and the other macros are Grafana's. `= ANY (ARRAY[...])`: also without any queue this is SQL.
_OLDEST = """SELECT coalesce(max(d.oldest_due_s), 0) AS value FROM pgworkd.queue_depths d
WHERE d.queue = ANY (ARRAY[${queue:sqlstring}]::text[])"""
_STALLED = """SELECT count(*) AS value FROM pgworkd.queue_depths d
WHERE d.queue = ANY (ARRAY[${queue:sqlstring}]::text[]) AND d.running > 0
  AND EXISTS (SELECT FROM pgworkd.queue_samples s WHERE s.queue = d.queue AND s.running > 0
              AND s.at BETWEEN pgworkd.clock() - interval '12 min' AND pgworkd.clock() - interval '10 min')
  AND NOT EXISTS (SELECT FROM pgworkd.queue_minutes m
                  WHERE m.queue = d.queue AND m.at > pgworkd.clock() - interval '10 min')"""
_UNSERVED = """SELECT count(*) AS value FROM pgworkd.queue_depths d
WHERE d.queue = ANY (ARRAY[${queue:sqlstring}]::text[]) AND d.due > 0
  AND NOT EXISTS (SELECT FROM pgworkd.known_pools() p
                  JOIN pgworkd.workers w ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
                  WHERE p.queue = d.queue)"""
_DEAD = """SELECT coalesce(sum(d.dead), 0)::bigint AS value FROM pgworkd.queue_depths d
WHERE d.queue = ANY (ARRAY[${queue:sqlstring}]::text[])"""
_LOST = """SELECT count(*) AS value FROM pgworkd.workers w
WHERE w.lost_at IS NOT NULL OR w.lease_until <= pgworkd.clock()"""
_LATE = """SELECT count(*) AS value FROM pgworkd.schedules s
WHERE s.enabled AND EXISTS (SELECT FROM pgworkd.jobs j WHERE j.schedule = s.name AND j.status IN ('pending', 'failed')
                            AND j.run_at < pgworkd.clock() - interval '5 min')"""
_SAMPLE = """SELECT extract(epoch FROM pgworkd.clock() - max(s.at))::float8 AS value FROM pgworkd.samples s"""
_PAUSED = """SELECT count(*) AS value FROM pgworkd.queues q WHERE q.paused_until > pgworkd.clock()"""
_NOW = """SELECT d.queue, d.due, d.scheduled, d.running, coalesce(f.slots, 0) AS slots,
    coalesce(f.workers, 0) AS workers, d.failed, d.blocked, d.dead, d.oldest_due_s,
    coalesce(q.paused_until > pgworkd.clock(), false) AS paused
FROM pgworkd.queue_depths d LEFT JOIN pgworkd.queues q ON q.name = d.queue
LEFT JOIN (SELECT p.queue, count(*) AS workers, sum(p.concurrency) AS slots FROM pgworkd.known_pools() p
           JOIN pgworkd.workers w ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
           GROUP BY p.queue) f ON f.queue = d.queue
WHERE d.queue = ANY (ARRAY[${queue:sqlstring}]::text[]) ORDER BY d.oldest_due_s DESC NULLS LAST, d.queue"""
_ERRORS = """SELECT g.queue, g.kind, g.error_type, g.pattern, g.deaths, g.first_at, g.last_at, g.sample_id AS last_job
FROM pgworkd.error_groups g WHERE g.queue = ANY (ARRAY[${queue:sqlstring}]::text[]) ORDER BY g.last_at DESC LIMIT 20"""

# One call for each queue; a step is a point of the graph, or what statistics are summed up to.
_THROUGHPUT = """SELECT t.at AS time, u.queue AS metric, t.COLUMN::float8 / p.step_s AS value
FROM (SELECT greatest(60, $__interval_ms / 1000)::int AS step_s) p
CROSS JOIN unnest(ARRAY[${queue:sqlstring}]::text[]) u (queue)
CROSS JOIN LATERAL pgworkd.throughput($__timeFrom()::timestamptz, $__timeTo()::timestamptz, p.step_s, u.queue,
                                      ${kind:sqlstring}) t
ORDER BY 1, 2"""
_DURATIONS = """SELECT t.at AS time, u.queue AS metric, t.COLUMN_p50_s AS p50, t.COLUMN_p95_s AS p95
FROM (SELECT greatest(60, $__interval_ms / 1000)::int AS step_s) p
CROSS JOIN unnest(ARRAY[${queue:sqlstring}]::text[]) u (queue)
CROSS JOIN LATERAL pgworkd.throughput($__timeFrom()::timestamptz, $__timeTo()::timestamptz, p.step_s, u.queue,
                                      ${kind:sqlstring}) t
ORDER BY 1, 2"""
# A queue without a row in a sample had no live job then: 0, and no gap.
_SAMPLES = """WITH width AS (SELECT make_interval(secs => greatest(5, $__interval_ms / 1000)) AS step),
points AS (SELECT DISTINCT date_bin(w.step, a.at, 'epoch') AS time FROM pgworkd.samples a, width w
           WHERE $__timeFilter(a.at)),
found AS (SELECT date_bin(w.step, s.at, 'epoch') AS time, s.queue, max(s.COLUMN) AS value
          FROM pgworkd.queue_samples s, width w
          WHERE $__timeFilter(s.at) AND s.queue = ANY (ARRAY[${queue:sqlstring}]::text[]) GROUP BY 1, 2)
SELECT p.time, u.queue AS metric, coalesce(f.value, 0) AS value
FROM points p CROSS JOIN unnest(ARRAY[${queue:sqlstring}]::text[]) u (queue)
LEFT JOIN found f ON f.time = p.time AND f.queue = u.queue ORDER BY 1, 2"""
_STATES = """SELECT i.time, sum(i.scheduled) AS scheduled, sum(i.failed) AS failed, sum(i.blocked) AS blocked,
    sum(i.dead) AS dead
FROM (SELECT date_bin(make_interval(secs => greatest(5, $__interval_ms / 1000)), s.at, 'epoch') AS time, s.queue,
             max(s.scheduled) AS scheduled, max(s.failed) AS failed, max(s.blocked) AS blocked, max(s.dead) AS dead
      FROM pgworkd.queue_samples s WHERE $__timeFilter(s.at) AND s.queue = ANY (ARRAY[${queue:sqlstring}]::text[])
      GROUP BY 1, 2) i
GROUP BY 1 ORDER BY 1"""
_TOOK = """SELECT s.at AS time, s.took_s FROM pgworkd.samples s WHERE $__timeFilter(s.at) ORDER BY 1"""
_PUT_OFF = """SELECT count(*) AS value FROM (SELECT FROM pgworkd.pending_effects LIMIT 10000) x"""
_REFUSED = """SELECT r.what, r.key, r.sqlstate, r.error, r.times, r.first_at FROM pgworkd.refused_rows r
ORDER BY r.first_at DESC LIMIT 20"""
_SNAPSHOT = """SELECT CASE WHEN pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') THEN coalesce(greatest(
    (SELECT max(extract(epoch FROM clock_timestamp() - a.xact_start)) FROM pg_stat_activity a
     WHERE a.pid <> pg_backend_pid() AND a.datname = current_database() AND a.backend_type = 'client backend'),
    (SELECT max(extract(epoch FROM clock_timestamp() - p.prepared)) FROM pg_prepared_xacts p
     WHERE p.database = current_database())), 0)::float8 END AS value"""
_SIZES = """SELECT CASE WHEN c.relispartition THEN 'finished_jobs' ELSE c.relname END AS table,
    sum(pg_total_relation_size(c.oid))::bigint AS bytes, sum(pg_stat_get_live_tuples(c.oid))::bigint AS live_rows,
    sum(pg_stat_get_dead_tuples(c.oid))::bigint AS dead_rows,
    max(pg_stat_get_last_autovacuum_time(c.oid)) AS vacuumed_at
FROM pg_class c WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind = 'r'
GROUP BY 1 ORDER BY 2 DESC"""
_SCHEDULES = """SELECT s.name, s.queue, coalesce(s.cron, 'every ' || s.every_s || ' s') AS rule, s.enabled,
    s.last_occurrence, j.run_at AS next_at, j.status::text,
    CASE WHEN j.status IN ('pending', 'failed')
         THEN greatest(extract(epoch FROM pgworkd.clock() - j.run_at), 0)::float8 END AS late_s, s.error
FROM pgworkd.schedules s
LEFT JOIN LATERAL (SELECT o.run_at::timestamptz, o.status FROM pgworkd.jobs o
                   WHERE o.schedule = s.name AND o.status <> 'dead'
                   ORDER BY o.failures > 0, o.run_at LIMIT 1) j ON true
ORDER BY 8 DESC NULLS LAST, s.name"""
_WORKERS = """SELECT w.name, w.pid, w.version, w.state, w.running, w.started_at, w.seen_at, w.lease_until,
    array_to_string(w.queues, ', ') AS queues
FROM pgworkd.worker_stats w ORDER BY w.state <> 'lost', w.name, w.id"""


def _number(title: str, description: str, sql: str, *, unit: str = "short", alarm_at: float = 1) -> Panel:
    return Panel(title, description, unit, (Query(sql),), "stat", alarm_at)


def _graph(title: str, description: str, unit: str, sql: str, column: str = "") -> Panel:
    return Panel(title, description, unit, (Query(sql.replace("COLUMN", column)),))


def _table(title: str, description: str, sql: str) -> Panel:
    return Panel(title, description, "short", (Query(sql),), "table")


_ROWS = (
    Row(
        "What needs attention",
        (
            _number("Oldest due job", "How long it has been due.", _OLDEST, unit="s", alarm_at=60),
            _number("Queues stalled", "Handlers run, and none has ended for 10 minutes.", _STALLED),
            _number("Without a worker", "Jobs are due and no live worker serves the queue.", _UNSERVED),
            _number("Dead jobs", "Jobs that need a decision.", _DEAD),
            _number("Workers lost", "Their leases have run out.", _LOST),
            _number("Schedules late", "Their next occurrence has been due for 5 min.", _LATE),
            _number("Age of the sample", "Old: no daemon counts the queues.", _SAMPLE, unit="s", alarm_at=300),
            _number("Queues paused", "They run nothing until resumed.", _PAUSED),
            _table("Queues now", "At the last sample.", _NOW),
            _table("Errors of dead jobs", "The latest, grouped by what they have in common.", _ERRORS),
        ),
    ),
    Row(
        "Throughput",
        (
            _graph("Started by queue", "Of the attempts that ended.", "ops", _THROUGHPUT, "started"),
            _graph("Completed by queue", "", "ops", _THROUGHPUT, "completed"),
            _graph("Failed by queue", "To be retried.", "ops", _THROUGHPUT, "failed"),
            _graph("Died by queue", "The budget of attempts is used up.", "ops", _THROUGHPUT, "dead"),
            _graph("Released by queue", "Given back without a failure.", "ops", _THROUGHPUT, "released"),
        ),
    ),
    Row(
        "Waiting and running",
        (
            _graph("Wait", "From due to the call of the handler.", "s", _DURATIONS, "wait"),
            _graph("Run", "From the call of the handler to its end.", "s", _DURATIONS, "run"),
        ),
    ),
    Row(
        "Backlog",
        (
            _graph("Due", "Could run now.", "short", _SAMPLES, "due"),
            _graph("Oldest due", "How long the oldest due job waits.", "s", _SAMPLES, "oldest_due_s"),
            _graph("Running", "See also the slots in the table above.", "short", _SAMPLES, "running"),
            _graph("By state", "scheduled: due later; blocked: waits for other jobs.", "short", _STATES),
        ),
    ),
    Row(
        "Maintenance",
        (
            _graph("Duration of samples", "Of counting all jobs.", "s", _TOOK),
            _number("Effects put off", "Consequences of ended jobs, held up by a lock.", _PUT_OFF, alarm_at=10000),
            _table("Refused rows", "Rows that maintenance cannot change.", _REFUSED),
        ),
    ),
    Row(
        "Database",
        (
            _number(
                "Oldest transaction",
                "It holds back vacuum. Empty without: GRANT pg_read_all_stats TO the role of this data source.",
                _SNAPSHOT,
                unit="s",
                alarm_at=3600,
            ),
            _table("Tables", "Size in bytes, with indexes; rows as the server estimates.", _SIZES),
        ),
    ),
    Row("Schedules", (_table("Schedules", "late_s: how long the next occurrence has been due.", _SCHEDULES),)),
    Row("Workers", (_table("Workers", "lost: the lease has run out.", _WORKERS),)),
)

_QUEUES = """SELECT d.queue FROM pgworkd.queue_depths d
UNION SELECT m.queue FROM pgworkd.queue_minutes m WHERE $__timeFilter(m.at) ORDER BY 1"""
_KINDS = """SELECT DISTINCT m.kind FROM pgworkd.queue_minutes m
WHERE $__timeFilter(m.at) AND m.queue = ANY (ARRAY[${queue:sqlstring}]::text[]) ORDER BY 1"""


def _values(label: str, name: Literal["queue", "kind"], sql: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "label": label, "query": sql, "definition": sql, **more}


BOARD = Board(
    uid="pgworkd-postgres",
    title="pgworkd (Postgres)",
    description="Queues, workers and the database of pgworkd, from Postgres itself.",
    source="grafana-postgresql-datasource",
    variables=(
        _values("Queue", "queue", _QUEUES),
        _values("Kind", "kind", _KINDS, multi=False, allValue="NULL"),
    ),
    rows=_ROWS,
)
