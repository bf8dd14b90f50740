"""What `pgworkd exporter` asks the database, at a cost that does not depend on how many jobs there are.

Jobs are never counted here: their numbers are those of the last sample, which the daemons take for the whole fleet.
Nothing is locked but for reading, and all of it is granted to the role `reader`.
"""

from __future__ import annotations

ROWS_MAX = 1_000
"""Queues and schedules shown, in the order of their names: a name per job must not fill Prometheus."""
READ_ONLY = "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"
DEPTHS = """SELECT queue, due, scheduled, running, failed, blocked, dead, oldest_due_s, sample_age_s
    FROM pgworkd.queue_depths ORDER BY queue LIMIT $1"""
# `by_endpoint`: the endpoint has paused the queue, not an operator.
QUEUES = """SELECT n.queue, coalesce(q.paused_until > pgworkd.clock(), false),
        e.name IS NOT NULL AND coalesce(q.paused_until = e.paused_until
            OR q.paused_until = 'infinity' AND q.name = ANY (e.disabled_queues), false) AS by_endpoint,
        coalesce(f.workers, 0)::int, coalesce(f.slots, 0)::int
    FROM (SELECT name::text AS queue FROM pgworkd.queues UNION SELECT queue::text FROM pgworkd.known_pools()) n
    LEFT JOIN pgworkd.queues q ON q.name = n.queue
    LEFT JOIN pgworkd.endpoints e ON e.name = q.endpoint
    LEFT JOIN (SELECT p.queue::text AS queue, count(*) AS workers, sum(p.concurrency) AS slots
               FROM pgworkd.known_pools() p JOIN pgworkd.workers w
                   ON w.id = p.worker_id AND w.lost_at IS NULL AND w.lease_until > pgworkd.clock()
               GROUP BY p.queue) f ON f.queue = n.queue
    ORDER BY n.queue LIMIT $1"""
WORKERS = """SELECT CASE WHEN lost_at IS NOT NULL OR lease_until <= pgworkd.clock() THEN 'lost' ELSE state END,
        count(*)::int
    FROM pgworkd.workers WHERE kind <> 'standing' GROUP BY 1"""
ENDPOINTS = """SELECT name::text, coalesce(paused_until > pgworkd.clock(), false), disabled_at IS NOT NULL
    FROM pgworkd.endpoints ORDER BY name LIMIT $1"""
# The newest occurrence is mostly the next one; when that before it was due is known of intervals only.
SCHEDULES = """SELECT s.name::text,
        CASE WHEN s.last_occurrence <= pgworkd.clock() THEN extract(epoch FROM pgworkd.clock() - s.last_occurrence)
             WHEN s.every_s IS NOT NULL
                 THEN extract(epoch FROM pgworkd.clock() - s.last_occurrence) + s.every_s END::float8,
        greatest(extract(epoch FROM pgworkd.clock() - CASE WHEN j.run_at IS NULL AND s.error IS NOT NULL
                 THEN greatest(s.last_occurrence, s.in_force_since) ELSE j.run_at END), 0)::float8
    FROM pgworkd.schedules s
    LEFT JOIN LATERAL (SELECT o.run_at FROM pgworkd.jobs o WHERE o.schedule = s.name
                       AND o.status IN ('pending', 'failed') ORDER BY o.run_at LIMIT 1) j ON true
    WHERE s.enabled ORDER BY s.name LIMIT $1"""
# Only sessions that this role may see have a time.
OLDEST = """SELECT greatest(
            (SELECT extract(epoch FROM clock_timestamp() - min(a.xact_start)) FROM pg_stat_activity a
             WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'),
            (SELECT extract(epoch FROM clock_timestamp() - min(x.prepared)) FROM pg_prepared_xacts x
             WHERE x.database = current_database()), 0)::float8,
        (SELECT max(greatest(age(a.backend_xmin), age(a.backend_xid))) FROM pg_stat_activity a
         WHERE a.pid <> pg_backend_pid() AND (a.datname = current_database() OR a.datname IS NULL))::float8,
        (SELECT max(age(x.transaction)) FROM pg_prepared_xacts x WHERE x.database = current_database())::float8,
        (SELECT max(greatest(age(r.xmin), age(r.catalog_xmin))) FROM pg_replication_slots r)::float8"""
