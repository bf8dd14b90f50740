"""What a run prints: its progress on a terminal, the results as a table with the verdict below, or as JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from pgworkd.bench.figures import Drain, Figures, Spread
from pgworkd.bench.verdict import BenchVerdict, fsync_ms
from pgworkd.cli.output import as_json, out, table
from pgworkd.core.validation import counted


def table_of(figures: Figures, verdict: BenchVerdict) -> None:
    """Prints the results for people."""
    bulk, drain = figures.bulk, figures.drain
    single, unsynced = figures.single, figures.single_unsynced
    table(
        ("what", "result"),
        [
            ("round trip", _percentiles(figures.round_trip)),
            ("enqueue one by one", f"{_percentiles(single)} (p50 without fsync: {unsynced.p50_ms:.2f} ms)"),
            ("enqueue in bulk", f"{bulk.per_s:,.0f} jobs/s ({counted(bulk.jobs, 'job')} in {bulk.seconds:.2f} s)"),
            (
                "drain",
                f"{drain.per_s:,.0f} jobs/s ({counted(drain.jobs, 'job')} in {drain.seconds:.2f} s{_cut(drain)})",
            ),
            ("worker CPU", f"{drain.worker_us:.1f} us per job, {drain.worker_share:.0%} of a core"),
            ("server CPU", _server(drain)),
            ("insert to handler, idle", _latency(figures.latency)),
        ],
        whole=True,
    )
    out(f"\n{verdict.sentence}")


def json_of(figures: Figures, verdict: BenchVerdict) -> None:
    """Prints the results for programs."""
    drain, held = figures.drain, figures.held
    as_json(
        {
            "round_trip": _spread(figures.round_trip),
            "enqueue_single": _spread(figures.single),
            "enqueue_single_without_fsync": _spread(figures.single_unsynced),
            "fsync_ms": round(fsync_ms(figures), 3),
            "enqueue_bulk": {
                "jobs": figures.bulk.jobs,
                "seconds": round(figures.bulk.seconds, 4),
                "jobs_per_s": round(figures.bulk.per_s, 1),
            },
            "drain": {
                "jobs": drain.jobs,
                "seconds": round(drain.seconds, 4),
                "jobs_per_s": round(drain.per_s, 1),
                "complete": drain.complete,
                "worker_us_per_job": round(drain.worker_us, 2),
                "worker_share": round(drain.worker_share, 3),
                "server_us_per_job": None if drain.server_us is None else round(drain.server_us, 2),
                "server_busiest_share": None if drain.busiest_share is None else round(drain.busiest_share, 3),
                "host_share": None if drain.host_share is None else round(drain.host_share, 3),
            },
            "latency": None if figures.latency is None else _spread(figures.latency),
            "held_transaction": None if held is None else {"who": held.who, "age_s": round(held.age_s, 1)},
            "verdict": {"drain": verdict.drain, "enqueue": verdict.enqueue, "sentence": verdict.sentence},
        }
    )


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yields what shows the progress (phase, done, total): a bar, if standard error is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _phase, _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=5) as bars:
        tasks: dict[str, Any] = {}

        def shown(phase: str, done: int, total: int) -> None:
            with contextlib.suppress(OSError, SystemExit):  # the terminal is gone: the removal must go on
                if phase not in tasks:
                    tasks[phase] = bars.add_task(phase, total=total)
                bars.update(tasks[phase], completed=done)

        yield shown


def _percentiles(spread: Spread) -> str:
    return f"p50 {spread.p50_ms:.2f} ms, p95 {spread.p95_ms:.2f} ms"


def _latency(spread: Spread | None) -> str:
    if spread is None:
        return "not measured: --seconds was too short for the backlog"
    return f"{_percentiles(spread)}, p99 {spread.p99_ms:.2f} ms"


def _cut(drain: Drain) -> str:
    return "" if drain.complete else ", cut by --seconds"


def _server(drain: Drain) -> str:
    if drain.server_us is None:
        return "not visible: the server's processes are not on this host"
    return f"{drain.server_us:.1f} us per job, its busiest session {drain.busiest_share or 0.0:.0%} of a core"


def _spread(spread: Spread) -> dict[str, float | int]:
    return {name: round(getattr(spread, name), 3) for name in ("p50_ms", "p95_ms", "p99_ms")} | {"count": spread.count}
