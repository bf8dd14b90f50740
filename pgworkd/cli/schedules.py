"""Commands on schedules: list them; enable, disable, remove or run one."""

from __future__ import annotations

from typing import Annotated

import typer

from pgworkd.cli.common import Dsn, Json, ask, ask_any, one_or_all
from pgworkd.cli.output import as_json, out, table
from pgworkd.core.validation import counted
from pgworkd.errors import UsageError
from pgworkd.process.redaction import escaped

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.", show_default=False)]
NameOrAll = Annotated[
    str | None, typer.Argument(metavar="NAME", help="The schedule's name, or --all.", show_default=False)
]
All = Annotated[bool, typer.Option("--all", help="All schedules.")]
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
def enable(name: NameOrAll = None, *, every: All = False, dsn: Dsn = None) -> None:
    """Enable a schedule, or all; occurrences missed while it was disabled follow its rule for missed ones."""
    _switch(name, dsn, every=every, enabled=True)


@group.command()
def disable(name: NameOrAll = None, *, every: All = False, dsn: Dsn = None) -> None:
    """Disable a schedule, or all; a job that is due or running stays. Starting a daemon does not enable it."""
    _switch(name, dsn, every=every, enabled=False)


def _switch(name: str | None, dsn: str | None, *, every: bool, enabled: bool) -> None:
    one_or_all(name, "schedule", every=every)
    state = "enabled" if enabled else "disabled"
    if name is None:
        changed = ask(dsn, lambda admin: admin.schedules.enable_all(enabled=enabled))
        out(f"{counted(changed, 'schedule')} {state}")
    else:
        operation = "enable" if enabled else "disable"
        was = not ask(dsn, lambda admin: getattr(admin.schedules, operation)(name))
        out(f"schedule {escaped(name)} " + (f"was {state} already" if was else f"is {state}"))


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
