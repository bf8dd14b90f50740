"""Stopping in order: release what has not begun, wait for what runs, cancel the rest, settle, sign off."""

from __future__ import annotations

from collections.abc import Callable

import anyio

from pgworkd.core import events
from pgworkd.core.job import Reason
from pgworkd.core.validation import counted
from pgworkd.engine.life.member import Membership
from pgworkd.engine.life.options import DaemonOptions
from pgworkd.engine.life.queues import QueueSet
from pgworkd.engine.settle.settler import Settler
from pgworkd.engine.shared import Shared

FLUSH_GRACE_S = 10.0
"""How long a stop waits for the database to take the last outcomes."""
CUT_S = 0.5
"""How long a stop waits for handlers whose clean-up was cancelled."""


class Shutdown:
    """The stop of one daemon."""

    def __init__(
        self,
        options: DaemonOptions,
        queues: QueueSet,
        settler: Settler,
        member: Membership,
        shared: Shared,
        end_process: Callable[[str], None] | None,
    ) -> None:
        """`end_process` ends the process if handlers would outlive the lease of their jobs; None: it is the host's."""
        self.now = anyio.Event()
        """Set to stop at once: what runs is not waited for."""
        self.unasked = False
        """The lease ended first: the exit code is 1."""
        self._options, self._queues, self._settler, self._member = options, queues, settler, member
        self._in_flight, self._events = shared.in_flight, shared.events
        self._end_process = end_process

    async def run(self) -> int:
        """Stops the daemon; the exit code: 0 when nothing was left behind, else 1."""
        if (heartbeat := self._member.worker.heartbeat) is not None:
            heartbeat.state = "stopping"
        running, shutdown_s = self._queues.running, self._options.shutdown_s
        self._events.emit(events.DAEMON_STOPPING, running=running, shutdown_s=shutdown_s)
        self._queues.release_unstarted(Reason.SHUTDOWN)
        if not self.now.is_set():
            with anyio.move_on_after(shutdown_s):
                await self._wait_for_handlers(hurry=True)
        self._in_flight.stop_all(Reason.SHUTDOWN)
        with anyio.move_on_after(self._options.cancel_grace_s + CUT_S):
            await self._wait_for_handlers(hurry=False)
        until = anyio.current_time() + FLUSH_GRACE_S
        with anyio.CancelScope(deadline=until):
            await self._settler.drained()
        reason = f"{counted(len(self._in_flight), 'outcome')} not stored" if len(self._in_flight) else None
        if self._queues.running:
            # Threads, and handlers that swallow their cancellation: they must not outlive the lease of their jobs.
            reason = f"{counted(self._queues.running, 'handler')} would not stop"
            if self._end_process is not None:
                self._events.emit(events.SHUTDOWN_INCOMPLETE, reason=reason)
                self._events.emit(events.DAEMON_STOPPED, exit_code=1, still_running=self._queues.running)
                self._end_process(reason)
        left = await self._member.sign_off(until)
        if reason := reason or left:
            self._events.emit(events.SHUTDOWN_INCOMPLETE, reason=reason)
        return 1 if reason or self.unasked else 0

    async def _wait_for_handlers(self, *, hurry: bool) -> None:
        """Waits until no handler runs and no claim is under way, or, if `hurry`, until a stop at once is asked."""
        while not self._queues.quiet and not (hurry and self.now.is_set()):
            await anyio.sleep(0.02)
