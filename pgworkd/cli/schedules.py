"""Commands on schedules: which there are, and what an operator does with one."""

from __future__ import annotations

from typing import Annotated

import typer

from pgworkd.cli.common import Dsn, Json, ask, look
from pgworkd.cli.output import as_json, out, table
from pgworkd.errors import UsageError
from pgworkd.words.redaction import escaped

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of the schedule.", show_default=False)]
group = typer.Typer(help="List the recurring jobs; enable, disable or remove one, or run it now.")


@group.callback(invoke_without_command=True)
def schedules(context: typer.Context, *, json: Json = False, dsn: Dsn = None) -> None:
    """List the recurring jobs: the rule, the next occurrence, and why there is none."""
    if context.invoked_subcommand is not None:
        if json or dsn is not None:
            raise UsageError(f"put --json and --dsn behind: pgworkd schedules {context.invoked_subcommand} ...")
        return
    rows = look(dsn, lambda admin: admin.schedules())
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
    """Let a schedule go on; what it missed meanwhile is treated as its rule says."""
    changed = ask(dsn, lambda admin: admin.enable_schedule(name, enabled=True))
    out(f"schedule {escaped(name)} " + ("is enabled" if changed else "was enabled already"))


@group.command()
def disable(name: Name, *, dsn: Dsn = None) -> None:
    """Plan no more runs of a schedule; what is due or runs goes on. A daemon that starts does not enable it."""
    changed = ask(dsn, lambda admin: admin.enable_schedule(name, enabled=False))
    out(f"schedule {escaped(name)} " + ("is disabled" if changed else "was disabled already"))


@group.command()
def remove(name: Name, *, dsn: Dsn = None) -> None:
    """Delete a schedule that stands in no running daemon's code; what is due or runs stays."""
    ask(dsn, lambda admin: admin.remove_schedule(name))
    out(f"schedule {escaped(name)} is removed")


@group.command("run-now")
def run_now(name: Name, *, json: Json = False, dsn: Dsn = None) -> None:
    """Enqueue one run of a schedule now, besides its occurrences; print the job's id."""
    job_id = ask(dsn, lambda admin: admin.run_schedule(name))
    if json:
        as_json({"id": job_id})
    else:
        out(str(job_id))
