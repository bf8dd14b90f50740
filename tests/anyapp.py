"""python -m tests.anyapp: one generated application after the other, under faults, judged by the chaos checker.

--seed S runs the application S, and then S+1, S+2, ... until the time is up. Exit code 1, and how to replay it,
on the first violation.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Annotated

import anyio
import typer

from tests.chaos.__main__ import report
from tests.chaos.anyapp import application
from tests.chaos.drive import Plan, run, workplace
from tests.chaos.faults import FAULTS

FOR_S = 20.0
FAULTS_EACH = 6
LEFT_OUT = ("disk_full", "clock_step", "worker_clock", "notify_flood")
"""Faults that need a machine of their own, or are unrelated to the application."""


def plan_of(seed: int, for_s: float = FOR_S, faults: int = FAULTS_EACH, pg_bin: Path | None = None) -> Plan:
    """Two daemons, and the faults that the seed draws."""
    kinds = sorted(kind for kind in FAULTS if kind not in LEFT_OUT)
    drawn = tuple(random.Random(f"faults {seed}").sample(kinds, faults))  # noqa: S311 - to be repeatable
    return Plan(int(for_s * 40), 2, faults, for_s, seed, drawn, pg_bin, application=seed)


def main(
    minutes: Annotated[float, typer.Option(help="No application begins later.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="Of the first application; the next ones follow it.")] = None,
    pg_bin: Annotated[Path | None, typer.Option(help="Run on the Postgres in this bin directory.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep histories and logs of each run below this.")] = None,
) -> None:
    """Runs generated applications until the time is up, or a check is violated."""
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else seed
    until_s = time.monotonic() + minutes * 60
    played = 0
    while played == 0 or time.monotonic() < until_s:
        for queue in application(seed):
            sys.stdout.write(f"{queue}\n")
        with workplace() as temporary:
            directory = temporary
            if keep is not None:
                directory = keep / str(seed)
                directory.mkdir(parents=True)
                directory.chmod(0o711)
            evidence = anyio.run(run, plan_of(seed, pg_bin=pg_bin), directory, lambda text: print(text, flush=True))  # noqa: T201
            lines, violations = report(evidence)
        sys.stdout.write("\n".join(lines) + "\n")
        if violations:
            sys.stdout.write(f"replay it: python -m tests.anyapp --minutes 0 --seed {seed}\n")
            raise typer.Exit(1)
        played, seed = played + 1, seed + 1
    sys.stdout.write(f"{played} applications, 0 violations\n")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
