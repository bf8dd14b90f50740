"""Commands on dedupe keys that stay taken after their job or batch has finished: list them, free one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pgworkd.cli.common import Dsn, Json, QueueOption, ask, ask_any
from pgworkd.cli.output import note, out, print_rows
from pgworkd.errors import UsageError
from pgworkd.process.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin

group = typer.Typer(help="List the dedupe keys that finished jobs and batches still keep; free one.")


@group.callback(invoke_without_command=True)
def keys(
    context: typer.Context,
    *,
    queue: QueueOption = None,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Only this key.")] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, metavar="N", help="Maximum number of keys.")
    ] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the dedupe keys that are still taken although their job or batch has finished, latest expiry first."""
    if context.invoked_subcommand is not None:
        if json or (queue, key, dsn) != (None,) * 3:
            raise UsageError(f"put options after: pgworkd keys {context.invoked_subcommand} ...")
        return
    columns = ("dedupe_key", "queue", "batch", "until", "ended_as", "id")
    print_rows(ask_any(dsn, lambda admin: admin.keys.find(queue, key, limit)), columns, json=json)


@group.command()
def free(
    name: Annotated[str, typer.Argument(metavar="QUEUE", show_default=False, help="The queue, or the batch's name.")],
    key: Annotated[str, typer.Argument(metavar="KEY", show_default=False, help="The dedupe key.")],
    *,
    batch: Annotated[bool, typer.Option("--batch", help="The key of batches of this name, in all queues.")] = (False),
    dsn: Dsn = None,
) -> int:
    """Free a key before it expires, so that the next job with it is inserted. The key of a live job is not freed."""

    async def operation(admin: Admin) -> str | None:
        if batch:
            freed = await admin.keys.free_of_batch(name, key)
            return None if freed else await admin.keys.refusal_of_batch(name, key)
        return None if await admin.keys.free(name, key) else await admin.keys.refusal(name, key)

    what = f"key {escaped(key)} of {'batch' if batch else 'queue'} {escaped(name)}"
    why_not = ask(dsn, operation)
    if why_not is None:
        out(f"{what} is free")
        return 0
    note(f"{what} is not freed: {why_not}")
    return 1
