"""Texts agree in number: no text puts a number before a fixed plural."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pgworkd.core.validation import counted
from pgworkd.errors import UsageError, delay_seconds
from tests.kits.planting import ROOT

COUNTED = """
    job batch handler outcome worker queue pool row process attempt failure loss schedule key child daemon error
    line file embedding connection statement second minute hour day time waiter slot call one
""".split()
ALLOWED = {
    "low", "high", "most", "least", "bounds.low",  # the bounds of a range: "1 to 5 seconds"
    "status",  # "dead jobs of queue 'q'": an adjective
    "operation",  # "cannot retry jobs": a verb
}  # fmt: skip


def plural(noun: str) -> str:
    return counted(2, noun).removeprefix("2 ")


PLURALS = re.compile(rf"\s(?:running |dead |more |other )?({'|'.join(map(plural, COUNTED))})\b(?!/)")


@pytest.mark.parametrize("path", sorted((ROOT / "pgworkd").rglob("*.py")), ids=lambda path: path.stem)
def test_nouns_agree_with_their_numbers(path: Path) -> None:
    """Against '1 jobs': a value directly before a plural must come from `counted`, or be a constant, never 1."""
    wrong = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                said = ast.unparse(value.value)
                if not said.isupper() and said not in ALLOWED and PLURALS.match(str(text.value)):
                    wrong.append(f"{path.name}:{node.lineno} {{{said}}}{text.value}")
    assert wrong == []


def test_counted_uses_singular_and_plural() -> None:
    assert [counted(n, "job") for n in (0, 1, 2, 1000)] == ["0 jobs", "1 job", "2 jobs", "1,000 jobs"]
    assert counted(3, "batch") == "3 batches"


@pytest.mark.parametrize(
    ("delay", "told"),
    [
        (-1, "delay is -1: give 0 to 31622400 seconds (366 days)"),
        (99_999_999_999, "delay is 99999999999: give 0 to 31622400 seconds (366 days)"),
        (-0.5, "delay is -0.5: give 0 to 31622400 seconds (366 days)"),
        (10**400, "delay is out of bounds: give 0 to 31622400 seconds (366 days)"),
    ],
    ids=str,
)
def test_an_out_of_bounds_delay_is_named_in_its_error(delay: float, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        delay_seconds(delay, "delay")
    assert str(caught.value) == told
