"""`pgworkd grafana` and `pgworkd alerts`, without a database."""

from __future__ import annotations

import json

import pytest

from pgworkd.metrics import board_postgres, board_prometheus
from pgworkd.metrics.alert_rules import Thresholds, rules, text
from pgworkd.metrics.boards import dashboard
from tests.kits.cli import clean, run_bare

__all__ = ["clean"]  # a fixture


def test_grafana_prints_the_board_for_prometheus() -> None:
    result = run_bare("grafana")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == dashboard(board_prometheus.BOARD)


def test_grafana_prints_the_board_for_postgres() -> None:
    result = run_bare("grafana", "--postgres")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == dashboard(board_postgres.BOARD)


def test_alerts_prints_the_rules() -> None:
    result = run_bare("alerts")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == text(rules())


@pytest.mark.parametrize("name", Thresholds._fields)
def test_each_threshold_is_an_option(name: str) -> None:
    changed = Thresholds()._replace(**{name: 37})
    assert run_bare("alerts", f"--{name.replace('_', '-')}", "37").stdout == text(rules(changed))


def test_alerts_can_be_left_out() -> None:
    printed = run_bare("alerts", "--without", "NotListening", "--without", "DeadJobs").stdout
    assert printed == text(tuple(rule for rule in rules() if rule.name not in ("NotListening", "DeadJobs")))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--late-s", "0"), "--late-s '0': give 1 to 86,400 whole seconds"),
        (("--late-s", "-1"), "--late-s '-1': give 1 to 86,400 whole seconds"),
        (("--late-s", "soon"), "--late-s 'soon': give seconds, or a duration"),
        (("--stalled-min", "99999999"), "Invalid value for '--stalled-min': must be 1440 or less, not '99999999'"),
        (("--gone-min", "60"), "Invalid value for '--gone-min': must be 50 or less, not '60'"),
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
