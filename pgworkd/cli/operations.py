"""Commands on operations in the background: how far they are; stop one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pgworkd.cli.common import Dsn, Json, ask, ask_any
from pgworkd.cli.output import as_json, note, out, table
from pgworkd.errors import UsageError

if TYPE_CHECKING:
    from pgworkd.admin.background import BackgroundOperation

group = typer.Typer(help="Show how far retry, cancel and discard with --background are; stop one.")
_COLUMNS = ("id", "what", "state", "done", "requested", "refused", "of", "jobs", "who", "started_at", "reason")


@group.callback(invoke_without_command=True)
def operations(
    context: typer.Context,
    *,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, metavar="N", help="Maximum number of operations.")
    ] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the operations in the background: those that go on, then the newest of the others."""
    if context.invoked_subcommand is not None:
        if json or dsn is not None:
            raise UsageError(f"put options after: pgworkd operations {context.invoked_subcommand} ...")
        return
    rows = ask_any(dsn, lambda admin: admin.background.find(limit))
    if json:
        as_json([each._asdict() | {"state": each.state} for each in rows])
    else:
        table(_COLUMNS, [_cells(each) for each in rows])


@group.command()
def stop(
    operation_id: Annotated[
        int, typer.Argument(metavar="ID", min=1, max=2**63 - 1, show_default=False, help="Its number.")
    ],
    *,
    dsn: Dsn = None,
) -> int:
    """Stop an operation. What it has done stays done."""
    if ask(dsn, lambda admin: admin.background.stop(operation_id)):
        out(f"operation {operation_id} is stopped")
        return 0
    note(f"operation {operation_id} is over, or unknown: see pgworkd operations")
    return 1


def _cells(each: BackgroundOperation) -> tuple[object, ...]:
    expected = "many" if each.expected is None else each.expected
    counts = (each.done, each.requested, each.refused, expected)
    return (each.id, each.what, each.state, *counts, each.filter, each.who, each.started_at, each.reason)
