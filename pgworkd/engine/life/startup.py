"""Connecting to the database for the first time: waits for what somebody else can put right.

That is a server that is unavailable, the schema, a copy of another database, and a server that refuses our user,
password, database or rights: it may do so later, too, and then a daemon waits; to end would be to stay down, or to
start again and again. What only another start can put right (a malformed DSN, a newer schema, a pooler in transaction
mode) ends this one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from pgworkd.core import events
from pgworkd.core.events import Events
from pgworkd.database.reconnect import Outage
from pgworkd.errors import AccessRefused, DatabaseUnavailable, NotAdopted, PgworkdError, SchemaAwaited

SCHEMA_POLL_S = 2.0
REFUSED_S, REFUSED_S_MAX = 1.0, 30.0
"""The first wait after a refusal, and the longest: it doubles, as some servers shut out who is wrong too often."""
REMIND_S = 60.0
"""How often the log says what a start waits for."""

Answer = TypeVar("Answer")


class Startup:
    """Retries until the database can be used."""

    def __init__(self, verify: Callable[[], Awaitable[None]], events_: Events, what: str = "the database") -> None:
        """`verify` raises PgworkdError unless the database can be used. `what`: the database, in a few words."""
        self._what = self.waits_for = what
        """A few words for what the start waits for."""
        self._verify = verify
        self._events = events_
        self._outage = Outage("start", events_, remind_s=REMIND_S)
        self._refused_s = REFUSED_S / 2
        self._reported, self._reported_at = "", 0.0

    async def run(self, register: Callable[[], Awaitable[Answer]], stop: anyio.Event) -> Answer | None:
        """Returns what `register` returns, once the schema is current; None if `stop` is set first.

        Raises PgworkdError.
        """
        while not stop.is_set():
            try:
                await self._verify()
                answer = await register()
            except (DatabaseUnavailable, SchemaAwaited, NotAdopted, AccessRefused) as error:
                with anyio.move_on_after(self._delay_s(error)):
                    await stop.wait()
            else:
                self._outage.passed()
                return answer
        return None

    def _delay_s(self, error: PgworkdError) -> float:
        """Reports the error; seconds until the next attempt."""
        if isinstance(error, AccessRefused):
            self.waits_for = f"{self._what}: {error}"
            self._refused_s = min(REFUSED_S_MAX, self._refused_s * 2)
            return max(self._refused_s, self._outage.failed(error))
        if isinstance(error, DatabaseUnavailable):
            self.waits_for = self._what
            return self._outage.failed(error)
        self._outage.passed()
        is_copy = isinstance(error, NotAdopted)
        self.waits_for = "pgworkd adopt" if is_copy else "pgworkd migrate"
        text, now_s = str(error), anyio.current_time()
        if text != self._reported or now_s - self._reported_at >= REMIND_S:
            self._reported, self._reported_at = text, now_s
            if is_copy:
                what, _, remedy = text.partition(": ")
                self._events.emit(events.DATABASE_COPIED, error=what, remedy=remedy)
            else:
                self._events.emit(events.SCHEMA_AWAITED, error=text)
        return SCHEMA_POLL_S
