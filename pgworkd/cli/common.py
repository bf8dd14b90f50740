"""What commands share: common options, and calls of `Admin` with hints for errors of the connection."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from pgworkd.cli.output import note
from pgworkd.core.durations import FORM, seconds_of
from pgworkd.core.validation import closest
from pgworkd.errors import AccessRefused, DatabaseError, DatabaseUnavailable, OutcomeUnknown, PgworkdError, UsageError
from pgworkd.settings.file import quoted

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.settings.config import Settings

Answer = TypeVar("Answer")
Command = TypeVar("Command", bound=Callable[..., Any])
KEYWORD = inspect.Parameter.KEYWORD_ONLY

STDIN_BYTES_MAX = 1024 * 1024

Dsn = Annotated[
    str | None,
    typer.Option("--dsn", metavar="URL", help="The database. Prefer PGWORKD_DSN: other users can see command lines."),
]
QueueArgument = Annotated[str, typer.Argument(metavar="QUEUE", show_default=False, help="The queue's name.")]
QueueOption = Annotated[str | None, typer.Option("--queue", "-q", metavar="NAME", help="Only this queue.")]
KindOption = Annotated[str | None, typer.Option("--kind", metavar="NAME", help="Only jobs of this kind.")]
MetricsListen = Annotated[
    str | None,
    typer.Option(
        "--metrics-listen", metavar="HOST:PORT", help="Serve /metrics, /healthz and /readyz there; default: off."
    ),
]
DebugHttp = Annotated[bool, typer.Option("--debug-http", help="Log each request, without its body.")]
DebugBodies = Annotated[
    bool, typer.Option("--debug-bodies", help="Log each request, with the first 2,000 bytes of both bodies.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def option(flag: str, metavar: str | None, text: str) -> Any:
    """The type of an option that takes text; the settings parse it, and their errors say what to write instead."""
    return Annotated[str | None, typer.Option(flag, metavar=metavar, help=text)]


def takes(options: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Gives a command these options by name, in place of its last parameter, `**given`: None is not given."""

    def taking(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        *others, _ = own.parameters.values()
        made = [inspect.Parameter(name, KEYWORD, default=None, annotation=kind) for name, kind in options.items()]
        first, last = ([each for each in others if (each.kind is KEYWORD) is so] for so in (False, True))
        command.__signature__ = own.replace(parameters=[*first, *made, *last])  # type: ignore[attr-defined]
        return command

    return taking


PROCESS_OPTIONS = {
    "worker_name": option("--worker-name", None, "Name of this worker; default: the host name."),
    "log_level": option("--log-level", "LEVEL", "debug, info, warning or error."),
    "log_format": option("--log-format", "FORMAT", "auto, json or console."),
}
"""The options of all commands that claim jobs until they are stopped."""
_HINTS = {
    "name or service not known": "check the host name",
    "name resolution": "check the host name and this host's DNS",
    "connection refused": "is Postgres up at that host and port?",
    "no such file or directory": "check the socket, and the files that sslrootcert, sslcert and sslkey name",
    "in time": "check host, port and firewall",
}


def settings_of(dsn: str | None, **flags: object) -> Settings:
    """The settings, with the flag --dsn and others; UsageError if they name no database."""
    from pgworkd.settings.config import load

    settings = load(dsn=dsn, **flags)
    settings.dsn_required()
    return settings


def log_notes(notes: Sequence[str]) -> None:
    """Logs warnings of the settings, one line each."""
    from pgworkd import log

    for line in notes:
        log.logger().warning("settings.note", note=line)


def ask(dsn: str | None, question: Callable[[Admin], Awaitable[Answer]]) -> Answer:
    """The result of a call that may write; SchemaError if the schema is missing or of another version."""
    return _answer(settings_of(dsn), question, verify=True, any_server=False)


def ask_any(dsn: str | None, question: Callable[[Admin], Awaitable[Answer]], *, verify: bool = True) -> Answer:
    """The result of a call that only reads, for which a standby will do. `verify` False: whatever the schema's version.

    A standby does not have the rows of unlogged tables (pools, progress).
    """
    return _answer(settings_of(dsn), question, verify=verify, any_server=True)


def _answer(
    settings: Settings, question: Callable[[Admin], Awaitable[Answer]], *, verify: bool, any_server: bool
) -> Answer:
    from functools import partial

    import anyio

    return anyio.run(partial(_ask, settings, question, verify=verify, any_server=any_server))


async def _ask(
    settings: Settings, question: Callable[[Admin], Awaitable[Answer]], *, verify: bool, any_server: bool
) -> Answer:
    from pgworkd.admin.admin import Admin
    from pgworkd.options import connection_options

    async with Admin(connection_options(settings, by=operator(), any_server=any_server)) as admin:
        try:
            if verify:
                await admin.verify()
            return await question(admin)
        except (DatabaseUnavailable, DatabaseError, UsageError) as error:
            raise hinted(error, settings) from None


async def check_queue(admin: Admin, queue: str, *, create: bool | None = None) -> None:
    """UsageError for a queue without a live job, worker, settings or schedule, unless `create`: it may be misspelt."""
    if create or await admin.queues.exists(queue):
        return
    found = closest(queue, await admin.queues.names())
    hint = f": did you mean {found!r}?" if found else ""
    early = "" if create is None else "; use --create for a queue that does not exist yet"
    raise UsageError(f"unknown queue {queue!r}{hint or early}")


async def note_unknown(admin: Admin, queue: str) -> None:
    """Warns of a queue without a job, worker, settings or schedule: for commands whose answer about it is 0."""
    try:
        await check_queue(admin, queue)
    except UsageError as error:
        note(f"{error}: no live job, worker, setting or schedule has this name, so all its numbers are 0")


async def note_standby(admin: Admin) -> None:
    """Prints what is missing if the server is a standby."""
    if (await admin.server()).standby:
        note("this is a standby: which worker serves which queue, and with how many slots, is only on the primary")


def operator() -> str:
    """The user who runs this command, for the audit: login name and host, in ASCII."""
    import getpass
    import socket

    try:
        login = getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in many a container
        login = "unknown"
    return f"{login}@{socket.gethostname()}".encode("ascii", "backslashreplace").decode().replace("\0", "")[:200]


def hinted(error: PgworkdError, settings: Settings) -> PgworkdError:
    """An error with the address and a hint, if it is an error of the connection; else the error as it is."""
    text = str(error)
    hints = [hint for sign, hint in _HINTS.items() if sign in text.lower()]
    if isinstance(error, DatabaseUnavailable) or (hints and isinstance(error, DatabaseError)):
        kind = OutcomeUnknown if isinstance(error, OutcomeUnknown) else DatabaseUnavailable
        return kind(f"{text}; tried {settings.database}" + (f": {hints[0]}" if hints else ""))
    if isinstance(error, AccessRefused):
        return AccessRefused(f"{text}; tried {settings.database}")
    return error


def stdin_text() -> str:
    """Standard input as a payload; UsageError if it is empty, too large or not UTF-8."""
    import sys

    data = b"" if sys.stdin is None else sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
    if len(data) > STDIN_BYTES_MAX:
        raise UsageError(f"standard input is larger than the {STDIN_BYTES_MAX:,} bytes allowed for a payload")
    if not data.strip():
        raise UsageError("standard input is empty: give a JSON object, for example {}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def instant_of(text: str, flag: str = "--run-at") -> datetime:
    """The flag's value as an instant; UsageError unless it is one, with a time zone."""
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{flag} {text[:40]!r}: give an instant like 2027-01-31T07:00:00+01:00") from None
    if instant.utcoffset() is None:
        raise UsageError(f"{flag} {text[:40]!r} has no time zone: add Z or an offset like +01:00")
    return instant


def duration(*flags: str, text: str) -> Any:
    """An option for a length of time, in seconds or with a unit."""

    def parsed(value: object) -> float:
        found = seconds_of(str(value))
        if found is None:
            raise UsageError(f"{flags[0]} {quoted(value)}: give {FORM}")
        return found

    return typer.Option(*flags, metavar="DURATION", parser=parsed, help=text)


def span_or_instant(text: str, flag: str) -> tuple[float, None] | tuple[None, datetime]:
    """A length of time in seconds, or an instant. UsageError for other text."""
    if (found := seconds_of(text)) is not None:
        return found, None
    try:
        return None, instant_of(text, flag)
    except UsageError as error:
        raise UsageError(f"{error}, or a length of time like 2h") from None


def one_or_all(name: str | None, what: str, *, every: bool) -> None:
    """UsageError unless either a name is given or --all."""
    if (name is None) != every:
        raise UsageError(f"give the name of a {what}, or --all" + (", not both" if every else ""))


def confirm(what: str, *, yes: bool) -> None:
    """Asks for confirmation, unless `yes`; UsageError without a terminal."""
    import sys

    if yes:
        return
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{what}: add --yes to confirm, as there is no terminal to ask on")
    typer.confirm(f"{what}?", abort=True, err=True)


def check_command(command: list[str], example: str) -> None:
    """Raises UsageError unless there is a command that exists."""
    if not command:
        raise UsageError(f"no command given: add one, as in {example}")
    if shutil.which(command[0]) is None:
        said = "it is not executable (chmod +x)" if Path(command[0]).is_file() else "no such program on the PATH"
        raise UsageError(f"command {command[0]!r}: {said}: correct it, or give its path")
