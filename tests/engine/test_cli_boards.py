"""`pgworkd grafana` and `pgworkd alerts`, without a database."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.kits.boards import ALERTS, POSTGRES, PROMETHEUS, rules
from tests.kits.cli import clean, run_bare

__all__ = ["clean"]  # a fixture


@pytest.mark.parametrize(("args", "board"), [((), PROMETHEUS), (("--postgres",), POSTGRES)])
def test_grafana_prints_a_board(args: tuple[str, ...], board: object) -> None:
    result = run_bare("grafana", *args)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == board


def test_alerts_prints_the_rules() -> None:
    result = run_bare("alerts")
    assert (result.exit_code, result.stderr, result.stdout) == (0, "", ALERTS)


def test_alerts_can_be_left_out() -> None:
    printed = run_bare("alerts", "--without", "NotListening", "--without", "WorkerGone").stdout
    (group,), (whole,) = yaml.safe_load(printed)["groups"], yaml.safe_load(ALERTS)["groups"]
    assert group["rules"] == [rule for rule in whole["rules"] if rule["alert"] not in ("NotListening", "WorkerGone")]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--without", "QueueLat"), "--without 'QueueLat': no such alert: did you mean 'QueueLate'?"),
        (("--without", "x\ny"), r"--without 'x\ny': no such alert"),
        (tuple(arg for rule in rules() for arg in ("--without", rule.name)), "--without: no alert is left"),
    ],
)
def test_wrong_values_are_refused_in_one_line(args: tuple[str, ...], said: str) -> None:
    result = run_bare("alerts", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"pgworkd: {said}")
    assert result.stderr.count("\n") == 1
