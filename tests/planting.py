"""Bugs planted on purpose: a copy of the tree in which one exact text is another, for checkers to prove themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("pgworkd", "tests", "systemd", "schema.sql", "pyproject.toml", "README.md", "docs", "LICENSE")


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug: in `file` (relative to the root of the project), `new` stands where `old` stood."""

    name: str
    file: str
    old: str
    new: str


def mutated_tree(planted: Planted, into: Path) -> Path:
    """Copies the project into `into` and plants the bug there; returns `into`.

    Raises AssertionError unless the old text occurs exactly once: a bug that is planted nowhere, or in two places,
    proves nothing.
    """
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, into / name)
    target = into / planted.file
    text = target.read_text(encoding="utf-8")
    found = text.count(planted.old)
    assert found == 1, f"{planted.name}: {planted.old!r} occurs {found} times in {planted.file}, not once"
    target.write_text(text.replace(planted.old, planted.new), encoding="utf-8")
    return into


def run_module(tree: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """`python -m` with these arguments, in that tree and with its code.

    Raises TimeoutExpired when it takes longer than `timeout_s`.
    """
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def verdicts(rows: Sequence[tuple[str, bool, str]]) -> str:
    """A table of bugs: name, whether it was caught, and by what (or what was seen instead)."""
    width = max(len(name) for name, _, _ in rows)
    lines = [f"{name:{width}}  {'caught' if caught else 'NOT CAUGHT':10}  {how}" for name, caught, how in rows]
    return "\n".join([*lines, f"{sum(caught for _, caught, _ in rows)} of {len(rows)} caught"])
