"""Renews the worker's lease, from a thread and a connection of its own.

A handler that blocks the event loop must not cost the lease, and a worker whose lease has expired must not go on: so
the heartbeat runs apart from the handlers, and ends them when it cannot renew. Three steps, on a clock that also runs
while the machine is suspended, counted from just before the last successful renewal was sent:

    lease - margin   fence: the daemon cancels everything that runs
    lease - 1/30     if anything still runs (a blocked loop, a thread), the process ends itself
    lease - 1/40     if Python cannot even do that, the kernel does: see `KillTimer`; the rest is for the process to end
    lease            only now may others take over
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from pgworkd import log
from pgworkd.core import events
from pgworkd.core.source import Heartbeats, Instructions
from pgworkd.core.validation import counted
from pgworkd.engine.life.kill_timer import KillTimer
from pgworkd.engine.life.loop_watch import LoopWatch
from pgworkd.engine.life.stack_answers import StackAnswers
from pgworkd.errors import PgworkdError
from pgworkd.process import output


def boot_time_s() -> float:
    """Seconds on a clock that does not stop while the machine is suspended (Linux), nor jump."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class LeaseHolder(Protocol):
    """The worker that holds the lease. All except `still_running` are called in the daemon's loop."""

    def lease_renewed(self) -> None:
        """The lease was renewed."""

    def on_instructions(self, instructions: Instructions) -> None:
        """Takes the database's answer to a renewal."""

    def lease_fenced(self, since_s: float) -> None:
        """Cancels everything that runs, and claims nothing: the lease was not renewed for `since_s` seconds."""

    def worker_lost(self) -> None:
        """The lease expired and our jobs were rescued: the worker id is void."""

    def renewal_failed(self, error: Exception) -> None:
        """A renewal, or the query for instructions after it, failed; the next attempt follows at once."""

    def still_running(self) -> int:
        """Handlers that have not returned. Called from the heartbeat thread."""


LAST_WORDS_S = 0.1
"""How long the end of a process waits for its log: the lease is about to expire."""


@dataclass(frozen=True, slots=True)
class LeaseOptions:
    """How long a lease lasts, how often it is renewed, and what happens where it cannot be; times in seconds."""

    lease_s: float
    heartbeat_s: float
    end_process: Callable[[str], None]
    """Called from the heartbeat thread with a reason; must end the process, or stop all handlers."""
    kill_timer: KillTimer | None = None
    """Ends the process where Python cannot run; only where the process is ours."""
    loop_watch: LoopWatch | None = None
    """While it finds that the loop is stuck, the lease is not renewed."""
    stacks: StackAnswers | None = None
    """Answers operators who ask where attempts are; None: no code of attempts runs here."""


class Heartbeat:
    """The heartbeat thread of one worker.

    Written by the thread, read by the loop: `renewed_at_s`, `tried_at_s`, `answered`. Written by the loop, read
    by the thread: `worker_id`, `state`. Each is a single assignment, which needs no lock.
    """

    def __init__(
        self,
        connect: Callable[[float], Heartbeats],
        worker_id: int,
        holder: LeaseHolder,
        options: LeaseOptions,
        queues: Callable[[], Collection[str]] | None = None,
    ) -> None:
        """`connect` makes the thread's own connection; its argument is the limit of each call, in seconds.

        `queues` returns the queues whose settings to fetch (None: all); it is called from the thread.
        """
        lease_s = options.lease_s
        self.worker_id = worker_id
        self.state = "running"
        self.answered = True
        """Whether the database answered the last renewal; at first the registration."""
        self.renewed_at_s = self.tried_at_s = boot_time_s()
        self._connect = connect
        self._holder = holder
        self._lease_s = lease_s
        self._heartbeat_s = options.heartbeat_s
        self._fence_s = lease_s - lease_s / 6
        self._end_s = lease_s - lease_s / 30
        self._grace_s = min(2.0, lease_s / 10)
        self._dump_s, self._kill_s = lease_s - lease_s / 40, lease_s - lease_s / 60
        self._end_process = options.end_process
        self._kill_timer, self._setting_timer = options.kill_timer, threading.Lock()
        self._loop_watch, self._stacks = options.loop_watch, options.stacks
        self._queues = queues
        self._daemon_loop = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._renew_asked: asyncio.Event | None = None
        self._stopping = False
        self._void = False
        self._thread = threading.Thread(target=self._run_thread, name="pgworkd lease", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def renew_now(self) -> None:
        """Renews now: the database has instructions for us."""
        loop, renew_asked = self._loop, self._renew_asked
        if loop is not None and renew_asked is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended
                loop.call_soon_threadsafe(renew_asked.set)

    def adopt(self, worker_id: int, registered_at_s: float) -> None:
        """Continues under a new worker id, whose lease began at `registered_at_s` (of `boot_time_s`)."""
        self.worker_id = worker_id
        self.renewed_at_s = registered_at_s
        self._void = False
        self._move_kill_timer()
        self.renew_now()

    def protects(self) -> bool:
        """Whether a handler may be called now: the lease is fresh; and the process will end before it expires."""
        if not self.fresh:
            return False
        if self._kill_timer is not None and not self._kill_timer.armed:
            self._set_kill_timer(self._kill_timer)
        return True

    @property
    def fresh(self) -> bool:
        """True while the lease protects our jobs, and the fence is not reached."""
        return not self._void and boot_time_s() - self.renewed_at_s < self._fence_s

    @property
    def lease_left_s(self) -> float:
        """Seconds until the lease expires unless renewed; 0: it has expired, or is void."""
        return 0.0 if self._void else max(0.0, self.renewed_at_s + self._lease_s - boot_time_s())

    async def stop(self) -> None:
        """Ends the thread; the lease remains in the database until the registration ends or it expires."""
        self._stopping = True
        self.renew_now()
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            while self._thread.is_alive():
                await anyio.sleep(0.01)
        self._disarm_if_idle()

    def _disarm_if_idle(self) -> None:
        """Disarms the kill timer, in the daemon's loop: nothing comes between `protects` and the handler."""
        if self._kill_timer is not None and self._kill_timer.armed and not self._holder.still_running():
            with self._setting_timer:
                self._kill_timer.disarm()

    def _set_kill_timer(self, timer: KillTimer) -> None:
        with self._setting_timer:
            ago_s = boot_time_s() - self.renewed_at_s
            timer.arm(self._dump_s - ago_s, self._kill_s - ago_s)

    def _move_kill_timer(self) -> None:
        if self._kill_timer is not None and self._kill_timer.armed:
            self._set_kill_timer(self._kill_timer)

    # In the thread.

    def _run_thread(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._renew_asked = renew_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        store = self._connect(self._lease_s / 6)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._guard)
            while not self._stopping:
                renew_asked.clear()
                delay_s = await self._beat(store, tasks)
                with anyio.move_on_after(delay_s):
                    await renew_asked.wait()
            tasks.cancel_scope.cancel()
        await store.close()

    async def _beat(self, store: Heartbeats, tasks: TaskGroup) -> float:
        """Renews the lease once; what it brings is done in the daemon's loop, or in `tasks`. Seconds until the next."""
        if self._loop_watch is not None and self._loop_watch.stuck:
            return min(1.0, self._heartbeat_s)
        worker_id = self.worker_id
        try:
            if await self._renew(store, worker_id):
                queues = None if self._queues is None else self._queues()
                instructions = await store.instructions(worker_id, queues)
                self._call_in_daemon(self._holder.on_instructions, instructions)
                if self._stacks is not None:
                    self._stacks.begin(tasks, worker_id, instructions.stacks)
        except PgworkdError as error:
            self._call_in_daemon(self._holder.renewal_failed, error)
            share = random.uniform(0.2, 1.0)  # noqa: S311 # nosec B311 # jitter, no secret
            return share * min(1.0, self._heartbeat_s)
        return self._heartbeat_s if worker_id is self.worker_id else 0.0

    async def _renew(self, store: Heartbeats, worker_id: int) -> bool:
        """True if the lease of that worker was renewed, and that is still our id."""
        sent_at_s = boot_time_s()
        answered = False
        try:
            renewed = await store.heartbeat(worker_id, self._reported())
            answered = True
        finally:
            self.tried_at_s, self.answered = boot_time_s(), answered
        if (
            worker_id is not self.worker_id
        ):  # compared by identity: the same number may be given twice, with another token
            return False
        if renewed:
            self.renewed_at_s = sent_at_s
            self._move_kill_timer()
            self._call_in_daemon(self._holder.lease_renewed)
        elif not self._void:
            self._void = True
            self._call_in_daemon(self._holder.worker_lost)
        return renewed

    def _reported(self) -> str:
        """The state to store, where a loop is called blocked once it has been from one renewal to the next."""
        is_blocked = self._loop_watch is not None and self._loop_watch.lag_s >= self._heartbeat_s
        return "blocked" if is_blocked and self.state == "running" else self.state

    async def _guard(self) -> None:
        """Watches the clock, whatever the heartbeat waits for."""
        fenced_for, fenced_at_s = 0.0, 0.0
        while True:
            now_s, renewed_at_s = boot_time_s(), self.renewed_at_s
            since_s = now_s - renewed_at_s
            if since_s >= self._fence_s and fenced_for != renewed_at_s:
                fenced_for, fenced_at_s = renewed_at_s, now_s
                self._call_in_daemon(self._holder.lease_fenced, since_s)
            # After a freeze the lease has long expired when the fence comes: the loop still gets its grace.
            fenced_s = now_s - fenced_at_s
            if since_s >= self._end_s and fenced_s >= self._grace_s and self._holder.still_running():
                self._end_process(
                    f"the lease expires and {counted(self._holder.still_running(), 'handler')} would not stop"
                )
            if self._kill_timer is not None and self._kill_timer.armed and not self._holder.still_running():
                self._call_in_daemon(self._disarm_if_idle)
            left_s = self._end_s - since_s
            await anyio.sleep(min(0.25, self._lease_s / 60, left_s if left_s > 0 else math.inf))

    def _call_in_daemon(self, function: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._daemon_loop.call_soon_threadsafe(function, *args)


def end_process(reason: str) -> None:
    """Ends this process at once, without clean-up: others are about to take over its jobs."""
    telling = threading.Thread(target=_tell_end, args=(reason,), daemon=True)
    try:
        telling.start()
        telling.join(LAST_WORDS_S)  # whatever the log does
    finally:
        os._exit(1)


def _tell_end(reason: str) -> None:
    log.tell(events.DAEMON_ABORTED, reason=reason)
    output.write_directly(LAST_WORDS_S / 2)  # not by its thread, which takes its time
