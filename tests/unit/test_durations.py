"""A length of time may have a unit wherever seconds may be written: in flags, the environment, the file."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgworkd.cli.common import span_or_instant
from pgworkd.core.durations import UNITS_S, seconds_of
from pgworkd.errors import UsageError
from pgworkd.settings.config import Settings, load
from pgworkd.settings.faults import is_duration
from pgworkd.settings.queue import BOUNDS, number
from tests.kits.cli import COMMAND, clean, run_bare

__all__ = ["clean"]

LENGTHS = {
    "90": 90.0,
    "0": 0.0,
    "1.5": 1.5,
    "1e2": 100.0,
    "-3": -3.0,
    " 7 ": 7.0,
    "90s": 90.0,
    "10m": 600.0,
    "1h": 3600.0,
    "7d": 604_800.0,
    "250ms": 0.25,
    "1.5h": 5400.0,
    "2 h": 7200.0,
    "1h30m": 5400.0,
    "1h 30m 5s": 5405.0,
    "30min": 1800.0,
    "5 Minutes": 300.0,
    "2 DAYS": 172_800.0,
}


@pytest.mark.parametrize(("text", "seconds"), LENGTHS.items())
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", " ", "h", "-1h", "1y", "soon", "1h30", "nan", "inf", "1e999", "1,5h", "10 m x", "m10", "1M6"]
)
def test_other_texts_are_none(text: str) -> None:
    assert seconds_of(text) is None


@given(st.floats(0, 1e6), st.sampled_from(sorted(UNITS_S)))
def test_a_number_with_a_unit_is_that_many(count: float, unit: str) -> None:
    found = seconds_of(f"{count:.6f}{unit}")
    assert found is not None
    assert math.isclose(found, round(count, 6) * UNITS_S[unit], rel_tol=1e-9, abs_tol=1e-9)


@given(st.text())
def test_any_text_is_a_finite_number_or_none(text: str) -> None:
    found = seconds_of(text)
    assert found is None or math.isfinite(found)


def test_a_length_or_an_instant() -> None:
    assert span_or_instant("90", "--x") == (90, None)
    assert span_or_instant("2h", "--x") == (7200, None)
    assert str(span_or_instant("2027-01-31T07:00:00Z", "--x")[1]) == "2027-01-31 07:00:00+00:00"
    with pytest.raises(UsageError, match=r"--x 'soon': give an instant like .*, or a length of time like 2h"):
        span_or_instant("soon", "--x")


# Flags.

OTHERS = {"--for", "--since", "--seconds"}
"""Flags for a length of time whose name does not end in its unit."""


def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str, Any]]:
    """(command, flag, option) of each flag for a length of time."""
    for option in command.params:
        for flag in option.opts:
            if (flag.endswith("-s") and flag.startswith("--")) or flag in OTHERS:
                yield " ".join(path), flag, option
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, (*path, name))


FLAGS = list(options(COMMAND))


def test_there_are_flags_for_lengths_of_time() -> None:
    assert len({flag for _, flag, _ in FLAGS}) > 15


@pytest.mark.parametrize(("command", "flag", "option"), FLAGS, ids=[f"{command} {flag}" for command, flag, _ in FLAGS])
def test_every_flag_for_a_length_of_time_takes_a_unit(command: str, flag: str, option: Any) -> None:
    assert option.metavar == "DURATION"
    context = COMMAND.make_context("pgworkd", [], resilient_parsing=True)
    taken = {text: option.process_value(context, text) for text in ("60", "1m", "60s")}
    if isinstance(taken["60"], str):  # the settings, of the process or of a queue, parse it: see below
        name = flag.removeprefix("--").replace("-", "_")
        assert name in Settings.model_fields or name in BOUNDS
    else:
        assert set(taken.values()) == {60}


@pytest.mark.parametrize("text", ["soon", "", "1y"])
@pytest.mark.parametrize(
    "command",
    [
        ("enqueue", "q", "--delay-s"),
        ("queues", "pause", "q", "--for"),
        ("dead", "--since"),
        ("bench", "--seconds"),
    ],
)
def test_another_text_is_refused_with_what_to_write(command: tuple[str, ...], text: str) -> None:
    result = run_bare(*command, text)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"pgworkd: {command[-1]} {text!r}: give ")
    assert "seconds, or a duration such as 90s, 10m, 1h or 7d" in result.stderr


# Settings.

TIMES = [name for name in Settings.model_fields if is_duration(name)]


def least(name: str) -> float:
    """A value that is allowed beside the defaults of the others."""
    return {"lease_s": 60.0, "connect_timeout_s": 6.0, "command_timeout_s": 6.0, "heartbeat_s": 6.0}.get(name, 6.0)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("source", ["environment", "file", "flag"])
def test_every_setting_in_seconds_takes_a_unit(
    name: str, source: str, monkeypatch: pytest.MonkeyPatch, clean: None
) -> None:
    wanted = least(name)
    for text in (f"{wanted:g}", f"{wanted:g}s", f"{wanted / 60:g}m", f"{wanted * 1000:g} ms"):
        flags: dict[str, object] = {}
        if source == "environment":
            monkeypatch.setenv(f"PGWORKD_{name.upper()}", text)
        elif source == "file":
            Path("pgworkd.toml").write_text(f'{name} = "{text}"\n')
        else:
            flags = {name: text}
        assert getattr(load(**flags), name) == pytest.approx(wanted)


def test_numbers_that_are_no_times_take_no_unit(monkeypatch: pytest.MonkeyPatch, clean: None) -> None:
    assert "http_requests_per_s" not in TIMES
    monkeypatch.setenv("PGWORKD_HTTP_REQUESTS_PER_S", "10m")
    with pytest.raises(UsageError, match="http_requests_per_s"):
        load()


def test_a_text_that_is_no_time_is_refused_with_what_to_write(monkeypatch: pytest.MonkeyPatch, clean: None) -> None:
    monkeypatch.setenv("PGWORKD_LEASE_S", "soon")
    said = r"must be a number of seconds from 5 to 3600 \(or 30s, 10m, 1h\), not 'soon'"
    with pytest.raises(UsageError, match=said):
        load()


@pytest.mark.parametrize("name", [name for name in BOUNDS if name.endswith("_s")])
def test_every_time_of_a_queue_takes_a_unit(name: str) -> None:
    for text in ("60", "1m", "60s"):
        assert number(name, text, "--x") == 60
    with pytest.raises(UsageError, match="--x 'soon'"):
        number(name, "soon", "--x")
