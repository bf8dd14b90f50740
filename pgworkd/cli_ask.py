"""What commands share: their common options, and a question put to the database with hints for its refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from .errors import DatabaseError, DatabaseUnavailable, PgworkdError, UsageError

if TYPE_CHECKING:
    from .admin import Admin
    from .config import Settings

Answer = TypeVar("Answer")

Dsn = Annotated[
    str | None,
    typer.Option("--dsn", metavar="URL", help="The database; better PGWORKD_DSN, as others can read command lines."),
]
QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", show_default=False, help="The queue's name.")]
QueueOption = Annotated[str | None, typer.Option("--queue", "-q", metavar="NAME", help="Only this queue.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_HINTS = {
    "name or service not known": "check the host name",
    "name resolution": "check the host name and this host's DNS",
    "connect call failed": "is Postgres up at that host and port?",
    "connection refused": "is Postgres up at that host and port?",
    "no such file or directory": "check the socket, and the files that sslrootcert, sslcert and sslkey name",
    "certificate": "check sslmode and sslrootcert in the address, and the host's name in its certificate",
    "ssl": "check sslmode in the address and whether the server offers TLS",
    "in time": "check host, port and firewall",
}


def settings_of(dsn: str | None) -> Settings:
    """The settings, with the flag --dsn; UsageError when they name no database."""
    from .config import load

    settings = load(dsn=dsn)
    settings.dsn_required()
    return settings


def ask(dsn: str | None, question: Callable[[Admin], Awaitable[Answer]], *, verify: bool = True) -> Answer:
    """The answer to one question; unless `verify` is off, SchemaError when the schema is not ours."""
    import anyio

    return anyio.run(_ask, settings_of(dsn), question, verify)


async def _ask(settings: Settings, question: Callable[[Admin], Awaitable[Answer]], verify: bool) -> Answer:  # noqa: FBT001
    from .admin import Admin
    from .link import LinkOptions

    options = LinkOptions(settings.dsn_required(), settings.connect_timeout_s, settings.command_timeout_s)
    async with Admin(options) as admin:
        try:
            if verify:
                await admin.verify()
            return await question(admin)
        except (DatabaseUnavailable, DatabaseError, UsageError) as error:
            raise hinted(error, settings) from None


def hinted(error: PgworkdError, settings: Settings) -> PgworkdError:
    """The error with what was tried and what may help, if it is about reaching the database at all."""
    text = str(error)
    hints = [hint for sign, hint in _HINTS.items() if sign in text.lower()]
    if isinstance(error, DatabaseUnavailable) or (hints and isinstance(error, DatabaseError)):
        return DatabaseUnavailable(f"{text}; tried {settings.dsn_redacted}" + (f": {hints[0]}" if hints else ""))
    return error


def confirm(what: str, *, yes: bool) -> None:
    """Asks, unless `yes`; UsageError where nobody can answer."""
    import sys

    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{what}: add --yes to do it without a terminal to ask at")
    typer.confirm(f"{what}?", abort=True, err=True)
