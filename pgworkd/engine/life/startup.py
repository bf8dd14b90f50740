"""Connecting to the database for the first time: waits for a server that is unavailable, for the schema, and in a copy
of another database for an operator.

A newer schema, a wrong address or password, or missing privileges end the start at once: waiting cannot help there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from pgworkd.database.driver_errors import FORBIDDEN, sqlstate_of
from pgworkd.database.reconnect import Outage
from pgworkd.errors import DatabaseUnavailable, NotAdopted, PgworkdError, SchemaAwaited, UsageError
from pgworkd.words import events
from pgworkd.words.events import Events

SCHEMA_POLL_S = 2.0
COPY_REPORT_S = 60.0
"""How often it is logged that the database is a copy, in seconds."""

Answer = TypeVar("Answer")


class Startup:
    """Retries until the database can be used."""

    def __init__(self, verify: Callable[[], Awaitable[None]], events_: Events, what: str = "the database") -> None:
        """`verify` raises PgworkdError unless the database can be used. `what`: the database, in a few words."""
        self._what = self.waits_for = what
        """What the start waits for, in a few words."""
        self._verify = verify
        self._events = events_
        self._outage = Outage("start", events_)
        self._reported = ""
        self._report_at = 0.0

    async def run(self, register: Callable[[], Awaitable[Answer]], stop: anyio.Event) -> Answer | None:
        """Returns what `register` returns, once the schema is current; None if `stop` is set first.

        Raises PgworkdError.
        """
        while not stop.is_set():
            try:
                await self._verify()
                answer = await register()
            except (DatabaseUnavailable, SchemaAwaited, NotAdopted, UsageError) as error:
                with anyio.move_on_after(self._delay_s(error)):
                    await stop.wait()
            else:
                self._outage.passed()
                return answer
        return None

    def _delay_s(self, error: PgworkdError) -> float:
        """Seconds until the next attempt; raises the error if waiting cannot help."""
        if isinstance(error, DatabaseUnavailable):
            self.waits_for = self._what
            return self._outage.failed(error)
        # While the schema is being installed, the grants on it are missing for a moment.
        if isinstance(error, UsageError) and not (
            self._reported and sqlstate_of(error.__cause__ or error) == FORBIDDEN
        ):
            raise error
        self._outage.passed()
        if isinstance(error, NotAdopted):
            self._report_copy(error)
            return SCHEMA_POLL_S
        self.waits_for = "pgworkd migrate" if isinstance(error, SchemaAwaited) else "pgworkd grants"
        if (text := str(error)) != self._reported:
            self._reported = text
            self._events.emit(events.SCHEMA_AWAITED, error=text)
        return SCHEMA_POLL_S

    def _report_copy(self, error: NotAdopted) -> None:
        """Again and again: nothing but an operator ends this."""
        self.waits_for = "pgworkd adopt"
        if anyio.current_time() >= self._report_at:
            self._report_at = anyio.current_time() + COPY_REPORT_S
            what, _, remedy = str(error).partition(": ")
            self._events.emit(events.DATABASE_COPIED, error=what, remedy=remedy)
