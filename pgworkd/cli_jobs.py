"""Commands on jobs: put one in, look at them, run them again, end them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from .cli_ask import Dsn, Json, QueueArgument, QueueOption, Yes, ask, confirm
from .cli_text import as_json, cell, escaped, is_terminal, note, out, parsed, table
from .errors import PgworkdError, UsageError

if TYPE_CHECKING:
    from .admin import Admin
    from .admin_sql import Job

STDIN_BYTES_MAX = 1024 * 1024
_ONCE = 1000
"""Jobs per statement: what Admin takes at most."""
_INT4 = 2**31

_COLUMNS = ("id", "queue", "kind", "status", "priority", "attempts", "failures", "run_at", "finished_at", "error")
_COLUMNS_TERMINAL = ("id", "queue", "kind", "status", "attempts", "run_at", "error")

Kind = Annotated[str | None, typer.Option("--kind", metavar="NAME", help="Only jobs of this kind.")]
Ids = Annotated[list[UUID] | None, typer.Argument(metavar="ID", show_default=False, help="Job ids.")]


class Status(StrEnum):
    """The states of a job."""

    PENDING = "pending"
    RUNNING = "running"
    FAILED = "failed"
    DEAD = "dead"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    BLOCKED = "blocked"


def enqueue(
    queue: QueueArgument,
    payload: Annotated[
        str, typer.Argument(metavar="[PAYLOAD|-]", help="A JSON object; - reads it from standard input.")
    ] = "{}",
    *,
    kind: Annotated[str | None, typer.Option("--kind", help="What it is for; by default the queue's own.")] = None,
    priority: Annotated[int, typer.Option("--priority", min=-_INT4, max=_INT4 - 1, help="Higher first.")] = 0,
    delay_s: Annotated[float | None, typer.Option("--delay-s", help="Seconds until it is due.")] = None,
    run_at: Annotated[
        str | None, typer.Option("--run-at", metavar="INSTANT", help="Due then: 2027-01-31T07:00:00+01:00.")
    ] = None,
    dedupe_key: Annotated[
        str | None, typer.Option("--dedupe-key", help="No second live job of the queue has the same key.")
    ] = None,
    max_attempts: Annotated[int | None, typer.Option("--max-attempts", min=1, max=1000)] = None,
    dsn: Dsn = None,
) -> None:
    """Insert a job and print its id."""
    text = _stdin() if payload == "-" else payload
    at = None if run_at is None else _instant(run_at)

    async def question(admin: Admin) -> tuple[Any, bool]:
        made = await admin.enqueue(
            queue,
            text,
            kind=kind,
            priority=priority,
            delay_s=delay_s,
            run_at=at,
            dedupe_key=dedupe_key,
            max_attempts=max_attempts,
        )
        return made, sys.stderr.isatty() and not await admin.is_served(queue)

    made, unserved = ask(dsn, question)
    if not made.created:
        note(f"nothing inserted: this live job of queue {queue!r} has the key {dedupe_key!r} already")
    elif unserved:
        note(f"no worker serves queue {queue!r} now")
    out(str(made.id))


def jobs(
    *,
    queue: QueueOption = None,
    kind: Kind = None,
    status: Annotated[Status | None, typer.Option("--status", "-s", help="Only in this state.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000, help="At most so many.")] = 20,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """List the newest jobs, live and finished."""
    from .admin_sql import HISTORY_ROWS_MAX

    found = ask(dsn, lambda admin: admin.jobs(queue, kind, None if status is None else status.value, limit))
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
    found = ask(dsn, lambda admin: admin.job(job_id))
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


def retry(
    ids: Ids = None,
    *,
    dead: Annotated[bool, typer.Option("--dead", help="Dead jobs of --queue, the oldest first.")] = False,
    queue: QueueOption = None,
    kind: Kind = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=_ONCE, help="With --dead: at most so many.")] = 100,
    every: Annotated[bool, typer.Option("--all", help="All dead jobs, of all queues unless --queue says.")] = False,
    yes: Yes = False,
    dsn: Dsn = None,
) -> int:
    """Run dead jobs again with a fresh budget, or waiting retries now."""
    if ids:
        if dead or every or queue is not None or kind is not None:
            raise UsageError("give ids, or --dead with --queue or --all, not both")
        return ask(dsn, lambda admin: _retry_ids(admin, list(dict.fromkeys(ids))))
    if not every and not (dead and queue is not None):
        raise UsageError("say which: ids, --dead --queue NAME, or --all for every dead job")
    if every:
        confirm(f"retry all dead jobs{_of(queue, kind)}", yes=yes)

    async def act(admin: Admin, some: Sequence[UUID]) -> int:
        answer = await admin.retry(some)
        if answer.held_back:
            note(f"{len(answer.held_back)} jobs stay dead: live ones hold their dedupe keys")
        return len(answer.changed)

    count = ask(dsn, lambda admin: _each_dead(admin, queue, kind, None if every else limit, act))
    out(f"{count} jobs will run again")
    return 0


async def _retry_ids(admin: Admin, ids: list[UUID]) -> int:
    failures = 0
    for some in _chunks(ids):
        answer = await admin.retry(some)
        others = await admin.statuses(some)
        for job_id in some:
            if job_id in answer.changed:
                out(f"{job_id} will run again")
                continue
            failures += 1
            if job_id in answer.held_back:
                note(f"{job_id} stays dead: a live job holds its dedupe key")
            else:
                note(f"{job_id} {_state(others.get(job_id))}: only dead and failed jobs can run again")
    return 1 if failures else 0


def cancel(ids: Annotated[list[UUID], typer.Argument(metavar="ID", help="Job ids.")], *, dsn: Dsn = None) -> int:
    """End waiting jobs now, and have running ones ended by their workers."""

    async def question(admin: Admin) -> int:
        failures = 0
        for some in _chunks(list(dict.fromkeys(ids))):
            outcomes = await admin.cancel(some)
            others = await admin.statuses(some)
            for job_id in some:
                outcome = outcomes.get(job_id)
                if outcome is not None:
                    out(
                        f"{job_id} " + ("cancelled" if outcome == "cancelled" else "runs: its worker is told to end it")
                    )
                else:
                    failures += 1
                    note(f"{job_id} {_state(others.get(job_id))}")
        return 1 if failures else 0

    return ask(dsn, question)


def discard(
    ids: Ids = None,
    *,
    queue: QueueOption = None,
    kind: Kind = None,
    yes: Yes = False,
    dsn: Dsn = None,
) -> int:
    """Move dead jobs to the history, where they are forgotten in time."""
    if bool(ids) == (queue is not None) or (ids and kind is not None):
        raise UsageError("say which: ids, or --queue NAME for all of its dead jobs")
    if ids:
        return ask(dsn, lambda admin: _discard_ids(admin, list(dict.fromkeys(ids))))
    confirm(f"discard all dead jobs{_of(queue, kind)}", yes=yes)

    async def act(admin: Admin, some: Sequence[UUID]) -> int:
        return await admin.discard(some)

    count = ask(dsn, lambda admin: _each_dead(admin, queue, kind, None, act))
    out(f"{count} jobs discarded")
    return 0


async def _discard_ids(admin: Admin, ids: list[UUID]) -> int:
    discarded = 0
    for some in _chunks(ids):
        before = await admin.statuses(some)
        discarded += await admin.discard(some)
        for job_id in some:
            if before.get(job_id) != Status.DEAD:
                note(f"{job_id} {_state(before.get(job_id))}: only dead jobs can be discarded")
    out(f"{discarded} jobs discarded")
    return 0 if discarded == len(ids) else 1


async def _each_dead(
    admin: Admin,
    queue: str | None,
    kind: str | None,
    limit: int | None,
    act: Callable[[Admin, Sequence[UUID]], Awaitable[int]],
) -> int:
    """Acts on dead jobs, each seen once; the sum of what `act` answers."""
    done, last = 0, None
    while some := await admin.dead_ids(queue, kind, limit or _ONCE, last):
        done += await act(admin, some)
        last = some[-1]
        if limit is not None:
            break
    return done


def _stdin() -> str:
    data = b"" if sys.stdin is None else sys.stdin.buffer.read(STDIN_BYTES_MAX + 1)
    if len(data) > STDIN_BYTES_MAX:
        raise UsageError(f"standard input holds more than the {STDIN_BYTES_MAX:,} bytes of a payload")
    if not data.strip():
        raise UsageError("standard input is empty: give a JSON object, for example {}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def _instant(text: str) -> datetime:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--run-at {text[:40]!r}: give an instant like 2027-01-31T07:00:00+01:00") from None
    if instant.utcoffset() is None:
        raise UsageError(f"--run-at {text[:40]!r} has no time zone: add Z or an offset like +01:00")
    return instant


def _chunks(ids: list[UUID]) -> list[list[UUID]]:
    return [ids[at : at + _ONCE] for at in range(0, len(ids), _ONCE)]


def _state(status: str | None) -> str:
    return "is unknown (or its history is forgotten)" if status is None else f"is {status}"


def _of(queue: str | None, kind: str | None) -> str:
    of_queue = " of all queues" if queue is None else f" of queue {queue!r}"
    return of_queue + ("" if kind is None else f" and kind {kind!r}")
