"""The command stack: where in its code a running job is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from pgworkd.cli.common import Dsn, Json, ask, duration
from pgworkd.cli.output import as_json, cell, out
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.process.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.stacks import Stack

WAIT_S, WAIT_S_MAX = 30.0, 3600.0
LOOK_S = 0.1
"""How often to look whether the worker has answered."""


def stack(
    job_id: Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The id of a running job.")],
    *,
    wait_s: Annotated[float, duration("--wait-s", text="How long to wait for the answer of its worker.")] = WAIT_S,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Show where in its code a running job is: its worker answers within a heartbeat. Values are never shown."""

    if not 0 <= wait_s <= WAIT_S_MAX:
        raise UsageError(f"--wait-s {wait_s:g}: give 0 to {WAIT_S_MAX:g} seconds")

    async def question(admin: Admin) -> Stack:
        import anyio

        await admin.jobs.ask_stack(job_id)
        until = anyio.current_time() + wait_s
        while True:
            found = await admin.jobs.stack(job_id)
            if found is None or not found.awaited:
                break
            if anyio.current_time() >= until:
                says = f"worker {found.worker} (id {found.worker_id}) has not answered within {wait_s:g} s"
                raise PgworkdError(f"{says}: it does with its next heartbeat, unless it hangs as a whole; ask again")
            await anyio.sleep(LOOK_S)
        if found is None or found.stack is None:
            raise PgworkdError(f"job {job_id} ended before its worker answered")
        return found

    found = ask(dsn, question)
    if json:
        as_json(found._asdict())
        return
    out(escaped(f"job {job_id}, attempt {found.attempt}, worker {cell(found.worker)} (id {found.worker_id})"))
    out("\n".join(map(escaped, (found.stack or "").rstrip("\n").split("\n"))))
