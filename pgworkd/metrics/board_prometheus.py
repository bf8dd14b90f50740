"""The board that asks Prometheus: every metric of the table is on it."""

from __future__ import annotations

from typing import Any

from pgworkd.metrics.boards import Board, Panel, Query, Row
from pgworkd.metrics.promql import chosen, gauge, mean, quantile, rate, rise

EVERYTHING = "(?s:.*)"
"""What Grafana puts in for All. (In `.*` the dot is no newline, which a queue's name may hold.)"""
_DEPTH, _WAIT, _RUN = "pgworkd_queue_jobs", "pgworkd_job_wait_seconds", "pgworkd_job_run_seconds"
_FINISHED, _RUNNING, _LATE = "pgworkd_jobs_finished_total", "pgworkd_jobs_running", "pgworkd_schedule_late_seconds"


def _stat(title: str, description: str, expr: str, *, unit: str = "short", alarm_at: float | None = 1) -> Panel:
    return Panel(title, description, unit, (Query(expr),), "stat", alarm_at)


def _graph(title: str, description: str, unit: str, *queries: tuple[str, str]) -> Panel:
    return Panel(title, description, unit, tuple(Query(*each) for each in queries))


def _count(expr: str) -> str:
    """How many series; 0 rather than nothing."""
    return f"count({expr}) or vector(0)"


_UNSERVED = (
    f"{gauge('max', _DEPTH, 'queue', state='due')} > 0 unless {gauge('max', 'pgworkd_queue_workers', 'queue')} > 0"
)
_ENDED = f"sum by (queue) (increase({chosen(_FINISHED, by=('job', 'queue'))}[10m]))"  # of whatever kind
_STALLED = (
    f"{gauge('sum', _RUNNING, 'queue')} > 0 and sum by (queue) ({chosen(_RUNNING)} offset 10m) > 0 unless {_ENDED} > 0"
)

_ATTENTION = Row(
    "What needs attention",
    (
        _stat(
            "Oldest due job",
            "How long the job that waits longest has been due.",
            gauge("max", "pgworkd_queue_oldest_due_seconds"),
            unit="s",
            alarm_at=60,
        ),
        _stat("Queues stalled", "Handlers run, and none has ended for 10 minutes.", _count(_STALLED)),
        _stat("Without a worker", "Jobs are due and no live worker serves the queue.", _count(_UNSERVED)),
        _stat("Dead jobs", "Jobs that need a decision.", f"sum({gauge('max', _DEPTH, 'queue', state='dead')})"),
        _stat(
            "Jobs lost, last hour",
            "Jobs taken back from lost workers.",
            f"{rise('pgworkd_jobs_rescued_total', '1h')} or vector(0)",
        ),
        _stat("Database", "1: every process reaches it.", gauge("min", "pgworkd_database_up"), alarm_at=0),
        _stat("Schedules late", "Their next occurrence has been due for 5 min.", _count(f"{chosen(_LATE)} > 300")),
        _stat(
            "Queues paused",
            "They run nothing until resumed.",
            f"sum({gauge('max', 'pgworkd_queue_paused', 'queue')}) or vector(0)",
        ),
    ),
)
_THROUGHPUT = Row(
    "Throughput",
    (
        _graph(
            "Started by queue",
            "Handlers called.",
            "ops",
            (rate("pgworkd_jobs_started_total", "queue"), "{{queue}}"),
        ),
        _graph("Ended by queue", "Attempts that ended, however.", "ops", (rate(_FINISHED, "queue"), "{{queue}}")),
        _graph("Ended by outcome", "Of the chosen queues.", "ops", (rate(_FINISHED, "outcome"), "{{outcome}}")),
        _graph(
            "Completed by kind",
            "Only completed attempts.",
            "ops",
            (rate(_FINISHED, "queue", "kind", outcome="completed"), "{{queue}} {{kind}}"),
        ),
        _graph(
            "Failed by kind",
            "failed: to be retried.",
            "ops",
            (rate(_FINISHED, "queue", "kind", outcome="failed"), "{{queue}} {{kind}}"),
        ),
        _graph(
            "Died by kind",
            "dead: the budget of attempts is used up.",
            "ops",
            (rate(_FINISHED, "queue", "kind", outcome="dead"), "{{queue}} {{kind}}"),
        ),
    ),
)
_DURATIONS = Row(
    "Waiting and running",
    (
        _graph(
            "Wait",
            "From due to the call of the handler: median and 95th percentile.",
            "s",
            (quantile(0.5, _WAIT, "queue"), "{{queue}} p50"),
            (quantile(0.95, _WAIT, "queue"), "{{queue}} p95"),
        ),
        _graph(
            "Run",
            "From the call of the handler to its end: median and 95th percentile.",
            "s",
            (quantile(0.5, _RUN, "queue"), "{{queue}} p50"),
            (quantile(0.95, _RUN, "queue"), "{{queue}} p95"),
        ),
        _graph(
            "Run by kind",
            "95th percentile.",
            "s",
            (quantile(0.95, _RUN, "queue", "kind"), "{{queue}} {{kind}}"),
        ),
    ),
)
_BACKLOG = Row(
    "Backlog",
    (
        _graph("Due", "Could run now.", "short", (gauge("max", _DEPTH, "queue", state="due"), "{{queue}}")),
        _graph(
            "Oldest due",
            "How long the oldest due job of each queue waits.",
            "s",
            (gauge("max", "pgworkd_queue_oldest_due_seconds", "queue"), "{{queue}}"),
        ),
        _graph(
            "By state",
            "scheduled: due later; failed: waits for a retry; blocked: waits for other jobs; dead: for a decision.",
            "short",
            (f"sum by (state) ({gauge('max', _DEPTH, 'queue', 'state')})", "{{state}}"),
        ),
    ),
)
_OCCUPANCY = Row(
    "Running and slots",
    (
        _graph(
            "Running and slots",
            "Slots: concurrency in effect, of all processes together.",
            "short",
            (gauge("sum", _RUNNING, "queue"), "{{queue}} running"),
            (gauge("sum", "pgworkd_slots", "queue"), "{{queue}} slots"),
        ),
        _graph(
            "Busy share",
            "Running of slots. At 100% with nothing ending, the queue is stalled.",
            "percentunit",
            (f"{gauge('sum', _RUNNING, 'queue')} / {gauge('sum', 'pgworkd_slots', 'queue')}", "{{queue}}"),
        ),
        _graph(
            "Workers and slots by queue",
            "With a live lease, as the database has them.",
            "short",
            (gauge("max", "pgworkd_queue_workers", "queue"), "{{queue}} workers"),
            (gauge("max", "pgworkd_queue_slots", "queue"), "{{queue}} slots"),
        ),
    ),
)
_DATABASE_CALLS = Row(
    "Claims and settles",
    (
        _graph(
            "Claims by result",
            "jobs: some were claimed; empty: none was due; failed: the database did not answer.",
            "ops",
            (rate("pgworkd_claims_total", "result"), "{{result}}"),
        ),
        _graph(
            "Claim and settle",
            "How long calls of the database take.",
            "s",
            (quantile(0.5, "pgworkd_claim_seconds"), "claim p50"),
            (quantile(0.95, "pgworkd_claim_seconds"), "claim p95"),
            (quantile(0.5, "pgworkd_settle_seconds"), "settle p50"),
            (quantile(0.95, "pgworkd_settle_seconds"), "settle p95"),
        ),
        _graph(
            "Wake",
            "From a notification to the answer of the claim after it.",
            "s",
            (quantile(0.5, "pgworkd_wake_seconds"), "p50"),
            (quantile(0.95, "pgworkd_wake_seconds"), "p95"),
        ),
    ),
)
_LOSSES = Row(
    "Losses and leases",
    (
        _graph(
            "Lost, rescued, fenced",
            "rescued: taken back from lost workers; lost: ended too late to be stored; fenced: a process cancelled its"
            " jobs, as it could not renew its lease.",
            "short",
            (rise("pgworkd_jobs_rescued_total", "5m", "queue"), "{{queue}} rescued"),
            (rise("pgworkd_jobs_lost_total", "5m", "queue"), "{{queue}} lost"),
            (rise("pgworkd_lease_fences_total", "5m", "instance"), "{{instance}} fenced"),
        ),
        _graph(
            "Lease remaining",
            "Until the lease expires unless renewed; loop lag: how long the event loop has been blocked.",
            "s",
            (gauge("min", "pgworkd_lease_remaining_seconds", "instance"), "{{instance}}"),
            (gauge("max", "pgworkd_loop_lag_seconds", "instance"), "{{instance}} loop lag"),
        ),
        _graph(
            "Database and notifications",
            "1: the lease was renewed; 1: notifications arrive, 0: pools only poll.",
            "short",
            (gauge("min", "pgworkd_database_up", "instance"), "{{instance}} database"),
            (gauge("min", "pgworkd_listening", "instance"), "{{instance}} listening"),
        ),
    ),
)
_MAINTENANCE = Row(
    "Maintenance",
    (
        _graph("Mean duration by task", "", "s", (mean("pgworkd_maintenance_seconds", "task"), "{{task}}")),
        _graph(
            "Runs by task",
            "",
            "ops",
            (rate("pgworkd_maintenance_seconds", "task", suffix="_count"), "{{task}}"),
        ),
        _graph(
            "Age of the last sample",
            "Rises where no daemon counts the queues: the numbers above are then old.",
            "s",
            (gauge("max", "pgworkd_sample_age_seconds"), "sample"),
        ),
    ),
)
_DATABASE = Row(
    "Database",
    (
        _graph(
            "Oldest snapshot",
            "The oldest open transaction holds back vacuum: tables grow and claims slow down while it rises.",
            "s",
            (gauge("max", "pgworkd_oldest_snapshot_seconds"), "oldest"),
        ),
        _graph(
            "Vacuum held back",
            "By how many transactions, and by what: sessions, prepared transactions or replication slots.",
            "short",
            (gauge("max", "pgworkd_oldest_snapshot_transactions", "by"), "{{by}}"),
        ),
        _graph("Size of tables", "With indexes.", "bytes", (gauge("max", "pgworkd_table_bytes", "table"), "{{table}}")),
        _graph(
            "Dead rows",
            "As the server estimates.",
            "short",
            (gauge("max", "pgworkd_table_dead_rows", "table"), "{{table}}"),
        ),
    ),
)
_SCHEDULES = Row(
    "Schedules",
    (
        _graph(
            "Late",
            "How long the next occurrence has been due.",
            "s",
            (gauge("max", _LATE, "schedule"), "{{schedule}}"),
        ),
        _graph(
            "Since the last occurrence",
            "A schedule that follows its rule makes a saw.",
            "s",
            (gauge("max", "pgworkd_schedule_last_seconds", "schedule"), "{{schedule}}"),
        ),
    ),
)
_WORKERS = Row(
    "Workers",
    (
        _graph("By state", "", "short", (gauge("max", "pgworkd_workers", "state"), "{{state}}")),
        _graph(
            "Processes",
            "Of the hosts' supervisors: wanted, and answering.",
            "short",
            (gauge("sum", "pgworkd_processes", "state"), "{{state}}"),
        ),
        _graph(
            "Processes by version",
            "",
            "short",
            (gauge("sum", "pgworkd_build_info", "version", "python"), "pgworkd {{version}}, Python {{python}}"),
        ),
        _graph(
            "Exporter",
            "1: the database answered the exporter's last scrape.",
            "short",
            (gauge("min", "pgworkd_scrape_up", "instance"), "{{instance}}"),
        ),
    ),
)


def _labels(name: str, label: str, query: str) -> dict[str, Any]:
    text = f"label_values({query}, {label})"
    asked = {"query": text, "refId": label}
    return {"name": label, "label": name, "query": asked, "definition": text, "allValue": EVERYTHING}


_IN_JOB = "job=~`${job:regex}`"
BOARD = Board(
    uid="pgworkd",
    title="pgworkd",
    description="Queues, workers and the database of pgworkd, from Prometheus.",
    source="prometheus",
    variables=(
        _labels("Job", "job", '{__name__=~"pgworkd_build_info|pgworkd_scrape_up"}'),
        _labels("Queue", "queue", f'{{__name__=~"pgworkd_slots|pgworkd_queue_jobs", {_IN_JOB}}}'),
        _labels("Kind", "kind", f"pgworkd_jobs_started_total{{{_IN_JOB}, queue=~`${{queue:regex}}`}}"),
    ),
    rows=(
        *(_ATTENTION, _THROUGHPUT, _DURATIONS, _BACKLOG, _OCCUPANCY, _DATABASE_CALLS, _LOSSES, _MAINTENANCE),
        *(_DATABASE, _SCHEDULES, _WORKERS),
    ),
)
