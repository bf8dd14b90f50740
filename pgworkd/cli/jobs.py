"""Commands on jobs: put one in, look at them."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from pgworkd.cli.common import (
    Dsn,
    Json,
    KindOption,
    QueueArgument,
    QueueOption,
    Status,
    ask,
    instant_of,
    known,
    look,
    stdin_text,
)
from pgworkd.cli.output import as_json, cell, is_terminal, note, out, parsed, table
from pgworkd.errors import PgworkdError, UsageError
from pgworkd.words.redaction import escaped

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.queries import Job, Jobs

_INT4 = 2**31

DedupeFor = Annotated[
    float | None, typer.Option("--dedupe-for-s", help="The dedupe key stays taken for so many seconds from now.")
]
SerializeKey = Annotated[
    str | None, typer.Option("--serialize-key", help="Jobs of the queue with the same key run one at a time, in order.")
]
LimitKey = Annotated[str | None, typer.Option("--limit-key", help="What the queue's limits per key count by.")]


class OnRetry(StrEnum):
    """What a job does with its serialize key while it waits for its retry."""

    HOLD = "hold"
    YIELD = "yield"


class OnDuplicate(StrEnum):
    """What to do where the dedupe key is taken."""

    RAISE = "raise"
    SKIP = "skip"
    REPLACE = "replace"
    RESCHEDULE = "reschedule"


_COLUMNS = ("id", "queue", "kind", "status", "priority", "attempts", "failures", "run_at", "finished_at", "error")
_COLUMNS_TERMINAL = ("id", "queue", "kind", "status", "attempts", "run_at", "error")


def enqueue(
    queue: QueueArgument,
    payload: Annotated[
        str, typer.Argument(metavar="[PAYLOAD|-]", help="A JSON object; - reads it from standard input.")
    ] = "{}",
    *,
    kind: Annotated[str | None, typer.Option("--kind", help="What it is for; by default the queue's own.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=-_INT4, max=_INT4 - 1, help="Higher first; 0 unless given.")
    ] = None,
    delay_s: Annotated[float | None, typer.Option("--delay-s", help="Seconds until it is due.")] = None,
    run_at: Annotated[
        str | None, typer.Option("--run-at", metavar="INSTANT", help="Due then: 2027-01-31T07:00:00+01:00.")
    ] = None,
    dedupe_key: Annotated[
        str | None, typer.Option("--dedupe-key", help="No second live job of the queue has the same key.")
    ] = None,
    dedupe_for_s: DedupeFor = None,
    on_duplicate: Annotated[
        OnDuplicate | None, typer.Option("--on-duplicate", help="Where the dedupe key is taken; by default, skip.")
    ] = None,
    serialize_key: SerializeKey = None,
    on_retry: Annotated[OnRetry, typer.Option("--on-retry", help="Keep the serialize key meanwhile?")] = OnRetry.HOLD,
    limit_key: LimitKey = None,
    max_attempts: Annotated[int | None, typer.Option("--max-attempts", min=1, max=1000)] = None,
    dsn: Dsn = None,
) -> None:
    """Insert a job and print its id, or that of the job that holds its dedupe key."""
    if on_duplicate is not None and dedupe_key is None:
        raise UsageError("--on-duplicate needs a --dedupe-key: without one there are no duplicates")
    text = stdin_text() if payload == "-" else payload
    at = None if run_at is None else instant_of(run_at)

    async def question(admin: Admin) -> tuple[Any, bool]:
        made = await admin.enqueue(
            queue,
            text,
            kind=kind,
            priority=priority,
            delay_s=delay_s,
            run_at=at,
            dedupe_key=dedupe_key,
            dedupe_for_s=dedupe_for_s,
            serialize_key=serialize_key,
            limit_key=limit_key,
            on_retry=on_retry.value,
            on_duplicate=(on_duplicate or OnDuplicate.SKIP).value,
            max_attempts=max_attempts,
        )
        return made, sys.stderr.isatty() and not await admin.is_served(queue)

    made, unserved = ask(dsn, question)
    if not made.created:
        done = f"{on_duplicate}d" if made.changed else "left as it is"
        note(f"nothing inserted: this job of queue {queue!r} holds the key {dedupe_key!r}, it is {done}")
    elif unserved:
        note(f"no worker serves queue {queue!r} now")
    out(str(made.id))


def jobs(
    *,
    queue: QueueOption = None,
    kind: KindOption = None,
    status: Annotated[Status | None, typer.Option("--status", "-s", help="Only in this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the newest jobs, live and finished."""
    from pgworkd.admin.queries import HISTORY_ROWS_MAX

    async def question(admin: Admin) -> Jobs:
        found = await admin.jobs(queue, kind, None if status is None else status.value, limit)
        if queue is not None and not found.rows and not (await admin.jobs(queue, limit=1)).rows:
            await known(admin, queue)
        return found

    found = look(dsn, question)
    if json:
        as_json([row._asdict() for row in found.rows])
    else:
        columns = _COLUMNS_TERMINAL if is_terminal() else _COLUMNS
        table(columns, [[getattr(row, name) for name in columns] for row in found.rows])
    if not found.complete:
        note(f"only the newest {HISTORY_ROWS_MAX:,} finished jobs were looked at")


def job(
    job_id: Annotated[UUID, typer.Argument(metavar="ID", show_default=False, help="The job's id.")],
    *,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Show one job whole, with its payload, result and errors."""
    found = look(dsn, lambda admin: admin.job(job_id))
    if found is None:
        raise PgworkdError(f"no job has the id {job_id}: unknown, or its history is forgotten")
    facts = found._asdict() | {name: parsed(getattr(found, name)) for name in ("payload", "result", "meta", "errors")}
    if json:
        as_json(facts)
    else:
        _print_job(found, facts)


def _print_job(found: Job, facts: dict[str, Any]) -> None:
    import json

    lines = []
    for name, value in facts.items():
        if value is None or name in ("errors", "payload", "result", "meta"):
            continue
        lines.append(f"{name + ':':<15}{cell(value)}")
    documents = [name for name in ("payload", "meta", "result") if getattr(found, name) is not None]
    # ASCII, so escaped by JSON itself.
    lines += [f"{name + ':':<15}{json.dumps(facts[name], indent=2, ensure_ascii=True)}" for name in documents]
    for entry in facts["errors"] if isinstance(facts["errors"], list) else []:
        known = entry if isinstance(entry, dict) else {"message": entry}
        told = " ".join(f"{name} {known[name]}" for name in ("attempt", "at", "worker") if name in known)
        lines += ["", escaped(told), escaped(f"  {known.get('type', '')}: {known.get('message', '')}")]
        lines += [f"    {escaped(line)}" for line in str(known.get("traceback") or "").splitlines()]
    out("\n".join(lines))
