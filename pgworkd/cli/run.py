"""Commands that run something: the daemon, the migration, a Postgres to develop on, the demo."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Annotated

import typer

from pgworkd.cli import stop_signals
from pgworkd.cli.common import Dsn, hinted, settings_of
from pgworkd.cli.output import note, out
from pgworkd.errors import DatabaseError, DatabaseUnavailable, PgworkdError, UsageError

Data = Annotated[
    Path | None, typer.Option("--data", metavar="DIR", help="Keep the data there; without it, it is temporary.")
]
Seconds = str | None  # read by the settings, whose errors say what to write instead


def run(
    *,
    app: Annotated[str | None, typer.Option("--app", metavar="MODULE:ATTRIBUTE", help="The application.")] = None,
    dsn: Dsn = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(
            "--queue", "-q", metavar="NAME[=N]", help="A queue, and how many at once; repeat it. All if none."
        ),
    ] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            "--processes", metavar="N", help="Run so many daemons, for CPU-bound handlers; concurrency is per process."
        ),
    ] = None,
    lease_s: Annotated[
        Seconds, typer.Option("--lease-s", metavar="SECONDS", help="A silent worker keeps its jobs for so long.")
    ] = None,
    heartbeat_s: Annotated[
        Seconds,
        typer.Option("--heartbeat-s", metavar="SECONDS", help="Between renewals; at most a third of the lease."),
    ] = None,
    poll_s: Annotated[
        Seconds, typer.Option("--poll-s", metavar="SECONDS", help="Between looks at an idle queue.")
    ] = None,
    shutdown_s: Annotated[
        Seconds, typer.Option("--shutdown-s", metavar="SECONDS", help="Running jobs may finish within this at a stop.")
    ] = None,
    worker_name: Annotated[str | None, typer.Option("--worker-name", help="How this worker shows up.")] = None,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="FORMAT", help="auto, json or console.")
    ] = None,
) -> int:
    """Run jobs until SIGTERM or SIGINT; a second one stops at once. SIGHUP reloads the settings.

    All settings can also be given as PGWORKD_... or in pgworkd.toml: see pgworkd config show.
    """
    from pgworkd.cli.serve import serve

    flags: dict[str, object] = {
        "app": app,
        "dsn": dsn,
        "queues": queue,
        "processes": processes,
        "lease_s": lease_s,
        "heartbeat_s": heartbeat_s,
        "poll_s": poll_s,
        "shutdown_s": shutdown_s,
        "worker_name": worker_name,
        "log_level": log_level,
        "log_format": log_format,
    }
    return serve(flags)


def migrate(
    *,
    only_print: Annotated[bool, typer.Option("--print", help="Print the schema's SQL and touch nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run the script also where it has been run.")] = False,
    dsn: Dsn = None,
) -> None:
    """Install the schema, or bring it up to this version; does nothing, and locks nothing, where it is."""
    from pgworkd.database import schema

    if only_print:
        out(schema.script().rstrip("\n"))
        return
    from functools import partial

    import anyio

    from pgworkd.database.connection import ConnectionOptions

    settings = settings_of(dsn)
    options = ConnectionOptions(settings.dsn_required(), settings.connect_timeout_s, settings.command_timeout_s)
    try:
        before, after = anyio.run(partial(schema.migrate, options, force=force, say=note))
    except (DatabaseUnavailable, DatabaseError) as error:
        raise hinted(error, settings) from None
    out(f"schema version: {'none' if before is None else before} before, {after} now")


def grants(
    *,
    owner: Annotated[str, typer.Option(metavar="ROLE", help="Owns the schema and migrates it.")] = "pgworkd_owner",
    worker: Annotated[
        str, typer.Option(metavar="ROLE", help="Runs daemons and operators' commands.")
    ] = "pgworkd_worker",
    enqueuer: Annotated[str, typer.Option(metavar="ROLE", help="Inserts jobs.")] = "pgworkd_enqueuer",
    reader: Annotated[str, typer.Option(metavar="ROLE", help="Reads everything.")] = "pgworkd_reader",
) -> None:
    """Print the SQL that makes four roles with the least rights each needs; touches nothing.

    For a superuser, after migrate, and again after each upgrade: pgworkd grants | psql -v ON_ERROR_STOP=1
    """
    from pgworkd.database import grants as sql

    names = {"owner": owner, "worker": worker, "enqueuer": enqueuer, "reader": reader}
    out(sql.text(names).rstrip("\n"))


def dev(*, data: Data = None) -> None:
    """Run a Postgres to develop on, with the schema installed, until SIGINT or SIGTERM."""
    import anyio

    from pgworkd.database import schema
    from pgworkd.database.connection import ConnectionOptions
    from pgworkd.embedded import EmbeddedPostgres, EmbeddedUnavailable

    server = EmbeddedPostgres(data)
    try:
        try:
            server.start()
        except EmbeddedUnavailable as error:
            raise _in_one_line(error) from None
        _, version = anyio.run(schema.migrate, ConnectionOptions(server.dsn()))
        out(f"Postgres is up with schema version {version}; Ctrl-C ends it. In another terminal:\n")
        out(f"export PGWORKD_DSN='{server.dsn()}'")
        while server.pid is not None:
            time.sleep(0.5)
        raise PgworkdError("Postgres has ended by itself" + ("" if data is None else f": see {data}/server.log"))
    finally:
        stop_signals.ignore()
        server.stop()


def demo(
    *,
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="N", help="How long it goes on; until Ctrl-C if not given.")
    ] = None,
    data: Data = None,
    path: Annotated[
        Path | None, typer.Option("--path", metavar="DIR", help="The files to work on; by default our own.")
    ] = None,
) -> int:
    """Watch real work being done on your files, on an embedded Postgres."""
    try:
        scene = importlib.import_module("pgworkd.demo.demo")
    except ModuleNotFoundError as error:
        raise UsageError(f"this installation has no demo: {error.msg}") from None
    return int(scene.main(seconds=seconds, data_dir=data, path=path))


def _in_one_line(error: Exception) -> PgworkdError:
    """The reason and, of a server's log, its last lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return PgworkdError(" | ".join([lines[0], *lines[1:][-3:]]))
