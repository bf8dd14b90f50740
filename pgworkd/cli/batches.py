"""Commands on batches: the trees there are, how far one has come, and sealing, cancelling, deleting it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from pgworkd.cli.common import Dsn, Json, ask, look
from pgworkd.cli.output import as_json, is_terminal, out, table
from pgworkd.errors import BatchClosed, UsageError
from pgworkd.words.redaction import escaped
from pgworkd.words.validation import counted

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.client.batches import Cancelled, Progress

BAR_CHARS = 20
LOOK_S = 0.5
_COLUMNS = (
    "id",
    "name",
    "queue",
    "state",
    "batches",
    "total",
    "done",
    "dead",
    "cancelled",
    "created_at",
    "finished_at",
)

IdArgument = Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The batch's id.")]

group = typer.Typer(help="List the trees of batches; show one, seal, cancel or delete it.")


@group.callback(invoke_without_command=True)
def batches(
    context: typer.Context,
    *,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="Only trees of this name.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", help="So many of the newest.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the newest trees of batches: how many of their jobs are over, and how they ended."""
    if context.invoked_subcommand is not None:
        if json or name is not None or dsn is not None:
            raise UsageError(f"put options behind: pgworkd batches {context.invoked_subcommand} ...")
        return
    rows = look(dsn, lambda admin: admin.batch_trees(name, limit))
    if json:
        as_json([row._asdict() for row in rows])
    else:
        table(_COLUMNS, rows)


@group.command()
def show(
    batch_id: IdArgument,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until all of it is over.")] = False,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Draw the tree of a batch, with how far each batch has come."""
    if follow and json:
        raise UsageError("--follow draws: leave out --json")
    if follow:
        look(dsn, lambda admin: _follow(admin, batch_id))
        return
    rows = look(dsn, lambda admin: admin.batch_tree(batch_id))
    if json:
        as_json([row._asdict() for row in rows])
    else:
        out(drawn(rows))


@group.command()
def seal(batch_id: IdArgument, *, dsn: Dsn = None) -> None:
    """Let a batch take no more; it is finished when its jobs are."""
    was_open = ask(dsn, lambda admin: admin.seal_batch(batch_id))
    out(f"batch {batch_id} " + ("is sealed" if was_open else "was sealed, cancelled or finished before"))


@group.command()
def cancel(batch_id: IdArgument, *, dsn: Dsn = None) -> None:
    """End a batch and all below it: waiting jobs now, running ones are told to."""
    done = ask(dsn, lambda admin: _cancel(admin, batch_id))
    if done is None:
        raise BatchClosed(f"batch {batch_id} and all below it are finished already: there is nothing to cancel")
    ended, told = counted(done.cancelled, "job"), counted(done.requested, "running job")
    out(f"batch {batch_id} is cancelled: {ended} ended, {told} told to end")


@group.command()
def delete(batch_id: IdArgument, *, dsn: Dsn = None) -> None:
    """Delete a batch and all below it, of a tree that is finished; the history of its jobs stays."""
    out(f"{counted(ask(dsn, lambda admin: admin.delete_batch(batch_id)), 'batch')} deleted")


def drawn(rows: Sequence[Progress]) -> str:
    """A tree as text, a line for each batch; `rows` come each before its children."""
    names = [f"{_branch(rows, i)}{escaped(row.name)}" for i, row in enumerate(rows)]
    width = max(map(len, names))
    return "\n".join(f"{name:<{width}}  {_bar(row)}  {_told(row)}" for name, row in zip(names, rows, strict=True))


def _branch(rows: Sequence[Progress], index: int) -> str:
    """The lines that lead to a batch from the first one."""
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


def _told(row: Progress) -> str:
    bad = "".join(f", {n:,} {what}" for n, what in ((row.dead, "dead"), (row.cancelled, "cancelled")) if n)
    return f"{row.done:,} of {row.total:,}, {row.state}{bad}"


def _over(rows: Sequence[Progress]) -> bool:
    return all(row.state in ("cancelled", "completed", "completed with failures") for row in rows)


async def _follow(admin: Admin, batch_id: UUID) -> None:
    """Draws the tree anew whenever it has changed; in a terminal at its place."""
    import anyio

    before, lines = "", 0
    while True:
        rows = await admin.batch_tree(batch_id)
        if (now := drawn(rows)) != before:
            up = f"\x1b[{lines}F\x1b[J" if lines and is_terminal() else ""
            out(up + now)
            before, lines = now, now.count("\n") + 1
        if _over(rows):
            return
        await anyio.sleep(LOOK_S)


async def _cancel(admin: Admin, batch_id: UUID) -> Cancelled | None:
    """None: it was over before."""
    if all(row.state.startswith("completed") or row.state == "cancelled" for row in await admin.batch_tree(batch_id)):
        return None
    done = await admin.cancel_batch(batch_id)
    while done.more:
        step = await admin.cancel_batch(batch_id)
        if not step.cancelled and not step.requested:
            break  # what is locked is left to the daemons' chores
        done = step._replace(cancelled=done.cancelled + step.cancelled, requested=done.requested + step.requested)
    return done
