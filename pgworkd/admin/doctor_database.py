"""The queries of `pgworkd doctor` about the database, and their rows: locks, sessions, and what refuses a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Doctor(NamedTuple):
    """Facts about a database that has the schema. Times in seconds; None where this role lacks the privilege."""

    autovacuum: bool
    oldest_transaction_s: float | None
    oldest_transaction: str | None
    sees_all_sessions: bool
    workers: int
    workers_lost: int
    dead: int
    tomorrow: bool
    """Whether finished_jobs has a partition for tomorrow."""
    notify_queue: float
    """Fraction of the server's notification queue in use, 0 to 1."""


class ServerFacts(NamedTuple):
    """Facts about any server. `clock_s` is its time in seconds since the epoch."""

    version: str
    version_num: int
    read_only: bool
    clock_s: float
    standby: bool = False
    database: str = ""
    role: str = ""
    """Whom this connection is of."""


class LockWait(NamedTuple):
    """Sessions that wait for a lock on all of a table or queue of ours, and the one that they all wait for."""

    waiting: int
    waited_s: float
    """How long the first session in line has waited, in seconds."""
    tables: str
    pid: int
    """The session that holds what the others wait for; 0: a prepared transaction."""
    holder: str
    statement: str
    first_pid: int
    """The first session in line: the others wait behind it, too."""
    first: str
    """The statement of the first session in line."""


class RefusedRows(NamedTuple):
    """Rows that something refuses to have changed: how many, one of them, and the error."""

    what: str
    """The function that tried; `claim`: jobs that cannot be claimed; `settle`: that are dead, up to DEAD_MAX."""
    sqlstate: str
    rows: int
    key: str
    error: str
    queues: Sequence[str]
    """The queues of jobs that cannot be claimed, or are dead."""


class Sessions(NamedTuple):
    """The tightest limit of sessions: what it is a limit of, how many there may be, and are."""

    of: str
    most: int
    used: int


class TableSize(NamedTuple):
    """A table with its indexes, and the rows in it that vacuum is to remove; that of a history with all its days."""

    table: str
    size: float
    """In bytes."""
    dead_rows: float


class Holder(NamedTuple):
    """Who holds back vacuum: no row is removed that was deleted after this."""

    what: str
    """session, prepared transaction, or replication slot."""
    who: str
    transactions: int
    """How many transactions have begun since."""
    open_s: float | None
    """How long the transaction has been open, in seconds; None: of a slot, or not told."""


# A partition counts for its table.
TABLES = """SELECT coalesce(p.relname, c.relname)::text, sum(pg_total_relation_size(c.oid))::float8,
        sum(coalesce(pg_stat_get_dead_tuples(c.oid), 0))::float8
    FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class p ON p.oid = i.inhparent
    WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relkind = 'r' GROUP BY 1"""
HOLDERS = """SELECT h.what, h.who, h.transactions, h.open_s FROM (
        SELECT 'session' AS what, format('pid %s (%s)', a.pid, concat_ws(
                   ', ', nullif(a.application_name, ''), a.usename, nullif(a.backend_type, 'client backend'),
                   a.state)) AS who,
               greatest(age(a.backend_xmin), age(a.backend_xid)) AS transactions,
               extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS open_s
        FROM pg_stat_activity a
        WHERE a.pid <> pg_backend_pid() AND (a.datname = current_database() OR a.datname IS NULL)
        UNION ALL
        SELECT 'prepared transaction', x.gid, age(x.transaction),
               extract(epoch FROM clock_timestamp() - x.prepared)::float8
        FROM pg_prepared_xacts x WHERE x.database = current_database()
        UNION ALL
        SELECT 'replication slot', r.slot_name::text, greatest(age(r.xmin), age(r.catalog_xmin)), NULL
        FROM pg_replication_slots r) h
    WHERE h.transactions IS NOT NULL ORDER BY h.transactions DESC, h.what, h.who LIMIT 5"""
SERVER = """SELECT current_setting('server_version'), current_setting('server_version_num')::int,
    pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean,
    extract(epoch FROM clock_timestamp())::float8, pg_is_in_recovery(), current_database()::text, current_user::text"""
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
           (SELECT count(*) FROM pgworkd.workers WHERE lost_at IS NULL AND lease_until >= pgworkd.clock()
                AND kind IN ('daemon', 'remote')),
           (SELECT count(*) FROM pgworkd.workers WHERE lost_at IS NOT NULL OR lease_until < pgworkd.clock()),
           (SELECT count(*) FROM (SELECT FROM pgworkd.jobs WHERE status = 'dead' LIMIT $1) d),
           to_regclass('pgworkd.finished_jobs_' || to_char((pgworkd.clock() AT TIME ZONE 'UTC') + interval '1 day',
                                                           'YYYYMMDD')) IS NOT NULL,
           pg_notification_queue_usage()"""
# Neither reads a table of ours, which may be locked.
LOCKS = """WITH RECURSIVE waits AS MATERIALIZED (
        SELECT l.pid, coalesce(c.relname::text, 'a queue') AS what, pg_blocking_pids(l.pid) AS behind,
               coalesce(extract(epoch FROM clock_timestamp() - l.waitstart), 0)::float8 AS waited_s
        FROM pg_locks l LEFT JOIN pg_class c ON c.oid = l.relation
        WHERE NOT l.granted AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
          AND (c.relnamespace = to_regnamespace('pgworkd')
               OR l.locktype = 'advisory' AND l.classid::bigint BETWEEN 1886873444 AND 1886873448)
    ), chain AS (
        SELECT w.pid AS waiter, b.pid FROM waits w, unnest(w.behind) AS b (pid)
        UNION
        SELECT c.waiter, b.pid FROM chain c, unnest(pg_blocking_pids(c.pid)) AS b (pid)
    )
    SELECT count(DISTINCT w.pid)::int, max(w.waited_s), string_agg(DISTINCT w.what, ', '), c.pid,
           coalesce(min(concat_ws(', ', nullif(a.application_name, ''), a.usename, a.state,
                                  'in a transaction for ' || extract(epoch FROM clock_timestamp() - a.xact_start)::int
                                  || ' s')), 'a prepared transaction'),
           coalesce(min(left(a.query, 300)), ''), f.pid, coalesce(min(left(f.query, 300)), '')
    FROM chain c JOIN waits w ON w.pid = c.waiter LEFT JOIN pg_stat_activity a ON a.pid = c.pid
    CROSS JOIN LATERAL (
        SELECT w1.pid, s.query FROM waits w1 JOIN pg_stat_activity s ON s.pid = w1.pid
        WHERE c.pid = ANY (w1.behind) ORDER BY w1.waited_s DESC LIMIT 1) f
    WHERE pg_blocking_pids(c.pid) = '{}'
    GROUP BY c.pid, f.pid HAVING max(w.waited_s) > 1 ORDER BY 2 DESC LIMIT 5"""
SESSIONS = """SELECT l.of, l.most, l.used FROM (
        SELECT 'role ' || r.rolname AS of, r.rolconnlimit AS most,
               (SELECT count(*)::int FROM pg_stat_activity a WHERE a.usesysid = r.oid) AS used
        FROM pg_roles r WHERE r.rolname = session_user AND r.rolconnlimit >= 0 AND NOT r.rolsuper
        UNION ALL
        SELECT 'database ' || d.datname, d.datconnlimit,
               (SELECT count(*)::int FROM pg_stat_activity a WHERE a.datid = d.oid)
        FROM pg_database d JOIN pg_roles r ON r.rolname = session_user
        WHERE d.datname = current_database() AND d.datconnlimit >= 0 AND NOT r.rolsuper
        UNION ALL
        SELECT 'server (max_connections)', current_setting('max_connections')::int
                   - current_setting('superuser_reserved_connections')::int
                   - coalesce(current_setting('reserved_connections', true), '0')::int,
               (SELECT count(*)::int FROM pg_stat_activity a WHERE a.backend_type = 'client backend')
    ) l ORDER BY l.most - l.used LIMIT 1"""
REFUSED = """SELECT r.what, r.sqlstate, count(*)::int, min(r.key), (array_agg(r.error ORDER BY r.key))[1],
        coalesce(array_agg(DISTINCT j.queue::text) FILTER (WHERE j.queue IS NOT NULL), '{}')
    FROM pgworkd.refused_rows r LEFT JOIN pgworkd.jobs j
        ON j.id = CASE WHEN r.what = 'claim' THEN r.key::uuid END AND j.status IN ('pending', 'failed')
        AND coalesce(j.started_at < r.until, true)
    WHERE r.until > pgworkd.clock() - interval '15 min' AND (r.what <> 'claim' OR j.id IS NOT NULL)
    GROUP BY r.what, r.sqlstate
    UNION ALL
    SELECT 'settle', '', count(*)::int, min(d.id::text), (array_agg(d.error ORDER BY d.id))[1],
        array_agg(DISTINCT d.queue)
    FROM (SELECT j.id, j.error, j.queue::text FROM pgworkd.jobs j WHERE j.status = 'dead' LIMIT $1) d
    WHERE d.error LIKE 'the outcome ''%'' could not be stored: %' HAVING count(*) > 0
    ORDER BY 3 DESC, 1 LIMIT 1000"""
OF_NO_DAY = "SELECT count(*)::int FROM (SELECT FROM pgworkd.finished_jobs_other LIMIT $1) o"
POLICIES = """SELECT coalesce(string_agg(c.relname, ', ' ORDER BY c.relname), '') FROM pg_class c
    WHERE c.relnamespace = 'pgworkd'::regnamespace AND c.relrowsecurity"""
