"""The tables of slow tests and of those that run alone name what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lanes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("start", sorted({*lanes.SLOW, *lanes.ALONE}))
def test_what_a_table_names_is_there(start: str) -> None:
    file, _, function = start.partition("::")
    found = [*ROOT.glob(file if file.endswith((".py", "/")) else f"{file}*.py")]
    assert found, "moved or renamed? then the table goes with it"
    assert not function or f"def {function.partition('[')[0]}" in found[0].read_text(encoding="utf-8")
