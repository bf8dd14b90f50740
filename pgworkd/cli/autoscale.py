"""The command `autoscale`: arguments, log and signals. The scaling itself is in `fleet.autoscaler`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from pgworkd.cli import listening
from pgworkd.cli.common import Dsn, MetricsListen, check_command, duration, hinted, settings_of
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process import local_sockets, stop_signals
from pgworkd.settings.file import NAME_CHARS_MAX

if TYPE_CHECKING:
    from pgworkd.metrics.samples import Source
    from pgworkd.processes.autoscaler import Autoscaler, Rules
    from pgworkd.settings.config import Settings

WORKERS_MAX = 256
DEPTH_MAX = 1_000_000_000
SECONDS_MAX = 86_400.0


def autoscale(
    *,
    queue: Annotated[str, typer.Option("--queue", "-q", metavar="NAME", help="Scale by the depth of this queue.")],
    most: Annotated[int, typer.Option("--max", metavar="N", help="Maximum number of workers, stopping ones included.")],
    up_at: Annotated[int, typer.Option("--up-at", metavar="JOBS", help="Scale up at this depth or above.")],
    down_at: Annotated[int, typer.Option("--down-at", metavar="JOBS", help="Scale down at this depth or below.")],
    least: Annotated[int, typer.Option("--min", metavar="N", help="Minimum number of workers.")] = 1,
    step: Annotated[int, typer.Option("--step", metavar="N", help="Workers to add or remove at a time.")] = 1,
    cooldown_s: Annotated[float, duration("--cooldown-s", text="Minimum time between two scaling decisions.")] = 30.0,
    every_s: Annotated[float, duration("--every-s", text="How often the queue's depth is checked.")] = 5.0,
    stop_timeout_s: Annotated[
        float, duration("--stop-timeout-s", text="Kill a worker that takes longer than this to stop.")
    ] = 90.0,
    metrics_listen: MetricsListen = None,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", show_default=False, help="The worker's command; it must exit on SIGTERM."),
    ] = None,
    dsn: Dsn = None,
) -> int:
    """Start and stop local workers by the depth of a queue: the number of jobs that could run now.

    pgworkd autoscale -q embedding --max 10 --up-at 500 --down-at 50 -- pgworkd run -q embedding

    SIGTERM or SIGINT stops all workers gracefully, a second one at once.
    A worker that dies is restarted. If one exits with code 2 (wrong
    configuration), autoscale stops all workers and exits with 2, too.
    """
    from pgworkd import log
    from pgworkd.processes.autoscaler import Rules

    rules = Rules(least, most, up_at, down_at, step, cooldown_s)
    _check(queue, rules, every_s, stop_timeout_s)
    check_command(command or [], "-- pgworkd run --queue NAME")
    settings = settings_of(dsn, metrics_listen=metrics_listen)
    log.configure(settings.log_level, settings.log_format)
    return int(stop_signals.run(_run, settings, queue, rules, (command or [], dsn), every_s, stop_timeout_s))


async def _run(
    settings: Settings,
    queue: str,
    rules: Rules,
    workers: tuple[list[str], str | None],
    every_s: float,
    stop_timeout_s: float,
) -> int:
    from pgworkd import log
    from pgworkd.admin.admin import Admin
    from pgworkd.cli.running import run_until_stopped
    from pgworkd.core.events import Events
    from pgworkd.database.reconnect import Outage
    from pgworkd.engine.life.startup import REMIND_S
    from pgworkd.options import connection_options
    from pgworkd.processes.autoscaler import Autoscaler
    from pgworkd.processes.workers import WorkerProcesses

    events = Events()
    events.listen(log.listener(settings.log_level))
    reports, own = listening.wanted(settings), local_sockets.new_name()

    def report_to(number: int) -> str:
        return f"{own}-{number}"

    command, dsn = workers
    environ = os.environ | ({} if dsn is None else {"PGWORKD_DSN": dsn})
    processes = WorkerProcesses(command, settings.worker_name, environ, report_to if reports else None)
    outage = Outage("autoscale", events, remind_s=REMIND_S)
    scaler = Autoscaler(
        Admin(connection_options(settings)),
        queue,
        rules,
        processes,
        outage,
        every_s=every_s,
        stop_timeout_s=stop_timeout_s,
    )
    source = (lambda: _source(scaler, report_to)) if reports else None
    try:
        return await run_until_stopped(_Scaling(scaler), settings, settings.notes, source=source)
    except PgworkdError as error:
        raise hinted(error, settings) from None


class _Scaling:
    """The autoscaler, which ends its workers itself."""

    def __init__(self, scaler: Autoscaler) -> None:
        self.run, self._scaler = scaler.run, scaler

    def stop(self, requests: int) -> float:
        """Stops the workers; at request number 3 they are killed."""
        self._scaler.request_stop(requests)
        return math.inf


def _source(scaler: Autoscaler, report_to: Callable[[int], str]) -> Source:
    from pgworkd.metrics.fleet import FleetSource

    return FleetSource(lambda: scaler.members(report_to))


def _check(queue: str, rules: Rules, every_s: float, stop_timeout_s: float) -> None:
    """Raises UsageError for numbers that are out of bounds or contradict each other."""
    if not 1 <= len(queue) <= NAME_CHARS_MAX or not queue.isprintable():
        raise UsageError(f"--queue: give 1 to {NAME_CHARS_MAX} printable characters")
    for flag, value, low, high in (
        ("--min", rules.least, 1, WORKERS_MAX),
        ("--max", rules.most, 1, WORKERS_MAX),
        ("--step", rules.step, 1, WORKERS_MAX),
        ("--up-at", rules.up_at, 1, DEPTH_MAX),
        ("--down-at", rules.down_at, 0, DEPTH_MAX),
        ("--cooldown-s", rules.cooldown_s, 0, SECONDS_MAX),
        ("--every-s", every_s, 0.1, SECONDS_MAX),
        ("--stop-timeout-s", stop_timeout_s, 0, SECONDS_MAX),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            unit = " seconds" if flag.endswith("-s") else ""
            raise UsageError(f"{flag} is {value:g}: give {low:g} to {high:.0f}{unit}")
    if rules.least > rules.most:
        raise UsageError(f"--min {rules.least} is more than --max {rules.most}: lower --min or raise --max")
    if rules.down_at >= rules.up_at:
        raise UsageError(
            f"--down-at {rules.down_at} is not below --up-at {rules.up_at}: lower --down-at or raise --up-at, "
            "or workers would be started and stopped all the time"
        )
