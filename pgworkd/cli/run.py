"""The commands run, migrate, grants, dev, demo and conformance."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pgworkd.cli.common import (
    PROCESS_OPTIONS,
    Dsn,
    MetricsListen,
    ask_any,
    check_command,
    duration,
    hinted,
    option,
    settings_of,
    takes,
)
from pgworkd.cli.gateway import dashboard_of
from pgworkd.cli.output import note, out
from pgworkd.errors import DatabaseError, DatabaseUnavailable, PgworkdError, UsageError
from pgworkd.process import stop_signals

if TYPE_CHECKING:
    from pgworkd.embedded import EmbeddedPostgres

Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Data directory to keep; default: a temporary one.")
]
_OPTIONS = {
    "app": option("--app", "MODULE:ATTRIBUTE", "The application."),
    "dsn": Dsn,
    "queues": Annotated[
        list[str] | None,
        typer.Option(
            "--queue", "-q", metavar="NAME[=N]", help="Serve this queue, with concurrency N (repeatable); default: all."
        ),
    ],
    "processes": option(
        "--processes", "N", "Number of daemon processes, for CPU-bound handlers; concurrency is for each."
    ),
    "lease_s": option(
        "--lease-s",
        "DURATION",
        "Lease duration: jobs of a worker that stops renewing are taken over after this many seconds.",
    ),
    "heartbeat_s": option("--heartbeat-s", "DURATION", "Time between lease renewals; at most lease / 3."),
    "poll_s": option("--poll-s", "DURATION", "Polling interval of an idle queue."),
    "shutdown_s": option("--shutdown-s", "DURATION", "How long running jobs may take to finish at a stop."),
    "metrics_listen": MetricsListen,
    "remote": option("--remote", "URL", "Work through this gateway, with PGWORKD_TOKEN, without a database."),
    **PROCESS_OPTIONS,
}


@takes(_OPTIONS)
def run(**given: Any) -> int:
    """Run jobs until SIGTERM or SIGINT; a second signal stops at once. SIGHUP reloads the settings.

    Settings can also be given as PGWORKD_... in the environment or in pgworkd.toml: see pgworkd config show.
    """
    from pgworkd.cli.serve import serve

    return serve(given)


def migrate(
    *,
    only_print: Annotated[bool, typer.Option("--print", help="Print the schema's SQL and change nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run the script even if the schema is current.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit code 0 if the schema is up to date, else 1.")
    ] = False,
    dsn: Dsn = None,
) -> int:
    """Install the schema, or upgrade it to this version; changes and locks nothing if it is current."""
    from pgworkd.database import schema

    if only_print + force + check > 1:
        raise UsageError("--print, --force and --check exclude each other: give one of them")
    if only_print:
        out(schema.script().rstrip("\n"))
        return 0
    if check:
        fault = ask_any(dsn, lambda admin: admin.pending_migration(), verify=False)
        out(fault or f"the schema is up to date: version {schema.VERSION}")
        return 0 if fault is None else 1
    from functools import partial

    import anyio

    from pgworkd.options import connection_options

    settings = settings_of(dsn)
    try:
        before, after = anyio.run(partial(schema.migrate, connection_options(settings), force=force, say=note))
    except (DatabaseUnavailable, DatabaseError) as error:
        raise hinted(error, settings) from None
    out(f"schema version: {'none' if before is None else before} before, {after} now")
    return 0


def grants(
    *,
    owner: Annotated[
        str, typer.Option(metavar="ROLE", help="Role that owns and migrates the schema.")
    ] = "pgworkd_owner",
    worker: Annotated[
        str, typer.Option(metavar="ROLE", help="Role for daemons and operators' commands.")
    ] = "pgworkd_worker",
    enqueuer: Annotated[str, typer.Option(metavar="ROLE", help="Role that inserts jobs.")] = "pgworkd_enqueuer",
    reader: Annotated[str, typer.Option(metavar="ROLE", help="Role that may read everything.")] = "pgworkd_reader",
    gateway: Annotated[
        str, typer.Option(metavar="ROLE", help="Role for the gateway: all but the owner's, and its tokens.")
    ] = "pgworkd_gateway",
) -> None:
    """Print the SQL that creates five roles, each with the least privileges it needs; changes nothing.

    Run it after migrate, and again after each upgrade: pgworkd grants | psql -v ON_ERROR_STOP=1
    As a superuser, or as the user with CREATEROLE who has run migrate.
    """
    from pgworkd.database import grants as sql

    names = {"owner": owner, "worker": worker, "enqueuer": enqueuer, "reader": reader, "gateway": gateway}
    out(sql.text(names).rstrip("\n"))


def dev(*, data: Data = None) -> None:
    """Run an embedded Postgres for development, with schema and dashboard, until SIGINT or SIGTERM."""
    import anyio

    from pgworkd.database import schema
    from pgworkd.database.connection import ConnectionOptions
    from pgworkd.embedded import EmbeddedInUse, EmbeddedMissing, EmbeddedPostgres, EmbeddedUnavailable

    server = EmbeddedPostgres(data)
    try:
        try:
            server.start()
        except EmbeddedMissing:
            raise
        except EmbeddedInUse as error:
            where = ""
            if error.dsn:
                out(f"export PGWORKD_DSN='{error.dsn}'")
                where = ", at the address above: use that, or"
            raise PgworkdError(f"{error} already{where or ':'} stop it with: kill -INT {error.pid}") from None
        except EmbeddedUnavailable as error:
            raise _in_one_line(error) from None
        _, version = anyio.run(schema.migrate, ConnectionOptions(server.dsn()))
        if server.port_in_use is not None:
            note(f"port {server.port_in_use}, used last time, is taken by another program: the address has a new one")
        out(f"Postgres is up, with pgworkd's schema (version {version}) installed; Ctrl-C ends it.")
        if data is None:
            out("Its data is deleted then: with --data DIR, data and address stay the same at the next start.")
        stop_signals.run(_until_stopped, server, "" if data is None else f": see {data}/server.log")
    finally:
        stop_signals.ignore()
        server.stop()


async def _until_stopped(server: EmbeddedPostgres, where: str) -> None:
    """Serves the dashboard until a stop signal. Raises PgworkdError if Postgres ends; `where`: why, then."""
    import anyio

    with stop_signals.received() as signals:
        async with dashboard_of(server.dsn()) as said:
            out(said[:1].upper() + said[1:])
            out("In another terminal:\n")
            out(f"export PGWORKD_DSN='{server.dsn()}'")
            while server.pid is not None:
                with anyio.move_on_after(0.5):
                    await anext(signals)
                    return
    raise PgworkdError("Postgres ended unexpectedly" + where)


def demo(
    *,
    seconds: Annotated[float | None, duration("--seconds", text="How long; default: until Ctrl-C.")] = None,
    data: Data = None,
    path: Annotated[
        Path | None, typer.Option("--path", metavar="DIR", help="Files to process; default: those of pgworkd itself.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the dashboard up after that, until Ctrl-C; --seconds is 20 then.")
    ] = False,
) -> int:
    """Show a daemon processing your files, on an embedded Postgres, and the dashboard with its jobs."""
    part = _part("pgworkd.demo.demo", "demo")
    return int(part.main(seconds=seconds, data_dir=data, path=path, keep=keep, dashboard=dashboard_of))


def conformance(
    *,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Play only this check (repeatable).")
    ] = None,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", show_default=False, help="What starts the worker.")
    ] = None,
) -> int:
    """Check a worker in another language: what must it do when the network, the gateway or an operator plays tricks?

    pgworkd conformance -- node worker.mjs

    It starts an embedded Postgres, a gateway and the worker. What the
    worker has to handle: docs/workers-in-any-language.md
    """
    check_command(command or [], "-- node worker.mjs")
    return int(_part("pgworkd.conformance.conformance", "conformance program").main(command, only or [], out))


def _part(module: str, what: str) -> Any:
    """A program of the package that the commands' other modules do not import."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"this installation has no {what}: {error.msg}") from None


def _in_one_line(error: Exception) -> PgworkdError:
    """The reason and the last lines of the server's log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return PgworkdError(" | ".join([lines[0], *lines[1:][-3:]]))
