"""Commands on the fleet: workers, stats, config show."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pgworkd.cli.common import (
    Dsn,
    Json,
    QueueOption,
    Yes,
    ask,
    ask_any,
    confirm,
    note_standby,
    note_unknown,
    settings_of,
)
from pgworkd.cli.output import as_json, note, out, print_rows, table
from pgworkd.core.validation import counted

if TYPE_CHECKING:
    from pgworkd.admin.admin import Admin
    from pgworkd.admin.queries import Stats, WorkerRow
    from pgworkd.core.origin import Origin

_WORKERS_NARROW = "id name state running heartbeat_age_s lease_left_s pid started_at version queues kind"


class Metric(StrEnum):
    """The metrics of `stats`."""

    DEPTH = "depth"
    SCHEDULED = "scheduled"
    RUNNING = "running"
    FAILED = "failed"
    DEAD = "dead"
    OLDEST_DUE_S = "oldest_due_s"


def workers(*, json: Json = False, dsn: Dsn = None) -> None:
    """List the workers and the state of their leases."""
    from pgworkd.admin.queries import WorkerRow

    async def question(admin: Admin) -> list[WorkerRow]:
        await note_standby(admin)
        return await admin.workers()

    print_rows(ask_any(dsn, question), WorkerRow._fields, _WORKERS_NARROW, json=json)


def stats(
    *,
    queue: QueueOption = None,
    metric: Annotated[Metric | None, typer.Option("--metric", help="Print only this number, for autoscalers.")] = None,
    json: Json = False,
    dsn: Dsn = None,
) -> None:
    """Count live jobs, of one queue or all. Depth: jobs that could run now (with --metric counted up to 100000)."""
    if metric is Metric.DEPTH and queue is not None:
        out(str(ask_any(dsn, partial(_depth, queue))))
        return
    found = ask_any(dsn, partial(_stats, queue))
    if metric is not None:
        value = getattr(found, metric.value)
        out(f"{value:.3f}" if isinstance(value, float) else str(value))
    elif json:
        as_json(found._asdict())
    else:
        table(found._fields, [found])


async def _depth(queue: str, admin: Admin) -> int:
    found = await admin.queues.depth(queue)
    if not found:
        await note_unknown(admin, queue)
    return found


async def _stats(queue: str | None, admin: Admin) -> Stats:
    found = await admin.stats(queue)
    if queue is not None and not any(found):
        await note_unknown(admin, queue)
    return found


def adopt(*, yes: Yes = False, dsn: Dsn = None) -> None:
    """Run the jobs of this database here from now on: after a restore, a move or an upgrade of the server.

    Workers refuse to run the jobs of a copy: a dump restored elsewhere, or
    under another name, or the database of another environment
    (PGWORKD_ENVIRONMENT). This ends that, and makes it this environment's.
    """
    settings = settings_of(dsn)

    async def seen(admin: Admin) -> tuple[Origin | None, Stats, int]:
        schedules = [row for row in await admin.schedules.find() if row.enabled]
        return await admin.origin(settings.environment), await admin.stats(), len(schedules)

    origin, live, schedules = ask(dsn, seen)
    to = "this database" if settings.environment is None else f"the environment {settings.environment!r}"
    if origin is not None and origin.is_here and origin.environment == settings.environment:
        out(f"its jobs belong to {to} already: nothing to do")
        return
    before = "nobody yet" if origin is None else str(origin)
    work = f"{counted(live.depth, 'job')} due, {live.scheduled} later, {live.running} running when it was copied"
    confirm(
        f"run the jobs of {settings.database} for {to}, which belong to {before}: {work}, "
        f"{counted(schedules, 'schedule')}",
        yes=yes,
    )
    ask(dsn, lambda admin: admin.adopt(settings.environment))
    out(f"its jobs belong to {to}, and run here from now on")


def config_show() -> None:
    """Show every setting, its value and its source."""
    from pgworkd.settings.config import load
    from pgworkd.settings.shown import describe

    settings = load()
    table(("setting", "value", "from"), describe(settings), whole=True)
    for line in settings.notes:
        note(line)
