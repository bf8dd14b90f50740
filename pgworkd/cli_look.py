"""Commands on the fleet: queues and their pauses, workers, schedules, numbers, settings."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_ask import Dsn, Json, QueueArgument, QueueOption, ask
from .cli_text import as_json, escaped, note, out, table
from .errors import UsageError

if TYPE_CHECKING:
    from .admin import Admin


class Metric(StrEnum):
    """The numbers of `stats`."""

    DEPTH = "depth"
    RUNNING = "running"
    DEAD = "dead"
    OLDEST_DUE_S = "oldest_due_s"


def queues(*, json: Json = False, dsn: Dsn = None) -> None:
    """List the queues: what is due, runs, failed, is dead, and who serves them."""
    columns = ("queue", "due", "scheduled", "running", "failed", "dead", "oldest_due_s", "workers", "slots", "paused")
    _show(ask(dsn, lambda admin: admin.queues()), columns, json=json)


def pause(
    queue: QueueArgument,
    *,
    for_s: Annotated[float | None, typer.Option("--for-s", help="Seconds; without it until resumed.")] = None,
    dsn: Dsn = None,
) -> None:
    """Start no more jobs of a queue; what runs goes on."""

    async def question(admin: Admin) -> None:
        if not await admin.is_known(queue) and (hint := _meant(queue, await admin.known_queues())):
            raise UsageError(f"no queue {queue!r} is known{hint}")
        await admin.pause(queue, for_s)

    ask(dsn, question)
    out(f"queue {escaped(queue)} is paused " + ("until resumed" if for_s is None else f"for {for_s:g} s"))


def resume(queue: QueueArgument, *, dsn: Dsn = None) -> None:
    """End a queue's pause."""

    async def question(admin: Admin) -> bool:
        if await admin.resume(queue):
            return True
        if not await admin.is_known(queue):
            raise UsageError(f"no queue {queue!r} is known{_meant(queue, await admin.known_queues())}")
        return False

    was_paused = ask(dsn, question)
    out(f"queue {escaped(queue)} " + ("is resumed" if was_paused else "was not paused"))


def workers(*, json: Json = False, dsn: Dsn = None) -> None:
    """List the workers and how fresh their leases are."""
    columns = ("id", "name", "pid", "version", "state", "started_at", "silent_s", "lease_left_s", "running", "queues")
    _show(ask(dsn, lambda admin: admin.workers()), columns, json=json)


def schedules(*, json: Json = False, dsn: Dsn = None) -> None:
    """List the recurring jobs: the rule, the next occurrence, and why there is none."""
    rows = ask(dsn, lambda admin: admin.schedules())
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


def stats(
    *,
    queue: QueueOption = None,
    metric: Annotated[
        Metric | None, typer.Option("--metric", help="Print this number and nothing else, for autoscalers.")
    ] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Count live jobs, of one queue or all; depth is what could run now."""
    found = ask(dsn, lambda admin: admin.stats(queue))
    if metric is not None:
        value = getattr(found, metric.value)
        out(f"{value:.3f}" if isinstance(value, float) else str(value))
    elif json:
        as_json(found._asdict())
    else:
        table(found._fields, [found])


def config_show() -> None:
    """Show every setting, and where its value comes from."""
    from .config import describe, load

    settings = load()
    table(("setting", "value", "from"), describe(settings))
    for line in settings.notes:
        note(line)


def _show(rows: Sequence[Any], columns: Sequence[str], *, json: bool) -> None:
    if json:
        as_json([row._asdict() for row in rows])
    else:
        table(columns, [[getattr(row, name) for name in columns] for row in rows])


def _meant(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.6)
    return f": did you mean {close[0]!r}?" if close else ""
