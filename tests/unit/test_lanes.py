"""The patterns of slow tests, and of those that run alone, match existing tests."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests import lanes

ROOT = Path(__file__).parents[2]
FILES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("pattern", sorted({*lanes.SLOW, *lanes.ALONE}))
def test_every_pattern_in_the_tables_matches_a_test(pattern: str) -> None:
    file, py, test = pattern.partition(".py")
    found = [path for name, path in FILES.items() if fnmatchcase(name, file + py)]
    assert found, "moved or renamed? then the table has to follow"
    folder = "".join(path.read_text(encoding="utf-8") for path in found[0].parent.glob("*.py"))
    assert all(part in folder for part in test.removesuffix("]").split("*"))
