"""The context of every row, and starting the workers that it measures."""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import typer

from .bare import DSN
from .measure import Rates
from .processes import BenchmarkError, Program, running
from .server import Server
from .tally import ENVIRONMENT, Tallies

if TYPE_CHECKING:
    from .systems import System

PGWORKD = str(Path(sys.executable).with_name("pgworkd"))
"""The console script, as users run it."""


@dataclass(slots=True)
class Bench:
    """One run of the benchmarks. `scale` changes the numbers of jobs, never the bars."""

    server: Server
    scratch: Path
    scale: float = 1.0
    rounds: int = 3
    peers: Sequence[System] = ()
    say: Callable[[str], None] = print
    rates: list[Rates] = field(default_factory=list)
    """Results of the rows for the chart."""
    kept: dict[str, Any] = field(default_factory=dict)
    """Measurements of one row that another may reuse."""
    _numbers: Any = field(default_factory=lambda: itertools.count(1))

    def jobs(self, full: int, least: int = 100) -> int:
        """A number of jobs, scaled, as a multiple of 100."""
        return max(least, round(full * self.scale / 100) * 100)

    def seconds(self, full: float, least: float) -> float:
        """A length of time, shortened by a scale below 1 but never stretched."""
        return max(least, full * min(1.0, self.scale))

    def template(self, name: str) -> str:
        """The name of a template of this run's size."""
        return f"{name}_{self.scale:g}".replace(".", "_")

    @asynccontextmanager
    async def fleet(
        self, command: Sequence[str], dsn: str, *, count: int = 1, environ: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[list[Program], Tallies]]:
        """`count` worker processes on a database, and their handlers' counters. Killed at the end."""
        directory = Path(tempfile.mkdtemp(prefix="pgworkd-tally-"))
        variables = {"PGWORKD_DSN": dsn, DSN: dsn, ENVIRONMENT: str(directory), **(environ or {})}
        logs = self.scratch / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        try:
            async with _all_running(command, variables, logs, count, self._numbers) as programs:
                yield programs, Tallies(directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def _all_running(
    command: Sequence[str], environ: Mapping[str, str], logs: Path, count: int, numbers: Any
) -> AsyncIterator[list[Program]]:
    if count == 0:
        yield []
        return
    log = logs / f"{next(numbers)}.log"
    async with (
        running(command, environ, log) as first,
        _all_running(command, environ, logs, count - 1, numbers) as more,
    ):
        yield [first, *more]


def rows_named(only: str, rows: Iterable[str]) -> list[str]:
    """The rows that the option --only names, in their order; all if it names none. Raises typer.BadParameter."""
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := set(names).difference(rows):
        raise typer.BadParameter(f"no such row: {', '.join(sorted(unknown))}; there are {', '.join(rows)}")
    return [name for name in rows if name in names or not names]


def daemon(*queues: str, app: str = "app", module: str = "benchmarks.handlers") -> list[str]:
    """The command of our own worker. A queue is `name` or `name=slots`; none means all of the app's."""
    command = [PGWORKD, "run", "--app", f"{module}:{app}", "--log-level", "warning"]
    return command + [word for queue in queues for word in ("--queue", queue)]


async def stop_all(programs: Sequence[Program]) -> None:
    """Stops our daemons as systemd would; an unclean stop is an error."""
    for program in programs:
        if (code := await program.stop()) != 0:
            raise BenchmarkError(f"a daemon ended with {code}:\n{program.tail()}")


async def calm(connection: asyncpg.Connection[Any], table: str) -> None:
    """Prepares a newly filled table for a measurement: ANALYZE, and a checkpoint."""
    with suppress(asyncpg.UndefinedTableError):
        await connection.execute(f"ANALYZE {table}")
    await connection.execute("CHECKPOINT")
