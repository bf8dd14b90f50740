"""Receives notifications: LISTEN on a connection of its own.

A notification is a hint, never required: pools poll as well. The connection is probed, because a dead one stays silent
without an error (asyncpg#519). After each reconnect all pools claim once, since notifications sent meanwhile are gone:
first LISTEN, then claim, so that nothing falls between.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import anyio

from pgworkd.core.events import Events
from pgworkd.database.connection import Listener
from pgworkd.database.reconnect import Outage
from pgworkd.database.store import CHANNEL
from pgworkd.errors import PgworkdError


class NotificationHandler(Protocol):
    """Receives notifications. All methods are called in the daemon's loop and must return at once."""

    def on_queue(self, queue: str, run_at: float | None) -> None:
        """Jobs may be due in this queue; `run_at`: one of them, due long ago, can be claimed again."""

    def on_schedules(self) -> None:
        """A schedule was inserted, changed or deleted."""

    def on_effects(self) -> None:
        """An effect was deferred, because a row was locked: it can be applied soon."""

    def on_operations(self) -> None:
        """An operation in the background was started."""

    def on_worker_ended(self) -> None:
        """The process of some worker has ended: its jobs can be rescued now."""

    def on_settings(self) -> None:
        """A row of `queues` was inserted, changed or deleted."""

    def on_worker(self, worker_id: int) -> None:
        """The database has instructions for this worker: it should send a heartbeat now."""

    def on_reconnect(self) -> None:
        """The connection was lost and is back: anything may have happened."""


class NotificationListener:
    """Keeps one listening connection and passes on its notifications."""

    def __init__(
        self, listener: Listener, handler: NotificationHandler, events_: Events, *, probe_s: float = 10.0
    ) -> None:
        self._listener = listener
        self._handler = handler
        self._outage = Outage("listener", events_)
        self._probe_s = probe_s
        self.listening = False
        """Whether notifications arrive, as far as the last probe tells."""

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Listens until cancelled; calls `started` after each connect."""
        while True:
            try:
                lost = anyio.Event()
                async with self._listener.listen(CHANNEL, self._received, lost.set) as probe:
                    self._outage.passed()
                    self.listening = True
                    self._handler.on_reconnect()
                    started()
                    while True:
                        with anyio.move_on_after(self._probe_s):
                            await lost.wait()
                        await probe()
            except PgworkdError as error:
                # Also a rejection (password changed, a restore under way) may pass: the daemon never exits for it.
                self.listening = False
                await self._outage.wait(error)

    def _received(self, payload: str) -> None:
        try:
            message: Any = json.loads(payload)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return  # another program's NOTIFY on our channel
        if isinstance(queue := message.get("queue"), str):
            run_at = message.get("run_at")
            self._handler.on_queue(queue, run_at if isinstance(run_at, float | int) else None)
        if message.get("schedules"):
            self._handler.on_schedules()
        if message.get("effects"):
            self._handler.on_effects()
        if message.get("operations"):
            self._handler.on_operations()
        if message.get("ended"):
            self._handler.on_worker_ended()
        if message.get("queues"):
            self._handler.on_settings()
        if isinstance(worker_id := message.get("worker"), int):
            self._handler.on_worker(worker_id)
