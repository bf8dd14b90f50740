"""python -m benchmarks.timeline: who runs, and who waits for what, during one drain.

Every millisecond it reads from /proc how long the worker's loop, each of its sessions on the server and the server's
writers have run and have waited for a core, and from pg_stat_activity what the sessions wait for. Prints each one's
shares of the whole drain, and draws 250 ms from its middle. Linux only, and a server on this machine.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from xml.sax.saxutils import escape

import typer
import uvloop

from .bench import Bench, calm, stop_all
from .processes import until, until_told
from .server import Server, default_scratch, embedded
from .systems import ours

TICK_S, SHOWN_S, BIN_S = 0.001, 0.25, 0.002
_SESSIONS = """
    SELECT pid, coalesce(nullif(application_name, ''), backend_type), coalesce(wait_event, '')
    FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND application_name <> 'driver'
        AND (datname = current_database() OR backend_type IN ('walwriter', 'checkpointer', 'background writer'))"""
_COLOURS = {"runs": "#0969da", "waits for a core": "#d1642a"}


@dataclass(slots=True)
class Process:
    """One process: at each tick, the nanoseconds it has run and has waited for a core so far."""

    name: str
    ticks: list[tuple[float, int, int]] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)

    def shares(self, begin: float, end: float) -> tuple[float, float]:
        """The shares of a stretch of time in which it ran, and in which it waited for a core."""
        inside = [tick for tick in self.ticks if begin <= tick[0] <= end]
        if len(inside) < 2:
            return 0.0, 0.0
        (first, ran, waited), (last, ran_last, waited_last) = inside[0], inside[-1]
        return (ran_last - ran) / (last - first) / 1e9, (waited_last - waited) / (last - first) / 1e9


class Sampler(threading.Thread):
    """Reads the clocks of processes until it is told to stop."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.processes: dict[int, Process] = {}
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            for pid, process in list(self.processes.items()):
                try:
                    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
                except OSError:  # it has ended
                    continue
                process.ticks.append((time.monotonic(), int(ran), int(waited)))
            time.sleep(TICK_S)


async def trace(dsn: str, jobs: int, scratch: Path) -> tuple[list[Process], float, float]:
    """Drains so many jobs; the processes, and when the first and the last handler was called."""
    server = Server(dsn)
    await server.start()
    bench, system, sampler = Bench(server, scratch), ours(), Sampler()
    await server.template(system.template, system.make)
    async with server.database(system.template) as base, server.connected(base) as connection:
        await system.load(bench, base, jobs)
        await calm(connection, system.table)
        async with bench.fleet(system.command, base) as (programs, tallies):
            sampler.processes[programs[0].pid] = Process("the worker's loop")
            sampler.start()
            await until(lambda: tallies.first_ns() is not None, "the first handler is called", programs)
            began = time.monotonic()

            async def over() -> bool:
                for pid, name, wait in await connection.fetch(_SESSIONS):
                    sampler.processes.setdefault(pid, Process(str(name))).waits[wait or "nothing"] += 1
                return tallies.calls() >= jobs

            await until(over, "all jobs run", programs)
            ended, sampler.stopped = time.monotonic(), True
            await stop_all(programs)
    await server.close()
    return list(sampler.processes.values()), began, ended


def table(processes: list[Process], begin: float, end: float) -> str:
    """The shares of each process, and what its session waited for, by how often it was seen so."""
    rows = [f"{'':30} {'runs':>6} {'waits for a core':>17}  its session waits for"]
    for each in processes:
        runs, queued = each.shares(begin, end)
        if runs + queued > 0.005:
            seen = max(1, each.waits.total())
            waits = ", ".join(f"{wait} {count / seen:.0%}" for wait, count in each.waits.most_common(4))
            rows.append(f"{each.name[:30]:30} {runs:6.0%} {queued:17.0%}  {waits}")
    total = sum(each.shares(begin, end)[0] for each in processes)
    return "\n".join([*rows, f"{total:.2f} cores are busy with these"])


def svg(processes: list[Process], begin: float) -> str:
    """One lane per process, from `begin` for 250 ms: how much of each 2 ms it ran, and waited for a core."""
    shown = [each for each in processes if sum(each.shares(begin, begin + SHOWN_S)) > 0.02]
    bins, width, height = round(SHOWN_S / BIN_S), 6, 44
    parts = []
    for lane, process in enumerate(shown):
        bottom = 40 + lane * (height + 22) + height
        parts.append(f'<text x="10" y="{bottom - height - 4}">{escape(process.name)}</text>')
        parts.append(f'<line x1="10" x2="{10 + bins * width}" y1="{bottom}" y2="{bottom}" stroke="#9aa4af"/>')
        for number in range(bins):
            at, y = begin + number * BIN_S, float(bottom)
            shares = process.shares(at, at + 2 * BIN_S)
            for share, colour in zip(shares, _COLOURS.values(), strict=True):
                tall = share / max(1.0, sum(shares)) * height  # the kernel counts by its own ticks
                y -= tall
                if tall > 0.5:
                    x = 10 + number * width
                    parts.append(f'<rect x="{x}" y="{y:.1f}" width="{width - 1}" height="{tall:.1f}" fill="{colour}"/>')
    tall, wide = 60 + len(shown) * (height + 22), 20 + bins * width
    key = "; ".join(f'<tspan fill="{colour}">■</tspan> {what}' for what, colour in _COLOURS.items())
    head = f'<text x="10" y="16">{SHOWN_S * 1000:.0f} ms of a drain, each column {BIN_S * 1000:.0f} ms: {key}</text>'
    style = "text { font: 12px system-ui, sans-serif; fill: #59636e }"
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}">'
    return "\n".join([frame, f"<style>{style}</style>", head, *parts, "</svg>", ""])


def main(
    jobs: Annotated[int, typer.Option(min=10_000, help="How many no-op jobs.")] = 100_000,
    scratch: Annotated[Path | None, typer.Option(help="For the server's data; on a disk.")] = None,
    svg_: Annotated[Path | None, typer.Option("--svg", help="Draw the picture there.")] = None,
    pg_bin: Annotated[Path | None, typer.Option(help="Run the Postgres found in this directory.")] = None,
) -> None:
    """Show who runs, and who waits for what, during one drain."""

    async def run(dsn: str) -> int:
        processes, begin, end = await trace(dsn, jobs, folder)
        print(f"{jobs / (end - begin):,.0f} jobs/s\n{table(processes, begin, end)}")
        if svg_ is not None:
            svg_.write_text(svg(processes, (begin + end - SHOWN_S) / 2), encoding="utf-8")
        return 0

    folder = scratch or default_scratch()
    with ExitStack() as stack:
        raise typer.Exit(uvloop.run(until_told(run(stack.enter_context(embedded(folder, pg_bin))))))


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(main)
    command()
