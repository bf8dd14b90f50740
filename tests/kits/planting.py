"""Planted bugs: a copy of the tree with one exact text replaced, to prove that the checkers catch the bug."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("pgworkd", "tests", "systemd", "schema.sql", "pyproject.toml", "README.md", "docs", "LICENSE")


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug: in `file` (relative to the root of the project), `new` stands where `old` stood.

    "schema.sql" means the whole schema: the bug is planted into whichever of its chapters has the text.
    """

    name: str
    file: str
    old: str
    new: str


def places(planted: Planted, root: Path = ROOT) -> list[tuple[Path, re.Match[str]]]:
    """Where the old text occurs; in SQL a space matches any white space, so that line breaks do not matter."""
    if planted.file != "schema.sql":
        files, pattern = [root / planted.file], re.escape(planted.old)
    else:
        files = [root / planted.file, *sorted((root / "pgworkd" / "sql").rglob("*.sql"))]
        pattern = r"\s+".join(re.escape(word) for word in planted.old.split())
    return [(path, found) for path in files for found in re.finditer(pattern, path.read_text(encoding="utf-8"))]


def mutated(planted: Planted, old: re.Match[str]) -> str:
    """The text in which `old` was found, with the bug; in SQL the surrounding white space is kept."""
    new = planted.new.strip() if planted.file == "schema.sql" else planted.new
    return f"{old.string[: old.start()]}{new}{old.string[old.end() :]}"


def mutated_tree(planted: Planted, into: Path) -> Path:
    """Copies the project into `into` and plants the bug there; returns `into`.

    Raises AssertionError unless the old text occurs exactly once: a bug planted nowhere, or in two places,
    proves nothing.
    """
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=shutil.ignore_patterns("node_modules"))
        else:
            shutil.copy2(source, into / name)
    found = places(planted, into)
    assert len(found) == 1, f"{planted.name}: {planted.old!r} occurs {len(found)} times in {planted.file}, not once"
    ((target, old),) = found
    target.write_text(mutated(planted, old), encoding="utf-8")
    return into


def run_module(tree: Path, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """`python -m` with these arguments, in that tree and with its code.

    Compiled modules are copied with the tree and kept: a test starts many processes. Raises TimeoutExpired when it
    takes longer than `timeout_s`.
    """
    modules = f"{ROOT / 'tests' / 'clients' / 'node_modules'}:{os.environ.get('NODE_PATH', '')}"
    environ = {**os.environ, "PYTHONPATH": str(tree), "NODE_PATH": modules}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=tree,
        env=environ,
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
