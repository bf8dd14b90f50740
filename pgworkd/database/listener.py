"""Hearing that there is work: LISTEN on a connection of its own.

A notification is a hint, never the only way: pools poll as well. The line is probed, because a dead one
stays silent without an error (asyncpg#519). After each new line everyone is told to look once, since what
was sent meanwhile is gone: LISTEN first, then look, so that nothing falls between.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import anyio

from pgworkd.database.connection import Listener
from pgworkd.database.reconnect import Outage
from pgworkd.database.store import CHANNEL
from pgworkd.errors import PgworkdError
from pgworkd.words.events import Events


class NotificationHandler(Protocol):
    """Who is told. All are called in the daemon's loop and must return at once."""

    def on_queue(self, queue: str, run_at: float | None) -> None:
        """There may be work in this queue; `run_at`: some of it was due long ago, from then on."""

    def on_schedules(self) -> None:
        """A schedule was entered, changed or deleted."""

    def on_effects(self) -> None:
        """Something was put off because it was locked: it can be applied soon."""

    def on_worker_ended(self) -> None:
        """The process of some worker has ended: its jobs can be taken back now."""

    def on_settings(self) -> None:
        """A row of `queues` was entered, changed or deleted."""

    def on_worker(self, worker_id: int) -> None:
        """This worker should ask what is wanted of it: a heartbeat, now."""

    def on_reconnect(self) -> None:
        """The line was down: anything may have happened."""


class NotificationListener:
    """Keeps one listening line and hands on what it says."""

    def __init__(
        self, listener: Listener, handler: NotificationHandler, events_: Events, *, probe_s: float = 10.0
    ) -> None:
        self._listener = listener
        self._handler = handler
        self._outage = Outage("wake", events_)
        self._probe_s = probe_s

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Listens until cancelled; calls `started` each time a line stands."""
        while True:
            try:
                lost = anyio.Event()
                async with self._listener.listen(CHANNEL, self._received, lost.set) as probe:
                    self._outage.passed()
                    self._handler.on_reconnect()
                    started()
                    while True:
                        with anyio.move_on_after(self._probe_s):
                            await lost.wait()
                        await probe()
            except PgworkdError as error:
                # Also a refusal (password changed, a restore under way) may pass: the daemon never exits for it.
                await self._outage.wait(error)

    def _received(self, payload: str) -> None:
        try:
            message: Any = json.loads(payload)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return  # someone else's NOTIFY on our channel
        if isinstance(queue := message.get("queue"), str):
            run_at = message.get("run_at")
            self._handler.on_queue(queue, run_at if isinstance(run_at, float | int) else None)
        if message.get("schedules"):
            self._handler.on_schedules()
        if message.get("effects"):
            self._handler.on_effects()
        if message.get("ended"):
            self._handler.on_worker_ended()
        if message.get("queues"):
            self._handler.on_settings()
        if isinstance(worker_id := message.get("worker"), int):
            self._handler.on_worker(worker_id)
