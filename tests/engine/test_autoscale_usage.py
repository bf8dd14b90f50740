"""Wrong options of `pgworkd autoscale`: one line with the flag and a remedy, exit code 2, nothing started."""

from __future__ import annotations

import sys

import pytest

from pgworkd.cli import autoscale
from tests.kits.cli import clean, run_bare

__all__ = ["clean"]  # a fixture

GOOD = {"--queue": "q", "--min": "1", "--max": "3", "--up-at": "5", "--down-at": "1"}
COMMAND = ("--", sys.executable)


def flags(**changes: str) -> list[str]:
    named = {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in (GOOD | named).items()]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ([*flags(min="4"), *COMMAND], "--min 4 is more than --max 3: lower --min or raise --max"),
        ([*flags(down_at="5"), *COMMAND], "--down-at 5 is not below --up-at 5: lower --down-at or raise --up-at"),
        ([*flags(min="0"), *COMMAND], "--min is 0: give 1 to 256"),
        ([*flags(max="257"), *COMMAND], "--max is 257: give 1 to 256"),
        ([*flags(max="0"), *COMMAND], "--max is 0: give 1 to 256"),
        ([*flags(step="0"), *COMMAND], "--step is 0: give 1 to 256"),
        ([*flags(step="-1"), *COMMAND], "--step is -1: give 1 to 256"),
        ([*flags(up_at="0"), *COMMAND], "--up-at is 0: give 1 to 1000000000"),
        ([*flags(down_at="-1"), *COMMAND], "--down-at is -1: give 0 to 1000000000"),
        ([*flags(cooldown_s="-1"), *COMMAND], "--cooldown-s is -1: give 0 to 86400 seconds"),
        ([*flags(cooldown_s="nan"), *COMMAND], "--cooldown-s 'nan': give seconds, or a duration such as 90s"),
        ([*flags(every_s="0.01"), *COMMAND], "--every-s is 0.01: give 0.1 to 86400 seconds"),
        ([*flags(stop_timeout_s="inf"), *COMMAND], "--stop-timeout-s 'inf': give seconds, or a duration such as 90s"),
        ([*flags(cooldown_s="30 x"), *COMMAND], "--cooldown-s '30 x': give seconds, or a duration such as 90s"),
        ([*flags(max="many"), *COMMAND], "Invalid value for '--max'"),
        ([*flags(queue=""), *COMMAND], "--queue: give 1 to 200 printable characters"),
        ([*flags(queue="q" * 201), *COMMAND], "--queue: give 1 to 200 printable characters"),
        ([*flags(queue="a\nb"), *COMMAND], "--queue: give 1 to 200 printable characters"),
        (flags()[1:], "Missing option '--queue'"),
        (flags(), "no command given: add one, as in -- pgworkd run --queue NAME"),
        ([*flags(), "--", "nosuchprogram"], "command 'nosuchprogram': no such program on the PATH"),
        ([*flags(), *COMMAND], "no database given: set PGWORKD_DSN, or pass --dsn"),
    ],
)
def test_wrong_options_are_refused(args: list[str], line: str, clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscale, "_run", None)  # whatever gets this far has not been refused
    result = run_bare("autoscale", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"pgworkd: {line}")
    assert result.stderr.count("\n") == 1
