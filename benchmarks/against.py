"""python -m benchmarks.against CHECKOUT: this tree against another tree of pgworkd, run alternately, as ratios.

CHECKOUT is a directory with the other tree and a virtual environment `.venv` in which it is installed:

    git worktree add /tmp/before 0.1.0
    cd /tmp/before && python -m venv .venv && .venv/bin/pip install -e '.[dev]'

Each pair runs both sides on fresh databases of one server, in alternating order. CPU is that of worker and
server per job. A ratio is ours by theirs; the median over the pairs is reported: below 1 is cheaper, or faster.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from .batches import batched
from .bench import Bench
from .drain import drain
from .latency import waits
from .processes import ROOT, running
from .server import Server, default_scratch, embedded
from .systems import System, executed, filling, named, ours
from .verbs import claims_and_settles

JOBS = 50_000
_SERIALIZE = filling("'bench'", columns=", serialize_key", values=", 'key-' || i")
_SCHEMA = """
import sys
try:
    from pgworkd.database import schema
except ImportError:  # a tree from before there were folders
    from pgworkd import schema
sys.stdout.write(schema.text())
"""
_ENQUEUE = """
import asyncio, sys, time, asyncpg
from pgworkd.client import NewJob, enqueue_many
async def main():
    db = await asyncpg.connect(sys.argv[1])
    jobs = [NewJob("bench", {"number": 1000000 + n, "text": "x" * 70}) for n in range(int(sys.argv[2]))]
    began = time.perf_counter()
    await enqueue_many(db, jobs)
    print((time.perf_counter() - began) / len(jobs) * 1e6)
asyncio.run(main())
"""
Measure = Callable[[Bench, "Side"], Awaitable[float]]


class Side:
    """One of the two trees."""

    def __init__(self, name: str, root: Path, python: Path) -> None:
        self.name, self.root, self.python = name, root, python
        self._schema = ""

    def inside(self, *command: str) -> list[str]:
        """The command, run in that tree so that it imports that tree's code."""
        return ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(self.root), *command]

    async def schema(self, bench: Bench) -> str:
        """The tree's schema as SQL."""
        if not self._schema:
            log = bench.scratch / "logs" / f"schema-{self.name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            async with running(self.inside(str(self.python), "-c", _SCHEMA), {}, log) as program:
                self._schema = await program.finished()
        return self._schema

    async def worker(self, bench: Bench, system: System, more: str = "") -> System:
        """The same worker of that tree, on its schema."""
        text = await self.schema(bench)
        queue = system.command[-1]
        run = [
            str(self.python),
            "-m",
            "pgworkd.cli",
            "run",
            "--app",
            "benchmarks.handlers:app",
            "--log-level",
            "warning",
        ]

        async def make(dsn: str) -> None:
            await executed(dsn, text, more)

        return replace(
            named(system, "pgworkd"),
            template=f"{self.name}_{system.template}",
            make=make,
            command=self.inside(*run, "--log-level", "warning", "--queue", queue),
        )


def _cost(system: System, more: str = "") -> Measure:
    async def measure(bench: Bench, side: Side) -> float:
        found = await drain(bench, await side.worker(bench, system, more), bench.jobs(JOBS))
        return found.worker_us + (found.server_us or 0.0)

    return measure


def _verb(number: int) -> Measure:
    async def measure(bench: Bench, side: Side) -> float:
        return (await claims_and_settles(bench, await side.worker(bench, ours()), bench.jobs(20_000)))[number]

    return measure


async def _latency(bench: Bench, side: Side) -> float:
    return (await waits(bench, await side.worker(bench, ours(queue="latency", slots=10)), bench.jobs(300))).at(50) * 1e3


async def _many(bench: Bench, side: Side) -> float:
    system = await side.worker(bench, ours())
    await bench.server.template(system.template, system.make)
    log = bench.scratch / "logs" / "many.log"
    async with bench.server.database(system.template) as dsn:
        command = side.inside(str(side.python), "-c", _ENQUEUE, dsn, str(bench.jobs(JOBS)))
        async with running(command, {}, log) as program:
            return float(await program.finished())


ROWS: dict[str, Measure] = {
    "drain": _cost(ours()),
    "keyed": _cost(ours("serialize", insert=_SERIALIZE)),
    "batches": _cost(batched(), "SELECT pgworkd.create_batch('bench', 'bench')"),
    "claim": _verb(0),
    "settle": _verb(1),
    "latency": _latency,
    "many": _many,
}
UNITS = {
    "latency": "us, p50",
    "many": "us per job",
    "claim": "us of the server's CPU per job",
    "settle": "us of the server's CPU per job",
}


async def compare(dsn: str, other: Path, rows: Sequence[str], pairs: int, scale: float, scratch: Path) -> None:
    """Prints one line per row."""
    server = Server(dsn)
    await server.start()
    bench = Bench(server, scratch, scale, pairs)
    sides = Side("ours", ROOT, Path(sys.executable)), Side("theirs", other, other / ".venv" / "bin" / "python")
    print(f"{'row':10} {'ratio':>6} {'(range)':>14} {'ours':>9} {'theirs':>9}")
    try:
        for row in rows:
            ours_, theirs = [], []
            for number in range(pairs):
                for side in sides if number % 2 else reversed(sides):
                    (ours_ if side is sides[0] else theirs).append(await ROWS[row](bench, side))
            ratios = sorted(a / b for a, b in zip(ours_, theirs, strict=True))
            unit = UNITS.get(row, "us of CPU per job")
            print(
                f"{row:10} {statistics.median(ratios):6.3f} ({ratios[0]:.2f}..{ratios[-1]:.2f}) "
                f"{statistics.median(ours_):9.1f} {statistics.median(theirs):9.1f}  {unit}",
                flush=True,
            )
    finally:
        await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--scratch", type=Path, default=default_scratch())
    asked = parser.parse_args()
    rows = [row for row in asked.only.split(",") if row]
    if unknown := set(rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}: there are {', '.join(ROWS)}")
    with embedded(asked.scratch, None) as dsn, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(compare(dsn, asked.checkout.resolve(), rows, asked.pairs, asked.scale, asked.scratch))


if __name__ == "__main__":
    main()
