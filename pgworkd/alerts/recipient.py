"""Where a message goes: to a function of the application, or to an address by mail."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import anyio

from pgworkd.admin.dead import Fetch
from pgworkd.core.job import Job
from pgworkd.core.mail_url import is_mail_address
from pgworkd.errors import UsageError

Answer = TypeVar("Answer")

OPTIONS: dict[str, Any] = {
    "max_attempts": 20,
    "timeout_s": 120,
    "backoff": {"base_s": 30, "factor": 2, "cap_s": 3600},
}
"""Options of the handlers that send messages: they try for half a day."""


class Message(Protocol):
    """A message to a recipient: an alert or a digest."""

    @property
    def subject(self) -> str:
        """The subject, in one line."""

    def text(self) -> str:
        """The whole message."""


def checked(to: object) -> None:
    """Raises UsageError unless `to` is a function or a mail address."""
    if not callable(to) and not is_mail_address(to):
        raise UsageError(f"to={str(to)[:100]!r}: give a function, or a mail address like 'ops@example.com'")


async def deliver(to: Callable[[Any], Awaitable[None] | None] | str, message: Message, job: Job) -> str:
    """Sends the message; who got it. A plain function is called in a thread. Raises what sending raises."""
    if isinstance(to, str):
        from pgworkd.alerts.mail import send_mail  # slow to import, and needed for mail only

        await send_mail(to, message.subject, message.text(), str(job.id))
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
