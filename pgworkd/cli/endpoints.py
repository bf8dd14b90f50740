"""The commands push and endpoints: where the jobs of queues are sent by HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgworkd.cli.common import (
    PROCESS_OPTIONS,
    DebugBodies,
    DebugHttp,
    Dsn,
    Json,
    MetricsListen,
    ask,
    ask_any,
    duration,
    option,
    settings_of,
    takes,
)
from pgworkd.cli.output import as_json, out, table
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.endpoints import EndpointRow
    from pgworkd.push.endpoint import Endpoint

Name = Annotated[str, typer.Argument(metavar="NAME", help="The endpoint's name.", show_default=False)]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="QUEUE", help="Send this queue's jobs there (repeatable)."),
]
Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="Where to send: https://...")]
Header = Annotated[
    list[str] | None, typer.Option("--header", metavar="NAME:VALUE", help="Send this header (repeatable); no secrets.")
]
Secret = Annotated[
    str | None,
    typer.Option("--secret", metavar="NAME", help="Sign with PGWORKD_SECRET_NAME, or the file NAME in secrets_dir."),
]
Unsigned = Annotated[bool, typer.Option("--unsigned", help="Do not sign: anybody could send what we send.")]
Mode = Annotated[
    str | None, typer.Option("--mode", metavar="sync|callback", help="callback: 202 leaves the end to a later request.")
]
TimeoutS = Annotated[float | None, duration("--timeout-s", text="Time for an answer; default: 30.")]
CallbackTimeoutS = Annotated[
    float | None, duration("--callback-timeout-s", text="Time for a callback, unless extended; default: 300.")
]
AllowPrivate = Annotated[
    bool | None,
    typer.Option("--allow-private/--no-allow-private", help="Allow addresses that are not of the public internet."),
]
StrictResults = Annotated[
    bool | None,
    typer.Option(
        "--strict-results/--no-strict-results", help="A 2xx whose result cannot be stored makes the job dead."
    ),
]
SecretsDir = Annotated[
    str | None, typer.Option("--secrets-dir", metavar="DIR", help="Directory of secrets, one file each, mode 0600.")
]

_GIVEN = ("url", "mode", "allow_private", "strict_results", "timeout_s", "callback_timeout_s")
group = typer.Typer(help="List, add, change, test, disable, enable and remove the endpoints that jobs are sent to.")


@takes(
    {
        "dsn": Dsn,
        "queues": Annotated[
            list[str] | None,
            typer.Option(
                "--queue",
                "-q",
                metavar="NAME[=N]",
                help="Only this queue, with concurrency N (repeatable); default: all.",
            ),
        ],
        "secrets_dir": SecretsDir,
        "shutdown_s": option("--shutdown-s", "DURATION", "How long requests may take to finish at a stop."),
        "metrics_listen": MetricsListen,
        **PROCESS_OPTIONS,
    }
)
def push(*, debug_http: DebugHttp = False, debug_bodies: DebugBodies = False, **given: Any) -> int:
    """Send the jobs of queues that have an endpoint by HTTP, until SIGTERM or SIGINT (extra http).

    Which queues go where is in the database, and may be changed at any time: pgworkd endpoints --help.
    """
    from pgworkd.cli.serve import serve

    return serve(given, push=True, requests=debug_http, bodies=debug_bodies)


@group.callback(invoke_without_command=True)
def endpoints(context: typer.Context, *, json: Json = False, dsn: Dsn = None) -> None:
    """List the endpoints: how they fare, and which queues are sent there."""
    if context.invoked_subcommand is not None:
        if json or dsn is not None:
            raise UsageError(f"put --json and --dsn after: pgworkd endpoints {context.invoked_subcommand} ...")
        return
    rows = ask_any(dsn, lambda admin: admin.endpoints.find())
    if json:
        as_json([row._asdict() for row in rows])
        return
    columns = ("name", "state", "queues", "mode", "timeout_s", "secret", "paused_until", "reason")
    table(columns, [[_cell(row, column) for column in columns] for row in rows])


@group.command()
def show(name: Name, *, json: Json = False, dsn: Dsn = None) -> None:
    """Show an endpoint whole, with its URL and headers."""
    found = ask_any(dsn, lambda admin: _known(admin, name))._asdict()
    if json:
        as_json(found)
    else:
        table(("setting", "value"), [(key, str(value)) for key, value in found.items()], whole=True)


@group.command()
def add(
    name: Name,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to send: https://...", show_default=False)],
    *,
    queue: Queues = None,
    secret: Secret = None,
    unsigned: Unsigned = False,
    mode: Mode = None,
    timeout_s: TimeoutS = None,
    callback_timeout_s: CallbackTimeoutS = None,
    header: Header = None,
    allow_private: AllowPrivate = None,
    strict_results: StrictResults = None,
    dsn: Dsn = None,
) -> None:
    """Add an endpoint, and send the jobs of these queues there; running pgworkd push daemons follow within seconds."""
    given = (url, mode, allow_private, strict_results, timeout_s, callback_timeout_s)
    columns = _columns(given, header, secret, unsigned=unsigned)
    _endpoint({"name": name} | columns)

    async def question(admin: Admin) -> None:
        if await admin.endpoints.get(name) is not None:
            raise UsageError(f"there is an endpoint {name!r}: change it with pgworkd endpoints set")
        await admin.endpoints.put(name, columns)
        for each in queue or ():
            await admin.queues.set(each, {"endpoint": name})

    ask(dsn, question)
    sent = ", ".join(map(escaped, queue or [])) or f"nothing yet: pgworkd queues set QUEUE --endpoint {escaped(name)}"
    out(f"endpoint {escaped(name)} is added; sent there: {sent}")


@group.command("set")
def set_(
    name: Name,
    *,
    url: Url = None,
    secret: Secret = None,
    unsigned: Unsigned = False,
    mode: Mode = None,
    timeout_s: TimeoutS = None,
    callback_timeout_s: CallbackTimeoutS = None,
    header: Header = None,
    allow_private: AllowPrivate = None,
    strict_results: StrictResults = None,
    dsn: Dsn = None,
) -> None:
    """Change an endpoint; headers that are given replace all of them."""
    given = (url, mode, allow_private, strict_results, timeout_s, callback_timeout_s)
    changes = _columns(given, header, secret, unsigned=unsigned)
    if not changes:
        raise UsageError("nothing to change: give --url, --secret, --timeout-s or another option")

    async def question(admin: Admin) -> None:
        now = (await _known(admin, name))._asdict()
        _endpoint(now | changes)
        await admin.endpoints.put(name, changes, create=False)

    ask(dsn, question)
    out(f"endpoint {escaped(name)} is changed")


@group.command("test")
def send_test(name: Name, *, secrets_dir: SecretsDir = None, dsn: Dsn = None) -> int:
    """Send an endpoint a message of type endpoint.test, from this host; exit code 1 unless it is answered with 2xx."""
    import anyio

    from pgworkd.push.test_message import attempted

    settings = settings_of(dsn, secrets_dir=secrets_dir)
    endpoint = _endpoint(ask_any(dsn, lambda admin: _known(admin, name))._asdict())
    answered, said = anyio.run(attempted, endpoint, settings.secrets_dir)
    out(f"endpoint {escaped(name)}: {escaped(said)}")
    return 0 if answered else 1


@group.command()
def disable(name: Name, *, dsn: Dsn = None) -> None:
    """Send nothing more there, and pause its queues, until it is enabled."""
    changed = ask(dsn, lambda admin: _changed(admin, name, admin.endpoints.disable(name)))
    out(f"endpoint {escaped(name)} " + ("is disabled" if changed else "was disabled already"))


@group.command()
def enable(name: Name, *, dsn: Dsn = None) -> None:
    """Enable an endpoint, or end its pause; queues that were paused because of it go on."""
    ask(dsn, lambda admin: _changed(admin, name, admin.endpoints.enable(name)))
    out(f"endpoint {escaped(name)} is enabled")


@group.command()
def remove(name: Name, *, dsn: Dsn = None) -> None:
    """Remove an endpoint to which no queue is sent any more."""
    if not ask(dsn, lambda admin: _changed(admin, name, admin.endpoints.remove(name))):
        raise PgworkdError(f"there is no endpoint {name!r}: see pgworkd endpoints")
    out(f"endpoint {escaped(name)} is removed")


async def _changed(admin: Admin, name: str, change: Any) -> bool:
    """The result of a change of an endpoint; PgworkdError if there is no such endpoint."""
    done = bool(await change)
    if not done:
        await _known(admin, name)
    return done


async def _known(admin: Admin, name: str) -> EndpointRow:
    found = await admin.endpoints.get(name)
    if found is None:
        raise PgworkdError(f"there is no endpoint {name!r}: see pgworkd endpoints")
    return found


def _columns(
    given: Sequence[object], header: list[str] | None, secret: str | None, *, unsigned: bool
) -> dict[str, Any]:
    """The columns of an endpoint that the options set. `given`: values of _GIVEN, None for one that is not given."""
    found: dict[str, Any] = {column: value for column, value in zip(_GIVEN, given, strict=True) if value is not None}
    if header is not None:
        found["headers"] = dict(map(_header, header))
        if len(found["headers"]) < len(header):
            raise UsageError("--header: one of them is given twice")
    if secret is not None and unsigned:
        raise UsageError("--secret and --unsigned: give one of them")
    if secret is not None or unsigned:
        found |= {"secret_name": secret, "unsigned": unsigned}
    return found


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise UsageError(f"--header {text[:80]!r}: write NAME:VALUE, as in X-Team:billing")
    return name.strip(), value.strip()


def _endpoint(columns: dict[str, Any]) -> Endpoint:
    """An endpoint of these columns, checked. Raises UsageError also where the extra is missing."""
    try:
        from pgworkd.push.endpoint import Endpoint
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'pgworkd[http]'") from None
    return Endpoint.of(columns)


def _cell(row: EndpointRow, column: str) -> object:
    if column == "secret":
        return "unsigned" if row.unsigned else row.secret_name
    return getattr(row, column)
