"""The command bench: what this database and machine can do, measured in a scratch queue."""

from __future__ import annotations

import importlib
import math
from typing import Annotated, Any

import typer

from pgworkd.cli.common import Dsn, Json, Yes
from pgworkd.errors import UsageError

JOBS_MIN, JOBS_MAX = 100, 1_000_000
SECONDS_MIN, SECONDS_MAX = 1.0, 60.0
PAYLOAD_MIN, PAYLOAD_MAX = 50, 1024 * 1024
CONCURRENCY_MAX = 1_000


def bench(
    *,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=JOBS_MIN, max=JOBS_MAX, help="Jobs to write, all phases together.")
    ] = 20_000,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="N", min=SECONDS_MIN, max=SECONDS_MAX, help="Time limit of each phase, in seconds."
        ),
    ] = 30.0,
    payload_bytes: Annotated[
        int,
        typer.Option("--payload-bytes", metavar="N", min=PAYLOAD_MIN, max=PAYLOAD_MAX, help="Size of each payload."),
    ] = 200,
    concurrency: Annotated[
        int,
        typer.Option("--concurrency", metavar="N", min=1, max=CONCURRENCY_MAX, help="Slots of the worker."),
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
    if not math.isfinite(seconds):
        raise UsageError(f"--seconds must be a number from {SECONDS_MIN:g} to {SECONDS_MAX:g}")
    try:
        part: Any = importlib.import_module("pgworkd.bench.bench")
        phases: Any = importlib.import_module("pgworkd.bench.phases")
    except ModuleNotFoundError as error:
        raise UsageError(f"this installation has no bench: {error.msg}") from None
    if clean:
        return int(part.clean(dsn))
    return int(part.main(phases.Plan(jobs, seconds, payload_bytes, concurrency), dsn, yes=yes, json=json))
