"""The command: runs the requested rows and prints the table."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import asyncpg
import typer
import uvloop

from benchmarks import report
from benchmarks.bench import Bench, rows_named
from benchmarks.measure import Line
from benchmarks.processes import BenchmarkError, until_told
from benchmarks.server import Server, default_scratch, embedded

from . import claims, effects, upkeep
from .stage import SLOW_ROUNDS

ROWS = {
    "turns": claims.turns_row,
    "running": claims.running_row,
    "keyed": claims.keyed_row,
    "heartbeat": upkeep.heartbeat_row,
    "priorities": claims.priorities_row,
    "settings": upkeep.settings_row,
    "depth": upkeep.depth_row,
    "depend": effects.depend_row,
    "insert": effects.insert_row,
    "parking": claims.parking_row,
    "dependents": effects.dependents_row,
    "unblock": upkeep.unblock_row,
    "burst": effects.burst_row,
    "leftout": claims.left_out_row,
}


async def measure(bench: Bench, names: Sequence[str]) -> int:
    """Runs these rows and prints the table; returns the number of failed rows."""
    lines: list[Line] = []
    failed: dict[str, str] = {}
    await bench.server.start()
    settings = await bench.server.settings()
    try:
        for name in names:
            try:
                lines += await ROWS[name](bench)
            except (BenchmarkError, asyncpg.PostgresError) as error:
                failed[name] = str(error)
                bench.say(f"{name} FAILED: {error}")
    finally:
        await bench.server.close()
        machine = report.machine()
        title = f"pgworkd on Postgres {settings['server_version']}, {machine['cores']} cores, {machine['cpu']}"
        subtitle = (
            f"medians of {bench.rounds} in turns (slow ones: {min(SLOW_ROUNDS, bench.rounds)}), scale {bench.scale:g}"
        )
        report.show(lines, f"{title}; {subtitle}", failed, ("beside", "alone"))
    return len(failed)


def main(
    only: Annotated[str, typer.Option(metavar="ROW,...", help=f"Only these rows: {', '.join(ROWS)}.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each cost is measured.")] = 11,
    scale: Annotated[float, typer.Option(min=0.001, max=100, help="Times as large a crowd; the bars stay.")] = 1.0,
    scratch: Annotated[Path | None, typer.Option(help="For the server's data; on a disk.")] = None,
    dsn: Annotated[str | None, typer.Option(help="A superuser's address of a server that is up.")] = None,
    pg_bin: Annotated[Path | None, typer.Option(help="Run the Postgres found in this directory.")] = None,
) -> None:
    """Measure what unrelated rows cost an operation. A missed bar is only reported and no error."""
    names, where = rows_named(only, ROWS), scratch or default_scratch()
    with ExitStack() as stack:
        server = Server(dsn or stack.enter_context(embedded(where, pg_bin)))
        code = uvloop.run(until_told(measure(Bench(server, where, scale, rounds), names)))
    raise typer.Exit(code)


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(main)
    command()
