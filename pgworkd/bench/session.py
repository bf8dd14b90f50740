"""One run from the first look to the last row removed: whatever ends it, the scratch queue goes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from pgworkd.admin.admin import Admin
from pgworkd.bench import scratch
from pgworkd.bench.figures import Figures
from pgworkd.bench.phases import Handled, Phases, Plan
from pgworkd.bench.scratch import Scratch, ScratchOptions
from pgworkd.core.validation import counted
from pgworkd.database.connection import Connection
from pgworkd.engine.life.daemon import Daemon, DaemonOptions
from pgworkd.engine.life.maintenance import Periods
from pgworkd.errors import DatabaseUnavailable, PgworkdError

LEASE_S, HEARTBEAT_S = 15.0, 2.0
"""Shorter than by default: after a kill the next run waits for the end of the lease."""
COMMAND_S_MAX = 7.0
"""Less than half of the lease, as for every daemon."""
READY_S = 20.0
STOP_S = 40.0
"""How long the daemon may take to stop; it has limits of its own."""
_KEPT = Periods(keep_days=3650, keep_dead_days=3650, schedules_s=86_400.0)
"""How long history is kept, and which schedules are obsolete, is for the daemons of this database to say."""


class Stopped(PgworkdError):  # noqa: N818 - no failure
    """The run was ended by a signal; nothing of it is left."""


@dataclass(frozen=True, slots=True)
class Console:
    """How a run talks: `say` a line, `shown` the progress (phase, done, total)."""

    say: Callable[[str], None]
    shown: Callable[[str, int, int], None]


def _stop_signals() -> list[signal.Signals]:
    """The signals that end a run: the loss of the terminal, too, unless it is to be ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


class BenchSession:
    """One run on the database of `options`, whose `queue` is the scratch queue."""

    def __init__(self, plan: Plan, options: ScratchOptions, console: Console) -> None:
        self._plan, self._options, self._console = plan, options, console
        self._control = Connection(options, "control")
        self._work = anyio.CancelScope()
        self._stopped = False
        self._problem: PgworkdError | None = None

    async def run(self) -> Figures:
        """Measures, and removes the scratch queue. Raises Stopped after a signal, PgworkdError after a failure."""
        figures: Figures | None = None
        with anyio.open_signal_receiver(*_stop_signals()) as signals:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._heed, signals)
                try:
                    with self._work:
                        async with Admin(self._options) as admin:
                            await admin.verify()
                        await scratch.check_rights(self._control)
                        await self._tidy()
                        figures = await self._measured(tasks)
                except PgworkdError as error:
                    self._problem = self._problem or error
                tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await self._control.close()
        if self._problem is not None:
            raise self._problem
        if figures is None or self._stopped:
            raise Stopped("stopped; nothing is left of it in the database")
        return figures

    async def _tidy(self) -> None:
        """Removes what dead runs have left."""
        for name in await scratch.remove_leftovers(self._control, self._console.say):
            self._console.say(f"removed the scratch queue {name}, which an earlier run had left")

    async def _measured(self, tasks: TaskGroup) -> Figures:
        handled, queue = Handled(), self._options.queue
        daemon = await self._daemon(handled)
        ended = anyio.Event()
        phases = Phases(self._plan, self._options, handled, self._console.shown)
        tasks.start_soon(partial(self._serve, daemon, ended), name="daemon")
        try:
            with anyio.move_on_after(READY_S):
                await daemon.ready.wait()
            if not daemon.ready.is_set():
                raise DatabaseUnavailable(
                    f"the worker was not ready within {READY_S:g} s ({daemon.status()}): perhaps another transaction "
                    "holds a lock on a table of the schema; see pg_blocking_pids()"
                )
            await Scratch(self._control, queue).create()
            return await phases.run(daemon)
        finally:
            with anyio.CancelScope(shield=True):
                self._console.shown("removal", 0, 1)
                daemon.request_stop(now=True)
                with anyio.move_on_after(STOP_S):
                    await ended.wait()
                await phases.close()
                await Scratch(self._control, queue).remove()
                self._console.shown("removal", 1, 1)

    async def _daemon(self, handled: Handled) -> Daemon:
        """Makes a daemon that does not serve the queue before the backlog is complete."""
        queue = self._options.queue
        options = DaemonOptions(
            self._options,
            worker_name=queue,
            lease_s=LEASE_S,
            heartbeat_s=HEARTBEAT_S,
            shutdown_s=0.0,
            statistics=False,
            periods=_KEPT,
        )
        daemon = Daemon(handled.app(queue, self._plan.concurrency), options)
        await daemon.remove_queue(queue)
        return daemon

    async def _serve(self, daemon: Daemon, ended: anyio.Event) -> None:
        try:
            await daemon.run()
        except PgworkdError as error:
            self._problem = error
        finally:
            ended.set()
            if not daemon.stop_requested.is_set() or self._problem is not None:
                self._problem = self._problem or PgworkdError("the worker of this run ended early")
                self._work.cancel()

    async def _heed(self, signals: Any) -> None:
        """A signal ends the run; the removal is not cut short by another one."""
        async for _ in signals:
            if self._stopped:
                self._console.say(f"removing {counted(self._plan.jobs, 'job')} at most; it will not take long")
            self._stopped = True
            self._work.cancel()
