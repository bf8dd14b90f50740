"""Runs a program until it ends or is stopped: the one runner of `run`, `push`, `serve`, `exporter` and `autoscale`."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import anyio

from pgworkd import log
from pgworkd.cli import listening
from pgworkd.cli.common import log_notes
from pgworkd.core import stacks
from pgworkd.engine.life.heartbeat import end_process
from pgworkd.errors import PgworkdError
from pgworkd.process import stop_signals

if TYPE_CHECKING:
    from pgworkd.metrics.samples import Source
    from pgworkd.settings.config import Settings

STUCK_S = 5.0
"""How much longer than its own limits a stop may take before the process is ended."""


class Runs(Protocol):
    """What a command runs, and how it is stopped."""

    async def run(self) -> int:
        """Runs until it has stopped; the exit code. Raises PgworkdError."""

    def stop(self, requests: int) -> float | None:
        """Stops gracefully at request number 1, at once at number 2; the seconds that it may take, by its own limits.

        Number 3 ends what it has started. None: the process is to be ended.
        """


async def run_until_stopped(
    program: Runs,
    settings: Settings,
    notes: Sequence[str] = (),
    *,
    source: Callable[[], Source] | None = None,
    reload: Callable[[], None] | None = None,
) -> int:
    """Runs a program under stop signals; the exit code. Raises its errors.

    `notes` go to the log. `source`: what metrics and health show, where anybody asks for them. `reload` is called at
    SIGHUP.
    """
    code, problem = 1, None
    # Before the first await: a stop signal must be handled while a program waits for the database.
    with (
        stop_signals.received(reloads=reload is not None) as signals,
        listening.listening(settings, source) if source is not None else contextlib.nullcontext(),
        _telling_stacks(),
    ):
        log_notes(notes)  # only now: if the start fails, its error shall be the only line
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(obey, signals, program, reload)
            try:
                code = await program.run()
            except PgworkdError as error:
                problem = error  # raised below: the task group would wrap it
            except asyncio.CancelledError:
                problem = PgworkdError("a handler has cancelled all tasks of the process (asyncio.all_tasks)")
            tasks.cancel_scope.cancel()
    if problem is not None:
        raise problem
    return code


@contextlib.contextmanager
def _telling_stacks() -> Iterator[None]:
    """At SIGUSR1, the stacks of this process are logged: by a thread, as its loop may be blocked."""
    loop = asyncio.get_running_loop()

    def told() -> None:
        log.logger().warning("process.stacks", stacks=stacks.all_stacks(loop))

    was = signal.getsignal(signal.SIGUSR1)
    if was is signal.SIG_DFL:  # else the application has a use for it
        signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=told, name="stacks", daemon=True).start())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN if was is signal.SIG_DFL else was)


async def obey(signals: AsyncIterator[signal.Signals], program: Runs, reload: Callable[[], None] | None = None) -> None:
    """Stops a program at the first signal, at once at the second; ends the process at the third, or if it is stuck."""
    requests, deadline = 0, math.inf
    while True:
        with anyio.CancelScope(deadline=deadline):
            if await anext(signals) is signal.SIGHUP:
                if reload is not None:
                    reload()
                continue
            requests += 1
            if (stop_s := program.stop(requests)) is not None:
                deadline = anyio.current_time() + stop_s + STUCK_S
                continue
            end_process("a third stop signal was received")
        program.stop(3)
        end_process("the stop takes too long")
