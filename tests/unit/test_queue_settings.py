"""Settings of a queue: bounds, rates as text, the effective setting and its source."""

from __future__ import annotations

from typing import Any

import pytest

from pgworkd.errors import UsageError
from pgworkd.settings.queue import BOUNDS, SETTINGS, checked, effective_settings, number, rate, rate_text, unset


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bounds_are_inclusive_for_numbers_and_text(name: str) -> None:
    bounds = BOUNDS[name]
    for value in (bounds.low, bounds.high):
        assert number(name, value, "it") == value
        assert number(name, f" {value:.10g} ", "it") == value
    assert isinstance(number(name, bounds.low, "it"), int) is bounds.whole


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(
    "value", [-1, 10**10, 10**400, "nan", float("nan"), "inf", "-inf", "", "x", "1_0x", True, None, [1], "1e999"]
)
def test_out_of_bounds_and_non_numeric_values_are_rejected_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as refused:
        number(name, value, "--flag")
    assert str(refused.value).startswith("--flag ")
    assert f"give {BOUNDS[name]}" in str(refused.value)


@pytest.mark.parametrize("name", [name for name in BOUNDS if BOUNDS[name].whole])
@pytest.mark.parametrize("value", [1.5, "1.5"])
def test_counts_must_be_integers(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match="a whole number"):
        number(name, value, "it")


@pytest.mark.parametrize(
    ("text", "starts", "period_s"),
    [
        ("10/s", 10, 1), ("100/min", 100, 60), ("5/30s", 5, 30), (" 7 / 2 h ", 7, 7200), ("1/day", 1, 86_400),
        ("1000000/s", 1_000_000, 1), ("3/0.5s", 3, 0.5), ("1/250ms", 1, 0.25), ("2/5M", 2, 300),
        ("1/366d", 1, 31_622_400),
    ],
)  # fmt: skip
def test_rates_are_parsed_from_text(text: str, starts: int, period_s: float) -> None:
    assert rate("rate", text, "--rate") == {"rate": starts, "rate_period_s": period_s}
    assert rate("rate", rate_text(starts, period_s), "it") == {"rate": starts, "rate_period_s": period_s}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10", "has no period: write starts per period, as 10/s"),
        ("10/", "is not a rate"),
        ("/s", "is not a rate"),
        ("ten/s", "is not a rate"),
        ("-1/s", "is not a rate"),
        ("nan/s", "is not a rate"),
        ("1.5/s", "is not a rate"),
        ("10/fortnight", "is not a rate"),
        ("0/s", "give a whole number from 1 to 1000000"),
        ("100000000/s", "give a whole number from 1 to 1000000"),
        ("10/0s", "give a period of 0.001 s to 366 days"),
        ("10/367d", "give a period of 0.001 s to 366 days"),
    ],
)
def test_invalid_rates_are_rejected(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        rate("rate_per_key", text, "--rate-per-key")
    assert str(refused.value).startswith("--rate-per-key ")
    assert says in str(refused.value)


def test_unsetting_a_rate_also_unsets_its_period_and_burst() -> None:
    assert unset(["rate"], "--unset") == dict.fromkeys(["rate", "rate_period_s", "rate_burst"])
    assert unset(["rate-burst", " MAX-RUNNING "], "--unset") == {"rate_burst": None, "max_running": None}
    assert unset(["all"], "--unset") == dict.fromkeys([*BOUNDS, "fair", "endpoint", "serialize_scope"])
    with pytest.raises(UsageError, match="--unset 'speed': give one of concurrency, "):
        unset(["speed"], "--unset")


def test_changes_are_validated_before_they_reach_sql() -> None:
    assert checked({"concurrency": 3, "fair": None, "rate": None}) == {"concurrency": 3, "fair": None, "rate": None}
    for wrong in ({"concurrency": 0}, {"speed": 1}, {"fair": 1}, {"name": "x"}, {"updated_at": None}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            checked(wrong)


def shown(row: dict[str, Any], *code: tuple[int, str]) -> dict[str, str]:
    return {each.name: str(each) for each in effective_settings(row, code)}


def test_the_source_of_an_effective_setting_is_shown() -> None:
    assert list(shown({})) == ["concurrency", "paused", *list(SETTINGS)[1:]]
    plain = shown({}, (4, "code"))
    assert plain["concurrency"] == "4 (code)"
    assert (plain["max_running"], plain["fair"]) == ("none (default)", "no (default)")
    assert plain["backoff_s"] == "30, unless the handler declares its own backoff (code)"
    assert plain["backoff_factor"].startswith("10, unless")
    assert plain["backoff_cap_s"].startswith("1800, unless")
    row = {"concurrency": 10, "rate": 5, "rate_period_s": 30.0, "fair": True, "backoff_s": 0.5, "keep_s": 0}
    told = shown(row, (4, "code"), (4, "settings"))
    assert told["concurrency"] == "10 (row; default from code: 4)"
    assert (told["rate"], told["fair"], told["keep_s"]) == ("5/30s (row)", "yes (row)", "0 (row)")
    assert told["backoff_s"] == "0.5 (row)"
    assert shown({"concurrency": 10})["concurrency"] == "10 (row)"
    assert shown({})["concurrency"] == "none (default)"
    assert shown({}, (4, "code"), (4, "settings"))["concurrency"] == "4 (code)"
    assert shown({}, (8, "settings"))["concurrency"] == "8 (settings)"


def test_daemons_with_different_settings_are_all_listed() -> None:
    assert shown({}, (8, "code"), (4, "default"))["concurrency"] == "4 or 8 (code; daemons differ)"
    assert shown({"concurrency": 2}, (8, "code"), (4, "default"))["concurrency"] == "2 (row; default from code: 4 or 8)"
