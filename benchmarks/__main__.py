"""The command: runs the requested rows and reports on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from . import (
    batches,
    chart,
    dashboard,
    drain,
    enqueue,
    features,
    fleet,
    footprint,
    gateway,
    hogs,
    keyed,
    latency,
    one_transaction,
    pressure,
    proxy,
    push,
    report,
    rivals,
    scrape,
)
from .bench import Bench, rows_named
from .measure import Line
from .processes import BenchmarkError, until_told
from .server import Server, default_scratch, embedded

Row = Callable[[Bench], Awaitable[list[Line]]]
ROWS: dict[str, Row] = {
    "drain": drain.drain_row,
    "cost": drain.cost_row,
    "latency": latency.latency_row,
    "held": pressure.held_row,
    "backlog": pressure.backlog_row,
    "finished": pressure.finished_row,
    "keyed": keyed.keyed_row,
    "batches": batches.batches_row,
    "features": features.features_row,
    "transaction": one_transaction.transaction_row,
    "inserts": enqueue.inserts_row,
    "many": enqueue.many_row,
    "traces": enqueue.traces_row,
    "slow": fleet.slow_row,
    "memory": footprint.memory_row,
    "idle": footprint.idle_row,
    "scrape": scrape.scrape_row,
    "http": gateway.http_row,
    "waiters": gateway.waiters_row,
    "hogs": hogs.hogs_row,
    "push": push.push_row,
    "proxy": proxy.proxy_row,
    "pages": dashboard.pages_row,
    "viewers": dashboard.viewers_row,
    "retried": dashboard.retried_row,
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The command line's options."""

    rows: Sequence[str]
    rounds: int
    scale: float
    peers: bool
    scratch: Path
    json: Path | None
    svg: Path | None


async def measure(dsn: str, wanted: Wanted) -> int:
    """Runs the rows on the server at `dsn`; prints the table and writes the files. How many rows could not be measured.

    A row whose worker dies, or loses or duplicates a job, is reported as failed; the others are still measured.
    """
    server = Server(dsn)
    bench = Bench(server, wanted.scratch, wanted.scale, wanted.rounds)
    if wanted.peers:
        bench.peers = rivals.installed(wanted.scratch, bench.say)
    lines: list[Line] = []
    failed: dict[str, str] = {}
    await server.start()
    settings = await server.settings()
    try:
        for name in wanted.rows:
            try:
                lines += await ROWS[name](bench)
            except BenchmarkError as error:
                failed[name] = str(error)
                bench.say(f"{name} FAILED: {error}")
    finally:
        await server.close()
        if lines or failed:
            _report(lines, bench, wanted, settings, failed)
    return len(failed)


def _report(
    lines: Sequence[Line], bench: Bench, wanted: Wanted, settings: dict[str, str], failed: dict[str, str]
) -> None:
    machine = report.machine()
    title = f"pgworkd on Postgres {settings['server_version']}, {machine['cores']} cores, {machine['cpu']}"
    subtitle = f"{wanted.rounds} interleaved rounds, medians, scale {wanted.scale:g}"
    report.show(lines, f"{title}; {subtitle}", failed)
    about = {"settings": settings, "rounds": wanted.rounds, "scale": wanted.scale, "failed": failed}
    versions = {peer.name: peer.version for peer in bench.peers}
    found = report.document(lines, bench.rates, about, versions)
    if wanted.json is not None:
        report.write_json(wanted.json, found)
    if wanted.svg is not None:
        wanted.svg.write_text(chart.svg(title, f"{found['date'][:10]}, {subtitle}", lines, bench.rates))


def main(
    only: Annotated[str, typer.Option(metavar="ROW,...", help=f"Only these rows: {', '.join(ROWS)}.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each contender runs.")] = 3,
    scale: Annotated[float, typer.Option(min=0.001, max=100, help="Times as many jobs; the bars stay.")] = 1.0,
    peers: Annotated[bool, typer.Option("--peers", help="Install and measure other job systems too.")] = False,
    scratch: Annotated[Path | None, typer.Option(help="For the server's data and the peers; on a disk.")] = None,
    dsn: Annotated[str | None, typer.Option(help="A superuser's address of a server that is up.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all samples there.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the chart there.")] = None,
    pg_bin: Annotated[Path | None, typer.Option(help="Run the Postgres found in this directory.")] = None,
) -> None:
    """Measure pgworkd against its references. A missed bar is only reported; a lost job is an error."""
    wanted = Wanted(rows_named(only, ROWS), rounds, scale, peers, scratch or default_scratch(), json, svg)
    with ExitStack() as stack:
        code = uvloop.run(until_told(measure(dsn or stack.enter_context(embedded(wanted.scratch, pg_bin)), wanted)))
    raise typer.Exit(code)


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(main)
    command()
