"""A planted bug is in the copied tree, exactly once, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos import planted as chaos
from tests.kits.planting import ROOT, Planted, mutated_tree, places, run_module, verdicts
from tests.simulation import planted as simulation

BUG = Planted("no cap", "pgworkd/database/reconnect.py", "CAP_S = 2.0", "CAP_S = 9.0")


def test_the_copied_tree_contains_and_runs_the_bug(tmp_path: Path) -> None:
    tree = mutated_tree(BUG, tmp_path)
    (tree / "asked.py").write_text("from pgworkd.database import reconnect as r\nprint(r.CAP_S, r.__file__)\n")
    said = run_module(tree, "asked", timeout_s=30).stdout.split()
    assert said == ["9.0", str(tree / "pgworkd" / "database" / "reconnect.py")]
    assert BUG.old in (ROOT / BUG.file).read_text(encoding="utf-8")


@pytest.mark.parametrize("bug", [*(bug.planted for bug in chaos.BUGS), *simulation.BUGS], ids=lambda bug: bug.name)
def test_every_planted_bug_still_applies(bug: Planted) -> None:
    assert len(places(bug)) == 1


@pytest.mark.parametrize("old", ["no such text", "self"])
def test_a_text_that_does_not_occur_exactly_once_is_rejected(tmp_path: Path, old: str) -> None:
    with pytest.raises(AssertionError, match="not once"):
        mutated_tree(Planted("vague", BUG.file, old, "x"), tmp_path)


def test_the_table_counts_the_caught_bugs() -> None:
    table = verdicts([("one", True, "by a test"), ("another", False, "nothing failed")])
    assert table.splitlines() == [
        "one      caught      by a test",
        "another  NOT CAUGHT  nothing failed",
        "1 of 2 caught",
    ]
