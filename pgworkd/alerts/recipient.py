"""Where a message goes: to a function of the application, or to an address by mail."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from uuid import UUID

import anyio

from pgworkd.admin.dead import Fetch
from pgworkd.core.job import Job
from pgworkd.core.mail_url import is_mail_address
from pgworkd.errors import UsageError

Answer = TypeVar("Answer")

OPTIONS: dict[str, Any] = {
    "max_attempts": 80,
    "timeout_s": 120,
    "backoff": {"base_s": 30, "factor": 2, "cap_s": 600},
}
"""Options of the handlers that send messages: they try for half a day."""


_ORIGIN = """SELECT current_database()::text, (SELECT o.environment FROM pgworkd.origin o),
        host(inet_server_addr()) || ':' || inet_server_port()"""


@dataclass(frozen=True, slots=True)
class MessageOrigin:
    """The database that a message is about. `environment`: as its daemons name it; `server`: None for a socket."""

    database: str
    environment: str | None
    server: str | None

    @property
    def subject(self) -> str:
        """What a subject begins with."""
        return f"pgworkd {self.database}" + (f", {self.environment}" if self.environment else "")

    @property
    def line(self) -> str:
        """Database, environment and server in one line."""
        known = {"environment": self.environment, "server": self.server}
        return ", ".join([self.database, *(f"{name} {value}" for name, value in known.items() if value)])


async def origin(fetch: Fetch) -> MessageOrigin:
    """Which database this is."""
    database, environment, server = (await fetch(_ORIGIN))[0]
    return MessageOrigin(database, environment, server)


class Message(Protocol):
    """A message to a recipient: an alert or a digest."""

    @property
    def id(self) -> UUID:
        """What tells two messages apart; an attempt to send the same again has the same."""

    @property
    def subject(self) -> str:
        """The subject, in one line."""

    def text(self) -> str:
        """The whole message."""


def checked(to: object) -> None:
    """Raises UsageError unless `to` is a function of one argument, or a mail address."""
    if not callable(to):
        if not is_mail_address(to):
            raise UsageError(f"to={str(to)[:100]!r}: give a function, or a mail address like 'ops@example.com'")
        return
    with suppress(ValueError):  # of what is written in C, nothing is known
        try:
            inspect.signature(to).bind(None)
        except TypeError as error:
            raise UsageError(f"to: the function must take one argument, the message: {error}") from None


async def deliver(to: Callable[[Any], Awaitable[None] | None] | str, message: Message) -> str:
    """Sends the message; who got it. A plain function is called in a thread. Raises what sending raises."""
    if isinstance(to, str):
        from pgworkd.alerts.mail import send_mail  # slow to import, and needed for mail only

        await send_mail(to, message.subject, message.text(), str(message.id))
        return to
    if inspect.iscoroutinefunction(to) or inspect.iscoroutinefunction(getattr(to, "__call__", None)):  # noqa: B004
        result: Any = to(message)
    else:
        result = await anyio.to_thread.run_sync(to, message, abandon_on_cancel=True)
    if inspect.isawaitable(result):
        await result
    return getattr(to, "__qualname__", type(to).__name__)


async def read(job: Job, look: Callable[[Fetch], Awaitable[Answer]]) -> Answer:
    """What `look` finds in the database, with the connection's `fetch`."""
    found: list[Answer] = []
    with suppress(_Enough):
        async with job.transaction() as connection:
            found.append(await look(connection.fetch))
            raise _Enough  # rolled back: the end of the block would complete the job, which has yet to send
    return found[0]


class _Enough(Exception):  # noqa: N818 - no error
    pass
