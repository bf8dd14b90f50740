"""The boards for Grafana and the alert rules for Prometheus, as they are in the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import pgworkd.metrics
from pgworkd.core.job import OUTCOMES

FILES = Path(pgworkd.metrics.__file__).parent / "files"
PROMETHEUS: dict[str, Any] = json.loads((FILES / "grafana-prometheus.json").read_text(encoding="utf-8"))
POSTGRES: dict[str, Any] = json.loads((FILES / "grafana-postgres.json").read_text(encoding="utf-8"))
ALERTS = (FILES / "alerts.yaml").read_text(encoding="utf-8")

VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("pgworkd_jobs_finished_total", "outcome"): OUTCOMES,
    ("pgworkd_claims_total", "result"): ("jobs", "empty", "failed"),
    ("pgworkd_processes", "state"): ("wanted", "answering"),
    ("pgworkd_queue_jobs", "state"): ("due", "scheduled", "running", "failed", "blocked", "dead"),
    ("pgworkd_requests_waiting", "what"): ("claims", "others", "streams"),
    ("pgworkd_request_connections", "state"): ("used", "most"),
    ("pgworkd_queue_paused", "by"): ("operator", "endpoint"),
    ("pgworkd_workers", "state"): ("running", "blocked", "stopping", "lost"),
}
"""What a label may be, by metric and label, where it is one of a few words."""


class Rule(NamedTuple):
    """An alert rule."""

    name: str
    severity: str
    expr: str
    for_s: int
    summary: str
    when: str
    action: str


def rules() -> tuple[Rule, ...]:
    """All rules of the file."""
    (group,) = yaml.safe_load(ALERTS)["groups"]
    return tuple(
        Rule(
            each["alert"],
            each["labels"]["severity"],
            each["expr"],
            int(each["for"].removesuffix("s")),
            *(each["annotations"][name] for name in ("summary", "description", "action")),
        )
        for each in group["rules"]
    )


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels of a board that show something."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]
