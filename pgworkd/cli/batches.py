"""Commands on batches: list trees, show one, seal, cancel or delete it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from pgworkd.cli.common import Dsn, Json, Yes, ask, ask_any, confirm
from pgworkd.cli.output import as_json, is_terminal, out, parsed, print_rows
from pgworkd.core.validation import counted
from pgworkd.errors import BatchClosed, UsageError
from pgworkd.process.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.client.batch_types import Cancelled, Progress

BAR_CHARS = 20
REFRESH_S = 0.5
_NARROW = "id state name done total queue batches created_at finished_at cancelled meta dead"

IdArgument = Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The batch's id.")]

group = typer.Typer(help="List trees of batches; show, seal, cancel or delete one.")


@group.callback(invoke_without_command=True)
def batches(
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Only trees of this name.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", help="Maximum number of trees.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the newest trees of batches: how many of their jobs have finished, and how."""
    if context.invoked_subcommand is not None:
        if json or name is not None or dsn is not None:
            raise UsageError(f"put options after: pgworkd batches {context.invoked_subcommand} ...")
        return
    from pgworkd.admin.batches import TreeRow

    rows = ask_any(dsn, lambda admin: admin.batches.find(name, limit))
    if json:
        as_json([row._asdict() | {"meta": parsed(row.meta)} for row in rows])
    else:
        print_rows(rows, TreeRow._fields, _NARROW, json=False)


@group.command()
def show(
    batch_id: IdArgument,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Redraw until the tree has finished.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Draw the tree of a batch, with the progress of each batch."""
    if follow and json:
        raise UsageError("--follow and --json exclude each other: leave out one of them")
    if follow:
        ask_any(dsn, lambda admin: _follow(admin, batch_id))
        return
    rows = ask_any(dsn, lambda admin: admin.batches.tree(batch_id))
    if json:
        as_json([row._asdict() | {"meta": parsed(row.meta)} for row in rows])
    else:
        out(drawn(rows))


@group.command()
def seal(batch_id: IdArgument, *, dsn: Dsn = None) -> None:
    """Close a batch to further jobs; it finishes when its jobs have."""
    was_open = ask(dsn, lambda admin: admin.batches.seal(batch_id))
    out(f"batch {batch_id} " + ("is sealed" if was_open else "was sealed, cancelled or finished before"))


@group.command()
def cancel(batch_id: IdArgument, *, dsn: Dsn = None) -> None:
    """Cancel a batch and all below it: waiting jobs at once; running ones are asked to stop."""
    done = ask(dsn, lambda admin: _cancel(admin, batch_id))
    if done is None:
        raise BatchClosed(f"batch {batch_id} and all below it have already finished: there is nothing to cancel")
    cancelled, asked = counted(done.cancelled, "job"), counted(done.requested, "running job")
    out(f"batch {batch_id} is cancelled: {cancelled} cancelled, {asked} asked to stop")


@group.command()
def delete(
    batch_id: IdArgument,
    *,
    items: Annotated[bool, typer.Option("--items", help="Delete the history of its jobs, too.")] = False,
    cancel_: Annotated[
        bool, typer.Option("--cancel", help="Cancel it first if it has not finished, and wait for jobs that run.")
    ] = False,
    yes: Yes = False,
    dsn: Dsn = None,
) -> None:
    """Delete a batch and all below it, once its tree has finished; the history of its jobs is kept."""
    if items:
        confirm(f"delete batch {batch_id} and all below it with the history of all their jobs", yes=yes)
    deleted, gone = ask(dsn, lambda admin: _delete(admin, batch_id, items=items, cancel=cancel_))
    out(f"{counted(deleted, 'batch')} deleted" + (f", with {counted(gone, 'job')}" if items else ""))


async def _delete(admin: Admin, batch_id: UUID, *, items: bool, cancel: bool) -> tuple[int, int]:
    """Deletes all of it, step by step; how many batches and jobs."""
    import anyio

    gone = 0
    while (done := await admin.batches.delete_some(batch_id, items=items, cancel=cancel)).more:
        gone += done.items
        if not done.items:  # some still run
            await anyio.sleep(REFRESH_S)
    return done.deleted, gone


def drawn(rows: Sequence[Progress]) -> str:
    """A tree as text, one line for each batch; `rows` have parents before children."""
    names = [f"{_branch(rows, i)}{escaped(row.name)}" for i, row in enumerate(rows)]
    width = max(map(len, names))
    return "\n".join(f"{name:<{width}}  {_bar(row)}  {_summary(row)}" for name, row in zip(names, rows, strict=True))


def _branch(rows: Sequence[Progress], index: int) -> str:
    """The lines that connect a batch to the first one."""
    top, depth = rows[0].depth, rows[index].depth
    parts: list[str] = []
    for level in range(depth, top, -1):
        after = next((row.depth for row in rows[index + 1 :] if row.depth <= level), -1)
        goes_on = after == level
        parts.append(("├─ " if goes_on else "└─ ") if level == depth else ("│  " if goes_on else "   "))
    return "".join(reversed(parts))


def _bar(row: Progress) -> str:
    share = row.done / row.total if row.total else float(row.state.startswith("completed"))
    filled = int(share * BAR_CHARS)
    return f"{'█' * filled}{'░' * (BAR_CHARS - filled)} {int(share * 100):3d} %"


def _summary(row: Progress) -> str:
    bad = "".join(f", {n:,} {what}" for n, what in ((row.dead, "dead"), (row.cancelled, "cancelled")) if n)
    return f"{row.done:,} of {row.total:,}, {row.state}{bad}"


async def _follow(admin: Admin, batch_id: UUID) -> None:
    """Redraws the tree whenever it has changed; on a terminal in place."""
    import anyio

    before, lines = "", 0
    while True:
        rows = await admin.batches.tree(batch_id)
        if (now := drawn(rows)) != before:
            up = f"\x1b[{lines}F\x1b[J" if lines and is_terminal() else ""
            out(up + now)
            before, lines = now, now.count("\n") + 1
        if all(row.finished for row in rows):
            return
        await anyio.sleep(REFRESH_S)


async def _cancel(admin: Admin, batch_id: UUID) -> Cancelled | None:
    """Cancels all of it; None if it had finished before."""
    if all(row.finished for row in await admin.batches.tree(batch_id)):
        return None
    done = await admin.batches.cancel(batch_id)
    while done.more:
        step = await admin.batches.cancel(batch_id)
        if not step.cancelled and not step.requested:
            break  # locked jobs are left to the daemons' maintenance
        done = step._replace(cancelled=done.cancelled + step.cancelled, requested=done.requested + step.requested)
    return done
