"""Commands that print what other programs watch a fleet with: grafana, alerts. They need no database."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pgworkd.cli.common import duration
from pgworkd.cli.output import as_json, out
from pgworkd.errors import UsageError
from pgworkd.words.validation import closest

_DAY_S, _DAY_MIN, _YEAR_MIN = 86_400, 1_440, 525_600
_JOBS_MAX = 1_000_000_000


def grafana(
    *,
    postgres: Annotated[
        bool, typer.Option("--postgres", help="A board that asks Postgres itself, as a reader, not Prometheus.")
    ] = False,
) -> None:
    """Print a dashboard for Grafana 10 or later, to be imported: pgworkd grafana > pgworkd.json"""
    from pgworkd.metrics import board_postgres, board_prometheus
    from pgworkd.metrics.boards import dashboard

    as_json(dashboard(board_postgres.BOARD if postgres else board_prometheus.BOARD))


def _threshold(flag: str, metavar: str, low: int, high: int, text: str) -> Any:
    if metavar == "DURATION":
        return duration(flag, text=text, whole=(low, high))
    return typer.Option(flag, metavar=metavar, min=low, max=high, help=text)


def alerts(
    *,
    late_s: Annotated[
        int, _threshold("--late-s", "DURATION", 1, _DAY_S, "QueueLate: how long the oldest due job has waited.")
    ] = 60,
    stalled_min: Annotated[
        int, _threshold("--stalled-min", "MINUTES", 1, _DAY_MIN, "QueueStalled: for how long nothing has ended.")
    ] = 10,
    no_worker_min: Annotated[int, _threshold("--no-worker-min", "MINUTES", 1, _DAY_MIN, "NoWorker: for how long.")] = 5,
    no_sample_min: Annotated[
        int, _threshold("--no-sample-min", "MINUTES", 1, _YEAR_MIN, "NoWorker: for how long no queue was counted.")
    ] = 15,
    backlog_jobs: Annotated[
        int, _threshold("--backlog-jobs", "N", 0, _JOBS_MAX, "BacklogGrows: more jobs than this are due.")
    ] = 1000,
    backlog_min: Annotated[
        int, _threshold("--backlog-min", "MINUTES", 5, _DAY_MIN, "BacklogGrows: the time within which they grow.")
    ] = 30,
    dead_jobs: Annotated[
        int, _threshold("--dead-jobs", "N", 0, _JOBS_MAX, "DeadJobs: more of a kind than this in 15 min.")
    ] = 0,
    lost_jobs: Annotated[
        int, _threshold("--lost-jobs", "N", 0, _JOBS_MAX, "JobsLost: more of a queue than this in 15 min.")
    ] = 0,
    away_s: Annotated[int, _threshold("--away-s", "DURATION", 0, _DAY_S, "DatabaseAway: for how long.")] = 60,
    not_listening_min: Annotated[
        int, _threshold("--not-listening-min", "MINUTES", 1, _DAY_MIN, "NotListening: for how long.")
    ] = 5,
    schedule_late_s: Annotated[
        int, _threshold("--schedule-late-s", "DURATION", 1, _DAY_S, "ScheduleLate: how late.")
    ] = 300,
    snapshot_s: Annotated[int, _threshold("--snapshot-s", "DURATION", 1, _DAY_S, "SnapshotHeld: how old.")] = 3600,
    held_transactions: Annotated[
        int, _threshold("--held-transactions", "N", 1, _JOBS_MAX, "SnapshotHeld: vacuum is held back for more.")
    ] = 10_000_000,
    gone_min: Annotated[int, _threshold("--gone-min", "MINUTES", 1, 50, "WorkerGone: for how long.")] = 5,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="NAME", help="Leave this alert out (repeatable).")
    ] = None,
) -> None:
    """Print alerting rules for Prometheus as YAML, for its rule_files: pgworkd alerts > pgworkd.rules.yml"""
    from pgworkd.metrics.alert_rules import Thresholds, rules, text

    queues = (late_s, stalled_min, no_worker_min, no_sample_min, backlog_jobs, backlog_min, dead_jobs, lost_jobs)
    found = rules(
        Thresholds(*queues, away_s, not_listening_min, schedule_late_s, snapshot_s, held_transactions, gone_min)
    )
    names = [rule.name for rule in found]
    for name in without or ():
        if name not in names:
            near = closest(name, names)
            raise UsageError(f"--without {name!r}: no such alert" + (f": did you mean {near!r}?" if near else ""))
    left = tuple(rule for rule in found if rule.name not in (without or ()))
    if not left:
        raise UsageError("--without: no alert is left")
    out(text(left).rstrip("\n"))
