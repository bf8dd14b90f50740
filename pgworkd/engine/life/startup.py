"""The daemon's first contact with its database: waits for a server that is away, and for a schema that is to come.

A newer schema, a wrong address or password, missing rights end the start at once: waiting cannot help there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from pgworkd.database import schema
from pgworkd.database.connection import ConnectionOptions
from pgworkd.database.driver_errors import sqlstate_of
from pgworkd.database.reconnect import Outage
from pgworkd.errors import DatabaseUnavailable, PgworkdError, SchemaAwaited, UsageError
from pgworkd.words import events
from pgworkd.words.events import Events

SCHEMA_POLL_S = 2.0
_FORBIDDEN = "42501"

Answer = TypeVar("Answer")


class Startup:
    """Tries until the database can be worked with."""

    def __init__(self, options: ConnectionOptions, events_: Events) -> None:
        self.waits_for = "the database"
        """What a start waits for, in a few words."""
        self._options = options
        self._events = events_
        self._outage = Outage("start", events_)
        self._reported = ""

    async def made(self, enter: Callable[[], Awaitable[Answer]], stop: anyio.Event) -> Answer | None:
        """What `enter` answers, once the schema is ours; None if `stop` comes before. Raises PgworkdError."""
        while not stop.is_set():
            try:
                await schema.verify(self._options)
                answer = await enter()
            except (DatabaseUnavailable, SchemaAwaited, UsageError) as error:
                with anyio.move_on_after(self._delay_s(error)):
                    await stop.wait()
            else:
                self._outage.passed()
                return answer
        return None

    def _delay_s(self, error: PgworkdError) -> float:
        """How long to wait before the next try; raises the error if waiting cannot help."""
        if isinstance(error, DatabaseUnavailable):
            self.waits_for = "the database"
            return self._outage.failed(error)
        # A schema that is being installed comes before the grants on it.
        if isinstance(error, UsageError) and not (
            self._reported and sqlstate_of(error.__cause__ or error) == _FORBIDDEN
        ):
            raise error
        self._outage.passed()
        self.waits_for = "pgworkd migrate" if isinstance(error, SchemaAwaited) else "pgworkd grants"
        if (text := str(error)) != self._reported:
            self._reported = text
            self._events.emit(events.SCHEMA_AWAITED, error=text)
        return SCHEMA_POLL_S
