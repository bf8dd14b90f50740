"""The command bench: what this database and machine can do, measured in a scratch queue."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from pgworkd.cli.common import Dsn, Json, Yes, duration
from pgworkd.errors import UsageError

RANGES = {"jobs": (100, 1_000_000), "seconds": (1, 50), "payload-bytes": (50, 1024 * 1024), "concurrency": (1, 1_000)}
"""The accepted values of each option, both ends included. The time of all phases is bounded, because a worker that is
up for long, and alone, disables the schedules that other daemons would declare."""


def bench(
    *,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", help="Jobs to write, all phases together: 100 to 1,000,000.")
    ] = 20_000,
    seconds: Annotated[float, duration("--seconds", text="Time limit of each phase: 1 to 50 s.")] = 30.0,
    payload_bytes: Annotated[
        int, typer.Option("--payload-bytes", metavar="N", help="Size of each payload: 50 to 1,048,576.")
    ] = 200,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", help="Slots of the worker: 1 to 1,000.")
    ] = 10,
    clean: Annotated[
        bool, typer.Option("--clean", help="Only remove what runs that were killed have left; measure nothing.")
    ] = False,
    yes: Yes = False,
    json: Json = False,
    dsn: Dsn = None,
) -> int:
    """Measure enqueue, drain and latency of your own database and machine, and say what limits them.

    It writes jobs to a scratch queue, runs them in this process, and removes them at the end, also after Ctrl-C.
    """
    for name, value in zip(RANGES, (jobs, seconds, payload_bytes, concurrency), strict=True):
        low, high = RANGES[name]
        if not low <= value <= high:  # true of NaN, too
            raise UsageError(f"--{name} {value}: give a number from {low:,} to {high:,}")
    try:
        part: Any = importlib.import_module("pgworkd.bench.bench")
        phases: Any = importlib.import_module("pgworkd.bench.phases")
    except ModuleNotFoundError as error:
        raise UsageError(f"this installation has no bench: {error.msg}") from None
    if clean:
        return int(part.clean(dsn))
    return int(part.main(phases.Plan(jobs, seconds, payload_bytes, concurrency), dsn, yes=yes, json=json))
