"""Commands on schedules: list them; enable, disable, remove or run one."""

from __future__ import annotations

from typing import Annotated

import typer

from pgworkd.cli.common import Dsn, Json, ask, ask_any
from pgworkd.cli.output import as_json, out, table
from pgworkd.errors import UsageError
from pgworkd.words.redaction import escaped

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.", show_default=False)]
group = typer.Typer(help="List the schedules; enable, disable or remove one, or run it now.")


@group.callback(invoke_without_command=True)
def schedules(context: typer.Context, *, json: Json = False, dsn: Dsn = None) -> None:
    """List the schedules: rule, next occurrence, or the error that prevents one."""
    if context.invoked_subcommand is not None:
        if json or dsn is not None:
            raise UsageError(f"put --json and --dsn after: pgworkd schedules {context.invoked_subcommand} ...")
        return
    rows = ask_any(dsn, lambda admin: admin.schedules.find())
    if json:
        as_json([row._asdict() for row in rows])
        return
    shown = [
        (
            row.name,
            row.queue,
            row.cron if row.cron is not None else f"every {row.every_s} s",
            row.timezone,
            row.next_at if row.enabled else "disabled",
            row.status,
            row.last_at,
            row.error,
        )
        for row in rows
    ]
    table(("name", "queue", "rule", "timezone", "next", "status", "last", "error"), shown)


@group.command()
def enable(name: Name, *, dsn: Dsn = None) -> None:
    """Enable a schedule; occurrences missed while it was disabled follow its rule for missed ones."""
    changed = ask(dsn, lambda admin: admin.schedules.enable(name))
    out(f"schedule {escaped(name)} " + ("is enabled" if changed else "was enabled already"))


@group.command()
def disable(name: Name, *, dsn: Dsn = None) -> None:
    """Disable a schedule; a job that is due or running is not affected. Starting a daemon does not enable it."""
    changed = ask(dsn, lambda admin: admin.schedules.disable(name))
    out(f"schedule {escaped(name)} " + ("is disabled" if changed else "was disabled already"))


@group.command()
def remove(name: Name, *, dsn: Dsn = None) -> None:
    """Delete a schedule that is not in the code of any running daemon; a job that is due or running stays."""
    ask(dsn, lambda admin: admin.schedules.remove(name))
    out(f"schedule {escaped(name)} is removed")


@group.command("run-now")
def run_now(name: Name, *, json: Json = False, dsn: Dsn = None) -> None:
    """Enqueue a job of the schedule now, in addition to its occurrences; print the job's id."""
    job_id = ask(dsn, lambda admin: admin.schedules.run_now(name))
    if json:
        as_json({"id": job_id})
    else:
        out(str(job_id))
