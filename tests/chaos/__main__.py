"""python -m tests.chaos: one run and the checker's verdict. Exit code 1 if any invariant was violated."""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import anyio
import typer

from tests.chaos.checker import CHECKS
from tests.chaos.checks_jobs import losses
from tests.chaos.checks_workers import RESUMED_S_MAX, TAKEN_BACK_S_MAX
from tests.chaos.drive import Plan, run, workplace
from tests.chaos.evidence import Evidence
from tests.chaos.faults import FAULTS

PER_HOUR = {"jobs": 200_000, "faults": 1_000}


def spread(times_s: list[float]) -> str:
    """Median, 99th percentile and maximum."""
    if not times_s:
        return "none"
    times_s = sorted(times_s)
    at = [times_s[min(len(times_s) - 1, int(len(times_s) * part))] for part in (0.5, 0.99, 1.0)]
    return "{} times: p50 {:.2f} s, p99 {:.2f} s, longest {:.2f} s".format(len(times_s), *at)


def report(evidence: Evidence) -> tuple[list[str], int]:
    """The lines of the table, and the number of violations."""
    done = Counter(str(note.facts["name"]) for note in evidence.of("fault"))
    cut_short = Counter(str(note.facts["name"]) for note in evidence.of("cut_short"))
    lost = losses(evidence).looked_at
    lines = [
        f"{len(evidence.rows)} jobs, {len(evidence.runs)} runs, {lost} losses",
        f"{done.total()} faults of {len(done)} kinds:",
        "  " + ", ".join(f"{name} {count}" for name, count in sorted(done.items())),
        f"{cut_short.total()} of them cut short: {dict(cut_short)}",
        f"jobs of a daemon that is gone, taken back (bar {TAKEN_BACK_S_MAX:.1f} s): "
        + spread([note.facts["after_s"] for note in evidence.of("taken_back")]),
        f"jobs run again after Postgres returns (bar {RESUMED_S_MAX:.1f} s): "
        + spread([note.facts["after_s"] for note in evidence.of("resumed")]),
        "jobs run again after any fault: " + spread([note.facts["after_s"] for note in evidence.of("probed")]),
        "",
        f"{'looked at':>10} {'violations':>11}  check",
    ]
    total = 0
    for title, check in CHECKS.items():
        verdict = check(evidence)
        total += len(verdict.violations)
        lines.append(f"{verdict.looked_at:>10,} {len(verdict.violations):>11,}  {title}")
        lines += [f"{'':>24}! {violation}" for violation in verdict.violations[:5]]
    return [*lines, "", f"{total} violations"], total


def main(
    minutes: Annotated[float, typer.Option(help="How long faults are done.")] = 3.0,
    jobs: Annotated[int | None, typer.Option(help="5,000 up to 3 minutes, 200,000 an hour.")] = None,
    faults: Annotated[int | None, typer.Option(help="40 up to 3 minutes, 1,000 an hour.")] = None,
    daemons: int = 4,
    gateways: Annotated[int, typer.Option(help="How many the daemons work through; 0: they have the database.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Repeats the dice of another run.")] = None,
    only: Annotated[str, typer.Option(help=f"Kinds of faults, by comma: {', '.join(FAULTS)}.")] = "",
    pg_bin: Annotated[Path | None, typer.Option(help="Run on the Postgres in this bin directory.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep histories and logs here.")] = None,
) -> None:
    """Kills, freezes and disconnects daemons, applications and Postgres, and checks the history they leave behind."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    share = max(minutes / 60, 3 / 60 if minutes <= 3 else 0)
    jobs = jobs if jobs is not None else (5_000 if minutes <= 3 else int(PER_HOUR["jobs"] * share))
    faults = faults if faults is not None else (40 if minutes <= 3 else int(PER_HOUR["faults"] * share))
    kinds = tuple(filter(None, only.split(",")))
    plan = Plan(jobs, daemons, faults, minutes * 60, seed, kinds, pg_bin, gateways)
    sys.stdout.write(f"{plan}\n")
    with workplace() as temporary:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            keep.chmod(0o711)
        evidence = anyio.run(run, plan, keep or temporary, lambda text: print(text, flush=True))  # noqa: T201
        lines, violations = report(evidence)
    sys.stdout.write("\n".join(lines) + "\n")
    raise typer.Exit(1 if violations else 0)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
