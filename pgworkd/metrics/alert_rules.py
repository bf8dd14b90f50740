"""Alert rules for Prometheus, made from the table of metrics, and their text as YAML.

Queues are told apart by Prometheus' label `job` too: one Prometheus may watch several databases. Counters of rare
events appear with their first event, so `_grown` counts what a new series has from the start.
"""

from __future__ import annotations

import json
from typing import Literal, NamedTuple

from pgworkd.metrics.promql import fixed
from pgworkd.words.validation import counted


class Thresholds(NamedTuple):
    """When alerts fire. Names end in their unit; counts are exceeded."""

    late_s: int = 60
    stalled_min: int = 10
    no_worker_min: int = 5
    no_sample_min: int = 15
    backlog_jobs: int = 1000
    backlog_min: int = 30
    dead_jobs: int = 0
    lost_jobs: int = 0
    away_s: int = 60
    not_listening_min: int = 5
    schedule_late_s: int = 300
    snapshot_s: int = 3600
    held_transactions: int = 10_000_000
    gone_min: int = 5


class Rule(NamedTuple):
    """An alert. `when` and `action` are for the docs and, `action`, for whoever is woken up."""

    name: str
    severity: Literal["critical", "warning"]
    expr: str
    for_s: int
    """How long the expression must hold, in seconds."""
    summary: str
    """One line, with the labels of the alert."""
    when: str
    """What has happened, as a sentence."""
    action: str
    """What to do."""


_EVENTS_MIN = 15
"""How long an event, such as a death, keeps its alert up."""
_SETTLED_S = 60
"""How long most conditions must hold: a scrape that failed, or one odd value, wakes nobody."""


def rules(at: Thresholds = Thresholds()) -> tuple[Rule, ...]:  # noqa: B008 - immutable
    """All rules, for these thresholds."""
    return (*_of_queues(at), *_of_backlogs(at), *_of_events(at), *_of_the_fleet(at), *_of_the_database(at))


_PAUSED = f"max by (job, queue) ({fixed('pgworkd_queue_paused')}) == 1"


def _of_queues(at: Thresholds) -> tuple[Rule, ...]:
    oldest = f"max by (job, queue) ({fixed('pgworkd_queue_oldest_due_seconds')})"
    running, window = fixed("pgworkd_jobs_running"), f"{at.stalled_min}m"
    ended = _grown(fixed("pgworkd_jobs_finished_total"), window, "job, queue")
    return (
        Rule(
            "QueueStalled",
            "critical",
            f"sum by (job, queue) ({running}) > 0\n"
            f"and sum by (job, queue) ({running} offset {window}) > 0\n"
            f"unless {ended} > 0",
            _SETTLED_S,
            "{{ $labels.queue }}: {{ $value }} handlers run, and none has ended",
            f"Handlers of a queue run and none has ended, in any way, for {at.stalled_min} min. Slots look busy,"
            " workers alive and leases renewed all the while.",
            "They all wait for the same thing: look at what they call (an API, a lock, a disk) and whether it has a"
            " time-out. `pgworkd jobs --queue QUEUE --status running` shows which jobs they are; `pgworkd cancel ID`"
            " ends one, a restart of the workers all. If jobs of this queue may run that long, raise --stalled-min, and"
            " give handlers a timeout.",
        ),
        Rule(
            "QueueLate",
            "warning",
            f"{oldest} > {at.late_s}\nunless {_PAUSED}",
            2 * _SETTLED_S,
            "{{ $labels.queue }}: a job has been due for {{ $value | humanizeDuration }}",
            f"The oldest due job of a queue that is not paused has waited for more than {at.late_s} s.",
            "See whether it drains: `pgworkd stats --queue QUEUE`. All slots busy: add workers or raise the concurrency"
            " (`pgworkd queues set QUEUE --concurrency N`). Slots idle: `pgworkd doctor` names the limit, the key or"
            " the missing handler that keeps jobs waiting.",
        ),
    )


def _of_backlogs(at: Thresholds) -> tuple[Rule, ...]:
    due = f"max by (job, queue) ({fixed('pgworkd_queue_jobs', state='due')})"
    sample = f"max by (job) ({fixed('pgworkd_sample_age_seconds')})"
    workers = f"max by (job, queue) ({fixed('pgworkd_queue_workers')})"
    growth = f"deriv({fixed('pgworkd_queue_jobs', state='due')}[{at.backlog_min}m])"
    return (
        Rule(
            "NoWorker",
            "critical",
            f"{due} > 0\nunless {workers} > 0\nunless {_PAUSED}\nor {sample} > {60 * at.no_sample_min}",
            60 * at.no_worker_min,
            "{{ with $labels.queue }}{{ . }}: jobs are due and no worker serves it"
            "{{ else }}No worker has counted the queues: is any alive?{{ end }}",
            f"Jobs are due in a queue that is not paused, and no live worker has served it for {at.no_worker_min} min."
            f" Or no worker at all has counted the queues for {at.no_sample_min} min: what is due is unknown then.",
            "`pgworkd workers` lists who is alive and for which queues. Start the workers (`systemctl status"
            " 'pgworkd*'`, or your orchestrator); if they run, their code or --queue leaves this queue out, or its name"
            " is misspelt where jobs are inserted.",
        ),
        Rule(
            "BacklogGrows",
            "warning",
            f"{due} > {at.backlog_jobs}\n"
            f"and max by (job, queue) ({growth}) * {60 * at.backlog_min} > 0.1 * {due}\n"
            f"unless {_PAUSED}",
            10 * _SETTLED_S,
            "{{ $labels.queue }}: {{ $value }} jobs are due, and more come in than are done",
            f"More than {counted(at.backlog_jobs, 'job')} due in a queue, and the number has grown by more than a tenth"
            f" within {at.backlog_min} min.",
            "Compare what comes in with what is done (the board's Throughput). Is a producer running wild, or have runs"
            " become slower? Add workers or concurrency; `pgworkd queues pause QUEUE` gains time where jobs do harm.",
        ),
    )


def _of_events(at: Thresholds) -> tuple[Rule, ...]:
    window = f"{_EVENTS_MIN}m"
    dead = _grown(fixed("pgworkd_jobs_finished_total", outcome="dead"), window, "job, queue, kind")
    rescued = _grown(fixed("pgworkd_jobs_rescued_total"), window, "job, queue")
    lost = _grown(fixed("pgworkd_jobs_lost_total"), window, "job, queue")
    fences = _grown(fixed("pgworkd_lease_fences_total"), window, "job, instance")
    return (
        Rule(
            "DeadJobs",
            "warning",
            f"{dead} > {at.dead_jobs}",
            _SETTLED_S,
            '{{ $labels.queue }}: about {{ $value | printf "%.0f" }} jobs of kind {{ $labels.kind }} have died',
            f"In one kind {_more_than(at.dead_jobs)} died within {_EVENTS_MIN} min, all attempts used up. The dead stay"
            " until someone decides.",
            "`pgworkd jobs --queue QUEUE --status dead` shows the errors. Repair the cause, then `pgworkd retry --queue"
            " QUEUE` runs them again; `pgworkd discard` gives them up.",
        ),
        Rule(
            "JobsLost",
            "warning",
            f"{rescued} > {at.lost_jobs}\nor {lost} > {at.lost_jobs}",
            _SETTLED_S,
            '{{ $labels.queue }}: about {{ $value | printf "%.0f" }} jobs were lost with their worker',
            f"Workers that had stopped renewing their lease lost {_more_than(at.lost_jobs)} of a queue, or ended it too"
            f" late to be stored, within {_EVENTS_MIN} min. What was lost runs again.",
            "A process was killed or frozen: look for the out-of-memory killer (`journalctl -k`), evictions, and"
            " blocking code in the event loop (the board's loop lag). A job that kills its worker three times ends"
            " dead, and its error says so.",
        ),
        Rule(
            "LeaseFenced",
            "warning",
            f"{fences} > 0",
            _SETTLED_S,
            "{{ $labels.instance }} could not renew its lease and cancelled what ran",
            f"A worker could not renew its lease in time within the last {_EVENTS_MIN} min, so it cancelled its own"
            " jobs before others take them. They run again.",
            "The database was away or slow, or the process was blocked: see DatabaseAway, the board's loop lag, and"
            " `lease.fenced` in the log. If short outages are usual, raise --lease-s.",
        ),
    )


def _of_the_fleet(at: Thresholds) -> tuple[Rule, ...]:
    up, scraped = fixed("pgworkd_database_up"), fixed("pgworkd_scrape_up")
    answering = fixed("pgworkd_processes", state="answering")
    info = f"last_over_time({fixed('pgworkd_build_info')}[1h])"
    return (
        Rule(
            "DatabaseAway",
            "critical",
            f"{up} == 0\nor {scraped} == 0",
            at.away_s,
            "{{ $labels.instance }} cannot reach its database",
            f"A worker or the exporter has not reached its database for {at.away_s} s. Nothing new starts; what ran too"
            " long for its lease is cancelled and runs again.",
            "Is Postgres up, and does it take connections (`pgworkd doctor` from that host)? Look at max_connections,"
            " the network, certificates and passwords. Workers come back by themselves.",
        ),
        Rule(
            "NotListening",
            "warning",
            f"{fixed('pgworkd_listening')} == 0\nand {up} == 1",
            60 * at.not_listening_min,
            "{{ $labels.instance }} gets no notifications and only polls",
            f"A worker has had no connection for notifications for {at.not_listening_min} min, though its database"
            " answers. Jobs start up to one poll interval later.",
            "Usually a pooler in transaction mode stands between: give PGWORKD_DSN a direct connection. Polling alone"
            " loses nothing; if it is wanted, leave this rule out: --without NotListening.",
        ),
        Rule(
            "WorkerGone",
            "warning",
            f"up == 0 and on (job, instance) {info} == 1\n"
            f"or {fixed('pgworkd_processes', state='wanted')} > ignoring (state) {answering}\n"
            f"or max by (job) ({fixed('pgworkd_workers', state='lost')}) > 0",
            60 * at.gone_min,
            "A worker is gone without a stop: {{ $labels.job }} {{ $labels.instance }}",
            f"For {at.gone_min} min a process that answered within the last hour has not, a host has had fewer"
            " processes than it should, or the database a worker whose lease ran out and whose jobs nobody takes over.",
            "`pgworkd workers` shows who is lost. Look at that host and its log; start it again. Lost workers stay"
            " listed while no other worker is alive to take over their jobs.",
        ),
    )


def _of_the_database(at: Thresholds) -> tuple[Rule, ...]:
    return (
        Rule(
            "ScheduleLate",
            "warning",
            f"{fixed('pgworkd_schedule_late_seconds')} > {at.schedule_late_s}",
            2 * _SETTLED_S,
            "{{ $labels.schedule }}: its run has been due for {{ $value | humanizeDuration }}",
            f"The next occurrence of a schedule has been due for more than {at.schedule_late_s} s.",
            "`pgworkd schedules` shows its status and error. Pending: its queue is late, paused or without a worker."
            " No next occurrence: the error says what is wrong with the rule.",
        ),
        Rule(
            "SnapshotHeld",
            "warning",
            f"{fixed('pgworkd_oldest_snapshot_seconds')} > {at.snapshot_s}\n"
            f"or {fixed('pgworkd_oldest_snapshot_transactions')} > {at.held_transactions}",
            5 * _SETTLED_S,
            "Vacuum is held back by {{ with $labels.by }}{{ . }}, for {{ $value | humanize }} transactions"
            "{{ else }}a transaction of {{ $value | humanizeDuration }}{{ end }}",
            f"A transaction has been open for more than {at.snapshot_s} s; or it, a prepared one or a replication slot"
            f" holds back vacuum for more than {at.held_transactions:,} transactions. Tables and indexes grow, and all"
            " queries slow down little by little.",
            "`pgworkd doctor` names the session. End it (`SELECT pg_terminate_backend(PID)`), `ROLLBACK PREPARED`, or"
            " drop the slot that nobody reads. Set idle_in_transaction_session_timeout.",
        ),
    )


def _more_than(count: int) -> str:
    return f"more than {counted(count, 'job')}" if count else "a job"


def _grown(counter: str, window: str, by: str) -> str:
    """How much a counter has risen; of a series that is new, all that it has.

    Not new is one that was there in the hour before: an outage of Prometheus must not count everything again.
    """
    new = f"({counter} unless last_over_time({counter}[1h] offset {window}))"
    return f"sum by ({by}) ({new} or increase({counter}[{window}]))"


def text(found: tuple[Rule, ...]) -> str:
    """The rules as a file that Prometheus loads (`rule_files`).

    Texts are in double quotes as in JSON, which YAML reads alike; expressions are literal blocks.
    """
    lines = ["# Made by `pgworkd alerts`; thresholds are its options.", "groups:", "  - name: pgworkd", "    rules:"]
    for rule in found:
        notes = {"summary": rule.summary, "description": rule.when, "action": rule.action}
        lines += [f"      - alert: {rule.name}", "        expr: |-"]
        lines += [f"          {line}" for line in rule.expr.splitlines()]
        lines += [f"        for: {rule.for_s}s", "        labels:", f"          severity: {rule.severity}"]
        lines += ["        annotations:", *(f"          {key}: {json.dumps(note)}" for key, note in notes.items())]
    return "\n".join(lines) + "\n"
