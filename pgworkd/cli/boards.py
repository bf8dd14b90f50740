"""Commands that print files for programs that watch a fleet: grafana, alerts. They need no database."""

from __future__ import annotations

import re
from importlib import resources
from typing import Annotated

import typer

from pgworkd.cli.output import out
from pgworkd.core.validation import closest
from pgworkd.errors import UsageError

_RULE = re.compile(r"(?m)^(?=      - alert: )")
"""The text with which each rule of the file begins."""
_NAME = re.compile(r"      - alert: (\w+)")


def _file(name: str) -> str:
    return (resources.files("pgworkd.metrics") / "files" / name).read_text(encoding="utf-8").rstrip("\n")


def grafana(
    *,
    postgres: Annotated[
        bool, typer.Option("--postgres", help="A board that asks Postgres itself, as a reader, not Prometheus.")
    ] = False,
) -> None:
    """Print a dashboard for Grafana 10 or later, to be imported: pgworkd grafana > pgworkd.json"""
    out(_file("grafana-postgres.json" if postgres else "grafana-prometheus.json"))


def alerts(
    *,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="NAME", help="Leave this alert out (repeatable).")
    ] = None,
) -> None:
    """Print alerting rules for Prometheus as YAML, for its rule_files: pgworkd alerts > pgworkd.rules.yml

    Thresholds are in the file: change them there.
    """
    head, *rules = _RULE.split(_file("alerts.yaml"))
    found = {match[1]: rule for rule in rules if (match := _NAME.match(rule)) is not None}
    for name in without or ():
        if name not in found:
            near = closest(name, list(found))
            raise UsageError(f"--without {name!r}: no such alert" + (f": did you mean {near!r}?" if near else ""))
    left = [rule for name, rule in found.items() if name not in (without or ())]
    if not left:
        raise UsageError("--without: no alert is left")
    out((head + "".join(left)).rstrip("\n"))
